"""Questions, edited histories and attachments: the same on a host and through a client."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Agent, Client, Host, Run, Settings, tool
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import (
    AlreadyAnswered,
    HistoryChanged,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    NothingToUndo,
    NotSupported,
    SessionBusy,
    UnknownAttachment,
    UnknownQuestion,
    UnknownSession,
)
from holdfast.protocol.messages import Attachment, Question, SessionExport
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage
from holdfast.protocol.session_api import SessionAPI
from tests.client.test_client import Scenario
from tests.server.live import GUARD_S, echo, live

SETTINGS: dict[str, Any] = {"drain_timeout_s": 0.2, "grace_s": 0.2, "attachment_limit_bytes": 1000}


@tool(approval=True)
def erase(name: str) -> str:
    """Erase a file."""
    return f"{name} is erased"


def _eraser(request: ModelRequest) -> Any:
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return f"it says: {last.content}"
    return CallPart(name="erase", arguments={"name": "a.txt"})


async def asker(run: Run) -> str:
    """Ask a person."""
    if run.text == "first":
        await run.ask_user("which shape?")
    answer = await run.ask_user("which colour?")
    return f"{answer.decision} {answer.text}"


async def seen(run: Run) -> str:
    """Say which attachments the message has."""
    return ",".join(f"{one.name}:{one.media_type}" for message in run.messages for one in message.attachments)


def agents() -> list[Any]:
    """New ones for each host: a model keeps what it was asked."""
    eraser = Agent(name="eraser", model=ScriptedModel(_eraser), tools=[erase])
    writer = Agent(name="writer", model=ScriptedModel("a summary"))
    return [echo, asker, seen, eraser, writer]


def both(scenario: Scenario) -> None:
    """Run the scenario on sessions of a host, then on sessions of a client."""

    async def main() -> None:
        async with asyncio.timeout(GUARD_S):
            async with Host(agents=agents(), store="memory://", settings=Settings(**SETTINGS)) as host:
                await scenario(host.session)
            async with live(*agents(), **SETTINGS) as server, Client(server.url) as client:
                await scenario(client.session)

    asyncio.run(main())


async def asked(session: SessionAPI, agent: str, text: str = "go") -> tuple[Question, str]:
    """Start a run that asks something; the question, and the message that began it."""
    receipt = await session.send(text, agent=agent)
    async for event in session.events(after=receipt.cursor):
        if event.kind == "run.suspended":
            break
    (question,) = await session.questions()
    return question, receipt.message_id


def test_a_call_waits_for_its_approval() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        question, message_id = await asked(session, "eraser")
        assert (question.kind, question.tool, question.arguments) == ("approval", "erase", {"name": "a.txt"})
        assert (await session.info()).state == "suspended"
        assert (await session.runs())[0].questions == (question,)
        with pytest.raises(InvalidRequest):
            await session.answer(question.question_id, "yes")
        given = await session.approve(question, note="fine")
        assert (given.decision, given.text, given.by) == ("approved", "fine", "local")
        assert (await session.wait(message_id, timeout_s=GUARD_S)).text == "it says: a.txt is erased"
        assert await session.questions() == []
        with pytest.raises(UnknownQuestion):
            await session.deny(question.question_id)

    both(scenario)


def test_a_denial_and_its_reason_reach_the_model() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        question, message_id = await asked(session, "eraser")
        assert (await session.deny(question.question_id, reason="it is mine")).decision == "denied"
        assert "it is mine" in (await session.wait(message_id, timeout_s=GUARD_S)).text

    both(scenario)


def test_a_question_gets_its_answer() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        question, message_id = await asked(session, "asker")
        assert (question.kind, question.text) == ("question", "which colour?")
        with pytest.raises(InvalidRequest):
            await session.approve(question)
        with pytest.raises(UnknownQuestion):
            await session.answer("no such", "x")
        with pytest.raises(UnknownSession):
            await session_of("nobody").questions()
        await session.answer(question.question_id, "blue: ✓")
        assert (await session.wait(message_id, timeout_s=GUARD_S)).text == "answered blue: ✓"

    both(scenario)


def test_the_same_answer_again_has_no_effect_and_another_one_is_refused() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        first, message_id = await asked(session, "asker", "first")
        given = await session.answer(first.question_id, "round")
        assert await session.answer(first.question_id, "round") == given
        with pytest.raises(AlreadyAnswered):
            await session.answer(first.question_id, "square")
        while not (questions := await session.questions()):
            await asyncio.sleep(0.005)
        await session.answer(questions[0].question_id, "red")
        assert (await session.wait(message_id, timeout_s=GUARD_S)).text == "answered red"

    both(scenario)


def test_a_run_is_retried_and_undone() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        for text in ("one", "two"):
            await session.ask(text, timeout_s=GUARD_S, agent="echo")
        receipt = await session.retry()
        await session.wait(receipt.message_id, timeout_s=GUARD_S)
        assert [entry.content for entry in await session.transcript()] == ["one", "echo one", "two", "echo two"]
        assert [entry.content for entry in await session.undo()] == ["two", "echo two"]
        assert [entry.content for entry in await session.transcript()] == ["one", "echo one"]
        await session.undo()
        with pytest.raises(NothingToUndo):
            await session.undo()
        with pytest.raises((NothingToUndo, HistoryChanged)):
            await session.retry()
        await asked(session, "asker")
        with pytest.raises(SessionBusy):
            await session.undo()
        with pytest.raises(SessionBusy):
            await session.retry()

    both(scenario)


def test_a_history_is_summed_up_by_the_model() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        for text in ("one", "two", "three"):
            await session.ask(text, timeout_s=GUARD_S, agent="writer")
        entries = await session.compact(keep=1)
        assert [(entry.role, entry.content) for entry in entries] == [
            ("summary", "a summary"),
            ("user", "three"),
            ("assistant", "a summary"),
        ]
        assert await session.transcript() == entries
        plain = session_of("plain")
        await plain.ask("one", timeout_s=GUARD_S, agent="echo")
        with pytest.raises(NotSupported):
            await plain.compact()

    both(scenario)


def test_a_branch_has_a_copy_and_leaves_the_first_one_alone() -> None:
    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        for text in ("one", "two"):
            await session.ask(text, timeout_s=GUARD_S, agent="echo")
        view = await session.fork("other", through_n=2)
        assert (view.key, view.agent, view.state) == ("other", "echo", "idle")
        other = session_of("other")
        await other.ask("three", timeout_s=GUARD_S)
        assert [e.content for e in await other.transcript()] == ["one", "echo one", "three", "echo three"]
        assert len(await session.transcript()) == 4
        with pytest.raises(SessionBusy):
            await session.fork("other")
        with pytest.raises(InvalidKey):
            await session.fork("a/b")

    both(scenario)


def test_an_export_is_imported_with_its_attachments() -> None:
    body = bytes(range(256))

    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        kept = await session.attach(body, media_type="image/png", name="a b é.png")
        await session.ask("look", timeout_s=GUARD_S, agent="seen", attachments=[kept])
        export = await session.export()
        assert isinstance(export, SessionExport)
        assert export.attachments == {kept.digest: body}
        view = await session_of("copy").import_history(export)
        assert (view.key, view.agent) == ("copy", "seen")
        assert [e.content for e in await session_of("copy").transcript()] == ["look", "a b é.png:image/png"]
        with pytest.raises(SessionBusy):
            await session_of("copy").import_history(export)

    both(scenario)


def test_attachments_are_kept_by_their_hash() -> None:
    body = b"\x00\x01 bytes"

    async def scenario(session_of: Callable[[str], SessionAPI]) -> None:
        session = session_of("s")
        kept = await session.attach(body, media_type="text/html", name="page.html")
        digest = hashlib.sha256(body).hexdigest()
        assert kept == Attachment(digest=digest, media_type="text/html", name="page.html", size_bytes=len(body))
        assert await session_of("other").attachment(digest) == (kept, body)
        unnamed = await session.attach(b"", media_type="application/x-empty")
        assert await session.attachment(unnamed.digest) == (unnamed, b"")
        assert await session.ask("look", timeout_s=GUARD_S, agent="seen", attachments=[kept]) == "page.html:text/html"
        user = (await session.transcript())[0]
        assert user.attachments == (kept,)
        with pytest.raises(UnknownAttachment):
            await session.attachment("0" * 64)
        with pytest.raises(UnknownAttachment):
            await session.send("x", attachments=[Attachment(digest="0" * 64, media_type="a/b")])
        with pytest.raises(LimitExceeded):
            await session.attach(b"x" * 1001, media_type="text/plain")
        for media_type, name in (("nonsense", "x"), ("a/b", "a/b"), ("a/b\r\nx: y", "x"), ("a/b", "x" * 300)):
            with pytest.raises(InvalidRequest):
                await session.attach(b"x", media_type=media_type, name=name)

    both(scenario)
