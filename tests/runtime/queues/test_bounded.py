"""Nothing that went into a bounded queue is lost or doubled, whoever is cancelled or interrupted at whatever moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from holdfast.errors import Interrupted, QueueClosed, QueueEmpty, QueueFull
from holdfast.runtime.interrupt.interrupt import Interrupt, use
from holdfast.runtime.queues.bounded import BoundedQueue
from holdfast.runtime.queues.wait_queue import Waiter, WaitQueue, wait_for_release
from holdfast.testing import ScheduleFailure, explore, run_virtual

Make = Callable[[int], BoundedQueue[int]]


class KeepsPromises(WaitQueue):
    """Fault: who goes away with a promise keeps it."""

    __slots__ = ()

    async def wait(self, waiter: Waiter, pass_on: Callable[[], None]) -> bool:
        return await super().wait(waiter, lambda: None)


class NeverLeaves(WaitQueue):
    """Fault: who goes away without a promise stays in line."""

    __slots__ = ()

    async def wait(self, waiter: Waiter, pass_on: Callable[[], None]) -> bool:
        self.waiting[waiter] = None
        await wait_for_release(waiter)
        return self.redeem(waiter)


class WakesOneAtClose(BoundedQueue[int]):
    """Fault: notify one."""

    def close(self) -> None:
        self._closed = True
        for line in (self._putters, self._getters):
            for waiter in list(line.waiting)[:1]:
                del line.waiting[waiter]
                waiter.set_result(None)


class PutsAfterClose(BoundedQueue[int]):
    """Fault: does not look again after the wait."""

    def _check_open(self) -> None:
        if self._closed and not self._putters.promised and self._room() <= 0:
            super()._check_open()


def with_line(line: type[WaitQueue]) -> Make:
    def make(maxsize: int) -> BoundedQueue[int]:
        queue = BoundedQueue[int](maxsize)
        queue._getters, queue._putters = line(), line()
        return queue

    return make


async def hand_over_while_getters_are_cancelled(make: Make) -> None:
    queue = make(2)
    got: list[int] = []

    async def take() -> None:
        got.append(await queue.get())

    first = asyncio.create_task(take(), name="first")
    second = asyncio.create_task(take(), name="second")
    await asyncio.sleep(0)
    await queue.put(1)
    first.cancel()
    await asyncio.sleep(0)
    if not second.done():
        await asyncio.sleep(0.1)
    assert len(got) == 1, "an item is there, and somebody waits for it"
    await queue.put(2)
    await asyncio.sleep(0.1)
    assert sorted([*got, *queue.drain()]) == [1, 2]
    second.cancel()
    await asyncio.wait([first, second])
    assert queue.statistics().waiting_getters == 0


async def room_while_putters_are_cancelled(make: Make) -> None:
    queue = make(1)
    await queue.put(0)
    first, second = asyncio.create_task(queue.put(1)), asyncio.create_task(queue.put(2))
    await asyncio.sleep(0)
    got = [await queue.get()]
    first.cancel()
    await asyncio.sleep(0.1)
    assert first.done() or second.done(), "there is room, and somebody waits for it"
    while len(queue):
        got.append(await queue.get())
        await asyncio.sleep(0.1)
    assert sorted(got) == ([0, 2] if first.cancelled() else [0, 1, 2])
    await second
    assert queue.statistics().waiting_putters == 0


async def close_ends_everybody(make: Make) -> None:
    queue = make(1)
    outcomes: list[str] = []

    async def take() -> None:
        try:
            while True:
                outcomes.append(f"got {await queue.get()}")
        except QueueClosed:
            outcomes.append("end")

    async def give(item: int) -> None:
        try:
            await queue.put(item)
            outcomes.append(f"put {item}")
        except QueueClosed:
            outcomes.append("refused")

    async def shut() -> None:
        queue.close()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for coro in (give(1), give(2), take(), shut(), take()):
            group.create_task(coro)
    assert outcomes.count("end") == 2
    for item in (1, 2):
        assert (f"put {item}" in outcomes) == (f"got {item}" in outcomes)
    assert len(queue) == 0


@pytest.mark.parametrize(
    "scenario", [hand_over_while_getters_are_cancelled, room_while_putters_are_cancelled, close_ends_everybody]
)
def test_no_schedule_loses_doubles_or_forgets(scenario: Callable[[Make], object]) -> None:
    def test() -> object:
        return scenario(BoundedQueue)

    for chooser in ("random", "pct"):
        explore(test, chooser=chooser, schedules=400)  # type: ignore[arg-type]


def test_cancelled_getters_lose_nothing_in_any_schedule() -> None:
    report = explore(
        lambda: hand_over_while_getters_are_cancelled(BoundedQueue), chooser="exhaustive", schedules=30_000
    )
    assert report.exhausted


@pytest.mark.parametrize(
    ("scenario", "faulty"),
    [
        (hand_over_while_getters_are_cancelled, with_line(KeepsPromises)),
        (hand_over_while_getters_are_cancelled, with_line(NeverLeaves)),
        (room_while_putters_are_cancelled, with_line(KeepsPromises)),
        (room_while_putters_are_cancelled, with_line(NeverLeaves)),
        (close_ends_everybody, WakesOneAtClose),
        (close_ends_everybody, PutsAfterClose),
    ],
)
def test_the_explorer_finds_each_faulty_queue(scenario: Callable[[Make], object], faulty: Make) -> None:
    with pytest.raises(ScheduleFailure):
        explore(lambda: scenario(faulty), chooser="pct", schedules=1000)  # type: ignore[arg-type, return-value]


def test_items_leave_in_the_order_they_came_in_and_never_exceed_the_bound() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](2)
        got: list[int] = []

        async def give() -> None:
            for item in range(5):
                await queue.put(item)
                assert len(queue) <= 2
            queue.close()

        async def take() -> None:
            try:
                while True:
                    got.append(await queue.get())
            except QueueClosed:
                return

        async with asyncio.TaskGroup() as group:
            group.create_task(give())
            group.create_task(take())
        assert got == list(range(5))

    assert explore(test, chooser="exhaustive", schedules=30_000).exhausted


def test_a_newcomer_does_not_overtake_who_waits() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1)
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0.1)
        queue.put_nowait(1)
        with pytest.raises(QueueEmpty):
            queue.get_nowait()
        assert await waiting == 1

    explore(test, chooser="exhaustive")


def test_an_interrupt_ends_each_wait_and_loses_nothing() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1)
        interrupt = Interrupt()
        outcomes: list[object] = []

        async def take() -> None:
            with use(interrupt):
                try:
                    outcomes.append(await queue.get())
                except Interrupted as error:
                    outcomes.append(error.cause.reason)

        taking = asyncio.create_task(take())
        giving = asyncio.create_task(queue.put(1))
        interrupt.trigger("enough")
        await asyncio.wait([taking, giving])
        assert outcomes == ([1] if not len(queue) else ["enough"])
        assert queue.statistics().waiting_getters == 0
        assert interrupt.statistics().callbacks == 0

    for chooser in ("random", "pct"):
        explore(test, chooser=chooser, schedules=200)


def test_an_interrupt_ends_waiting_for_room() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1)
        queue.put_nowait(0)
        interrupt = Interrupt()

        async def give() -> None:
            with use(interrupt):
                await queue.put(1)

        giving = asyncio.create_task(give())
        await asyncio.sleep(0.1)
        interrupt.trigger("enough")
        with pytest.raises(Interrupted):
            await giving
        assert queue.drain() == [0]
        with use(interrupt), pytest.raises(Interrupted):
            await queue.put(2)
        with use(interrupt), pytest.raises(Interrupted):
            await queue.get()

    run_virtual(test())


def test_refusals_say_what_happened() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1, name="replies")
        with pytest.raises(QueueEmpty, match="replies is empty"):
            queue.get_nowait()
        queue.put_nowait(1)
        with pytest.raises(QueueFull, match="replies is full with 1 items"):
            queue.put_nowait(2)
        queue.close()
        with pytest.raises(QueueClosed, match="replies is closed"):
            queue.put_nowait(3)
        with pytest.raises(QueueClosed):
            await queue.put(3)
        assert queue.closed
        assert queue.get_nowait() == 1
        with pytest.raises(QueueClosed):
            queue.get_nowait()
        with pytest.raises(QueueClosed):
            await queue.get()

    run_virtual(test())
    with pytest.raises(ValueError, match="invalid maxsize=0; use at least 1"):
        BoundedQueue(0)


def test_draining_frees_the_room_and_voids_promises() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1)
        getter = asyncio.create_task(queue.get())
        await asyncio.sleep(0.1)
        queue.put_nowait(1)
        assert queue.drain() == [1]
        await asyncio.sleep(0.1)
        assert not getter.done()
        queue.put_nowait(2)
        assert await getter == 2
        queue.put_nowait(3)
        putter = asyncio.create_task(queue.put(4))
        await asyncio.sleep(0.1)
        assert queue.drain() == [3]
        await putter
        statistics = queue.statistics()
        assert (statistics.put, statistics.taken, statistics.size) == (4, 3, 1)
        assert (statistics.waiting_getters, statistics.waiting_putters, statistics.closed) == (0, 0, False)

    run_virtual(test())


def in_thread(fn: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start a thread; the list gets what ``fn`` returns or raises."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(fn())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


async def joined(thread: threading.Thread) -> None:
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


def test_threads_feed_the_queue_in_order_and_never_beyond_its_bound() -> None:
    async def test() -> None:
        queue = BoundedQueue[tuple[int, int]](3)

        def feed(number: int) -> None:
            for item in range(200):
                queue.put_threadsafe((number, item), timeout_s=10)

        threads = [in_thread(lambda number=number: feed(number)) for number in range(4)]  # type: ignore[misc]
        got: dict[int, list[int]] = {number: [] for number in range(4)}
        async with asyncio.timeout(30):
            for _ in range(800):
                number, item = await queue.get()
                assert len(queue) <= 3
                got[number].append(item)
        for thread, outcome in threads:
            await joined(thread)
            assert outcome == [None]
        assert all(items == list(range(200)) for items in got.values())

    asyncio.run(test())


def test_a_thread_that_gives_up_has_put_nothing_in_and_leaves_the_line() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1, name="replies")
        queue.put_nowait(0)
        thread, outcome = in_thread(lambda: queue.put_threadsafe(1, timeout_s=0.02))
        await joined(thread)
        assert isinstance(outcome[0], QueueFull)
        async with asyncio.timeout(10):
            while queue.statistics().waiting_putters:
                await asyncio.sleep(0)
        assert queue.drain() == [0]
        assert len(queue) == 0

    asyncio.run(test())


def test_a_thread_that_gives_up_at_any_moment_passes_its_room_on() -> None:
    """The loop's half of `put_threadsafe`, with the thread's half played by a task."""

    async def test() -> None:
        queue = BoundedQueue[int](1)
        queue.put_nowait(0)
        accepted: Future[None] = Future()
        queue._enter_from_thread(1, accepted)
        behind = asyncio.create_task(queue.put(2))

        async def give_up() -> None:
            accepted.cancel()

        giving_up = asyncio.create_task(give_up())
        await asyncio.sleep(0)
        got = [await queue.get()]
        await asyncio.sleep(0.1)
        assert len(queue) == 1, "there is room, and somebody waits for it"
        got.append(await queue.get())
        if not accepted.cancelled():
            got.append(await queue.get())
        await asyncio.wait([behind, giving_up])
        assert got == [0, *([] if accepted.cancelled() else [1]), 2]
        assert len(queue) == 0
        assert queue.statistics().waiting_putters == 0

    assert explore(test, chooser="exhaustive", schedules=30_000).exhausted


def test_an_interrupt_ends_a_waiting_thread() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1)
        queue.put_nowait(0)
        interrupt = Interrupt()

        def feed() -> None:
            with use(interrupt):
                queue.put_threadsafe(1, timeout_s=10)

        thread, outcome = in_thread(feed)
        async with asyncio.timeout(10):
            while not queue.statistics().waiting_putters:
                await asyncio.sleep(0)
        interrupt.trigger("enough")
        await joined(thread)
        assert isinstance(outcome[0], Interrupted)
        assert queue.drain() == [0]
        async with asyncio.timeout(10):
            while queue.statistics().waiting_putters:
                await asyncio.sleep(0)

    asyncio.run(test())


def test_closing_ends_a_waiting_thread_and_refuses_the_next() -> None:
    async def test() -> None:
        queue = BoundedQueue[int](1)
        queue.put_nowait(0)
        thread, outcome = in_thread(lambda: queue.put_threadsafe(1, timeout_s=10))
        async with asyncio.timeout(10):
            while not queue.statistics().waiting_putters:
                await asyncio.sleep(0)
        queue.close()
        await joined(thread)
        assert isinstance(outcome[0], QueueClosed)
        thread, outcome = in_thread(lambda: queue.put_threadsafe(2, timeout_s=10))
        await joined(thread)
        assert isinstance(outcome[0], QueueClosed)
        with pytest.raises(RuntimeError, match="await put"):
            queue.put_threadsafe(3)

    asyncio.run(test())


def test_a_waiting_thread_learns_that_the_loop_was_closed() -> None:
    queue = BoundedQueue[int](1)

    async def fill() -> tuple[threading.Thread, list[object]]:
        queue.put_nowait(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await queue.put(0)  # so that the queue knows its loop
        started = in_thread(lambda: queue.put_threadsafe(1))
        async with asyncio.timeout(10):
            while not queue.statistics().waiting_putters:
                await asyncio.sleep(0)
        return started

    thread, outcome = asyncio.run(fill())
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(outcome[0], QueueClosed)


def test_a_thread_needs_a_queue_that_knows_its_loop() -> None:
    queue = BoundedQueue[int](1)
    with pytest.raises(RuntimeError, match="is not yet bound to an event loop"):
        queue.put_threadsafe(1)

    async def meet() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await queue.get()

    asyncio.run(meet())
    with pytest.raises(QueueClosed, match="loop"):
        queue.put_threadsafe(1)


def test_another_loop_is_refused() -> None:
    async def make() -> BoundedQueue[int]:
        return BoundedQueue(1)

    queue = asyncio.run(make())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(queue.get())
