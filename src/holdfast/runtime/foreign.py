"""Finding and killing what foreign code started: by an inherited tag, by a marker, by descent.

The zygote imports this module, so it imports only what is cheap. A process that is not under a reaper can leave its
session, its parents and its environment behind, but a resource limit is inherited by all that it starts, and nobody
changes a limit that has no effect: ``RLIMIT_LOCKS`` is not enforced since Linux 2.4.25. Its soft value is our tag: it
holds the host and the number of the scope. Where the limit cannot be set, the environment marker and descent remain.
"""

from __future__ import annotations

import signal
import time

from holdfast.runtime import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

__all__ = [
    "RLIMIT_LOCKS",
    "SCOPES",
    "end_host",
    "host_of_tag",
    "is_start",
    "kill",
    "make_tag",
    "scope_of_tag",
    "tag_of",
]

RLIMIT_LOCKS = 10
SCOPES = 1 << 16
"""Numbers of scopes are below this; 0 is what was started outside of any scope."""

_MAGIC = 0b10110
_START_MASK = 0xFFFFF
_PAUSE_S = 0.0005
_PAUSE_LIMIT_S = 0.02


def make_tag(host: int, started: int, scope: int) -> int:
    """The tag of a scope of the host with this pid and start time: 5 bits say whose tags these are, then 22 of the
    pid, 20 of the start time and 16 of the scope's number."""
    return ((_MAGIC << 22 | host) << 20 | started & _START_MASK) << 16 | scope


def scope_of_tag(tag: int) -> int:
    """The number of the scope."""
    return tag & (SCOPES - 1)


def host_of_tag(tag: int) -> tuple[int, int] | None:
    """Pid and lower 20 bits of the start time of the host; None when this is no tag of ours."""
    if tag >> 58 != _MAGIC:
        return None
    return tag >> 36 & 0x3FFFFF, tag >> 16 & _START_MASK


def is_start(lower: int, started: int) -> bool:
    """Whether these are the lower bits of this start time."""
    return started & _START_MASK == lower


def tag_of(pid: int) -> int | None:
    """The tag that a process carries, be it a zombie; None when it has none or is gone."""
    limits = procfs.read_text(f"/proc/{pid}/limits")
    if not limits:
        return None
    start = limits.find(b"Max file locks")
    if start < 0:
        return None
    soft = limits[start + 14 :].split(None, 1)[0]
    if not soft.isdigit():
        return None
    tag = int(soft)
    return tag if host_of_tag(tag) is not None else None


def marked_tag_of(pid: int) -> int | None:
    """The tag in the environment that a process was executed with."""
    marker = procfs.environment_value(pid, procfs.SCOPE_MARKER)
    return int(marker) if marker is not None and marker.isdigit() else None


def _find(
    pids: Iterable[int], ours: Callable[[int], bool], roots: Collection[tuple[int, int]]
) -> list[procfs.ProcessStat]:
    """Those that live and carry a tag of ours, are a root, or are a child of what was found before them."""
    found = []
    tree: set[int] = set()
    for pid in pids:
        stat = procfs.read_stat(pid)
        if stat is None or stat.dead:
            continue
        tag = tag_of(pid)
        if not (
            stat.parent in tree
            or (pid, stat.started) in roots
            or (tag is not None and ours(tag))
            or ((marked := marked_tag_of(pid)) is not None and ours(marked))
        ):
            continue
        tree.add(pid)
        found.append(stat)
    return found


def _started_at(started: int) -> Callable[[procfs.ProcessStat], bool]:
    return lambda stat: stat.started == started


def _kill_found(
    walk: Callable[[], Iterable[int]],
    ours: Callable[[int], bool],
    roots: Collection[tuple[int, int]],
    bound_s: float,
) -> tuple[list[int], list[int]]:
    """Kill what is found on the walk until nothing was found twice in a row: one walk may miss who changes its parent
    meanwhile. Who was struck once is a root from then on: it may still be dying, without its parents."""
    deadline = time.monotonic() + bound_s
    known = set(roots)
    killed: dict[int, None] = {}
    clean = 0
    pause_s = _PAUSE_S
    while True:
        found = _find(walk(), ours, known)
        clean = 0 if found else clean + 1
        if clean == 2:
            return list(killed), []
        for stat in found:
            if procfs.strike(stat.pid, signal.SIGKILL, _started_at(stat.started)) == "hit":
                killed[stat.pid] = None
                known.add((stat.pid, stat.started))
        if found and time.monotonic() >= deadline:
            left = [stat.pid for stat in found]
            return [pid for pid in killed if pid not in left], left
        if found:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _PAUSE_LIMIT_S)


def kill(
    host: int, without: Collection[int], tags: Collection[int], roots: Collection[tuple[int, int]], bound_s: float
) -> tuple[list[int], list[int]]:
    """Kill what lives below ``host`` and belongs to the scopes of ``tags`` or to ``roots``, to a fixed point.

    Parameters:
        host: the pid of the host, which is a subreaper.
        without: pids whose subtrees are no concern: the zygote with its reapers.
        tags: tags of the scopes.
        roots: pid and start time of programs that were started in them.
        bound_s: for how long to try.

    Returns:
        The pids that were killed, and those that were still there at the bound.
    """
    others = frozenset(without)
    return _kill_found(lambda: procfs.descendants(host, without=others), frozenset(tags).__contains__, roots, bound_s)


def end_host(host: int, started: int, bound_s: float) -> tuple[list[int], list[int]]:
    """Kill what any scope of a host that has ended started, wherever it is now, to a fixed point."""
    gone = (host, started & _START_MASK)

    def ours(tag: int) -> bool:
        return scope_of_tag(tag) != 0 and host_of_tag(tag) == gone

    return _kill_found(lambda: sorted(procfs.all_pids()), ours, (), bound_s)
