"""A pytest plugin for the lane's runs: makes sure that the copy is tested, and writes down which test failed first.

``MUTANTS_COPY`` is the tree that must be imported, ``MUTANTS_REPORT`` the file for the result, and
``MUTANTS_TEST_S`` how long a test may take at most, in seconds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import holdfast

_failed: list[dict[str, str]] = []
_passed = 0


def pytest_sessionstart() -> None:
    """Refuse to test anything but the copy."""
    copy = Path(os.environ["MUTANTS_COPY"]).resolve()
    here = Path(holdfast.__file__).resolve()
    if not here.is_relative_to(copy):
        pytest.exit(f"holdfast was imported from {here}, which is not in the copy {copy}", returncode=3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what failed."""
    global _passed
    if report.failed:
        text = report.longreprtext
        # The lane's own time limit tells only that something took long, on a busy machine perhaps.
        hung = report.duration >= float(os.environ["MUTANTS_TEST_S"])
        last = text.strip().splitlines()[-1] if text.strip() else ""
        _failed.append({"test": report.nodeid, "how": "hung" if hung else "failed", "why": last[:300]})
    elif report.when == "call" and report.passed:
        _passed += 1


def pytest_sessionfinish() -> None:
    """Write the result for the lane."""
    result = {"failed": _failed, "passed": _passed}
    Path(os.environ["MUTANTS_REPORT"]).write_text(json.dumps(result), "utf-8")
