"""Programs and isolated functions in a scope end with it, as trees; its receipt says what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Interrupted, ProcessEnded, ScopeClosed
from holdfast.protocol.stopping import Cause, StopCounts
from holdfast.runtime.adoption import processes as adoption_processes
from holdfast.runtime.adoption.adopted_programs import AdoptedPrograms
from holdfast.runtime.adoption.kill_passes import KillPasses
from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.process_host import PIPE, Process, TreeResult, process_host
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.foreign_process import ForeignProcess, Owner
from holdfast.runtime.processes.killer import Killer
from holdfast.runtime.processes.tree import ReaperTree
from holdfast.runtime.processes.zygote_link import ZygoteLink
from holdfast.runtime.scope import stop as stopping
from holdfast.runtime.scope.process_handle import UNHEARD
from holdfast.runtime.scope.scope import Scope, current_scope

HOSTILE = ["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo ready; sleep 1000"]
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
if importlib.util.find_spec("uvloop") is not None:
    LOOPS.append(importlib.import_module("uvloop").new_event_loop)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return bool(procfs.living([pid]))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


# Programs


def test_leaving_waits_for_the_program_and_kills_what_it_left_running(tmp_path: Path) -> None:
    async def main() -> None:
        async with Scope("call") as scope:
            process = await scope.process(
                ["sh", "-c", f"setsid sleep 1000 & echo $! > {tmp_path}/pid; echo said; exit 3"], stdout=PIPE
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"said\n"
        assert process.returncode == 3
        assert not alive(int((tmp_path / "pid").read_text()))
        assert scope.receipt is not None
        assert scope.receipt.outcome == "gone"
        assert scope.receipt.stopped == StopCounts(programs=1, processes=1)

    run(main)


def test_a_program_that_ends_with_all_it_started_leaves_the_scope_by_itself() -> None:
    async def main() -> None:
        async with Scope("call") as scope:
            process = await scope.process(["true"])
            assert await process.wait() == 0
            await until(lambda: not scope.members())
        assert scope.receipt is None

    run(main)


def test_a_program_may_be_given_more_grace_than_poll_can_wait() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        script = "trap 'sleep 0.2; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
        program = await scope.process(["sh", "-c", script], stdout=PIPE)
        assert program.stdout is not None
        assert await program.stdout.readline() == b"ready\n"
        receipt = await scope.stop("enough", grace_s=365 * 86_400)
        assert (receipt.outcome, receipt.forced) == ("gone", ())
        assert program.returncode == 7

    run(main)


def test_a_program_whose_end_the_loop_has_not_heard_of_is_not_named_as_forced() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        program = await scope.process(["sleep", "1000"], name="meek")
        os.kill(program.pid, signal.SIGTERM)
        while not program.gone:  # the loop is blocked: another thread hears of the end
            time.sleep(0.001)
        receipt = await scope.stop("enough", grace_s=0)
        assert (receipt.outcome, receipt.stopped.programs, receipt.forced) == ("gone", 1, ())
        assert program.returncode == -signal.SIGTERM

    run(main)


def test_a_stop_asks_and_then_kills_the_whole_tree() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        meek = await scope.process(["sleep", "1000"], name="meek")
        hostile = await scope.process(HOSTILE, name="hostile", stdout=PIPE)
        assert hostile.stdout is not None
        assert await hostile.stdout.readline() == b"ready\n"
        assert {(member.kind, member.name, member.pid) for member in scope.members()} == {
            ("process", "meek", meek.pid),
            ("process", "hostile", hostile.pid),
        }
        scope.request_stop(Cause(kind="user"), grace_s=1000)
        await meek.wait_gone()
        receipt = await scope.stop("enough", grace_s=0)
        assert receipt.outcome == "gone"
        assert receipt.stopped.programs == 2
        assert receipt.stopped.processes >= 3
        assert receipt.forced == ("hostile",)
        assert meek.returncode == -signal.SIGTERM
        assert hostile.returncode == -signal.SIGKILL
        assert meek.gone
        assert hostile.gone

    run(main)


SHY = ["sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"]


def has_processes(count: Callable[[int], int], number: int) -> bool:
    """Whether a program has this number of processes or more."""
    return count(number) == number


@pytest.mark.parametrize("grace_s", [0, 30])
def test_a_receipt_counts_programs_and_their_processes_in_child_scopes_too(grace_s: float) -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        for owner in (scope, scope.child("part").open()):
            program = await owner.process(SHY)
            await until(functools.partial(has_processes, program.count, 3))
        receipt = await scope.stop("enough", grace_s=grace_s)
        assert receipt.outcome == "gone"
        assert receipt.stopped == StopCounts(programs=2, processes=6)

    run(main)


def test_a_receipt_counts_the_processes_that_a_program_starts_while_it_is_asked_to_end() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        script = "trap 'setsid sleep 1000 & echo started' TERM; echo ready; while :; do sleep 0.05; done"
        program = await scope.process(["sh", "-c", script], stdout=PIPE)
        assert program.stdout is not None
        assert await program.stdout.readline() == b"ready\n"
        scope.request_stop(Cause(kind="user"), grace_s=1000)
        assert await program.stdout.readline() == b"started\n"
        receipt = await scope.stop("enough", grace_s=0)
        assert receipt.outcome == "gone"
        assert receipt.stopped.programs == 1
        assert receipt.stopped.processes >= 2

    run(main)


async def stubborn_program(scope: Scope) -> Process:
    """A running program that ignores SIGTERM."""
    program = await scope.process(HOSTILE, name="stubborn", stdout=PIPE)
    assert program.stdout is not None
    assert await program.stdout.readline() == b"ready\n"
    return program


@pytest.mark.parametrize("asked_again", [True, False], ids=["asked again", "not asked again before the program ends"])
@pytest.mark.parametrize("inside", [True, False], ids=["child scope", "same scope"])
def test_a_task_that_waits_for_a_stubborn_program_is_not_named_as_forced(
    inside: bool, asked_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not asked_again:
        monkeypatch.setattr(stopping, "_FIRST_ESCALATION_S", 60.0)

    async def main() -> None:
        scope = Scope("call", parent=None, grace_s=0.2).open()
        ready = asyncio.Event()

        async def in_a_scope() -> None:
            async with Scope("inner"):
                await waits()

        async def waits() -> None:
            own = current_scope()
            assert own is not None
            program = await stubborn_program(own)
            ready.set()
            try:
                await program.wait()
            finally:
                await program.wait_gone()

        scope.spawn(in_a_scope() if inside else waits(), name="waits")
        await ready.wait()
        receipt = await scope.stop("enough")
        assert receipt.outcome == "gone"
        assert receipt.forced == ("stubborn",)
        assert receipt.force_reasons == ("ignored SIGTERM for 0.2 s",)
        assert (receipt.stopped.tasks, receipt.stopped.programs) == (1, 1)

    run(main)


@pytest.mark.parametrize("waiter", [False, True], ids=["alone", "beside a task that waits for it"])
def test_a_program_that_its_reaper_kills_before_the_loop_hears_of_the_end_is_named_as_forced(waiter: bool) -> None:
    async def main() -> None:
        scope = Scope("call", parent=None, grace_s=0.2).open()
        heedless = "trap 'echo asked' TERM; echo ready; while :; do sleep 1000 & wait; done"
        program = await scope.process(["sh", "-c", heedless], name="stubborn", stdout=PIPE)
        assert program.stdout is not None
        assert await program.stdout.readline() == b"ready\n"

        async def waits() -> None:
            try:
                await program.wait()
            finally:
                await program.wait_gone()

        if waiter:
            scope.spawn(waits(), name="waits")
            await asyncio.sleep(0)
        stop = asyncio.create_task(scope.stop("enough"))
        assert await program.stdout.readline() == b"asked\n"
        limit = time.monotonic() + 30
        while not program.gone and time.monotonic() < limit:
            time.sleep(0.005)
        receipt = await stop
        assert (receipt.forced, receipt.force_reasons) == (("stubborn",), ("ignored SIGTERM for 0.2 s",))

    run(main)


def test_a_task_that_outlasts_the_stubborn_program_beside_it_is_named_too() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None, grace_s=0.2).open()
        program = await stubborn_program(scope)

        async def outlasts() -> None:
            while not program.gone:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.001)
            for _ in range(50):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)

        scope.spawn(outlasts(), name="outlasts")
        await asyncio.sleep(0)
        receipt = await scope.stop("enough")
        assert dict(zip(receipt.forced, receipt.force_reasons, strict=True)) == {
            "stubborn": "ignored SIGTERM for 0.2 s",
            "outlasts": "still running 0.2 s after the stop began",
        }

    run(main)


def test_a_stop_without_a_grace_period_says_so_of_each_member() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        await stubborn_program(scope)
        receipt = await scope.stop("enough", grace_s=0)
        assert (receipt.forced, receipt.force_reasons) == (("stubborn",), ("no grace period",))

    run(main)


def test_a_shorter_stop_kills_at_once() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        hostile = await scope.process(HOSTILE, name="hostile", stdout=PIPE)
        assert hostile.stdout is not None
        assert await hostile.stdout.readline() == b"ready\n"
        scope.request_stop(Cause(kind="user"), grace_s=1000)
        await until(lambda: scope.state == "stopping")
        receipt = await scope.stop(grace_s=0)
        assert receipt.outcome == "gone"
        assert receipt.forced == ("hostile",)

    run(main)


def test_a_program_is_not_started_in_a_scope_that_stops() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None).open()
        await scope.stop()
        with pytest.raises(ScopeClosed):
            await scope.process(["true"])

    run(main)


def test_a_program_that_cannot_be_started_leaves_no_member() -> None:
    async def main() -> None:
        async with Scope("call") as scope:
            with pytest.raises(FileNotFoundError):
                await scope.process(["/nowhere/program"])
            assert scope.members() == ()

    run(main)


def test_a_stop_while_a_program_is_started_leaves_nothing() -> None:
    async def main() -> None:
        for round_ in range(10):
            scope = Scope("call", parent=None, abandon_after_s=20).open()
            started: list[int] = []

            async def tool(scope: Scope = scope, started: list[int] = started) -> None:
                for _ in range(5):
                    process = await scope.process(HOSTILE)
                    started.append(process.pid)

            scope.spawn(tool())
            await asyncio.sleep(0.002 * round_)
            receipt = await scope.stop("enough", grace_s=0)
            assert receipt.outcome == "gone"
            assert not [pid for pid in started if alive(pid)]

    run(main)


def hold_zygote(monkeypatch: pytest.MonkeyPatch) -> int:
    """Start the zygote and stop it: nothing is started until it is continued."""
    monkeypatch.setattr(ZygoteLink, "wake", lambda _: None)
    host = process_host()
    host.start()
    zygote = host._zygote
    assert zygote is not None
    os.kill(zygote.pid, signal.SIGSTOP)
    return zygote.pid


def test_a_stop_waits_for_a_start_that_was_cut_though_who_started_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        zygote = hold_zygote(monkeypatch)
        try:
            scope = Scope("call", parent=None, abandon_after_s=20).open()
            starter = scope.spawn(scope.process(["sleep", "1000"]))
            await until(lambda: any(member.state == "starting" for member in scope.members()))
            stop = asyncio.ensure_future(scope.stop("enough", grace_s=0))
            await until(starter.done)  # cancelled a second time while its program is killed
            for _ in range(5):
                await asyncio.sleep(0)
            assert not stop.done()
            assert [member.kind for member in scope.members()] == ["process"]
        finally:
            os.kill(zygote, signal.SIGCONT)
        receipt = await stop
        assert (receipt.outcome, receipt.stopped.processes) == ("gone", 1)

    run(main)


def test_a_start_that_is_not_over_at_the_end_of_a_stop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        zygote = hold_zygote(monkeypatch)
        try:
            scope = Scope("call", parent=None, abandon_after_s=0.3).open()
            starter = scope.spawn(scope.process(["sleep", "1000"], name="sleeper"))
            await until(lambda: any(member.state == "starting" for member in scope.members()))
            receipt = await scope.stop("enough", grace_s=0)
            assert starter.done()
            assert receipt.outcome == "unknown"
            assert receipt.unattributed == ("sleeper (it was being started)",)
        finally:
            os.kill(zygote, signal.SIGCONT)
        await until(lambda: not process_host()._endings)

    run(main)


def hard_to_kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[Process], None]:
    """Kills run over their bound: what is returned lets a tree die in the end."""

    async def kill_tree(process: Process, *, term_first_s: float = 0.0) -> TreeResult:
        return TreeResult(survivors=(process.pid,), proven=False)

    monkeypatch.setattr(Process, "kill_tree", kill_tree)
    return lambda process: process.tree.tell(("kill", 0.0, 2.0))


def test_a_tree_that_outlives_the_bound_of_its_kill_has_all_the_time_of_the_stop_to_die(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        scope = Scope("call", parent=None, abandon_after_s=20).open()
        process = await scope.process(["sleep", "1000"])
        end = hard_to_kill(monkeypatch)
        stop = asyncio.ensure_future(scope.stop("enough", grace_s=0))
        await until(lambda: scope.interrupt.cause is not None)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not stop.done()
        end(process)
        receipt = await stop
        assert (receipt.outcome, receipt.survivors, receipt.stopped.processes) == ("gone", (), 1)

    run(main)


def test_a_tree_that_outlives_the_stop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        scope = Scope("call", parent=None, abandon_after_s=0.05).open()
        process = await scope.process(["sleep", "1000"])
        end = hard_to_kill(monkeypatch)
        receipt = await scope.stop("enough", grace_s=0)
        assert alive(process.pid)
        assert (receipt.outcome, receipt.survivors) == ("unknown", (process.pid,))
        end(process)
        await process.wait_gone()

    run(main)


def test_a_receipt_names_what_a_killed_reaper_left_though_the_program_had_ended_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        scope = Scope("call", parent=None, abandon_after_s=20).open()
        process = await scope.process(["sh", "-c", f"setsid sleep 1000 & echo $! > {tmp_path}/pid"])
        await process.wait()
        stray = int((tmp_path / "pid").read_text())
        tree = process.tree
        assert isinstance(tree, ReaperTree)
        await until(lambda: tree.gone._callbacks)  # only the stray is waited for now
        with monkeypatch.context() as deaf:
            deaf.setattr(ReaperTree, "tell", lambda *_: None)
            stop = asyncio.ensure_future(scope.stop("enough", grace_s=0))
            await until(lambda: tree._answers)
        tree.finish(TreeResult(survivors=(stray,), proven=False))  # as when the zygote tells of a lost reaper
        receipt = await stop
        assert (receipt.outcome, receipt.survivors) == ("unknown", (stray,))
        tree.tell(("kill", 0.0, 2.0))
        await until(lambda: not alive(stray))

    run(main)


def test_a_stray_that_outlives_the_stop_is_named_though_its_program_had_ended_and_no_kill_has_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def main() -> None:
        scope = Scope("call", parent=None, abandon_after_s=0.05).open()
        process = await scope.process(["sh", "-c", f"setsid sleep 1000 & echo $! > {tmp_path}/pid"])
        await process.wait()
        stray = int((tmp_path / "pid").read_text())
        with monkeypatch.context() as deaf:
            deaf.setattr(ReaperTree, "tell", lambda *_: None)
            receipt = await scope.stop("enough", grace_s=0)
        assert (receipt.outcome, receipt.survivors, receipt.unattributed) == ("unknown", (stray,), ())
        process.tree.tell(("kill", 0.0, 2.0))
        await until(lambda: not alive(stray))

    run(main)


def test_a_receipt_that_proves_nothing_says_of_what() -> None:
    async def main() -> None:
        scope = Scope("call", parent=None, abandon_after_s=20).open()
        process = await scope.process(["sleep", "1000"])
        tree = process.tree
        assert isinstance(tree, ReaperTree)
        tree.finish(TreeResult(proven=False))  # as when zygote and reaper were killed
        receipt = await scope.stop("enough", grace_s=0)
        assert (receipt.outcome, receipt.survivors) == ("unknown", ())
        assert receipt.unattributed == ("sleep (the reaper of its tree was lost)",)
        tree.tell(("kill", 0.0, 2.0))
        await until(lambda: not alive(process.pid))

    run(main)


def test_a_tree_that_was_lost_before_any_stop_is_named_at_the_end_of_its_scope() -> None:
    async def main() -> None:
        async with Scope("call") as scope:
            process = await scope.process(["sleep", "1000"])
            tree = process.tree
            assert isinstance(tree, ReaperTree)
            tree.finish(TreeResult(survivors=(process.pid,), proven=False))  # as when its reaper was killed
            await until(lambda: not scope.members())
        assert scope.receipt is not None
        assert (scope.receipt.outcome, scope.receipt.survivors) == ("unknown", (process.pid,))
        tree.tell(("kill", 0.0, 2.0))
        await until(lambda: not alive(process.pid))

    run(main)


# Isolated functions


def double(value: int) -> int:
    print("not an answer")
    return value * 2


def fail(text: str) -> None:
    raise ValueError(text)


def vanish() -> None:
    os._exit(7)


def uncarried() -> object:
    return threading.Lock()


def block(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stray = subprocess.Popen(["setsid", "sleep", "1000"])
    Path(path).write_text(f"{os.getpid()} {stray.pid}")
    time.sleep(1000)


def fork_and_return() -> str:
    if os.fork() == 0:
        time.sleep(1000)
    return "answered"


def test_a_function_on_a_process_answers_or_raises() -> None:
    async def main() -> None:
        async with Scope("call") as scope:
            assert await scope.spawn(double, 21, on="process") == 42
            assert await scope.spawn(fork_and_return, on="process") == "answered"
        failing = Scope("call")
        with pytest.raises(ValueError, match="broken"):
            async with failing:
                failing.spawn(fail, "broken", on="process")

    run(main)


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (vanish, ProcessEnded, "exited with code 7 before it answered"),
        (uncarried, ProcessEnded, "failed to pickle what it returned"),
        (lambda: None, TypeError, "defined in the main program|cannot be pickled"),
    ],
    ids=["vanish", "uncarried", "lambda"],
)
def test_a_function_that_cannot_answer_is_an_error_that_says_why(
    fn: Callable[[], object], error: type[Exception], match: str
) -> None:
    async def main() -> None:
        scope = Scope("call")
        with pytest.raises(error, match=match):
            async with scope:
                scope.spawn(fn, on="process", name="tool")

    run(main)


def test_an_isolated_function_dies_with_its_scope_and_with_its_handle(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "pids"

        async def started() -> list[int]:
            await until(lambda: path.exists() and len(path.read_text().split()) == 2)
            pids = [int(pid) for pid in path.read_text().split()]
            path.unlink()
            return pids

        scope = Scope("call", parent=None, grace_s=0).open()
        handle = scope.spawn(block, str(path), on="process")
        pids = await started()
        handle.interrupt.trigger("only this one")
        with pytest.raises(Interrupted, match="only this one"):
            await handle
        assert not [pid for pid in pids if alive(pid)]
        assert scope.state == "open"
        scope.spawn(block, str(path), on="process")
        pids = await started()
        receipt = await scope.stop("enough")
        assert receipt.outcome == "gone"
        assert not [pid for pid in pids if alive(pid)]

    run(main)


# Programs of foreign code


def test_programs_of_foreign_code_end_with_the_scope() -> None:
    async def main() -> None:
        with install(asyncio.get_running_loop()):
            scope = Scope("call", parent=None).open()
            pids: list[int] = []
            kept: list[asyncio.subprocess.Process] = []

            async def tool() -> None:
                process = await asyncio.create_subprocess_exec(*HOSTILE, stdout=PIPE)
                assert process.stdout is not None
                # From this line on it ignores SIGTERM.
                assert await process.stdout.readline() == b"ready\n"
                kept.append(process)
                pids.append(process.pid)
                await process.wait()

            def blocking_tool() -> int:
                with subprocess.Popen(HOSTILE, stdout=PIPE) as process:
                    assert process.stdout is not None
                    assert process.stdout.readline() == b"ready\n"
                    pids.append(process.pid)
                    return process.wait()

            scope.spawn(tool())
            scope.spawn(blocking_tool, on="thread")
            await until(lambda: len(pids) == 2)
            assert {member.pid for member in scope.members() if member.adopted and member.kind == "process"} >= set(
                pids
            )
            programs = {member.pid: member.count_processes for member in scope.members() if member.pid in pids}
            for count in programs.values():
                assert count is not None
                await until(functools.partial(has_processes, count, 2))
            receipt = await scope.stop("enough", grace_s=0)
            assert receipt.outcome == "gone"
            assert receipt.abandoned == ()
            assert [count(100) for count in programs.values() if count is not None] == [0, 0]
            assert receipt.stopped.programs >= 2
            assert receipt.stopped.processes >= 4  # with at least one process each that they started
            assert not [pid for pid in pids if alive(pid)]
            # Its exit status is still its starter's.
            assert await kept[0].wait() == -signal.SIGKILL

    run(main)


def test_processes_that_the_host_kills_itself_during_a_stop_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that is preempted after its first strike leaves strays to the host, whose scope accepts none any more."""

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            scope = Scope("call", parent=None).open()
            program = await scope.spawn(asyncio.create_subprocess_exec(*HOSTILE, stdout=PIPE))
            assert program.stdout is not None
            assert await program.stdout.readline() == b"ready\n"
            await until(lambda: len(procfs.descendants(program.pid)) == 2)
            strays = procfs.descendants(program.pid)
            submit = KillPasses._submit

            def late(self: KillPasses, killer: Killer) -> None:
                os.kill(program.pid, signal.SIGKILL)
                while procfs.living(strays):
                    time.sleep(0.001)
                submit(self, killer)

            monkeypatch.setattr(KillPasses, "_submit", late)
            receipt = await scope.stop("enough", grace_s=0)
            assert (receipt.outcome, receipt.stopped.programs, receipt.stopped.processes) == ("gone", 1, 3)

    run(main)


def test_a_stop_waits_for_what_the_kill_of_foreign_code_says_though_its_program_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        answer = asyncio.Event()

        async def kill_trees(roots: Sequence[ForeignProcess], *, owner: Owner, bound_s: float) -> TreeResult:
            await answer.wait()  # they end meanwhile, as they were asked to
            return TreeResult(unattributed=("1 stray",))

        monkeypatch.setattr(adoption_processes, "kill_trees", kill_trees)
        with install(asyncio.get_running_loop()):
            scope = Scope("call", parent=None, abandon_after_s=20).open()
            kept: list[asyncio.subprocess.Process] = []

            async def tool() -> None:
                process = await asyncio.create_subprocess_exec("sleep", "1000")
                kept.append(process)
                await process.wait()

            starter = scope.spawn(tool())
            await until(lambda: kept)
            stop = asyncio.ensure_future(scope.stop("enough", grace_s=0))
            await until(lambda: starter.done() and not scope.members())
            for _ in range(5):
                await asyncio.sleep(0)
            assert not stop.done()
            answer.set()
            receipt = await stop
            assert (receipt.outcome, receipt.unattributed) == ("unknown", ("1 stray",))
            await kept[0].wait()

    run(main)


@pytest.mark.parametrize("abandon_after_s", [0.05, 20])
def test_a_program_of_foreign_code_is_named_when_its_kill_knows_nothing(
    monkeypatch: pytest.MonkeyPatch, abandon_after_s: float
) -> None:
    async def main() -> None:
        async def kill_trees(roots: Sequence[ForeignProcess], *, owner: Owner, bound_s: float) -> TreeResult:
            if abandon_after_s < 1:
                await asyncio.Event().wait()
            return TreeResult(proven=False)

        monkeypatch.setattr(adoption_processes, "kill_trees", kill_trees)
        with install(asyncio.get_running_loop()):
            scope = Scope("call", parent=None, abandon_after_s=abandon_after_s).open()
            kept: list[asyncio.subprocess.Process] = []

            async def tool() -> None:
                hard = ["sh", "-c", "trap '' TERM; echo ready; sleep 1000"]
                kept.append(await asyncio.create_subprocess_exec(*hard, stdout=asyncio.subprocess.PIPE))
                assert kept[0].stdout is not None
                await kept[0].stdout.readline()

            await scope.spawn(tool())
            receipt = await scope.stop("enough", grace_s=0)
            assert (receipt.outcome, receipt.survivors) == ("unknown", (kept[0].pid,))
            assert receipt.unattributed == (() if abandon_after_s > 1 else (UNHEARD,))
            kept[0].kill()
            await kept[0].wait()

    run(main)


def test_a_stray_of_foreign_code_does_not_outlive_the_scope(tmp_path: Path) -> None:
    async def main() -> None:
        with install(asyncio.get_running_loop()):
            async with Scope("call", parent=None) as scope:
                shell = await asyncio.create_subprocess_exec(
                    "sh", "-c", f"setsid sleep 1000 & echo $! > {tmp_path}/pid"
                )
                assert await shell.wait() == 0
            assert not alive(int((tmp_path / "pid").read_text()))
            assert scope.receipt is not None
            assert scope.receipt.outcome == "gone"

    run(main)


def test_a_stop_takes_no_dead_program_for_a_survivor_because_nobody_told_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        with install(asyncio.get_running_loop()):
            scope = Scope("call", parent=None, abandon_after_s=1000).open()
            kept: list[subprocess.Popen[bytes]] = []

            async def tool() -> None:
                kept.append(subprocess.Popen(["sleep", "1000"]))

            def deaf(adoption: Any, process: ForeignProcess, _: object) -> None:
                adoption._let_go(process)

            await scope.spawn(tool())
            monkeypatch.setattr(AdoptedPrograms, "_end", deaf)
            async with asyncio.timeout(50):  # far less than the stop may take
                receipt = await scope.stop("enough", grace_s=0)
            assert (receipt.outcome, receipt.survivors, receipt.stopped.processes) == ("gone", (), 1)
            assert kept[0].wait() < 0

    run(main)


@pytest.mark.parametrize("owned", [True, False], ids=["owned", "foreign"])
@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_loop_that_is_held_up_during_a_stop_leaves_no_program_unproven(
    new_loop: Callable[[], asyncio.AbstractEventLoop], owned: bool
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with install(loop):
            scope = Scope("call", parent=None).open()
            kept: list[asyncio.subprocess.Process] = []
            pids: list[int] = []

            async def tool() -> None:
                argv = ["sh", "-c", "trap '' TERM; echo; sleep 1000 & wait; wait"]
                if owned:
                    process = await scope.process(argv, stdout=PIPE)
                    assert process.stdout is not None
                    await process.stdout.readline()
                    pids.append(process.pid)
                else:
                    foreign = await asyncio.create_subprocess_exec(*argv, stdout=PIPE)
                    assert foreign.stdout is not None
                    await foreign.stdout.readline()
                    kept.append(foreign)
                    pids.append(foreign.pid)

            await scope.spawn(tool())
            stop = asyncio.ensure_future(scope.stop("enough", grace_s=0.1, abandon_after_s=2))
            await asyncio.sleep(0)
            loop.call_soon(time.sleep, 2.2)  # longer than the whole stop may take
            receipt = await stop
            assert (receipt.outcome, receipt.survivors) == ("gone", ())
            assert not alive(pids[0])
            for foreign in kept:
                await foreign.wait()

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(bounded())
