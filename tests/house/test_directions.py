"""The direction of knowledge: no circles of modules, types included, and no private names of other modules."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

from tests.house.source_graph import (
    SOURCE,
    STDLIB_INTERNALS,
    circles,
    files,
    folder_of,
    imports,
    modules,
    private_uses,
)

FOLDERS = sorted({folder_of(name) for name in files()} - {""})


@pytest.fixture(scope="module")
def parsed() -> dict[str, ast.Module]:
    """The package's modules, parsed only where these tests run: each process of a run collects them."""
    return modules()


def test_no_module_is_in_a_circle(parsed: dict[str, ast.Module]) -> None:
    assert circles(imports(parsed)) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_uses_private_names_of_another_one(folder: str, parsed: dict[str, ast.Module]) -> None:
    assert [
        f"{name}:{line} {used}"
        for name, tree in parsed.items()
        if folder_of(name) == folder and name not in STDLIB_INTERNALS
        for line, used in private_uses(tree)
    ] == []


@pytest.mark.parametrize("module", STDLIB_INTERNALS)
def test_private_names_of_the_standard_library_are_used_where_they_are_listed(
    module: str, parsed: dict[str, ast.Module]
) -> None:
    listed: dict[str, tuple[str, ...]] = importlib.import_module(module).PRIVATE_NAMES
    names = {name for names in listed.values() for name in names}
    assert {owner.partition(".")[0] for owner in listed} <= sys.stdlib_module_names
    assert [f"{line} {used}" for line, used in private_uses(parsed[module]) if used not in names] == []


def test_a_host_knows_what_guards_its_files_and_programs_and_no_toolset(parsed: dict[str, ast.Module]) -> None:
    known = {one for name, used in imports(parsed).items() if folder_of(name) == "host" for one in used}
    assert {one for one in known if folder_of(one) == "tools"} == {
        "holdfast.tools.files.private_paths",
        "holdfast.tools.files.workspace_guard",
        "holdfast.tools.sandbox.choice",
        "holdfast.tools.sandbox.proxy.link",
        "holdfast.tools.walled",
    }


def test_a_circle_is_seen_through_types_and_functions(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.b import B",
        "b": "def late():\n    import package.c",
        "c": "from package import a",
        "d": "import package.a",
    }.items():
        (package / f"{name}.py").write_text(text)
    assert circles(imports(modules(package))) == [["package.a", "package.b", "package.c"]]


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("def f(run): return run._scope", [(1, "_scope")]),
        ("from holdfast.storage.sqlite import _Reader", [(1, "_Reader")]),
        ("class A:\n    def __init__(self): self._n = 1\n    def __eq__(self, other): return self._n == other._n", []),
        ("import sys\nsys._current_frames()", []),
        ("import sys\nsys._debugmallocstats()", [(2, "_debugmallocstats")]),
        ("import asyncio\nasyncio._get_running_loop()", []),
        ("from asyncio import events\nevents._get_running_loop()\nevents._lock", [(3, "_lock")]),
        ("from queue import deque\nfrom threading import _time", [(2, "_time")]),
        ("from holdfast.runtime import thread_pool as threads\nclass _Pool: pass\nthreads._Pool", [(3, "_Pool")]),
        ("def f(value): return value._replace(a=1)", []),
        ("def f(value): return getattr(value, '_lock', None)", [(1, "_lock")]),
        ("class A:\n    __slots__ = ('_n',)\ndef f(a): return a._n", []),
        ("NAMES = ('_n',)\ndef f(a): return a._n", [(2, "_n")]),
    ],
)
def test_a_use_of_a_private_name_is_seen(source: str, uses: list[tuple[int, str]]) -> None:
    assert private_uses(ast.parse(source)) == uses


def test_no_module_is_longer_than_600_lines() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > 600} == {}
