"""What the operator does with items, errors, ends and bounds, on an ordinary loop."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import reactivex
from reactivex import Observable, Subject
from reactivex import operators as ops
from reactivex.disposable import Disposable
from reactivex.scheduler import EventLoopScheduler, ImmediateScheduler, ThreadPoolScheduler

from holdfast.agents import agent
from holdfast.errors import (
    ConfigurationError,
    Interrupted,
    InvalidRequest,
    MissingExtra,
    QueueFull,
    RunInterrupted,
    ScopeClosed,
    StreamEnded,
    WaitExpired,
)
from holdfast.integrations.reactive import Outcome, Overflow, ReactiveBridge
from holdfast.protocol.stopping import Cause
from holdfast.runtime import Scope, current_interrupt, current_scope
from tests.integrations.reactive.watching import Busy, Watcher, accounted, gone, soon


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(bounded())


async def double(item: int) -> int:
    await asyncio.sleep(0.001 * (item % 3))
    return 2 * item


def fourth(number: int) -> bool:
    return number % 4 == 0


# Results


def test_results_come_in_order_where_asked_and_all_of_them_come() -> None:
    async def main() -> None:
        async with ReactiveBridge(concurrency=8) as bridge:
            numbers = reactivex.from_iterable(range(100))
            assert await bridge.collect(numbers.pipe(bridge.each(double, ordered=True))) == [2 * n for n in range(100)]
            mixed = await bridge.collect(numbers.pipe(bridge.each(double)))
            assert sorted(mixed) == [2 * n for n in range(100)] != mixed
            assert await bridge.collect(reactivex.empty().pipe(bridge.each(double))) == []
        gone(bridge)

    run(main)


def test_no_more_items_are_worked_on_at_a_time_than_asked_for() -> None:
    async def main() -> None:
        busy = Busy(turns=3)
        async with ReactiveBridge(concurrency=7) as bridge:
            await bridge.collect(reactivex.from_iterable(range(100)).pipe(bridge.each(busy)))
            assert busy.most == 7
            busy.most = 0
            await bridge.collect(reactivex.from_iterable(range(100)).pipe(bridge.each(busy, concurrency=2)))
            assert busy.most == 2
            busy.most = 0
            await bridge.collect(
                reactivex.from_iterable(range(100)).pipe(bridge.each(busy, concurrency=2, ordered=True))
            )
            assert busy.most == 2

    run(main)


def test_one_slow_item_holds_up_an_ordered_stream_for_a_bounded_number_of_others() -> None:
    async def main() -> None:
        begun: list[int] = []
        go = asyncio.get_running_loop().create_future()

        async def work(item: int) -> int:
            begun.append(item)
            if item == 0:
                await go
            return item

        subject: Subject[int] = Subject()
        watcher = Watcher()
        async with ReactiveBridge(concurrency=2, buffer=4, ordered=True) as bridge:
            subject.pipe(bridge.each(work)).subscribe(watcher)
            for item in range(10):
                subject.on_next(item)
                await asyncio.sleep(0.002)
            assert begun == [0, 1, 2, 3, 4, 5]
            assert watcher.values == []
            go.set_result(None)
            subject.on_completed()
        assert watcher.values == list(range(10))

    run(main)


def test_a_sync_function_gets_a_thread() -> None:
    async def main() -> None:
        here = threading.get_ident()
        async with ReactiveBridge(concurrency=4) as bridge:
            threads = await bridge.collect(
                reactivex.from_iterable(range(20)).pipe(bridge.each(lambda _: threading.get_ident()))
            )
            assert here not in threads

    run(main)


def test_operators_work_one_after_the_other() -> None:
    async def main() -> None:
        async with ReactiveBridge(concurrency=3, ordered=True) as bridge:
            chain: Observable[Any] = reactivex.from_iterable(range(20)).pipe(
                bridge.each(double),
                ops.filter(fourth),
                bridge.each(lambda n: n + 1),
                ops.buffer_with_count(2),
            )
            assert await bridge.collect(chain) == [[8 * n + 1, 8 * n + 5] for n in range(5)]
        gone(bridge)

    run(main)


def test_each_subscription_is_a_stream_of_its_own() -> None:
    async def main() -> None:
        async with ReactiveBridge() as bridge:
            doubled = reactivex.from_iterable(range(3)).pipe(bridge.each(double, ordered=True))
            first, second = await asyncio.gather(bridge.collect(doubled), bridge.collect(doubled))
            assert first == second == [0, 2, 4]
            assert bridge.statistics().done == 6

    run(main)


def test_contextvars_of_one_item_are_not_seen_by_another() -> None:
    from contextvars import ContextVar

    seen: ContextVar[int] = ContextVar("seen", default=-1)

    async def main() -> None:
        async def work(item: int) -> int:
            before = seen.get()
            seen.set(item)
            await asyncio.sleep(0)
            return before

        async with ReactiveBridge(concurrency=2) as bridge:
            found = await bridge.collect(reactivex.from_iterable(range(20)).pipe(bridge.each(work), bridge.each(work)))
            assert set(found) == {-1}

    run(main)


# Where results are emitted


def test_results_are_emitted_on_the_loop_or_on_the_scheduler_asked_for() -> None:
    async def main() -> None:
        ring = EventLoopScheduler(exit_if_empty=True)
        here = threading.get_ident()
        async with ReactiveBridge() as bridge:
            for scheduler, wanted in ((None, True), (ImmediateScheduler.singleton(), True), (ring, False)):
                watcher = Watcher()
                reactivex.from_iterable(range(50)).pipe(
                    bridge.each(double, ordered=True, scheduler=scheduler)
                ).subscribe(watcher)
                await soon(lambda watcher=watcher: watcher.completed)  # type: ignore[misc]
                assert watcher.values == [2 * n for n in range(50)]
                assert watcher.breaches == []
                assert (watcher.threads == {here}) is wanted
        ring.dispose()

    run(main)


class Stalled:
    """A scheduler that keeps what it is given."""

    def __init__(self) -> None:
        self.actions: list[Callable[..., Any]] = []

    def schedule(self, action: Callable[..., Any]) -> None:
        self.actions.append(action)


def test_a_scheduler_that_stalls_holds_the_stream_back_and_not_the_end_of_the_bridge() -> None:
    async def main() -> None:
        stalled: Any = Stalled()
        watcher, busy = Watcher(), Busy()
        bridge = ReactiveBridge(concurrency=2).open()
        reactivex.from_iterable(range(100)).pipe(bridge.each(busy, scheduler=stalled)).subscribe(watcher)
        await soon(lambda: stalled.actions)
        await asyncio.sleep(0.01)
        assert busy.begun <= 4
        assert (await bridge.aclose()).outcome == "gone"
        gone(bridge)
        for action in stalled.actions:
            action(None, None)
        assert isinstance(watcher.error, RunInterrupted)
        assert watcher.breaches == []

    run(main)


# Errors


def test_an_error_of_the_work_ends_the_stream_interrupts_the_others_and_disposes_the_source() -> None:
    async def main() -> None:
        disposed: list[bool] = []
        busy, watcher = Busy(wait_s=1000), Watcher()

        async def work(item: int) -> int:
            if item == 3:
                raise ValueError("three")
            return int(await busy(item))

        def source(observer: Any, _: Any) -> Disposable:
            for item in range(5):
                observer.on_next(item)
            return Disposable(lambda: disposed.append(True))

        async with ReactiveBridge() as bridge:
            reactivex.create(source).pipe(bridge.each(work)).subscribe(watcher)
            await soon(lambda: watcher.ended)
            assert isinstance(watcher.error, ValueError)
            assert busy.alive == 0
            assert disposed == [True]
        counts = bridge.statistics()
        assert (counts.failed, counts.interrupted, counts.received) == (1, 4, 5)

    run(main)


def test_an_observer_hears_of_an_error_when_nothing_of_the_stream_is_at_work_any_more() -> None:
    async def main() -> None:
        busy = Busy(wait_s=1000)
        at_work: list[int] = []

        async def work(item: int) -> int:
            if item == 3:
                raise ValueError("three")
            return int(await busy(item))

        async with ReactiveBridge() as bridge:
            stream = reactivex.from_iterable(range(5)).pipe(bridge.each(work))
            stream.subscribe(on_error=lambda _: at_work.append(busy.alive))
            await soon(lambda: at_work != [])
        assert at_work == [0]

    run(main)


def test_in_an_ordered_stream_an_error_comes_in_its_turn() -> None:
    async def main() -> None:
        async def work(item: int) -> int:
            if item == 3:
                raise ValueError("three")
            await asyncio.sleep(0.01)
            return item

        watcher = Watcher()
        async with ReactiveBridge(ordered=True) as bridge:
            reactivex.from_iterable(range(6)).pipe(bridge.each(work)).subscribe(watcher)
        assert watcher.values == [0, 1, 2]
        assert isinstance(watcher.error, ValueError)

    run(main)


def test_with_outcomes_every_item_has_one_and_errors_do_not_end_the_stream() -> None:
    async def main() -> None:
        async def work(item: int) -> int:
            if item == 1:
                raise ValueError("one")
            if item == 2:
                raise asyncio.CancelledError
            if item == 3:
                sys.exit(3)
            if item == 4:
                async with Scope("own", deadline_s=0.001):
                    await asyncio.sleep(1000)
            return item

        def block(item: int) -> Any:
            return {0: lambda: 0, 1: lambda: next(iter(())), 2: lambda: sys.exit(2), 3: lambda: double(3)}[item]()

        async with ReactiveBridge(outcomes=True, ordered=True) as bridge:
            found: list[Outcome] = await bridge.collect(reactivex.from_iterable(range(6)).pipe(bridge.each(work)))
            assert [one.index for one in found] == [one.item for one in found] == list(range(6))
            assert [one.settled for one in found] == ["done", "failed", "interrupted", "failed", "interrupted", "done"]
            assert [one.value for one in found] == [0, None, None, None, None, 5]
            assert "sys.exit(3)" in str(found[3].error)
            assert "deadline of 0.001 s exceeded" in str(found[4].error)
            blocked: list[Outcome] = await bridge.collect(reactivex.from_iterable(range(4)).pipe(bridge.each(block)))
            assert [one.settled for one in blocked] == ["done", "failed", "failed", "failed"]
            assert "async def" in str(blocked[3].error)
        accounted(bridge.statistics())

    run(main)


def test_an_item_that_is_interrupted_by_itself_ends_a_plain_stream_with_an_error() -> None:
    async def main() -> None:
        async def work(_: int) -> None:
            raise asyncio.CancelledError

        async with ReactiveBridge() as bridge:
            with pytest.raises(RunInterrupted, match="it was cancelled"):
                await bridge.collect(reactivex.of(1).pipe(bridge.each(work)))

    run(main)


class Odd(BaseException):
    """Not an error that work may have; like a KeyboardInterrupt, but the loop survives it."""


@pytest.mark.parametrize("outcomes", [False, True])
@pytest.mark.parametrize("on", ["loop", "thread"])
def test_what_is_no_error_of_the_work_goes_to_the_owner_and_nothing_is_told_to_have_completed(
    on: str, outcomes: bool
) -> None:
    async def on_loop(item: int) -> int:
        if item == 2:
            raise Odd
        await asyncio.sleep(1000)
        return item

    def in_thread(item: int) -> int:
        if item == 2:
            raise Odd
        return item

    async def main() -> None:
        watcher = Watcher()
        with pytest.raises(Odd):
            async with ReactiveBridge(outcomes=outcomes) as bridge:
                work: Any = on_loop if on == "loop" else in_thread
                reactivex.of(1, 2, 3).pipe(bridge.each(work)).subscribe(watcher)
        assert isinstance(watcher.error, RunInterrupted) and "Odd" in str(watcher.error)
        assert not watcher.completed
        accounted(bridge.statistics())

    run(main)


def test_an_error_of_the_source_ends_the_stream_at_once() -> None:
    async def main() -> None:
        busy, watcher = Busy(wait_s=1000), Watcher()
        async with ReactiveBridge() as bridge:
            reactivex.concat(reactivex.of(1, 2), reactivex.throw(KeyError("source"))).pipe(bridge.each(busy)).subscribe(
                watcher
            )
        assert isinstance(watcher.error, KeyError)
        assert (watcher.values, busy.alive) == ([], 0)
        assert bridge.statistics().interrupted == 2

    run(main)


class Rude(Observable[Any]):
    """An observable that keeps to no rule: it raises when it is subscribed, or pushes after its end."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.raises = raises
        self.observer: Any = None

    def subscribe(
        self, on_next: Any = None, on_error: Any = None, on_completed: Any = None, *, scheduler: Any = None
    ) -> Any:
        if self.raises:
            raise OSError("no such stream")
        self.observer = (on_next, on_error, on_completed)
        return Disposable()


def refuses(*_: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("source", [Rude(True), reactivex.create(refuses)], ids=["rude", "create"])
def test_an_observable_that_errors_when_it_is_subscribed_is_an_error_of_its_stream_alone(source: Any) -> None:
    async def main() -> None:
        watcher = Watcher()
        async with ReactiveBridge() as bridge:
            source.pipe(bridge.each(double)).subscribe(watcher)
            assert await bridge.collect(reactivex.of(4).pipe(bridge.each(double))) == [8]
        assert isinstance(watcher.error, (OSError, ZeroDivisionError))
        gone(bridge)

    run(main)


def test_an_item_after_completion_is_an_error_of_who_pushed_it_and_nothing_else_is_disturbed() -> None:
    async def main() -> None:
        rude, watcher = Rude(False), Watcher()
        async with ReactiveBridge() as bridge:
            rude.pipe(bridge.each(double)).subscribe(watcher)
            push, fail, complete = rude.observer
            push(1)
            complete()
            with pytest.raises(StreamEnded, match="after the end of its source") as caught:
                push(2)
            assert (caught.value.code, bool(caught.value.hint)) == ("stream_ended", True)
            complete()
            fail(ValueError("too late"))
        assert watcher.completed
        assert watcher.values == [2]
        assert watcher.breaches == []
        assert (bridge.statistics().late, bridge.statistics().received) == (1, 1)

    run(main)


def test_an_observer_that_raises_ends_its_stream_and_the_loop_hears_of_it() -> None:
    async def main() -> None:
        told: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
        ring = EventLoopScheduler(exit_if_empty=True)
        async with ReactiveBridge() as bridge:
            for scheduler in (None, ring):
                busy = Busy()
                values: list[int] = []

                def observe(value: int, values: list[int] = values) -> None:
                    values.append(value)
                    raise ValueError("observer")

                reactivex.from_iterable(range(100)).pipe(
                    bridge.each(busy, concurrency=2, scheduler=scheduler)
                ).subscribe(observe)
                await soon(lambda: not bridge.streams)
                assert busy.begun < 10
                assert len(values) == 1
            reactivex.throw(KeyError("nobody listens")).pipe(bridge.each(double)).subscribe()
        assert told == ["ValueError('observer')", "ValueError('observer')", "KeyError('nobody listens')"]
        ring.dispose()

    run(main)


def test_a_scheduler_that_takes_nothing_more_ends_the_stream_and_the_loop_hears_of_it() -> None:
    async def main() -> None:
        told: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        pool = ThreadPoolScheduler(1)
        pool.executor.shutdown()
        async with ReactiveBridge() as bridge:
            watcher = Watcher()
            reactivex.from_iterable(range(5)).pipe(bridge.each(double, scheduler=pool)).subscribe(watcher)
        assert told == ["the scheduler of a reactive stream raised RuntimeError"]
        assert (watcher.values, watcher.ended) == ([], False)
        gone(bridge)

    run(main)


def test_a_source_that_raises_when_it_is_disposed_is_told_to_the_loop() -> None:
    async def main() -> None:
        told: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        async with ReactiveBridge() as bridge:

            class Thorny(Rude):
                def subscribe(self, *_: Any, **__: Any) -> Any:
                    return Disposable(refuses)

            subscription = Thorny(False).pipe(bridge.each(double)).subscribe(Watcher())
            await asyncio.sleep(0)
            subscription.dispose()
        assert told == ["the source of reactive double raised when it was disposed"]

    run(main)


# Bounds


def test_a_full_buffer_on_the_loops_own_thread_is_an_error_and_never_blocks_it() -> None:
    async def main() -> None:
        async with ReactiveBridge(buffer=10, block_s=0.2) as bridge:
            limits: tuple[tuple[Overflow, str], ...] = (("block", "which must not block"), ("fail", "with 10 items"))
            for overflow, words in limits:
                with pytest.raises(QueueFull, match=words) as caught:
                    await bridge.collect(
                        reactivex.from_iterable(range(100)).pipe(bridge.each(double, overflow=overflow))
                    )
                assert "subscribe_on" in (caught.value.hint or "")
            found = await bridge.collect(
                reactivex.from_iterable(range(100)).pipe(bridge.each(double, overflow="drop", ordered=True))
            )
            assert found == [2 * n for n in range(10)]
            assert bridge.statistics().dropped == 2 + 90

    run(main)


@pytest.mark.parametrize(
    "shape",
    [
        {"concurrency": 0},
        {"buffer": 0},
        {"buffer": 1.5},
        {"overflow": "grow"},
        {"block_s": 0},
        {"block_s": float("inf")},
        {"block_s": float("nan")},
        {"block_s": "1"},
        {"grace_s": float("nan")},
        {"grace_s": float("inf")},
        {"grace_s": -1},
        {"grace_s": "5"},
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused_with_a_hint(shape: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ReactiveBridge(**shape)
    assert caught.value.hint


def test_work_that_cannot_be_is_refused_with_a_hint() -> None:
    bridge = ReactiveBridge()
    with pytest.raises(ConfigurationError, match="needs a parent run") as caught:
        bridge.each(agent(name="writer")(lambda run: "text"))
    assert "ReactiveBridge(run)" in (caught.value.hint or "")
    with pytest.raises(ConfigurationError, match="is not callable"):
        bridge.each(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="full_s is nan"):
        bridge.ask(lambda item: item, full_s=float("nan"))
    with pytest.raises(ConfigurationError, match="gaps is 'maybe'"):
        bridge.events(None, gaps="maybe")  # type: ignore[arg-type]


def test_without_reactivex_the_bridge_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reactivex", None)
    with pytest.raises(MissingExtra) as caught:
        ReactiveBridge()
    assert "holdfast-agents[reactive]" in (caught.value.hint or "")


# Ends


def test_disposing_interrupts_with_a_cause_and_emits_nothing_more() -> None:
    async def main() -> None:
        causes: list[str] = []

        async def work(item: int) -> int:
            if item:
                return item
            scope = current_scope()
            assert scope is not None
            try:
                await asyncio.sleep(1000)
            finally:
                cause = scope.interrupt.cause
                assert cause is not None
                causes.append(cause.reason)
            return item

        async with ReactiveBridge() as bridge:
            found = await bridge.collect(reactivex.from_iterable(range(3)).pipe(bridge.each(work), ops.take(2)))
            assert found == [1, 2]
        assert causes == ["the subscription was disposed"]
        gone(bridge)

    run(main)


def test_a_subscription_that_is_disposed_before_it_began_does_nothing() -> None:
    async def main() -> None:
        busy, watcher = Busy(), Watcher()
        async with ReactiveBridge() as bridge:
            subject: Subject[int] = Subject()
            subscription = subject.pipe(bridge.each(busy)).subscribe(watcher)
            subject.on_next(1)
            subscription.dispose()
            subscription.dispose()
            subject.on_next(2)
        gone(bridge)
        assert (busy.begun, watcher.values, watcher.ended) == (0, [], False)
        assert not subject.observers
        assert bridge.statistics().interrupted == 1

    run(main)


def test_an_error_in_the_block_ends_the_streams() -> None:
    async def main() -> None:
        busy, watcher = Busy(wait_s=1000), Watcher()
        with pytest.raises(KeyError):
            async with ReactiveBridge() as bridge:
                reactivex.of(1).pipe(bridge.each(busy)).subscribe(watcher)
                await soon(lambda: busy.alive)
                raise KeyError("block")
        assert "left by KeyError" in str(watcher.error)
        assert busy.alive == 0
        gone(bridge)

    run(main)


def test_a_bridge_ends_with_its_owner_and_says_so() -> None:
    async def main() -> None:
        busy, watcher = Busy(wait_s=1000), Watcher()
        owner = Scope("owner", parent=None).open()
        bridge = ReactiveBridge(owner, name="pipe").open()
        reactivex.of(1).pipe(bridge.each(busy)).subscribe(watcher)
        await soon(lambda: busy.alive)
        assert [scope.name for scope in owner.children()] == ["pipe"]
        assert [member.name for member in bridge.scope.members()] == ["pipe Busy", "pipe Busy"]
        assert "1 streams" in repr(bridge)
        assert (await owner.stop("the owner goes")).outcome == "gone"
        gone(bridge)
        assert "the owner goes" in str(watcher.error)
        with pytest.raises(Interrupted):
            ReactiveBridge(owner).open()

    run(main)


def test_a_block_whose_owner_is_interrupted_raises_so() -> None:
    async def main() -> None:
        bridge = ReactiveBridge()
        with pytest.raises(Interrupted):
            async with bridge:
                reactivex.never().pipe(bridge.each(double)).subscribe(Watcher())
                bridge.scope.interrupt.trigger("somebody else")
        gone(bridge)
        async with ReactiveBridge() as bridge:
            reactivex.never().pipe(bridge.each(double)).subscribe(Watcher())
            assert bridge.cleanup() is None  # ours: the block just ends
        gone(bridge)

    run(main)


def test_a_closed_bridge_refuses_subscriptions_with_an_error_to_the_observer() -> None:
    async def main() -> None:
        bridge = ReactiveBridge().open()
        first = await bridge.aclose("over")
        assert await bridge.aclose() == first == bridge.cleanup() == await bridge.drain()
        with pytest.raises(ScopeClosed) as caught:
            await bridge.collect(reactivex.of(1).pipe(bridge.each(double)))
        assert (caught.value.code, bool(caught.value.hint)) == ("scope_closed", True)
        gone(bridge)

    run(main)


def test_a_drain_without_a_time_is_refused_and_the_bridge_goes_on() -> None:
    async def main() -> None:
        async with ReactiveBridge() as bridge:
            for timeout_s in (float("nan"), float("inf"), -1.0):
                with pytest.raises(ConfigurationError, match="timeout_s is "):
                    await bridge.drain(timeout_s=timeout_s)
            assert await bridge.collect(reactivex.of(2).pipe(bridge.each(double))) == [4]

    run(main)


@pytest.mark.filterwarnings("ignore")
def test_a_clean_up_after_the_loop_was_closed_tells_observers_and_threads_and_says_what_is_left() -> None:
    async def sleep(_: int) -> None:
        await asyncio.sleep(1000)

    def wait(_: int) -> None:
        begun.set()
        current = current_interrupt()
        assert current is not None
        woken.put(current.wait_blocking(60))

    async def begin() -> None:
        bridge.open()
        for work, watcher in zip((sleep, wait), watchers, strict=False):
            source.pipe(bridge.each(work)).subscribe(watcher)
        source.on_next(1)
        while not begun.is_set():
            await asyncio.sleep(0.001)

    begun, source = threading.Event(), Subject[int]()
    woken: queue.Queue[Cause | None] = queue.Queue()
    bridge, watchers = ReactiveBridge(name="ours"), [Watcher(), Watcher()]
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(begin(), 60))
    loop.close()
    with pytest.raises(
        ScopeClosed, match="the event loop of ours was closed while 2 streams of the bridge were open"
    ) as caught:
        bridge.cleanup("too late")
    assert "before its loop" in caught.value.hint
    cause = woken.get(timeout=60)
    assert cause is not None and "too late" in cause.reason
    for watcher in watchers:
        assert isinstance(watcher.error, RunInterrupted)
    assert bridge.cleanup() is None, "once is enough"
    assert bridge.streams == 0


def test_a_clean_up_of_a_bridge_without_streams_is_quiet_after_its_loop_was_closed() -> None:
    async def begin() -> ReactiveBridge:
        return ReactiveBridge().open()

    bridge = asyncio.run(begin())
    assert bridge.cleanup() is None
    assert bridge.cleanup() is None


def test_a_bridge_that_was_never_opened_says_so() -> None:
    async def main() -> None:
        bridge = ReactiveBridge()
        for stream in (reactivex.of(1).pipe(bridge.each(double)), bridge.events(None)):  # type: ignore[arg-type]
            with pytest.raises(ScopeClosed, match="not open"):
                await bridge.collect(stream)
        for end in (bridge.aclose, bridge.drain):
            with pytest.raises(ScopeClosed, match="not open"):
                await end()
        with pytest.raises(ScopeClosed, match="not open"):
            bridge.cleanup()

    run(main)


@pytest.mark.filterwarnings("ignore")
def test_a_producer_is_not_held_back_for_a_loop_that_was_closed() -> None:
    async def sleep(_: int) -> None:
        await asyncio.sleep(1000)

    async def begin() -> None:
        bridge.open()
        source.pipe(bridge.each(sleep)).subscribe(Watcher())
        await asyncio.sleep(0)

    bridge = ReactiveBridge(concurrency=1, buffer=1, block_s=1000)
    source: Subject[int] = Subject()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    pushing = threading.Thread(target=reactivex.range(4).subscribe, args=(source,), daemon=True)
    pushing.start()
    pushing.join(60)
    assert not pushing.is_alive()
    assert (bridge.statistics().received, bridge.statistics().waiting) == (1, 0)


def test_clean_up_from_the_work_itself_does_not_wait_for_itself() -> None:
    async def main() -> None:
        watchers = [Watcher() for _ in range(3)]
        for number, watcher in enumerate(watchers):
            bridge = ReactiveBridge(grace_s=2).open()

            async def on_loop(_: int, bridge: ReactiveBridge = bridge) -> None:
                bridge.cleanup("enough")
                await asyncio.sleep(1000)

            def in_thread(_: int, bridge: ReactiveBridge = bridge) -> None:
                assert bridge.cleanup("enough") is None

            async def awaited(_: int, bridge: ReactiveBridge = bridge) -> None:
                await bridge.aclose("enough")

            work: Any = (on_loop, in_thread, awaited)[number]
            reactivex.of(1).pipe(bridge.each(work)).subscribe(watcher)
            await soon(lambda bridge=bridge: bridge.scope.closed)  # type: ignore[misc]
            gone(bridge)
            assert bridge.scope.receipt is not None
            assert bridge.scope.receipt.outcome == "gone"
            assert "enough" in str(watcher.error)

    run(main)


def test_clean_up_by_an_observer_ends_its_own_stream_too() -> None:
    async def main() -> None:
        bridge = ReactiveBridge(concurrency=1).open()
        values: list[int] = []

        def observe(value: int) -> None:
            values.append(value)
            bridge.cleanup("seen enough")

        errors: list[Exception] = []
        reactivex.from_iterable(range(10)).pipe(bridge.each(double)).subscribe(observe, errors.append)
        await soon(lambda: bridge.scope.closed and errors)
        assert values == [0]
        assert "seen enough" in str(errors[0])
        gone(bridge)

    run(main)


def test_clean_up_of_a_bridge_whose_loop_is_blocked_gives_up_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.integrations.reactive import bridge as reactive

    monkeypatch.setattr(reactive, "_MARGIN_S", 0.01)
    errors: list[BaseException] = []

    async def main() -> None:
        bridge = ReactiveBridge(grace_s=0.01).open()
        bridge.scope.core.times.own = (0.01, 0.01)
        reactivex.never().pipe(bridge.each(double)).subscribe(Watcher())
        await asyncio.sleep(0)

        def clean_up() -> None:
            try:
                bridge.cleanup()
            except WaitExpired as error:
                errors.append(error)

        thread = threading.Thread(target=clean_up)
        thread.start()
        thread.join()  # blocks the loop
        await bridge.aclose()
        gone(bridge)

    run(main)
    assert "is not closed after" in str(errors[0])


def test_a_drain_finishes_what_came_in_and_interrupts_what_takes_too_long() -> None:
    async def main() -> None:
        subject: Subject[int] = Subject()
        quick, slow = Watcher(), Watcher()
        busy = Busy(wait_s=1000)
        bridge = ReactiveBridge(concurrency=1).open()
        subject.pipe(bridge.each(double)).subscribe(quick)
        subject.pipe(bridge.each(busy)).subscribe(slow)
        for item in range(5):
            subject.on_next(item)
        draining = asyncio.create_task(bridge.drain(timeout_s=2))
        await asyncio.sleep(0)
        assert not subject.observers
        receipt = await draining
        assert receipt.outcome == "gone"
        assert quick.values == [0, 2, 4, 6, 8]
        assert quick.completed
        assert isinstance(slow.error, RunInterrupted)
        counts = bridge.statistics()
        assert (counts.done, counts.interrupted) == (5, 5)
        gone(bridge)

    run(main)


def test_work_that_ignores_its_interrupt_is_named_and_what_it_returns_does_not_count() -> None:
    async def main() -> None:
        watcher = Watcher()
        begun: list[str] = []
        go = threading.Event()
        over = asyncio.get_running_loop().create_future()

        def stubborn(item: int) -> int:
            begun.append("stubborn")
            go.wait(20)
            return item

        async def deaf(item: int) -> int:
            begun.append("deaf")
            while not over.done():
                try:
                    await asyncio.shield(over)
                except asyncio.CancelledError:
                    pass
            return item

        bridge = ReactiveBridge(grace_s=0.01).open()
        bridge.scope.core.times.own = (0.01, 0.01)
        for work in (stubborn, deaf):
            reactivex.of(1).pipe(bridge.each(work)).subscribe(watcher)
        await soon(lambda: len(begun) == 2)
        receipt = await bridge.aclose()
        assert receipt.outcome == "quarantined"
        assert {"reactive deaf 0", "stubborn"} <= {left.name for left in receipt.abandoned}
        gone(bridge)
        go.set()
        over.set_result(None)
        await asyncio.sleep(0.01)
        gone(bridge)
        assert (bridge.statistics().interrupted, bridge.statistics().done) == (2, 0)
        assert watcher.values == []

    run(main)
