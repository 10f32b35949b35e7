"""An agent that is asked by the clock: when, how often, and what is beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Agent, Host, Run, Settings, agent, branch, periodic, sequence
from holdfast.agents.compose.periodic import Overlap
from holdfast.errors import ConfigurationError, RunFailed
from holdfast.protocol.events import ChildFinished, ChildStarted, Event
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, run_virtual
from tests.compose.kit import host, log_of


class Ticks:
    """Notes when it is asked.

    Parameters:
        takes_s: how long each of its ticks takes; the last one for all that follow.
        fails_at: the tick that fails.
    """

    def __init__(self, *takes_s: float, fails_at: int = 0) -> None:
        self.takes_s = takes_s or (0.0,)
        self.fails_at = fails_at
        self.at: list[float] = []
        self.ended: list[float] = []

    @property
    def agent(self) -> Agent:
        """As an agent."""

        async def tick(run: Run) -> str:
            loop = asyncio.get_running_loop()
            self.at.append(round(loop.time() - BEGAN[0], 3))
            number = len(self.at)
            if number == self.fails_at:
                raise ValueError("it broke")
            try:
                await asyncio.sleep(self.takes_s[min(number, len(self.takes_s)) - 1])
                return f"tick {number} of {run.text}"
            finally:
                self.ended.append(round(loop.time() - BEGAN[0], 3))

        return agent(name="tick", replayable=True)(tick)


BEGAN = [0.0]


def asked(shape: Agent, *, seconds: float | None = None) -> tuple[Any, list[Event]]:
    """What becomes of a run of the shape; it is interrupted after so many seconds."""

    async def main() -> tuple[Any, list[Event]]:
        async with host([shape]) as one:
            BEGAN[0] = asyncio.get_running_loop().time()
            session = one.session("s")
            receipt = await session.send("go")
            if seconds is not None:
                await asyncio.sleep(seconds)
                stopped = await session.interrupt("enough")
                assert stopped.outcome == "gone"
            return await session.wait(receipt.message_id), await log_of(one)

    return run_virtual(main())


def test_it_asks_at_even_distances_and_answers_with_the_last_tick() -> None:
    ticks = Ticks()
    settlement, log = asked(periodic(ticks.agent, every_s=10.0, max_runs=3))
    assert (settlement.state, settlement.text) == ("completed", "tick 3 of go")
    assert ticks.at == [10.0, 20.0, 30.0]
    started = [event for event in log if isinstance(event, ChildStarted)]
    assert len({event.child_id for event in started}) == 3, "each tick is a child of its own"


def test_the_first_tick_comes_after_the_initial_delay() -> None:
    ticks = Ticks()
    asked(periodic(ticks.agent, every_s=10.0, max_runs=2, initial_delay_s=0.0))
    assert ticks.at == [0.0, 10.0]


def test_a_cron_line_ticks_by_the_wall_clock() -> None:
    ticks = Ticks()

    async def main() -> None:
        clock = VirtualClock()
        before_s = 60.0 - clock.now() % 60.0
        async with host([periodic(ticks.agent, cron="* * * * *", max_runs=2)]) as one:
            BEGAN[0] = asyncio.get_running_loop().time()
            await one.session("s").ask("go")
        assert ticks.at == [pytest.approx(before_s, abs=0.01), pytest.approx(before_s + 60, abs=0.01)]

    run_virtual(main())


@pytest.mark.parametrize(
    ("overlap", "miss", "expected"),
    [
        ("queue", "skip", [10.0, 40.0, 50.0, 60.0]),
        ("queue", "delay", [10.0, 35.0, 45.0, 55.0]),
        ("queue", "burst", [10.0, 35.0, 35.0, 40.0]),
        ("reject", "skip", [10.0, 40.0, 50.0, 60.0]),
        ("interrupt", "skip", [10.0, 20.0, 30.0, 40.0]),
    ],
)
def test_a_tick_that_overruns_follows_the_overlap_and_the_miss_policy(
    overlap: Overlap, miss: Any, expected: list[float]
) -> None:
    ticks = Ticks(25.0, 0.0)
    if (overlap, miss) == ("queue", "skip"):
        expected = [10.0, 35.0, 40.0, 50.0]  # the tick of 30 is still on time at 35
    settlement, log = asked(periodic(ticks.agent, every_s=10.0, max_runs=4, overlap=overlap, miss=miss))
    assert settlement.state == "completed"
    assert ticks.at == expected
    ends = [event for event in log if isinstance(event, ChildFinished)]
    assert [event.status for event in ends].count("interrupted") == (overlap == "interrupt")
    if overlap == "interrupt":
        assert ends[0].cause is not None and ends[0].cause.reason == "the next tick came"


def test_a_tick_that_interrupts_the_last_one_begins_when_that_is_gone() -> None:
    alive: list[int] = []

    async def stubborn(run: Run) -> None:
        alive.append(1)
        assert len(alive) == 1, "two ticks at a time"
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(0.7)
            alive.pop()

    settlement, log = asked(periodic(stubborn, every_s=0.5, overlap="interrupt"), seconds=5.0)
    assert settlement.state == "interrupted"
    assert sum(isinstance(event, ChildStarted) for event in log) >= 4


def test_what_streams_beside_it_ends_with_it() -> None:
    said: list[str] = []

    async def stream(run: Run) -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                said.append(f"{run.agent.name} {run.text}")
        finally:
            await asyncio.sleep(0.1)
            said.append(f"{run.agent.name} ends")

    def streamer(name: str) -> Agent:
        return agent(name=name)(stream)

    ticks = Ticks()
    shape = periodic(ticks.agent, every_s=5.0, max_runs=2, beside=[streamer("one"), streamer("two")])
    settlement, log = asked(shape)
    assert settlement.state == "completed"
    assert said.count("one go") in (9, 10) and said.count("two go") in (9, 10)
    assert sorted(said[-2:]) == ["one ends", "two ends"]
    ends = {event.child_id: event for event in log if isinstance(event, ChildFinished)}
    causes = [event.cause.reason for event in ends.values() if event.cause is not None]
    assert causes == ["the ticks are over"] * 2
    said.clear()
    settlement, _ = asked(periodic(ticks.agent, every_s=5.0, beside=[streamer("one")]), seconds=12.0)
    assert settlement.state == "interrupted"
    assert said[-1] == "one ends"


def test_a_branch_may_be_beside_itself_and_its_ticks_still_come_one_at_a_time() -> None:
    ticks = Ticks(3.0, 10.0, 1.0)  # the first one is beside the others
    same = branch(ticks.agent)
    settlement, _ = asked(periodic(same, every_s=1.0, max_runs=2, beside=[same]))
    assert settlement.state == "completed"
    assert ticks.at == [0.0, 1.0, 11.0]


def test_a_streamer_that_failed_before_a_restart_ends_the_run_after_it() -> None:
    async def fails(run: Run) -> None:
        raise ValueError("it broke")

    async def lingers(run: Run) -> None:
        try:
            await asyncio.sleep(1000.0)
        finally:
            if run.attempt == 1:
                await asyncio.sleep(1000.0)

    beside = [agent(name="fails", replayable=True)(fails), agent(name="lingers", replayable=True)(lingers)]
    shape = periodic(Ticks().agent, every_s=50.0, max_runs=3, beside=beside)

    async def main() -> None:
        store = MemoryStore()
        quick = Settings(drain_timeout_s=0.0, grace_s=5.0)
        async with Host(shape, store=store, clock=VirtualClock(), settings=quick) as one:
            receipt = await one.session("s").send("go")
            await asyncio.sleep(0.1)
            assert (await one.drain()).suspended == (receipt.run_id,)
        async with Host(shape, store=store, clock=VirtualClock()) as one:
            settlement = await one.session("s").wait(receipt.message_id)
            assert settlement.state == "failed" and "it broke" in (settlement.error or "")

    run_virtual(main())


def test_between_ticks_there_is_no_task_and_an_interrupt_is_at_once() -> None:
    counts: list[int] = []
    ticks = Ticks()

    async def main() -> None:
        async with host([periodic(ticks.agent, every_s=100.0)]) as one:
            loop = asyncio.get_running_loop()
            receipt = await one.session("s").send("go")
            for _ in range(4):
                await asyncio.sleep(99.0)
                counts.append(len(asyncio.all_tasks()))
                await asyncio.sleep(1.0)
            before = loop.time()
            stopped = await one.session("s").interrupt("enough")
            assert loop.time() - before < 0.01
            assert stopped.outcome == "gone"
            settlement = await one.session("s").wait(receipt.message_id)
            assert settlement.state == "interrupted"
            assert settlement.text.startswith("tick"), "what the last tick said is not lost"

    run_virtual(main())
    assert len(set(counts)) == 1


def test_a_tick_that_fails_ends_it_and_one_that_comes_to_its_deadline_does_not() -> None:
    ticks = Ticks(fails_at=2)

    async def endless(run: Run) -> None:
        await asyncio.sleep(1e6)

    settlement, log = asked(periodic(ticks.agent, every_s=10.0, beside=[endless]))
    assert settlement.state == "failed"
    assert "it broke" in settlement.error
    assert ticks.at == [10.0, 20.0]
    ends = [event for event in log if isinstance(event, ChildFinished)]
    assert [event.status for event in ends] == ["completed", "failed", "interrupted"]
    slow = Ticks(100.0, 0.0)
    settlement, _ = asked(periodic(branch(slow.agent, deadline_s=3.0), every_s=10.0, max_runs=2))
    assert (settlement.state, settlement.text) == ("completed", "tick 2 of go")
    assert slow.ended == [13.0, 20.0]


def test_a_streamer_that_fails_ends_it_and_one_that_has_nothing_more_to_say_does_not() -> None:
    async def breaks(run: Run) -> None:
        await asyncio.sleep(12.0)
        raise ValueError("the stream broke")

    async def brief(run: Run) -> str:
        return "that was all"

    ticks = Ticks(1000.0)
    settlement, _ = asked(periodic(ticks.agent, every_s=10.0, beside=[breaks, brief]))
    assert settlement.state == "failed" and "the stream broke" in settlement.error
    assert ticks.ended == [12.0]


def test_jitter_is_the_same_in_every_attempt_and_shapes_nest() -> None:
    ticks = Ticks()
    one = periodic(ticks.agent, every_s=10.0, jitter_s=5.0, max_runs=3)

    async def other(run: Run) -> str:
        return f"heard: {run.text}"

    settlement, _ = asked(sequence(one, other))
    assert settlement.text == "heard: tick 3 of go"
    delays = [at - 10.0 * number for number, at in enumerate(ticks.at, 1)]
    assert all(0 <= delay <= 5.0 for delay in delays) and len(set(delays)) == 3


def test_a_wall_clock_that_jumps_is_noticed() -> None:
    class Jumping(VirtualClock):
        wrong_by_s = 0.0

        def now(self) -> float:
            return super().now() + self.wrong_by_s

    async def main() -> None:
        ticks = Ticks()
        clock = Jumping()
        async with Host(
            agents=[periodic(ticks.agent, every_s=3600.0, miss="delay")], store="memory://", clock=clock
        ) as one:
            BEGAN[0] = asyncio.get_running_loop().time()
            await one.session("s").send("go")
            await asyncio.sleep(100.0)
            clock.wrong_by_s = 10_000.0
            await asyncio.sleep(60.0)
            assert len(ticks.at) == 1 and 100.0 <= ticks.at[0] <= 131.0
            clock.wrong_by_s = -30_000.0
            await asyncio.sleep(3700.0)
            assert len(ticks.at) == 2, "a clock that was wrong is not waited for"
            await one.session("s").interrupt()

    run_virtual(main())


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({}, "neither"),
        ({"every_s": 0.0}, "every_s"),
        ({"cron": "0 0 30 2 *"}, "day-of-month"),
        ({"cron": "* * */20 * 1L"}, "never fires"),
        ({"every_s": 1.0, "cron": "* * * * *"}, "both"),
        ({"every_s": 1.0, "overlap": "sometimes"}, "sometimes"),
        ({"every_s": 1.0, "miss": "sometimes"}, "sometimes"),
        ({"every_s": 1.0, "max_runs": 0}, "max_runs"),
        ({"every_s": 1.0, "beside": ["a", branch("b", name="a")]}, "a"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(bad: dict[str, Any], word: str) -> None:
    if "beside" in bad:
        bad = {**bad, "beside": [branch("x", name="a"), branch("y", name="a")]}
    with pytest.raises(ConfigurationError, match=word):
        periodic(Ticks().agent, **bad)


def test_a_child_that_delegates_to_it_hears_of_its_failure() -> None:
    ticks = Ticks(fails_at=1)
    shape = periodic(ticks.agent, every_s=1.0)

    async def outer(run: Run) -> str:
        with pytest.raises(RunFailed, match="it broke"):
            await run.delegate(shape, "x")
        return "heard"

    settlement, _ = asked(agent(outer))
    assert settlement.text == "heard"


def test_ticks_that_ended_before_the_run_left_the_memory_are_not_begun_again() -> None:
    begun: list[str] = []

    @agent(replayable=True)
    async def asks(run: Run) -> str:
        begun.append(run.run_id.rpartition(".")[2])
        return (await run.ask_user("who?")).text

    async def main() -> None:
        async with host([periodic(asks, every_s=60.0, max_runs=3)]) as one:
            session = one.session("s")
            receipt = await session.send("go")
            for number in range(3):
                while not (questions := await session.questions()) or one.admission.statistics().running:
                    await asyncio.sleep(1)
                await session.answer(questions[0].question_id, f"Ann {number}")
            assert (await session.wait(receipt.message_id)).text == "Ann 2"

    run_virtual(main())
    assert begun == ["1", "1", "2", "2", "3", "3"]
