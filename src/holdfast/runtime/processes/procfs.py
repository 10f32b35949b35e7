"""Read ``/proc``, and signal processes without ever signalling another process that has reused the pid.

The zygote and the reapers import this module in an interpreter that has loaded almost nothing, so its imports must be
cheap. Invariants:

- A process is identified by its pid **and** its start time; a pid alone may by now belong to another process.
- `strike` opens a pidfd first and reads ``/proc`` afterwards. If ``/proc`` then shows the wanted process, either the
  pidfd refers to that process or the signal fails: a signal never reaches a process that merely took over the pid.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "HOST_MARKER",
    "SCOPE_MARKER",
    "ProcessStat",
    "all_pids",
    "branch_below",
    "children",
    "children_of_threads",
    "children_once",
    "command",
    "command_name",
    "count_below",
    "descendants",
    "descriptor_count",
    "environment_value",
    "lives",
    "living",
    "pidfd_open",
    "pidfd_signal",
    "read_stat",
    "read_text",
    "start_time",
    "strike",
    "supported",
]

HOST_MARKER = b"HOLDFAST_HOST"
"""Name of an environment variable: its value is the ``<pid>.<start time>`` of the host that a process belongs to."""

SCOPE_MARKER = b"HOLDFAST_SCOPE"
"""Name of an environment variable: its value is the decimal tag of the scope that a process was started in."""

_READINGS = 5
_PIDFD_OPEN = 434
_PIDFD_SEND_SIGNAL = 424


class ProcessStat:
    """One line of ``/proc/<pid>/stat``: identity and parentage of a process."""

    __slots__ = ("group", "parent", "pid", "session", "started", "state", "threads")

    def __init__(self, pid: int, state: str, parent: int, group: int, session: int, threads: int, started: int) -> None:
        self.pid = pid
        self.state = state
        self.parent = parent
        self.group = group
        self.session = session
        self.threads = threads
        self.started = started

    @property
    def dead(self) -> bool:
        """True for a zombie: it no longer runs and only waits for its parent to read its exit status.

        False for a process whose main thread has ended while other threads still run, although the kernel reports its
        state as that of a zombie.
        """
        return self.state in "ZX" and self.threads <= 1


def read_text(path: str) -> bytes | None:
    """Return the content of a file of ``/proc``; None if the process is gone or access is denied."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
    except OSError:  # the process ended between open and read
        return None
    finally:
        os.close(fd)
    return b"".join(parts)


def read_stat(pid: int) -> ProcessStat | None:
    """Return the kernel's current data on the process ``pid``; None if no such process exists."""
    line = read_text(f"/proc/{pid}/stat")
    if not line:
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before may contain spaces and brackets
    parent, group, session, threads, started = (int(fields[at]) for at in (1, 2, 3, 17, 19))
    return ProcessStat(pid, chr(fields[0][0]), parent, group, session, threads, started)


def start_time(pid: int) -> int | None:
    """Return the start time of ``pid`` in clock ticks since boot; None if the process is gone."""
    stat = read_stat(pid)
    return None if stat is None else stat.started


def lives(pid: int, started: int) -> bool:
    """True while the process with this pid and start time runs."""
    stat = read_stat(pid)
    return stat is not None and stat.started == started and not stat.dead


def living(pids: Iterable[int]) -> list[int]:
    """Return those ``pids`` that belong to running processes; zombies do not count."""
    return [pid for pid in pids if (stat := read_stat(pid)) is not None and not stat.dead]


def all_pids() -> Iterator[int]:
    """Return the pids of all processes that this user can see."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


_children_listed: bool | None = None


def _supports_children() -> bool:
    global _children_listed
    if _children_listed is None:
        _children_listed = os.path.exists("/proc/thread-self/children")
    return _children_listed


def children_once(pid: int) -> list[int]:
    """Return the children of ``pid`` from one reading, which may skip a child if another child ends meanwhile."""
    if not _supports_children():
        return [stat.pid for stat in map(read_stat, all_pids()) if stat is not None and stat.parent == pid]
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        listed = read_text(f"/proc/{pid}/task/{thread}/children")
        if listed:
            found.extend(map(int, listed.split()))
    return found


def children_of_threads(pid: int) -> list[tuple[int, int]]:
    """Return pairs of parent thread and child for the children of ``pid``, from one reading.

    The thread is 0 if the kernel does not report the children of each thread.
    """
    if not _supports_children():
        return [(0, child) for child in children_once(pid)]
    found: list[tuple[int, int]] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        listed = read_text(f"/proc/{pid}/task/{thread}/children")
        if listed:
            found += [(int(thread), int(child)) for child in listed.split()]
    return found


def children(pid: int) -> list[int]:
    """Return the pids of the children of ``pid``, including zombies; empty if the process is gone.

    The result contains all processes that were children of ``pid`` during the whole call. A reading may skip a child
    because another child ended, but then the next reading differs; if two successive readings are equal, no child was
    skipped. If the readings keep differing, the result is the union of all readings.
    """
    before = children_once(pid)
    seen = dict.fromkeys(before)
    for _ in range(_READINGS):
        now = children_once(pid)
        if now == before:
            return now
        seen.update(dict.fromkeys(now))
        before = now
    return list(seen)


def descendants(pid: int, *, without: frozenset[int] = frozenset()) -> list[int]:
    """Return the pids of all descendants of ``pid``, parents before children, except the subtrees of ``without``."""
    found: list[int] = []
    frontier = [pid]
    seen = {pid, *without}
    while frontier:
        level = []
        for parent in frontier:
            for child in children(parent):
                if child not in seen:
                    seen.add(child)
                    level.append(child)
        found.extend(level)
        frontier = level
    return found


def count_below(pid: int, limit: int) -> int:
    """Return the number of running processes below ``pid``, for display; stop counting at ``limit``.

    The number comes from one reading, which may skip processes; see `children_once`.
    """
    seen = {pid}
    frontier = [pid]
    count = 0
    while frontier and count < limit:
        for child in children_once(frontier.pop()):
            if child in seen:
                continue
            seen.add(child)
            frontier.append(child)
            count += len(living([child]))
            if count >= limit or len(seen) > 4 * limit:  # many that have ended, and were not waited for
                return count
    return count


def branch_below(stat: ProcessStat, ancestor: int) -> int | None:
    """Return the child of ``ancestor`` whose subtree contains this process.

    Return None if the process is not below ``ancestor`` or is being reparented.
    """
    pid, parent = stat.pid, stat.parent
    while parent != ancestor:
        above = read_stat(parent) if parent > 1 else None
        if above is None:
            return None
        pid, parent = above.pid, above.parent
    return pid


def descriptor_count(pid: int) -> int | None:
    """Return the number of open descriptors of ``pid``; None if the process is gone or the number cannot be read.

    From Linux 6.2 on, the descriptors of an undumpable process (`holdfast.undumpable`) can be counted but not listed.
    """
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        pass
    except OSError:
        return None
    try:
        return os.stat(f"/proc/{pid}/fd").st_size or None
    except OSError:
        return None


def environment_value(pid: int, name: bytes) -> bytes | None:
    """Return the value of ``name`` in the environment with which ``pid`` was executed.

    Return None if the variable was unset, or if the process is gone, is a zombie, or belongs to another user.
    """
    block = read_text(f"/proc/{pid}/environ")
    if not block:
        return None
    prefix = name + b"="
    for entry in block.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :]
    return None


def command(pid: int) -> str:
    """Return the command line of ``pid`` for display, at most 80 characters; the bare name for a zombie."""
    line = read_text(f"/proc/{pid}/cmdline") or read_text(f"/proc/{pid}/comm") or b"?"
    return " ".join(line.replace(b"\0", b" ").decode("utf-8", "replace").split())[:80]


def command_name(pid: int) -> bytes:
    """Return the name of ``pid`` in process lists; empty if the process is gone."""
    return read_text(f"/proc/{pid}/comm") or b""


_syscall: Callable[..., int] | None = None


def _raw_syscall(*arguments: int) -> int:
    """Call the kernel directly, for interpreters built with a C library without a wrapper."""
    global _syscall
    import ctypes

    if _syscall is None:
        _syscall = ctypes.CDLL(None, use_errno=True).syscall
    result = _syscall(*map(ctypes.c_long, arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def pidfd_open(pid: int) -> int:
    """Return a descriptor that always refers to this process, even if the pid is reused; readable once it has ended.

    Raises:
        ProcessLookupError: no such process.
        OSError: the kernel has no pidfds (Linux before 5.3).
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _raw_syscall(_PIDFD_OPEN, pid, 0)  # close-on-exec by itself


def pidfd_signal(pidfd: int, signum: int) -> None:
    """Signal exactly the process that ``pidfd`` was opened for.

    Raises:
        ProcessLookupError: the process has ended and was reaped.
        PermissionError: the process now runs as a user that this process may not signal.
    """
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, signum)
    else:
        _raw_syscall(_PIDFD_SEND_SIGNAL, pidfd, signum, 0, 0)


def supported() -> bool:
    """True where process trees can be proven dead: Linux with ``/proc`` and pidfds."""
    if not os.path.exists("/proc/self/stat"):
        return False
    try:
        os.close(pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def strike(pid: int, signum: int, wanted: Callable[[ProcessStat], bool]) -> str:
    """Signal the process with this pid, but only if ``wanted`` returns True for it.

    Returns:
        ``"hit"`` if the process was alive and signalled, ``"dead"`` if it is gone, a zombie or not wanted, ``"denied"``
        if this process may not signal it.
    """
    try:
        pidfd = pidfd_open(pid)
    except ProcessLookupError:
        return "dead"
    try:
        stat = read_stat(pid)
        if stat is None or stat.dead or not wanted(stat):
            return "dead"
        pidfd_signal(pidfd, signum)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        return "denied"
    finally:
        os.close(pidfd)
    return "hit"


def names(pids: Iterable[int]) -> tuple[str, ...]:
    """Return ``<pid> <command>`` for each pid, for display."""
    return tuple(f"{pid} {command(pid)}" for pid in pids)
