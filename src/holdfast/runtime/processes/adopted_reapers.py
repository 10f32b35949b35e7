"""Processes that a killed zygote left to this process: reapers, which are adopted, and strays, which are killed."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.zygote_link import lost_helpers

__all__ = ["AdoptedReapers"]


class AdoptedReapers:
    """Adopted processes, each of which is reaped when it ends. False if none is left. Used in the reading thread only.

    Parameters:
        watch: calls a function whenever a descriptor is readable.
        unwatch: ends a watch, before the descriptor is closed.
    """

    def __init__(self, watch: Callable[[int, Callable[[], object]], object], unwatch: Callable[[int], object]) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._pidfds: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._pidfds)

    def take_in(self) -> None:
        """Adopt the reapers of a killed zygote, and kill the processes that a killed reaper left running."""
        for pid in lost_helpers():
            if pid in self._pidfds:
                continue
            try:
                pidfd = procfs.pidfd_open(pid)
            except ProcessLookupError:  # it was already reaped as an orphan
                continue
            if not procfs.command_name(pid).startswith(b"holdfast-"):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    procfs.pidfd_signal(pidfd, signal.SIGKILL)
            self._pidfds[pid] = pidfd
            self._watch(pidfd, functools.partial(self._bury, pid, pidfd))

    def _bury(self, pid: int, pidfd: int) -> None:
        """Reap an adopted process that has ended, and take over its children."""
        self._unwatch(pidfd)
        with contextlib.suppress(ProcessLookupError):  # already reaped as an orphan: the number may be reused
            with contextlib.suppress(PermissionError):
                procfs.pidfd_signal(pidfd, 0)
            os.waitpid(pid, os.WNOHANG)
        os.close(pidfd)
        del self._pidfds[pid]
        self.take_in()

    def close(self) -> None:
        """Close this process's descriptors, in a forked child."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
