"""The curves of growth in the docs: drawn from the figures that were measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.curves import CHARTS, Chart
from benchmarks.rows import Row, growth_exponent, growth_rows

ROOT = Path(__file__).parents[2]
FIGURES = json.loads((ROOT / "benchmarks" / "results.json").read_text("utf-8"))["growth"]["rows"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    assert growth_exponent([(size, 3 * size**power) for size in (1.0, 100.0, 1e6)]) == pytest.approx(power)


def test_growth_is_judged_by_the_last_value_and_by_its_exponent() -> None:
    value, exponent = growth_rows("x", [(1, 2.0), (10, 20.0)], unit="ms", of="y", at_most=30, exponent_at_most=0.5)
    assert (value.name, value.value, value.met) == ("x, 10 y", 20.0, True)
    assert exponent.value == pytest.approx(1.0)
    assert exponent.met is False


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.file)
def test_the_curves_in_the_docs_are_of_the_figures_measured(chart: Chart) -> None:
    drawn = chart.svg([Row(**fields) for fields in FIGURES])
    assert (ROOT / "docs" / "measured" / chart.file).read_text("utf-8") == drawn
    assert f"(measured/{chart.file})" in (ROOT / "docs" / "benchmarks.md").read_text("utf-8")


def test_labels_of_lines_that_end_together_lie_apart_on_the_sheet() -> None:
    names = [f"line {nth}" for nth in range(7)]
    chart = Chart(file="x", title="x", x="x", y="y", lines={f"{name}, 10 x": name for name in names}, limit=1.0)
    rows = [row for name in names for row in growth_rows(name, [(1, 1.0), (10, 0.1)], unit="ms", of="x")]
    picture = ElementTree.fromstring(chart.svg(rows))
    heights = sorted(
        float(text.attrib["y"]) for text in picture.iter(f"{SVG}text") if (text.text or "").startswith("line")
    )
    assert len(heights) == len(names)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 12
    assert heights[-1] < float(picture.attrib["height"])


def test_a_chart_of_a_figure_that_was_not_measured_is_refused() -> None:
    with pytest.raises(KeyError):
        CHARTS[0].svg([])
