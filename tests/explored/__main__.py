"""``python -m tests.explored``: explore all models of the core as at night, and say what was covered."""

from __future__ import annotations

import argparse
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
    speed = one.schedules / one.cpu_s if one.cpu_s else 0.0
    end = "all there are" if one.exhausted else f"{one.distinct:,} different"
    return (
        f"{one.schedules:,} schedules ({end}), {one.states:,} states, {speed:,.0f} schedules a second of one processor"
    )


def _page(found: Found, schedules: int) -> Iterator[str]:
    day = datetime.fromtimestamp(system_clock.now(), UTC).date().isoformat()
    everything = [one for _, covered in found for one in covered]
    yield (
        f"Measured on {day} with Holdfast {holdfast.__version__}, Python {platform.python_version()} on "
        f"{platform.system()}: {sum(one.schedules for one in everything):,} schedules in "
        f"{sum(one.cpu_s for one in everything):,.0f} s of one processor. "
        f"Each part that cannot be exhausted got {schedules:,} in all."
    )
    for item in ITEMS:
        models = [(model, covered) for model, covered in found if model.item == item]
        if not models:
            continue
        yield ""
        yield f"## {item[0].upper()}{item[1:]}"
        yield ""
        yield "| model | promise | schedules, ordinary tasks | eager tasks | states | faults found (schedules needed) |"
        yield "|---|---|---:|---:|---:|---|"
        for model, covered in models:
            counts = " | ".join(f"{'all ' if one.exhausted else ''}{one.schedules:,}" for one in covered)
            states = f"{max(one.states for one in covered):,}"
            faults = "; ".join(f"{fault.name} ({model.seek(fault):,})" for fault in model.faults)
            yield f"| {model.name} | {model.promise} | {counts} | {states} | {faults} |"


if __name__ == "__main__":
    sys.exit(main())
