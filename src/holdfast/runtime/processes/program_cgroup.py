"""The cgroup (v2) of one program, inside the cgroup of the program's owner. The zygote imports this module.

A reaper, which is outside of both, makes them before it starts the program, and removes them when the process tree is
gone. Invariants:

- A program's first process is cloned into the cgroup, so nothing that the program does is outside of it.
- The owner's cgroup has its limits before a program is in it, and exists only while it has programs.
- If a process dies for its owner's memory limit, the kernel kills the whole program, and no other.
"""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CgroupSpec", "ProgramCgroup", "count_event", "remove_program_cgroup"]

CgroupSpec = tuple[bytes, dict[bytes, bytes]]
"""Folder of the owner's cgroup, whose parent exists, and the values of its files that limit it."""

_ATTEMPTS = 100
_GONE = (errno.ENOENT, errno.ENODEV)


class ProgramCgroup:
    """The cgroup of the program that this process, a reaper, starts.

    Attributes:
        fd: descriptor of the cgroup's folder; -1 before `make` and after `close`.

    Parameters:
        spec: the owner's cgroup.
    """

    def __init__(self, spec: CgroupSpec) -> None:
        self._owner, self._limits = spec
        self._path = _path_of(self._owner, os.getpid())
        self.fd = -1

    def make(self) -> None:
        """Make the owner's cgroup, unless it exists, and the program's in it.

        Raises:
            OSError: the kernel refuses.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                _make_limited(self._owner, self._limits)
                _make(self._path)
                if b"memory.max" in self._limits:
                    _write(self._path + b"/memory.oom.group", b"1")
                self.fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                return
            except OSError as error:  # another reaper has removed the owner's cgroup with its last program
                if left == 0 or error.errno not in _GONE:
                    raise

    def kill(self) -> None:
        """Kill all processes inside at once, so that none can fork meanwhile (from Linux 5.14 on)."""
        try:
            _write(self._path + b"/cgroup.kill", b"1")
        except OSError:
            return

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)
        self.fd = -1

    def has_run_out_of_memory(self) -> bool:
        """Return whether the kernel has killed the program because its owner's memory was used up."""
        return count_event(self._path, b"memory.events", b"oom_kill") > 0 and (
            count_event(self._owner, b"memory.events.local", b"oom") > 0
        )

    def remove(self) -> None:
        """Remove the program's cgroup, which has no process any more, and the owner's unless it has other programs."""
        remove_program_cgroup(self._owner, os.getpid())


def remove_program_cgroup(owner: bytes, reaper: int) -> None:
    """Remove the cgroup that a reaper made, and the owner's; does nothing to one that is in use or does not exist."""
    for path in (_path_of(owner, reaper), owner):
        try:
            os.rmdir(path)
        except OSError:
            continue


def count_event(path: bytes, file: bytes, event: bytes) -> int:
    """Return how often the kernel has counted an event of a cgroup; 0 if it does not count it."""
    try:
        with open(path + b"/" + file, "rb", buffering=0) as events:
            return next((int(line[1]) for line in map(bytes.split, events) if line[0] == event), 0)
    except OSError:
        return 0


def _path_of(owner: bytes, reaper: int) -> bytes:
    return owner + b"/%d" % reaper


def _make(path: bytes) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        return


def _make_limited(path: bytes, limits: Mapping[bytes, bytes]) -> None:
    """Make a cgroup with limits. One that exists gets them again: the reaper that made it may not be done with it."""
    _make(path)
    for file, value in limits.items():
        _write(path + b"/" + file, value)
    if b"memory.max" in limits:
        _write(path + b"/cgroup.subtree_control", b"+memory")


def _write(path: bytes, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)
