"""A program that foreign code started in a scope, held by a pidfd, and the interface of its owner."""

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
        """Adopt the process; False if this owner accepts no more processes, and the process must be killed. Callable
        from any thread."""
        ...


class ForeignProcess:
    """A program that foreign code started in a scope, or a stray of one that has ended.

    Attributes:
        pid: its pid. Only its starter reaps it; a stray is reaped here.
        name: display name.
        started: start time in clock ticks since boot.
        tag: the tag of its scope.
        is_orphan: whether it was reparented to this process, which reaps it.
        is_unnamed: whether its starter may reap it, but does not know its pid yet.
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
        """True once it no longer runs, whether or not its starter has waited for it."""
        return self._ended.value is not None

    def mark_ended(self) -> None:
        """Record that it no longer runs, and notify all waiters."""
        self._ended.set(True)

    async def wait_ended(self) -> None:
        """Wait until it no longer runs."""
        await self._ended.wait()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, in the reading thread when the program ends; at once if it already has."""
        if not self._ended.add(callback):
            callback()

    def signal(self, signum: int) -> bool:
        """Signal exactly this program; False if it has ended or must not be signalled. Callable from any thread."""
        with self._lock:  # against the reading thread's close: afterwards the number may belong to another program
            if self._pidfd < 0:
                return False
            try:
                procfs.pidfd_signal(self._pidfd, signum)
            except OSError:
                return False
        return True

    def give_up_pidfd(self) -> int:
        """Return the pidfd for the caller to close; negative if it was already given up."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
        return pidfd
