"""The lane itself tells caught from survived, and tests the copy only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants import lane
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
PARTS = 12
IDS = ("tests/base/test_ids.py",)


def mutant(name: str, old: str, new: str) -> Mutant:
    return Mutant(name=name, of="R0", breaks="", file="ids.py", old=old, new=new, tests=IDS)


def test_a_mutant_that_a_test_sees_is_caught_and_taken_out_again(tmp_path: Path) -> None:
    copy = lane.Copy(tmp_path / "copy")
    before = (copy.root / "src" / "holdfast" / "ids.py").read_text("utf-8")
    verdict = copy.judge(mutant("same", "011x}{_drawn.pop()}", "011x}0000000000000000"))
    assert (verdict.outcome, verdict.test) == ("caught", "tests/base/test_ids.py::test_ids_of_many_threads_are_unique")
    assert (copy.root / "src" / "holdfast" / "ids.py").read_text("utf-8") == before


def test_the_test_that_saw_a_mutant_before_is_asked_first_and_all_others_if_it_sees_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = lane.Copy(tmp_path / "copy")
    asked: list[Sequence[str]] = []

    def run(tests: Sequence[str], *, limit_s: float) -> tuple[int | None, lane.Report, str]:
        asked.append(tests)
        seen = "blind" not in tests[0]
        failed = [{"test": tests[0], "how": "failed", "why": ""}] if seen else []
        return int(seen), {"failed": failed, "passed": 1}, ""

    monkeypatch.setattr(copy, "run", run)
    same = mutant("same", "011x}{_drawn.pop()}", "011x}0000000000000000")
    assert copy.judge(same, "tests/it.py::sees").test == "tests/it.py::sees"
    assert copy.judge(same, "tests/it.py::blind").test == IDS[0]
    assert asked == [("tests/it.py::sees",), ("tests/it.py::blind",), IDS]


def test_a_survivor_and_a_mutant_that_does_not_fit_fail_the_lane(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = mutant("harmless", "import time", "import time  # again")
    monkeypatch.setattr(lane, "MUTANTS", (harmless, mutant("rotten", "no such text", "")))
    assert lane.main(["--only", "harmless", "--only", "rotten", "--jobs", "1"]) == 1
    told = capsys.readouterr().out
    assert "survived: harmless" in told
    assert "broken: rotten" in told


def test_nothing_but_the_copy_is_tested(tmp_path: Path) -> None:
    environment = os.environ | {
        "MUTANTS_COPY": str(tmp_path),
        "MUTANTS_REPORT": str(tmp_path / "report.json"),
        "MUTANTS_TEST_S": "100",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.witness", "-p", "no:cacheprovider", *IDS]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 3, result.stdout
    assert "which is not in the copy" in result.stdout + result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_no_mutant_survives(part: int) -> None:
    assert lane.main(["--check", "--jobs", "1", "--part", f"{part}/{PARTS}"]) == 0


def test_parts_of_the_lane_are_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    for part in range(1, PARTS + 1):
        lane.main(["--list", "--part", f"{part}/{PARTS}"])
    listed = capsys.readouterr().out.splitlines()
    lane.main(["--list"])
    assert len(listed) > 200
    assert sorted(listed) == sorted(capsys.readouterr().out.splitlines())
