"""Scopes: what is started while they stop, from threads, in nested scopes and by foreign code is stopped or refused."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from holdfast.errors import Interrupted, ScopeClosed
from holdfast.runtime import Scope, ThreadPool, check_interrupt, current_interrupt
from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.scope.cancel_claim import inside
from holdfast.runtime.scope.scope import _LAUNCHERS
from holdfast.runtime.scope.state import ScopeState
from holdfast.runtime.scope.thread_handle import ThreadHandle
from holdfast.testing import start_thread
from tests.explored.model import Model, fault

ITEM = "scope"


class Ledger:
    """Who began and who ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.refused = 0

    async def member(self) -> None:
        """Runs until it is stopped."""
        self.begun += 1
        try:
            await asyncio.sleep(1e6)
        finally:
            self.ended += 1

    def thread(self) -> None:
        """The same in a thread."""
        self.begun += 1
        try:
            interrupt = current_interrupt()
            assert interrupt is not None
            interrupt.sleep_blocking(1e6)
        finally:
            self.ended += 1

    def spawn(self, scope: Scope, **how: Any) -> None:
        """Start one, unless it is too late."""
        try:
            scope.spawn(self.thread if how else self.member, **how)
        except ScopeClosed:
            self.refused += 1

    def check(self, scope: Scope) -> None:
        """Whoever began has ended by the time the scope is closed, and the receipt says so."""
        assert scope.closed
        assert self.begun == self.ended, "something outlived its scope"
        assert not scope.members()
        assert scope.receipt is None or scope.receipt.outcome == "gone", scope.receipt


async def spawn_during_stop() -> None:
    """Two tasks start members while a third stops the scope."""
    ledger = Ledger()
    scope = Scope("run", parent=None).open()

    async def spawn() -> None:
        ledger.spawn(scope)
        await asyncio.sleep(0)
        ledger.spawn(scope)

    async def stop() -> None:
        receipt = await scope.stop("enough")
        ledger.check(scope)
        assert receipt.outcome == "gone"

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for work in (spawn, stop):
            group.create_task(work())
    ledger.check(scope)


async def spawn_from_threads() -> None:
    """Two threads start members, on the loop and in threads, while the scope is stopped."""
    ledger = Ledger()
    scope = Scope("run", parent=None, threads=ThreadPool(max_threads=2)).open()

    async def stop() -> None:
        await scope.stop("enough")

    feeders = [start_thread(ledger.spawn, scope, name="feeder"), start_thread(_spawn_on_thread, ledger, scope)]
    task = asyncio.create_task(stop())
    async with asyncio.timeout(60):
        for one in (*feeders, task):
            await one
    ledger.check(scope)


def _spawn_on_thread(ledger: Ledger, scope: Scope) -> None:
    ledger.spawn(scope, on="thread")


async def calls_that_wait_for_a_thread() -> None:
    """Two calls, one thread: the scope is stopped while one runs and one waits in line."""
    ledger = Ledger()
    pool = ThreadPool(max_threads=1)
    scope = Scope("run", parent=None, threads=pool).open()
    handles = [scope.spawn(ledger.thread, on="thread") for _ in range(2)]
    async with asyncio.timeout(60):
        await scope.stop("enough")
    ledger.check(scope)
    assert all(handle.done() for handle in handles), "a call hangs"
    assert pool.statistics().running == pool.statistics().queued == 0


async def threads_end_by_themselves() -> None:
    """Calls on threads return and raise; the scope waits for them and tells the error."""

    def returns() -> int:
        check_interrupt()
        return 1

    def raises() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        async with asyncio.timeout(60), Scope("run", threads=ThreadPool(max_threads=2)) as scope:
            first = scope.spawn(returns, on="thread")
            second = scope.spawn(raises, on="thread")
    assert first.done()
    assert second.done()
    with contextlib.suppress(Interrupted):
        assert first.result() == 1


async def nested() -> None:
    """A parent is stopped while its child ends by itself and a member of the child raises."""
    ledger = Ledger()
    parent = Scope("run", parent=None).open()

    async def inside() -> None:
        async with parent.child("step") as child:
            ledger.spawn(child)
            child.spawn(fails())

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    parent.spawn(inside())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        with contextlib.suppress(ValueError):
            await parent.stop("enough")
    ledger.check(parent)


async def adoption() -> None:
    """Foreign code starts plain tasks inside a scope, and in their clean-up, while the scope is stopped."""
    ledger = Ledger()
    loop = asyncio.get_running_loop()
    with install(loop):
        scope = Scope("run", parent=None).open()

        async def foreign() -> None:
            task = loop.create_task(ledger.member())
            try:
                await asyncio.sleep(1e6)
            finally:
                await loop.create_task(clean_up())
                await asyncio.wait([task])

        async def clean_up() -> None:
            ledger.begun += 1
            await asyncio.sleep(0)
            ledger.ended += 1

        with contextlib.suppress(ScopeClosed):
            scope.spawn(foreign())
        await asyncio.sleep(0)
        ledger.spawn(scope)
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await scope.stop("enough")
        ledger.check(scope)


async def adopted_calls() -> None:
    """Foreign code calls `asyncio.to_thread` inside a scope that is stopped."""
    ledger = Ledger()
    loop = asyncio.get_running_loop()
    with install(loop, threads=ThreadPool(max_threads=1)):
        scope = Scope("run", parent=None).open()

        async def foreign() -> None:
            with contextlib.suppress(ScopeClosed):
                await asyncio.to_thread(ledger.thread)

        scope.spawn(foreign())
        scope.spawn(foreign())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await scope.stop("enough")
        ledger.check(scope)


@fault
def a_member_is_entered_without_a_look_at_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScopeState, "check_open", lambda self: None)
    patch.setattr(ScopeState, "admits", lambda self, member: True)


@fault
def a_scope_closes_with_members_in_it(patch: pytest.MonkeyPatch) -> None:
    def shut(self: ScopeState, *, by_force: bool = False) -> bool:
        self.phase = "closed"
        return True

    patch.setattr(ScopeState, "shut", shut)


@fault
def a_thread_is_started_before_it_is_entered(patch: pytest.MonkeyPatch) -> None:
    def spawn_thread(self: Scope, fn: Any, values: Any, name: str, output: object) -> ThreadHandle[Any]:
        self.core.check_open()
        handle: ThreadHandle[Any] = ThreadHandle(self.core, name, scope=self)
        handle.started_in = inside(handle, self.interrupt)
        handle.start(fn, values, {})
        self.core.members[handle] = None
        return handle

    patch.setitem(_LAUNCHERS, "thread", spawn_thread)


@fault
def a_call_that_was_taken_back_runs_all_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("holdfast.runtime.thread_pool.ThreadCall.cancel", lambda self: self.thread is None)


@fault
def the_gate_is_no_lock(patch: pytest.MonkeyPatch) -> None:
    """Look at the state, let others go, and enter: as if nobody held the gate."""

    def enter(self: ScopeState, member: Any) -> None:
        self.check_open()
        with self.gate:  # others may go before
            self.members[member] = None

    patch.setattr(ScopeState, "enter", enter)


@fault
def adopted_tasks_are_nobodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScopeState, "adopt", lambda self, member: True)


@fault
def errors_of_members_are_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScopeState, "fail", lambda self, error, name: self.interrupt.trigger(name, kind="stop"))


MODELS = (
    Model(
        item=ITEM,
        name="spawn during stop",
        promise="P3: what is started during a stop is refused or stopped; P8: nothing is left",
        scenario=spawn_during_stop,
        faults=(a_member_is_entered_without_a_look_at_the_state, a_scope_closes_with_members_in_it),
        ends=3_000,
    ),
    Model(
        item=ITEM,
        name="spawn from threads during stop",
        promise="P3: the same from foreign threads, also of threads",
        scenario=spawn_from_threads,
        faults=(the_gate_is_no_lock, a_thread_is_started_before_it_is_entered),
        share=0.5,
    ),
    Model(
        item=ITEM,
        name="calls that run and that wait for a thread",
        promise="P3: a call that waits for a thread is taken back, one that runs is asked",
        scenario=calls_that_wait_for_a_thread,
        faults=(a_call_that_was_taken_back_runs_all_the_same,),
    ),
    Model(
        item=ITEM,
        name="calls on threads that return and raise",
        promise="P3: a scope waits for its threads; errors reach the owner",
        scenario=threads_end_by_themselves,
        faults=(errors_of_members_are_lost,),
    ),
    Model(
        item=ITEM,
        name="nested: a child that ends and one that fails",
        promise="P3: a parent is gone only after its children; P10: no deadlock",
        scenario=nested,
        faults=(a_scope_closes_with_members_in_it,),
        ends=12_000,
    ),
    Model(
        item=ITEM,
        name="adoption of plain tasks and their clean-up",
        promise="P3, P8: what foreign code starts is stopped with the scope",
        scenario=adoption,
        faults=(adopted_tasks_are_nobodys,),
        ends=20_000,
    ),
    Model(
        item=ITEM,
        name="adoption of calls to threads",
        promise="P3, P8: the same for asyncio.to_thread",
        scenario=adopted_calls,
        faults=(adopted_tasks_are_nobodys,),
    ),
)
