"""No modules import each other in a circle, not for types either; where some still do, their number only goes down."""

from __future__ import annotations

from collections.abc import Iterator

import grimp
import pytest

CEILINGS = {"testing": 2}
"""Modules that are part of a circle, by folder; a folder that is not named has none."""


def circles(imported: dict[str, set[str]]) -> Iterator[set[str]]:
    """The groups of modules that reach each other by imports: Tarjan's strongly connected components."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> Iterator[set[str]]:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in imported[module]:
            if other not in order:
                yield from visit(other)
            if other in path:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            group = set(path[path.index(module) :])
            del path[path.index(module) :]
            if len(group) > 1:
                yield group

    for module in imported:
        if module not in order:
            yield from visit(module)


@pytest.fixture(scope="module")
def in_circles() -> dict[str, list[str]]:
    """The modules that are part of a circle, by folder."""
    graph = grimp.build_graph("holdfast", exclude_type_checking_imports=False, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}
    found: dict[str, list[str]] = {}
    for group in circles(imported):
        for module in sorted(group):
            found.setdefault(module.split(".")[1] if "." in module else "holdfast", []).append(module)
    return found


def test_no_more_modules_are_in_import_circles_than_before(in_circles: dict[str, list[str]]) -> None:
    too_many = {folder: found for folder, found in in_circles.items() if len(found) > CEILINGS.get(folder, 0)}
    assert not too_many


def test_a_circle_is_found() -> None:
    imported = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}, "f": {"g"}, "g": {"f"}}
    assert sorted(map(sorted, circles(imported))) == [["a", "b", "c"], ["f", "g"]]
