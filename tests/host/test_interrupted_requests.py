"""A request that did not complete is neither joined with the next one nor carried out: the model is told so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent, Host, Settings
from holdfast.agents.scripted import Pause, ScriptedModel
from holdfast.errors import ModelFailed, RunFailed, RunInterrupted
from holdfast.host.session import Session
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.messages import Entry
from holdfast.protocol.model import ENDED_BY, AssistantMessage, CallPart, ModelRequest, UserMessage, conversation
from tests.protocol.rules import check_request

SETTINGS = Settings(grace_s=5.0, abandon_after_s=20.0, drain_timeout_s=0.2, quiet_s=0.01, max_wait_s=0.05)
DELETE = "delete all my files"
Answer = Callable[[ModelRequest], Any]


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both stores."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


def model_of(first: Any) -> ScriptedModel:
    """Gives `first` to a request to delete, and "Hello." to any other; refuses what providers would refuse."""

    def answer(request: ModelRequest) -> Any:
        check_request(request.messages)
        last = request.messages[-1]
        return first if isinstance(last, UserMessage) and last.content.startswith(DELETE) else "Hello."

    return ScriptedModel(answer)


def hosted(
    scenario: Callable[[Session, ScriptedModel], Coroutine[Any, Any, None]],
    first: Any,
    store: str,
    settings: Settings = SETTINGS,
    **options: Any,
) -> None:
    """Run the scenario with a session of an agent whose model answers so."""
    model = model_of(first)

    async def main() -> None:
        async with asyncio.timeout(60):
            async with Host(Agent(name="agent", model=model, **options), store=store, settings=settings) as host:
                await scenario(host.session("s"), model)

    asyncio.run(main())


async def begun(session: Session, model: ScriptedModel, kind: str = "step.started") -> None:
    """Send the request, and wait for an event of its run."""
    receipt = await session.send(DELETE)
    async for event in session.events(after=receipt.cursor):
        if event.kind == kind:
            return


def noted(model: ScriptedModel) -> str:
    """What the newest request says between the request and the greeting."""
    messages = model.requests[-1].messages
    assert isinstance(messages[0], UserMessage) and messages[0].content == DELETE
    assert isinstance(messages[-1], UserMessage) and messages[-1].content == "hello"
    assert isinstance(messages[-2], AssistantMessage)
    return messages[-2].text


FOREVER = [Pause(math.inf), "never"]
HALF = ["I will", Pause(math.inf), "never"]


@pytest.mark.parametrize(("first", "word"), [(FOREVER, "answered"), (HALF, "finished")], ids=["silent", "partly"])
def test_an_interrupt_is_told(first: Any, word: str, store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model, "step.started" if first is FOREVER else "text.delta")
        await session.interrupt("enough")
        assert await session.ask("hello") == "Hello."
        assert f"interrupted by the user before this was {word}" in noted(model)
        assert "not to be carried out unless it is asked for again" in noted(model)
        ended = [entry.ended_by for entry in await session.transcript()]
        assert ended.count("user") == 1 and ended[-1] is None

    hosted(scenario, first, store)


async def never() -> str:
    """Wait until it is stopped."""
    await asyncio.get_running_loop().create_future()
    return ""


def test_an_interrupt_within_a_tool_is_told(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model, "tool.started")
        await session.interrupt()
        assert await session.ask("hello") == "Hello."
        assert "before this was finished" in noted(model)

    hosted(scenario, [CallPart(name="never", arguments={})], store, tools=[never])


def test_a_stop_is_told(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        await session.stop()
        await session.ask("hello")
        assert "stopped by the user" in noted(model)

    hosted(scenario, FOREVER, store)


def test_a_deadline_is_told(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        with pytest.raises(RunInterrupted):
            await session.ask(DELETE)
        await session.ask("hello")
        assert "out of time" in noted(model)

    hosted(scenario, FOREVER, store, limits=AgentLimits(step_timeout_s=2.0))


def test_a_budget_is_told(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        with pytest.raises(RunInterrupted):
            await session.ask(DELETE)
        await session.ask("hello")
        assert "out of budget" in noted(model)

    hosted(scenario, [CallPart(name="never", arguments={})], store, tools=[never], limits=AgentLimits(tool_calls=0))


def test_a_failure_is_told(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        with pytest.raises(RunFailed):
            await session.ask(DELETE)
        await session.ask("hello")
        assert "failed with an error before this was answered" in noted(model)

    hosted(scenario, ModelFailed("no"), store)


def test_the_policy_interrupt_says_which_message_counts(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        assert await session.ask("hello", policy="interrupt") == "Hello."
        assert "interrupted by the user's next message before this was answered; go by that message" in noted(model)

    hosted(scenario, FOREVER, store)


def test_messages_that_wait_are_run_together_after_the_interrupt(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        await session.send("first")
        assert await session.ask("hello", policy="interrupt") == "Hello."
        request, note, both = model.requests[-1].messages
        assert request.content == DELETE  # type: ignore[union-attr]
        assert isinstance(note, AssistantMessage)
        assert isinstance(both, UserMessage) and both.content == "first\n\nhello"

    hosted(scenario, FOREVER, store)


def test_what_was_rolled_back_is_not_told_at_all(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        assert await session.ask("hello", policy="rollback") == "Hello."
        assert [message.content for message in model.requests[-1].messages] == ["hello"]  # type: ignore[union-attr]

    hosted(scenario, FOREVER, store)


def test_a_withdrawn_message_is_not_told_at_all(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        waiting = await session.send("never run this")
        await session.withdraw(waiting.message_id)
        await session.interrupt()
        await session.ask("hello")
        assert "never run this" not in str(model.requests[-1])

    hosted(scenario, FOREVER, store)


def test_an_export_a_fork_and_an_undo_keep_or_take_the_mark(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model, "text.delta")
        await session.interrupt()
        parts = session._parts
        other = Session(parts, "local", "imported", None)
        await other.import_history(await session.export())
        await session.fork("forked")
        await session.fork("cut", through_n=1)
        for key in ("imported", "forked", "cut"):
            assert await Session(parts, "local", key, None).ask("hello") == "Hello."
            assert "interrupted by the user" in noted(model), key
        await session.undo()
        await session.ask("hello")
        assert [message.content for message in model.requests[-1].messages] == ["hello"]  # type: ignore[union-attr]

    hosted(scenario, HALF, store)


def test_a_retry_asks_the_same_again(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        await session.interrupt()
        await session.retry()
        while len(model.requests) < 2:
            await asyncio.sleep(0.01)
        assert [message.content for message in model.requests[-1].messages] == [DELETE]  # type: ignore[union-attr]
        await session.interrupt()

    hosted(scenario, FOREVER, store)


def test_a_summary_is_made_of_the_note_too(store: str) -> None:
    async def scenario(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        await session.interrupt()
        await session.compact(keep=0)
        assert "Assistant: [interrupted by the user before this was answered" in str(model.requests[-1].messages)

    hosted(scenario, FOREVER, store)


def test_after_a_restart_the_mark_is_still_there(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"

    async def first(session: Session, model: ScriptedModel) -> None:
        await begun(session, model)
        await session.interrupt()

    async def second(session: Session, model: ScriptedModel) -> None:
        await session.ask("hello")
        assert "interrupted by the user" in noted(model)

    hosted(first, FOREVER, store)
    hosted(second, FOREVER, store)


@pytest.mark.parametrize("kind", ENDED_BY)
def test_every_cause_has_words(kind: Any) -> None:
    messages = conversation([Entry(role="user", content="x", run_id="r", ended_by=kind)])
    check_request((*messages, UserMessage(content="y")))
    assert str(messages[1].text).startswith("[")  # type: ignore[union-attr]
