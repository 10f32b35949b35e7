"""Queues and the broadcast: nothing lost, nothing twice, in order, nobody forgotten, bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from concurrent.futures import Future

import pytest

from holdfast.errors import Interrupted, QueueClosed, QueueEmpty, QueueFull
from holdfast.runtime import BoundedQueue, Broadcast, FairQueue, Scope
from holdfast.runtime.queues import fair, wait_queue
from holdfast.runtime.queues.broadcast import BroadcastGap, Reader
from holdfast.testing import start_thread
from tests.explored.model import Model, fault


async def fair_consumers() -> None:
    """Two consumers take from two keys, one of them is cancelled, and one takes what is free; then it is closed."""
    queue = FairQueue[str, int](10)
    got: list[tuple[str, int]] = []
    by: Counter[str] = Counter()
    before_shy: list[int] = []

    async def consume(name: str) -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                got.append(await queue.take())
                by[name] += 1

    async def feed() -> None:
        for item in (1, 2):
            queue.put_nowait("loud", item)
        await asyncio.sleep(0)
        queue.put_nowait("shy", 1)
        before_shy.append(len(got))
        await asyncio.sleep(0)
        with contextlib.suppress(QueueEmpty):
            got.append(queue.take_nowait())
        queue.close()

    tasks = [asyncio.create_task(work) for work in (consume("a"), consume("b"), feed())]
    await asyncio.sleep(0)
    tasks[1].cancel()
    async with asyncio.timeout(5):
        await asyncio.wait(tasks)
    assert Counter(got) == Counter([("loud", 1), ("loud", 2), ("shy", 1)]), "an item was lost or came twice"
    assert got.index(("loud", 1)) < got.index(("loud", 2)), "a key's items changed places"
    assert got.index(("shy", 1)) <= before_shy[0] + 1, "the other key had two turns"
    assert queue.statistics().waiting == len(queue) == 0


async def fair_turns() -> None:
    """Two consumers that always come back: neither overtakes the other for ever."""
    queue = FairQueue[str, int](10)
    overtaken: Counter[tuple[object, str]] = Counter()

    async def consume(name: str) -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                await queue.take()
                for waiter in queue._line.waiting:
                    overtaken[waiter, name] += 1

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(consume("a"))
        group.create_task(consume("b"))
        for item in range(4):
            await asyncio.sleep(0)
            queue.put_nowait("key", item)
        queue.close()
    assert max(overtaken.values(), default=0) <= 2, "who waited was overtaken three times"


async def bounded_tasks() -> None:
    """Two put into one place, one takes and one is cancelled while it does; then it is closed."""
    queue = BoundedQueue[int](1)
    accepted: list[int] = []
    got: list[int] = []

    async def put(item: int) -> None:
        with contextlib.suppress(QueueClosed):
            await queue.put(item)
            accepted.append(item)
            assert len(queue) <= 1

    async def take() -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                got.append(await queue.get())

    queue.put_nowait(0)
    putting = [asyncio.create_task(put(item)) for item in (1, 2)]
    taking = [asyncio.create_task(take()) for _ in range(2)]
    taking[0].cancel()
    async with asyncio.timeout(5):
        await asyncio.wait(putting)
        queue.close()
        await asyncio.wait(taking)
    assert sorted(got) == [0, *sorted(accepted)] == [0, 1, 2], "an item was lost or came twice"
    assert queue.statistics().waiting_getters == queue.statistics().waiting_putters == 0


async def bounded_threads() -> None:
    """The queue is full; one thread waits for room until a time at which there is some, another comes; it is closed."""
    queue = BoundedQueue[int](1)
    queue.put_nowait(0)
    accepted = [0]
    got: list[int] = []

    def put(item: int, timeout_s: float | None) -> None:
        with contextlib.suppress(QueueClosed, QueueFull):
            queue.put_threadsafe(item, timeout_s=timeout_s)
            accepted.append(item)

    async with asyncio.timeout(60):
        threads = [start_thread(put, 1, 0.01)]
        await asyncio.sleep(0.01)
        threads.append(start_thread(put, 2, None))
        got.append(await queue.get())
        await asyncio.sleep(0)
        queue.close()
        with contextlib.suppress(QueueClosed):
            while True:
                got.append(await queue.get())
        for one in threads:
            await one
    assert sorted(got) == sorted(accepted), "what a thread was told and what came out differ"
    assert queue.statistics().waiting_putters == 0


async def bounded_thread_that_is_interrupted() -> None:
    """A thread of a scope waits for room in a full queue, and is interrupted, while there comes room."""
    queue = BoundedQueue[int](1)
    queue.put_nowait(0)
    accepted: list[int] = []

    def put() -> None:
        queue.put_threadsafe(1)
        accepted.append(1)

    scope = Scope("run", parent=None).open()
    handle = scope.spawn(put, on="thread")
    await asyncio.sleep(0)
    got = [queue.get_nowait()]
    async with asyncio.timeout(60):
        await scope.stop("enough")
    with contextlib.suppress(Interrupted):
        handle.result()
    got += queue.drain()
    assert got == [0, *accepted], "a put that raised has put something in, or one that went well has not"


async def readers_of_a_broadcast() -> None:
    """Two readers, and a publisher that keeps hardly anything for who is behind."""
    broadcast = Broadcast[int](10, limit=1)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    async def read(name: str, reader: Reader[int]) -> None:
        at = 10
        with reader:
            while (taken := await reader.read(2)) is not None:
                numbers = (
                    range(taken.after + 1, taken.until + 1)
                    if isinstance(taken, BroadcastGap)
                    else [n for n, _ in taken]
                )
                assert list(numbers) == list(range(at, at + len(numbers))), "a hole or a repeat"
                at += len(numbers)
                seen[name] += numbers

    readers = [asyncio.create_task(read(name, broadcast.reader())) for name in seen]
    for number in range(3):
        broadcast.publish([number, number])
        await asyncio.sleep(0)
    broadcast.close()
    async with asyncio.timeout(5):
        await asyncio.gather(*readers)
    assert all(numbers == list(range(10, 16)) for numbers in seen.values()), "a reader missed something"
    assert (broadcast.statistics().readers, broadcast.statistics().kept) == (0, 0)


@fault
def a_promise_dies_with_who_had_it(patch: pytest.MonkeyPatch) -> None:
    async def wait(self: wait_queue.WaitQueue, waiter: wait_queue.Waiter, pass_on: object) -> bool:
        self.waiting[waiter] = None
        try:
            await wait_queue.wait_for_release(waiter)
        except BaseException:
            self.waiting.pop(waiter, None)
            raise
        return self.redeem(waiter)

    patch.setattr(wait_queue.WaitQueue, "wait", wait)


@fault
def who_waits_is_not_in_line(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fair, "PATIENCE", 0)
    patch.setattr(FairQueue, "_hand_out", _to_the_first)


def _to_the_first(self: FairQueue[str, int]) -> None:
    """The last who came is served first."""
    self._handing_out = False
    while self._line.waiting and self._free() > 0:
        self._line.promise_to(list(self._line.waiting)[-1])


@fault
def a_key_with_more_items_has_the_next_turn_too(patch: pytest.MonkeyPatch) -> None:
    pop = FairQueue._pop

    def again(self: FairQueue[str, int]) -> tuple[str, int]:
        key, item = pop(self)
        if key in self._by_key:
            self._turns.remove(key)
            self._turns.appendleft(key)
        return key, item

    patch.setattr(FairQueue, "_pop", again)


@fault
def what_is_promised_is_given_away(patch: pytest.MonkeyPatch) -> None:
    def take_nowait(self: FairQueue[str, int]) -> tuple[str, int]:
        if self._size:
            return self._pop()
        raise QueueEmpty("empty")

    patch.setattr(FairQueue, "take_nowait", take_nowait)


@fault
def who_waits_for_room_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedQueue, "_offer_room", lambda self: None)


@fault
def a_thread_that_gave_up_is_served(patch: pytest.MonkeyPatch) -> None:
    def answer(accepted: object, error: Exception | None) -> bool:
        with contextlib.suppress(Exception):
            plain(accepted, error)  # type: ignore[arg-type]
        return error is None

    plain = BoundedQueue._answer
    patch.setattr(BoundedQueue, "_answer", staticmethod(answer))


@fault
def a_thread_is_told_before_its_item_is_in(patch: pytest.MonkeyPatch) -> None:
    def enter(self: BoundedQueue[int], item: int, accepted: Future[None]) -> None:
        if self._closed:
            self._answer(accepted, QueueClosed("closed"))
        elif self._answer(accepted, None):
            asyncio.get_running_loop().call_soon(self._append, item)

    patch.setattr(BoundedQueue, "_enter_from_thread", enter)


@fault
def readers_are_not_told_of_a_gap(patch: pytest.MonkeyPatch) -> None:
    take = Reader._take

    def gapless(self: Reader[int], max_items: int) -> object:
        taken = take(self, max_items)
        return take(self, max_items) if isinstance(taken, BroadcastGap) else taken

    patch.setattr(Reader, "_take", gapless)


@fault
def one_reader_is_woken(patch: pytest.MonkeyPatch) -> None:
    def wake(self: Broadcast[int]) -> None:
        if self._waiting:
            _, waiter = self._waiting.popitem()
            wait_queue.release(waiter)

    patch.setattr(Broadcast, "_wake", wake)


MODELS = (
    Model(
        item="fair queue",
        name="consumers that come and go",
        promise="P13: nothing is lost or doubled, a key keeps its order, and keys take turns",
        scenario=fair_consumers,
        faults=(
            a_promise_dies_with_who_had_it,
            a_key_with_more_items_has_the_next_turn_too,
            what_is_promised_is_given_away,
        ),
    ),
    Model(
        item="fair queue",
        name="turns",
        promise="P13: nobody who waits is overtaken for ever",
        scenario=fair_turns,
        faults=(who_waits_is_not_in_line,),
    ),
    Model(
        item="bounded queue",
        name="tasks that come and go",
        promise="P9: bounded; nothing is lost or doubled",
        scenario=bounded_tasks,
        faults=(a_promise_dies_with_who_had_it, who_waits_for_room_is_not_told),
        ends=6_000,
    ),
    Model(
        item="bounded queue",
        name="threads that feed it, one of them with a time limit",
        promise="P9: a put that raised has put nothing in; one that went well has",
        scenario=bounded_threads,
        faults=(a_thread_that_gave_up_is_served, a_thread_is_told_before_its_item_is_in),
    ),
    Model(
        item="bounded queue",
        name="a thread that is interrupted while it waits for room",
        promise="P1, P9: the same for an interrupt",
        scenario=bounded_thread_that_is_interrupted,
        faults=(a_thread_that_gave_up_is_served,),
    ),
    Model(
        item="broadcast",
        name="readers of different speed",
        promise="P7: each reader sees each item in order, or a gap, and the end",
        scenario=readers_of_a_broadcast,
        faults=(readers_are_not_told_of_a_gap, one_reader_is_woken),
        ends=1_000,
    ),
)
