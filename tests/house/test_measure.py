"""The pages of docs/measured: what they show, and the program that writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from holdfast.errors import HoldfastError
from holdfast.proof.check.verdicts import AdapterVerdict, Finding
from holdfast.proof.nemesis import EpisodePlan, FaultOutcome

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = Path(__file__).parents[1] / "proof" / "check" / "adapters.py"
CLOCK = FaultOutcome(
    fault="clock",
    title="The clock | is set.",
    injected={"clock": 3},
    observations=10,
    checked=2,
    broken=0,
    found=(),
    seconds=1.0,
)


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DOCS)
    import _measure

    return _measure


def rows_of(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("|")]


def test_the_comparison_shows_every_verdict_and_all_evidence(measure: ModuleType) -> None:
    found = (
        Finding(promise="p", text="It holds.", verdict="kept", evidence=("seen",)),
        Finding(promise="q", text="It holds, too.", verdict="broken", evidence=("a|b", "1 < 2")),
    )
    page = measure.conformance_page([AdapterVerdict(name="langgraph", versions=("langgraph 1",), findings=found)])
    assert "\nholdfast check langgraph\n" in page
    assert "| It holds, too. | **broken** |" in page
    assert "a\\|b<br>1 \\< 2" in page
    assert "## LangGraph\n\nlanggraph 1." in page


def test_the_faults_show_what_was_never_injected_and_what_was_found(measure: ModuleType) -> None:
    bad = msgspec.structs.replace(CLOCK, injected={"clock": 0}, broken=1, found=("P5: gone",))
    page = measure.nemesis_page([CLOCK, bad], "the command")
    assert "```text\nthe command\n```" in page
    assert "- never injected: clock\n- P5: gone\n" in page
    assert [row.count("|") - row.count("\\|") for row in rows_of(page)] == [7, 7, 7, 7]
    assert "| `clock` | The clock \\| is set. | clock: 3 | 10 | 2 | nothing |" in page


def test_a_page_is_written_with_the_command_that_repeats_its_run(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_faults(names: object, ask: EpisodePlan, progress: object) -> list[tuple[FaultOutcome, object]]:
        if ask.seed == 8:
            raise HoldfastError("the server does not start", hint="look at it")
        return [(CLOCK, None)]

    monkeypatch.setattr(measure, "run_faults", run_faults)
    assert measure.main(["nemesis", "clock", "--seed", "7"], tmp_path) == 0
    assert "\nholdfast storm --nemesis clock --seed 7\n" in (tmp_path / "nemesis.md").read_text("utf-8")
    assert measure.main(["nemesis", "--seed", "8"], tmp_path) == 1
    assert measure.main(["nemesis", "flood"], tmp_path) == 1
    assert "the server does not start; look at it" in capsys.readouterr().err


def test_frameworks_are_judged_for_the_page(measure: ModuleType, tmp_path: Path) -> None:
    assert measure.main(["check", f"{REFERENCE}:Right", "--promise", "transcript valid"], tmp_path) == 0
    page = (tmp_path / "conformance.md").read_text("utf-8")
    assert f"with Python {sys.version.split()[0]} on" in page
    assert "| kept |" in page


def test_the_escapes_show_what_got_through_and_why(measure: ModuleType) -> None:
    from tests.system.escapes.escape import Escape, says
    from tests.system.escapes.page import tried_page
    from tests.system.escapes.runner import Finding as Found
    from tests.system.escapes.walls import Wall

    held, got = (Found(began=True, through=through, output="") for through in (False, True))
    escapes = [
        Escape(name="open-a", subject="files", program="", judge=says),
        Escape(name="known-b", subject="files", program="", judge=says, known={"linux-both": "it is small"}),
        Escape(name="absent-c", subject="files", program="", judge=says, may_fail="no device"),
    ]
    page = tried_page(
        {
            Wall("none", "root"): {"open-a": got, "known-b": got, "absent-c": held},
            Wall("linux-both", "root"): {"open-a": got, "known-b": got, "absent-c": held},
            Wall("linux-both-network", "root"): {"open-a": held, "known-b": got, "absent-c": held},
            Wall("bwrap", "root"): "bubblewrap is not installed",
        },
        measure.table,
        escapes,
    )
    rows = rows_of(page)
    assert "| linux-both | root | 2 | 1 | **open-a** |" in rows
    assert "| linux-both-network | root | 2 | 1 | none |" in rows, "what is known without a network is known with one"
    assert "| bwrap | root | not run |  | bubblewrap is not installed |" in rows
    assert "| known-b | linux-both, root<br>linux-both-network, root | it is small |" in rows
    assert "| files | 3 | 2 | 0 |" in rows
