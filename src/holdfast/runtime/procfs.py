"""Reading ``/proc`` and signalling what is found there without ever hitting a recycled pid.

The zygote and the reapers import this module in an interpreter that has loaded next to nothing, so it imports only
what is cheap. Invariants:

- A process is named by its pid **and** its start time; a pid alone may by now be somebody else.
- `strike` opens a pidfd first and looks at ``/proc`` afterwards. If what it sees there is wanted, the pidfd is of the
  same process or the signal fails: a signal never reaches a process that merely took over the number.
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
"""Environment name whose value is ``<pid>.<start time>`` of the host that a process belongs to."""

SCOPE_MARKER = b"HOLDFAST_SCOPE"
"""Environment name whose value is the token of the scope that a process was started in."""

_READINGS = 5
_PIDFD_OPEN = 434
_PIDFD_SEND_SIGNAL = 424


class ProcessStat:
    """One line of ``/proc/<pid>/stat``: who a process is and whom it belongs to."""

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
        """True for a zombie: it runs no more and only waits for its parent to read its exit status.

        What is shown as one because its first thread has ended runs on for as long as it has others.
        """
        return self.state in "ZX" and self.threads <= 1


def read_text(path: str) -> bytes | None:
    """The whole of a file of ``/proc``; None when the process is gone or we may not look."""
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
    """What the kernel says about ``pid`` now; None when there is no such process (any more)."""
    line = read_text(f"/proc/{pid}/stat")
    if not line:
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before may hold spaces and brackets
    parent, group, session, threads, started = (int(fields[at]) for at in (1, 2, 3, 17, 19))
    return ProcessStat(pid, chr(fields[0][0]), parent, group, session, threads, started)


def start_time(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since boot; None when it is gone."""
    stat = read_stat(pid)
    return None if stat is None else stat.started


def lives(pid: int, started: int) -> bool:
    """True while the process that started then under this pid runs."""
    stat = read_stat(pid)
    return stat is not None and stat.started == started and not stat.dead


def living(pids: Iterable[int]) -> list[int]:
    """Those that run; a zombie does not."""
    return [pid for pid in pids if (stat := read_stat(pid)) is not None and not stat.dead]


def all_pids() -> Iterator[int]:
    """The pids of all processes that this user can see."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


_children_listed: bool | None = None


def _supports_children() -> bool:
    global _children_listed
    if _children_listed is None:
        _children_listed = os.path.exists("/proc/thread-self/children")
    return _children_listed


def children_once(pid: int) -> list[int]:
    """The children of ``pid`` as one reading shows them; a child is skipped when its neighbour ends meanwhile."""
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
    """The children of ``pid`` as one reading shows them, each behind the thread that is its parent; where the kernel
    does not say which, behind 0."""
    if not _supports_children():
        return [(0, child) for child in children_once(pid)]
    found: list[tuple[int, int]] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        listed = read_text(f"/proc/{pid}/task/{thread}/children")
        if listed:
            found += [(int(thread), int(child)) for child in listed.split()]
    return found


def children(pid: int) -> list[int]:
    """The pids of the children of ``pid``, zombies included; empty when it is gone.

    Complete for who was its child all the time of the call: who is skipped in one reading because a neighbour ended is
    missing with that neighbour listed, so the next reading differs; two equal ones skip nobody. When they keep
    differing, all that was seen is given.
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
    """The pids below ``pid``, parents before children, leaving out the subtrees of ``without``."""
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


def branch_below(stat: ProcessStat, ancestor: int) -> int | None:
    """The child of ``ancestor`` that this process is, or is below; None when it is not below it, or just on its way
    to: a parent has ended, and it is given to another one."""
    pid, parent = stat.pid, stat.parent
    while parent != ancestor:
        above = read_stat(parent) if parent > 1 else None
        if above is None:
            return None
        pid, parent = above.pid, above.parent
    return pid


def descriptor_count(pid: int) -> int | None:
    """How many descriptors ``pid`` has open; None when it is gone or does not show it.

    Those of a process that is closed to us (`holdfast.undumpable`) can be counted, not listed, from Linux 6.2 on.
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
    """The value that ``name`` had in the environment ``pid`` was executed with.

    None when it has none, is gone, is a zombie, or belongs to another user.
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
    """The command line of ``pid`` for people to read, at most 80 characters; its bare name for a zombie."""
    line = read_text(f"/proc/{pid}/cmdline") or read_text(f"/proc/{pid}/comm") or b"?"
    return " ".join(line.replace(b"\0", b" ").decode("utf-8", "replace").split())[:80]


def command_name(pid: int) -> bytes:
    """The name that ``pid`` goes by, as it chose; empty when it is gone."""
    return read_text(f"/proc/{pid}/comm") or b""


_syscall: Callable[..., int] | None = None


def _raw_syscall(*arguments: int) -> int:
    """Call the kernel directly, for interpreters built where the C library had no wrapper yet."""
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
    """A file descriptor that stays with this process whatever becomes of the number; readable once it ended.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: the kernel has no pidfds (Linux before 5.3).
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _raw_syscall(_PIDFD_OPEN, pid, 0)  # close-on-exec by itself


def pidfd_signal(pidfd: int, signum: int) -> None:
    """Signal exactly the process that ``pidfd`` was opened for.

    Raises:
        ProcessLookupError: it has ended and was reaped.
        PermissionError: it changed to a user whom we may not signal.
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
    """Signal ``pid`` if the process under that number is ``wanted``, never another one.

    Returns:
        ``"hit"`` when it was alive and signalled, ``"dead"`` when it is gone, a zombie or not wanted, ``"denied"``
        when we may not signal it.
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
    """``<pid> <command>`` of each, for receipts."""
    return tuple(f"{pid} {command(pid)}" for pid in pids)
