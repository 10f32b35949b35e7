"""The direction of knowledge: no circles of modules, types included, and no private names of other modules."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.house.source_graph import circles, folder_of, imports, modules, private_uses

PARSED = modules()
FOLDERS = sorted({folder_of(name) for name in PARSED} - {""})

IN_CIRCLES = {"testing": 2}
"""Number of modules of a folder that may be in a circle, with modules of any folder. It may only go down."""
PRIVATE_USES = {"protocol": 1, "runtime": 2, "server": 1, "storage": 1, "testing": 85, "tools": 1}
"""Number of private names of other modules that a folder's modules may use. It may only go down."""


def test_no_module_joins_a_circle() -> None:
    found = circles(imports(PARSED))
    assert Counter(folder_of(name) for group in found for name in group) <= Counter(IN_CIRCLES), found


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_of_a_folder_starts_to_use_private_names_of_another_module(folder: str) -> None:
    found = [
        f"{name}:{line} {used}"
        for name, tree in PARSED.items()
        if folder_of(name) == folder
        for line, used in private_uses(tree)
    ]
    assert len(found) <= PRIVATE_USES.get(folder, 0), found


def test_a_host_knows_what_guards_its_files_and_no_toolset() -> None:
    known = {one for name, used in imports(PARSED).items() if folder_of(name) == "host" for one in used}
    assert {one for one in known if folder_of(one) == "tools"} == {
        "holdfast.tools.files.private_paths",
        "holdfast.tools.files.workspace_guard",
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
    ],
)
def test_a_use_of_a_private_name_is_seen(source: str, uses: list[tuple[int, str]]) -> None:
    assert private_uses(ast.parse(source)) == uses
