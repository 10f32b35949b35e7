"""Draw how figures grow, as SVG for the docs: both axes logarithmic, one line for each figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.rows import Row, growth_exponent

__all__ = ["CHARTS", "Chart"]

INK, PAPER, GRID, SOFT, LIMIT = "#1f2933", "#ffffff", "#d5dbe1", "#52606d", "#b91c1c"
COLOURS = ("#0072b2", "#d55e00", "#007a5a", "#a3428a", "#8a6100", "#3b4cc0", "#1f2933")
WIDTH, HEIGHT = 760, 380
LEFT, TOP, RIGHT, BOTTOM = 70, 50, 460, 320
LINE_HEIGHT = 18


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing of some rows of one part.

    Parameters:
        file: name of the drawing.
        title: what grows with what.
        x, y: what the axes count, with the unit.
        lines: names of the rows and their labels.
        limit: a promise that applies to all lines; None if there is none.
    """

    file: str
    title: str
    x: str
    y: str
    lines: Mapping[str, str]
    limit: float | None = None

    def svg(self, rows: Sequence[Row]) -> str:
        """Return the drawing. A row of `lines` that `rows` lacks is an error."""
        measured = {row.name: [(size, value) for size, value in row.points] for row in rows}
        points = {name: measured[name] for name in self.lines}
        sizes = sorted({size for line in points.values() for size, _ in line})
        values = [value for line in points.values() for _, value in line]
        if self.limit is not None:
            values.append(self.limit)
        x = _Axis(sizes[0], sizes[-1], LEFT, RIGHT)
        y = _Axis(min(values), max(values), BOTTOM, TOP)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
            ' font-family="sans-serif" font-size="13" role="img">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>',
            _text(LEFT, 28, self.title, weight="600"),
        ]
        for exponent in range(y.first, y.last + 1):
            at = y.place(10.0**exponent)
            parts.append(f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="{GRID}"/>')
            parts.append(_text(LEFT - 8, at + 4, f"{10.0**exponent:,.10g}", anchor="end"))
        for size in sizes:
            at = x.place(size)
            parts.append(f'<path d="M{at:.1f} {TOP}V{BOTTOM}" stroke="{GRID}"/>')
            parts.append(_text(at, BOTTOM + 20, f"{size:,.0f}", anchor="middle"))
        parts.append(_text((LEFT + RIGHT) / 2, BOTTOM + 42, self.x, anchor="middle", fill=SOFT))
        parts.append(
            f'<text transform="translate(18 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle" fill="{SOFT}">'
            f"{escape(self.y)}</text>"
        )
        if self.limit is not None:
            at = y.place(self.limit)
            parts.append(f'<path d="M{LEFT} {at:.1f}H{RIGHT}" stroke="{LIMIT}" stroke-dasharray="6 4"/>')
            parts.append(_text(LEFT + 6, at - 6, f"promised: at most {self.limit:g}", fill=LIMIT))
        parts += self._lines(points, x, y)
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _lines(self, points: Mapping[str, Sequence[tuple[float, float]]], x: _Axis, y: _Axis) -> list[str]:
        parts = []
        wanted = [y.place(line[-1][1]) for line in points.values()]
        labels = _apart(wanted)
        for (name, line), colour, end, label in zip(points.items(), COLOURS, wanted, labels, strict=False):
            corners = [(x.place(size), y.place(value)) for size, value in line]
            path = "L".join(f"{across:.1f} {down:.1f}" for across, down in corners)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{colour}"/>' for across, down in corners
            ]
            parts.append(f'<path d="M{RIGHT + 6} {end:.1f}L{RIGHT + 22} {label:.1f}" stroke="{colour}" fill="none"/>')
            text = f"{self.lines[name]}: {line[-1][1]:.3g}, exponent {growth_exponent(line):.2f}"
            parts.append(_text(RIGHT + 28, label + 4, text, fill=colour, size=12))
        return parts


class _Axis:
    """A logarithmic axis over whole decades of values, from pixel `begin` to `end`."""

    def __init__(self, least: float, most: float, begin: float, end: float) -> None:
        self.first = math.floor(math.log10(least))
        self.last = max(math.ceil(math.log10(most)), self.first + 1)
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        """The pixel of a value."""
        share = (math.log10(value) - self.first) / (self.last - self.first)
        return self._begin + share * (self._end - self._begin)


def _apart(wanted: Sequence[float]) -> list[float]:
    """Heights of labels near these, and far enough from each other."""
    order = sorted(range(len(wanted)), key=lambda nth: wanted[nth])
    placed: dict[int, float] = {}
    lowest = -math.inf
    for nth in order:
        lowest = placed[nth] = max(wanted[nth], lowest + LINE_HEIGHT)
    above = max(0.0, (lowest - BOTTOM) if order else 0.0)
    return [placed[nth] - above for nth in range(len(wanted))]


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = INK, weight: str = "400", size: int = 13
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
        f' font-size="{size}">{escape(text)}</text>'
    )


_STORED = ", 1,000,000 sessions"

CHARTS = (
    Chart(
        file="growth-requests.svg",
        title="Requests on a store that grows: CPU time of each",
        x="sessions stored, with ten events each",
        y="CPU, ms",
        limit=5.0,
        lines={
            "status page, `/`" + _STORED: "status page",
            "list of 100 sessions" + _STORED: "list, first page",
            "list of 100 sessions, a page in the middle" + _STORED: "list, middle",
            "first new session after a deletion" + _STORED: "after a deletion",
            "statistics, `/v1/server`" + _STORED: "statistics",
            "`store.info()`" + _STORED: "store.info()",
        },
    ),
    Chart(
        file="growth-programs.svg",
        title="Start, doctor and migration on a store that grows",
        x="sessions stored, with ten events each",
        y="seconds",
        lines={
            "start of a host" + _STORED: "start of a host",
            "CPU of `doctor`" + _STORED: "doctor",
            "migration from version 5" + _STORED: "migration",
        },
    ),
    Chart(
        file="growth-memory.svg",
        title="Peak memory of a host on a store that grows",
        x="sessions stored, with ten events each",
        y="MB",
        limit=60.0,
        lines={"peak memory of a host that started" + _STORED: "peak memory"},
    ),
    Chart(
        file="growth-transcripts.svg",
        title="A page of 1,000 entries in transcripts that grow",
        x="entries of the transcript",
        y="CPU, ms",
        limit=3.0,
        lines={"page of 1,000 entries of a transcript, 100,000 entries": "mean of all pages"},
    ),
    Chart(
        file="growth-streams.svg",
        title="A streamed chunk, 5,000 a second in all streams together",
        x="streams, with one reader each",
        y="CPU of the server, µs",
        lines={
            "chunk stored and read, 1,000 streams": "stored and read",
            "chunk of a bare ASGI stream, 1,000 streams": "bare ASGI stream",
        },
    ),
)
