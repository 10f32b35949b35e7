"""Events on the wire and cursors."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidCursor
from holdfast.protocol.events import (
    EVENT_KINDS,
    Event,
    RunRestarted,
    Stored,
    TextDelta,
    ToolFinished,
    ToolStarted,
    decode_event,
    encode_event,
    format_cursor,
    parse_cursor,
    wire,
)
from holdfast.protocol.messages import Answer, Message, Question
from holdfast.protocol.stopping import Cause, StopCounts, StopReceipt, join_receipts
from holdfast.protocol.transcript import RunTranscript

EXAMPLES: dict[type, Any] = {
    str: "text\0\n\u2028",
    int: 3,
    bool: True,
    Cause: Cause(kind="user", reason="x"),
    Question: Question(question_id="r.1", kind="approval", arguments={"a": 1}),
    Answer: Answer(question_id="r.1", decision="denied", text="no"),
}


def example(event_type: Any) -> Event:
    """An event of that type with a value in each field that needs one."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(event_type):
        if field.required:
            options = get_args(field.type)
            values[field.name] = options[0] if options and isinstance(options[0], str) else EXAMPLES.get(field.type, ())
    event: Event = event_type(**values)
    return event


@pytest.mark.parametrize("event_type", get_args(Event), ids=lambda t: t.__name__)
def test_each_kind_survives_the_store_and_the_wire(event_type: Any) -> None:
    event = example(event_type)
    kind, body = encode_event(event)
    assert kind in EVENT_KINDS
    assert b"\n" not in body
    stored = Stored(17, kind, body)
    assert decode_event(stored) == msgspec.structs.replace(event, seq=17)
    assert msgspec.json.decode(wire(stored))["seq"] == 17
    assert msgspec.json.decode(wire(stored))["kind"] == kind


def test_the_union_is_closed() -> None:
    assert len(EVENT_KINDS) == len(set(EVENT_KINDS)) == len(get_args(Event))
    with pytest.raises(msgspec.ValidationError):
        decode_event(Stored(1, "text.shouted", b'{"kind":"text.shouted","run_id":"r","text":"x"}'))


@given(st.integers(0, 10**18 - 1), st.integers(0, 10**9))
def test_a_cursor_is_read_as_it_was_written(seq: int, number: int) -> None:
    assert parse_cursor(format_cursor(seq, number), number) == seq


@given(st.text(max_size=20))
def test_any_other_text_is_refused(text: str) -> None:
    try:
        seq = parse_cursor(text, 5)
    except InvalidCursor:
        return
    assert int(text.partition("-")[2]) == 5
    assert int(text.partition("-")[0]) == seq


@given(
    st.lists(st.tuples(st.sampled_from("tsfxr"), st.integers(1, 4)), max_size=30),
    st.sampled_from(["completed", "failed", "interrupted"]),
)
def test_a_transcript_pairs_each_call_with_one_result_whatever_comes(steps: list[tuple[str, int]], status: Any) -> None:
    transcript = RunTranscript("r", [Message(message_id="m", seq=1, content="go")])
    for step, number in steps:
        match step:
            case "t":
                transcript.feed(TextDelta(run_id="r", text=f"{number} "))
            case "s":
                transcript.feed(ToolStarted(run_id="r", call_id=f"c{number}", name="tool"))
            case "f":
                transcript.feed(ToolFinished(run_id="r", call_id=f"c{number}", status="ok", result=number))
            case "x":
                transcript.feed(TextDelta(run_id="a child", text="not mine"))
            case _:
                transcript.feed(RunRestarted(run_id="r", attempt=2, discard_from=2))
    entries = transcript.entries(status=status)
    assert entries[0].role == "user"
    calls = [e.call_id for e in entries if e.role == "tool_call"]
    results = [e.call_id for e in entries if e.role == "tool_result"]
    assert sorted(map(str, calls)) == sorted(map(str, results))
    assert len(set(calls)) == len(calls)
    for call in calls:
        roles = [e.role for e in entries if e.call_id == call]
        assert roles == ["tool_call", "tool_result"]
    said = "".join(e.content for e in entries if e.role == "assistant")
    assert said == transcript.text
    assert "not mine" not in said
    assert all(e.partial is False for e in entries if status == "completed")


def test_joined_receipts_have_the_worst_outcome_and_the_sum() -> None:
    cause = Cause(kind="stop")
    one = StopReceipt(scope="a", cause=cause, stopped=StopCounts(tasks=1), elapsed_s=1)
    two = StopReceipt(
        scope="b", cause=cause, outcome="quarantined", stopped=StopCounts(tasks=2, threads=1), elapsed_s=3
    )
    three = StopReceipt(scope="c", cause=cause, outcome="unknown", survivors=(7,), unattributed=("x",))
    assert join_receipts(one) is one
    joined = join_receipts(one, two, three)
    assert (joined.scope, joined.outcome, joined.stopped.tasks, joined.elapsed_s) == ("a", "unknown", 3, 3)
    assert joined.survivors == (7,)
    assert joined.unattributed == ("x",)
    assert join_receipts(one, two).outcome == "quarantined"


def test_joined_receipts_have_a_reason_for_each_forced_member_also_beside_receipts_of_older_versions() -> None:
    cause = Cause(kind="stop")
    old = StopReceipt(scope="a", cause=cause, forced=("x", "y"))
    new = StopReceipt(scope="b", cause=cause, forced=("z",), force_reasons=("ignored SIGTERM for 5 s",))
    joined = join_receipts(old, new)
    assert joined.forced == ("x", "y", "z")
    assert joined.force_reasons == ("", "", "ignored SIGTERM for 5 s")
    assert join_receipts(old, old).force_reasons == ()
