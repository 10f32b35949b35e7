"""The interrupt as a latch: causes, waits, callbacks, deadlines, trees, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Literal

import pytest

from holdfast.errors import Interrupted
from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt import dispatch as interrupt_dispatch
from holdfast.runtime.interrupt.interrupt import Interrupt, InterruptStatistics, check_interrupt, is_interrupted, use
from holdfast.testing import explore, run_virtual

PATIENCE_S = 10.0

NOBODY = InterruptStatistics(triggered=True, waiting_tasks=0, waiting_threads=0, callbacks=0, children=0)


def on_asyncio(test: Callable[[], Coroutine[Any, Any, object]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(bounded())


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread to get somewhere."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it never came to that"
        time.sleep(0.0005)


def origins(cause: Cause | None) -> list[str]:
    """The names up the chain: what was interrupted first is the last."""
    found = []
    while cause is not None:
        found.append(cause.origin)
        cause = cause.parent
    return found


def dispatched() -> None:
    """Wait until the dispatcher thread has done all that was posted before."""
    done = threading.Event()
    interrupt_dispatch.dispatcher.start()
    interrupt_dispatch.dispatcher.post(done.set)
    assert done.wait(PATIENCE_S)


# The latch


def test_the_first_cause_wins_and_stays() -> None:
    interrupt = Interrupt(name="run 7")
    assert not interrupt.triggered
    assert interrupt.cause is None
    interrupt.check()

    assert interrupt.trigger("enough", kind="stop", message_id="m-1")
    assert not interrupt.trigger("later", kind="user")

    cause = interrupt.cause
    assert cause is not None
    assert (cause.kind, cause.reason, cause.origin, cause.message_id) == ("stop", "enough", "run 7", "m-1")
    assert cause.at == pytest.approx(time.time(), abs=60)
    with pytest.raises(Interrupted) as caught:
        interrupt.check()
    assert caught.value.cause is cause


def test_a_ready_made_cause_is_taken_once() -> None:
    cause = Cause(kind="budget", reason="spent")
    interrupt = Interrupt()
    assert interrupt.trigger(cause=cause)
    assert not interrupt.trigger(cause=cause)
    assert interrupt.cause is cause


def test_there_is_no_way_back() -> None:
    assert not hasattr(Interrupt, "reset")
    assert not hasattr(Interrupt, "clear")


def test_of_many_threads_exactly_one_is_first() -> None:
    for _ in range(50):
        interrupt = Interrupt()
        start = threading.Barrier(8)
        won: list[str] = []

        def race(interrupt: Interrupt = interrupt, start: threading.Barrier = start, won: list[str] = won) -> None:
            name = threading.current_thread().name
            start.wait(PATIENCE_S)
            if interrupt.trigger(name):
                won.append(name)

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert interrupt.cause is not None
        assert won == [interrupt.cause.reason]


# Waiting


async def three_waiters_and_a_late_one() -> None:
    interrupt = Interrupt()
    waiters = [asyncio.create_task(interrupt.wait()) for _ in range(3)]

    async def trigger() -> None:
        interrupt.trigger("stop")

    async def come_late() -> Cause:
        await asyncio.sleep(0)
        return await interrupt.wait()

    others = [asyncio.create_task(trigger()), asyncio.create_task(come_late())]
    causes = await asyncio.gather(*waiters, others[1])
    assert causes == [interrupt.cause] * 4
    await others[0]
    assert interrupt.statistics() == NOBODY


@pytest.mark.parametrize("chooser", ["random", "pct"])
@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
def test_every_waiter_wakes_under_every_schedule(
    chooser: Literal["random", "pct"], tasks: Literal["ordinary", "eager"]
) -> None:
    explore(three_waiters_and_a_late_one, chooser=chooser, tasks=tasks)


@pytest.mark.parametrize("seed", range(3))
def test_a_wait_that_is_cancelled_wakes_no_other_and_leaves_nothing(seed: int) -> None:
    async def test() -> None:
        interrupt = Interrupt()
        first, second = (asyncio.create_task(interrupt.wait()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        third = asyncio.create_task(interrupt.wait())
        await asyncio.wait([first])
        assert not second.done()
        await asyncio.sleep(0)
        interrupt.trigger("now")
        await asyncio.gather(second, third)
        assert interrupt.statistics() == NOBODY

    run_virtual(test())
    explore(test, seed=seed, schedules=100)


def test_a_wait_that_ends_unanswered_does_not_keep_its_loop() -> None:
    interrupt = Interrupt()
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def impatient() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await interrupt.wait()

    asyncio.run(impatient())
    gc.collect()
    assert loops[0]() is None
    assert not interrupt.statistics().waiting_tasks


def test_sleep_ends_early_only_with_an_interrupt() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        interrupt = Interrupt()
        began = loop.time()
        await interrupt.sleep(3)
        assert loop.time() - began == pytest.approx(3)
        await interrupt.sleep(0)
        sleeper = asyncio.create_task(interrupt.sleep(1000))
        await asyncio.sleep(1)
        interrupt.trigger("up")
        with pytest.raises(Interrupted):
            await sleeper
        assert loop.time() - began == pytest.approx(4)
        with pytest.raises(Interrupted):
            await interrupt.sleep(0)
        assert interrupt.statistics() == NOBODY

    run_virtual(test())


def test_a_blocked_thread_wakes_or_runs_out_of_time() -> None:
    interrupt = Interrupt()
    assert interrupt.wait_blocking(0) is None
    assert interrupt.wait_blocking(0.001) is None
    assert interrupt.wait_blocking(-1) is None
    interrupt.sleep_blocking(0.001)
    assert interrupt.statistics().waiting_threads == 0

    answers: list[Cause | None] = []
    threads = [threading.Thread(target=lambda: answers.append(interrupt.wait_blocking(PATIENCE_S))) for _ in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: interrupt.statistics().waiting_threads == 5)
    interrupt.trigger("all of you")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [interrupt.cause] * 5
    assert interrupt.wait_blocking() is interrupt.cause
    with pytest.raises(Interrupted):
        interrupt.sleep_blocking(1000)
    assert interrupt.statistics() == NOBODY


def test_two_hundred_mixed_waiters_wake_on_one_trigger_from_a_signal_handler() -> None:
    """Tasks of two loops, threads, callbacks, a descriptor, children of children, and those who come afterwards."""
    host = Interrupt(name="host")
    run = host.child(name="run").child(name="step")
    woken: list[str] = []

    async def waiting(interrupt: Interrupt, count: int, name: str) -> None:
        async def waiter() -> None:
            cause = await interrupt.wait()
            assert (cause.reason, origins(cause)[-1]) == ("the person left", "host")
            woken.append(name)

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(waiter())

    def blocking(interrupt: Interrupt) -> None:
        if interrupt.wait_blocking(PATIENCE_S) is not None:
            woken.append("thread")

    threads = [threading.Thread(target=blocking, args=(which,)) for which in (host, run) for _ in range(20)]
    threads += [threading.Thread(target=asyncio.run, args=(waiting(run, 40, f"loop {n}"),)) for n in range(2)]
    for _ in range(20):
        run.on_trigger(lambda _: woken.append("callback"))
    descriptor = run.fileno()
    for thread in threads:
        thread.start()

    def handler(signum: int, frame: FrameType | None) -> None:
        assert host.trigger("the person left", kind="disconnect")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiters = asyncio.create_task(waiting(run, 40, "main"))
        ready = loop.create_future()

        def ask_others() -> None:
            until(lambda: run.statistics().waiting_tasks == 120)
            until(lambda: run.statistics().waiting_threads + host.statistics().waiting_threads == 40)
            loop.call_soon_threadsafe(ready.set_result, None)

        threading.Thread(target=ask_others).start()
        await ready
        # The signal comes while this loop sleeps in its selector.
        threading.Timer(0.01, _signal_main, [signal.SIGUSR1]).start()
        await waiters
        # Whoever comes afterwards.
        for _ in range(20):
            await run.wait()
            woken.append("late")

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGUSR1, previous)
    for thread in threads:
        thread.join(PATIENCE_S)
    dispatched()
    assert {name: woken.count(name) for name in set(woken)} == {
        "thread": 40, "loop 0": 40, "loop 1": 40, "main": 40, "callback": 20, "late": 20,
    }  # fmt: skip
    assert select.select([descriptor], [], [], 0)[0] == [descriptor]
    run.close_fd()
    assert run.statistics() == NOBODY


def _signal_main(number: int) -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def test_a_signal_handler_wakes_the_thread_it_interrupts() -> None:
    interrupt = Interrupt()

    def strike() -> None:
        until(lambda: interrupt.statistics().waiting_threads == 1)
        _signal_main(signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, lambda *_: interrupt.trigger("signal"))
    try:
        timer = threading.Thread(target=strike)
        timer.start()
        assert interrupt.wait_blocking(PATIENCE_S) is interrupt.cause
        assert interrupt.triggered
        timer.join(PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_handler_that_triggers_and_raises_leaves_nobody_out() -> None:
    """Ctrl-C while `trigger` is at work: whoever is not woken yet still is."""
    interrupt = Interrupt()
    child = interrupt.child()
    woken = threading.Thread(target=child.wait_blocking, args=(PATIENCE_S,))
    woken.start()
    until(lambda: child.statistics().waiting_threads == 1)

    class Impatient(Interrupt):
        """Stands for a signal that comes right after the latch was set."""

        struck = False

        def _spread(self, cause: Cause) -> None:
            if not Impatient.struck:
                Impatient.struck = True
                raise KeyboardInterrupt
            super()._spread(cause)

    parent = Impatient()
    follower = parent.linked(child)
    with pytest.raises(KeyboardInterrupt):
        parent.trigger("first")
    assert parent.triggered
    assert follower.triggered
    interrupt.trigger("end")
    woken.join(PATIENCE_S)
    assert not woken.is_alive()


def test_an_object_that_dies_may_trigger() -> None:
    interrupt = Interrupt()

    class Dying:
        def __del__(self) -> None:
            interrupt.trigger("it died")

    async def test() -> None:
        waiter = asyncio.create_task(interrupt.wait())
        await asyncio.sleep(0)
        cycle: list[object] = [Dying()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert (await waiter).reason == "it died"

    on_asyncio(test)


def test_many_waiters_do_not_hold_up_the_loop() -> None:
    count = interrupt_dispatch.CHUNK * 3

    async def test() -> None:
        interrupt = Interrupt()
        woken = 0

        async def waiter() -> None:
            nonlocal woken
            await interrupt.wait()
            woken += 1

        waiters = [asyncio.create_task(waiter()) for _ in range(count)]
        await asyncio.sleep(0)
        interrupt.trigger("everybody")
        most = before = 0
        while woken < count:
            await asyncio.sleep(0)
            most, before = max(most, woken - before), woken
        assert most <= interrupt_dispatch.CHUNK
        await asyncio.gather(*waiters)

    run_virtual(test())


class Meanwhile(dict[Any, Any]):
    """Lets another thread trigger when a task enters itself: after its check, before its park."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt

    def setdefault(self, key: Any, default: Any = None) -> Any:
        thread = threading.Thread(target=self.interrupt.trigger, args=("meanwhile",))
        thread.start()
        thread.join(PATIENCE_S)
        return super().setdefault(key, default)


def test_a_trigger_between_the_check_and_the_park_of_a_task_is_not_lost() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        interrupt._tasks = Meanwhile(interrupt)
        assert (await interrupt.wait()).reason == "meanwhile"
        assert interrupt.statistics() == NOBODY
        interrupt = Interrupt()
        interrupt._tasks = Meanwhile(interrupt)
        with pytest.raises(Interrupted):
            await interrupt.sleep(1000)
        assert interrupt.statistics() == NOBODY

    on_asyncio(test)


def test_it_works_the_same_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def test() -> None:
        interrupt = Interrupt()
        child = interrupt.child(deadline_s=1000)
        ran: list[Cause] = []
        child.on_trigger(ran.append)
        waiters = [asyncio.create_task(child.wait()) for _ in range(interrupt_dispatch.CHUNK * 2)]
        await asyncio.sleep(0)
        thread = threading.Thread(target=interrupt.trigger)
        thread.start()
        async with asyncio.timeout(PATIENCE_S):
            causes = await asyncio.gather(*waiters)
            assert (await interrupt.child(deadline_s=0).wait()).kind == "parent"
            assert (await Interrupt(deadline_s=0.001).wait()).kind == "deadline"
        thread.join(PATIENCE_S)
        assert set(map(id, causes)) == {id(child.cause)}
        assert ran == [child.cause]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


# Callbacks


def test_a_callback_runs_once_on_its_loop_in_its_own_context_and_never_inside_the_trigger() -> None:
    place: contextvars.ContextVar[str] = contextvars.ContextVar("place")

    async def test() -> None:
        interrupt = Interrupt()
        seen: list[tuple[Cause, str, threading.Thread]] = []
        place.set("registrant")
        interrupt.on_trigger(lambda cause: seen.append((cause, place.get(), threading.current_thread())))
        place.set("trigger")
        thread = threading.Thread(target=contextvars.copy_context().run, args=(interrupt.trigger, "now"))
        thread.start()
        thread.join(PATIENCE_S)
        assert not seen
        await asyncio.sleep(0)
        while not seen:
            await asyncio.sleep(0.001)
        interrupt.on_trigger(lambda cause: seen.append((cause, place.get(), threading.current_thread())))
        assert len(seen) == 1
        await asyncio.sleep(0.001)
        assert seen == [
            (interrupt.cause, "registrant", threading.main_thread()),
            (interrupt.cause, "trigger", threading.main_thread()),
        ]
        assert interrupt.statistics() == NOBODY

    on_asyncio(test)


def test_a_callback_without_a_loop_runs_on_the_dispatcher() -> None:
    interrupt = Interrupt()
    names: list[str] = []
    interrupt.on_trigger(lambda _: names.append(threading.current_thread().name))
    interrupt.trigger()
    interrupt.on_trigger(lambda _: names.append(threading.current_thread().name))
    dispatched()
    assert names == ["holdfast-dispatcher"] * 2


def test_a_closed_callback_does_not_run() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        ran: list[str] = []
        first = interrupt.on_trigger(lambda _: ran.append("first"))
        second = interrupt.on_trigger(lambda _: ran.append("second"))
        with interrupt.on_trigger(lambda _: ran.append("third")):
            assert interrupt.statistics().callbacks == 3
        first.close()
        first.close()
        interrupt.trigger()
        second.close()
        await asyncio.sleep(0.001)
        assert ran == []
        assert interrupt.statistics() == NOBODY

    run_virtual(test())


def test_a_callback_that_raises_is_reported_and_stops_no_other() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        reports: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, report: reports.append(report))
        interrupt = Interrupt(name="run")
        ran: list[str] = []

        def fail(cause: Cause) -> None:
            raise Interrupted(cause)

        interrupt.on_trigger(fail)
        interrupt.on_trigger(lambda _: ran.append("after"))
        waiter = asyncio.create_task(interrupt.wait())
        await asyncio.sleep(0)
        interrupt.trigger()
        await waiter
        while not reports:
            await asyncio.sleep(0.001)
        assert ran == ["after"]
        assert isinstance(reports[0]["exception"], Interrupted)
        assert "interrupt 'run'" in reports[0]["message"]

    on_asyncio(test)


def test_a_failing_callback_does_not_end_the_dispatcher(caplog: pytest.LogCaptureFixture) -> None:
    interrupt = Interrupt()
    ran: list[str] = []

    def leave(_: Cause) -> None:
        raise SystemExit

    interrupt.on_trigger(leave)
    interrupt.on_trigger(lambda _: ran.append("after"))
    interrupt.trigger()
    dispatched()
    assert ran == ["after"]
    assert "raised" in caplog.text


def test_a_loop_that_was_closed_is_passed_over() -> None:
    interrupt = Interrupt()
    ran: list[str] = []

    async def register() -> None:
        interrupt.on_trigger(lambda _: ran.append("gone"))

    asyncio.run(register())
    thread = threading.Thread(target=interrupt.wait_blocking, args=(PATIENCE_S,))
    thread.start()
    until(lambda: interrupt.statistics().waiting_threads == 1)
    interrupt.trigger()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert ran == []


# The descriptor


def test_the_descriptor_is_readable_once_triggered_and_closes_with_the_interrupt() -> None:
    interrupt = Interrupt()
    descriptor = interrupt.fileno()
    assert interrupt.fileno() == descriptor
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(0) == []
    interrupt.trigger()
    assert poll.poll(0)[0][1] & select.POLLIN
    assert os.read(descriptor, 10) != b""
    assert os.read(descriptor, 10) == b""

    late = Interrupt()
    late.trigger()
    assert select.select([late], [], [], 0)[0] == [late]

    second = late.fileno()
    late.close_fd()
    late.close_fd()
    del interrupt
    for closed in (descriptor, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)


# The tree


def test_a_trigger_reaches_every_descendant_and_nobody_above_or_beside() -> None:
    root = Interrupt(name="host")
    left, right = root.child(name="left"), root.child(name="right")
    leaf = left.child(name="leaf")
    left.trigger("enough", kind="stop", message_id="m-1")
    assert left.cause is not None
    assert leaf.cause == Cause(
        kind="parent", reason="enough", origin="left", at=left.cause.at, parent=left.cause, message_id="m-1"
    )  # fmt: skip
    assert not root.triggered
    assert not right.triggered

    root.trigger("bye", kind="shutdown")
    assert leaf.cause.parent is left.cause
    assert origins(right.child().child(name="below").cause) == ["", "right", "host", "host"]
    assert right.cause is not None
    assert right.cause.parent is root.cause
    assert (right.cause.kind, right.cause.reason, right.cause.origin) == ("parent", "bye", "host")
    late = root.child()
    assert late.triggered
    assert late.cause == right.cause


def test_who_is_woken_finds_the_whole_tree_below_triggered() -> None:
    root = Interrupt()
    chain = [root]
    for _ in range(2_000):
        chain.append(chain[-1].child())
    seen: list[bool] = []

    def look() -> None:
        root.wait_blocking(PATIENCE_S)
        seen.append(chain[-1].triggered)

    thread = threading.Thread(target=look)
    thread.start()
    until(lambda: root.statistics().waiting_threads == 1)
    root.trigger()
    thread.join(PATIENCE_S)
    assert seen == [True]


def test_a_link_is_triggered_by_any_of_its_sources() -> None:
    for first in range(3):
        sources = [Interrupt(name=str(n)) for n in range(3)]
        link = sources[0].linked(*sources[1:], name="link")
        assert [source.statistics().children for source in sources] == [1, 1, 1]
        sources[first].trigger("go")
        assert link.cause is not None
        assert link.cause.parent is sources[first].cause
        assert sum(source.triggered for source in sources) == 1
    gone = Interrupt()
    gone.trigger()
    assert Interrupt().linked(gone).triggered


def test_a_grandchild_stays_connected_when_nobody_holds_its_parent() -> None:
    root = Interrupt()
    grandchild = root.child().child()
    gc.collect()
    root.trigger()
    assert grandchild.triggered


def test_a_parent_keeps_no_trace_of_a_hundred_thousand_finished_children() -> None:
    parent = Interrupt()

    async def live_and_die() -> None:
        for number in range(100_000):
            child = parent.child(deadline_s=3600 if number % 100 == 0 else None)
            if number % 1000 == 0:
                waiter = asyncio.create_task(child.wait())
                child.on_trigger(print).close()
                await asyncio.sleep(0)
                waiter.cancel()
                await asyncio.wait([waiter])

    async def test() -> None:
        before = len(gc.get_objects())
        await live_and_die()
        assert parent.statistics().children == 0
        await asyncio.sleep(0)
        assert gc.collect() < 100
        assert len(gc.get_objects()) - before < 1_000

    gc.collect()
    gc.disable()
    try:
        on_asyncio(test)
    finally:
        gc.enable()


# Deadlines


def test_a_deadline_on_a_loop_triggers_on_the_clock_of_the_loop() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        parent = Interrupt()
        child = parent.child(name="call", deadline_s=30)
        cause = await child.wait()
        assert loop.time() - began == pytest.approx(30)
        assert (cause.kind, cause.origin) == ("deadline", "call")
        assert not parent.triggered
        await Interrupt(deadline_s=0).wait()

    run_virtual(test())


def test_a_deadline_without_a_loop_triggers_too() -> None:
    cause = Interrupt(deadline_s=0.005).wait_blocking(PATIENCE_S)
    assert cause is not None
    assert cause.kind == "deadline"


def test_an_interrupt_that_is_over_leaves_no_timer() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        Interrupt(deadline_s=1000)
        kept = Interrupt(deadline_s=1000)
        kept.trigger()
        elsewhere = [Interrupt(deadline_s=1000)]
        thread = threading.Thread(target=elsewhere.clear)
        thread.start()
        thread.join(PATIENCE_S)
        await asyncio.sleep(0.001)
        assert [timer for timer in loop._scheduled if not timer.cancelled()] == []  # type: ignore[attr-defined]

    asyncio.run(test())


def test_many_interrupts_that_are_over_leave_no_timers_on_the_dispatcher() -> None:
    for _ in range(1_000):
        Interrupt(deadline_s=1000)
    dispatched()
    assert len(interrupt_dispatch.dispatcher.timers) < 200


def test_a_timer_does_not_keep_its_loop_or_interrupt() -> None:
    async def make() -> tuple[weakref.ref[Interrupt], Interrupt]:
        return weakref.ref(Interrupt(deadline_s=1000)), Interrupt(deadline_s=0)

    async def test() -> None:
        dead, fired = await make()
        assert dead() is None
        await fired.wait()

    gc.disable()
    try:
        on_asyncio(test)
    finally:
        gc.enable()


# The current interrupt


def test_outside_any_scope_nothing_is_interrupted() -> None:
    assert not is_interrupted()
    check_interrupt()


def test_the_current_interrupt_is_checked() -> None:
    interrupt = Interrupt()
    with use(interrupt) as current:
        assert current is interrupt
        check_interrupt()
        interrupt.trigger()
        assert is_interrupted()
        with pytest.raises(Interrupted):
            check_interrupt()
        with use(None):
            check_interrupt()
    assert not is_interrupted()
