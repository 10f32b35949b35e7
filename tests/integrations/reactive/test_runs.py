"""A bridge of a run: its items are children and branches of the run, in its journal, its budget and its tree."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import reactivex

from holdfast import Host, Run, Settings, agent
from holdfast.agents import Agent
from holdfast.errors import ConfigurationError, RunFailed, RunInterrupted
from holdfast.integrations.reactive import Outcome, ReactiveBridge
from holdfast.protocol.events import ChildFinished, ChildStarted, ToolStarted
from holdfast.storage.memory import MemoryStore
from holdfast.testing import VirtualClock, run_virtual
from tests.agents.test_run import log, says, talk
from tests.integrations.reactive.watching import gone, soon


@agent(name="shout")
async def shout(run: Run) -> str:
    await asyncio.sleep(0.001 * len(run.text))
    return run.text.upper()


@agent(name="sleeper")
async def sleeper(run: Run) -> str:
    await asyncio.sleep(1000)
    return "awake"


def test_items_are_children_with_their_answers_in_the_log() -> None:
    async def parent(run: Run) -> str:
        async with ReactiveBridge(run, concurrency=2, ordered=True) as bridge:
            words = reactivex.from_iterable(["ccc", "a", "bb"])
            return " ".join(await bridge.collect(words.pipe(bridge.each(shout))))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("go") == "CCC A BB"
        events = await log(session)
        started = [event for event in events if isinstance(event, ChildStarted)]
        assert [(event.agent, event.text) for event in started] == [("shout", "ccc"), ("shout", "a"), ("shout", "bb")]
        run_id = started[0].run_id
        assert [event.child_id for event in started] == [f"{run_id}.1.{n}.1" for n in (1, 2, 3)]
        finished = [event for event in events if isinstance(event, ChildFinished)]
        assert {event.status for event in finished} == {"completed"}

    talk(parent, scenario=scenario)


def test_what_an_item_asks_an_agent_is_said_by_a_function() -> None:
    async def parent(run: Run) -> str:
        async with ReactiveBridge(run) as bridge:
            numbered = bridge.each(shout, text=lambda number: f"number {number}")
            answers = await bridge.collect(reactivex.of(1, 2).pipe(numbered))
            with pytest.raises(TypeError, match="pass a function as text="):
                await bridge.collect(reactivex.of(1).pipe(bridge.each(shout)))
            return str(sorted(answers))

    assert says(parent) == "['NUMBER 1', 'NUMBER 2']"


def test_an_agent_that_fails_ends_the_stream_or_is_an_outcome() -> None:
    async def fragile(run: Run) -> str:
        if run.text == "bad":
            raise ValueError("no")
        return run.text

    async def parent(run: Run) -> str:
        async with ReactiveBridge(run, ordered=True) as bridge:
            words = reactivex.of("good", "bad", "better")
            child = Agent(name="fragile", work=fragile)
            with pytest.raises(RunFailed, match="child fragile failed: ValueError: no"):
                await bridge.collect(words.pipe(bridge.each(child)))
            outcomes: list[Outcome] = await bridge.collect(words.pipe(bridge.each(child, outcomes=True)))
            return " ".join(one.settled for one in outcomes)

    assert says(parent) == "done failed done"


def test_an_interrupt_of_the_run_reaches_every_item_and_the_next_run_works() -> None:
    alive = 0

    async def item(_: str) -> None:
        nonlocal alive
        alive += 1
        try:
            await asyncio.sleep(1000)
        finally:
            alive -= 1

    bridges: list[ReactiveBridge] = []

    async def parent(run: Run) -> str:
        if run.text == "again":
            return "works"
        async with ReactiveBridge(run, concurrency=10) as bridge:
            bridges.append(bridge)
            words = reactivex.concat(reactivex.from_iterable([str(n) for n in range(50)]), reactivex.never())
            words.pipe(bridge.each(item)).subscribe()
            words.pipe(bridge.each(sleeper)).subscribe()
            await asyncio.sleep(1000)
        return "never"

    async def scenario(host: Host) -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        session = host.session("s")
        receipt = await session.send("go")
        await soon(lambda: alive == 10)
        await soon(lambda: len(bridges[0].scope.children()) == 2)
        tree = await session.tree()
        assert "reactive" in str(tree)
        stopped = await session.interrupt("enough")
        assert stopped.outcome == "gone"
        assert alive == 0
        gone(bridges[0])
        assert (await session.wait(receipt.message_id)).state == "interrupted"
        # These observers take no errors, so the loop heard of them: both, with the cause.
        assert [type(error) for error in told] == [RunInterrupted, RunInterrupted]
        assert all("enough" in str(error) for error in told)
        assert await session.ask("again") == "works"

    talk(parent, scenario=scenario)


def test_branches_of_items_have_calls_of_their_own_and_none_is_made_again_in_a_later_attempt() -> None:
    called: list[str] = []

    async def effect(word: str) -> str:
        called.append(word)
        return word.upper()

    @agent(name="workbench", replayable=True)
    async def parent(run: Run) -> str:
        async def item(word: str) -> str:
            return str(await run.call(effect, word))

        @agent(name="child")
        async def child(run: Run) -> str:
            return str(await run.call(effect, run.text))

        async with ReactiveBridge(run, ordered=True) as bridge:
            words = reactivex.from_iterable(["a", "b", "c"])
            by_function = await bridge.collect(words.pipe(bridge.each(item)))
            by_agent = await bridge.collect(words.pipe(bridge.each(child, text=lambda word: word + word)))
            await asyncio.sleep(100 if run.attempt == 1 else 0)
            return " ".join(by_function + by_agent)

    async def scenario() -> None:
        store = MemoryStore()
        async with Host(
            parent, store=store, clock=VirtualClock(), settings=Settings(drain_timeout_s=1, grace_s=1)
        ) as host:
            receipt = await host.session("s").send("go")
            await asyncio.sleep(1)
            assert (await host.drain()).suspended == (receipt.run_id,)
        assert sorted(called) == ["a", "aa", "b", "bb", "c", "cc"]
        async with Host(parent, store=store, clock=VirtualClock()) as host:
            settlement = await host.session("s").wait(receipt.message_id)
            assert (settlement.state, settlement.text) == ("completed", "A B C AA BB CC")
            calls = {event.call_id for event in await log(host.session("s")) if isinstance(event, ToolStarted)}
            assert len(calls) == 6
        assert len(called) == 6

    run_virtual(scenario())


def test_an_item_that_asks_a_person_lets_the_others_go_on() -> None:
    begun: list[str] = []
    resting: list[bool] = []

    @agent(name="asking", replayable=True)
    async def parent(run: Run) -> str:
        async def item(word: str) -> str:
            if word == "ask":
                return (await run.ask_user("may I?")).text
            begun.append(word)
            await asyncio.sleep(0.3)
            resting.append(run.context.activity.busy == 0)
            return word

        async with ReactiveBridge(run, ordered=True) as bridge:
            return " ".join(await bridge.collect(reactivex.of("a", "ask", "b").pipe(bridge.each(item))))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        questions: list[Any] = []
        async with asyncio.timeout(60):
            while not questions:
                await asyncio.sleep(0.01)
                questions = list(await session.questions())
        await session.answer(questions[0].question_id, "yes")
        assert (await session.wait(receipt.message_id)).text == "a yes b"
        assert sorted(begun) == ["a", "b"]
        assert resting == [False, False]  # the run is not put aside while an item is at work

    talk(parent, scenario=scenario)


def test_a_bridge_of_what_is_neither_a_run_nor_a_scope_is_refused_with_a_hint() -> None:
    owner: Any = Host(shout, store="memory://")
    with pytest.raises(ConfigurationError, match="invalid owner of a bridge: <") as caught:
        ReactiveBridge(owner)
    assert "bridge.ask" in (caught.value.hint or "")
