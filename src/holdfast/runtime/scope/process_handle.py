"""Process trees as members of a scope; a stop sends SIGTERM, and kills the whole tree after the grace period.

A `ProcessHandle` is a program that the scope started. A `ForeignHandle` is a program that foreign code started in the
scope.

Invariants
- The member is added before the program is started, and stays until the whole process tree is gone. This also holds if
  the start is cancelled: even if the caller is cancelled again, the member stays until the result of the kill is known.
- A scope waits for the program to end by itself, but not for its descendants, which are killed when the scope ends.
- Processes that could not be proven dead are reported to the running stop, and the stop's receipt names them.
- If a tree outlives the time limit of its kill, the kill continues; the receipt names the tree only if it outlives the
  stop.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from holdfast.errors import ScopeClosed
from holdfast.runtime.processes import procfs
from holdfast.runtime.scope.handle import Handle, Member, MemberKind, ScopeOwner
from holdfast.runtime.scope.program_adopter import program_adopter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.protocol.stopping import Abandoned
    from holdfast.runtime.process_host import Process
    from holdfast.runtime.processes.foreign_process import ForeignProcess, Owner
    from holdfast.runtime.processes.tree import TreeResult

__all__ = [
    "STRANGER",
    "UNHEARD",
    "ForeignHandle",
    "ProcessHandle",
    "boot_ticks",
    "foreign_programs",
    "kill_foreign",
    "look_soon",
    "may_have_started",
    "strangers",
]

UNHEARD = "processes started by foreign code (their kill did not report in time)"
"""Placeholder in a receipt for processes whose pids are unknown."""

STRANGER = "a process started by C code (its owner is unknown)"
"""Placeholder in a receipt for a process of unknown owner, whose name only the operator may see."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TOLD_S = 0.5
"""Time that a long stop reserves at its end for the report of its kill."""


class ProcessHandle(Handle[int]):
    """A member that is a program with all its descendants."""

    __slots__ = ("_attending", "_killing", "_outlived", "cut", "process", "processes_ended", "was_killed")

    kind: MemberKind = "process"

    def __init__(self, owner: ScopeOwner, name: str) -> None:
        super().__init__(owner, name)
        self.process: Process | None = None
        self.cut = False
        self.processes_ended = 1
        self.was_killed = False
        self._attending: asyncio.Task[None] | None = None
        self._killing: dict[asyncio.Task[None], None] = {}
        self._outlived: tuple[int, ...] = ()
        """Pids of the processes that were still alive at the time limit of the last kill."""

    async def take(self, process: Process) -> None:
        """Take over the program that was started.

        Raises:
            ScopeClosed: the scope was closed while the program was starting; the process tree was killed.
        """
        self.process = process
        self.name = process.name
        if self.done():
            await process.kill_tree()
            raise ScopeClosed(f"scope {self.owner.name!r} was closed while {process.name!r} was starting")
        self.owner.on_loop(self.attend)

    def release(self) -> None:
        """Release the program, which continues outside this scope. On the loop only."""
        if self._attending is not None:
            self._attending.cancel()
        self._end(None)

    def on_cut(self, ending: asyncio.Task[TreeResult]) -> None:
        """Handle a failed or cancelled start. Call this on the loop on which the program was started.

        Parameters:
            ending: task that kills the processes that were already started.
        """
        self.cut = True
        ending.add_done_callback(self._on_ending, context=contextvars.Context())

    def _on_ending(self, ending: asyncio.Task[TreeResult]) -> None:
        from holdfast.runtime.processes.tree import TreeResult

        if not ending.cancelled() and (error := ending.exception()) is not None:
            ending.get_loop().call_exception_handler(
                {
                    "message": f"failed to kill {self.name!r} after its start was cancelled",
                    "exception": error,
                    "task": ending,
                }
            )
            result = TreeResult(proven=False)
        else:
            result = TreeResult(proven=False) if ending.cancelled() else ending.result()
        self.owner.on_loop(self._after_cut, result)

    def _after_cut(self, result: TreeResult) -> None:
        if result.outcome != "gone" and not self.done():
            self.owner.report_unproven(self._named(result))
        self.owner.discard(self, None)

    def attend(self) -> None:
        """Watch the program until its whole tree is gone. On the loop only."""
        self._attending = self.owner.make_own_task(self._attention(), f"attend {self.name}")
        if self.due:
            self.owner.ask_late(self)

    async def _attention(self) -> None:
        process = self.process
        assert process is not None
        await process.wait()
        if not process.gone:
            self.owner.leave_behind(self)
        self._conclude(await process.wait_gone())

    def _conclude(self, result: TreeResult) -> None:
        """Record the final result of the tree. On the loop only."""
        self.processes_ended = max(1, result.found)
        self.was_killed = bool(result.killed)
        result = self._named(result)
        if result.outcome != "gone" and not self.done():
            self.owner.report_unproven(result)
        self._end(None if self.process is None else self.process.returncode)

    def _named(self, result: TreeResult) -> TreeResult:
        """Return the result; if it is unproven and names no processes, add the name of the tree."""
        if result.outcome == "gone" or result.survivors or result.unattributed:
            return result
        return replace(result, unattributed=(f"{self.name} (the reaper of its tree was lost)",))

    def _end(self, returncode: int | None) -> None:
        if self.settle(returncode, None if returncode is not None else self.stop_error("it was killed")):
            self.owner.discard(self, None)

    def ask(self) -> None:
        """Send SIGTERM to the tree, and kill it when the grace period is over."""
        self._kill(self.owner.grace_left_s)

    def overdue(self, grace: str) -> str:
        """Return in words why the member had to be forced."""
        return _ignored(grace)

    def force(self) -> None:
        """Kill the tree."""
        self._kill(0.0)

    def ask_again(self) -> None:
        """Do nothing, because the kill of a tree continues until the tree is dead."""

    def _kill(self, term_first_s: float) -> None:
        if self.process is not None and not self.done():
            killing = self.owner.make_own_task(self._kill_tree(self.process, term_first_s), f"kill {self.name}")
            self._killing[killing] = None
            killing.add_done_callback(self._killing.pop, context=contextvars.Context())

    async def _kill_tree(self, process: Process, term_first_s: float) -> None:
        self._outlived = (await process.kill_tree(term_first_s=term_first_s)).survivors

    def end_if_over(self) -> bool:
        """Record the member's end if the tree is gone, and return whether the tree is gone.

        Call this on the loop only, if the loop has not yet been notified of the end.
        """
        result = None if self.process is None else self.process.result
        if result is None:
            return False
        self._conclude(result)
        return True

    def abandon(self) -> Abandoned | None:
        """Stop waiting for the tree."""
        if self._attending is not None:
            self._attending.cancel()
        self.settle(None, self.stop_error("its process was not proven dead in time"))
        return None

    def unproven(self) -> TreeResult:
        """Return the known state of a tree whose end was not reported in time."""
        from holdfast.runtime.processes.tree import TreeResult

        if self.process is None:
            return TreeResult(unattributed=(f"{self.name} (it was being started)",), proven=False)
        if living := self.process.living() or procfs.living(self._outlived or (self.process.pid,)):
            return TreeResult(survivors=tuple(living), proven=False)
        return TreeResult(unattributed=(f"{self.name} (the end of its tree was not reported)",), proven=False)

    def snapshot(self) -> Member:
        """Return a snapshot of the member."""
        process = self.process
        return Member(
            kind="process",
            name=self.name,
            started_at=self.started_at,
            state="starting" if process is None else "stopping" if self.due else "running",
            pid=None if process is None else process.pid,
            count_processes=None if process is None else process.count,
        )


class ForeignHandle(Handle[None]):
    """A member that is a program started by foreign code, or an orphaned descendant of such a program."""

    __slots__ = ("_found_late", "process")

    kind: MemberKind = "process"
    is_foreign_program = True
    processes_ended = 1

    def __init__(self, owner: ScopeOwner, process: ForeignProcess) -> None:
        super().__init__(owner, process.name, adopted=True)
        self.process = process
        self._found_late = False

    @property
    def is_descendant(self) -> bool:
        """See `Handle.is_descendant`."""
        return self._found_late and self.process.is_orphan and not self.process.is_unnamed

    def attend(self) -> None:
        """Watch the program until it ends. Callable from any thread, after the member was added to the scope."""
        self._found_late = self.due
        self.process.on_end(self._on_end)
        if self._found_late:
            self.owner.on_loop(self._catch_up)

    def _catch_up(self) -> None:
        """Ask a program that is found during the grace period to stop, unless cleanup code has started it."""
        if self.process.started <= self.owner.asked_at_ticks:
            self.ask()

    def _on_end(self) -> None:
        self.owner.on_loop(self.end)

    def end(self) -> None:
        """Record that the program has ended. Call this on the loop only."""
        if self.settle(None, None):
            self.owner.discard(self, None)

    def ask(self) -> None:
        """Send SIGTERM."""
        self.process.signal(signal.SIGTERM)

    def overdue(self, grace: str) -> str:
        """Return in words why the member had to be forced."""
        return _ignored(grace)

    def ask_again(self) -> None:
        """Do nothing, because the stop kills all programs of foreign code together."""

    def end_if_over(self) -> bool:
        """Record the member's end if the program has ended, and return whether the program has ended.

        Call this on the loop only, if the loop has not yet been notified of the end.
        """
        if procfs.lives(self.process.pid, self.process.started):
            return False
        self.end()
        return True

    def abandon(self) -> Abandoned | None:
        """Stop waiting for the program."""
        self.settle(None, self.stop_error("its process was not proven dead in time"))
        return None

    def unproven(self) -> TreeResult:
        """Return a result that names the program as a survivor."""
        from holdfast.runtime.processes.tree import TreeResult

        return TreeResult(survivors=(self.process.pid,), proven=False)

    def snapshot(self) -> Member:
        """Return a snapshot of the member."""
        state = "stopping" if self.due else "running"
        return Member(
            kind="process",
            name=self.name,
            started_at=self.started_at,
            state=state,
            pid=self.process.pid,
            adopted=True,
            count_processes=self.process.count,
        )


def _ignored(grace: str) -> str:
    return f"ignored SIGTERM for {grace}"


def boot_ticks() -> float:
    """Return the current time in clock ticks since boot, the unit of process start times."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S


def may_have_started(owner: ScopeOwner) -> bool:
    """Return whether foreign code has started a program in the scope."""
    adopter = program_adopter()
    return adopter is not None and adopter.may_have_started(cast("Owner", owner))


def look_soon(loop: asyncio.AbstractEventLoop, since: float, tell: Callable[[int], object]) -> None:
    """Call ``tell`` on ``loop`` with the result of `strangers`; at once if no programs are adopted."""
    adopter = program_adopter()
    if adopter is None:
        tell(0)
    else:
        adopter.look_soon(loop, since, tell)


def strangers(since: float) -> int:
    """Return the number of live processes that may belong to a scope opened at ``since`` but cannot be attributed."""
    adopter = program_adopter()
    return 0 if adopter is None else adopter.strangers(since)


def foreign_programs(handles: Sequence[Handle[Any]]) -> list[ForeignHandle]:
    """Return the members that are programs of foreign code."""
    return [handle for handle in handles if isinstance(handle, ForeignHandle)]


async def kill_foreign(owner: ScopeOwner, handles: Sequence[ForeignHandle], left_s: float) -> int:
    """Kill all processes that foreign code started in the scope, even if all known processes have ended.

    Return the number of killed processes that are not members of the scope.

    Parameters:
        owner: scope whose processes are killed.
        handles: known programs of foreign code in the scope.
        left_s: remaining time of the stop, in seconds.
    """
    from holdfast.runtime.processes.tree import KILL_BOUND_S

    adopter = program_adopter()
    if adopter is None:  # then nothing was adopted
        return 0

    bound_s = max(KILL_BOUND_S, left_s - _TOLD_S)
    processes = [handle.process for handle in handles]
    result = await adopter.kill_trees(processes, cast("Owner", owner), bound_s)
    if result.outcome != "gone":
        roots = [one.process.pid for one in handles if procfs.lives(one.process.pid, one.process.started)]
        survivors = tuple(dict.fromkeys((*result.survivors, *roots)))
        named = survivors or result.unattributed
        unattributed = result.unattributed if named else (UNHEARD,)
        owner.report_unproven(replace(result, survivors=survivors, unattributed=unattributed))
    for handle in handles:  # stop waiting for these: each was searched for and is dead, or is named
        handle.end()
    return len(set(result.killed) - {process.pid for process in processes})
