"""The fold of a run's events: what stands in its transcript, and where."""

from __future__ import annotations

from typing import Any

from holdfast.protocol.events import (
    ChildStarted,
    Event,
    MessageSteered,
    RunRestarted,
    StepFinished,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import Attachment, Message
from holdfast.protocol.model import NO_RESULT, ToolCall
from holdfast.protocol.transcript import RunTranscript

RUN = "r_1"


def said(text: str) -> TextDelta:
    return TextDelta(run_id=RUN, text=text)


def started(call_id: str, **more: Any) -> ToolStarted:
    return ToolStarted(run_id=RUN, call_id=call_id, name="tool", **more)


def finished(call_id: str, status: Any = "ok", **more: Any) -> ToolFinished:
    return ToolFinished(run_id=RUN, call_id=call_id, status=status, **more)


def step(number: int, text: str = "", *call_ids: str) -> StepFinished:
    calls = tuple(ToolCall(call_id=call_id, name="tool", arguments={"n": 1}) for call_id in call_ids)
    return StepFinished(run_id=RUN, step=number, text=text, calls=calls)


def fold(*events: Event, messages: tuple[Message, ...] = ()) -> RunTranscript:
    transcript = RunTranscript(RUN, messages)
    for event in events:
        transcript.feed(event)
    return transcript


def shown(transcript: RunTranscript, status: Any = "completed") -> list[tuple[str, str]]:
    return [(entry.role, entry.content) for entry in transcript.entries(status=status)]


def test_a_step_says_its_text_once_and_opens_its_calls_in_order() -> None:
    transcript = fold(
        said("I l"),
        said("ook"),
        step(1, "I look", "r_1.1.1", "r_1.1.2"),
        started("r_1.1.2"),
        started("r_1.1.1"),
        finished("r_1.1.2", result={"a": 1}),
        finished("r_1.1.1", result="one"),
        said("\n\n"),
        said("Done"),
        step(2, "Done"),
    )
    assert shown(transcript) == [
        ("assistant", "I look"),
        ("tool_call", '{"n":1}'),
        ("tool_call", '{"n":1}'),
        ("tool_result", '{"a":1}'),
        ("tool_result", "one"),
        ("assistant", "Done"),
    ]
    assert transcript.text == "I look\n\nDone"


def test_calls_and_children_inside_of_a_call_are_no_part_of_it() -> None:
    transcript = fold(
        step(1, "", "r_1.1.1"),
        started("r_1.1.1"),
        started("r_1.1.1.1"),
        finished("r_1.1.1.1", result="inner"),
        ChildStarted(run_id=RUN, child_id="r_1.7", agent="child"),
        TextDelta(run_id="r_1.7", text="of the child"),
        started("r_1.7.1"),
        finished("r_1.7.1", result="of the child"),
        started("r_1.3.1"),  # of a branch of a function agent
        finished("r_1.3.1", result="of a branch"),
        finished("r_1.1.1", result="outer"),
    )
    assert shown(transcript) == [
        ("tool_call", '{"n":1}'),
        ("tool_call", "null"),
        ("tool_result", "of a branch"),
        ("tool_result", "outer"),
    ]


def test_a_steered_message_stands_where_it_was_given() -> None:
    messages = (
        Message(message_id="m_1", seq=1, content="go"),
        Message(message_id="m_2", seq=5, content="and this", attachments=(Attachment(digest="d", media_type="t"),)),
        Message(message_id="m_3", seq=6, content="later"),
    )
    given = [MessageSteered(run_id=RUN, message_id="m_2", step=2)] * 2  # told twice: it is there once
    transcript = fold(step(1, "one"), *given, step(2, "two"), messages=messages[:2])
    transcript.know(messages[2:])  # taken, but the run was interrupted before it was given
    assert shown(transcript) == [
        ("user", "go"),
        ("assistant", "one"),
        ("user", "and this"),
        ("assistant", "two"),
        ("user", "later"),
    ]
    assert transcript.entries(status="completed")[2].attachments == messages[1].attachments


def test_a_new_attempt_keeps_whole_steps_and_drops_the_rest_that_was_said() -> None:
    transcript = fold(step(1, "one", "r_1.1.1"), finished("r_1.1.1", result="x"), said("\n\nhal"))
    transcript.feed(RunRestarted(run_id=RUN, attempt=2, discard_from=3))
    assert shown(transcript, "interrupted") == [("assistant", "one"), ("tool_call", '{"n":1}'), ("tool_result", "x")]
    assert transcript.text == "one"
    assert transcript.size == 3


def test_a_new_attempt_of_an_agent_without_steps_says_everything_again() -> None:
    transcript = fold(said("half"), started("r_1.1"), finished("r_1.1", "interrupted"), said("more"))
    transcript.feed(RunRestarted(run_id=RUN, attempt=2, discard_from=0))
    transcript.feed(started("r_1.1"))
    transcript.feed(said("whole"))
    assert shown(transcript) == [("tool_call", "null"), ("assistant", "whole"), ("tool_result", NO_RESULT)]


def test_what_was_cut_off_is_marked_and_open_calls_get_a_result() -> None:
    transcript = fold(step(1, "one", "r_1.1.1", "r_1.1.2"), finished("r_1.1.2", "error", error="no"), said("\n\nI w"))
    entries = transcript.entries(status="interrupted")
    assert [(e.role, e.status) for e in entries if e.role == "tool_result"] == [
        ("tool_result", "error"),
        ("tool_result", "interrupted"),
    ]
    assert [(e.content, e.partial) for e in entries if e.role == "assistant"] == [("one", False), ("I w", True)]


def test_a_summary_of_what_was_before_is_no_part_of_the_run() -> None:
    transcript = fold(step(0, "They spoke."), step(1, "Done."))
    assert shown(transcript) == [("assistant", "Done.")]
    assert transcript.text == "Done."
