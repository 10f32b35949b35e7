"""Finding and killing what foreign code started: by an inherited tag, by a marker, by descent.

The zygote imports this module, so it imports only what is cheap. A process that is not under a reaper can leave its
session, its parents and its environment behind, but not its tag, where that is sealed (`holdfast.runtime.seal`). The
tag holds the host and the number of the scope. Where it is not sealed, the environment marker and descent help to find
what has lost it, and nothing is proven by finding nobody.

Two looks at all processes, one after the other, that find nobody with a tag prove that nobody has it: pids are given
out in rising order and looked at in one order, with those that are given out meanwhile. So whoever is missed by one
look was started during it, by somebody whom the other sees, unless all numbers of the machine were given out meanwhile.
A look that cannot catch up with the pids that are given out kills whom it meets, and proves nothing.
"""

from __future__ import annotations

import os
import select
import signal
import time

from holdfast.runtime import procfs, seal

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
"""Numbers of scopes are below this."""

UNCLAIMED = 0
"""The number of what nobody was seen to start: C code did, on some thread."""

OUTSIDE = SCOPES - 1
"""The number of what was started outside of any scope."""

HELPERS = SCOPES - 2
"""The number of zygotes and of all below them: reapers, which hold their trees themselves, and those trees."""

_MAGIC = 0b10110
_START_MASK = 0xFFFFF
_PAUSE_S = 0.0005
_PAUSE_LIMIT_S = 0.02
_CLEAN = 2
_HUNT_S = 0.003
_HUNT_PIDS = 32
_CATCH_UP_S = 0.1
"""How long a look goes on to what is started during it: many processors start faster than one can look."""


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


def tag_of(pid: int, carrier: int = seal.CARRIERS[0]) -> int | None:
    """The tag that a process carries there, be it a zombie; None when it has none or is gone."""
    tag = seal.read(pid, carrier)
    return None if tag is None or tag >> 58 != _MAGIC else tag


def tags_of(pid: int) -> list[int]:
    """All tags of a process: a host that runs below another one gives its own besides."""
    return [tag for carrier in seal.CARRIERS if (tag := tag_of(pid, carrier)) is not None]


def marked_tag_of(pid: int) -> int | None:
    """The tag in the environment that a process was executed with."""
    marker = procfs.environment_value(pid, procfs.SCOPE_MARKER)
    return int(marker) if marker is not None and marker.isdigit() else None


def _look_at_all(carrier: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """Who carries a wanted tag; parents before their children, so that none goes on when its child is dead."""
    for pid in _every_pid():
        tag = tag_of(pid, carrier)
        if tag is not None and wanted(tag):
            yield pid, tag


class _BehindError(Exception):
    """Pids were given out faster than they were looked at: the look is not complete."""


def _every_pid() -> Iterator[int]:
    """All pids in rising order, and those given out meanwhile, until no more are: who lives at the end was given.

    Raises:
        _BehindError: more are given out for as long as it may go on.
    """
    newest = _newest_pid()
    yield from sorted(procfs.all_pids())
    end_at = time.monotonic() + _CATCH_UP_S
    while (now := _newest_pid()) != newest:
        if time.monotonic() >= end_at:
            raise _BehindError
        if now > newest:
            yield from range(newest + 1, now + 1)
        else:  # the numbers began anew
            yield from sorted(procfs.all_pids())
        newest = now


def _look_at_newest(carrier: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """The same among the pids that were given out last."""
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
    """Who is below the host and carries a wanted tag, or is marked with one, or is known, or a child of one of these:
    for tags that may have been shed."""
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
            tree[pid] = known[pid, stat.started] = owner  # who was struck once may still be dying, without its parents
    return list(tree.items())


def _strike(pid: int, tag: int, carried: Callable[[int, int], bool]) -> bool | None:
    """Kill ``pid`` if it still belongs to the tag; True when it was alive, None when we may not, False otherwise."""
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
    """One kill of the processes of some scopes, to a fixed point.

    Parameters:
        carried: whether the process with this pid still belongs to the scope of the tag.
        tell: called after each look but the first: for the scopes that are done by then, by their tag, who was killed,
            and who was still there at the bound.
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
        """Kill whom the look finds; who they were, by tag, and whether the look was complete."""
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
        """Whom it killed of this scope."""
        return [pid for pid in self._killed.get(tag, ()) if pid not in left]

    def run(self, tags: Iterable[int], look: Callable[[], _Look], hunt: Callable[[], _Look]) -> None:
        """Strike until each scope was found empty twice in a row, or the time is over. Nothing is told of a scope that
        was not found empty, when nobody of it was found in the end either."""
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
        """Leave the struck a moment to die; while new ones come, be as quick as they are."""
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
    """Kill what belongs to the scopes of ``tags``, to a fixed point.

    Parameters:
        host: the pid of the host, which is a subreaper.
        without: pids whose subtrees are no concern: the zygote with its reapers.
        carrier: the limit that holds the tags; None when there is none.
        tags: the tags of the scopes, each with pid and start time of programs that were started there and may have
            none.
        bound_s: for how long to try.
        tell: called with the pids that were killed, and those that were still there at the bound, by tag; with each
            tag once, as soon as it is known, and with none when nothing is known after a first moment. Of a tag that
            it was never told, nothing is proven.
        sealed: whether nothing could lose its tag.
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
        if not sealed:  # first: whose parents are struck is no longer below them
            yield from _look_below(host, frozenset(without), limit, wanted, known)
        yield from [(pid, tag) for (pid, _), tag in known.items()]
        yield from _others(host, _look_at_all(limit, wanted))

    _Chase(carried, bound_s, tell).run(tags, look, lambda: _others(host, _look_at_newest(limit, wanted)))


def _others(host: int, look: _Look) -> _Look:
    """The host itself carries the tag of what C code starts in it."""
    return ((pid, tag) for pid, tag in look if pid != host)


def end_host(host: int, started: int, bound_s: float) -> None:
    """Kill what any scope of a host that has ended started, wherever it is now, and what C code in it started, to a
    fixed point."""
    gone = (host, started & _START_MASK)

    def ours(tag: int) -> bool:
        return scope_of_tag(tag) not in (OUTSIDE, HELPERS) and host_of_tag(tag) == gone

    def carried(pid: int, tag: int) -> bool:
        if any(map(ours, tags_of(pid))):  # first: it is quick, and who is hunted is so too
            return True
        marked = marked_tag_of(pid)
        return marked is not None and ours(marked)

    def look() -> _Look:
        return ((pid, 0) for pid in _every_pid() if carried(pid, 0))

    def hunt() -> _Look:
        newest = _newest_pid()
        return ((pid, 0) for pid in range(newest, max(1, newest - _HUNT_PIDS), -1) if any(map(ours, tags_of(pid))))

    _Chase(carried, bound_s, lambda _: None).run([0], look, hunt)
