"""No module uses a `_private` name of another module; where some still do, their number only goes down.

A use is an underscored name that is imported from another module, or an underscored attribute that the module itself
does not define: neither on a class nor as a variable. An attribute that a base class in another module defines counts
as well. Run this file to print the uses of a folder: ``python tests/house/test_private_names.py agents``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"

CEILINGS = {"host": 1, "runtime": 223, "testing": 71}
"""Uses that are left, by folder; a folder that is not named has none. Lower a number with the last use that goes."""

PUBLIC = frozenset({"_asdict", "_fields", "_make", "_replace"})
"""Names that the standard library documents for use in spite of their underscore: those of named tuples."""

FOLDERS = sorted({path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")})


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "_" and not name.endswith("__") and name not in PUBLIC


def defined_names(tree: ast.Module) -> set[str]:
    """The underscored names that the module defines: variables, functions, classes, and attributes of its classes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                names.add(name)
                names.update(slots_of(node))
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                names.add(name)
            case _:
                pass
    return {name for name in names if is_private(name)}


def slots_of(definition: ast.ClassDef) -> Iterator[str]:
    for node in definition.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__slots__"]:
            yield from (str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant))


def foreign_uses(path: Path) -> Iterator[str]:
    """Each use of another module's private name, as ``file:line name``."""
    tree = ast.parse(path.read_text("utf-8"))
    own = defined_names(tree)
    where = path.relative_to(SOURCE)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "holdfast":
                parts = [*module.split("."), *(alias.name for alias in node.names)]
                yield from (f"{where}:{node.lineno} {part}" for part in parts if is_private(part))
            case ast.Attribute(attr=attr) if is_private(attr) and attr not in own and not is_of_a_library(node):
                yield f"{where}:{node.lineno} {ast.unparse(node)}"
            case _:
                pass


def is_of_a_library(node: ast.Attribute) -> bool:
    """Whether it is an attribute of the standard library itself, such as `sys._getframe`."""
    return isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names


def uses_in(folder: str) -> list[str]:
    found = SOURCE / folder
    paths = sorted(found.rglob("*.py")) if found.is_dir() else [found.with_suffix(".py")]
    return [use for path in paths for use in foreign_uses(path)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_private_names_of_other_modules_are_used_no_more_than_before(folder: str) -> None:
    uses = uses_in(folder)
    assert len(uses) <= CEILINGS.get(folder, 0), "\n".join(uses)


def test_a_private_name_of_another_module_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    module = tmp_path / "module.py"
    module.write_text(
        "import sys\n"
        "from holdfast.runtime._hidden import thing\n"
        "from holdfast.runtime.scope import _Current, Scope\n"
        "class One(Scope):\n"
        "    __slots__ = ('_slot',)\n"
        "    def __init__(self, other):\n"
        "        self._own = other._own, other._slot, other._foreign\n"
        "        self._inherited()\n"
        "        sys._getframe()\n"
        "        other.__class__, other._replace()\n"
    )
    assert list(foreign_uses(module)) == [
        "module.py:2 _hidden",
        "module.py:3 _Current",
        "module.py:7 other._foreign",
        "module.py:8 self._inherited",
    ]


if __name__ == "__main__":
    for name in sys.argv[1:] or FOLDERS:
        found = uses_in(name)
        print(*found, f"{name}: {len(found)}", sep="\n")
