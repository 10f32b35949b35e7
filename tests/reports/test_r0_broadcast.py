"""Report R0: one interrupt reaches every waiter. The reported form fails each test that Holdfast's passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import pytest

from holdfast.runtime.interrupt.interrupt import Interrupt
from holdfast.testing import ScheduleFailure, explore
from tests.reports.models_r0 import ALL, Latch, NotifyOne, System, graph, parallel, periodic, runner, stream

Make = Callable[[], Latch]
Chooser = Literal["random", "pct"]

CHOOSERS: list[Chooser] = ["random", "pct"]
SCHEDULES = 60


def three_wait(make: Make) -> Callable[[], Awaitable[None]]:
    """Three waiters, one trigger, three wake."""

    async def test() -> None:
        interrupt = make()
        waiters = [asyncio.create_task(interrupt.wait(), name=f"waiter {n}") for n in range(3)]

        async def leave() -> None:
            interrupt.trigger()

        leaving = asyncio.create_task(leave(), name="the person leaves")
        async with asyncio.timeout(10):
            await asyncio.gather(leaving, *waiters)

    return test


def one_waits(make: Make) -> Callable[[], Awaitable[None]]:
    """A waiter that is between its check and its park, or comes late, does not miss the trigger."""

    async def test() -> None:
        interrupt = make()
        first = asyncio.create_task(interrupt.wait(), name="first")

        async def leave() -> None:
            interrupt.trigger()

        leaving = asyncio.create_task(leave(), name="the person leaves")
        second = asyncio.create_task(interrupt.wait(), name="second")
        async with asyncio.timeout(10):
            await asyncio.gather(leaving, first, second)
            await interrupt.wait()

    return test


def everything_stops(make: Make, *works: Callable[[System], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """The person leaves: all of the agent's work ends, and no model is called afterwards."""

    async def test() -> None:
        system = System(make())
        tasks = [asyncio.ensure_future(work(system)) for work in works]
        await asyncio.sleep(2.25)
        system.left = True
        system.interrupt.trigger()
        _, running = await asyncio.wait(tasks, timeout=60)
        for task in running:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not running, f"still at work after a minute; only {system.ended} ended"
        assert system.zombie_calls == 0

    return test


@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("scenario", [three_wait, one_waits])
def test_the_reported_form_leaves_waiters_asleep(scenario: Callable[[Make], object], chooser: Chooser) -> None:
    with pytest.raises(ScheduleFailure):
        explore(scenario(NotifyOne), schedules=SCHEDULES, chooser=chooser)  # type: ignore[arg-type]


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("chooser", CHOOSERS)
@pytest.mark.parametrize("scenario", [three_wait, one_waits])
def test_every_waiter_wakes(
    scenario: Callable[[Make], object], chooser: Chooser, tasks: Literal["ordinary", "eager"]
) -> None:
    explore(scenario(Interrupt), schedules=4 * SCHEDULES, chooser=chooser, tasks=tasks)  # type: ignore[arg-type]


def test_every_waiter_wakes_under_every_schedule_there_is() -> None:
    report = explore(one_waits(Interrupt), schedules=20_000, chooser="exhaustive")  # type: ignore[arg-type]
    assert report.exhausted


WORKS = {
    "parallel branches": [parallel],
    "graph nodes": [graph],
    "a runner and its periodic runs": [runner, periodic],
    "a runner and a background stream": [runner, stream],
    "all at once": list(ALL),
}


@pytest.mark.parametrize("works", WORKS.values(), ids=WORKS.keys())
def test_the_reported_form_leaves_zombies(works: list[Callable[[System], Awaitable[None]]]) -> None:
    with pytest.raises(ScheduleFailure) as caught:
        explore(everything_stops(NotifyOne, *works), schedules=SCHEDULES)  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize("works", WORKS.values(), ids=WORKS.keys())
def test_everything_that_shares_the_interrupt_stops(works: list[Callable[[System], Awaitable[None]]]) -> None:
    explore(everything_stops(Interrupt, *works), schedules=SCHEDULES)  # type: ignore[arg-type]


def test_a_reset_by_one_sharer_cannot_take_the_interrupt_from_the_others() -> None:
    """The reported loops check, then reset what all of them share; an `Interrupt` has no reset."""

    async def test() -> None:
        interrupt = NotifyOne()
        interrupt.trigger()
        seen = []
        for _ in range(2):
            seen.append(interrupt.triggered)
            interrupt.reset()
        assert seen == [True, True]

    with pytest.raises(ScheduleFailure):
        explore(test, schedules=1)
    interrupt = Interrupt()
    interrupt.trigger()
    assert [interrupt.triggered for _ in range(2)] == [True, True]
