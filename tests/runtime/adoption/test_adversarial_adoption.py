"""Programs and threads that foreign code starts on threads of its own: they belong to the scope all the same."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.errors import Interrupted, ScopeClosed
from holdfast.protocol.stopping import StopReceipt
from holdfast.runtime.adoption import processes as adoption_processes
from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.processes import procfs, zygote_link
from holdfast.runtime.scope.cancel_claim import detached
from holdfast.runtime.scope.process_handle import ForeignHandle, boot_ticks
from holdfast.runtime.scope.scope import Scope
from holdfast.runtime.thread_pool import ThreadCall, ThreadPool

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="process trees need Linux")

Start = Callable[[Callable[[], None]], object]
_executor = ThreadPoolExecutor(2, thread_name_prefix="of-the-test")


def in_thread(fn: Callable[[], None]) -> None:
    threading.Thread(target=fn, name="bare", daemon=True).start()


def in_nested_thread(fn: Callable[[], None]) -> None:
    in_thread(lambda: in_thread(fn))


def in_executor(fn: Callable[[], None]) -> None:
    _executor.submit(fn)


def in_executor_of_a_thread(fn: Callable[[], None]) -> None:
    in_thread(lambda: in_executor(fn))


@pytest.fixture
def programs() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for program in started:
        program.kill()
        program.wait(10)


def lives(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and not stat.dead


def copies_of_this_process() -> list[int]:
    mine = [pid for pid in procfs.descendants(os.getpid()) if lives(pid)]
    return [pid for pid in mine if procfs.command(pid) == procfs.command(os.getpid())]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def stopped(start: Callable[[], object], begun: Callable[[], object]) -> StopReceipt:
    """What became of a scope in which this was started, and that was stopped when it had begun."""
    scope = Scope("tool", grace_s=0.05, abandon_after_s=5.0)
    with pytest.raises(Interrupted):
        async with scope:
            start()
            await until(begun)
            scope.interrupt.trigger("enough")
            await asyncio.sleep(60)
    assert scope.receipt is not None
    return scope.receipt


@pytest.mark.parametrize("where", [in_thread, in_nested_thread, in_executor, in_executor_of_a_thread])
def test_what_a_foreign_thread_starts_ends_with_the_scope_and_nothing_else_does(
    where: Start, programs: list[subprocess.Popen[bytes]]
) -> None:
    def run() -> None:
        program = subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sleep 600 & sleep 600"])
        programs.append(program)
        program.wait()

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            innocent = subprocess.Popen(["sleep", "600"])
            programs.append(innocent)
            with detached():
                where(lambda: programs.append(subprocess.Popen(["sleep", "600"])))
            await until(lambda: len(programs) == 2)
            receipt = await stopped(lambda: where(run), lambda: len(programs) == 3)
            assert not lives(programs[2].pid)
            assert receipt.stopped.processes >= 1
            assert lives(innocent.pid)
            assert lives(programs[1].pid), "started outside any scope"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_scope_can_be_looked_at_while_foreign_code_starts_threads() -> None:
    def start_many() -> None:
        threads = [threading.Thread(target=int) for _ in range(1000)]
        for thread in threads:
            thread.start()

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            async with Scope("tool") as scope:
                starting = scope.spawn(start_many, on="thread")
                while not starting.done():
                    scope.statistics()
                    await asyncio.sleep(0)

    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        sys.setswitchinterval(switch_interval_s)


def test_a_shared_executor_keeps_no_scope_after_a_call(programs: list[subprocess.Popen[bytes]]) -> None:
    """The thread was started, and served, in a scope that has ended."""
    executor = ThreadPoolExecutor(1)

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            async with Scope("first"):
                executor.submit(os.getpid).result(10)
            executor.submit(lambda: programs.append(subprocess.Popen(["sleep", "600"]))).result(10)
            async with Scope("second"):
                executor.submit(os.getpid).result(10)
            assert lives(programs[0].pid)

    asyncio.run(asyncio.wait_for(main(), 60))
    executor.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pool_that_replaces_its_processes_does_not_outlive_the_scope() -> None:
    pools: list[Any] = []
    failed: list[str] = []

    async def main() -> None:
        with install(asyncio.get_running_loop()):

            def use_pool() -> None:
                try:
                    with multiprocessing.get_context("fork").Pool(2) as pool:
                        pools.append(pool)
                        pool.map(time.sleep, [600, 600])
                except BaseException:
                    failed.append(traceback.format_exc())
                    raise

            async def its_processes() -> None:
                try:
                    async with asyncio.timeout(40):
                        await until(lambda: failed or (pools and scope.statistics().processes == 2))
                except TimeoutError:
                    faulthandler.dump_traceback(all_threads=True)
                    children = procfs.names(procfs.children(os.getpid()))
                    failed.append(f"{[pool._pool for pool in pools]}, {scope.members()}, {children}")
                assert not failed, failed[0]

            scope = Scope("tool", grace_s=0.05, abandon_after_s=1.0)
            with pytest.raises(Interrupted):
                async with scope:
                    in_thread(use_pool)
                    await its_processes()
                    scope.interrupt.trigger("enough")
                    await asyncio.sleep(60)
            assert scope.receipt is not None
            assert "bare" in [one.name for one in scope.receipt.abandoned], "it waits for a result that never comes"
            await until(lambda: not any(thread.name.endswith("(_handle_workers)") for thread in threading.enumerate()))
            # All it ever started was below this process. The last one was struck when it came, and may be dying still.
            await until(lambda: not copies_of_this_process())

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        # Its processes may have died with its lock: at the end of the interpreter it would wait for that for ever.
        for pool in pools:
            pool._terminate.cancel()


def test_a_closed_scope_starts_no_program_however_late(programs: list[subprocess.Popen[bytes]]) -> None:
    refused: list[BaseException] = []
    go_on = threading.Event()

    def run() -> None:
        assert go_on.wait(30)
        try:
            programs.append(subprocess.Popen(["sleep", "600"]))
        except ScopeClosed as error:
            refused.append(error)

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            scope = Scope("tool", grace_s=0.0, abandon_after_s=0.05)
            with pytest.raises(Interrupted):
                async with scope:
                    in_thread(run)
                    scope.interrupt.trigger("enough")
                    await asyncio.sleep(60)
            assert scope.receipt is not None
            assert [one.name for one in scope.receipt.abandoned] == ["bare"]
            go_on.set()
            await until(lambda: refused or programs)
            assert "detached" in str(refused[0])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_stop_by_force_names_the_threads_that_nobody_owns() -> None:
    release = threading.Event()

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            scope = Scope("tool", grace_s=0.0, abandon_after_s=0.05)
            with pytest.raises(Interrupted):
                async with scope:
                    threading.Thread(target=release.wait, args=(30,), name="bare").start()
                    scope.spawn(release.wait, 30, on="thread", name="owned")
                    await until(lambda: all(member.state != "starting" for member in scope.members()))
                    scope.interrupt.trigger("enough")
                    await asyncio.sleep(60)
            assert scope.receipt is not None
            assert {one.name for one in scope.receipt.abandoned} == {"bare", "owned"}
            release.set()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_program_that_is_just_being_started_elsewhere_makes_no_outcome_unknown(
    programs: list[subprocess.Popen[bytes]],
) -> None:
    started: list[int] = []
    concluding = threading.Event()

    def start_slowly() -> None:
        """As every start, but it takes its time between the new process and its being known."""
        adoption = adoption_processes._adoption
        assert adoption is not None
        with adoption.programs.start():
            started.append(zygote_link._posix_spawn("/bin/sleep", ["sleep", "600"], {}))
            assert concluding.wait(20)
            time.sleep(0.1)
            adoption.programs.note_outside(started[0])

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            starting = threading.Thread(target=start_slowly)
            async with Scope("tool", grace_s=0.05, abandon_after_s=5.0) as scope:
                programs.append(subprocess.Popen(["sleep", "600"]))
                with detached():
                    starting.start()
                await until(lambda: started)
                roots = [handle.process for handle in scope.core.handles() if isinstance(handle, ForeignHandle)]
                asyncio.get_running_loop().call_later(0.2, concluding.set)
                result = await adoption_processes.kill_trees(roots)
                concluding.set()
                assert result.unattributed == ()
                assert result.outcome == "gone"
            starting.join(20)
            assert lives(started[0])

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        os.kill(started[0], 9)
        os.waitpid(started[0], 0)


def test_a_program_that_enters_just_when_the_grace_ends_is_killed(programs: list[subprocess.Popen[bytes]]) -> None:
    forced = threading.Event()
    begun = threading.Event()

    class Adopted(dict[Any, None]):
        """A scope's programs; one is entered only when the scope has begun to kill, if it does not wait for that."""

        def __setitem__(self, member: Any, value: None) -> None:
            if isinstance(member, ForeignHandle):
                forced.wait(0.5)
            super().__setitem__(member, value)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with install(loop):
            scope = Scope("tool", detached=True, grace_s=0.1, abandon_after_s=5.0).open()
            scope.core.adopted = Adopted()

            def run() -> None:
                begun.set()
                while scope.core.asked_at_ticks == 0 or boot_ticks() < scope.core.asked_at_ticks + 2:
                    time.sleep(0.002)  # what is started now is clean-up: it is not asked, only killed
                programs.append(subprocess.Popen(["sleep", "600"]))
                programs[0].wait()

            scope.spawn(run, on="thread")
            await until(begun.is_set)
            scope.add_closer(lambda: loop.call_soon(forced.set))
            receipt = await scope.stop("enough")
            assert (receipt.outcome, receipt.survivors, receipt.abandoned) == ("gone", (), ())
            assert not lives(programs[0].pid)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_in_an_executor_that_is_given_up_is_left_over_until_it_ends() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        go_on.wait(30)

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            scope = Scope("tool", detached=True).open()

            async def start() -> None:
                in_executor(run)
                await asyncio.sleep(60)

            scope.spawn(start())
            await until(begun.is_set)
            receipt = await scope.stop("enough", grace_s=0.0, abandon_after_s=0.05)
            assert [left.name for left in scope.leftovers()] == [left.name for left in receipt.abandoned]
            assert [left.kind for left in scope.leftovers()] == ["thread"]
            go_on.set()
            await until(lambda: not scope.leftovers())

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_that_ends_just_when_it_is_given_up_leaves_no_thread_over(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    plain = ThreadCall.abandon

    def abandon(call: ThreadCall) -> bool:
        go_on.set()
        while call.thread is not None:
            time.sleep(0.001)
        return plain(call)

    monkeypatch.setattr(ThreadCall, "abandon", abandon)

    def run() -> None:
        begun.set()
        go_on.wait(30)

    async def main() -> None:
        scope = Scope("tool", detached=True, threads=ThreadPool(name="of-the-test")).open()
        scope.spawn(run, on="thread")
        await until(begun.is_set)
        await scope.stop("enough", grace_s=0.0, abandon_after_s=0.05)
        assert scope.leftovers() == ()

    asyncio.run(asyncio.wait_for(main(), 60))
