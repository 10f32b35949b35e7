"""One measured figure, and how it is printed; shared by all benchmarks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Row", "growth_exponent", "growth_rows", "print_rows", "ratio_row"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of one benchmark.

    Parameters:
        name: what was measured.
        value: the figure.
        unit: of `value` and `target`; ``x`` for a ratio.
        target: what was promised, with its direction, for example ``<= 2.5``; empty when nothing was.
        met: whether the promise is kept; None when there is none.
        note: how it was measured, or why it was missed.
        points: sizes and the figure at each, for a figure that was measured at several sizes; `value` is the last.
    """

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    note: str = ""
    points: Sequence[Sequence[float]] = ()


def growth_exponent(points: Sequence[Sequence[float]]) -> float:
    """The slope of the line of least squares through the logarithms: 1 for what grows as its size does."""
    logarithms = [(math.log(size), math.log(value)) for size, value in points]
    return statistics.linear_regression(*zip(*logarithms, strict=True)).slope


def growth_rows(
    name: str,
    points: Sequence[Sequence[float]],
    *,
    unit: str,
    of: str,
    at_most: float | None = None,
    exponent_at_most: float | None = None,
    note: str = "",
) -> list[Row]:
    """Rows for a figure at several sizes: its value at the largest, and the exponent of its growth.

    Parameters:
        name: what was measured.
        points: sizes and the figure at each, the largest last.
        unit: of the figure.
        of: what the sizes count.
        at_most: what the value at the largest size may be; None if nothing was promised.
        exponent_at_most: what the exponent may be, likewise.
        note: how it was measured.
    """
    size, value = points[-1]
    exponent = growth_exponent(points)
    values = ", ".join(f"{value:.3g}" for _, value in points)
    sizes = ", ".join(f"{size:,.0f}" for size, _ in points)
    return [
        Row(
            name=f"{name}, {size:,.0f} {of}",
            value=value,
            unit=unit,
            target="" if at_most is None else f"<= {at_most:g}",
            met=None if at_most is None else value <= at_most,
            note=note,
            points=points,
        ),
        Row(
            name="… exponent of its growth",
            value=exponent,
            unit="",
            target="" if exponent_at_most is None else f"<= {exponent_at_most:g}",
            met=None if exponent_at_most is None else exponent <= exponent_at_most,
            note=f"{values} {unit} at {sizes} {of}",
        ),
    ]


def ratio_row(name: str, value: float, *, at_most: float, note: str = "") -> Row:
    """A row for a ratio that may be at most `at_most`."""
    return Row(name=name, value=value, unit="x", target=f"<= {at_most:g}", met=value <= at_most, note=note)


def print_rows(rows: Iterable[Row]) -> None:
    """Print rows as an aligned table."""
    for row in rows:
        verdict = {True: "met", False: "MISSED", None: ""}[row.met]
        print(f"{row.name:<52} {row.value:>12.4g} {row.unit:<5} {row.target:<9} {verdict:<7} {row.note}")
