"""Whatever a nemesis does to a server, every promise is kept, and the server goes on."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.proof.nemesis import FAULTS, EpisodePlan, FaultOutcome, run_against
from holdfast.proof.nemesis.episode import Episode
from holdfast.proof.nemesis.faults import Fault
from holdfast.proof.nemesis.readers import STALL_S
from holdfast.proof.nemesis.runner import run_kills
from tests.proof.nemesis.storms import run_storm

SHORT = EpisodePlan(sessions=4, span_s=0.3, connections=600, seed=11)


def quietly(text: str) -> None:
    """Progress that nobody wants to see."""


def run(fault: Fault, ask: EpisodePlan) -> FaultOutcome:
    async def work() -> FaultOutcome:
        async with asyncio.timeout(100):
            outcome, _ = await run_against(fault, ask, quietly)
            return outcome

    return run_storm(work())


def judged(outcome: FaultOutcome) -> tuple[object, ...]:
    return outcome.found, outcome.never, outcome.passed


async def _one_after_another(episode: Episode) -> None:
    for name in ("disk-full", "disk-slow", "signals", "connections", "read-only", "clock", "readers"):
        await FAULTS[name].inject(episode)


def test_every_fault_in_turn_breaks_no_promise_and_each_was_injected() -> None:
    together = Fault(
        name="all",
        title="All of them, one after another.",
        kinds=tuple(kind for fault in FAULTS.values() for kind in fault.kinds),
        inject=_one_after_another,
        settings={"question_ttl_s": 3600.0, "stream_stall_s": STALL_S},
        kills=True,
        disk=True,
    )
    outcome = run(together, SHORT)
    assert judged(outcome) == ((), (), True)
    assert outcome.observations > 500
    assert outcome.checked > 50


@pytest.mark.nightly
def test_ten_thousand_connections_leave_nothing_and_disturb_nobody() -> None:
    asked = EpisodePlan(sessions=8, span_s=0.8, connections=10_000, seed=12)
    assert judged(run(FAULTS["connections"], asked)) == ((), (), True)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_sigkill_at_every_failpoint_loses_nothing_and_each_was_hit() -> None:
    outcome, _ = run_storm(run_kills(SHORT, quietly))
    assert judged(outcome) == ((), (), True)
