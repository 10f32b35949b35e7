"""Until when programs may run without word from their host, in memory that the host shares with its reapers.

A host whose runs other hosts may take over has a lease. Its programs must be gone when the lease ends, even if the host
is frozen. So the reapers look at the lease themselves. The host writes its end, as monotonic time, into a file in
memory; the zygote and its forks only read it. The number is written twice: a reader that finds two different numbers
met a write, and reads again.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ProgramLease", "is_lease_over", "read_lease"]

_END = struct.Struct("dd")


def read_lease(fd: int) -> float:
    """Return the monotonic time at which programs must end; infinite without a lease.

    Parameters:
        fd: a descriptor of `ProgramLease.open`.
    """
    while True:
        ends_at, again = _END.unpack(os.pread(fd, _END.size, 0))
        if ends_at == again:
            return float(ends_at)


def is_lease_over(fd: int) -> bool:
    """Whether leased programs must have ended by now; see `read_lease`."""
    return time.monotonic() >= read_lease(fd)


class ProgramLease:
    """The lease of the programs of one process, which is the first to end of its holders' leases. Thread-safe.

    Parameters:
        on_sooner: called when the end has become sooner than the readers expect.
    """

    def __init__(self, on_sooner: Callable[[], object]) -> None:
        self._on_sooner = on_sooner
        self._lock = threading.Lock()
        self._ends: dict[object, float] = {}
        self._fd = -1

    def renew(self, holder: object, ends_at: float) -> None:
        """Let leased programs run until this monotonic time, unless the lease of another holder ends earlier.

        Parameters:
            holder: who has the lease; any hashable object.
        """
        with self._lock:
            expected = self.ends_at
            self._ends[holder] = ends_at
            self._write()
            is_sooner = self.ends_at < expected
        if is_sooner:
            self._on_sooner()

    @property
    def ends_at(self) -> float:
        """Monotonic time at which leased programs are killed; infinite without a holder."""
        return min(self._ends.values(), default=math.inf)

    def release(self, holder: object) -> None:
        """Remove a holder. Idempotent."""
        with self._lock:
            if self._ends.pop(holder, None) is not None:
                self._write()

    def open(self) -> int:
        """Return a new descriptor for `read_lease`, which cannot be written to; the caller closes it."""
        with self._lock:
            if self._fd < 0:
                self._fd = os.memfd_create("holdfast-lease", os.MFD_CLOEXEC)
                self._write()
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def leave_to_parent(self) -> None:
        """Forget everything in a forked child, which has no lease."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._ends.clear()

    def _write(self) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, _END.pack(self.ends_at, self.ends_at), 0)
