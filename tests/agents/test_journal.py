"""What a new attempt takes from the journal, and whether there may be one."""

from __future__ import annotations

import pytest

from holdfast.agents.journal import Journal
from holdfast.errors import NotDeterministic
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    MessageSteered,
    RunRestarted,
    RunResumed,
    StepFinished,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import Answer, Usage

RUN = "r_1"


def started(call_id: str, *, idempotent: bool = False) -> ToolStarted:
    return ToolStarted(run_id=RUN, call_id=call_id, name="tool", idempotent=idempotent)


def finished(call_id: str, status: str = "ok") -> ToolFinished:
    return ToolFinished(run_id=RUN, call_id=call_id, status=status)  # type: ignore[arg-type]


def child(status: str | None = None, error: str | None = None) -> Event:
    if status is None:
        return ChildStarted(run_id=RUN, child_id="r_1.2", agent="child", text="t")
    return ChildFinished(run_id=RUN, child_id="r_1.2", status=status, text="said", error=error)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "stands"),
    [
        (child("completed"), True),
        (child("failed", "ValueError: no"), True),
        (child("interrupted", "its budget was used up"), True),
        (child("interrupted"), False),
    ],
)
def test_a_child_that_ended_by_itself_is_not_run_again_and_what_it_left_open_is_settled_with_it(
    ended: Event, stands: bool
) -> None:
    journal = Journal([child(), started("r_1.2.1"), finished("r_1.2.1", "interrupted"), ended])
    assert (journal.outcome("r_1.2", "child") is ended) is stands
    assert journal.replayable is stands


def test_what_a_finished_child_used_counts_in_the_next_attempt_too() -> None:
    used = Usage(steps=1, input_tokens=10)
    journal = Journal(
        [
            child(),
            StepFinished(run_id="r_1.2", step=1, usage=used),
            started("r_1.2.1.1"),
            finished("r_1.2.1.1"),
            StepFinished(run_id="r_1.2.1.1.1", step=1, usage=used),
            StepFinished(run_id="r_1.22", step=1, usage=used),
            child("completed"),
        ]
    )
    assert journal.used_inside("r_1.2") == Usage(steps=2, input_tokens=20, tool_calls=1)


def test_a_call_that_came_to_its_result_settles_what_was_open_inside_of_it() -> None:
    events: list[Event] = [started("r_1.1"), started("r_1.1.1"), finished("r_1.1.1", "interrupted")]
    assert not Journal(events).replayable
    assert Journal([*events, finished("r_1.1")]).replayable
    assert not Journal([*events, started("r_1.11"), finished("r_1.1")]).replayable


def test_steps_steered_messages_and_answers_are_found_again() -> None:
    step = StepFinished(run_id=RUN, step=1, text="one", seq=7)
    answer = Answer(question_id="r_1.1.1", decision="approved")
    journal = Journal(
        [
            MessageSteered(run_id=RUN, message_id="m_2", step=1),
            step,
            StepFinished(run_id="r_1.1.1.1", step=1, text="of a child that was not told of", seq=8),
            RunResumed(run_id=RUN, answer=answer),
            MessageSteered(run_id=RUN, message_id="m_3", step=2),
            RunRestarted(run_id=RUN, attempt=2, discard_from=8),
        ]
    )
    assert journal.step(RUN, 1) is step
    assert journal.step(RUN, 2) is None
    assert journal.steered(1) == ["m_2"]
    assert journal.steered_ids == {"m_2", "m_3"}
    assert journal.answer("r_1.1.1") is answer
    assert journal.answer("r_1.1.2") is None
    assert journal.restarts_in_vain == 1


def test_readers_drop_what_was_said_after_the_last_whole_step_of_the_run_itself() -> None:
    own = StepFinished(run_id=RUN, step=1, seq=7)
    of_child = StepFinished(run_id="r_1.2", step=1, seq=20)
    assert Journal([own, child(), of_child]).discard_from == 8
    assert Journal([child(), of_child]).discard_from is None


def test_another_child_or_call_than_before_is_named() -> None:
    journal = Journal([child(), started("r_1.1")])
    with pytest.raises(NotDeterministic, match="was 'child' in an earlier attempt and is 'other' now"):
        journal.outcome("r_1.2", "other")
    with pytest.raises(NotDeterministic, match="had different arguments"):
        journal.past("r_1.1", "tool", {"a": 1})
    assert journal.begun_names == ("tool",)
