"""The state tables: what they list, and that they list nothing else."""

from __future__ import annotations

from typing import get_args

import pytest

from holdfast.errors import IllegalTransition
from holdfast.protocol.messages import MessageState, RunState
from holdfast.protocol.states import (
    MESSAGE_TABLE,
    RUN_TABLE,
    TERMINAL_MESSAGE_STATES,
    TERMINAL_RUN_STATES,
    MessageInput,
    RunInput,
    next_message_state,
    next_run_state,
)

RUN_STATES: tuple[RunState, ...] = get_args(RunState)
RUN_INPUTS: tuple[RunInput, ...] = get_args(RunInput)
MESSAGE_STATES: tuple[MessageState, ...] = get_args(MessageState)
MESSAGE_INPUTS: tuple[MessageInput, ...] = get_args(MessageInput)


@pytest.mark.parametrize("state", RUN_STATES)
@pytest.mark.parametrize("event", RUN_INPUTS)
def test_a_run_changes_as_its_table_says_and_in_no_other_way(state: RunState, event: RunInput) -> None:
    if (state, event) in RUN_TABLE:
        assert next_run_state(state, event) == RUN_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"a run that is {state} cannot {event}") as refusal:
            next_run_state(state, event)
        assert refusal.value.hint


@pytest.mark.parametrize("state", MESSAGE_STATES)
@pytest.mark.parametrize("event", MESSAGE_INPUTS)
def test_a_message_changes_as_its_table_says_and_in_no_other_way(state: MessageState, event: MessageInput) -> None:
    if (state, event) in MESSAGE_TABLE:
        assert next_message_state(state, event) == MESSAGE_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition) as refusal:
            next_message_state(state, event)
        assert refusal.value.hint


def test_final_states_have_no_way_out_and_all_others_reach_one() -> None:
    assert not {state for state, _ in RUN_TABLE} & TERMINAL_RUN_STATES
    assert not {state for state, _ in MESSAGE_TABLE} & TERMINAL_MESSAGE_STATES
    for start in RUN_STATES:
        reached: set[RunState] = {start}
        while more := {to for (state, _), to in RUN_TABLE.items() if state in reached} - reached:
            reached |= more
        assert reached & TERMINAL_RUN_STATES, f"{start} never ends"


def test_only_an_agents_own_error_makes_a_run_failed() -> None:
    assert [(state, event) for (state, event), to in RUN_TABLE.items() if to == "failed"] == [("running", "fail")]


def test_every_state_but_the_final_ones_can_be_left_by_a_crash() -> None:
    for state in set(RUN_STATES) - TERMINAL_RUN_STATES:
        assert next_run_state(state, "crash") == "interrupted"


def test_a_stopping_run_that_finished_first_is_completed() -> None:
    assert next_run_state("stopping", "complete") == "completed"
    assert next_run_state("stopping", "fail") == "interrupted"


def test_a_suspended_run_may_ask_more_and_be_restarted_but_not_end_by_itself() -> None:
    assert next_run_state("suspended", "suspend") == "suspended"
    assert next_run_state("suspended", "restart") == "suspended"
    for event in ("complete", "fail"):
        with pytest.raises(IllegalTransition, match="resume"):
            next_run_state("suspended", event)
