"""What foreign code starts inside a scope with plain asyncio belongs to the scope, and works as it always did."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import anyio
import pytest
import uvloop

from holdfast.errors import Interrupted
from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.adoption.threads import linger
from holdfast.runtime.interrupt.dispatch import WakeBatch
from holdfast.runtime.interrupt.interrupt import current_interrupt, is_interrupted
from holdfast.runtime.scope.cancel_claim import detached
from holdfast.runtime.scope.scope import Scope, current_scope
from holdfast.runtime.thread_pool import ThreadPool

Main = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def installed(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    def run(main: Main) -> None:
        async def bounded() -> None:
            with install(asyncio.get_running_loop()):
                async with asyncio.timeout(20):
                    await main()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(bounded())

    return run


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_tasks_of_foreign_code_are_members_and_end_with_the_scope(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        kept: list[asyncio.Task[None]] = []

        async def library() -> None:
            kept.append(asyncio.create_task(forever(), name="poller"))
            kept.append(asyncio.ensure_future(forever()))
            await asyncio.sleep(0)

        async with Scope("run") as scope:
            await scope.spawn(library())
            poller = next(member for member in scope.members() if member.name == "poller")
            assert poller.adopted
            assert scope.statistics().adopted == 2
        assert all(task.cancelled() for task in kept)
        assert scope.receipt is not None
        assert scope.receipt.stopped.tasks == 2
        assert scope.ended_by == "members"

    installed(main)


def test_an_error_in_an_adopted_task_stays_with_who_awaits_it(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        async def fails() -> None:
            raise ValueError("broken")

        async with Scope("run") as scope:
            with pytest.raises(ValueError, match="broken"):
                await asyncio.create_task(fails())
            results = await asyncio.gather(fails(), asyncio.sleep(0, "fine"), return_exceptions=True)
            assert results[1] == "fine"
            async with asyncio.timeout(5):
                assert await asyncio.wait_for(asyncio.sleep(0, "waited"), 5) == "waited"
        assert not scope.interrupt.triggered
        assert scope.errors == []

    installed(main)


@pytest.mark.parametrize("depth", [0, 2])
def test_who_exits_in_a_task_of_foreign_code_ends_the_task_and_not_the_loop(
    installed: Callable[[Main], None], depth: int
) -> None:
    async def leaves() -> None:
        await asyncio.sleep(0)
        sys.exit(3)

    async def works() -> str:
        return await asyncio.sleep(0.05, "done")

    async def below(depth: int) -> None:
        if depth:
            await asyncio.create_task(below(depth - 1))
        else:
            await asyncio.create_task(leaves(), name="leaver")

    async def main() -> None:
        async with Scope("other") as other:
            busy = other.spawn(works())
            async with Scope("run", detached=True) as scope:
                with pytest.raises(RuntimeError, match=r"leaves called sys\.exit\(3\)") as caught:
                    await below(depth)
                assert isinstance(caught.value.__cause__, SystemExit)
                assert not scope.interrupt.triggered
            assert await busy == "done"

    installed(main)


def test_a_guarded_task_is_seen_and_cancelled_as_before(installed: Callable[[Main], None]) -> None:
    begun: list[str] = []

    async def library() -> None:
        begun.append("library")
        try:
            await forever()
        except asyncio.CancelledError as error:
            begun.append(str(error))
            raise

    async def quits() -> int:
        raise KeyError("own")

    async def main() -> None:
        async with Scope("run"):
            never = asyncio.create_task(library())
            assert "library" in repr(never)
            never.cancel("before it began")
            with pytest.raises(asyncio.CancelledError):
                await never
            assert begun == []
            seen = asyncio.create_task(library())
            await asyncio.sleep(0)
            seen.cancel("enough")
            with pytest.raises(asyncio.CancelledError):
                await seen
            assert begun == ["library", "enough"]
            with pytest.raises(KeyError, match="own"):
                await asyncio.create_task(quits())
        gc.collect()  # nothing is left that says it was never awaited

    installed(main)


def test_a_task_started_below_an_adopted_one_is_adopted_too(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        ended: list[str] = []
        kept: list[asyncio.Task[None]] = []

        async def leaf(name: str) -> None:
            try:
                await forever()
            finally:
                ended.append(name)

        async def branch() -> None:
            kept.append(asyncio.create_task(leaf("leaf")))
            await leaf("branch")

        async with Scope("run") as scope:
            kept.append(asyncio.create_task(branch()))
            while scope.statistics().adopted < 2:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert sorted(ended) == ["branch", "leaf"]

    installed(main)


def test_children_of_a_task_group_are_cancelled_once_however_deep(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        clean: list[int] = []

        async def nested(depth: int) -> None:
            async with asyncio.TaskGroup() as group:
                if depth:
                    group.create_task(nested(depth - 1))
                try:
                    await forever()
                except asyncio.CancelledError:
                    await asyncio.sleep(0.01)
                    clean.append(depth)
                    raise

        scope = Scope("run", parent=None).open()
        handle = scope.spawn(nested(4))
        while scope.statistics().tasks < 5:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        receipt = await scope.stop("enough")
        assert receipt.outcome == "gone"
        assert sorted(clean) == [0, 1, 2, 3, 4]
        assert handle.done()

    installed(main)


def test_executor_calls_carry_the_context_and_belong_to_the_scope(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Scope("run") as scope:
            assert await asyncio.to_thread(current_scope) is scope
            assert await loop.run_in_executor(None, current_scope) is scope
            with pytest.raises(ZeroDivisionError):
                await asyncio.to_thread(divmod, 1, 0)

            begun = threading.Event()

            def wait() -> str:
                begun.set()
                interrupt = current_interrupt()
                assert interrupt is not None
                cause = interrupt.wait_blocking(10)
                return "nobody" if cause is None else cause.reason

            waiting = asyncio.to_thread(wait)
            waiting_task = asyncio.ensure_future(waiting)
            # A call's caller may have its answer a moment before the call is no member any more.
            while not begun.is_set() or [member.kind for member in scope.members()].count("thread") != 1:
                await asyncio.sleep(0.001)
        assert scope.receipt is not None
        assert scope.receipt.stopped.threads == 1
        with contextlib.suppress(asyncio.CancelledError):
            assert await waiting_task == "the scope has ended"
        assert await asyncio.to_thread(current_scope) is None

    installed(main)


def test_a_call_that_ends_before_the_stop_of_its_scope_begins_is_counted(
    installed: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, plain = threading.Event(), WakeBatch.schedule

    def schedule(hops: WakeBatch) -> None:
        ended.wait(20)  # the thread that was woken is quicker than the callback that begins the stop
        plain(hops)

    async def main() -> None:
        begun = threading.Event()

        def wait() -> None:
            begun.set()
            interrupt = current_interrupt()
            assert interrupt is not None
            interrupt.wait_blocking(20)

        with ThreadPoolExecutor(1) as pool:
            async with Scope("run") as scope:
                future = pool.submit(contextvars.copy_context().run, wait)
                future.add_done_callback(lambda _: ended.set())
                while not begun.is_set():
                    await asyncio.sleep(0.001)
                monkeypatch.setattr(WakeBatch, "schedule", schedule)
        assert scope.receipt is not None
        assert scope.receipt.stopped.threads == 1

    installed(main)


def test_a_call_that_ends_after_its_loop_was_closed_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    release, scope = threading.Event(), Scope("left open")

    async def leave() -> None:
        scope.open()
        scope.spawn(asyncio.sleep(1000))
        scope.spawn(lambda: release.wait(20), on="thread")
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    scope.interrupt.trigger("left")  # the loop never runs the callback that begins the stop
    loop.close()
    release.set()
    deadline = time.monotonic() + 20
    while any(member.kind == "thread" for member in scope.members()) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not any(member.kind == "thread" for member in scope.members())
    assert reported == []


def test_an_executor_call_that_blocks_is_abandoned_and_named(installed: Callable[[Main], None]) -> None:
    begun, release = threading.Event(), threading.Event()

    async def main() -> None:
        scope = Scope("run", parent=None).open()

        def block() -> None:
            begun.set()
            release.wait(20)

        async def tool() -> None:
            await asyncio.to_thread(block)

        scope.spawn(tool())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        receipt = await scope.stop(grace_s=0, abandon_after_s=1.0)
        assert receipt.outcome == "quarantined"
        assert [(left.kind, left.name) for left in receipt.abandoned] == [("thread", block.__qualname__)]
        release.set()

    try:
        installed(main)
    finally:
        release.set()


def test_an_executor_call_that_no_thread_has_begun_is_cancelled_by_a_stop() -> None:
    begun, release = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait(20)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pool = ThreadPool(max_threads=1, name="test")
        with install(loop, threads=pool):
            scope = Scope("run", parent=None, threads=pool).open()
            futures: list[asyncio.Future[Any]] = []

            async def library() -> None:
                futures.extend(loop.run_in_executor(None, fn) for fn in (block, time.monotonic))
                while not begun.is_set():
                    await asyncio.sleep(0.001)

            await scope.spawn(library())
            receipt = await scope.stop("enough", grace_s=0, abandon_after_s=0.02)
            assert receipt.stopped.threads == 1
            assert [left.name for left in receipt.abandoned] == [block.__qualname__]
            await asyncio.wait((futures[1],), timeout=10)
            assert futures[1].cancelled()
            release.set()
            await futures[0]

    try:
        asyncio.run(main())
    finally:
        release.set()


def test_clean_up_may_use_executors_and_timeouts_during_the_grace(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        notes: list[str] = []

        async def tool() -> None:
            try:
                await forever()
            finally:
                await asyncio.to_thread(notes.append, "flushed")
                await asyncio.wait_for(asyncio.sleep(0), 30)
                await asyncio.gather(asyncio.sleep(0), asyncio.sleep(0))
                notes.append("closed")

        scope = Scope("run", parent=None).open()
        scope.spawn(tool())
        await asyncio.sleep(0)
        receipt = await scope.stop("enough")
        assert notes == ["flushed", "closed"]
        assert receipt.forced == ()

    installed(main)


def test_a_task_started_in_the_context_of_a_closed_scope_never_runs_and_that_is_said(
    installed: Callable[[Main], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        ran: list[int] = []

        async def late() -> None:
            ran.append(1)

        started: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        async with Scope("run"):
            context = contextvars.copy_context()
        loop.call_soon(lambda: started.append(asyncio.ensure_future(late())), context=context)
        while not started:
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await started[0]
        assert not ran
        assert "start tasks shared between scopes" in caplog.text

    installed(main)


def test_what_is_shared_starts_detached_and_outlives_the_scope(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with Scope("run"):
            with detached():
                shared = asyncio.create_task(forever())
                assert await asyncio.to_thread(is_interrupted) is False
        await asyncio.sleep(0)
        assert not shared.done()
        shared.cancel()

    installed(main)


def test_a_thread_that_foreign_code_starts_by_itself_is_named_as_unowned(installed: Callable[[Main], None]) -> None:
    release = threading.Event()

    async def main() -> None:
        async with Scope("run") as scope:
            threading.Thread(target=release.wait, args=(20,), name="stray", daemon=True).start()
            brief = threading.Thread(target=time.monotonic)
            brief.start()
            brief.join()
            assert scope.statistics().unowned == 1
            assert [(member.name, member.state) for member in scope.members()] == [("stray", "unowned")]
        assert scope.receipt is not None
        assert scope.receipt.outcome == "quarantined"
        assert [left.name for left in scope.receipt.abandoned] == ["stray"]
        assert any(" in wait" in line for line in scope.receipt.abandoned[0].stack)

    try:
        installed(main)
    finally:
        release.set()


def test_a_call_on_an_executor_of_foreign_code_is_a_member_until_it_has_ended(
    installed: Callable[[Main], None],
) -> None:
    begun, release = threading.Event(), threading.Event()

    def block() -> str:
        begun.set()
        release.wait(20)
        return "late"

    async def main() -> None:
        with ThreadPoolExecutor(max_workers=1) as executor:
            scope = Scope("run", parent=None).open()
            futures: list[Future[str]] = []

            async def library() -> None:
                assert await asyncio.wrap_future(executor.submit(pow, 2, 3)) == 8
                futures.append(executor.submit(block))
                futures.append(executor.submit(block))

            await scope.spawn(library())
            while not begun.is_set():
                await asyncio.sleep(0.001)
            assert {member.name for member in scope.members()} == {block.__qualname__}
            assert scope.statistics().unowned == 0
            receipt = await scope.stop("enough", grace_s=0, abandon_after_s=1.0)
            assert receipt.outcome == "quarantined"
            assert [left.name for left in receipt.abandoned] == [block.__qualname__]
            assert any(" in block" in line for line in receipt.abandoned[0].stack)
            assert futures[1].cancelled()
            release.set()
            assert await asyncio.wrap_future(futures[0]) == "late"

    try:
        installed(main)
    finally:
        release.set()


def test_a_worker_thread_of_anyio_that_idles_is_nobodys_and_its_calls_are_members(
    installed: Callable[[Main], None],
) -> None:
    begun, release = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        release.wait(20)

    async def main() -> None:
        async with Scope("ordinary") as scope:
            assert await anyio.to_thread.run_sync(current_scope) is scope
            with pytest.raises(ZeroDivisionError):
                await anyio.to_thread.run_sync(divmod, 1, 0)
            assert scope.members() == ()
        assert scope.receipt is None
        scope = Scope("blocked", parent=None).open()

        async def library() -> None:
            await anyio.to_thread.run_sync(block, abandon_on_cancel=True)

        scope.spawn(library())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert block.__qualname__ in {member.name for member in scope.members()}
        receipt = await scope.stop("enough", grace_s=0, abandon_after_s=0.02)
        assert [left.name for left in receipt.abandoned] == [block.__qualname__]
        release.set()

    try:
        installed(main)
    finally:
        release.set()


def test_outside_any_scope_everything_is_as_before_and_restore_undoes_it() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        while linger():  # threads that earlier tests had abandoned are watched until they have ended
            await asyncio.sleep(0.001)
        install(loop).restore()
        before = loop.get_task_factory(), threading.Thread.start, ThreadPoolExecutor.submit
        installation = install(loop)
        task = asyncio.create_task(asyncio.sleep(0, "plain"), name="plain")
        assert (await task, task.get_name()) == ("plain", "plain")
        assert await asyncio.to_thread(pow, 2, 3) == 8
        installation.restore()
        installation.restore()
        assert (loop.get_task_factory(), threading.Thread.start, ThreadPoolExecutor.submit) == before

    asyncio.run(main())


def test_an_eager_or_own_task_factory_of_the_user_stays_in_use() -> None:
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(factory)
        with install(loop):
            async with Scope("run") as scope:
                scope.spawn(asyncio.sleep(0))
                await asyncio.create_task(asyncio.sleep(0))
        assert made == ["sleep", "sleep"]
        assert loop.get_task_factory() is factory

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with 3.12; the explorer simulates them")
def test_eager_tasks_are_members_and_are_cancelled_once() -> None:
    clean: list[str] = []

    async def quick() -> int:
        return 1

    async def tool() -> None:
        try:
            async with Scope("inner"):
                assert asyncio.create_task(quick()).done()
                clean_later = asyncio.create_task(forever())
                try:
                    await clean_later
                finally:
                    await asyncio.sleep(0.01)
                    clean.append("inner")
        finally:
            await asyncio.sleep(0.01)
            clean.append("outer")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(cast(Any, asyncio).eager_task_factory)
        with install(loop):
            scope = Scope("run", parent=None).open()
            handle = scope.spawn(quick())
            assert handle.done()
            assert await handle == 1
            scope.spawn(tool())
            receipt = await scope.stop("enough")
            assert (receipt.outcome, receipt.forced) == ("gone", ())
            assert clean == ["inner", "outer"]

    asyncio.run(main())


def test_nothing_of_adopted_work_is_kept(installed: Callable[[Main], None]) -> None:
    class Payload:
        """Something foreign work refers to."""

    async def main() -> None:
        references: list[weakref.ref[Payload]] = []

        async def work(payload: Payload) -> None:
            await asyncio.sleep(0)
            assert payload is not None

        async with Scope("run") as scope:
            for _ in range(50):
                payload = Payload()
                references.append(weakref.ref(payload))
                await asyncio.create_task(work(payload))
                await asyncio.to_thread(id, payload)
            del payload
            while scope.members() or any(reference() for reference in references):
                await asyncio.sleep(0.001)
                gc.collect()

    installed(main)


def test_an_interrupt_of_one_scope_is_not_seen_in_threads_of_another(installed: Callable[[Main], None]) -> None:
    async def main() -> None:
        async def run(scope: Scope, seen: list[bool]) -> None:
            async with scope:
                while len(seen) < 20:
                    seen.append(await asyncio.to_thread(is_interrupted))

        one: list[bool] = []
        two: list[bool] = []
        for _ in range(5):
            first, second = Scope("one"), Scope("two")
            async with asyncio.TaskGroup() as group:
                other = group.create_task(run(second, two))
                task = group.create_task(run(first, one))
                while len(one) < 3:
                    await asyncio.sleep(0)
                await first.stop("only this")
                await asyncio.wait([task, other])
                assert isinstance(task.exception(), Interrupted)
                assert len(two) == 20
                assert not any(two)
                one.clear()
                two.clear()

    async def guarded() -> None:
        # The interrupted run's task ends with Interrupted, which its task group passes on.
        with contextlib.suppress(BaseExceptionGroup):
            await main()

    installed(guarded)
