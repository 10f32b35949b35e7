"""``python -m tests.explored``: explore all models of the core as at night, and say what was covered."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import holdfast
from holdfast.clock import system_clock
from holdfast.testing import ScheduleFailure
from tests.explored.catalogue import ITEMS, MANY, MODELS, WHOLE, run_all
from tests.explored.model import Covered, Model

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "explored.md"
Found = list[tuple[Model, list[Covered]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore; 1 when a schedule broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.explored", description=__doc__)
    parser.add_argument("--schedules", type=int, default=MANY, help="of each item that does not end (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="items whose name contains this")
    parser.add_argument("--write-docs", action="store_true", help=f"write the table to docs/measured/{PAGE.name}")
    options = parser.parse_args(arguments)
    found: Found = []
    for item in ITEMS:
        if options.only not in item:
            continue
        covered: dict[str, list[Covered]] = {}
        try:
            for model, _, one in run_all(item, options.schedules, whole=WHOLE):
                covered.setdefault(model.name, []).append(one)
                print(f"{model}, {one.tasks} tasks: {_told(one)}", flush=True)
        except ScheduleFailure as failure:
            print(failure, file=sys.stderr)
            return 1
        found += [(model, covered[model.name]) for model in MODELS if model.item == item]
    if options.write_docs:
        PAGE.write_text("\n".join(_page(found, options.schedules)) + "\n", "utf-8")
        print(f"wrote {PAGE}")
    return 0


def _told(one: Covered) -> str:
    speed = one.schedules / one.elapsed_s if one.elapsed_s else 0.0
    end = "all there are" if one.exhausted else f"{one.distinct:,} different"
    return f"{one.schedules:,} schedules ({end}), {one.states:,} states, {speed:,.0f} schedules/s"


def _page(found: Found, schedules: int) -> Iterator[str]:
    day = datetime.fromtimestamp(system_clock.now(), UTC).date().isoformat()
    everything = [one for _, covered in found for one in covered]
    yield "# The core, explored"
    yield ""
    yield (
        "Each part of the core has small models. Every schedule of a model must keep the promise beside it; the "
        "[explorer](../explanation/explorer.md) runs all schedules there are, or very many. A model counts only "
        "because it turns red when one of the named faults is put into the product: the tests do that each time."
    )
    yield ""
    yield (
        f"Measured on {day} with Holdfast {holdfast.__version__}, Python {platform.python_version()} on "
        f"{platform.system()}, {os.cpu_count()} processors, one of them used: "
        f"{sum(one.schedules for one in everything):,} schedules in "
        f"{sum(one.elapsed_s for one in everything):,.0f} s."
    )
    yield ""
    yield "```text"
    yield "python -m tests.explored --write-docs"
    yield "```"
    yield ""
    yield (
        f"An item that does not end gets {schedules:,} schedules in all: two thirds at random, a third by random "
        "priorities, half of them with ordinary tasks and half with eager ones. *States* are told apart by how many "
        "steps each task and thread has taken: a lower bound."
    )
    for item in ITEMS:
        models = [(model, covered) for model, covered in found if model.item == item]
        if not models:
            continue
        yield ""
        yield f"## {item[0].upper()}{item[1:]}"
        yield ""
        yield "| model | promise | schedules, ordinary tasks | eager tasks | states | faults it sees |"
        yield "|---|---|---|---|---|---|"
        for model, covered in models:
            counts = " | ".join(f"{'all ' if one.exhausted else ''}{one.schedules:,}" for one in covered)
            states = f"{max(one.states for one in covered):,}"
            faults = "; ".join(fault.name for fault in model.faults) or "those of the first row"
            yield f"| {model.name} | {model.promise} | {counts} | {states} | {faults} |"


if __name__ == "__main__":
    sys.exit(main())
