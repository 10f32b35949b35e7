"""Lock that allows one host per database file: a lock on a side file that names its holder.

The lock is a POSIX record lock: a forked child does not inherit the lock, and the kernel releases it when the process
ends for any reason. Record locks do not exclude a second holder in the same process, so this module also keeps a
registry of the held locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable

from holdfast.errors import StoreFull, StoreLocked, StoreReadOnly

__all__ = ["FileLock"]

_held: set[tuple[int, int]] = set()
_guard = threading.Lock()


class FileLock:
    """The right to be the only host of a database file. Releasing the lock leaves the side file in place.

    Parameters:
        path: path of the side file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._identity = (0, 0)

    def acquire(self, *, check: Callable[[], None] | None = None) -> None:
        """Take the lock, or raise at once.

        Parameters:
            check: called before the side file is created, and only if this process does not have the database open, so
                that it may open and close the database. What it raises is passed on.

        Raises:
            StoreLocked: if another host has the lock. The message contains that host's process id if it is known.
            StoreReadOnly: if the side file cannot be created or opened for writing.
            StoreFull: if the disk is too full to write the process id to the side file.
        """
        with _guard:
            # Closing any descriptor of the file would end this process's lock, so check before opening.
            if self._identify() in _held:
                raise StoreLocked(f"this process (pid {os.getpid()}) already has {self._database} open")
            if check is not None:
                check()
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise StoreReadOnly(f"failed to write {self._path}: {os.strerror(error.errno or 0)}") from error
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                os.close(descriptor)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise StoreLocked(
                    f"another host has {self._database} open" + (f": process {holder}" if holder else "")
                ) from None
            try:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
            except OSError as error:
                os.close(descriptor)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise StoreFull(f"the disk of {self._path} is full") from error
            self._descriptor = descriptor
            self._identity = self._identify() or (0, 0)
            _held.add(self._identity)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        with _guard:
            if self._descriptor is not None:
                _held.discard(self._identity)
                os.close(self._descriptor)
                self._descriptor = None

    @property
    def _database(self) -> str:
        return self._path.removesuffix("-lock")

    def _identify(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino
