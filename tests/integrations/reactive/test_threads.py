"""The bridge and real threads: the parts that threads meet in step by step, and many items at once."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import frontrun  # type: ignore[import-untyped]
import pytest
import reactivex
from reactivex import Observable, Subject
from reactivex import operators as ops
from reactivex.disposable import SerialDisposable
from reactivex.scheduler import EventLoopScheduler, ImmediateScheduler, ThreadPoolScheduler
from reactivex.scheduler.eventloop import AsyncIOThreadSafeScheduler

from holdfast.errors import Interrupted, RunInterrupted, ScopeClosed
from holdfast.integrations.reactive import IntakeCounts, Outcome, ReactiveBridge
from holdfast.integrations.reactive import intake as reactive_intake
from holdfast.integrations.reactive import outlet as reactive_outlet
from holdfast.integrations.reactive.intake import Intake
from holdfast.integrations.reactive.outlet import Outlet
from holdfast.runtime import Interrupt, Scope
from holdfast.runtime.interrupt.interrupt import use
from tests.integrations.reactive.watching import Watcher, accounted, gone, soon

THREADS = 8


@pytest.fixture
def threads_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `frontrun` work in an ordinary run of pytest: it makes locks cooperative for the exploration only."""
    monkeypatch.setenv("FRONTRUN_ACTIVE", "1")


class Open:
    """No lock at all."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Meeting:
    """Two threads push into an intake with room for one while the loop takes, and the stream is closed."""

    def __init__(self) -> None:
        self.intake = Intake(limit=1, overflow="drop", block_s=1, wake=lambda: None, name="test")
        self.taken: list[Any] = []
        self.snapshots: list[IntakeCounts] = []

    def push(self) -> None:
        self.intake.put("item")

    def take(self) -> None:
        self.taken += self.intake.take(2)
        for _ in self.taken:
            self.intake.settle("done")

    def close(self) -> None:
        self.intake.close()
        self.snapshots.append(self.intake.counts())

    def sound(self) -> bool:
        self.intake.finish()
        counts = self.intake.counts()
        settled = counts.done + counts.interrupted + counts.dropped
        return counts.received + counts.late == 2 and counts.received == settled and counts.done == len(self.taken)


class NoLock(Meeting):
    def __init__(self) -> None:
        super().__init__()
        self.intake._lock = Open()  # type: ignore[assignment]


@pytest.mark.usefixtures("threads_explored")
def test_an_item_is_in_one_place_however_threads_meet_at_the_intake() -> None:
    threads = [Meeting.push, Meeting.push, Meeting.take, Meeting.close]
    result = frontrun.explore(Meeting, threads, Meeting.sound, strategy="random", max_attempts=150, seed=1)
    assert result.property_holds, result.explanation
    without = frontrun.explore(NoLock, threads, Meeting.sound, strategy="random", max_attempts=300, seed=1)
    assert not without.property_holds


class OnDemand:
    """A scheduler that hands each action to whoever asks, as threads of a pool do."""

    def __init__(self) -> None:
        self.actions: list[Callable[..., Any]] = []

    def schedule(self, action: Callable[..., Any]) -> None:
        self.actions.append(action)


class Emission:
    """The last values are emitted on a scheduler while the stream ends, or is disposed."""

    def __init__(self) -> None:
        self.watcher = Watcher()
        self.scheduler = OnDemand()
        loop = asyncio.new_event_loop()
        loop.close()
        self.outlet = Outlet(self.watcher, self.scheduler, loop)  # type: ignore[arg-type]
        self.outlet._values = [1, 2]
        self.outlet._active = True
        self.scheduler.actions.append(self.outlet._run)

    def emit(self) -> None:
        with suppress(IndexError):
            while True:
                self.scheduler.actions.pop()(None, None)

    def end(self) -> None:
        self.outlet.end(None)
        self.emit()  # another thread of the pool

    def sound(self) -> bool:
        self.emit()
        return self.watcher.breaches == [] and self.watcher.values == [1, 2] and self.watcher.completed


class NoLockEmission(Emission):
    def __init__(self) -> None:
        super().__init__()
        self.outlet._lock = Open()  # type: ignore[assignment]


class Disposed(Emission):
    def dispose(self) -> None:
        self.outlet.shut()

    def sound(self) -> bool:
        self.emit()
        return self.watcher.breaches == [] and self.watcher.values in ([], [1], [1, 2])


@pytest.mark.usefixtures("threads_explored")
def _disturbed(act: Callable[[], Any], at: int, disturb: Callable[[], Any]) -> bool:
    """Do `act` in a thread, and `disturb` as a signal handler would: before its `at`-th line in the bridge's modules.

    Whether there was such a line.
    """
    lines = itertools.count()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_globals["__name__"] not in (reactive_intake.__name__, reactive_outlet.__name__):
            return None
        if event == "line" and next(lines) == at:
            disturb()  # tracing is off meanwhile
        return trace

    def acting() -> None:
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=acting, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), f"stuck at line {at}"
    return next(lines) > at


ACTS: dict[str, Callable[[Intake], Any]] = {
    "put": lambda intake: intake.put("d"),
    "take": lambda intake: intake.take(3),
    "complete": Intake.complete,
    "counts": Intake.counts,
}


@pytest.mark.parametrize("act", ACTS)
def test_a_signal_handler_that_ends_a_stream_meets_no_lock_whatever_its_thread_does(act: str) -> None:
    at = 0
    more = True
    while more:
        intake = Intake(limit=3, overflow="drop", block_s=1.0, wake=lambda: None, name="s")
        for item in "abc"[: 2 if act == "put" else 3]:
            intake.put(item)

        def handle(intake: Intake = intake) -> None:
            intake.counts()
            intake.close()

        more = _disturbed(functools.partial(ACTS[act], intake), at, handle)
        intake.finish()
        counts = intake.counts()
        assert counts.received == counts.interrupted, f"disturbed at line {at}"
        assert (counts.waiting, counts.in_flight) == (0, 0)
        at += 1
    assert at > 2


def test_a_signal_handler_that_disposes_meets_no_lock_while_the_observer_is_told() -> None:
    at = 0
    more = True
    while more:
        watcher = Watcher()
        loop = asyncio.new_event_loop()
        outlet = Outlet(watcher, ImmediateScheduler(), loop)

        def tell(loop: asyncio.AbstractEventLoop = loop, outlet: Outlet = outlet) -> None:
            loop.run_until_complete(outlet.give("ab"))
            outlet.end(None)

        more = _disturbed(tell, at, outlet.shut)
        loop.close()
        assert watcher.values == ["a", "b"][: len(watcher.values)]
        assert watcher.breaches == []
        at += 1
    assert at > 10


@pytest.mark.usefixtures("threads_explored")
def test_notifications_never_overlap_and_the_last_one_is_the_last() -> None:
    threads = [Emission.emit, Emission.end]
    result = frontrun.explore(Emission, threads, Emission.sound, strategy="random", max_attempts=150, seed=1)
    assert result.property_holds, result.explanation
    without = frontrun.explore(NoLockEmission, threads, Emission.sound, strategy="random", max_attempts=300, seed=1)
    assert not without.property_holds
    disposed = [Disposed.emit, Disposed.end, Disposed.dispose]
    result = frontrun.explore(Disposed, disposed, Disposed.sound, strategy="random", max_attempts=150, seed=1)
    assert result.property_holds, result.explanation


def test_an_end_that_comes_while_a_value_is_told_waits_for_it() -> None:
    emission = Emission()
    tell = emission.watcher.on_next

    def ending(value: int) -> None:
        if value == 1:
            emission.end()
        tell(value)

    emission.watcher.on_next = ending  # type: ignore[method-assign]
    assert emission.sound()


# Blocked producers


async def for_ever(_: object) -> None:
    await asyncio.sleep(1000)


@contextmanager
def running(*works: Callable[[], object]) -> Iterator[list[threading.Thread]]:
    """Threads that run these; all have ended afterwards, and none has raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_a_full_buffer_holds_threads_back_and_keeps_their_order() -> None:
    async def main() -> None:
        begun: list[int] = []
        go = asyncio.get_running_loop().create_future()

        async def work(item: int) -> int:
            begun.append(item)
            await asyncio.shield(go)
            return item

        subject: Subject[int] = Subject()
        watcher = Watcher()
        async with ReactiveBridge(concurrency=1, buffer=2) as bridge, asyncio.timeout(30):
            subject.pipe(bridge.each(work)).subscribe(watcher)

            def push() -> None:
                for item in range(10):
                    subject.on_next(item)
                subject.on_completed()

            with running(push) as (thread,):
                while not (bridge.statistics().blocked and begun):
                    await asyncio.sleep(0)
                counts = bridge.statistics()
                assert (counts.in_flight, counts.waiting, counts.blocked, counts.received) == (1, 3, 1, 4)
                go.set_result(None)
                while thread.is_alive():
                    await asyncio.sleep(0.001)
        assert watcher.values == list(range(10)) == begun
        assert watcher.completed
        gone(bridge)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["dispose", "cleanup", "interrupt"])
def test_a_blocked_producer_is_let_go_when_its_stream_ends(way: str) -> None:
    async def main() -> None:
        subject: Subject[int] = Subject()
        watcher = Watcher()
        bridge = ReactiveBridge(concurrency=1, buffer=1).open()
        async with asyncio.timeout(30):
            subscription = subject.pipe(bridge.each(for_ever)).subscribe(watcher)

            def push() -> None:
                for item in range(10):
                    subject.on_next(item)

            with running(push) as (thread,):
                while not bridge.statistics().blocked:
                    await asyncio.sleep(0)
                if way == "dispose":
                    subscription.dispose()
                elif way == "cleanup":
                    assert bridge.cleanup() is None  # on the loop's own thread: it only begins
                else:
                    bridge.scope.interrupt.trigger("test")
                while thread.is_alive():
                    await asyncio.sleep(0.001)
            await bridge.aclose()
        gone(bridge)
        assert watcher.breaches == []
        assert isinstance(watcher.error, RunInterrupted) is (way != "dispose")

    asyncio.run(main())


def test_a_blocked_thread_of_a_scope_hears_its_own_interrupt() -> None:
    async def main() -> None:
        subject: Subject[int] = Subject()
        async with ReactiveBridge(concurrency=1, buffer=1) as bridge, asyncio.timeout(30):
            subscription = subject.pipe(bridge.each(for_ever)).subscribe(Watcher())

            def push() -> None:
                for item in range(10):
                    subject.on_next(item)

            producers = Scope("producers", parent=None).open()
            handle = producers.spawn(push, on="thread")
            while not (bridge.statistics().blocked and bridge.statistics().in_flight):
                await asyncio.sleep(0)
            assert (await producers.stop("test")).outcome == "gone"
            assert isinstance(handle.exception(), Interrupted)
            counts = bridge.statistics()
            assert (counts.in_flight, counts.waiting, counts.blocked, counts.interrupted) == (1, 1, 0, 1)
            subscription.dispose()
        gone(bridge)

    asyncio.run(main())


def test_a_thread_that_is_interrupted_while_it_subscribes_leaves_no_stream() -> None:
    async def main() -> None:
        async with ReactiveBridge(concurrency=1, buffer=1) as bridge, asyncio.timeout(30):
            watcher = Watcher()

            def source(observer: Any, _: Any) -> Any:
                for item in range(10):
                    observer.on_next(item)

            def subscribe() -> None:
                reactivex.create(source).pipe(bridge.each(for_ever)).subscribe(watcher)

            producers = Scope("producers", parent=None).open()
            producers.spawn(subscribe, on="thread")
            while not bridge.statistics().blocked:
                await asyncio.sleep(0)
            assert (await producers.stop("test")).outcome == "gone"
        gone(bridge)
        assert (watcher.values, watcher.ended) == ([], False)

    asyncio.run(main())


def test_a_producer_is_held_back_for_a_bounded_time() -> None:
    async def main() -> None:
        subject: Subject[int] = Subject()
        watcher = Watcher()
        async with ReactiveBridge(concurrency=1, buffer=1, block_s=0.01) as bridge, asyncio.timeout(30):
            subject.pipe(bridge.each(for_ever)).subscribe(watcher)

            def push() -> None:
                for item in range(4):
                    subject.on_next(item)

            with running(push) as (thread,):
                while thread.is_alive():
                    await asyncio.sleep(0.001)
        assert "had no room for 0.01 s" in str(watcher.error)
        gone(bridge)

    asyncio.run(main())


class LetInLate(Intake):
    """The loop lets a blocked producer in at the moment when that gives up."""

    __slots__ = ()

    def _leave(self, blocked: Any, as_: Any) -> bool:
        self.take(2)
        return super()._leave(blocked, as_)


@pytest.mark.parametrize("way", ["time", "interrupt"])
def test_a_producer_that_is_let_in_as_it_gives_up_goes_on(way: str) -> None:
    intake = LetInLate(limit=1, overflow="block", block_s=0.01 if way == "time" else 30, wake=lambda: None, name="test")
    intake.put(1)
    interrupt = Interrupt(name="producer")

    def push() -> None:
        with use(interrupt if way == "interrupt" else None):
            intake.put(2)

    with running(push):
        while way == "interrupt" and not intake.counts().blocked:
            pass
        interrupt.trigger("test")
    counts = intake.counts()
    assert (counts.in_flight, counts.dropped, counts.interrupted) == (2, 0, 0)
    assert intake.error is None
    assert not intake.exhausted


# Clean-up from anywhere


def test_clean_up_from_a_foreign_thread_answers_when_all_is_gone() -> None:
    async def main() -> None:
        alive = 0

        async def work(_: int) -> None:
            nonlocal alive
            alive += 1
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)
                alive -= 1

        subject: Subject[int] = Subject()
        watcher = Watcher()
        bridge = ReactiveBridge().open()
        subject.pipe(bridge.each(work)).subscribe(watcher)
        for item in range(5):
            subject.on_next(item)
        while alive < 5:
            await asyncio.sleep(0)
        seen: list[Any] = []

        def clean_up() -> None:
            receipt = bridge.cleanup("from a thread")
            seen.append((receipt, alive, watcher.error))
            assert bridge.cleanup() is receipt

        with running(clean_up) as (thread,):
            while thread.is_alive():
                await asyncio.sleep(0.001)
        ((receipt, left, error),) = seen
        assert (receipt.outcome, receipt.cause.reason, left) == ("gone", "from a thread", 0)
        assert isinstance(error, RunInterrupted)
        gone(bridge)

    asyncio.run(main())


# Many at once


class Payload:
    """Something that an item carries, and that must not outlive it."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


async def work(payload: Payload) -> Payload:
    number = payload.number
    if number % 97 == 0:
        raise ValueError(number)
    await asyncio.sleep(0.001 if number % 11 == 0 else 0)
    return payload


def block(payload: Payload) -> Payload:
    return payload


async def flood(items: int, seed: int) -> IntakeCounts:
    """One bridge, streams on two schedulers, 8 threads that push, and disposals and an end at random moments."""
    dice = random.Random(seed)
    loop = asyncio.get_running_loop()
    alive: weakref.WeakSet[Payload] = weakref.WeakSet()
    pool, ring = ThreadPoolScheduler(2), EventLoopScheduler(exit_if_empty=True)
    watchers: list[Watcher] = []
    pushed = [0] * THREADS
    subjects: list[Subject[Payload]] = [Subject() for _ in range(4)]
    bridge = ReactiveBridge(concurrency=50, buffer=64, grace_s=2).open()
    places: list[SerialDisposable] = [SerialDisposable() for _ in subjects]

    def subscribe(number: int) -> None:
        watcher = Watcher()
        watchers.append(watcher)
        source: Observable[Any] = subjects[number]
        if number == 1:
            source = source.pipe(ops.observe_on(ring))
        operator = bridge.each(
            block if number == 3 else work,
            ordered=number % 2 == 0,
            overflow="block" if number < 3 else "drop",
            outcomes=True,
            scheduler=(None, pool, AsyncIOThreadSafeScheduler(loop), ring)[number],
        )
        places[number].disposable = source.pipe(operator).subscribe(watcher)

    for number in range(len(subjects)):
        subscribe(number)

    def produce(number: int) -> None:
        mine = random.Random(seed * THREADS + number)
        for n in range(items // THREADS):
            payload = Payload(n)
            alive.add(payload)
            subjects[mine.randrange(4) if mine.random() < 0.5 else number % 3].on_next(payload)
            pushed[number] += 1
            if mine.random() < 0.002:
                subscribe(mine.randrange(4))  # the one before is disposed

    way = dice.choice(("drain", "cleanup", "aclose"))
    early = dice.random() < 0.5
    with running(*(lambda n=n: produce(n) for n in range(THREADS))) as threads:
        if early:
            while sum(pushed) < items // 2:
                await asyncio.sleep(0.001)
        else:
            while any(thread.is_alive() for thread in threads):
                await asyncio.sleep(0.001)
        if way == "drain":
            await bridge.drain(timeout_s=20)
        elif way == "aclose":
            await bridge.aclose()
        else:
            with running(bridge.cleanup) as (cleaner,):
                while cleaner.is_alive():
                    await asyncio.sleep(0.001)
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.001)
    gone(bridge)
    counts = bridge.statistics()
    assert counts.received <= items
    assert [breach for watcher in watchers for breach in watcher.breaches] == []
    for watcher in watchers:
        assert watcher.error is None or isinstance(watcher.error, (RunInterrupted, ScopeClosed)), watcher.error
        for outcome in watcher.values:
            assert isinstance(outcome, Outcome)
            assert outcome.settled == ("done" if outcome.error is None else "failed")
    pool.executor.shutdown()
    for kept in (subjects, places, watchers):
        kept.clear()
    del watcher, outcome

    def forgotten() -> bool:
        gc.collect()
        return not alive

    await soon(forgotten)  # the threads of the schedulers, which are not ours, may be telling the last ones yet
    ring.dispose()  # not before: it keeps what it has not done
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()
    return counts


def test_items_of_8_threads_are_accounted_for_and_nothing_is_kept() -> None:
    for seed in range(4):
        asyncio.run(flood(800, seed))


@pytest.mark.nightly
def test_50_000_items_of_8_threads_are_accounted_for_and_nothing_is_kept() -> None:
    total, seed = IntakeCounts(), 0
    while total.received < 50_000:
        total += asyncio.run(flood(5_000, seed))
        seed += 1
    accounted(total)
