"""Isolated calls: whose process they get, what they may leave behind, how they are asked to end, what they print."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from holdfast.errors import Interrupted, ProcessEnded
from holdfast.runtime.process_host import ProcessHost
from holdfast.runtime.processes import procfs
from holdfast.runtime.scope.scope import Scope
from holdfast.runtime.workers.main import IsolatedCall
from holdfast.runtime.workers.pool import WorkerPool
from tests.runtime.processes_zoo import await_condition
from tests.runtime.workers import isolated_zoo as zoo

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="workers are kept only on Linux")

Main = Callable[[], Coroutine[Any, Any, None]]


def run(main: Main, loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(bounded())


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcessHost]:
    host = ProcessHost()
    yield host
    host.close()


@pytest.fixture
def host(shared: ProcessHost) -> Iterator[ProcessHost]:
    yield shared
    shared.workers.close()
    await_condition(lambda: shared.statistics().live == 0, "nothing lives on")
    assert shared.workers.statistics().lent == 0
    shared._workers = None


def alive(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and not stat.dead


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def written(path: Path) -> str:
    await until(lambda: path.exists() and path.read_text())
    return path.read_text()


# Whose process it is


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_process_that_was_left_clean_serves_the_next_call_of_its_owner_only(
    host: ProcessHost, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        async with Scope("first", processes=host, owner="alice") as scope:
            first = await scope.spawn(zoo.pid, on="process")
            with pytest.raises(ValueError) as caught:
                await scope.child("calls").open().spawn(zoo.fail, on="process")
            assert str(caught.value) == str(first)
            assert "isolated_zoo.py" in caught.value.__notes__[0]
        async with Scope("second", processes=host, owner="alice") as scope:
            assert await scope.spawn(zoo.pid, on="process") == first
            assert not scope.members()
        async with Scope("third", processes=host, owner="bob") as scope:
            assert await scope.spawn(zoo.pid, on="process") != first
        assert host.workers.statistics().started == 2

    run(main, loop_factory)


FAILING_THREAD = """
import asyncio
from holdfast.runtime import Scope
from tests.runtime.workers import isolated_zoo as zoo

async def main():
    async with Scope("s") as scope:
        await scope.spawn(zoo.fail_in_a_thread, on="process")

asyncio.run(main())
"""


def test_the_error_of_a_thread_in_an_isolated_function_is_redacted_and_drives_no_terminal() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING_THREAD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "thread 'w' failed: ValueError: password=*** \\x1b[2J" in done.stderr
    assert "hunter2" not in done.stderr and "\x1b" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("2026-01-01")] == []


def test_calls_at_the_same_time_from_several_loops_never_share_a_process(host: ProcessHost) -> None:
    taken: list[tuple[int, float, float]] = []

    def loop() -> None:
        async def main() -> None:
            async with Scope("loop", processes=host) as scope:
                for _ in range(4):
                    calls = [scope.spawn(zoo.pid_and_time, 0.01, on="process") for _ in range(3)]
                    taken.extend([await call for call in calls])

        run(main)

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(taken) == 36
    taken.sort(key=lambda one: one[1])
    last: dict[int, float] = {}
    for pid, began, ended in taken:
        assert began >= last.get(pid, 0.0)
        last[pid] = ended
    assert len(last) < len(taken), "some were used again"
    assert host.workers.statistics().idle <= host.workers.owner_limit


@pytest.mark.parametrize("leaver", zoo.LEAVERS, ids=lambda fn: fn.__name__)
def test_whatever_a_call_leaves_behind_no_other_call_meets_it(host: ProcessHost, leaver: Callable[[], int]) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            await scope.spawn(zoo.pid, on="process")
            tree = procfs.descendants(os.getpid())
            pid = await scope.spawn(leaver, on="process")
            assert pid in tree, "it was a warm one"
            assert not alive(pid)
            left = [one for one in procfs.descendants(os.getpid()) if one not in tree and alive(one)]
            assert not left, procfs.names(left)
            assert await scope.spawn(zoo.pid, on="process") != pid
            assert not [member for member in scope.members() if member.pid == pid]

    run(main)


def test_a_call_that_says_it_left_nothing_is_looked_at_from_outside(
    host: ProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function has the means to make its process lie about it."""

    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            pids = []
            for lie in (zoo.lie_about_a_thread, zoo.lie_about_a_descriptor, zoo.lie_about_a_program):
                pids.append(await scope.spawn(lie, on="process"))
                assert not alive(pids[-1])
            assert len(set(pids)) == 3

    run(main)


def test_a_process_is_used_only_in_the_surroundings_that_it_was_started_in(
    host: ProcessHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            pids = [await scope.spawn(zoo.pid, on="process")]
            monkeypatch.setenv("PYTHON_CHANGED_MEANWHILE", "1")
            pids.append(await scope.spawn(zoo.pid, on="process"))
            monkeypatch.chdir(tmp_path)
            pids.append(await scope.spawn(zoo.pid, on="process"))
            assert len(set(pids)) == 3
            await until(lambda: not alive(pids[0]) and not alive(pids[1]))

    run(main)


def test_a_process_serves_so_many_calls_and_may_grow_so_far(host: ProcessHost) -> None:
    async def main() -> None:
        host._workers = WorkerPool(host, calls_limit=3, growth_bytes=1 << 25)
        async with Scope("tool", processes=host) as scope:
            pids = [await scope.spawn(zoo.pid, on="process") for _ in range(6)]
            assert pids[0] == pids[2] != pids[3] == pids[5]
            grown = await scope.spawn(zoo.hold_memory, 1 << 26, on="process")
            assert grown != await scope.spawn(zoo.pid, on="process")

    run(main)


def test_idle_processes_are_bounded_in_number_and_time(host: ProcessHost) -> None:
    async def main() -> None:
        host._workers = WorkerPool(host, idle_limit=3, owner_limit=2)
        for owner in ("alice", "bob"):
            async with Scope("tool", processes=host, owner=owner) as scope:
                calls = [scope.spawn(zoo.pid_and_time, 0.2, on="process") for _ in range(4)]
                assert len({(await call)[0] for call in calls}) == 4
        assert host.workers.statistics().idle == 3
        await until(lambda: host.statistics().live == 3)
        host.workers.close()
        host._workers = WorkerPool(host, idle_s=0.05)
        async with Scope("tool", processes=host) as scope:
            pid = await scope.spawn(zoo.pid, on="process")
            await until(lambda: host.workers.statistics().idle == 0)
            assert not alive(pid)
            assert await scope.spawn(zoo.pid, on="process") != pid

    run(main)


def test_a_call_whose_idle_process_died_unheard_gets_another(host: ProcessHost) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            for _ in range(5):
                pid = await scope.spawn(zoo.pid, on="process")
                os.kill(pid, signal.SIGKILL)
                assert await scope.spawn(zoo.pid, on="process") != pid

    run(main)


def test_the_hosts_close_ends_idle_and_lent_processes(tmp_path: Path) -> None:
    host = ProcessHost()

    async def main() -> None:
        scope = Scope("tool", processes=host).open()
        idle = await scope.spawn(zoo.pid, on="process")
        lent = scope.child("lent").open().spawn(zoo.swallow, str(tmp_path / "pid"), on="process")
        busy = int(await written(tmp_path / "pid"))
        more = await scope.spawn(zoo.pid, on="process")
        await asyncio.to_thread(host.close)
        assert not [pid for pid in (idle, busy, more) if alive(pid)]
        with pytest.raises(ProcessEnded):
            await lent
        await scope.stop()

    run(main)
    assert host.workers.statistics().idle == 0


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_leaves_the_processes_of_its_parent_alone(host: ProcessHost) -> None:
    async def call() -> int:
        async with Scope("tool", processes=host) as scope:
            return await scope.spawn(zoo.pid, on="process")

    first = asyncio.run(call())
    (idle,) = host.workers._idle
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert idle.control.fileno() == -1, "the parent's would not see its end"
            assert host.workers.statistics().idle == 0
            assert asyncio.run(call()) != first
            host.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(call()) == first


def test_many_calls_with_and_without_answer_leave_no_descriptor(host: ProcessHost) -> None:
    async def some(count: int) -> None:
        async with Scope("tool", processes=host, grace_s=0) as scope:
            for number in range(count):
                handle = scope.spawn(zoo.pid_and_time, 0.0, on="process", output=lambda text: None)
                if number % 10 == 0:
                    handle.interrupt.trigger("enough")
                try:
                    await handle
                except Interrupted:
                    continue

    async def main() -> None:
        await some(20)
        host.workers.close()
        await until(lambda: host.statistics().live == 0)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        await some(200)
        host.workers.close()
        await until(lambda: host.statistics().live == 0)
        gc.collect()
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    run(main)


# How it ends


def test_an_interrupt_is_raised_in_the_function_with_its_cause_and_its_clean_up_runs(
    host: ProcessHost, tmp_path: Path
) -> None:
    async def main() -> None:
        scope = Scope("tool", processes=host, grace_s=30).open()
        scope.spawn(zoo.sleep_with_a_cleanup, str(tmp_path / "a"), on="process")
        other = scope.spawn(zoo.sleep_with_a_cleanup, str(tmp_path / "b"), on="process")
        pids = [int(await written(tmp_path / name)) for name in "ab"]
        other.interrupt.trigger("this one", kind="budget")
        with pytest.raises(Interrupted, match="this one"):
            await other
        assert (tmp_path / "b").read_text() == "budget: this one"
        assert alive(pids[0]) and not alive(pids[1])
        receipt = await scope.stop("enough", kind="user")
        assert (tmp_path / "a").read_text() == "user: enough"
        assert receipt.outcome == "gone"
        assert receipt.stopped.processes == 1
        assert not receipt.forced
        assert not alive(pids[0])

    run(main)


def test_an_interrupt_reaches_every_waiter_in_the_function(host: ProcessHost, tmp_path: Path) -> None:
    async def main() -> None:
        scope = Scope("tool", processes=host, grace_s=30).open()
        scope.spawn(zoo.wait_for_the_interrupt, str(tmp_path / "a"), on="process", name="patient")
        await written(tmp_path / "a")
        await scope.stop()
        assert (tmp_path / "a").read_text() == "patient 1"

    run(main)


def test_a_function_that_swallows_its_interrupt_is_killed_after_the_grace_and_harms_no_other(
    host: ProcessHost, tmp_path: Path
) -> None:
    async def main() -> None:
        outer = Scope("run", processes=host).open()
        other = outer.spawn(zoo.pid_and_time, 1.0, on="process")
        scope = outer.child("tool", grace_s=0.2).open()
        handle = scope.spawn(zoo.swallow, str(tmp_path / "pid"), on="process", name="stubborn")
        pid = int(await written(tmp_path / "pid"))
        assert [member.name for member in scope.members() if member.pid == pid] == ["stubborn"]
        receipt = await scope.stop("enough")
        assert receipt.outcome == "gone"
        assert "stubborn" in receipt.forced
        assert not alive(pid)
        with pytest.raises(Interrupted):
            await handle
        assert (await other)[0] != pid
        await outer.join()

    run(main)


@pytest.mark.parametrize("fn", [zoo.close_everything, zoo.send_garbage], ids=lambda fn: fn.__name__)
def test_a_call_that_breaks_its_connection_has_no_answer(host: ProcessHost, fn: Callable[[], None]) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            pid = await scope.spawn(zoo.pid, on="process")
            with pytest.raises(ProcessEnded, match="before it answered"):
                await scope.child("call").open().spawn(fn, on="process")
            assert not alive(pid)
            assert await scope.spawn(zoo.pid, on="process") != pid

    run(main)


def test_an_answer_is_never_written_into_what_took_over_the_descriptor(host: ProcessHost, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(tmp_path / "other"))
                listening.listen()
                call = scope.child("call").open()
                with pytest.raises(ProcessEnded):
                    await call.spawn(zoo.let_another_take_over_the_number, str(tmp_path / "other"), on="process")
                connection, _ = listening.accept()
                with connection:
                    assert connection.recv(100) == b""

    run(main)


def test_a_copy_that_the_function_forked_answers_nobody(host: ProcessHost) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            for _ in range(5):
                assert await scope.spawn(zoo.return_twice, on="process") == 1
            assert await scope.spawn(zoo.double, b"x" * (1 << 22), on="process") == b"x" * (1 << 23)

    run(main)


# What is carried


def test_plain_context_variables_are_carried_and_do_not_stay(host: ProcessHost) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            assert await scope.spawn(zoo.tenant, on="process") == "nobody"
            token = zoo.TENANT.set("alice")
            assert await scope.spawn(zoo.tenant, on="process") == "alice"
            zoo.TENANT.reset(token)
            await scope.spawn(zoo.set_tenant, on="process")
            assert await scope.spawn(zoo.tenant, on="process") == "nobody"
            assert host.workers.statistics().started == 1

    run(main)


def test_what_a_function_prints_and_says_comes_while_it_runs_in_order(host: ProcessHost, tmp_path: Path) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            heard: list[str] = []
            for number in range(2):
                path = tmp_path / str(number)
                heard.clear()
                handle = scope.spawn(zoo.speak, IsolatedCall("c-1"), str(path), on="process", output=heard.append)
                await until(lambda: "told\n" in "".join(heard))
                assert "".join(heard) == "printed, said, by a program\ntold\n"
                path.touch()
                assert await handle == "c-1"
                assert "".join(heard) == "printed, said, by a program\ntold\nand � and é."
            assert host.workers.statistics().started == 1

    run(main)
    with pytest.raises(RuntimeError, match="only in the process of an isolated call"):
        IsolatedCall("c-1").output("here")


def test_all_that_was_printed_before_the_answer_was_heard_when_the_call_ends(host: ProcessHost) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            for _ in range(50):
                heard: list[str] = []
                await scope.spawn(zoo.speak_much, 60, on="process", output=heard.append)
                assert len("".join(heard)) == 60 * 1024

    run(main)


def test_without_a_listener_it_goes_to_standard_error(host: ProcessHost, capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            await scope.spawn(zoo.speak_much, 2, on="process")

    run(main)
    assert capfd.readouterr().err.splitlines()[1].startswith("1 ")


def test_a_function_is_no_faster_than_its_listener(host: ProcessHost) -> None:
    async def main() -> None:
        async with Scope("tool", processes=host) as scope:
            heard: list[str] = []
            gate = asyncio.Event()

            async def listen(text: str) -> None:
                heard.append(text)
                await gate.wait()

            handle = scope.spawn(zoo.speak_much, 2_000, on="process", output=lambda text: listen(text))
            await until(lambda: heard)
            pid = next(member.pid for member in scope.members() if member.pid)
            assert pid is not None
            await until(lambda: procfs.read_text(f"/proc/{pid}/wchan") in (b"pipe_write", b"anon_pipe_write", b"0"))
            assert len(heard) == 1
            gate.set()
            await handle
            lines = "".join(heard).splitlines()
            assert [int(line) for line in lines] == list(range(2_000))

    run(main)


def test_a_listener_that_refuses_ends_the_call_with_its_error(host: ProcessHost) -> None:
    async def main() -> None:
        def refuse(text: str) -> None:
            raise LookupError("too much")

        async with Scope("tool", processes=host) as scope:
            with pytest.raises(LookupError, match="too much"):
                await scope.child("call", grace_s=0).open().spawn(zoo.speak_much, 10_000, on="process", output=refuse)

    run(main)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_dies_with_the_host_that_is_killed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:

            async def main() -> None:
                scope = Scope("tool", processes=ProcessHost()).open()
                await scope.spawn(zoo.pid, on="process")
                (tmp_path / "idle").write_text(str(await scope.spawn(zoo.pid, on="process")))
                scope.spawn(zoo.swallow, str(tmp_path / "busy"), on="process")
                await asyncio.sleep(60)

            asyncio.run(main())
        finally:
            os._exit(1)
    try:
        await_condition(lambda: (tmp_path / "busy").exists() and (tmp_path / "busy").read_text() != "", "both run")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    pids = [int((tmp_path / name).read_text()) for name in ("idle", "busy")]
    await_condition(lambda: not any(map(alive, pids)), "both are gone")
