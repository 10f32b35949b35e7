"""The fair queue gives every key and every consumer its share, and loses nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest

from holdfast.errors import Interrupted, QueueClosed, QueueEmpty, QueueFull
from holdfast.runtime.interrupt.interrupt import Interrupt, use
from holdfast.runtime.queues.fair import FairQueue
from holdfast.runtime.queues.wait_queue import Waiter, WaitQueue
from holdfast.testing import ScheduleFailure, explore, run_virtual

Make = Callable[[], FairQueue[str, int]]


class Greedy(FairQueue[str, int]):
    """Fault: whoever finds an item takes it at once, as with `asyncio.Queue`."""

    async def take(self) -> tuple[str, int]:
        if self._free() > 0:
            return self._pop()
        return await super().take()


class KeepsPromises(WaitQueue):
    """Fault: who goes away with a promise keeps it."""

    __slots__ = ()

    async def wait(self, waiter: Waiter, pass_on: Callable[[], None]) -> bool:
        return await super().wait(waiter, lambda: None)


class LosesPromises(FairQueue[str, int]):
    """Fault: a promise dies with its consumer."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._line = KeepsPromises()


class RemovesPromised(FairQueue[str, int]):
    """Fault: taking items away forgets that others wait for what is left."""

    def _call_hand_out(self, *, for_newcomer: bool = False) -> None:
        if self._removing:
            return
        super()._call_hand_out(for_newcomer=for_newcomer)

    _removing = False

    def remove(self, key: str) -> list[int]:
        self._removing = True
        try:
            return super().remove(key)
        finally:
            self._removing = False


async def one_greedy_two_polite(make: Callable[[], Any]) -> Counter[str]:
    queue = make()
    shares: Counter[str] = Counter()

    async def consume(name: str, pauses: int) -> None:
        try:
            while True:
                await queue.take()
                shares[name] += 1
                for _ in range(pauses):
                    await asyncio.sleep(0)
        except QueueClosed:
            return

    for item in range(99):
        queue.put_nowait("key", item)
    queue.close()
    async with asyncio.TaskGroup() as group:
        group.create_task(consume("greedy", 0))
        group.create_task(consume("polite", 1))
        group.create_task(consume("politer", 2))
    return shares


def test_one_greedy_and_two_polite_consumers_share_equally() -> None:
    shares = run_virtual(one_greedy_two_polite(lambda: FairQueue[str, int](100)))
    assert shares == {"greedy": 33, "polite": 33, "politer": 33}
    assert run_virtual(one_greedy_two_polite(lambda: Greedy(100)))["greedy"] == 99


async def nobody_overtakes_twice(make: Make) -> None:
    """While a consumer stands in line without a promise, any other takes at most twice."""
    queue = make()
    overtaken: Counter[tuple[Waiter, str]] = Counter()

    async def consume(name: str) -> None:
        try:
            while True:
                await queue.take()
                for waiter in queue._line.waiting:
                    overtaken[waiter, name] += 1
        except QueueClosed:
            return

    async with asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            group.create_task(consume(name), name=name)
        for item in range(8):
            await asyncio.sleep(0)
            queue.put_nowait("key", item)
        queue.close()
    assert max(overtaken.values(), default=0) <= 2


@pytest.mark.parametrize("chooser", ["random", "pct"])
def test_no_schedule_lets_a_consumer_overtake_for_ever(chooser: Literal["random", "pct"]) -> None:
    explore(lambda: nobody_overtakes_twice(lambda: FairQueue(10)), chooser=chooser, schedules=500)


def test_a_busy_consumer_holds_up_nobody() -> None:
    async def test() -> None:
        queue = FairQueue[str, int](100)
        taken = 0

        async def busy() -> None:
            await queue.take()
            await asyncio.sleep(3600)

        async def quick() -> None:
            nonlocal taken
            while taken < 20:
                await queue.take()
                taken += 1

        for item in range(21):
            queue.put_nowait("key", item)
        began = asyncio.get_running_loop().time()
        slow = asyncio.create_task(busy())
        await quick()
        assert asyncio.get_running_loop().time() == began
        await slow

    run_virtual(test())


async def cancelled_consumers_lose_nothing(make: Make) -> None:
    queue = make()
    got: list[int] = []

    async def take() -> None:
        got.append((await queue.take())[1])

    first, second = asyncio.create_task(take()), asyncio.create_task(take())
    await asyncio.sleep(0)
    queue.put_nowait("key", 1)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0.1)
    assert got == [1], "an item is there, and somebody waits for it"
    queue.put_nowait("key", 2)
    await asyncio.sleep(0.1)
    assert sorted([*got, *queue.remove("key")]) == [1, 2]
    second.cancel()
    await asyncio.wait([first, second])
    assert queue.statistics().waiting == 0


async def removing_forgets_nobody(make: Make) -> None:
    queue = make()
    takers = [asyncio.create_task(queue.take()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.put_nowait("anna", 1)
    queue.put_nowait("bert", 1)
    await asyncio.sleep(0)
    takers[0].cancel()
    takers[1].cancel()
    removed = queue.remove("anna")
    await asyncio.sleep(0.1)
    served = [task.result()[0] for task in takers if task.done() and not task.cancelled()]
    assert sorted([*served, *["anna"] * len(removed), *["bert"] * len(queue)]) == ["anna", "bert"]
    assert not len(queue) or takers[2].done(), "an item is there, and somebody waits for it"
    takers[2].cancel()
    await asyncio.wait(takers)


@pytest.mark.parametrize("scenario", [cancelled_consumers_lose_nothing, removing_forgets_nobody])
def test_no_schedule_loses_an_item_or_forgets_a_consumer(scenario: Callable[[Make], Any]) -> None:
    explore(lambda: scenario(lambda: FairQueue(10)), schedules=500)
    report = explore(lambda: scenario(lambda: FairQueue(10)), chooser="exhaustive", schedules=30_000)
    assert report.exhausted


@pytest.mark.parametrize(
    ("scenario", "faulty"),
    [
        (nobody_overtakes_twice, lambda: Greedy(10)),
        (cancelled_consumers_lose_nothing, lambda: LosesPromises(10)),
        (removing_forgets_nobody, lambda: RemovesPromised(10)),
    ],
)
def test_the_explorer_finds_each_faulty_queue(scenario: Callable[[Make], Any], faulty: Make) -> None:
    with pytest.raises(ScheduleFailure):
        explore(lambda: scenario(faulty), schedules=1000)


def test_keys_take_turns_and_each_keeps_its_order() -> None:
    queue = FairQueue[str, int](100)
    for number in range(4):
        queue.put_nowait("loud", number)
    queue.put_nowait("calm", 10)
    queue.put_nowait("shy", 20)
    queue.put_nowait("calm", 11)
    taken = [queue.take_nowait() for _ in range(7)]
    assert taken == [
        ("loud", 0),
        ("calm", 10),
        ("shy", 20),
        ("loud", 1),
        ("calm", 11),
        ("loud", 2),
        ("loud", 3),
    ]
    with pytest.raises(QueueEmpty):
        queue.take_nowait()


def test_the_bounds_hold_for_each_key_and_in_all() -> None:
    queue = FairQueue[str, int](3, limit_per_key=2, name="ready")
    queue.put_nowait("a", 1)
    queue.put_nowait("a", 2)
    with pytest.raises(QueueFull, match="2 items of 'a'"):
        queue.put_nowait("a", 3)
    queue.put_nowait("b", 1)
    with pytest.raises(QueueFull, match="ready is full with 3 items"):
        queue.put_nowait("c", 1)
    assert queue.remove("a") == [1, 2]
    assert queue.remove("a") == []
    assert queue.remove("c") == []
    queue.put_nowait("c", 1)
    assert [queue.take_nowait()[0], queue.take_nowait()[0]] == ["b", "c"]
    statistics = queue.statistics()
    assert (statistics.size, statistics.keys, statistics.put, statistics.taken) == (0, 0, 4, 4)
    assert (statistics.limit, statistics.limit_per_key, statistics.waiting) == (3, 2, 0)
    with pytest.raises(ValueError, match="use at least 1"):
        FairQueue(0)
    with pytest.raises(ValueError, match="use at least 1"):
        FairQueue(1, limit_per_key=0)


def test_take_nowait_does_not_overtake_who_waits() -> None:
    async def test() -> None:
        queue = FairQueue[str, int](10)
        taker = asyncio.create_task(queue.take())
        await asyncio.sleep(0.1)
        queue.put_nowait("key", 1)
        with pytest.raises(QueueEmpty):
            queue.take_nowait()
        assert await taker == ("key", 1)

    explore(test, chooser="exhaustive")


def test_closing_ends_every_consumer_once_the_queue_is_empty() -> None:
    async def test() -> None:
        queue = FairQueue[str, int](10)
        got: list[int] = []

        async def consume() -> None:
            try:
                while True:
                    got.append((await queue.take())[1])
            except QueueClosed:
                return

        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(consume())
            queue.put_nowait("key", 1)
            queue.put_nowait("key", 2)
            queue.close()
        assert sorted(got) == [1, 2]
        assert queue.closed
        with pytest.raises(QueueClosed):
            queue.put_nowait("key", 3)
        with pytest.raises(QueueClosed):
            queue.take_nowait()

    explore(test, schedules=500)


def test_an_interrupt_ends_the_wait_and_loses_nothing() -> None:
    async def test() -> None:
        queue = FairQueue[str, int](10)
        interrupt = Interrupt()
        outcomes: list[object] = []

        async def consume() -> None:
            with use(interrupt):
                try:
                    outcomes.append((await queue.take())[1])
                except Interrupted:
                    outcomes.append("interrupted")

        taking = asyncio.create_task(consume())
        await asyncio.sleep(0)
        queue.put_nowait("key", 1)
        await asyncio.sleep(0)
        interrupt.trigger("enough")
        await taking
        assert outcomes == (["interrupted"] if len(queue) else [1])
        assert queue.statistics().waiting == 0
        assert interrupt.statistics().callbacks == 0

    explore(test, schedules=500)
