"""What else the report asks for: scenarios in Behave, a Robot Framework suite, an asv benchmark, and coverage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
COVERED = [HERE / f"test_{name}.py" for name in ("operator", "runs", "sessions", "threads")]
AT_LEAST = 97

Completed = subprocess.CompletedProcess[str]


def python(*argv: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> Completed:
    """Run a module of Python on its own, as a person would."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, argv)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_scenarios_hold() -> None:
    done = python("behave", "--no-color", "--format", "progress", HERE / "features")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 scenarios passed, 0 failed, 0 skipped" in done.stdout


def test_the_robot_suite_holds(tmp_path: Path) -> None:
    done = python("robot", "--outputdir", tmp_path, "--report", "NONE", "--log", "NONE", HERE / "robot")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 tests, 7 passed, 0 failed" in done.stdout


def test_the_asv_benchmark_is_sound(tmp_path: Path) -> None:
    done = python("asv", "check", "--python=same", cwd=ROOT / "benchmarks" / "asv", environment={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No problems found" in done.stdout + done.stderr


@pytest.mark.nightly
def test_the_asv_benchmark_runs(tmp_path: Path) -> None:
    folder = ROOT / "benchmarks" / "asv"
    made = python("asv", "machine", "--yes", cwd=folder, environment={"HOME": str(tmp_path)})
    assert made.returncode == 0, made.stdout + made.stderr
    argv = ("asv", "run", "--quick", "--python=same", "--dry-run", "--show-stderr")
    done = python(*argv, cwd=folder, environment={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout


def test_the_bridge_is_covered(tmp_path: Path) -> None:
    data, report = tmp_path / "coverage", tmp_path / "coverage.json"
    environment = {"COVERAGE_FILE": str(data), "COVERAGE_CORE": "ctrace"}
    done = python(
        "coverage",
        "run",
        "--rcfile=/dev/null",
        "--branch",
        "--concurrency=thread",
        "--include=*/holdfast/integrations/reactive/*.py",
        "--omit=*/__init__.py",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--deselect=tests/integrations/reactive/test_threads.py::test_items_of_8_threads_are_accounted_for_and_nothing_is_kept",
        "-k",
        "not however_threads_meet and not never_overlap",
        *COVERED,
        environment=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    python("coverage", "json", "--rcfile=/dev/null", "-o", report, environment=environment)
    files = json.loads(report.read_text())["files"]
    assert {Path(name).name for name in files} == {
        path.name for path in (ROOT / "src/holdfast/integrations/reactive").glob("*.py") if path.stem != "__init__"
    }
    missing = {
        Path(name).name: (found["missing_lines"], found["missing_branches"])
        for name, found in files.items()
        if found["summary"]["percent_covered"] < AT_LEAST
    }
    assert missing == {}
