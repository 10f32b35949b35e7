"""Faults of the runtime: interrupts, scopes, queues, threads and processes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS = (
    Mutant(
        name="lock in trigger",
        of="P1",
        breaks="a signal handler that triggers while its own thread triggers hangs the process",
        file="runtime/interrupt/interrupt.py",
        old="""
            if self._latch.setdefault(_CAUSE, entry) is not entry:
                return False
            self._spread(cause)
""",
        new="""
            with _triggering:
                if self._latch.setdefault(_CAUSE, entry) is not entry:
                    return False
                self._spread(cause)
""",
        also=(
            (
                '_FILE = "file"',
                """
_FILE = "file"
_triggering = allocate_lock()
""",
            ),
        ),
        tests=("tests/runtime/interrupt/test_interrupt.py", "tests/runtime/interrupt/test_interrupt_races.py"),
    ),
    Mutant(
        name="redelivery into clean-up",
        of="P1",
        breaks="an honest `finally: await close()` is cancelled repeatedly and never finishes",
        file="runtime/scope/stop.py",
        old="""
        self._ask_all(iter(first))
        self._follow(None)
""",
        new="""
        self._ask_all(iter(first))
        self._follow(None)
        self._loop.call_later(0.002, self._escalate)
""",
        tests=(
            "tests/host/test_stopping.py::test_clean_up_within_the_grace_is_left_alone",
            "tests/runtime/scope/test_scope.py",
        ),
    ),
    Mutant(
        name="our cancellation is not taken back",
        of="P1",
        breaks="the task that entered a scope is cancelled by it at a later, innocent await",
        file="runtime/scope/cancel_claim.py",
        old="""
                for _ in range(self.cancels):
                    task.uncancel()
""",
        new="                pass",
        tests=("tests/runtime/scope/test_scope.py", "tests/runtime/scope/test_scope_schedules.py"),
    ),
    Mutant(
        name="a thread that hangs is not replaced",
        of="P3",
        breaks="tools that never return exhaust the pool, and other sessions of the principal wait forever",
        file="runtime/scope/thread_handle.py",
        old="""
            stack = call.stack()
            call.abandon()
""",
        new="            stack = call.stack()",
        tests=("tests/runtime/scope/test_scope.py",),
    ),
    Mutant(
        name="a stop waits for what does not end",
        of="P3",
        breaks="a task that swallows its cancellation keeps the stop from ever answering",
        file="runtime/scope/stop.py",
        old="""
        elif now < self._end_at:
            self._escalate()
""",
        new="""
        elif now:
            self._escalate()
""",
        tests=("tests/runtime/scope/test_scope.py",),
    ),
    Mutant(
        name="an unproven end is heard, not told",
        of="P3",
        breaks="the receipt reports gone although the kill could not prove that the whole tree is dead",
        file="runtime/scope/process_handle.py",
        old="""
        if result.outcome != "gone" and not self.done():
            self.owner.report_unproven(result)
        self._end(None if self.process is None else self.process.returncode)
""",
        new="        self._end(None if self.process is None else self.process.returncode)",
        tests=("tests/runtime/scope/test_scope_processes.py",),
    ),
    Mutant(
        name="named before its time is over",
        of="P3",
        breaks="a program that dies slowly on a busy machine is named a survivor while the stop has time left",
        file="runtime/scope/process_handle.py",
        old="        self._outlived = (await process.kill_tree(term_first_s=term_first_s)).survivors",
        new="        self._conclude(await process.kill_tree(term_first_s=term_first_s))",
        tests=("tests/runtime/scope/test_scope_processes.py",),
    ),
    Mutant(
        name="who lost its first thread is dead",
        of="P3",
        breaks="a program whose main thread has ended runs on in others, is never killed, and the receipt reports gone",
        file="runtime/processes/procfs.py",
        old='        return self.state in "ZX" and self.threads <= 1',
        new='        return self.state in "ZX"',
        tests=("tests/runtime/test_process_host.py", "tests/runtime/adoption/test_processes.py"),
    ),
    Mutant(
        name="a stopped zygote stays stopped",
        of="P3",
        breaks="after one SIGSTOP, no stop can kill programs that foreign code started",
        file="runtime/processes/zygote_link.py",
        old="        procfs.strike(self.pid, signal.SIGCONT, lambda stat:",
        new="        procfs.strike(self.pid, 0, lambda stat:",
        tests=(
            "tests/runtime/adoption/test_processes.py::test_a_kill_is_done_though_the_zygote_that_shall_do_it_is_stopped_or_killed",
        ),
    ),
    Mutant(
        name="a kill is asked for once",
        of="P3",
        breaks="a zygote that is killed during a kill loses the kill, and the programs survive",
        file="runtime/adoption/processes.py",
        old="_AGAIN_S = (0.01, 0.1)",
        new="_AGAIN_S: tuple[float, ...] = ()",
        tests=(
            "tests/runtime/adoption/test_processes.py::test_a_kill_is_done_though_the_zygote_that_shall_do_it_is_stopped_or_killed",
        ),
    ),
    Mutant(
        name="a late return counts",
        of="P1",
        breaks="an abandoned thread still delivers its result into a run that is over",
        file="runtime/scope/handle.py",
        old="""
        if self._done:
            return False
        self._result = result
""",
        new="        self._result = result",
        tests=("tests/runtime/scope/test_scope.py", "tests/runtime/scope/test_scope_schedules.py"),
    ),
    Mutant(
        name="unbounded queue",
        of="P9",
        breaks="a slow consumer lets memory grow without bound",
        file="runtime/queues/bounded.py",
        old="        return self._maxsize - len(self._items) - len(self._putters.promised)",
        new="        return self._maxsize",
        tests=(
            "tests/runtime/queues/test_bounded.py::test_items_leave_in_the_order_they_came_in_and_never_exceed_the_bound",
        ),
    ),
    Mutant(
        name="what was promised is taken away",
        of="P5 P13",
        breaks="a consumer woken for an item finds it gone, and fails or takes one meant for another",
        file="runtime/queues/fair.py",
        old="""
        if self._free() < 0:
            self._line.take_back()
            self._call_hand_out()
        self._tell_if_over()
        return list(items)
""",
        new="""
        self._tell_if_over()
        return list(items)
""",
        tests=("tests/runtime/queues/test_fair.py",),
    ),
    Mutant(
        name="who comes late takes what was promised",
        of="P13",
        breaks="a task that did not queue takes the item that another one was woken for",
        file="runtime/queues/bounded.py",
        old="""
        check_interrupt()
        while True:
            if self._free() > 0:
                break
""",
        new="""
        check_interrupt()
        while True:
            if self._items:
                break
""",
        tests=("tests/runtime/queues/test_bounded.py",),
    ),
    Mutant(
        name="a drained queue keeps its promises",
        of="P5",
        breaks="a consumer woken for a drained item fails, or waits beside the next one",
        file="runtime/queues/bounded.py",
        old="        self._getters.take_back()",
        new="        pass",
        tests=("tests/runtime/queues/test_bounded.py",),
    ),
    Mutant(
        name="a shorter stop stays with the parent",
        of="P3",
        breaks="the second, harder stop waits for the grace of the first, which the scopes inside still have",
        file="runtime/scope/stop.py",
        old="""
        self._shorten_children()
        if self.phase == "grace" and self._force_at <= now:
""",
        new="""
        if self.phase == "grace" and self._force_at <= now:
""",
        tests=("tests/runtime/scope/test_scope.py", "tests/runtime/scope/test_scope_schedules.py"),
    ),
    Mutant(
        name="a promise dies with who had it",
        of="P5",
        breaks="an item whose consumer was cancelled wakes no other consumer: they wait beside it",
        file="runtime/queues/wait_queue.py",
        old="""
            if self.redeem(waiter):
                pass_on()
            raise
""",
        new="""
            self.redeem(waiter)
            raise
""",
        tests=("tests/runtime/queues/test_bounded.py", "tests/runtime/queues/test_fair.py"),
    ),
    Mutant(
        name="only waiting readers count",
        of="P7",
        breaks="a reader that is busy when the last events are published never gets them",
        file="runtime/queues/broadcast.py",
        old="""
        if self._readers:
            self._keep(items)
""",
        new="""
        if self._waiting:
            self._keep(items)
""",
        tests=("tests/runtime/queues/test_broadcast.py",),
    ),
    Mutant(
        name="a gap is not told",
        of="P7",
        breaks="a reader that was too slow silently misses events",
        file="runtime/queues/broadcast.py",
        old="""
                self._has_seen_everything()
            return gap
""",
        new="""
                self._has_seen_everything()
            return self._take(max_items)
""",
        tests=("tests/runtime/queues/test_broadcast.py",),
    ),
    Mutant(
        name="reaper that is no subreaper",
        of="P3",
        breaks="a grandchild that left its session and parent survives every stop",
        file="runtime/processes/reaper.py",
        old="    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:",
        new="    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) != 0:",
        tests=("tests/runtime/test_process_host.py::test_nothing_of_a_hostile_tree_outlives_its_kill",),
    ),
    Mutant(
        name="kill only the group",
        of="P3",
        breaks="the program dies, and the programs it started in their own sessions survive",
        file="runtime/processes/reaper.py",
        old="""
        frontier = procfs.children_once(os.getpid())
        seen
""",
        new="""
        frontier = [pid for pid in procfs.children_once(os.getpid()) if pid == self._main]
        seen
""",
        tests=("tests/runtime/test_process_host.py::test_nothing_of_a_hostile_tree_outlives_its_kill",),
    ),
    Mutant(
        name="the tree outlives its host",
        of="P3",
        breaks="programs of tools keep running after the server was killed",
        file="runtime/processes/reaper.py",
        old="        self._report_at = None\n        self._kill_now()",
        new="        self._report_at = None",
        tests=("tests/runtime/test_process_host.py::test_nothing_outlives_a_host_that_is_killed",),
    ),
    Mutant(
        name="wait for the end of the pipe",
        of="P3",
        breaks="a command is not over while a stray grandchild holds its output open",
        file="runtime/processes/process.py",
        old="        return await self.tree.exited.wait()",
        new="""
        code = await self.tree.exited.wait()
        await self.tree.gone.wait()
        return code
""",
        tests=(
            "tests/runtime/test_process_host.py::test_a_stray_that_holds_the_pipe_delays_neither_the_wait_nor_the_kill",
        ),
    ),
)
