"""Find programs that foreign code started, by inherited tag, environment marker or descent, and kill them.

The zygote imports this module, so its imports must be cheap. A process that is not under a reaper can change its
session, parents and environment, but not a sealed tag (`holdfast.runtime.processes.seal`). The tag identifies the host
and the scope. Without a seal, the environment marker and descent help to find processes that lost their tag, but an
empty search proves nothing.

Two consecutive scans of all processes that find no process with a tag prove that no process has the tag. Pids are
assigned in rising order, and a scan reads them in that order, including those assigned meanwhile. So a process that one
scan misses was started during that scan, by a process that the other scan sees, unless all pids of the machine were
assigned meanwhile. A scan that cannot catch up with new pids kills the processes that it finds and proves nothing.
"""

from __future__ import annotations

import os
import select
import signal
import time

from holdfast.runtime.processes import procfs, seal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    _Look = Iterable[tuple[int, int]]  # pids with the tag that each belongs to
    _Told = Callable[[dict[int, tuple[list[int], list[int]]]], object]

__all__ = [
    "HELPERS",
    "OUTSIDE",
    "SCOPES",
    "UNCLAIMED",
    "end_host",
    "end_scopes",
    "host_of_tag",
    "is_start",
    "kill",
    "make_tag",
    "marked_tag_of",
    "scope_of_tag",
    "tag_of",
    "tags_of",
]

SCOPES = 1 << 16
"""Upper limit of scope numbers, exclusive."""

UNCLAIMED = 0
"""Scope number of processes whose start was not observed: C code started them on some thread."""

OUTSIDE = SCOPES - 1
"""Scope number of programs started outside any scope."""

HELPERS = SCOPES - 2
"""Scope number of zygotes and everything below them: the reapers and their process trees."""

_MAGIC = 0b10110
_START_MASK = 0xFFFFF
_PAUSE_S = 0.0005
_PAUSE_LIMIT_S = 0.02
_CLEAN = 2
_HUNT_S = 0.003
_HUNT_PIDS = 32
_CATCH_UP_S = 0.1
"""Time limit for catching up with processes started during a scan: many CPUs start them faster than one can scan."""


def make_tag(host: int, started: int, scope: int) -> int:
    """Return the tag of the scope number ``scope`` in the host with this pid and start time.

    A tag consists of 5 bits that identify Holdfast's tags, 22 bits of the pid, 20 bits of the start time and 16 bits of
    the scope number.
    """
    return ((_MAGIC << 22 | host) << 20 | started & _START_MASK) << 16 | scope


def scope_of_tag(tag: int) -> int:
    """Return the scope number of a tag."""
    return tag & (SCOPES - 1)


def host_of_tag(tag: int) -> tuple[int, int] | None:
    """Return the pid and the lower 20 bits of the start time of the host; None if the tag is not one of Holdfast's."""
    if tag >> 58 != _MAGIC:
        return None
    return tag >> 36 & 0x3FFFFF, tag >> 16 & _START_MASK


def is_start(lower: int, started: int) -> bool:
    """Whether ``lower`` equals the lower 20 bits of the start time ``started``."""
    return started & _START_MASK == lower


def tag_of(pid: int, carrier: int = seal.CARRIERS[0]) -> int | None:
    """Return the tag in a process's carrier, even of a zombie; None if the process carries no tag or is gone."""
    tag = seal.read(pid, carrier)
    return None if tag is None or tag >> 58 != _MAGIC else tag


def tags_of(pid: int) -> list[int]:
    """Return all tags of a process; it has several if hosts run below other hosts."""
    return [tag for carrier in seal.CARRIERS if (tag := tag_of(pid, carrier)) is not None]


def marked_tag_of(pid: int) -> int | None:
    """Return the tag in the environment with which a process was executed; None if absent or unreadable."""
    marker = procfs.environment_value(pid, procfs.SCOPE_MARKER)
    return int(marker) if marker is not None and marker.isdigit() else None


def _look_at_all(carrier: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Yield processes with a wanted tag, parents before children, so that no parent survives its killed child."""
    for pid in _every_pid():
        tag = tag_of(pid, carrier)
        if tag is not None and wanted(tag):
            yield pid, tag


class _BehindError(Exception):
    """The scan is incomplete, because new pids were assigned faster than it could read them."""


def _every_pid() -> Iterator[int]:
    """Yield all pids in rising order, then new ones until none is left: every process alive at the end was yielded.

    Raises:
        _BehindError: new pids are still being assigned at the time limit.
    """
    newest = _newest_pid()
    yield from sorted(procfs.all_pids())
    end_at = time.monotonic() + _CATCH_UP_S
    while (now := _newest_pid()) != newest:
        if time.monotonic() >= end_at:
            raise _BehindError
        if now > newest:
            yield from range(newest + 1, now + 1)
        else:  # the pids wrapped around
            yield from sorted(procfs.all_pids())
        newest = now


def _look_at_newest(carrier: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Yield processes with a wanted tag among the most recently assigned pids."""
    newest = _newest_pid()
    for pid in range(newest, max(1, newest - _HUNT_PIDS), -1):
        tag = tag_of(pid, carrier)
        if tag is not None and wanted(tag):
            yield pid, tag


def _newest_pid() -> int:
    load = procfs.read_text("/proc/loadavg")
    return int(load.split()[-1]) if load else 0


def _look_below(
    host: int, without: frozenset[int], carrier: int, wanted: Callable[[int], bool], known: dict[tuple[int, int], int]
) -> list[tuple[int, int]]:
    """Return processes below the host that belong to a wanted tag, even if they have lost the tag.

    Such a process carries the tag, has it in its environment, is known, or is a descendant of such a process.
    """
    tree: dict[int, int] = {}
    for pid in procfs.descendants(host, without=without):
        stat = procfs.read_stat(pid)
        if stat is None or stat.dead:
            continue
        owner: int | None = tree.get(stat.parent) or known.get((pid, stat.started))
        for tag in (tag_of(pid, carrier), marked_tag_of(pid)) if owner is None else ():
            if owner is None and tag is not None and wanted(tag):
                owner = tag
        if owner is not None:
            tree[pid] = known[pid, stat.started] = owner  # one killed earlier may still be dying
    return list(tree.items())


def _strike(pid: int, tag: int, carried: Callable[[int, int], bool]) -> bool | None:
    """Kill ``pid`` if it still belongs to the tag; True if it was alive, None if not permitted, False otherwise."""
    try:
        pidfd = procfs.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _has_ended(pidfd) or not carried(pid, tag):
            return False
        procfs.pidfd_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    finally:
        os.close(pidfd)
    return True


def _has_ended(pidfd: int) -> bool:
    """Whether no thread of the process runs any more."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


class _Chase:
    """Kills the processes of some scopes, repeatedly until none is left.

    Parameters:
        carried: returns whether the process with this pid still belongs to the scope of the tag.
        bound_s: time limit.
        tell: called with the results of finished scopes, a dict from tag to the killed pids and the pids still alive at
            the time limit; after the second scan, called even if the dict is empty.
    """

    def __init__(
        self,
        carried: Callable[[int, int], bool],
        bound_s: float,
        tell: _Told,
    ) -> None:
        self._carried = carried
        self._tell = tell
        self._end_at = time.monotonic() + bound_s
        self._killed: dict[int, dict[int, None]] = {}
        self._struck: set[int] = set()
        self._pause_s = _PAUSE_S

    def strike(self, look: _Look) -> tuple[dict[int, list[int]], bool]:
        """Kill the processes that the scan finds; return their pids by tag, and whether the scan was complete."""
        found: dict[int, list[int]] = {}
        try:
            for pid, tag in look:
                struck = _strike(pid, tag, self._carried)
                if struck is not False:
                    found.setdefault(tag, []).append(pid)
                if struck:
                    self._killed.setdefault(tag, {})[pid] = None
                    self._struck.add(pid)
        except _BehindError:
            return found, False
        return found, True

    def killed(self, tag: int, left: Collection[int] = ()) -> list[int]:
        """Return the killed pids of the tag's scope, except those in ``left``."""
        return [pid for pid in self._killed.get(tag, ()) if pid not in left]

    def run(self, tags: Iterable[int], look: Callable[[], _Look], hunt: Callable[[], _Look]) -> None:
        """Scan and kill until each scope was found empty twice in a row, or the time limit is reached.

        If the last scan is incomplete, a scope of which it found no process is not reported.
        """
        clean = dict.fromkeys(tags, 0)
        looks = 0
        while clean:
            found, complete = self.strike(look())
            looks += 1
            clean = {tag: count + 1 if complete and tag not in found else 0 for tag, count in clean.items()}
            late = time.monotonic() >= self._end_at
            done = [tag for tag, count in clean.items() if count == _CLEAN or (late and tag in found)]
            if done or looks == _CLEAN:
                told = {tag: found.get(tag, []) for tag in done}
                self._tell({tag: (self.killed(tag, left), left) for tag, left in told.items()})
            for tag in done:
                del clean[tag]
            if late and not complete:
                return
            if found and clean:
                self._hunt(hunt)

    def _hunt(self, hunt: Callable[[], _Look]) -> None:
        """Give killed processes a moment to die; while new ones appear, keep scanning without a pause."""
        until = time.monotonic() + _HUNT_S
        while self._new(hunt()) and time.monotonic() < until:
            pass
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _PAUSE_LIMIT_S)

    def _new(self, look: _Look) -> bool:
        before = len(self._struck)
        self.strike(look)
        return len(self._struck) > before


def kill(
    host: int,
    without: Collection[int],
    carrier: int | None,
    tags: Mapping[int, Iterable[tuple[int, int]]],
    bound_s: float,
    tell: _Told,
    *,
    sealed: bool,
) -> None:
    """Kill everything that belongs to the scopes of ``tags``, until nothing is left.

    Parameters:
        host: pid of the host, which is a subreaper.
        without: pids that are skipped with their subtrees: the zygote, with its reapers.
        carrier: resource limit that holds the tags; None if no limit holds tags.
        tags: tags of the scopes, each with the pids and start times of programs that were started in the scope and may
            have lost their tag.
        bound_s: time limit in seconds.
        tell: called with a dict from tag to the killed pids and the pids still alive at the time limit. Each tag is
            reported once, as soon as its result is known. If no result is known after the second scan, the dict is
            empty. If a tag is never reported, nothing is proven about its scope.
        sealed: whether the tags are sealed, so that no process can have lost its tag.
    """
    known = {root: tag for tag, roots in tags.items() for root in roots}
    limit = seal.CARRIERS[0] if carrier is None else carrier

    def wanted(tag: int) -> bool:
        return tag in tags

    def carried(pid: int, tag: int) -> bool:
        if tag_of(pid, limit) == tag:
            return True
        stat = procfs.read_stat(pid)
        return stat is not None and known.get((pid, stat.started)) == tag

    def look() -> _Look:
        if not sealed:  # first, because processes whose parents were killed are no longer below them
            yield from _look_below(host, frozenset(without), limit, wanted, known)
        yield from [(pid, tag) for (pid, _), tag in known.items()]
        yield from _others(host, _look_at_all(limit, wanted))

    _Chase(carried, bound_s, tell).run(tags, look, lambda: _others(host, _look_at_newest(limit, wanted)))


def _others(host: int, look: _Look) -> _Look:
    """Exclude the host, which itself carries the tag of processes that C code starts in it."""
    return ((pid, tag) for pid, tag in look if pid != host)


def end_host(host: int, started: int, bound_s: float) -> None:
    """Kill everything that was started in scopes of an ended host, or by C code in that host, until nothing is left."""
    _end_programs(host, started, bound_s, spared=(OUTSIDE, HELPERS))


def end_scopes(host: int, started: int, bound_s: float, may_kill: Callable[[], bool]) -> None:
    """Kill everything that was started in scopes of a host that lives on, until nothing is left.

    Parameters:
        may_kill: asked before each kill.
    """
    _end_programs(host, started, bound_s, spared=(OUTSIDE, HELPERS, UNCLAIMED), spared_pid=host, may_kill=may_kill)


def _end_programs(
    host: int,
    started: int,
    bound_s: float,
    *,
    spared: Collection[int],
    spared_pid: int = 0,
    may_kill: Callable[[], bool] = lambda: True,
) -> None:
    owner = (host, started & _START_MASK)

    def ours(tag: int) -> bool:
        return scope_of_tag(tag) not in spared and host_of_tag(tag) == owner

    def carried(pid: int, tag: int) -> bool:
        if pid == spared_pid or not may_kill():  # a living host has a scope's tag while it starts a program there
            return False
        if any(map(ours, tags_of(pid))):  # first: it is quick, and so are the processes being chased
            return True
        marked = marked_tag_of(pid)
        return marked is not None and ours(marked)

    def look() -> _Look:
        return ((pid, 0) for pid in _every_pid() if carried(pid, 0))

    def hunt() -> _Look:
        newest = _newest_pid()
        return ((pid, 0) for pid in range(newest, max(1, newest - _HUNT_PIDS), -1) if any(map(ours, tags_of(pid))))

    _Chase(carried, bound_s, lambda _: None).run([0], look, hunt)
