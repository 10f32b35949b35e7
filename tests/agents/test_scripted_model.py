"""A list of scripted answers is used in order, once in each session, whatever stops the runs."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import Agent, CallPart, Host, ScriptedModel, tool
from holdfast.agents.scripted import Pause
from holdfast.errors import RunFailed
from holdfast.events import TextDelta, ToolStarted
from holdfast.host import Session
from holdfast.testing import run_virtual


@tool
async def nap() -> None:
    """Sleep for an hour."""
    await asyncio.sleep(3600)


async def interrupted_at(session: Session, kind: type[object]) -> None:
    sent = await session.send("first")
    async for event in session.events():
        if isinstance(event, kind):
            break
    await session.interrupt("changed my mind")
    await session.wait(sent.message_id)


@pytest.mark.parametrize(
    ("first", "seen"),
    [
        (CallPart(name="nap", arguments={}), ToolStarted),
        (["I sleep.", CallPart(name="nap", arguments={})], ToolStarted),
        (["I sleep.", CallPart(name="nap", arguments={}), CallPart(name="nap", arguments={})], ToolStarted),
        (["I begin", Pause(3600), "and end."], TextDelta),
    ],
)
def test_no_answer_is_left_out_after_an_interrupt(first: object, seen: type[object]) -> None:
    async def scenario() -> None:
        model = ScriptedModel([first, "two", "three"])  # type: ignore[list-item]
        async with Host(Agent(name="sleeper", model=model, tools=[nap]), store="memory://") as host:
            session = host.session("s")
            await interrupted_at(session, seen)
            assert [await session.ask("next"), await session.ask("next")] == ["two", "three"]
            with pytest.raises(RunFailed, match="the script has 3 answers, and one more was requested"):
                await session.ask("next")

    run_virtual(scenario())


def test_an_answer_of_which_nothing_was_stored_is_used_again() -> None:
    async def scenario() -> None:
        model = ScriptedModel([[Pause(5), "one"], "two"])
        async with Host(Agent(name="slow", model=model), store="memory://") as host:
            session = host.session("s")
            sent = await session.send("first")
            await asyncio.sleep(1)
            await session.interrupt("changed my mind")
            await session.wait(sent.message_id)
            assert [await session.ask("next"), await session.ask("next")] == ["one", "two"]

    run_virtual(scenario())
