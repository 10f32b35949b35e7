"""A whole run of the built-in agent, ended at every step of its event loop and restarted after every write."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Agent, Host, tool
from holdfast.agents.scripted import Pause
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.events import ToolStarted
from holdfast.protocol.model import ToolMessage
from holdfast.storage import MemoryStore
from holdfast.storage.memory import MemoryBackend
from holdfast.storage.port import Store
from holdfast.testing import VirtualClock, explore, run_virtual
from tests.agents.modelled import (
    QUICK,
    approve_all,
    busy_agent,
    call,
    careful,
    check_entries,
    log_of,
    model,
    nap,
    steps,
)


class At:
    """Calls something at one step of the running virtual loop, and counts the steps."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        loop: Any = asyncio.get_running_loop()
        self._loop = loop
        self._before = self._loop._count_step
        self._left = step
        self._act = act
        self.seen = 0
        self._loop._count_step = self._count

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self._left:
            self._loop.call_soon(self._act)
        self._before()

    def stop(self) -> None:
        self._loop._count_step = self._before


ENDS: dict[str, Callable[[Host, Any], Any]] = {
    "interrupt": lambda host, session: session.interrupt("now"),
    "interrupt without grace": lambda host, session: session.interrupt("now", grace_s=0),
    "stop": lambda host, session: session.stop("now"),
    "message": lambda host, session: session.send("and now?", policy="interrupt"),
    "rollback": lambda host, session: session.send("and now?", policy="rollback"),
    "steer": lambda host, session: session.send("and this", policy="steer"),
}


def ended_at(step: int, how: str) -> bool:
    """Run, end it at that step, run again; True when the run was over before that."""
    agent, models = busy_agent()

    async def main() -> bool:
        store = MemoryStore()
        async with Host(agent, store=store, settings=QUICK, clock=VirtualClock()) as host:
            session = host.session("s")
            asked: list[asyncio.Task[Any]] = []
            loop = asyncio.get_running_loop()
            sent = await session.send("go")
            counter = At(step, lambda: asked.append(loop.create_task(ENDS[how](host, session))))
            settlement = await session.wait(sent.message_id)
            counter.stop()
            if counter.seen >= step and not asked:
                await asyncio.sleep(0)  # it was about to be asked for
            for task in asked:
                await task
            if how != "steer" and asked:
                assert settlement.state in ("interrupted", "superseded", "completed")
            check_entries(await session.transcript())
            assert await session.ask("again") is not None
            entries = await session.transcript()
            check_entries(entries)
            assert all(used.open == 0 for used in models)
            assert not host.live
            assert not host.scope.children()
            return not asked

    return run_virtual(main())


def long_agent() -> Agent:
    """Sums up on its way, twice."""

    def script(request: Any) -> Any:
        if "summarize" in request.instructions:
            return [Pause(0.001), "In short."]
        results = [message for message in request.messages if isinstance(message, ToolMessage)]
        part = int(results[-1].content.split(":")[0]) + 1 if results else 1
        return call("read", part=part) if part < 6 else "All is read."

    return Agent(name="busy", model=model(script), tools=[read], limits=AgentLimits(context_tokens=300))


@tool(idempotent=True)
async def read(part: int) -> str:
    """Returns much."""
    await asyncio.sleep(0.001)
    return f"{part}: " + "x" * 600


EVERY_STEP = [pytest.param(how, 1, marks=pytest.mark.nightly) for how in ENDS if how != "interrupt"]


@pytest.mark.parametrize(
    ("how", "stride"), [("interrupt", 1), *((how, 7) for how in ENDS if how != "interrupt"), *EVERY_STEP]
)
def test_a_run_that_is_ended_at_any_step_leaves_a_valid_transcript_and_nothing_else_and_the_next_one_works(
    how: str, stride: int
) -> None:
    step = 1
    while not ended_at(step, how):
        step += stride
    assert step > 100


class RememberingBackend(MemoryBackend):
    """Keeps what it holds as it was after each write."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] = []

    def write(self, verb: str, action: Callable[[Any], Any]) -> asyncio.Future[Any]:
        commits = self.counters.commits
        future = super().write(verb, action)
        if self.counters.commits != commits:
            self.states.append(copy.deepcopy(self.tables))
        return future


class Remembering(MemoryStore):
    """A store over it."""

    backend: RememberingBackend

    def __init__(self) -> None:
        Store.__init__(self, RememberingBackend())

    @property
    def states(self) -> list[Any]:
        return self.backend.states


def restored(tables: Any) -> Remembering:
    store = Remembering()
    store.backend.tables = copy.deepcopy(tables)
    return store


async def finish(host: Host) -> None:
    session = host.session("s")
    await approve_all(session)


def people_agent() -> Agent:
    script = [[Pause(0.001), "I ask. ", call("careful", text="x"), call("nap"), call("careful", text="y")]]
    return Agent(name="busy", model=model(steps(script)), tools=[careful, nap])


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("make", [lambda: busy_agent()[0], people_agent, long_agent], ids=["busy", "people", "long"])
def test_a_run_that_is_killed_after_any_write_goes_on_and_does_nothing_twice_that_has_its_result(
    make: Callable[[], Agent], twice: bool
) -> None:
    first = Remembering()

    async def whole() -> str:
        async with Host(make(), store=first, settings=QUICK, clock=VirtualClock()) as host:
            sent = await host.session("s").send("go")
            await finish(host)
            return (await host.session("s").message(sent.message_id)).text

    text = run_virtual(whole())

    def again(tables: Any) -> list[Any]:
        store = restored(tables)
        agent = make()
        states: list[Any] = []

        async def main() -> None:
            async with Host(agent, store=store, settings=QUICK, clock=VirtualClock()) as host:
                views = await host.sessions()
                if not views:
                    return
                session = host.session("s")
                await finish(host)
                [view] = await session.runs()
                assert view.state == "completed", (view.cause, view.error)
                assert view.text == text
                check_entries(await session.transcript())
                events = await log_of(host, "s")
                answered = {e.call_id for e in events if e.kind == "tool.finished" and e.status == "ok"}  # type: ignore[union-attr]
                for call_id in answered:
                    kinds = [e.kind for e in events if getattr(e, "call_id", None) == call_id]
                    assert kinds.count("tool.finished") == 1, "a call that has its result is not made again"
                steps_done = [(e.run_id, e.step) for e in events if e.kind == "step.finished"]  # type: ignore[union-attr]
                assert len(steps_done) == len(set(steps_done)), "a whole step is not asked for again"
                states.extend(store.states)
                assert await session.ask("again")
                check_entries(await session.transcript())
                assert any(isinstance(e, ToolStarted) for e in events)

        run_virtual(main())
        return states

    seconds = [again(tables) for tables in first.states]
    for states in seconds if twice else ():  # and killed once more, on the way back
        for tables in states[::3]:
            again(tables)
    assert len(first.states) >= 10


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
def test_under_any_schedule_a_run_is_ended_or_steered_and_the_next_one_works(tasks: Any) -> None:
    def scenario_at(how: str, delay_s: float) -> Callable[[], Any]:
        async def scenario() -> None:
            agent, models = busy_agent()
            async with Host(agent, store=MemoryStore(yielding=True), settings=QUICK, clock=VirtualClock()) as host:
                session = host.session("s")
                sent = await session.send("go")
                await asyncio.sleep(delay_s)
                await ENDS[how](host, session)
                await session.wait(sent.message_id)
                check_entries(await session.transcript())
                await session.ask("again")
                check_entries(await session.transcript())
                assert all(used.open == 0 for used in models)

        return scenario

    dice = random.Random(7)
    for seed, how in enumerate(list(ENDS) * 3):
        explore(scenario_at(how, dice.uniform(0, 0.06)), schedules=3, seed=seed, tasks=tasks, late_s=0.003)
