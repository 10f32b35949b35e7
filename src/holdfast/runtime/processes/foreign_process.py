"""Programs that foreign code started in a scope, each held by a pidfd, and the interface of their owner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.runtime.oneshot import Oneshot
from holdfast.runtime.processes import procfs

__all__ = ["ForeignProcess", "Owner"]


class Owner(Protocol):
    """Owner of adopted programs: a scope."""

    def adopt_process(self, process: ForeignProcess, /) -> bool:
        """Adopt the process; return False if this owner accepts no more processes.

        If the process is not adopted, the caller must kill it. Callable from any thread.
        """
        ...


class ForeignProcess:
    """A program that foreign code started in a scope, or an orphaned descendant of such a program.

    Attributes:
        pid: process id. Only the code that started the program reaps it; Holdfast reaps orphans.
        name: display name.
        started: start time in clock ticks since boot.
        tag: tag of the scope that the program belongs to.
        is_orphan: whether the program was reparented to this process, which reaps it.
        is_unnamed: whether the code that started the program may reap it but does not yet know its pid.
    """

    __slots__ = ("_ended", "_lock", "_pidfd", "is_orphan", "is_unnamed", "name", "pid", "started", "tag")

    def __init__(self, pid: int, name: str, started: int, tag: int, pidfd: int, *, orphan: bool, unnamed: bool) -> None:
        self.pid = pid
        self.name = name
        self.started = started
        self.tag = tag
        self._pidfd = pidfd
        self._lock = threading.Lock()
        self.is_orphan = orphan
        self.is_unnamed = unnamed
        self._ended: Oneshot[bool] = Oneshot()

    def __repr__(self) -> str:
        return f"<ForeignProcess {self.name} pid={self.pid}{' ended' if self.ended else ''}>"

    @property
    def ended(self) -> bool:
        """Whether the program has ended, even if the code that started the program has not yet reaped it."""
        return self._ended.value is not None

    def mark_ended(self) -> None:
        """Record that the program has ended, and notify all waiters."""
        self._ended.set(True)

    async def wait_ended(self) -> None:
        """Wait until the program has ended."""
        await self._ended.wait()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, in the host's reading thread, when the program ends.

        If the program has already ended, ``callback`` is called at once in the calling thread.
        """
        if not self._ended.add(callback):
            callback()

    def count(self, limit: int) -> int:
        """Return 1 plus the number of running processes below this program, for display; stop counting at ``limit``."""
        # The reading thread may not have noted an end yet that a stop has already proven.
        if self.ended or not procfs.lives(self.pid, self.started):
            return 0
        return 1 + procfs.count_below(self.pid, limit - 1)

    def signal(self, signum: int) -> bool:
        """Send a signal to exactly this program; return False if it has ended or the kernel refused the signal.

        Callable from any thread.
        """
        with self._lock:  # against the reading thread's close: afterwards the number may belong to another program
            if self._pidfd < 0:
                return False
            try:
                procfs.pidfd_signal(self._pidfd, signum)
            except OSError:
                return False
        return True

    def give_up_pidfd(self) -> int:
        """Return the pidfd, which the caller must close; return -1 if the pidfd was already given up."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
        return pidfd
