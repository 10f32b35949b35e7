"""Interrupts: one trigger reaches every waiter, in tasks and in threads, and nothing is lost between check and park."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.errors import Interrupted
from holdfast.protocol.stopping import Cause
from holdfast.runtime import Interrupt
from holdfast.runtime.interrupt import dispatch as interrupt_dispatch
from holdfast.runtime.interrupt import interrupt
from holdfast.testing import start_thread
from tests.explored.model import Model, fault

ITEM = "interrupt"


async def tasks_wait() -> None:
    """Two tasks wait, one sleeps on a child, and each may be late; a fourth triggers."""
    parent = Interrupt(name="parent")
    child = parent.child(name="child")
    seen: list[Cause] = []

    async def wait() -> None:
        seen.append(await parent.wait())

    async def sleep() -> None:
        with pytest.raises(Interrupted) as caught:
            await child.sleep(1e9)
        assert caught.value.cause.parent is parent.cause
        seen.append(caught.value.cause)

    async def trigger() -> None:
        assert parent.trigger("enough")

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for work in (wait, wait, sleep, trigger):
            group.create_task(work())
    assert len(seen) == 3, "a waiter was not woken"
    assert parent.statistics().waiting_tasks == child.statistics().waiting_tasks == 0


async def two_trigger() -> None:
    """Two trigger at once while a task waits."""
    one = Interrupt()
    first: list[str] = []

    async def wait() -> None:
        cause = await one.wait()
        assert cause is one.cause
        await asyncio.sleep(0)
        assert cause is one.cause, "the cause has changed"

    async def trigger(reason: str) -> None:
        if one.trigger(reason):
            first.append(reason)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for work in (trigger("a"), wait(), trigger("b")):
            group.create_task(work)
    assert one.cause is not None
    assert first == [one.cause.reason], "not exactly one was first"


async def callbacks_and_cancels() -> None:
    """A callback is registered, one is closed, a waiter is cancelled, while it is triggered."""
    one = Interrupt()
    ran: list[str] = []
    closed = one.on_trigger(lambda _: ran.append("closed"))

    async def register() -> None:
        one.on_trigger(lambda _: ran.append("kept"))

    async def close() -> None:
        closed.close()
        before = ran.count("closed")
        await asyncio.sleep(0)
        assert ran.count("closed") == before, "a callback ran after it was closed"

    async def trigger() -> None:
        one.trigger()

    waiting = asyncio.create_task(one.wait())
    async with asyncio.TaskGroup() as group:
        for work in (register, close, trigger):
            group.create_task(work())
        waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.sleep(0.01)
    assert ran.count("kept") == 1, "a callback did not run, or ran twice"
    assert one.statistics() == interrupt.InterruptStatistics(
        triggered=True, waiting_tasks=0, waiting_threads=0, callbacks=0, children=0
    )


async def threads_wait() -> None:
    """A thread waits, one sleeps on a child, a task waits; a thread triggers."""
    parent = Interrupt()
    child = parent.child()
    woken: list[str] = []

    def wait() -> None:
        assert parent.wait_blocking() is not None
        woken.append("wait")

    def sleep() -> None:
        with pytest.raises(Interrupted):
            child.sleep_blocking(100.0)
        woken.append("sleep")

    async def wait_on_the_loop() -> None:
        await parent.wait()
        woken.append("loop")

    def trigger() -> None:
        parent.trigger()

    waiter = asyncio.create_task(wait_on_the_loop())
    threads = [start_thread(work) for work in (wait, sleep, trigger)]
    async with asyncio.timeout(50):
        for ended in (*threads, waiter):
            await ended
    assert sorted(woken) == ["loop", "sleep", "wait"]
    assert parent.statistics().waiting_threads == 0


async def a_thread_waits() -> None:
    """A thread waits with a time limit, while a task triggers."""
    one = Interrupt()

    def wait() -> Cause | None:
        return one.wait_blocking(100.0)

    async def trigger() -> None:
        one.trigger("now")

    ended = start_thread(wait)
    task = asyncio.create_task(trigger())
    async with asyncio.timeout(50):
        assert await ended is one.cause, "the thread slept on"
    await task


@fault
def only_one_waiter_is_woken(patch: pytest.MonkeyPatch) -> None:
    def wake_one(loop: Any, group: Any) -> None:
        for future in list(group)[:1]:
            loop.call_soon_threadsafe(interrupt._release, future)

    patch.setattr(interrupt, "wake_few", wake_one)
    patch.setattr(interrupt_dispatch, "_wake", lambda futures: [f.set_result(None) for f in list(futures)[:1]])


@fault
def a_look_and_a_park_are_two_steps(patch: pytest.MonkeyPatch) -> None:
    async def wait(self: Interrupt) -> Cause:
        if not self._latch:
            await asyncio.sleep(0)
            _, future = self._enter(asyncio.get_running_loop())
            await future
        return self._latch["cause"][0]

    patch.setattr(Interrupt, "wait", wait)


@fault
def a_thread_enters_before_it_looks_and_not_after(patch: pytest.MonkeyPatch) -> None:
    def wait_blocking(self: Interrupt, timeout_s: float | None = None) -> Cause | None:
        if not self._latch:
            gate = vars(interrupt)["allocate_lock"]()  # what the explorer put there
            gate.acquire()
            self._gates[gate] = gate
            gate.acquire(timeout=-1 if timeout_s is None else timeout_s)
            self._gates.pop(gate, None)
        return self.cause

    patch.setattr(Interrupt, "wait_blocking", wait_blocking)


@fault
def the_last_cause_wins(patch: pytest.MonkeyPatch) -> None:
    def trigger(self: Interrupt, reason: str = "", **_: Any) -> bool:
        cause = Cause(kind="user", reason=reason)
        self._latch["cause"] = (cause,)
        self._spread(cause)
        return True

    patch.setattr(Interrupt, "trigger", trigger)


@fault
def callbacks_that_come_late_never_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Interrupt, "on_trigger", _register_only)


def _register_only(self: Interrupt, fn: Any, *, loop: Any = None) -> Any:
    registration = interrupt_dispatch.Registration(self, fn, loop or asyncio.get_running_loop())
    self.callbacks[registration] = None
    return registration


MODELS = (
    Model(
        item=ITEM,
        name="waiters, sleepers and late ones in tasks",
        promise="P1: one trigger reaches every waiter, also those that come late",
        scenario=tasks_wait,
        faults=(only_one_waiter_is_woken, a_look_and_a_park_are_two_steps),
        ends=11_000,
    ),
    Model(
        item=ITEM,
        name="two that trigger",
        promise="P1: exactly one caller is first, and the cause never changes",
        scenario=two_trigger,
        faults=(the_last_cause_wins,),
        ends=300,
    ),
    Model(
        item=ITEM,
        name="callbacks, and a waiter that is cancelled",
        promise="P1: a callback runs once unless it was closed; P8: nothing is left",
        scenario=callbacks_and_cancels,
        faults=(callbacks_that_come_late_never_run,),
        ends=10_000,
    ),
    Model(
        item=ITEM,
        name="a thread with a time limit",
        promise="P1: nothing is lost between check and park",
        scenario=a_thread_waits,
        faults=(a_thread_enters_before_it_looks_and_not_after,),
        ends=100,
    ),
    Model(
        item=ITEM,
        name="threads and a task, triggered from a thread",
        promise="P1: one trigger reaches every waiter, in threads and on loops",
        scenario=threads_wait,
        faults=(a_thread_enters_before_it_looks_and_not_after,),
    ),
)
