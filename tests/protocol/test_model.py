"""Transcripts as messages of a model: who speaks when, and what belongs together."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.protocol.messages import Attachment, Entry
from holdfast.protocol.model import (
    BEGINNING,
    NO_RESULT,
    NOTHING,
    AssistantMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    conversation,
    read_arguments,
    tool_name,
)


def entry(role: Any, content: str = "", **more: Any) -> Entry:
    return Entry(role=role, content=content, **more)


def asked(call_id: str, content: str = "{}") -> Entry:
    return entry("tool_call", content, call_id=call_id, name="tool")


def gave(call_id: str, content: str, **more: Any) -> Entry:
    return entry("tool_result", content, call_id=call_id, name="tool", **more)


def test_calls_stand_with_the_text_before_them_and_results_follow_in_the_order_of_the_calls() -> None:
    messages = conversation(
        [entry("user", "go"), entry("assistant", "I look"), asked("a"), asked("b"), gave("b", "2"), gave("a", "1")]
    )
    calls = (ToolCall(call_id="a", name="tool", arguments={}), ToolCall(call_id="b", name="tool", arguments={}))
    assert messages == (
        UserMessage(content="go"),
        AssistantMessage(text="I look", calls=calls),
        ToolMessage(call_id="a", name="tool", content="1"),
        ToolMessage(call_id="b", name="tool", content="2"),
    )


def test_a_call_that_came_after_a_result_is_a_message_of_its_own() -> None:
    messages = conversation([entry("user", "go"), asked("a"), asked("b"), gave("a", "1"), asked("c"), gave("b", "2")])
    calls = [[call.call_id for call in m.calls] for m in messages if isinstance(m, AssistantMessage)]
    assert calls == [["a", "b"], ["c"]]
    assert [m.call_id for m in messages if isinstance(m, ToolMessage)] == ["a", "b", "c"]
    assert messages[-1] == ToolMessage(call_id="c", name="tool", content=NO_RESULT, status="interrupted")


def test_users_and_assistants_take_turns_and_nobody_says_nothing() -> None:
    assert conversation([entry("user", "one"), entry("user", "two"), entry("assistant", " \n")]) == (
        UserMessage(content="one\n\ntwo"),
    )
    assert conversation([entry("assistant", "hello"), entry("user", "")]) == (
        UserMessage(content=BEGINNING),
        AssistantMessage(text="hello"),
        UserMessage(content=NOTHING),
    )
    image = Attachment(digest="0" * 64, media_type="image/png")
    assert conversation([entry("user", "", attachments=(image,)), entry("user", "look")]) == (
        UserMessage(content="look", attachments=(image,)),
    )


def test_a_summary_stands_for_what_was_before() -> None:
    [message] = conversation([entry("summary", "they met"), entry("user", "and now?")])
    assert isinstance(message, UserMessage)
    assert "they met" in message.content
    assert message.content.endswith("and now?")


def test_a_partial_answer_is_marked_and_the_status_of_a_result_is_kept() -> None:
    messages = conversation(
        [entry("user", "go"), asked("a"), gave("a", "no", status="error"), entry("assistant", "I w", partial=True)]
    )
    assert messages[2] == ToolMessage(call_id="a", name="tool", content="no", status="error")
    assert messages[3] == AssistantMessage(text="I w", partial=True)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("null", {}),
        ("{broken", "{broken"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_an_object_or_the_text_as_it_is(text: str, read: object) -> None:
    assert read_arguments(text) == read


def test_a_name_is_made_of_letters_that_providers_take() -> None:
    assert tool_name("grüße all!") == "gr__e_all_"
    assert tool_name("") == "unnamed"
    assert len(tool_name("x" * 100)) == 64
