"""One measured figure, and how it is printed; shared by all benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Row", "print_rows", "ratio_row"]


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
    """

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    note: str = ""


def ratio_row(name: str, value: float, *, at_most: float, note: str = "") -> Row:
    """A row for a ratio that may be at most `at_most`."""
    return Row(name=name, value=value, unit="x", target=f"<= {at_most:g}", met=value <= at_most, note=note)


def print_rows(rows: Iterable[Row]) -> None:
    """Print rows as an aligned table."""
    for row in rows:
        verdict = {True: "met", False: "MISSED", None: ""}[row.met]
        print(f"{row.name:<52} {row.value:>12.4g} {row.unit:<5} {row.target:<9} {verdict:<7} {row.note}")
