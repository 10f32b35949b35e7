"""State diagrams, drawn from a transition table as SVG. A state without a position is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 110, 34
INK, PAPER, LINE, FINAL, OPEN = "#1f2933", "#ffffff", "#52606d", "#e3e8ee", "#dbeafe"


@dataclass(frozen=True, kw_only=True)
class StateDiagram:
    """A diagram of a state table.

    Parameters:
        table: (state, input) to state.
        places: the middle of each state's box.
        size: of the sheet.
        final: states that are never left.
    """

    table: Mapping[tuple[str, str], str]
    places: Mapping[str, tuple[int, int]]
    size: tuple[int, int]
    final: Set[str]

    def svg(self) -> str:
        """Return the drawing as SVG."""
        states = {state for state, _ in self.table} | set(self.table.values())
        if states != set(self.places):
            raise ValueError(f"states without a place, or places without a state: {states ^ set(self.places)}")
        labels: dict[tuple[str, str], list[str]] = {}
        for (state, event), target in self.table.items():
            labels.setdefault((state, target), []).append(event)
        width, height = self.size
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="12">',
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
            f' orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]
        for (state, target), events in labels.items():
            text = ", ".join(events)
            parts += self._loop(state, text) if state == target else self._edge(state, target, text, labels)
        for state, (x, y) in self.places.items():
            fill = FINAL if state in self.final else OPEN
            parts.append(
                f'<rect x="{x - WIDTH // 2}" y="{y - HEIGHT // 2}" width="{WIDTH}" height="{HEIGHT}" rx="8"'
                f' fill="{fill}" stroke="{INK}"/>'
                f'<text x="{x}" y="{y + 4}" text-anchor="middle" fill="{INK}" font-weight="600">{escape(state)}</text>'
            )
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _loop(self, state: str, text: str) -> list[str]:
        x, y = self.places[state]
        side = 1 if y > self.size[1] / 2 else -1
        edge = y + side * HEIGHT // 2
        path = f"M{x - 14} {edge}C{x - 30} {edge + side * 34} {x + 30} {edge + side * 34} {x + 14} {edge + side * 2}"
        return [_line(path), _label(x, edge + (38 if side > 0 else -30), text, "middle")]

    def _edge(self, state: str, target: str, text: str, labels: Mapping[tuple[str, str], object]) -> list[str]:
        (x1, y1), (x2, y2) = self.places[state], self.places[target]
        # Two states that lead to each other get their lines side by side.
        length = math.hypot(x2 - x1, y2 - y1)
        aside = 14 if (target, state) in labels else 0
        dx, dy = -(y2 - y1) / length * aside, (x2 - x1) / length * aside
        start = _border(x1 + dx, y1 + dy, x1, y1, x2 + dx, y2 + dy)
        end = _border(x2 + dx, y2 + dy, x2, y2, x1 + dx, y1 + dy)
        middle = start[0] + (end[0] - start[0]) * 0.5 + (30 if aside and dx > 0 else -30 if aside else 0)
        height = start[1] + (end[1] - start[1]) * 0.5 - (0 if aside else 4)
        path = f"M{start[0]:.0f} {start[1]:.0f}L{end[0]:.0f} {end[1]:.0f}"
        return [_line(path), _label(middle, height, text, "middle")]


def _border(x: float, y: float, box_x: float, box_y: float, to_x: float, to_y: float) -> tuple[float, float]:
    """Return the point where the line from (x, y) to (to_x, to_y) leaves the box around (box_x, box_y)."""
    dx, dy = to_x - x, to_y - y
    reach = []
    if dx:
        edge = box_x + math.copysign(WIDTH / 2 + 2, dx)
        reach.append((edge - x) / dx)
    if dy:
        edge = box_y + math.copysign(HEIGHT / 2 + 2, dy)
        reach.append((edge - y) / dy)
    share = min(value for value in reach if value > 0)
    return x + dx * share, y + dy * share


def _line(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.3" marker-end="url(#tip)"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{INK}" stroke="{PAPER}" stroke-width="4"'
        f' paint-order="stroke">{escape(text)}</text>'
    )
