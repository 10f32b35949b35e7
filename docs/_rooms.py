"""The picture of the rooms: the packages of Holdfast and which imports which, read from the source and drawn as SVG."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from _diagrams import INK, LINE, OPEN, PAPER

import holdfast

SOURCE = Path(holdfast.__file__).parent
WIDTH, HEIGHT, ASIDE, BETWEEN = 190, 78, 22, 44
WAYPOINT = 26
SWEEPS = 8
FOUNDATION = frozenset({"errors"})
"""Packages that all rooms use, shown with the modules at the bottom."""
Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class Room:
    """A package: its purpose, as its docstring says, and the packages that it imports, types included."""

    purpose: str
    imports: frozenset[str]


def read_rooms() -> dict[str, Room]:
    """Return all packages by name."""
    names = sorted({path.parent.name for path in SOURCE.glob("*/__init__.py")} - FOUNDATION)
    rooms = {}
    for name in names:
        docstring = ast.get_docstring(ast.parse((SOURCE / name / "__init__.py").read_text("utf-8"))) or ""
        imported = {found for path in (SOURCE / name).rglob("*.py") for found in _imports_of(path)}
        rooms[name] = Room(
            purpose=docstring.split("\n")[0].partition(". ")[0].rstrip(".").replace("`", ""),
            imports=frozenset(imported & set(names) - {name}),
        )
    return rooms


def read_foundation() -> list[str]:
    """Return the modules and packages below the rooms."""
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__", "events"}
    return sorted(modules | FOUNDATION)


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "holdfast":
            modules = [f"holdfast.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        yield from (module.split(".")[1] for module in modules if module.startswith("holdfast."))


def levels(graph: Graph) -> dict[str, int]:
    """Return the row of each room, 0 at the top: below all rooms that import it. Raises `ValueError` for a circle."""
    found: dict[str, int] = {}
    while len(found) < len(graph):
        ready = [
            name
            for name in graph
            if name not in found and all(name not in graph[other] or other in found for other in graph)
        ]
        if not ready:
            raise ValueError(f"rooms import each other in a circle: {sorted(set(graph) - set(found))}")
        for name in ready:
            found[name] = 1 + max((found[other] for other in graph if name in graph[other]), default=-1)
    return found


def direct(graph: Graph) -> dict[str, list[str]]:
    """Return the imports that no longer path of imports implies."""

    def reached(start: str) -> set[str]:
        return {start}.union(*(reached(below) for below in graph[start]))

    return {
        name: sorted(to for to in below if not any(to in reached(other) for other in below - {to}))
        for name, below in graph.items()
    }


def picture() -> str:
    """Return the picture of all rooms as SVG."""
    rooms = read_rooms()
    graph: Graph = {name: room.imports for name, room in rooms.items()}
    row_of = levels(graph)
    paths = [_path(name, to, row_of) for name, below in direct(graph).items() for to in below]
    rows = _arranged(row_of, paths)
    spans = [sum(_width(name) for name in row) + ASIDE * (len(row) - 1) for row in rows]
    wide = max(spans) + 2 * ASIDE
    middle: dict[str, tuple[float, float]] = {}
    for n, row in enumerate(rows):
        x = (wide - spans[n]) / 2
        for name in row:
            middle[name] = (x + _width(name) / 2, ASIDE + n * (HEIGHT + BETWEEN) + HEIGHT / 2)
            x += _width(name) + ASIDE
    base = ASIDE + len(rows) * (HEIGHT + BETWEEN)
    foundation = textwrap.wrap(" · ".join(read_foundation()), round(wide / 8))
    high = base + 44 + 16 * len(foundation)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
        ' font-family="sans-serif" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
        f' orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{wide}" height="{high}" rx="8" fill="{PAPER}"/>',
    ]
    parts += [_arrow(path, middle) for path in paths]
    parts += [line for name, room in rooms.items() for line in _box(name, room.purpose, middle[name])]
    parts += [
        f'<rect x="{ASIDE}" y="{base - 12}" width="{wide - 2 * ASIDE}" height="{36 + 16 * len(foundation)}" rx="8"'
        f' fill="{PAPER}" stroke="{LINE}" stroke-dasharray="4 3"/>',
        _text(wide / 2, base + 6, "for every room", weight=600),
        *(_text(wide / 2, base + 22 + 16 * n, line) for n, line in enumerate(foundation)),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _path(start: str, end: str, row_of: Mapping[str, int]) -> list[str]:
    """Return an arrow as the places that it passes: a waypoint in each row between its ends."""
    between = range(row_of[start] + 1, row_of[end])
    return [start, *(f"{start}>{end}>{row}" for row in between), end]


def _arranged(row_of: Mapping[str, int], paths: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows, each in an order that keeps connected places near each other."""
    rows: list[list[str]] = [[] for _ in range(1 + max(row_of.values()))]
    for name, n in row_of.items():
        rows[n].append(name)
    for path in paths:
        for n, place in enumerate(path[1:-1], row_of[path[0]] + 1):
            rows[n].append(place)
    links = [pair for path in paths for pair in pairwise(path)]
    for sweep in range(SWEEPS):
        up = sweep % 2 == 0
        for n in range(1, len(rows)) if up else range(len(rows) - 2, -1, -1):
            beside = rows[n - 1 if up else n + 1]
            at = {name: (place + 0.5) / len(beside) for place, name in enumerate(beside)}
            own = {name: (place + 0.5) / len(rows[n]) for place, name in enumerate(rows[n])}

            def weight(name: str, at: Mapping[str, float] = at, own: Mapping[str, float] = own) -> float:
                near = [at[b] for a, b in links if a == name and b in at] + [
                    at[a] for a, b in links if b == name and a in at
                ]
                return sum(near) / len(near) if near else own[name]

            rows[n].sort(key=weight)
    return rows


def _width(place: str) -> int:
    return WAYPOINT if ">" in place else WIDTH


def _arrow(path: Sequence[str], middle: Mapping[str, tuple[float, float]]) -> str:
    x, y = middle[path[0]]
    drawn = f"M{x:.0f} {y + HEIGHT / 2:.0f}"
    for place in path[1:]:
        x, y = middle[place]
        drawn += f"L{x:.0f} {y - HEIGHT / 2:.0f}"
        if ">" in place:
            drawn += f"L{x:.0f} {y + HEIGHT / 2:.0f}"
    return f'<path d="{drawn}" fill="none" stroke="{LINE}" stroke-width="1.3" marker-end="url(#tip)"/>'


def _box(name: str, purpose: str, middle: tuple[float, float]) -> Iterator[str]:
    x, y = middle
    yield (
        f'<rect x="{x - WIDTH / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="8"'
        f' fill="{OPEN}" stroke="{INK}"/>'
    )
    yield _text(x, y - HEIGHT / 2 + 18, name, weight=600)
    for n, line in enumerate(textwrap.wrap(purpose, 31)[:4]):
        yield _text(x, y - HEIGHT / 2 + 34 + 13 * n, line)


def _text(x: float, y: float, text: str, *, weight: int = 400) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" fill="{INK}" font-weight="{weight}">{escape(text)}</text>'
    )
