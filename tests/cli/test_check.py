"""``holdfast check`` prints verdicts with their evidence, and its exit code says which kind was worst."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.check import check
from holdfast.cli.exit_codes import Exit
from tests.cli.processes import run

REFERENCE = Path(__file__).parents[1] / "proof" / "check" / "adapters.py"


def test_a_kept_promise_is_exit_0_and_shown_with_its_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"{REFERENCE}:Right"], promises=["transcript valid"]) is Exit.OK
    assert "kept" in (out := capsys.readouterr().out)
    assert "and accepts it" in out


def test_a_broken_promise_is_exit_1_and_every_try_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"{REFERENCE}:TranscriptValid"], promises=["transcript valid"], times=2) is Exit.FAILED
    assert "BROKEN" in (out := capsys.readouterr().out)
    assert "transcript valid, attempt 2" in out


def test_what_could_not_be_tried_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert check([f"{REFERENCE}:Missing"], promises=["transcript valid"], times=1) is Exit.USAGE
    assert "COULD NOT RUN" in capsys.readouterr().out


def test_json_has_versions_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    check([f"{REFERENCE}:Right"], promises=["transcript valid"], json=True)
    said = json.loads(capsys.readouterr().out)
    assert [finding["verdict"] for finding in said["findings"]] == ["kept"]
    assert said["name"].endswith(":Right")


def test_an_adapter_or_promise_that_there_is_not_is_told_with_what_there_is() -> None:
    done = run("check", "crew")
    assert done.returncode == Exit.USAGE
    assert "langgraph" in done.stderr
    done = run("check", f"{REFERENCE}:")
    assert done.returncode == Exit.USAGE
    assert "module:Class" in done.stderr
    done = run("check", "--promise", "world peace")
    assert done.returncode == Exit.USAGE
    assert "no leaks" in done.stderr
