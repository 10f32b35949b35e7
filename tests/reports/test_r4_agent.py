"""Report R4: states, streams, memory and callers that do not race with each other. The model fails, Holdfast holds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast import Host, Run, Settings, WaitExpired
from holdfast.errors import QueueClosed, RunInterrupted
from holdfast.protocol.events import MessageSettled, RunFinished, TextDelta
from holdfast.runtime import FairQueue
from holdfast.testing import ScheduleFailure, VirtualClock, explore, run_virtual
from tests.reports.models_r4 import BaseAgent

CHOOSERS: list[Literal["random", "pct"]] = ["random", "pct"]
THINK_S = 0.005

Scenario = Callable[[], Coroutine[Any, Any, None]]


class Thinker:
    """The model behind an agent: sees how many think at once."""

    def __init__(self) -> None:
        self.active = 0
        self.most_active = 0

    async def think(self, request: str) -> str:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await asyncio.sleep(THINK_S)
            return f"re {request}"
        finally:
            self.active -= 1

    async def agent(self, run: Run) -> None:
        await run.emit(await self.think(run.text))


# The model fails


async def model_answers_callers() -> None:
    thinker = Thinker()
    agent = BaseAgent(thinker.think)
    answers = await asyncio.gather(agent.run("a"), agent.run("b"))
    assert thinker.most_active == 1
    assert list(answers) == ["re a", "re b"]


async def model_runs_alone() -> None:
    thinker = Thinker()
    agent = BaseAgent(thinker.think)
    await asyncio.gather(agent.run("a"), agent.run("b"), return_exceptions=True)
    assert thinker.most_active == 1


async def model_comes_to_rest() -> None:
    thinker = Thinker()
    agent = BaseAgent(thinker.think)

    async def change(state: Literal["running", "thinking"], steps: int) -> None:
        async with agent.in_state(state):
            for _ in range(steps):
                await asyncio.sleep(0)

    await asyncio.gather(change("running", 1), change("thinking", 2))
    assert agent.state == "idle"


async def model_streams_to_each_reader() -> None:
    agent = BaseAgent(Thinker().think)

    async def read() -> list[str]:
        return [word async for word in agent.stream()]

    reading = [asyncio.create_task(read(), name=f"reader {number}") for number in range(2)]
    await agent.run("a")
    assert [await task for task in reading] == [["re", "a"], ["re", "a"]]


async def model_remembers_all() -> None:
    agent = BaseAgent(Thinker().think)
    await asyncio.gather(*(agent.add_message(str(number)) for number in range(3)))
    assert sorted(agent.memory) == ["0", "1", "2"]


async def model_agents_ask_each_other() -> None:
    async def think_with(other: list[BaseAgent], request: str) -> str:
        if request.startswith("other"):
            return "yes"
        await asyncio.sleep(0)
        while True:
            try:
                return await other[0].on_message("other", request)
            except RuntimeError:
                await asyncio.sleep(1)

    agents: list[BaseAgent] = []
    agents.append(BaseAgent(lambda request: think_with(agents[1:], request)))
    agents.append(BaseAgent(lambda request: think_with(agents[:1], request)))
    await asyncio.gather(agents[0].run("a"), agents[1].run("b"))


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        (model_answers_callers, "error"),
        (model_runs_alone, "error"),
        (model_comes_to_rest, "error"),
        (model_streams_to_each_reader, "deadlock"),
        (model_remembers_all, "error"),
        (model_agents_ask_each_other, "livelock"),
    ],
)
def test_the_explorer_finds_the_faults_of_the_model(
    scenario: Scenario, kind: Literal["error", "deadlock", "livelock"]
) -> None:
    with pytest.raises(ScheduleFailure) as caught:
        explore(scenario, schedules=300, max_steps=2_000)
    assert caught.value.kind == kind


# Holdfast holds


async def four_callers(store: str = "memory://") -> None:
    """Four simultaneous sends to one session: each gets its own answer, one run at a time."""
    thinker = Thinker()
    async with Host(thinker.agent, store=store, clock=VirtualClock()) as host:
        session = host.session("alice")
        answers = await asyncio.gather(*(session.ask(f"question {number}", timeout_s=30) for number in range(4)))
    assert answers == [f"re question {number}" for number in range(4)]
    assert thinker.most_active == 1


async def overlapping_state_changes() -> None:
    """Sends, interrupts and stops that overlap: the session comes to rest, and the next message is answered."""
    thinker = Thinker()
    async with Host(thinker.agent, store="memory://", clock=VirtualClock()) as host:
        session = host.session("alice")

        async def ask(text: str) -> None:
            receipt = await session.send(text)
            settlement = await session.wait(receipt.message_id, timeout_s=30)
            assert settlement.state in ("completed", "interrupted", "withdrawn")

        await session.send("begin")
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(ask("a"))
            group.create_task(session.interrupt("not that"))
            group.create_task(ask("b"))
            group.create_task(session.stop("nor that"))
            group.create_task(session.interrupt("nor those"))
        assert await session.ask("now?", timeout_s=30) == "re now?"
        assert (await session.info()).run_id is None
    assert thinker.most_active == 1
    assert thinker.active == 0


async def each_reader_sees_the_whole_stream() -> None:
    """Two readers and a late one: each sees every event in order, and the end."""
    thinker = Thinker()
    async with Host(thinker.agent, store="memory://", clock=VirtualClock()) as host:
        session = host.session("alice")
        receipt = await session.send("a")

        async def read() -> list[str]:
            text: list[str] = []
            finished = False
            async for event in session.events(after=receipt.cursor, follow=receipt.message_id):
                if isinstance(event, TextDelta):
                    text.append(event.text)
                finished = finished or isinstance(event, RunFinished | MessageSettled)
            assert finished
            return text

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            reading = [group.create_task(read()) for _ in range(2)]
        assert await read() == ["re a"]
        assert [task.result() for task in reading] == [["re a"], ["re a"]]


async def agents_that_ask_each_other() -> None:
    """Two agents that wait for each other: both waits end at their deadline, and a third is not held up."""
    waits: list[str] = []

    async def agent(run: Run) -> None:
        if run.session_key == "carol":
            await run.emit("here")
            return
        other = "bert" if run.session_key == "anna" else "anna"
        try:
            await host.session(other).ask("and you?", timeout_s=5)
        except (WaitExpired, RunInterrupted):
            waits.append(run.session_key)
        await run.emit("gave up")

    async with Host(agent, store="memory://", settings=Settings(run_timeout_s=60), clock=VirtualClock()) as host:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            asking = [group.create_task(host.session(key).ask("?", timeout_s=60)) for key in ("anna", "bert")]
            third = group.create_task(host.session("carol").ask("?", timeout_s=1))
        assert third.result() == "here"
        assert [task.result() for task in asking] == ["gave up", "gave up"]
        for key in ("anna", "bert"):
            await host.session(key).stop("enough")
    assert waits


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize(
    "scenario",
    [four_callers, overlapping_state_changes, each_reader_sees_the_whole_stream, agents_that_ask_each_other],
)
def test_the_host_holds_in_every_schedule(
    scenario: Scenario,
    chooser: Literal["random", "pct"],
    tasks: Literal["ordinary", "eager"],
) -> None:
    explore(scenario, chooser=chooser, schedules=150, tasks=tasks)


async def many_appends(store: str) -> None:
    """150 concurrent messages: the transcript has every one, whole, with its answer, in order."""
    thinker = Thinker()
    async with Host(thinker.agent, store=store, settings=Settings(mailbox_limit=200), clock=VirtualClock()) as host:
        session = host.session("alice")
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            sending = [group.create_task(session.send(f"{number} " + "x" * 500)) for number in range(150)]
        receipts = sorted((task.result() for task in sending), key=lambda receipt: receipt.seq)
        for receipt in receipts:
            assert (await session.wait(receipt.message_id, timeout_s=60)).state == "completed"
        entries = await session.transcript()
    assert [entry.n for entry in entries] == list(range(1, 301))
    assert [entry.role for entry in entries] == ["user", "assistant"] * 150
    assert [entry.message_id for entry in entries[::2]] == [receipt.message_id for receipt in receipts]
    for question, answer in zip(entries[::2], entries[1::2], strict=True):
        assert answer.content == f"re {question.content}"
        assert len(question.content) > 500


def test_150_concurrent_appends_are_whole_and_in_order() -> None:
    run_virtual(many_appends("memory://"))
    explore(lambda: many_appends("memory://"), schedules=3, max_steps=100_000)


def test_150_concurrent_appends_are_whole_and_in_order_on_sqlite(tmp_path: Path) -> None:
    asyncio.run(many_appends(f"sqlite:///{tmp_path / 'r4.db'}"))


def test_four_simultaneous_sends_are_answered_on_sqlite(tmp_path: Path) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await four_callers(f"sqlite:///{tmp_path / 'r4.db'}")

    asyncio.run(bounded())


async def shares(take: Callable[[], Coroutine[Any, Any, object]]) -> Counter[str]:
    counted: Counter[str] = Counter()

    async def consume(name: str, pauses: int) -> None:
        try:
            while True:
                await take()
                counted[name] += 1
                for _ in range(pauses):
                    await asyncio.sleep(0)
        except QueueClosed:
            return

    consumers = [
        asyncio.create_task(consume(name, pauses)) for name, pauses in (("greedy", 0), ("polite", 1), ("politer", 1))
    ]
    await asyncio.sleep(1)
    for consumer in consumers:
        consumer.cancel()
    await asyncio.wait(consumers)
    return counted


def test_one_consumer_takes_all_of_the_models_queue() -> None:
    async def test() -> Counter[str]:
        agent = BaseAgent(Thinker().think)
        for number in range(99):
            agent.output.put_nowait(str(number))
        return await shares(agent.output.get)

    assert run_virtual(test()) == {"greedy": 99}


def test_three_consumers_of_the_fair_queue_share_equally() -> None:
    async def test() -> Counter[str]:
        queue = FairQueue[str, int](100)
        for number in range(99):
            queue.put_nowait("alice", number)
        queue.close()
        return await shares(queue.take)

    assert run_virtual(test()) == {"greedy": 33, "polite": 33, "politer": 33}
