"""Process trees as the host sees them; a reaper or, if reapers are not supported, a process group holds the tree."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import marshal
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.runtime.oneshot import Oneshot
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.program_cgroup import remove_program_cgroup
from holdfast.runtime.processes.spec import ProcessSpec
from holdfast.runtime.processes.zygote_link import ZygoteLink

__all__ = [
    "KILL_BOUND_S",
    "GroupTree",
    "Held",
    "ReaperTree",
    "TreeResult",
    "end_tree",
    "end_tree_blocking",
]

KILL_BOUND_S = 2.0
"""Default time in seconds to wait for killed processes to die."""

_ESCALATE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeResult:
    """Result of killing a process tree.

    Parameters:
        killed: pids of the processes that were killed, in the order in which they were found.
        survivors: pids of processes that were still alive at the time limit; the kill continues in the background.
        unattributed: ``<pid> <command>`` of each process that may belong to the tree but could not be attributed; these
            processes were not killed.
        proven: whether it is certain that no process of the tree is left except those listed.
        found: number of processes that received a signal of the kill, including those that ended by themselves after
            SIGTERM; 0 if unknown.
    """

    killed: tuple[int, ...] = ()
    survivors: tuple[int, ...] = ()
    unattributed: tuple[str, ...] = ()
    proven: bool = True
    found: int = 0

    @property
    def outcome(self) -> str:
        """``gone`` if the tree is proven dead, else ``unknown``."""
        return "gone" if self.proven and not self.survivors and not self.unattributed else "unknown"


class Held(Protocol):
    """Process tree and its holder, which is a reaper if supported, else a process group."""

    name: str
    started: Oneshot[int | tuple[str, int]]
    exited: Oneshot[int]
    gone: Oneshot[TreeResult]

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message to the holder; does nothing if the tree is gone."""
        ...

    def ask_kill(self, term_first_s: float, bound_s: float) -> Oneshot[TreeResult]:
        """Request the kill of the tree; the result is set when the tree is gone or the time limit is over."""
        ...

    def force(self, signum: signal.Signals) -> None:
        """Send a signal to the holder of the tree, because the holder does not answer."""
        ...

    def living(self) -> list[int]:
        """Return the pids of the running processes of the tree, as far as this process can see them."""
        ...

    def count(self, limit: int) -> int:
        """Return the number of running processes of the tree, for display; stop counting at ``limit``."""
        ...


def _escalation(term_first_s: float, bound_s: float) -> Iterator[tuple[float, signal.Signals | None]]:
    """Yield the time to wait for the holder's answer, and the signal to send to the holder if it does not answer."""
    yield term_first_s + bound_s + _ESCALATE_S, signal.SIGCONT
    yield _ESCALATE_S, signal.SIGKILL
    yield bound_s + _ESCALATE_S, None


async def end_tree(held: Held, term_first_s: float, bound_s: float) -> TreeResult:
    """Kill a process tree within a bounded time; if its holder does not answer, kill the holder as well."""
    answer = held.ask_kill(term_first_s, bound_s)
    for wait_s, signum in _escalation(term_first_s, bound_s):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await answer.wait()
        if signum is not None:
            held.force(signum)
    return answer.value or TreeResult(proven=False)  # the answer may have come while the loop was blocked


def end_tree_blocking(held: Held, term_first_s: float, bound_s: float) -> TreeResult:
    """Kill a process tree like `end_tree`, but block this thread until the result is known."""
    answer = held.ask_kill(term_first_s, bound_s)
    for wait_s, signum in _escalation(term_first_s, bound_s):
        with contextlib.suppress(TimeoutError):
            return answer.wait_blocking(wait_s)
        if signum is not None:
            held.force(signum)
    return TreeResult(proven=False)


class ReaperTree:
    """Process tree under a reaper, and the host's connection to that reaper."""

    def __init__(
        self,
        control: socket.socket,
        link: ZygoteLink,
        name: str,
        spec: ProcessSpec,
        theirs: socket.socket,
        fds: Sequence[int],
    ) -> None:
        self.name = name
        self.link = link
        self.started: Oneshot[int | tuple[str, int]] = Oneshot()
        self.exited: Oneshot[int] = Oneshot()
        self.gone: Oneshot[TreeResult] = Oneshot()
        self.control: socket.socket | None = control
        self.reaper = 0
        self.confirm: Callable[[], bool] | None = None
        """Ends what runs for the program outside of the tree; see `ProcessHost.spawn`."""
        self.sent = False
        """Whether the reaper was requested from the zygote; if not, no process of the tree can exist."""
        self.out_of_memory = False
        """Whether the kernel killed the program for the memory limit of its cgroup; known when `exited` is set."""
        self.lease_ended = False
        """Whether the reaper killed the program because the host's lease ended; known when `exited` is set."""
        self._spec = spec
        self._theirs = theirs
        self._fds = fds
        self._answers: list[Oneshot[TreeResult]] = []
        self._lock = threading.Lock()

    def submit(self) -> bool:
        """Request the reaper from the zygote; return False if the zygote already has too many requests."""
        wall = self._spec[3]
        sent = False
        self.sent = True  # set before the call, because the end of the socket may be seen before the call returns
        try:
            fds = [self._theirs.fileno(), *self._fds]
            sent = self.link.submit("spawn", self._spec, fds, key=b"" if wall is None else wall["key"])
        except BrokenPipeError:  # the zygote was killed; waiters are released when its end is noticed
            sent = True
        finally:
            self.sent = sent
        if sent:
            self._theirs.close()
        return sent

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message to the reaper; does nothing if the reaper is gone."""
        with self._lock:  # against the reading thread's close: afterwards the number may belong to another file
            if self.control is not None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.control.send(marshal.dumps(message))

    def close(self) -> None:
        """Close the connection to the reaper. Call this in the host's reading thread only."""
        with self._lock:
            control, self.control = self.control, None
        if control is not None:
            control.close()

    def ask_kill(self, term_first_s: float, bound_s: float) -> Oneshot[TreeResult]:
        """Request the kill of the tree; the result is set when the tree is gone or the time limit is over."""
        answer: Oneshot[TreeResult] = Oneshot()
        with self._lock:
            if self.gone.value is None:
                self._answers.append(answer)
        if self.gone.value is not None:
            answer.set(self.gone.value)
        if not self.sent:  # no request was sent: the end of the socket is the answer
            self._theirs.close()
        self.link.wake()  # the zygote has the tree if the reaper is lost
        self.tell(("kill", float(term_first_s), float(bound_s)))
        return answer

    def hear(self, message: tuple[Any, ...]) -> None:
        """Note what the reaper sent about the program; call this in the host's reading thread only."""
        match message:
            case ("started", int(pid), int(reaper)):
                self.reaper = reaper
                self.started.set(pid)
            case ("out of memory",):
                self.out_of_memory = True
            case ("lease ended",):
                self.lease_ended = True
            case ("exited", int(returncode)):
                self.exited.set(returncode)

    def report(self, result: TreeResult) -> None:
        """Answer all pending kill requests."""
        with self._lock:
            answers, self._answers = self._answers, []
        for answer in answers:
            answer.set(result)

    def finish(self, result: TreeResult) -> bool:
        """Record that the tree, or at least its reaper, is gone; return False if this was already recorded."""
        self._theirs.close()
        if self._spec[4] is not None and self.reaper:  # if the reaper did not live to do so
            remove_program_cgroup(self._spec[4][0], self.reaper)
        self.started.set(("reaper", errno.ECHILD))
        self.exited.set(-signal.SIGKILL)  # its parent-death signal, if the reaper did not live to report the exit
        first = self.gone.set(result)
        self.report(result)
        return first

    def confirm_end(self, result: TreeResult, settle: Callable[[ReaperTree, TreeResult], object]) -> None:
        """Call `settle` with the result: at once, or in a thread of its own once `confirm` has returned."""
        confirm, self.confirm = self.confirm, None
        if confirm is None:
            settle(self, result)
            return

        def ask() -> None:
            proven = False
            try:
                proven = confirm()
            finally:
                settle(self, replace(result, proven=result.proven and proven))

        threading.Thread(target=ask, name=f"holdfast-confirm-{self.name}", daemon=True).start()

    def force(self, signum: signal.Signals) -> None:
        """Send a signal to the reaper itself, because the reaper does not answer."""
        self.link.wake()
        if self.reaper:
            procfs.strike(self.reaper, signum, lambda stat: stat.parent == self.link.pid)

    def living(self) -> list[int]:
        """Return the pids of the reaper's running descendants; empty if the reaper is gone.

        The zygote adopts the descendants of a reaper that is gone.
        """
        return procfs.living(procfs.descendants(self.reaper)) if self._has_reaper() else []

    def count(self, limit: int) -> int:
        """Return the number of the reaper's running descendants; 0 if the reaper is gone."""
        return procfs.count_below(self.reaper, limit) if self._has_reaper() else 0

    def _has_reaper(self) -> bool:
        stat = procfs.read_stat(self.reaper) if self.reaper else None
        return stat is not None and stat.parent == self.link.pid


class GroupTree:
    """Process tree in a process group, used if reapers are not supported.

    A process can leave the group, so the tree is never proven dead.
    """

    def __init__(self, spec: ProcessSpec, name: str, fds: Sequence[int]) -> None:
        self.name = name
        self.started: Oneshot[int | tuple[str, int]] = Oneshot()
        self.exited: Oneshot[int] = Oneshot()
        self.gone: Oneshot[TreeResult] = Oneshot()
        argv, environment, directory, wall, *_ = spec
        if wall is not None:
            raise OSError(errno.ENOSYS, "walls need Linux")
        self._program = subprocess.Popen(
            argv,
            stdin=fds[0],
            stdout=fds[1],
            stderr=fds[2],
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
        self.started.set(self._program.pid)
        threading.Thread(target=self._attend, name=f"holdfast-wait-{name}", daemon=True).start()

    def _attend(self) -> None:
        self.exited.set(self._program.wait())

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a signal to the program; other messages are ignored."""
        match message:
            case ("signal", int(signum)):
                self._program.send_signal(signum)

    def ask_kill(self, term_first_s: float, bound_s: float) -> Oneshot[TreeResult]:
        """Start a thread that kills the process group; the result is set when the thread is done."""

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                if term_first_s > 0:
                    os.killpg(self._program.pid, signal.SIGTERM)
                    with contextlib.suppress(TimeoutError):
                        self.exited.wait_blocking(term_first_s)
                os.killpg(self._program.pid, signal.SIGKILL)
            survivors: tuple[int, ...] = ()
            try:
                self.exited.wait_blocking(bound_s)
            except TimeoutError:
                survivors = (self._program.pid,)
            self.gone.set(TreeResult(killed=(self._program.pid,), survivors=survivors, proven=False))

        threading.Thread(target=end, name=f"holdfast-kill-{self.name}", daemon=True).start()
        return self.gone

    def force(self, signum: signal.Signals) -> None:
        """Do nothing: a process group has no reaper."""

    def living(self) -> list[int]:
        """Return the pid of the program if it is running; other members of the group are not visible."""
        return [] if self.exited.value is not None else [self._program.pid]

    def count(self, limit: int) -> int:
        """Return 1 if the program is running, else 0."""
        return len(self.living())
