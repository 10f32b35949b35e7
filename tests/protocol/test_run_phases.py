"""The phases of a run in memory: what the table lists, and that it lists nothing else."""

from __future__ import annotations

from typing import get_args

import pytest

from holdfast.errors import IllegalTransition
from holdfast.protocol.run_phases import PHASE_TABLE, TERMINAL_PHASES, PhaseInput, RunPhase, next_phase

PHASES: tuple[RunPhase, ...] = get_args(RunPhase)
INPUTS: tuple[PhaseInput, ...] = get_args(PhaseInput)


def reached_from(start: RunPhase) -> set[RunPhase]:
    """Return the phases that a run in `start` can pass, with `start`."""
    reached = {start}
    while more := {to for (phase, _), to in PHASE_TABLE.items() if phase in reached} - reached:
        reached |= more
    return reached


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("event", INPUTS)
def test_a_phase_changes_as_the_table_says_and_in_no_other_way(phase: RunPhase, event: PhaseInput) -> None:
    if (phase, event) in PHASE_TABLE:
        assert next_phase(phase, event) == PHASE_TABLE[phase, event]
    else:
        with pytest.raises(IllegalTransition, match=f"a run in memory that is {phase} cannot {event}") as refusal:
            next_phase(phase, event)
        assert refusal.value.hint


def test_every_phase_is_reached_from_running_and_reaches_an_end() -> None:
    assert reached_from("running") == set(PHASES)
    for phase in PHASES:
        assert reached_from(phase) & TERMINAL_PHASES


def test_terminal_phases_are_final_and_all_others_can_end_at_once() -> None:
    assert not {phase for phase, _ in PHASE_TABLE} & TERMINAL_PHASES
    for phase in set(PHASES) - TERMINAL_PHASES:
        assert next_phase(phase, "end") in TERMINAL_PHASES


def test_no_phase_comes_back() -> None:
    for (phase, _), to in PHASE_TABLE.items():
        assert phase not in reached_from(to)


def test_a_lost_run_only_ends() -> None:
    assert [event for phase, event in PHASE_TABLE if phase == "lost"] == ["end"]
    for phase in set(PHASES) - TERMINAL_PHASES - {"lost"}:
        assert next_phase(phase, "lose") == "lost"


def test_a_run_commits_once_and_is_unloaded_only_after_its_release() -> None:
    assert "committing" not in {to for (phase, _), to in PHASE_TABLE.items() if phase in ("committing", "lost")}
    assert [(phase, event) for (phase, event), to in PHASE_TABLE.items() if to == "unloaded"] == [("releasing", "end")]
