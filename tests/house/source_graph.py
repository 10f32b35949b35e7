"""What modules know of each other, read from their source: imports, types included, and private names."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["STDLIB_INTERNALS", "circles", "files", "folder_of", "imports", "modules", "private_uses"]

STDLIB_INTERNALS = (
    "holdfast.runtime.adoption.executor_internals",
    "holdfast.runtime.adoption.multiprocessing_internals",
    "holdfast.testing.asyncio_internals",
    "holdfast.testing.threading_internals",
)
"""The modules that may use private names of the standard library; each lists its own in ``PRIVATE_NAMES``."""

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"


def modules(source: Path = SOURCE) -> dict[str, ast.Module]:
    """Return the parsed modules of a package, by dotted name; a package is named like its folder."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in files(source).items()}


def files(source: Path = SOURCE) -> dict[str, Path]:
    """Return the files of a package's modules, by dotted name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = (source.name, *path.relative_to(source).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def folder_of(module: str) -> str:
    """Return the top-level folder, or file, of a module's package."""
    return module.split(".")[1] if "." in module else ""


def imports(parsed: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return the modules of the package that each module imports: anywhere, and for types only, too."""
    return {name: {one for one in _imported(tree, parsed) if one != name} for name, tree in parsed.items()}


def _imported(tree: ast.Module, parsed: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names if one.name in parsed)
            case ast.ImportFrom(module=str() as module, names=names, level=0) if module in parsed:
                for one in names:
                    below = f"{module}.{one.name}"
                    yield below if below in parsed else module


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that all import each other, directly or not; each module is in at most one."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        stack = [(start, iter(sorted(graph[start])))] if start not in seen else []
        seen.add(start)
        while stack:
            name, rest = stack[-1]
            following = next((one for one in rest if one in graph and one not in seen), None)
            if following is None:
                order.append(name)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(sorted(graph[following]))))
    importers: dict[str, set[str]] = {name: set() for name in graph}
    for name, known in graph.items():
        for one in known & graph.keys():
            importers[one].add(name)
    groups: list[list[str]] = []
    placed: set[str] = set()
    for start in reversed(order):
        group, todo = [], [start]
        while todo:
            name = todo.pop()
            if name not in placed:
                placed.add(name)
                group.append(name)
                todo += importers[name]
        if len(group) > 1:
            groups.append(sorted(group))
    return sorted(groups)


def private_uses(tree: ast.Module) -> list[tuple[int, str]]:
    """Return line and name of each use of a private name that the module itself does not define.

    A name with an underscore is public where its module lists it in ``__all__`` (`asyncio._get_running_loop`), and
    where Python's documentation describes it (`sys._getframe`, the methods of named tuples).
    """
    own = set(_defined(tree))
    imported = dict(_imported_names(tree))
    uses: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in imported:
                if not _is_exported(imported[owner], name):
                    uses.append((node.lineno, name))
            case ast.Attribute(attr=name) if name not in own:
                uses.append((node.lineno, name))
            case ast.ImportFrom(module=str() as module, names=names):
                uses += [(node.lineno, one.name) for one in names if not _is_exported(module, one.name)]
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr" | "hasattr"), args=[_, named, *_]):
                match named:
                    case ast.Constant(value=str() as name) if name not in own:
                        uses.append((node.lineno, name))
    return sorted((line, name) for line, name in uses if _is_private(name))


DOCUMENTED = frozenset(
    {"_asdict", "_current_frames", "_exit", "_field_defaults", "_fields", "_getframe", "_make", "_replace"}
)
"""Names of the standard library that begin with an underscore and are described in Python's documentation."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def _is_exported(module: str, name: str) -> bool:
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return False
    return name in getattr(importlib.import_module(module), "__all__", ())


def _imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, and the module that it stands for or comes from."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((one.asname or one.name.partition(".")[0], one.name) for one in names)
            case ast.ImportFrom(module=str() as module, names=names):
                yield from ((one.asname or one.name, module) for one in names)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield names that the module binds: functions, classes, variables, attributes of self, and slots."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=slots):
                yield from (
                    one.value for one in ast.walk(slots) if isinstance(one, ast.Constant) and isinstance(one.value, str)
                )
