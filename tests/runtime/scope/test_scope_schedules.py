"""What a scope promises, under every order in which its tasks may run; and each of these tests sees its fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from holdfast.errors import Interrupted, ScopeClosed
from holdfast.runtime.adoption.tasks import TaskAdopter
from holdfast.runtime.interrupt.interrupt import current_interrupt
from holdfast.runtime.scope import cancel_claim
from holdfast.runtime.scope.cancel_claim import BodyClaim, CancelClaim, current_claim, detached
from holdfast.runtime.scope.scope import Scope, current_scope
from holdfast.runtime.scope.state import ScopeState
from holdfast.runtime.scope.stop import Stopping
from holdfast.runtime.scope.task_handle import TaskHandle
from holdfast.testing import ScheduleFailure, explore

Scenario = Callable[[], Coroutine[Any, Any, None]]
Fault = Callable[[pytest.MonkeyPatch], None]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def late_spawns() -> None:
    """What was accepted while a stop began is gone when the stop has answered, and the rest was refused."""
    scope = Scope("run", parent=None).open()
    alive: set[int] = set()

    async def work(number: int) -> None:
        alive.add(number)
        try:
            await asyncio.sleep(1000)
        finally:
            alive.discard(number)

    accepted = []

    async def spawner(start: int) -> None:
        for number in range(start, start + 4):
            try:
                accepted.append(scope.spawn(work(number)))
            except ScopeClosed:
                return
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(spawner(0))
        group.create_task(spawner(10))
        receipt = await scope.stop("enough")
        assert not alive
        assert all(handle.done() for handle in accepted)
    assert not alive
    assert scope.members() == ()
    assert receipt.outcome == "gone"


def no_gate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScopeState, "check_open", lambda self: None)
    patch.setattr(ScopeState, "admits", lambda self, member: True)
    patch.setattr(ScopeState, "ask_late", lambda self, member: None)


def closes_early(patch: pytest.MonkeyPatch) -> None:
    def shut(self: ScopeState, *, by_force: bool = False) -> bool:
        self.phase = "closed"
        return True

    patch.setattr(ScopeState, "shut", shut)


async def spawns_of_members() -> None:
    """A member that spawns while its scope is stopped leaves nothing behind."""
    scope = Scope("run", parent=None).open()
    alive = [0]

    async def leaf() -> None:
        alive[0] += 1
        try:
            await asyncio.sleep(1000)
        finally:
            alive[0] -= 1

    async def branch() -> None:
        alive[0] += 1
        try:
            for _ in range(3):
                scope.spawn(leaf())
                await asyncio.sleep(0)
        finally:
            alive[0] -= 1

    scope.spawn(branch())
    scope.spawn(branch())
    await asyncio.sleep(0)
    receipt = await scope.stop()
    assert alive == [0]
    assert scope.members() == ()
    assert receipt.abandoned == ()


async def nested_stops() -> None:
    """A parent and a child that are stopped at once both answer, and each member is counted once."""
    parent = Scope("run", parent=None).open()
    child = parent.child("step").open()
    grandchild = child.child("call").open()
    for scope in (parent, child, grandchild):
        scope.spawn(asyncio.sleep(1000))
    async with asyncio.TaskGroup() as group:
        stops = [group.create_task(scope.stop(scope.name)) for scope in (grandchild, parent, child)]
    receipts = {task.result().scope: task.result() for task in stops}
    # A child that had ended before its parent's stop began is not counted again.
    assert receipts["call"].stopped.tasks == 1
    assert 1 <= receipts["step"].stopped.tasks <= 2
    assert 1 <= receipts["run"].stopped.tasks <= 3
    assert [scope.state for scope in (parent, child, grandchild)] == ["closed"] * 3


async def stop_of_a_tree() -> None:
    """A parent's receipt counts each member of the whole tree once."""
    parent = Scope("run", parent=None).open()
    child = parent.child("step").open()
    grandchild = child.child("call").open()
    for scope in (parent, child, grandchild):
        scope.spawn(asyncio.sleep(1000))
    receipt = await parent.stop("enough")
    assert receipt.stopped.tasks == 3
    assert child.receipt is not None
    assert child.receipt.cause.kind == "parent"
    assert child.receipt.cause.parent is receipt.cause
    assert [scope.state for scope in (parent, child, grandchild)] == ["closed"] * 3


def no_bequest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stopping, "take_over", lambda self, receipt: None)


async def error_and_stop() -> None:
    """An error that meets a stop is raised or attached, never lost."""
    scope = Scope("run", parent=None)

    async def fails() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise ValueError("broken")

    async def stopper() -> None:
        await asyncio.sleep(0)
        await scope.stop("enough")

    async with asyncio.TaskGroup() as group:
        group.create_task(stopper())
        try:
            async with scope:
                handle = scope.spawn(fails())
                await asyncio.sleep(1000)
        except ValueError as error:
            assert scope.errors == [error]
        except Interrupted as interrupted:
            assert interrupted.cause.reason == "enough"
            assert interrupted.__cause__ is (scope.errors[0] if scope.errors else None)
            if not scope.errors:
                with pytest.raises(Interrupted):
                    handle.result()
    assert scope.closed


def errors_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScopeState, "fail", lambda self, error, name: self.interrupt.trigger(name))


async def deadline_and_stop() -> None:
    """The first cause wins, and everybody gets the one receipt."""
    scope = Scope("run", parent=None, deadline_s=0.01).open()
    scope.spawn(asyncio.sleep(1000))

    async def stopper() -> Any:
        await asyncio.sleep(0.01)
        return await scope.stop("enough")

    async with asyncio.TaskGroup() as group:
        one = group.create_task(stopper())
        two = group.create_task(stopper())
    assert one.result() is two.result() is scope.receipt
    assert one.result().cause is scope.interrupt.cause
    assert one.result().stopped.tasks == 1


async def swallower() -> None:
    """A member that swallows its cancellation is asked again after the grace, and named as forced."""
    scope = Scope("run", parent=None, grace_s=0.5, abandon_after_s=1.0).open()
    swallowed = [0]

    async def stubborn() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                swallowed[0] += 1

    scope.spawn(stubborn(), name="stubborn")
    scope.spawn(asyncio.sleep(1000), name="meek")
    await asyncio.sleep(0)
    receipt = await scope.stop()
    assert receipt.outcome == "gone"
    assert receipt.forced in ((), ("stubborn",))
    assert swallowed[0] in (0, 3)
    assert bool(receipt.forced) == bool(swallowed[0])


def told_once_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TaskHandle, "ask_again", lambda self: None)


async def clean_up_that_raises() -> None:
    """A member that raises while it is stopped does not change why the scope ended; its error is attached."""
    scope = Scope("run", parent=None)

    async def work() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.01)
            raise ValueError("in clean-up")

    async def stopper() -> None:
        await asyncio.sleep(0.001)
        receipt = await scope.stop("enough")
        assert receipt.stopped.tasks == 2
        assert receipt.outcome == "gone"

    async with asyncio.TaskGroup() as group:
        group.create_task(stopper())
        with pytest.raises(Interrupted) as caught:
            async with scope:
                scope.spawn(work())
                scope.spawn(work())
                await asyncio.sleep(1000)
    assert caught.value.cause.reason == "enough"
    assert isinstance(caught.value.__cause__, BaseExceptionGroup)
    assert len(scope.errors) == 2


async def slow_clean_up() -> None:
    """Clean-up of 20 ms finishes within the grace, in members and in the body, whoever stops whatever when."""
    outer = Scope("outer", parent=None)
    closed: list[str] = []

    async def connection(name: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.02)
            closed.append(name)

    async def stopper() -> None:
        await asyncio.sleep(0.001)
        await inner.stop("inner", grace_s=1)

    async def late_stopper() -> None:
        await asyncio.sleep(0.001)
        await outer.stop("outer", grace_s=1)

    async with asyncio.TaskGroup() as group:
        with pytest.raises(Interrupted):
            async with outer:
                inner = Scope("inner")
                with detached():
                    group.create_task(stopper())
                    group.create_task(late_stopper())
                outer.spawn(connection("outer member"))
                try:
                    async with inner:
                        inner.spawn(connection("inner member"))
                        await connection("body")
                finally:
                    await asyncio.sleep(0.02)
                    closed.append("outer body")
    assert sorted(closed) == ["body", "inner member", "outer body", "outer member"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.1)


def press_all(stopping: Stopping) -> None:
    for member in stopping.scope.handles():
        member.ask_again()


def told_again_in_the_grace(patch: pytest.MonkeyPatch) -> None:
    ask = Stopping.ask

    def impatient(self: Stopping) -> None:
        ask(self)
        for delay_s in (0.001, 0.003, 0.007, 0.015):
            self._loop.call_later(delay_s, press_all, self)

    patch.setattr(Stopping, "ask", impatient)


def each_scope_cancels_by_itself(patch: pytest.MonkeyPatch) -> None:
    def deliver(self: CancelClaim) -> None:
        if not self.cancels and self.live and self.task is not None and not self.task.done():
            self._cancel(self.task)

    patch.setattr(CancelClaim, "deliver", deliver)


async def foreign_cancel() -> None:
    """A cancellation by somebody else stays one when it meets ours, and what is left is exactly his."""
    scope = Scope("run", parent=None)
    seen: list[object] = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with scope:
                await asyncio.sleep(1000)
        except Interrupted:
            seen.append(("interrupted", task.cancelling()))
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            seen.append(("cancelled", task.cancelling()))
            raise

    host = asyncio.create_task(work())
    await asyncio.sleep(0)

    async def canceller() -> None:
        await asyncio.sleep(0.001)
        host.cancel()

    async def stopper() -> None:
        await asyncio.sleep(0.001)
        scope.interrupt.trigger("enough")

    async with asyncio.TaskGroup() as group:
        group.create_task(canceller())
        group.create_task(stopper())
    with pytest.raises(asyncio.CancelledError):
        await host
    assert host.cancelled()
    assert seen in ([], [("cancelled", 1)], [("interrupted", 0)])


def nothing_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    def settle(self: BodyClaim) -> bool:
        assert self.task is not None
        if self.outer is not None:
            self.outer.inner = None
        self.cancels = 0
        return self.task.cancelling() > self.cancelling_before

    patch.setattr(BodyClaim, "settle", settle)


async def balanced() -> None:
    """After an interrupt was caught, the task goes on as if it had never been cancelled."""
    task = asyncio.current_task()
    assert task is not None
    for _ in range(2):
        scope = Scope("step", parent=None)
        stopper = asyncio.create_task(scope_stop(scope))
        with pytest.raises(Interrupted):
            async with scope:
                scope.spawn(asyncio.sleep(1000))
                await asyncio.sleep(1000)
        assert task.cancelling() == 0
        async with asyncio.timeout(1):
            await asyncio.sleep(0.01)
        await stopper


async def scope_stop(scope: Scope) -> None:
    await until(lambda: scope.statistics().tasks)
    await scope.stop()


async def task_groups() -> None:
    """A task group and a timeout inside a scope inside a task group: clean-up is hit once, and nobody is confused."""
    hits: list[str] = []
    started: list[int] = []
    scope = Scope("run", parent=None)

    async def child(name: str) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            hits.append(name)
            await asyncio.sleep(0.02)
            hits.append(name)
            raise

    async def innocent() -> str:
        await asyncio.sleep(0.5)
        return "unharmed"

    async with asyncio.TaskGroup() as outer:
        bystander = outer.create_task(innocent())
        outer.create_task(scope_stop_when(scope, lambda: scope.state == "open" and started))
        with pytest.raises(Interrupted):
            async with scope:
                async with asyncio.timeout(100), asyncio.TaskGroup() as inner:
                    inner.create_task(child("a"))
                    inner.create_task(child("b"))
                    await asyncio.sleep(0.01)
                    started.append(1)
                    await child("c")
    assert sorted(hits) == ["a", "a", "b", "b", "c", "c"]
    assert bystander.result() == "unharmed"


async def scope_stop_when(scope: Scope, condition: Callable[[], object]) -> None:
    await until(condition)
    await scope.stop()


async def adopted_groups() -> None:
    """Task groups of foreign code, each with clean-up of its own, are cancelled by their owner, and so only once."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(cast(Any, TaskAdopter(loop.get_task_factory())))
    begun: list[int] = []
    hits: list[int] = []
    clean: list[int] = []

    async def nested(depth: int) -> None:
        async with asyncio.TaskGroup() as group:
            if depth:
                group.create_task(nested(depth - 1))
            begun.append(depth)
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                hits.append(depth)
                await asyncio.sleep(0.01)
                clean.append(depth)
                raise

    async def orphan() -> None:
        begun.append(9)
        await asyncio.sleep(1000)

    async def library() -> None:
        kept.append(asyncio.ensure_future(orphan()))
        await nested(2)

    kept: list[asyncio.Future[None]] = []
    scope = Scope("run", parent=None).open()
    scope.spawn(library())
    await until(lambda: len(begun) == 4)
    receipt = await scope.stop("enough", grace_s=1)
    assert receipt.outcome == "gone"
    assert receipt.forced == ()
    assert sorted(hits) == sorted(clean) == [0, 1, 2]
    assert receipt.stopped.tasks == 4
    assert kept[0].cancelled()


def adopted_are_told_at_once(patch: pytest.MonkeyPatch) -> None:
    def follow_all(self: Stopping, starter: object) -> None:
        self._ask_rest()

    patch.setattr(Stopping, "_follow", follow_all)


async def adopted_clean_up() -> None:
    """What clean-up of foreign code starts during the grace may finish."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(cast(Any, TaskAdopter(loop.get_task_factory())))
    notes: list[str] = []

    async def flush(name: str) -> None:
        await asyncio.sleep(0.01)
        notes.append(name)

    begun: list[int] = []

    async def library() -> None:
        begun.append(1)
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.gather(flush("a"), flush("b"))
            await asyncio.wait_for(flush("c"), 1)

    scope = Scope("run", parent=None).open()
    scope.spawn(library())
    await until(lambda: begun)
    receipt = await scope.stop("enough", grace_s=1)
    assert sorted(notes) == ["a", "b", "c"]
    assert receipt.outcome == "gone"
    assert receipt.forced == ()


def clean_up_is_told_too(patch: pytest.MonkeyPatch) -> None:
    attach = TaskHandle.attach

    def told(self: TaskHandle[Any], task: asyncio.Task[Any], guarded: Any = None) -> None:
        attach(self, task, guarded)
        if self.due:
            self.ask()

    patch.setattr(TaskHandle, "attach", told)


async def shielded_commit() -> None:
    """What runs in a shield is not hit; the delivery comes after it, once, whoever stops when."""
    scope = Scope("run", parent=None).open()
    notes: list[str] = []

    async def commit() -> None:
        try:
            async with scope.interrupt.shield(timeout_s=1):
                await asyncio.sleep(0.01)
                await asyncio.sleep(0.01)
                notes.append("committed")
            await asyncio.sleep(1000)
        finally:
            notes.append("told")
            await asyncio.sleep(0.01)
            notes.append("clean")

    handle = scope.spawn(commit())
    await asyncio.sleep(0)
    receipt = await scope.stop("enough", grace_s=1)
    assert receipt.forced == ()
    assert notes in ([], ["committed", "told", "clean"])
    assert handle.done()


def shields_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cancel_claim, "shielded_by", lambda task, context: None)


async def close_when_done() -> None:
    """Whoever asks to be told when a scope is closed is told once, with its last values, however it ends."""
    scope = Scope("run", parent=None).open()
    told: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(0.001)

    scope.spawn(work())
    scope.close_when_done(lambda: told.append(scope.closed))

    async def stopper() -> None:
        await asyncio.sleep(0.001)
        await scope.stop("enough")

    async with asyncio.TaskGroup() as group:
        group.create_task(stopper())
    await until(lambda: told)
    await asyncio.sleep(0.01)
    assert told == [True]


async def no_context_leaks() -> None:
    """Scope and interrupt are current inside, and nowhere else."""
    assert current_scope() is None
    seen: list[Scope | None] = []

    async def look() -> None:
        await asyncio.sleep(0)
        seen.append(current_scope())

    async def sibling() -> None:
        for _ in range(3):
            assert current_scope() is None
            assert current_interrupt() is None
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(sibling())
        async with Scope("a") as scope:
            scope.spawn(look())
            async with Scope("b") as inner:
                assert inner.parent is scope
                assert current_scope() is inner
                assert current_interrupt() is inner.interrupt
            assert current_scope() is scope
            assert current_interrupt() is scope.interrupt
        assert current_scope() is None
        assert current_interrupt() is None
    assert seen == [scope]


def stays_current(patch: pytest.MonkeyPatch) -> None:
    enter = Scope.__aenter__

    async def leaky(self: Scope) -> Scope:
        await enter(self)
        current_claim.enter(self.core.body)
        self._entered = (current_claim.enter(self.core.body), self._entered[1])
        return self

    patch.setattr(Scope, "__aenter__", leaky)


async def stop_from_inside() -> None:
    """A member that stops its own scope is interrupted there; the receipt is found on the scope."""
    scope = Scope("run", parent=None).open()
    told: list[str] = []

    async def inside() -> None:
        try:
            await scope.stop("from inside")
        except Interrupted:
            told.append("interrupted")
            raise

    scope.spawn(asyncio.sleep(1000))
    handle = scope.spawn(inside())
    with pytest.raises(Interrupted):
        await scope.join()
    with pytest.raises(Interrupted) as caught:
        handle.result()
    assert caught.value.cause.reason == "from inside"
    assert told == ["interrupted"]
    assert scope.receipt is not None
    assert scope.receipt.outcome == "gone"
    assert await scope.stop() is scope.receipt


def waits_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scope, "is_around_caller", lambda self: False)


ALL: list[tuple[Scenario, Fault | None]] = [
    (late_spawns, no_gate),
    (spawns_of_members, closes_early),
    (nested_stops, closes_early),
    (stop_of_a_tree, no_bequest),
    (error_and_stop, errors_lost),
    (deadline_and_stop, None),
    (swallower, told_once_only),
    (clean_up_that_raises, errors_lost),
    (slow_clean_up, told_again_in_the_grace),
    (slow_clean_up, each_scope_cancels_by_itself),
    (foreign_cancel, nothing_is_taken_back),
    (balanced, nothing_is_taken_back),
    (task_groups, None),
    (adopted_groups, adopted_are_told_at_once),
    (adopted_clean_up, clean_up_is_told_too),
    (shielded_commit, shields_are_ignored),
    (close_when_done, None),
    (no_context_leaks, stays_current),
    (stop_from_inside, waits_for_itself),
]
SCENARIOS = list(dict.fromkeys(scenario for scenario, _ in ALL))
FAULTS = [(scenario, fault) for scenario, fault in ALL if fault is not None]


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_holds_in_every_order(scenario: Scenario, tasks: Any) -> None:
    explore(scenario, schedules=200, tasks=tasks)
    explore(scenario, schedules=100, chooser="pct", tasks=tasks)


@pytest.mark.parametrize(("scenario", "fault"), FAULTS, ids=lambda value: value.__name__)
def test_sees_the_fault(scenario: Scenario, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(ScheduleFailure):
        explore(scenario, schedules=300)
