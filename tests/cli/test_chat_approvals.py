"""In a chat, a typed y is for the call that was on the screen when it was typed, and for no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.cli.chat import _Conversation
from holdfast.cli.chat_lines import PlainLines
from holdfast.cli.chat_place import ChatPlace
from holdfast.cli.chat_view import JsonChatView
from holdfast.errors import InvalidRequest
from holdfast.protocol.events import Event, RunFinished, RunResumed, RunSuspended
from holdfast.protocol.messages import Answer, Question
from holdfast.testing import run_virtual


class StandIn:
    """A session that notes what is approved."""

    key = "s"

    def __init__(self) -> None:
        self.approved: list[tuple[str, str]] = []

    async def approve(self, question: Question, *, note: str = "", scope: str = "call") -> None:
        self.approved.append((question.question_id, question.call_hash))


def suspended(run_id: str, name: str) -> RunSuspended:
    question = Question(question_id=name, kind="approval", tool="erase", arguments={"name": name}, call_hash=name * 32)
    return RunSuspended(at=1.0, run_id=run_id, question=question)


RESUMED = RunResumed(at=1.0, run_id="r1", answer=Answer(question_id="a", decision="denied"))
FINISHED = RunFinished(at=1.0, run_id="r1", status="interrupted")
REPLACED: dict[str, Sequence[Event]] = {
    "another person answered it, and another waits": [suspended("r1", "b"), RESUMED],
    "another person answered it, and another is asked": [RESUMED, suspended("r1", "b")],
    "its run was ended, and another run asks": [FINISHED, suspended("r2", "b")],
    "it was answered and its run ended": [RESUMED, FINISHED, suspended("r2", "b")],
}


def hear(conversation: _Conversation, events: Sequence[Event]) -> None:
    for event in events:
        conversation._note(event)
        if isinstance(event, (RunSuspended, RunResumed)):
            conversation._ask(event)


@pytest.mark.parametrize("how", REPLACED)
def test_a_y_that_was_on_its_way_does_not_approve_what_took_the_place_of_the_question(how: str) -> None:
    async def main() -> None:
        session: Any = StandIn()
        client: Any = None
        conversation = _Conversation(client, session, None, ChatPlace(JsonChatView(), PlainLines()))
        hear(conversation, [suspended("r1", "a")])
        hear(conversation, REPLACED[how])
        shown = conversation.shown("approval")
        assert shown.question_id == "b"
        with pytest.raises(InvalidRequest, match="a different call has just replaced"):
            await conversation._answer(shown, "y")
        assert session.approved == []
        await asyncio.sleep(1.0)
        await conversation._answer(shown, "y")
        assert session.approved == [("b", "b" * 32)], "bound to the call that was shown"

    run_virtual(main())


def test_a_y_to_the_first_question_and_to_one_after_an_own_answer_counts_at_once() -> None:
    async def main() -> None:
        session: Any = StandIn()
        client: Any = None
        conversation = _Conversation(client, session, None, ChatPlace(JsonChatView(), PlainLines()))
        hear(conversation, [suspended("r1", "a")])
        await conversation._answer(conversation.shown("approval"), "y")
        hear(conversation, [suspended("r1", "b")])
        await conversation._answer(conversation.shown("approval"), "y")
        assert [name for name, _ in session.approved] == ["a", "b"]

    run_virtual(main())
