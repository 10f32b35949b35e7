"""Every reader of a broadcast sees every item in order or is told of the gap; nobody slows the publisher."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Literal

import pytest

from holdfast.errors import Interrupted
from holdfast.runtime.interrupt.interrupt import Interrupt, use
from holdfast.runtime.queues.broadcast import Broadcast, BroadcastGap, Reader
from holdfast.testing import ScheduleFailure, explore, run_virtual

Make = Callable[[int], Broadcast[str]]


class CountsWaiters(Broadcast[str]):
    """Fault: keeps items only when somebody waits at that moment."""

    __slots__ = ()

    def _keep(self, items: Sequence[str]) -> None:
        if self._waiting:
            super()._keep(items)
        else:
            self._items = None


class WakesOne(Broadcast[str]):
    """Fault: notify one."""

    __slots__ = ()

    def _wake(self) -> None:
        for reader, waiter in list((self._waiting or {}).items())[:1]:
            waiter.set_result(None)
            self._stop_waiting(reader, waiter)

    def _offer(self, items: Sequence[str]) -> None:
        self._wake()


class ForgetsTheTail(Broadcast[str]):
    """Fault: closing throws away what was not read yet."""

    __slots__ = ()

    def close(self) -> None:
        self._items = []
        super().close()


class NoGap(Broadcast[str]):
    """Fault: a reader that was overrun goes on with what is left, without a word."""

    __slots__ = ()

    def reader(self, after: int | None = None) -> Reader[str]:
        return _GaplessReader(self, self.next_seq - 1 if after is None else after)


class _GaplessReader(Reader[str]):
    __slots__ = ()

    def _take(self, max_items: int) -> list[tuple[int, str]] | BroadcastGap | None:
        taken = super()._take(max_items)
        return super()._take(max_items) if isinstance(taken, BroadcastGap) else taken


async def collect(reader: Reader[str], batch: int) -> list[tuple[int, str] | BroadcastGap]:
    seen: list[tuple[int, str] | BroadcastGap] = []
    with reader:
        while (taken := await reader.read(batch)) is not None:
            if isinstance(taken, BroadcastGap):
                seen.append(taken)
            else:
                assert taken
                seen.extend(taken)
    return seen


def complete(seen: list[tuple[int, str] | BroadcastGap], first: int, end: int) -> None:
    """Each number once, in order, itself or inside a gap."""
    at = first
    for entry in seen:
        if isinstance(entry, BroadcastGap):
            assert entry.after == at - 1 < entry.until
            at = entry.until + 1
        else:
            assert entry == (at, f"item {at}")
            at += 1
    assert at == end


async def readers_and_a_publisher(make: Make, *, limit: int = 100) -> None:
    broadcast = make(limit)
    readers = [broadcast.reader(), broadcast.reader()]

    async def publish() -> None:
        for first in (10, 12, 14):
            broadcast.publish([f"item {first}", f"item {first + 1}"])
            await asyncio.sleep(0)
        broadcast.close()

    tasks = [asyncio.create_task(collect(readers[0], 1)), asyncio.create_task(collect(readers[1], 10))]
    await publish()
    for task in tasks:
        complete(await task, 10, 16)
    assert limit < 100 or not any(isinstance(entry, BroadcastGap) for task in tasks for entry in task.result())
    statistics = broadcast.statistics()
    assert (statistics.readers, statistics.waiting, statistics.behind, statistics.kept) == (0, 0, 0, 0)


def make(limit: int) -> Broadcast[str]:
    return Broadcast(10, limit=limit)


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize("chooser", ["random", "pct"])
def test_every_reader_sees_every_item_in_order_or_a_gap(chooser: Literal["random", "pct"], limit: int) -> None:
    explore(lambda: readers_and_a_publisher(make, limit=limit), chooser=chooser, schedules=500)


def test_no_schedule_of_a_reader_and_a_publisher_loses_the_tail() -> None:
    async def test() -> None:
        broadcast = make(2)
        task = asyncio.create_task(collect(broadcast.reader(), 1))
        for first in (10, 12):
            broadcast.publish([f"item {first}", f"item {first + 1}"])
            await asyncio.sleep(0)
        broadcast.close()
        complete(await task, 10, 14)

    assert explore(test, chooser="exhaustive", schedules=30_000).exhausted


@pytest.mark.parametrize(
    ("faulty", "limit"), [(CountsWaiters, 100), (WakesOne, 100), (ForgetsTheTail, 100), (NoGap, 1)]
)
def test_the_explorer_finds_each_faulty_broadcast(faulty: type[Broadcast[str]], limit: int) -> None:
    with pytest.raises(ScheduleFailure):
        explore(lambda: readers_and_a_publisher(lambda limit: faulty(10, limit=limit), limit=limit), schedules=500)


# ── Items taken where they are published ─────────────────────────────────────────────────────────────────────────────


class OffersAwake(Broadcast[str]):
    """Fault: a reader is offered items while its task still writes earlier ones."""

    __slots__ = ("offered",)

    def _start_waiting(self, reader: Reader[str], waiter: asyncio.Future[None]) -> None:
        self.offered = (reader, reader._on_publish)
        super()._start_waiting(reader, waiter)

    def _offer(self, items: Sequence[str]) -> None:
        reader, on_publish = getattr(self, "offered", (None, None))
        if reader is None or on_publish is None or reader.cursor + 1 != self.next_seq - len(items):
            self._wake()
        elif on_publish(items):
            reader._cursor += len(items)
        else:
            self._wake()


class WakesTakers(Broadcast[str]):
    """Fault: the task of a reader that took the items finds them once more."""

    __slots__ = ()

    def reader(self, after: int | None = None) -> Reader[str]:
        return _ForgetfulReader(self, self.next_seq - 1 if after is None else after)


class _ForgetfulReader(Reader[str]):
    __slots__ = ()

    def _takes(self, items: Sequence[str], first: int, waiter: asyncio.Future[None]) -> bool:
        if self._on_publish is not None:
            self._on_publish(items)
        return False


class TakesPartly(Broadcast[str]):
    """Fault: a reader that joined behind is offered the newest items, over those that it has not seen."""

    __slots__ = ()

    def reader(self, after: int | None = None) -> Reader[str]:
        return _HastyReader(self, self.next_seq - 1 if after is None else after)


class _HastyReader(Reader[str]):
    __slots__ = ()

    def _take(self, max_items: int) -> list[tuple[int, str]] | BroadcastGap | None:
        self._cursor = max(self._cursor, self._broadcast.next_seq - 1)
        return super()._take(max_items)


async def a_reader_that_is_sometimes_full(make: Make) -> None:
    """One reader takes items where they are published while it has room, and writes the others in its own time."""
    broadcast = make(100)
    written: list[str] = []
    room = True

    def on_publish(items: Sequence[str]) -> bool:
        if room:
            written.extend(items)
        return room

    async def write(joins_after: int) -> None:
        for _ in range(joins_after):
            await asyncio.sleep(0)
        with broadcast.reader(9) as reader:
            while (taken := await reader.read(2, on_publish=on_publish)) is not None:
                for _, item in _items(taken):
                    await asyncio.sleep(0)
                    written.append(item)

    async def fill() -> None:
        nonlocal room
        for _ in range(3):
            await asyncio.sleep(0)
            room = not room

    keeps = broadcast.reader()
    tasks = [asyncio.create_task(write(1)), asyncio.create_task(fill())]
    for number in range(10, 16):
        broadcast.publish([f"item {number}"])
        await asyncio.sleep(0)
    broadcast.close()
    await asyncio.gather(*tasks)
    keeps.close()
    assert written == [f"item {number}" for number in range(10, 16)]


@pytest.mark.parametrize("chooser", ["random", "pct"])
def test_items_taken_at_once_and_items_read_later_are_one_sequence(chooser: Literal["random", "pct"]) -> None:
    explore(lambda: a_reader_that_is_sometimes_full(make), chooser=chooser, schedules=500)


@pytest.mark.parametrize("faulty", [OffersAwake, WakesTakers, TakesPartly])
def test_the_explorer_finds_each_faulty_offer(faulty: type[Broadcast[str]]) -> None:
    with pytest.raises(ScheduleFailure):
        explore(lambda: a_reader_that_is_sometimes_full(lambda limit: faulty(10, limit=limit)), schedules=500)


async def a_reader_is_cancelled(make: Make) -> None:
    broadcast = make(100)
    taken: list[str] = []

    def on_publish(items: Sequence[str]) -> bool:
        taken.extend(items)
        return True

    with broadcast.reader() as reader:
        task = asyncio.create_task(reader.read(on_publish=on_publish))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        broadcast.publish(["item 10"])
        task.cancel()
        broadcast.publish(["item 11"])
        await asyncio.wait([task])
        assert "item 11" not in taken, "whoever cancelled the task has ended the stream"
        rest = _items(await reader.read())
        assert taken + [item for _, item in rest] == ["item 10", "item 11"]


def test_a_cancelled_reader_is_offered_nothing() -> None:
    assert explore(lambda: a_reader_is_cancelled(make), chooser="exhaustive", schedules=30_000).exhausted


def test_the_explorer_finds_an_offer_to_a_cancelled_reader() -> None:
    class Cancelled(Broadcast[str]):
        """Fault: a reader whose task is being cancelled is offered items."""

        __slots__ = ()

        def _offer(self, items: Sequence[str]) -> None:
            for reader in list(self._waiting or {}):
                reader._takes(items, self.next_seq - len(items), asyncio.get_running_loop().create_future())

    with pytest.raises(ScheduleFailure):
        explore(lambda: a_reader_is_cancelled(lambda limit: Cancelled(10, limit=limit)), schedules=100)


def test_items_after_a_hole_are_not_offered() -> None:
    async def test() -> None:
        broadcast = make(100)
        offered: list[str] = []

        def on_publish(items: Sequence[str]) -> bool:
            offered.extend(items)
            return True

        with broadcast.reader() as behind, broadcast.reader(after=11) as ahead:
            tasks = [asyncio.create_task(reader.read(on_publish=on_publish)) for reader in (behind, ahead)]
            await asyncio.sleep(0.1)
            broadcast.publish(["item 15"], first_seq=15)
            assert await tasks[0] == BroadcastGap(9, 14)
            assert await tasks[1] == BroadcastGap(11, 14)
            assert not offered

    run_virtual(test())


def test_a_callback_that_raises_ends_its_own_read_and_no_other() -> None:
    async def test() -> None:
        broadcast = make(100)
        seen: list[str] = []

        def fails(items: Sequence[str]) -> bool:
            raise OSError("gone")

        def takes(items: Sequence[str]) -> bool:
            seen.extend(items)
            return True

        with broadcast.reader() as broken, broadcast.reader() as well:
            tasks = [
                asyncio.create_task(broken.read(on_publish=fails)),
                asyncio.create_task(well.read(on_publish=takes)),
            ]
            await asyncio.sleep(0.1)
            broadcast.publish(["item 10"])
            with pytest.raises(OSError, match="gone"):
                await tasks[0]
            assert seen == ["item 10"]
            assert _items(await broken.read()) == [(10, "item 10")], "its cursor has not moved"
            assert broadcast.statistics().kept == 0
            broadcast.close()
            assert await tasks[1] is None

    run_virtual(test())


def test_a_cancelled_read_loses_nothing() -> None:
    async def test() -> None:
        broadcast = make(100)
        with broadcast.reader() as reader:
            first = asyncio.create_task(reader.read())
            publishing = asyncio.create_task(_publish(broadcast, ["item 10"]))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first, publishing])
            seen = [] if first.cancelled() else _items(first.result())
            broadcast.publish(["item 11"])
            while len(seen) < 2:
                seen += _items(await reader.read())
            assert seen == [(10, "item 10"), (11, "item 11")]
            assert broadcast.statistics().waiting == 0

    assert explore(test, chooser="exhaustive", schedules=30_000).exhausted


async def _publish(broadcast: Broadcast[str], items: list[str]) -> None:
    broadcast.publish(items)


def _items(taken: list[tuple[int, str]] | BroadcastGap | None) -> list[tuple[int, str]]:
    assert isinstance(taken, list)
    return taken


def test_an_interrupt_ends_the_read_and_takes_nothing() -> None:
    async def test() -> None:
        broadcast = make(100)
        reader = broadcast.reader()
        interrupt = Interrupt()

        async def read() -> None:
            with use(interrupt):
                await reader.read()

        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        interrupt.trigger("enough")
        broadcast.publish(["item 10"])
        with pytest.raises(Interrupted):
            await task
        assert _items(await reader.read()) == [(10, "item 10")]
        with use(interrupt), pytest.raises(Interrupted):
            await reader.read()
        reader.close()

    run_virtual(test())


def test_a_slow_reader_gets_one_gap_and_then_the_newest() -> None:
    async def test() -> None:
        broadcast = make(3)
        with broadcast.reader() as slow:
            for number in range(10, 30):
                broadcast.publish([f"item {number}"])
                assert broadcast.statistics().kept <= 6
            gap = await slow.read()
            assert isinstance(gap, BroadcastGap)
            assert gap.after == 9
            assert slow.cursor == gap.until
            rest = _items(await slow.read())
            assert [number for number, _ in rest] == list(range(gap.until + 1, 30))
            assert len(rest) >= 3

    run_virtual(test())


def test_numbers_left_out_are_a_gap_and_repeated_ones_are_skipped() -> None:
    async def test() -> None:
        broadcast = make(100)
        with broadcast.reader() as reader:
            assert broadcast.publish(["item 10", "item 11"], first_seq=10) == 12
            assert broadcast.publish(["item 11", "item 12"], first_seq=11) == 13
            assert broadcast.publish(["item 10"], first_seq=10) == 13
            assert _items(await reader.read()) == [(10, "item 10"), (11, "item 11"), (12, "item 12")]
            assert broadcast.publish(["item 15"], first_seq=15) == 16
            assert await reader.read() == BroadcastGap(12, 14)
            assert _items(await reader.read()) == [(15, "item 15")]

    run_virtual(test())


def test_a_reader_may_begin_behind_ahead_or_at_the_tail() -> None:
    async def test() -> None:
        broadcast = make(100)
        with broadcast.reader() as held, broadcast.reader(after=11) as ahead:
            broadcast.publish(["item 10", "item 11"])
            with broadcast.reader(after=9) as behind, broadcast.reader() as tail, broadcast.reader(after=4) as old:
                assert _items(await behind.read()) == [(10, "item 10"), (11, "item 11")]
                assert await old.read() == BroadcastGap(4, 9)
                assert _items(await old.read(1)) == [(10, "item 10")]
                waiting = asyncio.create_task(ahead.read())
                await asyncio.sleep(0.1)
                assert not waiting.done()
                broadcast.publish(["item 12"])
                assert _items(await waiting) == [(12, "item 12")] == _items(await tail.read())
            assert len(_items(await held.read())) == 3
            assert broadcast.statistics().kept == 0
        with broadcast.reader(after=9) as late:
            assert await late.read() == BroadcastGap(9, 12)
            assert broadcast.statistics().behind == 0

    run_virtual(test())


def test_nothing_is_kept_without_readers_and_vanished_readers_leave_nothing() -> None:
    async def test() -> None:
        broadcast = make(100)
        broadcast.publish(["item 10"])
        assert broadcast.statistics().kept == 0
        reader = broadcast.reader()
        broadcast.publish(["item 11"])
        assert broadcast.statistics().kept == 1
        del reader
        statistics = broadcast.statistics()
        assert (statistics.kept, statistics.readers, statistics.behind) == (0, 0, 0)

        waiting = asyncio.create_task(collect(broadcast.reader(), 10))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        statistics = broadcast.statistics()
        assert (statistics.readers, statistics.waiting, statistics.behind) == (0, 0, 0)
        assert broadcast.next_seq == 12

    run_virtual(test())


def test_closing_a_reader_ends_its_wait_and_the_broadcast_goes_on() -> None:
    async def test() -> None:
        broadcast = make(100)
        reader = broadcast.reader()
        task = asyncio.create_task(reader.read())
        await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="one reader per task"):
            await reader.read()
        reader.close()
        reader.close()
        assert await task is None
        assert await reader.read() is None
        broadcast.publish(["item 10"])
        assert not broadcast.closed

    run_virtual(test())


def test_a_second_read_is_refused_and_changes_nothing_for_the_first() -> None:
    async def test() -> None:
        broadcast = make(100)
        taken: dict[str, list[str]] = {"first": [], "second": []}

        def into(name: str) -> Callable[[Sequence[str]], bool]:
            def take(items: Sequence[str]) -> bool:
                taken[name].extend(items)
                return True

            return take

        with broadcast.reader() as reader:
            task = asyncio.create_task(reader.read(on_publish=into("first")))
            await asyncio.sleep(0.1)
            with pytest.raises(RuntimeError, match="one reader per task"):
                await reader.read(on_publish=into("second"))
            broadcast.publish(["item 10"])
            assert taken == {"first": ["item 10"], "second": []}
            broadcast.close()
            assert await task is None

    run_virtual(test())


def test_misuse_is_refused() -> None:
    async def test() -> None:
        broadcast = make(100)
        reader = broadcast.reader()
        with pytest.raises(ValueError, match="max_items"):
            await reader.read(0)
        broadcast.close()
        broadcast.close()
        assert broadcast.closed
        assert await reader.read() is None
        with pytest.raises(RuntimeError, match="closed"):
            broadcast.publish(["item 10"])

    run_virtual(test())
    with pytest.raises(ValueError, match="limit"):
        Broadcast(limit=0)


def test_an_idle_broadcast_is_small() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [Broadcast[str](1000 + number) for number in range(1000)]
        for broadcast in kept:
            with broadcast.reader():
                broadcast.publish(["x" * 100])
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / len(kept) < 250
