"""Names of a package that are loaded on first use."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "lazy_example").mkdir()
    (tmp_path / "lazy_example" / "__init__.py").write_text(
        "from holdfast.lazy import lazy_names\n"
        "__getattr__, __dir__ = lazy_names(__name__, {'inner': ('first', 'second')})\n"
    )
    (tmp_path / "lazy_example" / "inner.py").write_text("first, second = object(), object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("lazy_example")
    for name in ("lazy_example", "lazy_example.inner"):
        sys.modules.pop(name, None)


def test_module_is_imported_when_its_name_is_first_used(package: ModuleType) -> None:
    assert "lazy_example.inner" not in sys.modules
    assert package.first is sys.modules["lazy_example.inner"].first


def test_name_is_an_ordinary_attribute_after_its_first_use(package: ModuleType) -> None:
    assert package.first is vars(package)["first"]
    assert "second" not in vars(package)


def test_unknown_name_is_an_attribute_error_that_names_the_package(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'third'"):
        package.third


def test_error_for_a_name_that_another_module_has_names_the_module() -> None:
    with pytest.raises(AttributeError, match=r"'RunInterrupted'; it is in 'holdfast\.errors'"):
        holdfast.RunInterrupted  # type: ignore[attr-defined]


def test_import_of_a_submodule_imports_no_other() -> None:
    code = "import sys; from holdfast import old_names; sys.exit('holdfast.errors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dir_lists_the_names_before_they_are_loaded(package: ModuleType) -> None:
    assert {"first", "second", "__name__"} <= set(dir(package))
    assert "lazy_example.inner" not in sys.modules


@pytest.mark.parametrize("name", ["holdfast", "holdfast.cli", "holdfast.runtime", "holdfast.testing", "holdfast.tools"])
def test_dir_lists_the_public_names_and_no_others(name: str) -> None:
    package = importlib.import_module(name)
    assert {shown for shown in dir(package) if not shown.startswith("__")} == set(package.__all__)
    assert "__doc__" in dir(package)


def test_packages_load_lazily_in_one_way_only() -> None:
    own = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
            for node in ast.parse(path.read_text("utf-8")).body
        )
    ]
    assert own == []
