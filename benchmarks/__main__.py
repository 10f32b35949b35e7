"""``python -m benchmarks``: measure, print the table, and write it for the docs.

python -m benchmarks                  everything
python -m benchmarks interrupt store  these parts only; what was written of the others stays

The figures go into benchmarks/results.json, the table into docs/benchmarks.md, the curves into docs/measured.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.curves import CHARTS
from benchmarks.disk import sync_latency_s
from benchmarks.rows import Row, print_rows

ROOT = Path(__file__).parent
RESULTS = ROOT / "results.json"
CURVES = ROOT.parent / "docs" / "measured"
PARTS = (
    "interrupt",
    "scope",
    "processes",
    "stops",
    "isolated",
    "walls",
    "store",
    "cluster",
    "nats",
    "large",
    "host",
    "loop",
    "compose",
    "models",
    "http",
    "chunks",
    "growth",
    "schedules",
    "explorer",
    "langgraph",
    "reactive",
)
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def measure(part: str) -> list[Row]:
    """The rows of one part, measured in a process of its own so that none inherits another's memory or threads."""
    program = (
        f"import json, sys; from dataclasses import asdict; from benchmarks.bench_{part} import rows\n"
        "json.dump([asdict(row) for row in rows()], sys.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks/bench_{part}.py failed with exit code {done.returncode}")
    return [Row(**fields) for fields in json.loads(done.stdout)]


def machine() -> str:
    """What a part was measured on, and what else the machine did."""
    versions = [f"{name} {importlib.import_module(name).__version__}" for name in ("holdfast", "uvicorn", "uvloop")]
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC: Python {platform.python_version()}, "
        f"{platform.system()} {platform.release().partition('-')[0]}, {os.cpu_count()} cores, {', '.join(versions)}; "
        f"load average {os.getloadavg()[0]:.1f}, an `fdatasync` took {sync_latency_s() * 1000:.2f} ms."
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    """The table of the docs."""
    lines = [BEGIN]
    for part in PARTS:
        if part not in results:
            continue
        lines += ["", f"## {part.capitalize()}", "", results[part]["on"], ""]
        if part == "growth":
            for chart in CHARTS:
                lines += [f"![{chart.title}]({CURVES.name}/{chart.file})", ""]
        lines += ["| figure | value | promised | verdict | how |", "|---|---:|---:|---|---|"]
        for row in (Row(**fields) for fields in results[part]["rows"]):
            verdict = {True: "met", False: "**missed**", None: ""}[row.met]
            lines.append(f"| {row.name} | {row.value:,.4g} {row.unit} | {row.target} | {verdict} | {row.note} |")
    return "\n".join([*lines, "", END])


def write(results: dict[str, dict[str, Any]]) -> None:
    """Write the figures down, and the docs' table and curves from them."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if "growth" in results:
        growth = [Row(**fields) for fields in results["growth"]["rows"]]
        for chart in CHARTS:
            (CURVES / chart.file).write_text(chart.svg(growth), "utf-8")
    page = ROOT.parent / "docs" / "benchmarks.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + table(results) + rest.partition(END)[2])


def main(chosen: list[str]) -> None:
    """Measure what was asked for, or everything."""
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]!r}; the parts are: {', '.join(PARTS)}")
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    figures = missed = 0
    for part in chosen or PARTS:
        print(f"── {part} …", flush=True)
        rows = measure(part)
        print_rows(rows)
        results[part] = {"on": machine(), "rows": [asdict(row) for row in rows]}
        write(results)
        figures += len(rows)
        missed += sum(row.met is False for row in rows)
    print(f"{figures} figures, {missed} missed")


if __name__ == "__main__":
    main(sys.argv[1:])
