"""``python -m benchmarks``: measure everything, print the table, and write it for the docs.

python -m benchmarks                  all, into benchmarks/results.json and docs/benchmarks.md
python -m benchmarks interrupt store  these only, printed and not written
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.disk import sync_latency_s
from benchmarks.rows import Row, print_rows

ROOT = Path(__file__).parent
PARTS = ("interrupt", "scope", "processes", "store", "host", "http")
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


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    versions = [f"{name} {importlib.import_module(name).__version__}" for name in ("holdfast", "uvicorn", "uvloop")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}, {os.cpu_count()} cores",
        "versions": ", ".join(versions),
        "fdatasync": f"{sync_latency_s() * 1000:.2f} ms",
    }


def write(results: dict[str, list[Row]], where: dict[str, str], seconds: float) -> None:
    """Write the figures down, and the docs' table from them."""
    figures = {part: [asdict(row) for row in rows] for part, rows in results.items()}
    (ROOT / "results.json").write_text(json.dumps({"machine": where, "rows": figures}, indent=1) + "\n")
    lines = [
        BEGIN,
        "",
        f"Measured on {where['date']} in {seconds / 60:.0f} minutes: Python {where['python']}, {where['system']}, "
        f"{where['versions']}; an `fdatasync` took {where['fdatasync']}.",
    ]
    for part, rows in results.items():
        lines += ["", f"## {part.capitalize()}", "", "| figure | value | promised | | how |", "|---|---:|---:|---|---|"]
        for row in rows:
            verdict = {True: "met", False: "**missed**", None: ""}[row.met]
            lines.append(f"| {row.name} | {row.value:,.4g} {row.unit} | {row.target} | {verdict} | {row.note} |")
    lines += ["", END]
    page = ROOT.parent / "docs" / "benchmarks.md"
    text = page.read_text()
    if BEGIN not in text:
        text += f"\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    page.write_text(before + "\n".join(lines) + rest.partition(END)[2])


def main(chosen: list[str]) -> None:
    """Measure what was asked for, or everything."""
    unknown = [part for part in chosen if part not in PARTS]
    if unknown:
        raise SystemExit(f"there is no part {unknown[0]!r}; the parts are: {', '.join(PARTS)}")
    began = time.monotonic()
    results: dict[str, list[Row]] = {}
    for part in chosen or PARTS:
        print(f"── {part} …", flush=True)
        results[part] = measure(part)
        print_rows(results[part])
    if not chosen:
        write(results, machine(), time.monotonic() - began)
    missed = sum(row.met is False for rows in results.values() for row in rows)
    print(f"{sum(map(len, results.values()))} figures, {missed} missed")


if __name__ == "__main__":
    main(sys.argv[1:])
