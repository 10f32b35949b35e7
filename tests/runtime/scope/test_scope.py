"""What a scope does, on the loops it runs on, with threads, generators, task groups and anyio in and around it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import pytest
import uvloop

from holdfast.errors import Interrupted, InvalidRequest, ScopeClosed
from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt.interrupt import check_interrupt, current_interrupt, is_interrupted
from holdfast.runtime.scope import stop as stopping
from holdfast.runtime.scope.cancel_claim import detached
from holdfast.runtime.scope.process_handle import STRANGER
from holdfast.runtime.scope.scope import Scope, current_scope
from holdfast.runtime.thread_pool import ThreadPool
from holdfast.testing import run_virtual

Main = Callable[[], Coroutine[Any, Any, None]]


def _asyncio(main: Main) -> None:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(_bounded(main))


def _virtually(main: Main) -> None:
    run_virtual(main())


def _uvloop(main: Main) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_bounded(main))


async def _bounded(main: Main) -> None:
    async with asyncio.timeout(20):
        await main()


@pytest.fixture(params=[_asyncio, _uvloop], ids=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    run: Callable[[Main], None] = request.param
    return run


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


# Ending


def test_leaving_waits_for_members_and_closes(on_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        done: list[str] = []

        async def work(name: str) -> str:
            await asyncio.sleep(0.001)
            done.append(name)
            return name

        async with Scope("run") as scope:
            first = scope.spawn(work, "function")
            second = scope.spawn(work("coroutine"), name="second")
            third = scope.spawn(done.append, "thread", on="thread")
            assert {member.name for member in scope.members()} >= {"second"}
        assert sorted(done) == ["coroutine", "function", "thread"]
        assert (await first, await second) == ("function", "coroutine")
        assert third.done()
        assert scope.closed
        assert scope.receipt is None
        assert not scope.interrupt.triggered
        with pytest.raises(ScopeClosed, match="is closed and starts no new work"):
            scope.spawn(work("late"))

    on_loop(main)


def test_the_first_error_interrupts_the_rest_and_is_raised_alone() -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ValueError("broken")

        scope = Scope("run")
        with pytest.raises(ValueError, match="broken"):
            async with scope:
                other = scope.spawn(forever())
                scope.spawn(fails(), name="tool")
                await forever()
        assert scope.interrupt.cause is not None
        assert scope.interrupt.cause.reason == "'tool' failed: ValueError: broken"
        with pytest.raises(Interrupted):
            await other
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run_virtual(main())


def test_several_errors_are_raised_as_a_group_and_the_body_s_is_first() -> None:
    async def main() -> None:
        async def fails() -> None:
            try:
                await forever()
            finally:
                raise KeyError("member")

        scope = Scope("run")
        with pytest.raises(ExceptionGroup) as caught:
            async with scope:
                scope.spawn(fails())
                await asyncio.sleep(0)
                raise ValueError("body")
        assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]

    run_virtual(main())


def test_an_interrupted_or_cancelled_member_is_no_error_of_its_scope() -> None:
    async def main() -> None:
        async with Scope("run") as scope:
            one = scope.spawn(forever(), name="one")
            two = scope.spawn(forever(), name="two")
            await asyncio.sleep(0)
            one.interrupt.trigger("not needed")
            assert two.task is not None
            two.task.cancel()
            with pytest.raises(Interrupted) as caught:
                await one
            assert caught.value.cause.reason == "not needed"
            with pytest.raises(Interrupted, match="its task was cancelled"):
                await two
        assert not scope.interrupt.triggered

    run_virtual(main())


def test_cancelling_who_awaits_a_handle_leaves_the_member_alone() -> None:
    async def main() -> None:
        async with Scope("run") as scope:
            handle = scope.spawn(asyncio.sleep(1, "done"))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await handle
            assert await handle == "done"

    run_virtual(main())


def test_a_member_cancelled_before_its_first_step_never_runs_and_nothing_warns() -> None:
    async def main() -> None:
        ran: list[int] = []

        async def work() -> None:
            ran.append(1)

        scope = Scope("run", parent=None).open()
        handle = scope.spawn(work())
        receipt = await scope.stop("at once")
        assert (receipt.outcome, receipt.stopped.tasks) == ("gone", 1)
        assert not ran
        with pytest.raises(Interrupted, match="at once"):
            handle.result()
        interrupted = Scope("other", parent=None).open()
        interrupted.interrupt.trigger("before")
        born = interrupted.spawn(work())
        assert born.done()
        await interrupted.stop()
        assert not ran
        gc.collect()

    run_virtual(main())


def test_a_deadline_interrupts_the_body_and_the_members() -> None:
    async def main() -> None:
        began = asyncio.get_running_loop().time()
        scope = Scope("run", deadline_s=30)
        with pytest.raises(Interrupted) as caught:
            async with scope:
                scope.spawn(forever())
                await forever()
        assert caught.value.cause.kind == "deadline"
        assert asyncio.get_running_loop().time() - began == pytest.approx(30)

    run_virtual(main())


def test_a_held_deadline_does_not_run_and_goes_on_with_what_was_left() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        scope = Scope("run", deadline_s=30)
        async with scope:
            await asyncio.sleep(10)
            first, second = scope.hold_deadline(), scope.hold_deadline()
            with first:
                await asyncio.sleep(500)
                second.__enter__()
                await asyncio.sleep(500)
            await asyncio.sleep(500)  # they overlap: it is held until the last one ends
            assert not scope.interrupt.triggered
            second.__exit__(None, None, None)
            began = loop.time()
            await scope.interrupt.wait()
            assert loop.time() - began == pytest.approx(20)
            with pytest.raises(asyncio.CancelledError):
                await forever()
            with scope.hold_deadline():  # nothing is left to hold
                pass

    with pytest.raises(Interrupted) as caught:
        run_virtual(main())
    assert caught.value.cause.kind == "deadline"


def test_a_deadline_that_is_held_when_its_scope_ends_never_comes() -> None:
    async def main() -> None:
        scope = Scope("run", deadline_s=30).open()
        with scope.hold_deadline():
            await scope.join()
        await asyncio.sleep(100)
        assert not scope.interrupt.triggered
        async with Scope("endless") as endless:
            with endless.hold_deadline():
                await asyncio.sleep(1)

    run_virtual(main())


def test_a_deadline_is_held_on_the_loop_of_its_scope_only() -> None:
    async def main() -> None:
        async with Scope("run", deadline_s=30) as scope:
            with pytest.raises(RuntimeError, match="outside the loop of scope"):
                await asyncio.to_thread(scope.hold_deadline().__enter__)

    asyncio.run(main())


def test_a_deadline_that_is_not_needed_any_more_leaves_no_timer() -> None:
    async def main() -> None:
        async with Scope("run", deadline_s=1) as scope:
            pass
        await asyncio.sleep(2)
        assert not scope.interrupt.triggered

    run_virtual(main())


# Stopping


def test_a_stop_ends_in_time_whatever_members_do_and_names_what_is_left(on_loop: Callable[[Main], None]) -> None:
    release = threading.Event()

    async def main() -> None:
        async def stubborn() -> None:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)

        pool = ThreadPool(name="test")
        scope = Scope("run", parent=None, threads=pool, owner="alice").open()
        task = scope.spawn(stubborn(), name="stubborn")
        thread = scope.spawn(release.wait, on="thread", name="blocked")
        try:
            while scope.members()[1].thread is None:
                await asyncio.sleep(0)
            async with asyncio.timeout(10):
                receipt = await scope.stop("enough", grace_s=0.01, abandon_after_s=0.05)
            assert receipt.outcome == "quarantined"
            assert scope.quarantined
            assert {left.name for left in receipt.abandoned} == {"stubborn", "blocked"}
            stacks = {left.name: left.stack for left in receipt.abandoned}
            assert "in stubborn" in stacks["stubborn"][0]
            assert any(" in wait" in line for line in stacks["blocked"])
            for handle in (task, thread):
                with pytest.raises(Interrupted):
                    await handle
            assert pool.abandoned("alice") == 1
            assert scope.members() == ()
        finally:
            release.set()
        while pool.abandoned():
            await asyncio.sleep(0.001)
        while any(other.get_coro().__name__ == "stubborn" for other in asyncio.all_tasks()):  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        for handle in (task, thread):
            with pytest.raises(Interrupted):  # what was abandoned returned late, and that does not count
                handle.result()

    on_loop(main)


def test_a_swallower_is_pressed_with_back_off_and_not_in_a_spin() -> None:
    async def main() -> None:
        hits: list[float] = []
        loop = asyncio.get_running_loop()
        scope = Scope("run", parent=None, grace_s=1.0, abandon_after_s=2.0).open()
        over: list[bool] = []
        held: list[object] = []  # an abandoned task that nothing refers to may be collected

        async def stubborn() -> None:
            held.append(asyncio.current_task())
            while not over:
                try:
                    await forever()
                except asyncio.CancelledError:
                    hits.append(loop.time())

        scope.spawn(stubborn())
        await asyncio.sleep(0)
        began = loop.time()
        receipt = await scope.stop()
        assert loop.time() - began == pytest.approx(3.0)
        assert [left.name.rpartition(".")[2] for left in receipt.abandoned] == ["stubborn"]
        gaps = [after - before for before, after in itertools.pairwise(hits)]
        assert gaps[0] == pytest.approx(1.001, abs=0.002)
        assert max(gaps[1:]) == pytest.approx(0.1, abs=0.001)
        assert 10 < len(hits) < 40
        over.append(True)
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.sleep(0)

    run_virtual(main())


async def _stop_awaited(scope: Scope) -> None:
    await scope.stop("enough", grace_s=20)


async def _stop_requested(scope: Scope) -> None:
    scope.request_stop(Cause(kind="stop"), grace_s=20)
    while not scope.closed:
        await asyncio.sleep(0.01)


async def _stop_from_a_thread(scope: Scope) -> None:
    """The loop hears of the interrupt before it hears of the stop."""
    await asyncio.to_thread(asyncio.run, scope.stop("enough", grace_s=20))


Stop = Callable[[Scope], Coroutine[Any, Any, None]]
ways_to_stop = pytest.mark.parametrize(
    ("stop", "run"),
    [
        (_stop_awaited, _virtually),
        (_stop_requested, _virtually),
        (_stop_from_a_thread, _asyncio),  # a thread that waits for the loop needs real time
    ],
    ids=["awaited", "requested", "from a thread"],
)


async def cleaned_up_in(clean_up_s: float, ends: list[str], name: str) -> None:
    try:
        await forever()
    finally:
        await asyncio.sleep(clean_up_s)
        ends.append(name)


@ways_to_stop
def test_the_grace_given_to_a_stop_holds_though_it_is_longer_than_the_scopes_own(
    stop: Stop, run: Callable[[Main], None]
) -> None:
    async def main() -> None:
        ends: list[str] = []
        scope = Scope("run", parent=None, grace_s=0.05, abandon_after_s=0.05).open()
        call = scope.child("call").open()
        part = call.child("part").open()
        for owner in (scope, call, part):
            owner.spawn(cleaned_up_in(0.3, ends, owner.name))
        await asyncio.sleep(0)
        await stop(scope)
        assert sorted(ends) == ["call", "part", "run"]
        for owner in (scope, call, part):
            assert owner.receipt is not None
            assert (owner.receipt.outcome, owner.receipt.forced) == ("gone", ())

    run(main)


@ways_to_stop
def test_a_scope_inside_gets_no_more_grace_than_it_was_created_with(stop: Stop, run: Callable[[Main], None]) -> None:
    async def main() -> None:
        ends: list[str] = []
        scope = Scope("run", parent=None, grace_s=0.05).open()
        brief = scope.child("brief", grace_s=0.01).open()
        inside = brief.child("inside").open()
        brief.spawn(cleaned_up_in(600, ends, "brief"))
        inside.spawn(cleaned_up_in(600, ends, "inside"))
        scope.spawn(cleaned_up_in(0.3, ends, "run"))
        await asyncio.sleep(0)
        await stop(scope)
        assert ends == ["run"]
        for owner in (brief, inside):
            assert owner.receipt is not None
            assert owner.receipt.forced

    run(main)


def test_the_grace_given_to_a_stop_holds_in_a_scope_that_a_task_has_entered() -> None:
    async def main() -> None:
        ends: list[str] = []
        opened: list[Scope] = []

        async def work() -> None:
            async with Scope("run", parent=None, grace_s=1, abandon_after_s=1) as scope:
                opened.append(scope)
                async with scope.child("call") as call:
                    call.spawn(cleaned_up_in(5, ends, "member"))
                    await cleaned_up_in(3, ends, "body")

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.1)
        receipt = await opened[0].stop("enough", grace_s=20)
        assert ends == ["body", "member"]
        assert (receipt.outcome, receipt.forced) == ("gone", ())
        with pytest.raises(Interrupted):
            await task

    run_virtual(main())


def test_a_second_stop_never_lengthens_the_first() -> None:
    async def main(first_s: float | None, *later_s: float | None) -> float:
        scope = Scope("run", parent=None, grace_s=2, abandon_after_s=1).open()
        scope.child("call").open().spawn(cleaned_up_in(100, [], "stubborn"))
        await asyncio.sleep(0)
        stops = [asyncio.ensure_future(scope.stop("first", grace_s=first_s))]
        for grace_s in later_s:
            await asyncio.sleep(0)
            stops.append(asyncio.ensure_future(scope.stop("later", grace_s=grace_s)))
        receipts = await asyncio.gather(*stops)
        assert all(receipt is receipts[0] for receipt in receipts)
        return receipts[0].elapsed_s

    assert run_virtual(main(None, 20, 30)) == pytest.approx(2, abs=0.2)
    assert run_virtual(main(4, 20)) == pytest.approx(4, abs=0.2)
    assert run_virtual(main(20, 4, 30)) == pytest.approx(4, abs=0.2)
    assert run_virtual(main(4, None)) == pytest.approx(4, abs=0.2)


@pytest.mark.parametrize("times", [{"grace_s": math.nan}, {"grace_s": math.inf}, {"abandon_after_s": -1.0}])
def test_a_stop_with_an_invalid_time_is_refused_and_stops_nothing(times: dict[str, Any]) -> None:
    async def main() -> None:
        scope = Scope("run", parent=None).open()
        with pytest.raises(InvalidRequest, match="number of seconds"):
            await scope.stop(**times)
        with pytest.raises(InvalidRequest, match="number of seconds"):
            scope.request_stop(Cause(kind="stop"), **times)
        assert not scope.interrupt.triggered
        await scope.stop()

    run_virtual(main())


def test_a_shorter_stop_shortens_the_one_under_way() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        scope = Scope("run", parent=None).open()

        async def slow() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(100)

        scope.spawn(slow())
        await asyncio.sleep(0)
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            gentle = group.create_task(scope.stop("gently", grace_s=60))
            await asyncio.sleep(1)
            hard = group.create_task(scope.stop("now", grace_s=0))
        assert gentle.result() is hard.result()
        assert hard.result().forced
        assert hard.result().cause.reason == "gently"
        assert loop.time() - began < 2

    run_virtual(main())


def test_a_receipt_says_why_a_member_was_forced() -> None:
    async def main() -> None:
        scope = Scope("run", parent=None).open()

        async def slow() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(100)

        scope.spawn(slow(), name="slow")
        scope.child("part").open().spawn(slow(), name="slow too")
        scope.spawn(forever(), name="meek")
        await asyncio.sleep(0)
        stop = asyncio.ensure_future(scope.stop("gently", grace_s=60))
        await asyncio.sleep(1.5)
        receipt = await scope.stop("now", grace_s=0.5)
        assert await stop is receipt
        assert sorted(receipt.forced) == ["slow", "slow too"]
        assert receipt.force_reasons == ("still running 2 s after the stop began",) * 2

    run_virtual(main())


def test_a_thread_that_does_not_check_its_interrupt_is_named_and_not_the_task_that_waits_for_it() -> None:
    async def main() -> None:
        begun, end = threading.Event(), threading.Event()
        scope = Scope("run", parent=None, grace_s=0.05, abandon_after_s=60).open()
        scope.add_closer(end.set)

        def deaf() -> None:
            begun.set()
            end.wait()

        thread = scope.spawn(deaf, on="thread", name="deaf")

        async def waits() -> None:
            while not thread.done():
                with contextlib.suppress(asyncio.CancelledError, Interrupted):
                    await thread

        scope.spawn(waits(), name="waits")
        await asyncio.to_thread(begun.wait)
        receipt = await scope.stop()
        assert receipt.outcome == "gone"
        assert receipt.forced == ("deaf",)
        assert receipt.force_reasons == ("did not check its interrupt for 0.05 s",)

    asyncio.run(main())


def test_a_task_that_waits_for_an_abandoned_thread_is_not_named_as_forced() -> None:
    async def main() -> None:
        begun, end = threading.Barrier(3), threading.Event()
        scope = Scope("run", parent=None, grace_s=0.02, abandon_after_s=0.02).open()
        call = scope.child("call").open()

        def stuck() -> None:
            begun.wait()
            end.wait()

        threads = [owner.spawn(stuck, on="thread", name="stuck") for owner in (scope, call)]

        async def waits() -> None:
            while not all(thread.done() for thread in threads):
                with contextlib.suppress(asyncio.CancelledError, Interrupted):
                    for thread in threads:
                        await thread

        for owner in (scope, call):
            owner.spawn(waits(), name="waits")
        await asyncio.to_thread(begun.wait)
        try:
            receipt = await scope.stop()
        finally:
            end.set()
        assert receipt.outcome == "quarantined"
        assert [left.name for left in receipt.abandoned] == ["stuck", "stuck"]
        assert receipt.forced == ()
        assert receipt.stopped.tasks == 2

    asyncio.run(main())


def test_closers_run_when_the_grace_is_over_and_not_before() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        scope = Scope("run", parent=None, grace_s=1).open()
        stream: asyncio.Future[None] = loop.create_future()
        closed: list[float] = []

        def close() -> None:
            closed.append(loop.time())
            stream.set_result(None)

        async def reader() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
            await stream

        scope.add_closer(close)
        scope.add_closer(lambda: closed.append(-1.0)).close()
        scope.spawn(reader())
        await asyncio.sleep(0)
        began = loop.time()
        receipt = await scope.stop()
        assert receipt.outcome == "gone"
        assert closed == [pytest.approx(began + 1)]
        late: list[int] = []
        scope.add_closer(lambda: late.append(1))
        assert late == [1]

    run_virtual(main())


def test_a_closer_that_raises_is_reported_and_the_others_run() -> None:
    async def main() -> None:
        reported: list[Any] = []
        closed: list[int] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        scope = Scope("run", parent=None).open()

        def broken() -> None:
            raise ValueError("cannot close")

        scope.add_closer(lambda: closed.append(1))
        scope.add_closer(broken)
        scope.add_closer(lambda: closed.append(2))
        scope.spawn(forever())
        await asyncio.sleep(0)
        await scope.stop(grace_s=0)
        assert sorted(closed) == [1, 2]
        assert [type(error) for error in reported] == [ValueError]

    _asyncio(main)


def test_clean_up_may_start_tasks_during_the_grace_but_not_members() -> None:
    async def main() -> None:
        scope = Scope("run", parent=None).open()
        notes: list[str] = []

        async def work() -> None:
            try:
                await forever()
            finally:
                with pytest.raises(ScopeClosed):
                    scope.spawn(forever())
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(0.1))
                notes.append("closed")

        scope.spawn(work())
        await asyncio.sleep(0)
        await scope.stop()
        assert notes == ["closed"]

    run_virtual(main())


def test_a_cancelled_stop_goes_on_without_its_caller() -> None:
    async def main() -> None:
        scope = Scope("run", parent=None).open()

        async def slow() -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(1)

        scope.spawn(slow())
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await scope.stop("enough")
        assert scope.state == "stopping"
        receipt = await scope.stop("again")
        assert receipt.cause.reason == "enough"
        assert receipt.outcome == "gone"

    run_virtual(main())


def test_a_stop_from_another_loop_and_a_spawn_from_another_thread_work() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_debug(True)  # refuses callbacks that other threads add
        scope = Scope("run", parent=None).open()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            started.set_result(None)
            await forever()

        def elsewhere() -> Any:
            async def stopper() -> Any:
                handle = scope.spawn(work(), name="from afar")
                while not started.done():
                    await asyncio.sleep(0.001)
                receipt = await scope.stop("from afar")
                with pytest.raises(Interrupted):
                    await handle
                return receipt

            return asyncio.run(stopper())

        with detached():
            receipt = await asyncio.to_thread(elsewhere)
        assert receipt is scope.receipt
        assert scope.receipt is not None
        assert scope.receipt.stopped.tasks == 1

    _asyncio(main)


def test_a_scope_never_opened_stops_at_once_and_refuses_members() -> None:
    async def main() -> None:
        scope = Scope("run", parent=None)
        with pytest.raises(ScopeClosed, match="is not open"):
            scope.spawn(forever())
        receipt = await scope.stop("unused")
        assert receipt.outcome == "gone"
        with pytest.raises(RuntimeError, match="already open"):
            scope.open()

    run_virtual(main())


@pytest.mark.parametrize(
    "times",
    [
        {"grace_s": math.nan},
        {"grace_s": math.inf},
        {"grace_s": -1.0},
        {"grace_s": "5"},
        {"abandon_after_s": math.nan},
        {"deadline_s": math.nan},
        {"deadline_s": "5"},
    ],
    ids=str,
)
def test_a_scope_takes_no_time_that_is_none(times: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"{next(iter(times))} is .*a number of seconds"):
        Scope("run", parent=None, **times)


def test_a_stop_after_a_scope_has_ended_by_itself_says_that_nothing_was_left() -> None:
    async def main() -> None:
        async with Scope("run") as scope:
            scope.spawn(asyncio.sleep(0))
        receipt = await scope.stop("late", kind="user")
        assert (receipt.outcome, receipt.stopped.tasks, receipt.cause.reason) == ("gone", 0, "late")
        assert await scope.stop("later") is receipt
        assert not scope.interrupt.triggered
        assert scope.ended_by == "members"

    run_virtual(main())


def test_a_scope_below_an_interrupted_one_is_not_entered() -> None:
    async def main() -> None:
        scope = Scope("run", parent=None).open()
        child = scope.child("step")
        scope.interrupt.trigger("enough")
        with pytest.raises(Interrupted):
            async with child:
                pytest.fail("its body ran")
        await scope.stop()

    run_virtual(main())


def test_a_shorter_stop_shortens_that_of_the_scopes_inside_too() -> None:
    async def cleans_up_until_pressed() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1000)

    async def main() -> None:
        scope = Scope("run", parent=None).open()
        call = scope.child("call").open()
        call.spawn(cleans_up_until_pressed())
        await asyncio.sleep(0)
        patient = asyncio.ensure_future(scope.stop("enough", grace_s=60))
        await asyncio.sleep(1)
        receipt = await scope.stop("now", grace_s=0, abandon_after_s=5)
        assert (receipt.outcome, receipt.abandoned) == ("gone", ())
        assert receipt.elapsed_s < 2
        assert await patient == receipt

    run_virtual(main())


def test_survivors_of_a_child_are_named_by_its_parent_too() -> None:
    release = threading.Event()

    async def main() -> None:
        scope = Scope("run", parent=None, threads=ThreadPool(name="test")).open()
        call = scope.child("call").open()
        call.spawn(release.wait, on="thread", name="blocked")
        while call.members()[0].thread is None:
            await asyncio.sleep(0)
        await call.stop(grace_s=0, abandon_after_s=0.01)
        await scope.join()
        assert scope.receipt is not None
        assert scope.receipt.outcome == "quarantined"
        assert [left.name for left in scope.receipt.abandoned] == ["blocked"]
        assert scope.ended_by == "members"

    try:
        _asyncio(main)
    finally:
        release.set()


# Threads


def test_a_cooperative_thread_sees_the_interrupt_of_its_scope(on_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        woken: list[Cause | None] = []

        together = threading.Barrier(11)

        def wait() -> None:
            interrupt = current_interrupt()
            assert interrupt is not None
            assert not is_interrupted()
            together.wait(10)
            woken.append(interrupt.wait_blocking(10))
            check_interrupt()

        scope = Scope("run", parent=None).open()
        handles = [scope.spawn(wait, on="thread") for _ in range(10)]
        together.wait(10)
        receipt = await scope.stop("enough")
        assert receipt.outcome == "gone"
        assert receipt.stopped.threads == 10
        for handle in handles:
            with pytest.raises(Interrupted, match="enough"):
                await handle

    on_loop(main)


def test_the_interrupt_of_one_handle_reaches_its_thread_only() -> None:
    async def main() -> None:
        begun = threading.Barrier(3)

        def wait() -> str:
            interrupt = current_interrupt()
            assert interrupt is not None
            begun.wait(20)
            cause = interrupt.wait_blocking(60)
            return "nobody" if cause is None else cause.reason

        async with Scope("run", parent=None) as scope:
            one, two = (scope.spawn(wait, on="thread") for _ in range(2))
            begun.wait(20)
            one.interrupt.trigger("first")
            assert await one == "first"
            assert not two.done()
            two.interrupt.trigger("second")
            assert await two == "second"

    _asyncio(main)


def test_the_interrupt_of_one_handle_is_current_in_its_task() -> None:
    async def main() -> None:
        seen: list[object] = []

        async def work() -> None:
            try:
                await forever()
            except asyncio.CancelledError:
                seen.append(is_interrupted())
                raise

        async with Scope("run", parent=None) as scope:
            handle = scope.spawn(work())
            await asyncio.sleep(0)
            handle.interrupt.trigger("first")
            with pytest.raises(Interrupted, match="first"):
                await handle
            assert seen == [True]
            assert not is_interrupted()

    run_virtual(main())


def test_the_interrupt_of_one_handle_reaches_the_scopes_below_it() -> None:
    async def main() -> None:
        seen: list[str] = []
        clean: list[str] = []

        def wait() -> None:
            interrupt = current_interrupt()
            assert interrupt is not None
            begun.set()
            cause = interrupt.wait_blocking(60)
            seen.append("nobody" if cause is None else cause.reason)

        async def work() -> None:
            async with Scope("inner") as inner:
                inner.spawn(wait, on="thread")
                try:
                    await forever()
                finally:
                    await asyncio.sleep(0.01)
                    clean.append("body")

        begun = threading.Event()  # a call that no thread has begun would be taken back
        async with Scope("run", parent=None) as scope:
            handle = scope.spawn(work())
            # Made before the task runs, as by whoever gives the handle a deadline.
            interrupt = handle.interrupt
            while not begun.is_set():
                await asyncio.sleep(0.001)
            interrupt.trigger("only this one")
            with pytest.raises(Interrupted, match="only this one"):
                await handle
            assert seen == ["only this one"]
            assert clean == ["body"]
            assert not scope.interrupt.triggered

    _asyncio(main)


# Context and generators


async def _items(scope: Scope) -> AsyncIterator[int]:
    async with scope:
        assert current_scope() is scope
        scope.spawn(forever())
        yield 1
        assert current_scope() is scope
        await forever()


def test_what_iterates_over_a_generator_is_not_in_its_scope_and_not_cancelled_for_it() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        scope = Scope("generator")
        items = _items(scope)
        assert await anext(items) == 1
        assert current_scope() is None
        assert current_interrupt() is None
        scope.interrupt.trigger("enough")
        await asyncio.sleep(1)
        assert task.cancelling() == 0
        with pytest.raises(Interrupted):
            await anext(items)
        assert task.cancelling() == 0
        assert scope.closed

    run_virtual(main())


def test_a_generator_that_is_closed_half_way_stops_its_scope() -> None:
    async def main() -> None:
        scope = Scope("generator")
        items = _items(scope)
        assert await anext(items) == 1
        await items.aclose()  # type: ignore[attr-defined]
        assert scope.closed
        assert scope.receipt is not None
        assert scope.receipt.stopped.tasks == 1
        assert current_scope() is None

    run_virtual(main())


def test_a_generator_that_is_never_resumed_is_named_and_leaves_no_timer() -> None:
    async def main() -> None:
        scope = Scope("generator", grace_s=0.1, abandon_after_s=0.1)
        items = _items(scope)
        assert await anext(items) == 1
        receipt = await scope.stop("enough")
        assert receipt.outcome == "quarantined"
        assert len(receipt.abandoned) == 1
        loop = asyncio.get_running_loop()
        timers: list[object] = []
        call_later = loop.call_later

        def noting(delay: float, fn: Callable[..., object], *values: Any, **options: Any) -> asyncio.TimerHandle:
            timers.append(fn)
            return call_later(delay, fn, *values, **options)

        loop.call_later = noting  # type: ignore[method-assign, assignment]
        await asyncio.sleep(1)
        assert len(timers) == 1  # of this sleep
        with pytest.raises(Interrupted):
            await items.athrow(KeyError)  # type: ignore[attr-defined]
        assert current_scope() is None

    run_virtual(main())


def test_nested_shields_all_end_with_the_grace() -> None:
    async def main() -> None:
        scope = Scope("run", parent=None, grace_s=1).open()

        async def commit() -> None:
            async with scope.interrupt.shield(), scope.interrupt.shield():
                await asyncio.sleep(100)

        scope.spawn(commit(), name="commit")
        await asyncio.sleep(0)
        receipt = await scope.stop()
        assert receipt.outcome == "gone"
        assert receipt.forced == ("commit",)

    run_virtual(main())


def test_a_scope_in_a_context_manager_is_the_one_of_the_block() -> None:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Scope]:
        async with Scope("block") as scope:
            yield scope

    async def main() -> None:
        with pytest.raises(Interrupted):
            async with opened() as scope:
                assert current_scope() is scope
                scope.interrupt.trigger("enough")
                await forever()
        assert current_scope() is None

    run_virtual(main())


def test_a_shield_keeps_the_delivery_away_until_its_block_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        notes: list[str] = []
        scope = Scope("run", parent=None, grace_s=10).open()

        async def commit() -> None:
            async with scope.interrupt.shield(timeout_s=2):
                await asyncio.sleep(1)
                notes.append("committed")
            await asyncio.sleep(1)
            notes.append("went on")

        scope.spawn(commit())
        await asyncio.sleep(0.1)
        began = loop.time()
        receipt = await scope.stop()
        assert notes == ["committed"]
        assert receipt.forced == ()
        assert loop.time() - began == pytest.approx(0.9)

    run_virtual(main())


def test_a_shield_ends_with_the_grace() -> None:
    async def main() -> None:
        scope = Scope("run", parent=None, grace_s=1).open()

        async def commit() -> None:
            async with scope.interrupt.shield():
                await asyncio.sleep(100)

        scope.spawn(commit(), name="commit")
        await asyncio.sleep(0)
        receipt = await scope.stop()
        assert receipt.outcome == "gone"
        assert receipt.forced == ("commit",)
        assert receipt.elapsed_s < 1.1

    run_virtual(main())


def test_detached_code_is_in_no_scope() -> None:
    async def main() -> None:
        async with Scope("run"):
            with detached():
                assert current_scope() is None
                assert current_interrupt() is None
                shared = Scope("shared")
            assert shared.parent is None
            assert Scope("other", detached=True).parent is None

    run_virtual(main())


# With what users bring


def test_anyio_inside_a_scope_is_unharmed(on_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        notes: list[str] = []

        async def child(name: str) -> None:
            try:
                await anyio.sleep(1000)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.005)
                    notes.append(name)

        scope = Scope("run")
        with pytest.raises(Interrupted):
            async with scope:
                with anyio.move_on_after(0.005) as timed:
                    await anyio.sleep(1000)
                assert timed.cancelled_caught
                async with anyio.create_task_group() as group:
                    group.start_soon(child, "a")
                    group.start_soon(child, "b")
                    await anyio.sleep(0.001)
                    scope.interrupt.trigger("enough")
                    await anyio.sleep(1000)
        assert sorted(notes) == ["a", "b"]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await anyio.sleep(0.001)

    on_loop(main)


def test_a_scope_inside_anyio_is_stopped_by_it(on_loop: Callable[[Main], None]) -> None:
    async def main() -> None:
        notes: list[str] = []

        async def member() -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.01)
                notes.append("clean")

        with anyio.move_on_after(0.01) as timed:
            async with Scope("run", parent=None) as scope:
                scope.spawn(member())
                await asyncio.sleep(1000)
        assert timed.cancelled_caught
        with anyio.move_on_after(0.01) as timed:
            async with Scope("run", parent=None) as scope:
                scope.spawn(member())
        assert timed.cancelled_caught
        assert scope.closed
        assert notes == ["clean", "clean"]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    on_loop(main)


def test_a_task_group_that_failed_in_a_scope_and_was_caught_is_over(on_loop: Callable[[Main], None]) -> None:
    """Up to Python 3.12 the group leaves a cancel in the count of its task, which nobody asked for any more."""

    async def fail() -> None:
        raise ValueError("one of a group")

    async def main() -> None:
        for _ in range(2):
            async with Scope("around") as scope:
                with contextlib.suppress(ExceptionGroup):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(fail())
                await scope.spawn(asyncio.sleep, 0)
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(asyncio.CancelledError):
            async with Scope("around"):
                with contextlib.suppress(ExceptionGroup):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(fail())
                task.cancel()
                await asyncio.sleep(60)

    on_loop(main)


def test_a_timeout_around_a_scope_ends_it_and_stays_a_timeout() -> None:
    async def main() -> None:
        for joined in (False, True):
            scope = Scope("run")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    async with scope:
                        scope.spawn(forever())
                        if not joined:
                            await forever()
            assert scope.closed
            assert scope.members() == ()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run_virtual(main())


# Leaks


def test_a_closed_scope_is_free_without_the_garbage_collector() -> None:
    async def main() -> None:
        parent = Scope("host", parent=None).open()
        gc.collect()
        gc.disable()
        try:

            async def ordinary() -> weakref.ref[Scope]:
                async with Scope("run", parent=parent) as scope:
                    await scope.spawn(asyncio.sleep(0))
                    await scope.spawn(time.monotonic, on="thread")
                return weakref.ref(scope)

            async def stopped() -> weakref.ref[Scope]:
                scope = Scope("run", parent=parent).open()
                scope.spawn(forever())
                await scope.stop()
                return weakref.ref(scope)

            for use in (ordinary, stopped):
                left = await use()
                await asyncio.sleep(0.01)
                assert left() is None, use
        finally:
            gc.enable()
        assert parent.interrupt.statistics().children == 0
        assert parent.members() == ()
        await parent.stop()

    _asyncio(main)


def test_an_interrupt_after_the_end_does_not_change_what_ended_the_scope() -> None:
    async def main() -> None:
        scope = Scope("over", parent=None).open()
        scope.spawn(asyncio.sleep(0))
        await scope.join()
        scope.interrupt.trigger("too late")
        assert scope.ended_by == "members"
        await scope.join()

    asyncio.run(main())


STUCK = ("stuck", "running")


def test_a_receipt_names_what_hangs_and_not_who_waits_for_it(on_loop: Callable[[Main], None]) -> None:
    release = threading.Event()

    async def in_scopes(depth: int, parent: Scope) -> None:
        async with parent.child(f"scope {depth}") as scope:
            if depth:
                await scope.spawn(in_scopes(depth - 1, scope), name=f"task {depth}")
            else:
                await scope.spawn(release.wait, 60, on="thread", name="stuck")

    async def main() -> None:
        scope = Scope("run", parent=None, grace_s=0.01, abandon_after_s=0.02).open()
        waiting = scope.spawn(in_scopes(3, scope), name="task 4")
        while not [one for inner in every(scope) for one in inner.members() if (one.name, one.state) == STUCK]:
            await asyncio.sleep(0.001)
        receipt = await scope.stop()
        assert [one.name for one in receipt.abandoned] == ["stuck"]
        with pytest.raises(Interrupted):
            waiting.result()

    def every(scope: Scope) -> list[Scope]:
        return [scope, *itertools.chain.from_iterable(map(every, scope.children()))]

    try:
        on_loop(main)
    finally:
        release.set()


def test_tasks_that_hang_in_scopes_inside_of_one_another_are_each_named_in_bounded_time() -> None:
    async def stubborn(depth: int, parent: Scope, ends_at: float) -> None:
        async with parent.child(f"scope {depth}") as scope:
            if depth:
                scope.spawn(stubborn(depth - 1, scope, ends_at), name=f"task {depth}")
            while asyncio.get_running_loop().time() < ends_at:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        scope = Scope("run", parent=None, grace_s=1, abandon_after_s=1).open()
        scope.spawn(stubborn(3, scope, began + 100), name="task 4")
        await asyncio.sleep(0.5)
        receipt = await scope.stop()
        assert loop.time() - began <= 2.5 + 5 * 0.05 + 0.001
        assert {one.name for one in receipt.abandoned} == {f"task {depth}" for depth in (1, 2, 3, 4)}
        await asyncio.sleep(101)

    run_virtual(main())


def test_a_stop_whose_time_is_over_before_its_look_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would say `gone` of what nobody has looked for yet."""
    monkeypatch.setattr(stopping, "look_soon", lambda loop, since, tell: None)
    monkeypatch.setattr(stopping, "strangers", lambda since: 1)

    async def main() -> None:
        scope = Scope("run", parent=None, grace_s=0.01, abandon_after_s=0.02).open()
        receipt = await scope.stop("enough")
        assert (receipt.outcome, receipt.unattributed) == ("unknown", (STRANGER,))

    _asyncio(main)
