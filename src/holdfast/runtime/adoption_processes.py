"""Adopting the programs that foreign code starts by itself inside a scope, so that they end with it.

While installed, what Python starts by ``subprocess``, ``asyncio.create_subprocess_*``, ``multiprocessing``,
``os.system``, ``os.fork`` and ``os.posix_spawn`` inside a scope becomes a `ForeignProcess` of that scope. Invariants:

- The program's exit status stays its starter's: nothing here waits for a pid that foreign code was given. Only
  orphans that came home to this process, which is a child subreaper meanwhile, are waited for.
- A scope has a number; the number is in the tag (`holdfast.runtime.foreign`) that everything started in it inherits
  and, where the tag is sealed (`holdfast.runtime.seal`), cannot shed; and in the environment where one can be given.
  Attribution needs no luck with parents, sessions or groups.
- What C code starts on some thread is nobody's: it carries the number of this process. It is a scope's if it is a child
  of a thread that works for that scope now and has not done so for another since; else it is told to the operator, and
  no scope that was open then may say that nothing is left.
- A scope's members are complete: when an adopted program ends and leaves strays, these are adopted before its end is
  told.
- Each adopted program is named by a pidfd that was opened while its pid could not be recycled.
- A program has its tag from its first moment: for the time of the start, which no two share, it is ours.

Known gaps: what C code of an extension starts by itself, on another thread and just in the moment of a start, has that
start's tag.

What is shared between scopes must be started outside of them (a process pool that was filled inside a scope ends with
that scope). The resource tracker and the fork server of ``multiprocessing`` are known to be shared and left alone.
"""

from __future__ import annotations

import _posixsubprocess
import asyncio
import contextlib
import contextvars
import ctypes
import functools
import itertools
import logging
import math
import multiprocessing.process
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from holdfast.logs import redact
from holdfast.runtime import foreign, procfs
from holdfast.runtime.once import Once
from holdfast.runtime.passes import KillPasses
from holdfast.runtime.processes import ProcessHost, process_host
from holdfast.runtime.seal import Seal, seal
from holdfast.runtime.seal import current as current_seal
from holdfast.runtime.starting import host_marker
from holdfast.runtime.trees import KILL_BOUND_S, TreeResult
from holdfast.runtime.zygote_link import supported

__all__ = [
    "ForeignProcess",
    "Owner",
    "Restorer",
    "install",
    "kill_everything",
    "kill_trees",
    "look_soon",
    "may_have_started",
    "strangers",
]

_ANSWER_S = 1.0
_AGAIN_S = (0.01, 0.1)
"""When the zygote was killed over a kill, another one is asked after this, each once: it takes a moment to be known."""

_LOOK_PAUSE_S = 0.004
_TICK_S = 1.0
_HASTY_TICK_S = 0.02
_MANY = 100
_UNKNOWN_ZOMBIE_S = 5.0
_ROUNDS = 8
_STRUCK_S = 1.0
"""How long a program that nobody takes any more may need to die of its signal."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_TOLD_PER_TURN = 32
_SHARED = frozenset({"multiprocessing.resource_tracker", "multiprocessing.forkserver"})
"""Modules whose helper processes are shared. Who starts a program says so, never what its command line says."""


class Owner(Protocol):
    """Who adopted programs belong to: a scope."""

    def adopt_process(self, process: ForeignProcess, /) -> bool:
        """Take it; False when this owner takes nothing any more: then it is killed. Called from any thread."""
        ...


class ForeignProcess:
    """A program that foreign code started in a scope, or a stray of one that has ended.

    Attributes:
        pid: its number; its starter waits for it, nobody else. A stray is waited for here.
        name: for people.
        started: start time in clock ticks since boot.
    """

    __slots__ = ("_ended", "_lock", "_orphan", "_pidfd", "_tag", "_unnamed", "name", "pid", "started")

    def __init__(self, pid: int, name: str, started: int, tag: int, pidfd: int, *, orphan: bool, unnamed: bool) -> None:
        self.pid = pid
        self.name = name
        self.started = started
        self._tag = tag
        self._pidfd = pidfd
        self._lock = threading.Lock()
        self._orphan = orphan
        self._unnamed = unnamed  # its starter may wait for it, and has not told its pid
        self._ended: Once[bool] = Once()

    def __repr__(self) -> str:
        return f"<ForeignProcess {self.name} pid={self.pid}{' ended' if self.ended else ''}>"

    @property
    def ended(self) -> bool:
        """True once it runs no more, whether or not its starter has waited for it."""
        return self._ended.value is not None

    async def wait_ended(self) -> None:
        """Wait until it runs no more."""
        await self._ended.wait()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called once from the reading thread when it ends; at once when it has."""
        if not self._ended.add(callback):
            callback()

    def signal(self, signum: int) -> bool:
        """Signal exactly this program; False when it has ended, or may not be signalled. From any thread."""
        with self._lock:  # against the reading thread's close: the number may be another program's afterwards
            if self._pidfd < 0:
                return False
            try:
                procfs.pidfd_signal(self._pidfd, signum)
            except OSError:
                return False
        return True

    def _give_up_pidfd(self) -> int:
        """The pidfd, for who closes it; negative when somebody has it already."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
        return pidfd


class Restorer:
    """Undoes an `install`; also a context manager."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def restore(self) -> None:
        """Start programs as before. Does nothing the second time."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Restorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


class Unclaimed(NamedTuple):
    """A process that nobody was seen to start.

    Attributes:
        pid: its number.
        started: start time in clock ticks since boot.
        thread: the thread of this process that is its parent.
    """

    pid: int
    started: int
    thread: int


class _Family:
    """The adopted programs of one owner."""

    __slots__ = ("live", "owner", "tag")

    def __init__(self, owner: Owner, tag: int) -> None:
        self.owner = owner
        self.tag = tag
        self.live: set[ForeignProcess] = set()


class _Adoption:
    """What is known while installed. Entered by threads that start programs and by the reading thread of the host."""

    def __init__(
        self,
        current: Callable[[], Owner | None],
        processes: ProcessHost,
        seal: Seal,
        home: Callable[[int], Owner | None],
        lingers: Callable[[], bool],
    ) -> None:
        self.current = current
        self.processes = processes
        self.seal = seal
        self.home = home
        self._lingers = lingers
        self.ended = False
        self.waiting: dict[asyncio.AbstractEventLoop, list[tuple[float, Callable[[int], object]]]] = {}
        self.looked_at = -math.inf
        self.passes = KillPasses(processes, seal, self.claim, self._conclude)
        self.pid = os.getpid()
        self.started = procfs.start_time(self.pid) or 0
        self._lock = threading.Lock()
        self._families: dict[int, _Family] = {}  # by id of the owner, which the family keeps alive
        self._by_tag: dict[int, _Family] = {}
        self._known: dict[int, ForeignProcess] = {}
        self._outside = {pid for pid in procfs.children(self.pid) if not self._is_adopted(pid)}
        self._starting = 0
        self._tick_at = 0.0
        self._burying = threading.Lock()
        self._entering_strays = threading.Lock()
        self._just_ended: list[tuple[ForeignProcess, _Family]] = []
        self._restless: list[tuple[ForeignProcess, _Family]] = []
        self._just_buried = 0
        self._told: set[tuple[int, int]] = set()
        self._zombies: dict[int, float] = {}
        self._busy = False
        self._buried = 0

    # -- starts

    @property
    def own_tag(self) -> int:
        """The tag of this process, and so of what C code starts in it."""
        return foreign.make_tag(self.pid, self.started, foreign.UNCLAIMED)

    @property
    def outside_tag(self) -> int:
        """The tag of what is started outside of scopes."""
        return foreign.make_tag(self.pid, self.started, foreign.OUTSIDE)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: it adopts nothing, and a lock may be held for ever there."""
        return os.getpid() != self.pid

    def off(self) -> bool:
        """Whether a start here is as any other: in a forked child, and when nothing is adopted any more. What is left
        of a scope that has ended is refused even then.

        Raises:
            ScopeClosed: as `current`.
        """
        if self.forked:
            return True
        if self.ended:
            self.current()
        return self.ended

    def owner(self) -> Owner | None:
        """The scope that a start belongs to now; None outside of scopes and in forked children."""
        return None if self.forked else self.current()

    def tag_for(self, owner: Owner) -> int:
        """The tag of what ``owner`` starts now."""
        with self._lock:
            family = self._families.get(id(owner))
            if family is None:
                family = _Family(owner, self._free_tag())
                self._families[id(owner)] = family
                self._by_tag[family.tag] = family
                self._busy = True
            return family.tag

    def _free_tag(self) -> int:
        """A tag that no family has. Numbers go on where an earlier installation ended: what it has left is not ours."""
        while True:
            tag = foreign.make_tag(self.pid, self.started, next(_numbers) % (foreign.HELPERS - 1) + 1)
            if tag not in self._by_tag:
                return tag

    def known_tag(self, owner: object) -> int | None:
        """The tag of what ``owner`` has started so far; None when it has started nothing."""
        family = self._families.get(id(owner))
        return None if family is None else family.tag

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Around a start, until the new pid is known: meanwhile no unknown child is taken for an orphan."""
        self.begin()
        try:
            yield
        finally:
            self.finish()

    def begin(self) -> None:
        """A start begins."""
        with self._lock:
            self._starting += 1
            self._busy = True

    def finish(self) -> None:
        """The new pid is known, or there is none."""
        with self._lock:
            self._starting -= 1

    @contextlib.contextmanager
    def bequeath(self, tag: int | None) -> Iterator[None]:
        """Around the very start: what is started has this tag from its first moment, as it inherits our limits; None:
        nobody's. All starts pass through here one by one, so none gets the tag of another."""
        with _inheritance:
            limits = self.seal.limits()
            self.seal.put(0, self.outside_tag if tag is None else tag)
            try:
                yield
            finally:
                if limits is not None and os.getpid() == self.pid:  # a forked child keeps it
                    self.seal.restore(0, limits)

    def unadopted(self) -> contextlib.AbstractContextManager[None]:
        """Around a start when it is `off`: what is started after the end is nobody's, and does not end with us."""
        return contextlib.nullcontext() if self.forked else self.bequeath(None)

    @contextlib.contextmanager
    def bequeath_by(self, pid: int, tag: int) -> Iterator[None]:
        """As `bequeath`, for what another process forks for us."""
        with _inheritance:
            self.seal.put(pid, tag)
            try:
                yield
            finally:
                self.seal.put(pid, self.outside_tag)

    def enter(self, owner: Owner, pid: int, name: str, tag: int, *, orphan: bool = False) -> None:
        """A program was started for ``owner`` just now, or is an orphan of its; it was not waited for yet.

        When the owner takes nothing any more, it is dead when this returns, with what it had started by then: nobody
        else waits for them.
        """
        if not self._enter(owner, pid, name, tag, orphan=orphan):
            self._enter_strays(self._family(owner, tag))

    def _family(self, owner: Owner, tag: int) -> _Family:
        """The family of ``owner``, which may have been forgotten since `tag_for`."""
        with self._lock:
            family = self._families.get(id(owner))
            if family is None:
                family = self._by_tag[tag] = self._families[id(owner)] = _Family(owner, tag)
            return family

    def _enter(self, owner: Owner, pid: int, name: str, tag: int, *, orphan: bool, unnamed: bool = False) -> bool:
        """False if it was not taken, and is dead then; or if it is just being taken in by another thread."""
        self.seal.put(pid, tag)
        stat = procfs.read_stat(pid)
        try:
            pidfd = procfs.pidfd_open(pid)
        except ProcessLookupError:
            return True  # ended, and somebody waited for any child
        except OSError:
            os.kill(pid, signal.SIGKILL)  # it cannot be held, and it was not waited for: the number is its own
            raise
        started = 0 if stat is None else stat.started
        process = ForeignProcess(pid, name, started, tag, pidfd, orphan=orphan, unnamed=unnamed)
        with self._lock:
            known = self._known.get(pid)
            if known is not None and known.started == started:  # found as a stray while it was being started
                known._orphan = known._orphan and orphan
                known._unnamed = known._unnamed or unnamed
                os.close(pidfd)
                return False
            family = self._families.get(id(owner))
            if family is None:  # its last other program ended since tag_for()
                family = self._by_tag[tag] = self._families[id(owner)] = _Family(owner, tag)
            family.live.add(process)
            self._known[pid] = process
        taken = owner.adopt_process(process)
        if not taken:
            process.signal(signal.SIGKILL)
            _await_end(pidfd, _STRUCK_S)
        self.processes._watch(pidfd, lambda: self._end(process, family))
        return taken

    def _enter_strays(self, *families: _Family) -> bool:
        """Take in the orphans that belong to these; one round of this at a time, so that at its end all of them are
        taken, or dead. False when there may be more: they come faster than one can look."""
        tags = {family.tag: family for family in families}
        with self._entering_strays:
            ended: set[int] = set()
            for _ in range(_ROUNDS):  # who ended since it was listed may have left strays that were no children of ours
                living, over = self._strays(tags)
                complete = over <= ended
                ended |= over
                for pid, family in living.items():
                    name = procfs.command(pid)
                    complete = self._enter(family.owner, pid, name, family.tag, orphan=True) and complete
                if complete:
                    return True
        return False

    def _strays(self, tags: Mapping[int, _Family]) -> tuple[dict[int, _Family], set[int]]:
        """Orphans with these tags that were not adopted: those that live, and those that have ended, which are waited
        for where it is certain that they are orphans."""
        living: dict[int, _Family] = {}
        over: set[int] = set()
        with self._burying:
            orphans, certain = self._orphans()
            for pid in orphans:
                family = None if pid in self._known else tags.get(self._tag_of(pid) or 0)
                if family is None:
                    continue
                if (certain and _bury_now(pid)) or (stat := procfs.read_stat(pid)) is None or stat.dead:
                    over.add(pid)
                else:
                    living[pid] = family
        return living, over

    def enter_unnamed(self, owner: Owner, name: str, tag: int) -> None:
        """A program was started for ``owner`` just now, and its pid is not told yet. It is an orphan until then, in
        case that nobody else waits for it when its start is cut; but its starter is given the time to: a loop whose
        program somebody else waits for keeps what it holds for it, for ever."""
        with self._lock:  # as a stray of a program that ended just now it may be known already: it is one of these
            for known in self._known.values():
                known._unnamed = known._unnamed or (known._orphan and known._tag == tag)
        for pid in self._strangers():
            if self._tag_of(pid) == tag and not self._enter(owner, pid, name, tag, orphan=True, unnamed=True):
                self._enter_strays(self._family(owner, tag))

    def _is_adopted(self, pid: int) -> bool:
        """Whether a child that is older than this was left by a scope of an earlier installation; else its starter
        waits for it."""
        tag = self._carried_tag(pid)
        if tag is None or foreign.scope_of_tag(tag) in (foreign.OUTSIDE, foreign.HELPERS):
            return False
        return foreign.host_of_tag(tag) == foreign.host_of_tag(self.own_tag)

    def note_outside(self, pid: int) -> None:
        """A program was started outside of any scope."""
        self._outside.add(pid)

    # -- ends

    def _end(self, process: ForeignProcess, family: _Family) -> None:
        """In the reading thread: an adopted program has ended. Its strays are children of ours by now, and are looked
        for once for all that ended at the same time."""
        self._let_go(process)
        with self._lock:
            alone = not self._just_ended
            self._just_ended.append((process, family))
        if alone:
            self.processes._in_reading_thread(self._sweep)

    def _sweep(self) -> None:
        """In the reading thread: take in the strays of all that ended, and tell of their ends. Where strays come faster
        than one can look, their scope has to wait: its stop kills them."""
        with self._lock:
            swept, self._just_ended = self._just_ended, []
        families = {id(family): family for _, family in swept}
        try:
            complete = self._enter_strays(*families.values())
        except BaseException:  # a stray that cannot be held, for want of a descriptor, must not keep its scope waiting
            self._tell_ends(swept)
            raise
        if complete:
            self._tell_ends(swept)
            return
        with self._lock:
            self._restless += swept
            self._busy = True

    def _tell_ends(self, swept: list[tuple[ForeignProcess, _Family]]) -> None:
        with self._lock:
            for process, family in swept:
                family.live.discard(process)
                self._forget_idle(family)
        for process, _ in swept:
            process._ended.set(True)

    def _forget_idle(self, family: _Family) -> None:
        """Forget a family whose owner starts nothing any more, and of which nothing is left. Holds the lock."""
        owner = family.owner
        if not family.live and getattr(owner, "closed", True) and self._families.get(id(owner)) is family:
            del self._families[id(owner)]
            del self._by_tag[family.tag]

    def _orphans(self) -> tuple[list[int], bool]:
        """Our children that neither foreign code nor the process host started, and whether that is certain: while
        something is being started, one of them may be the new one."""
        children = procfs.children(self.pid)  # first: who is started after this is not among them
        with self._lock:
            certain = self._starting == 0
            ours = {link.pid for link in list(self.processes._links.values())}
            unknown = [pid for pid in children if pid not in self._outside and pid not in ours]
            return [pid for pid in unknown if (known := self._known.get(pid)) is None or known._orphan], certain

    def _strangers(self) -> list[int]:
        """Orphans that were not adopted."""
        orphans, _ = self._orphans()
        return [pid for pid in orphans if pid not in self._known]

    def _tag_of(self, pid: int) -> int | None:
        """The tag that it carries; where tags can be shed, else the one that it is marked with."""
        tag = self._carried_tag(pid)
        if not self.seal.sealed and (tag is None or foreign.scope_of_tag(tag) == foreign.UNCLAIMED):
            tag = foreign.marked_tag_of(pid) or tag
        return tag

    def _carried_tag(self, pid: int) -> int | None:
        return None if self.seal.carrier is None else foreign.tag_of(pid, self.seal.carrier)

    def tick(self) -> float:
        """Forget who was waited for; wait for orphans that ended. About once a second, when there is anything. Answers
        after how many seconds it wants to be called again: soon when orphans end by the hundred."""
        self._just_buried = 0
        self._tick()
        return _TICK_S if self._just_buried < _MANY else _HASTY_TICK_S

    def _tick(self) -> None:
        now = time.monotonic()
        if self._buried != self.processes._buried:  # a zygote has ended: the reapers that it leaves come home to us
            self._buried = self.processes._buried
            self._busy = True
        if not self._busy or now < self._tick_at:
            return
        self._tick_at = now + _HASTY_TICK_S
        with self._lock:
            self._busy = False
            restless, self._restless = self._restless, []
            self._just_ended += restless
            for family in list(self._families.values()):
                self._forget_idle(family)
            outside = set(self._outside)
            ended = [pid for pid, process in self._known.items() if process.ended]
        if restless:
            self._sweep()
        if self._lingers():
            self.claim()
        children = set(procfs.children(self.pid))  # after: who is started meanwhile is not forgotten
        with self._lock:
            self._outside -= outside - children
            for pid in ended:
                if pid not in children:
                    self._known.pop(pid, None)
        nobodys = (foreign.UNCLAIMED, foreign.OUTSIDE, foreign.HELPERS)
        if (
            self.bury(lambda tag: tag is not None and foreign.scope_of_tag(tag) not in nobodys)
            or self._known
            or self._outside
            or self._families
        ):
            self._busy = True

    def bury(self, ours: Callable[[int | None], bool]) -> bool:
        """Wait for orphans that have ended and are nobody else's for certain, or that nobody waited for in seconds;
        True if there are orphans left."""
        with self._burying:  # so that no number is waited for twice
            return self._bury(ours)

    def _bury(self, ours: Callable[[int | None], bool]) -> bool:
        now = time.monotonic()
        zombies: dict[int, float] = {}
        left = False
        orphans, certain = self._orphans()
        if not certain:
            return True  # the next tick knows more
        for pid in orphans:
            known = self._known.get(pid)
            if ours(self._carried_tag(pid)) and not (known is not None and known._unnamed):
                buried = _bury_now(pid)
                left = left or not buried
                self._just_buried += buried
                continue
            stat = procfs.read_stat(pid)
            if stat is None:
                continue
            left = True
            if not stat.dead:
                continue
            since = zombies[pid] = self._zombies.get(pid, now)
            if now - since > _UNKNOWN_ZOMBIE_S:
                _bury_now(pid)
                del zombies[pid]
        self._zombies = zombies
        return left

    # -- kills

    def _conclude(self, tags: frozenset[int]) -> None:
        """In the reading thread, after a kill: wait for the orphans among the killed, and go on with the ends that
        had to wait for it."""
        self.bury(tags.__contains__)
        with self._lock:
            over = [(process, family) for process, family in self._restless if family.tag in tags]
            self._restless = [one for one in self._restless if one not in over]
        self._tell_ends(over)

    def unclaimed(self) -> list[Unclaimed]:
        """Children of this process that nobody was seen to start, or that belong to no scope: orphans, and what C code
        started on a thread."""
        with self._lock:
            ours = {link.pid for link in list(self.processes._links.values())}
            known = {*self._known, *self._outside, *ours}
        found = []
        for thread, pid in procfs.children_of_threads(self.pid):
            if pid in known:
                continue
            tag = self._tag_of(pid)
            if tag is not None and foreign.scope_of_tag(tag) != foreign.UNCLAIMED:
                continue
            stat = procfs.read_stat(pid)
            if stat is not None and not stat.dead:
                found.append(Unclaimed(pid, stat.started, thread))
        if found and self.seal.carrier is None:  # without tags one of them may be a program that is being started
            with self._lock:
                found = [one for one in found if one.pid not in self._known and one.pid not in self._outside]
        return found

    def claim(self) -> list[Unclaimed]:
        """Give those of `unclaimed` that a scope has started for certain to it; the others."""
        left = []
        for one in self.unclaimed():
            home = self.home(one.thread) if one.thread != self.pid else None
            if home is None:
                left.append(one)
                continue
            tag = self.tag_for(home)
            for pid in (one.pid, *procfs.descendants(one.pid)):
                self.seal.put(pid, tag)
            if getattr(home, "closed", False):  # of a thread that was abandoned
                self.passes.ask({tag: []}, KILL_BOUND_S)
        return left

    def strangers_since(self, left: Sequence[Unclaimed], since: float) -> int:
        """How many of these may have been started by a scope that was opened ``since``, in clock ticks since boot. The
        operator is told of each once."""
        mine = [one for one in left if one.started >= int(since)]
        for one in mine:
            if (one.pid, one.started) not in self._told:
                self._told.add((one.pid, one.started))
                _report(f"{one.pid} {procfs.command(one.pid)}")
        return len(mine)

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer those on this loop who wait for a look."""
        asked = self.waiting.pop(loop)
        left = self.claim()
        self.looked_at = time.monotonic()
        self._tell_some(loop, left, asked)

    def _tell_some(
        self,
        loop: asyncio.AbstractEventLoop,
        left: Sequence[Unclaimed],
        asked: Sequence[tuple[float, Callable[[int], object]]],
    ) -> None:
        if rest := asked[_TOLD_PER_TURN:]:
            loop.call_soon(self._tell_some, loop, left, rest, context=contextvars.Context())
        for since, tell in asked[:_TOLD_PER_TURN]:
            tell(self.strangers_since(left, since) if left else 0)

    def _let_go(self, process: ForeignProcess) -> None:
        """Close its pidfd, once. In the reading thread."""
        pidfd = process._give_up_pidfd()
        if pidfd >= 0:
            self.processes._unwatch(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Watch nothing any more, soon."""
        self.processes._in_reading_thread(self._let_all_go)

    def _let_all_go(self) -> None:
        with self._lock:
            known = list(self._known.values())
        for process in known:
            self._let_go(process)


_numbers = itertools.count()

_inheritance = threading.RLock()
"""Held around each start, by whichever installation: all share the limit that is inherited."""


def _renew_lock() -> None:
    global _inheritance
    _inheritance = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # whoever held it may not have been forked along
_log = logging.getLogger("holdfast.runtime")
_adoption: _Adoption | None = None


async def kill_trees(
    roots: Sequence[ForeignProcess], *, owner: Owner | None = None, bound_s: float = KILL_BOUND_S
) -> TreeResult:
    """Kill adopted programs of a scope with all they ever started; their starters still get the exit statuses.

    A zygote's fork does it, so a busy interpreter does not delay it; kills that are asked for at the same time share
    it. When this returns, those killed run no more.

    Parameters:
        roots: what one or more scopes adopted; all that belongs to these scopes is killed.
        owner: a scope whose programs are killed too, though all that is known of them may have ended.
        bound_s: how long to try.
    """
    adoption = _adoption
    if adoption is None:
        return TreeResult(proven=not roots)
    tags: dict[int, list[tuple[int, int]]] = {root._tag: [] for root in roots}
    for root in roots:
        if not root.ended:
            tags[root._tag].append((root.pid, root.started))
    if owner is not None:
        tags.setdefault(adoption.tag_for(owner), [])
    if not tags:
        return TreeResult()
    return await _kill(adoption, tags, roots, bound_s)


async def kill_everything(*, bound_s: float = KILL_BOUND_S) -> TreeResult:
    """Kill what any scope's foreign code started, and what C code started in this process: before a host ends."""
    adoption = _adoption
    if adoption is None:
        return TreeResult()
    return await _kill(adoption, {tag: [] for tag in (adoption.own_tag, *list(adoption._by_tag))}, (), bound_s)


async def _kill(
    adoption: _Adoption, tags: dict[int, list[tuple[int, int]]], roots: Sequence[ForeignProcess], bound_s: float
) -> TreeResult:
    end_at = time.monotonic() + bound_s
    for again_s in (*_AGAIN_S, None):
        answer = adoption.passes.ask(tags, bound_s)
        try:
            async with asyncio.timeout(bound_s + _ANSWER_S):
                result = await answer.wait()
        except TimeoutError:
            result = answer.value or TreeResult(proven=False)  # it may have come while the loop was held up
        bound_s = end_at - time.monotonic()
        if result != TreeResult(proven=False) or bound_s <= 0 or again_s is None:
            break
        await asyncio.sleep(again_s)  # the zygote was killed over it: another one is asked
    if result == TreeResult(proven=False):  # nobody could be asked: the roots at least can be hit
        result = TreeResult(killed=_kill_roots(roots), proven=False)
    return result


def leave_thread() -> None:
    """The calling thread ends to work for a scope: what C code started on it meanwhile is the scope's."""
    adoption = _adoption
    if adoption is None or adoption.forked:
        return
    listed = procfs.read_text("/proc/thread-self/children")
    if listed and any(pid not in adoption._known and pid not in adoption._outside for pid in map(int, listed.split())):
        adoption.claim()


def may_have_started(owner: Owner) -> bool:
    """Whether foreign code started a program in this scope that somebody saw."""
    return _adoption is not None and _adoption.known_tag(owner) is not None


def strangers(since: float) -> int:
    """How many processes live that a scope opened ``since`` (clock ticks since boot) may have started, and that cannot
    be attributed: C code started them. They are left alone; the operator is told of them.

    What is certain to be of a thread of a scope is no such process: it is given to that scope.
    """
    if _adoption is None:
        return 0
    return _adoption.strangers_since(_adoption.claim(), since)


def look_soon(loop: asyncio.AbstractEventLoop, since: float, tell: Callable[[int], object]) -> None:
    """Have ``tell`` called with the number of `strangers`: one look for all who ask meanwhile.

    That is in one of the next turns of the loop, each of which tells some, so that the ends of many scopes do not stall
    it; or after a pause if the last look was just before: a look reads a file for each thread, and many stops that end
    one by one shall not each have one.
    """
    adoption = _adoption
    if adoption is None:
        tell(0)
        return
    if getattr(loop, "virtual", False):  # the explorer's loops have no programs
        tell(0)
        return
    waiting = adoption.waiting.setdefault(loop, [])
    waiting.append((since, tell))
    if len(waiting) > 1:
        return
    pause_s = adoption.looked_at + _LOOK_PAUSE_S - time.monotonic()
    if pause_s > 0:
        loop.call_later(pause_s, adoption.look, loop, context=contextvars.Context())
    else:
        loop.call_soon(adoption.look, loop, context=contextvars.Context())


def _bury_now(pid: int) -> bool:
    """Wait for this child if it has ended; whether there is nothing to wait for any more."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _await_end(pidfd: int, timeout_s: float) -> None:
    """Wait, in this thread, until the process of the descriptor runs no more, or the time is over."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(timeout_s * 1000)


def _kill_roots(roots: Sequence[ForeignProcess]) -> tuple[int, ...]:
    return tuple(root.pid for root in roots if root.signal(signal.SIGKILL))


def install(
    current: Callable[[], Owner | None],
    processes: ProcessHost | None = None,
    *,
    sealed: bool = True,
    home: Callable[[int], Owner | None] = lambda thread: None,
    lingers: Callable[[], bool] = lambda: False,
) -> Restorer:
    """Adopt, from now on and in the whole process, what foreign code starts inside a scope.

    Parameters:
        current: says which scope the running code is in; it may raise where nothing may be started.
        processes: whose zygote does the killing; None for the one of this process. It is started now: what it finds
            when this process is killed, it kills.
        sealed: whether to make tags indelible, for good: see `holdfast.runtime.seal` for what it costs.
        home: the scope that a thread (its number in the kernel) works for. When it stops to, it calls `leave_thread`.
        lingers: whether threads of ended scopes still run. While they do at the end, ``current`` goes on to refuse
            them, though nothing is adopted any more, and the next installation takes over without a gap.

    Raises:
        RuntimeError: it is installed already.
    """
    global _adoption, _hooks
    if _adoption is not None:
        raise RuntimeError("foreign processes are adopted already; restore() the first install() before the next")
    if not supported():
        return Restorer(lambda: None)
    if _hooks is not None and sealed and not current_seal().sealed:  # their tag is in the way of a seal
        _hooks.take_off()
        _hooks = None
    processes = process_host() if processes is None else processes
    adoption = _Adoption(current, processes, seal() if sealed else current_seal(), home, lingers)
    processes.start()
    if _hooks is None:
        _hooks = _Hooks(adoption)
    else:
        _hooks.pass_to(adoption)
    processes._set_tick(adoption.tick)
    _adoption = adoption

    def undo() -> None:
        global _adoption, _hooks
        adoption.ended = True
        _adoption = None
        processes._set_tick(None)
        adoption.close()
        if _hooks is not None and not lingers():
            _hooks.take_off()
            _hooks = None

    return Restorer(undo)


class _Hooks:
    """What is changed in this process while programs are adopted, and after that for as long as threads that were
    abandoned have to be refused.

    Parameters:
        adoption: the installation that decides about starts.
    """

    def __init__(self, adoption: _Adoption) -> None:
        self.adoption = adoption
        self._limits = adoption.seal.limits()
        adoption.seal.put(0, adoption.own_tag)
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._subreaper = ctypes.c_int()
        self._prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(self._subreaper), 0, 0, 0)
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._plain: list[tuple[Any, str, Any]] = []
        _wrap(self)

    def pass_to(self, adoption: _Adoption) -> None:
        """Have another installation decide, from one start to the next."""
        self.adoption = adoption
        _wrap_uvloop(self)

    def put(self, place: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put a wrapper around a way to start a process, once."""
        if any(known[:2] == (place, name) for known in self._plain):
            return
        plain = getattr(place, name)
        self._plain.append((place, name, plain))
        setattr(place, name, wrapper(plain))

    def take_off(self) -> None:
        """Give the process back as it was."""
        while self._plain:
            place, name, plain = self._plain.pop()
            setattr(place, name, plain)
        self._prctl(_PR_SET_CHILD_SUBREAPER, self._subreaper.value, 0, 0, 0)
        if self._limits is not None:
            with _inheritance:
                self.adoption.seal.restore(0, self._limits)


_hooks: _Hooks | None = None


def _report(stranger: str) -> None:
    """Tell the operator, and nobody else, of a process that is no scope's for certain."""
    _log.warning(
        "C code started a process that cannot be attributed to a session: %s; sessions that were open then cannot be "
        "proven stopped while it lives; start programs with run.process or subprocess",
        redact(stranger),
    )


class _Bequeathing:
    """Awaits a start of uvloop's, which makes the program before it waits for anything.

    Parameters:
        begun: called once the program is there: who waits for the rest of its start may be cancelled, and never learn
            its pid.
    """

    def __init__(
        self,
        adoption: _Adoption,
        tag: int | None,
        start: Coroutine[Any, Any, Any],
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self._adoption = adoption
        self._tag = tag
        self._start = start
        self._begun = begun

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            with self._adoption.bequeath(self._tag):
                awaited = self._start.send(None)
        except StopIteration as done:
            return done.value
        try:
            self._begun()
        except BaseException:
            self._start.close()
            raise
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                self._start.close()
                raise
            except BaseException as error:
                step = functools.partial(self._start.throw, error)
            else:
                step = functools.partial(self._start.send, sent)
            try:
                awaited = step()
            except StopIteration as done:
                return done.value


def _wrap(hooks: _Hooks) -> None:
    """Put wrappers around all ways to start a process."""

    def around_fork_exec(plain: Callable[..., int]) -> Callable[..., int]:
        def fork_exec(*arguments: Any) -> int:
            adoption = hooks.adoption
            if adoption.off():
                with adoption.unadopted():
                    return plain(*arguments)
            owner = adoption.owner()
            words = arguments[0]
            with adoption.start():
                if owner is None or _starts_what_is_shared():
                    with adoption.bequeath(None):
                        pid = plain(*arguments)
                    adoption.note_outside(pid)
                    return pid
                tag = adoption.tag_for(owner)
                environment = arguments[5]
                if environment is None:
                    environment = [key + b"=" + value for key, value in os.environb.items()]
                marks = [key + b"=" + value for key, value in _marks(tag).items()]
                kept = [entry for entry in environment if not entry.startswith(_MARK_PREFIXES)]
                with adoption.bequeath(tag):
                    pid = plain(*arguments[:5], [*kept, *marks], *arguments[6:])
                adoption.enter(owner, pid, _base(words[0]), tag)
                return pid

        return fork_exec

    def around_fork(plain: Callable[[], Any]) -> Callable[[], Any]:
        def fork() -> Any:
            adoption = hooks.adoption
            if adoption.off():
                with adoption.unadopted():
                    return plain()
            owner = adoption.owner()
            tag = None if owner is None else adoption.tag_for(owner)
            adoption.begin()
            try:
                with adoption.bequeath(tag):
                    result = plain()
            except BaseException:
                adoption.finish()
                raise
            pid = result if isinstance(result, int) else result[0]
            if pid == 0:  # a lock may be held for ever here, by a thread that was not forked along
                if tag is not None:
                    os.environb.update(_marks(tag))
                return result
            try:
                if owner is None or tag is None:
                    adoption.note_outside(pid)
                else:
                    adoption.enter(owner, pid, "fork", tag)
            finally:
                adoption.finish()
            return result

        return fork

    def around_posix_spawn(plain: Callable[..., int]) -> Callable[..., int]:
        def posix_spawn(path: Any, argv: Any, env: Any, /, *rest: Any, **options: Any) -> int:
            adoption = hooks.adoption
            if adoption.off():
                with adoption.unadopted():
                    return plain(path, argv, env, *rest, **options)
            owner = adoption.owner()
            with adoption.start():
                if owner is None:
                    with adoption.bequeath(None):
                        pid = plain(path, argv, env, *rest, **options)
                    adoption.note_outside(pid)
                    return pid
                tag = adoption.tag_for(owner)
                own = os.environ if env is None else env  # None since 3.13
                marked = {os.fsencode(key): os.fsencode(value) for key, value in own.items()} | _marks(tag)
                with adoption.bequeath(tag):
                    pid = plain(path, argv, marked, *rest, **options)
                adoption.enter(owner, pid, _base(path), tag)
                return pid

        return posix_spawn

    def around_start(plain: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(self: Any) -> None:
            adoption = hooks.adoption
            owner = None if adoption.off() else adoption.owner()
            if owner is None or _start_method(self) != "forkserver":
                plain(self)
                return
            tag = adoption.tag_for(owner)
            with adoption.bequeath_by(_fork_server(), tag):  # it is no child of ours, but of the server's
                plain(self)
            adoption.enter(owner, self.pid, self.name, tag)

        return start

    def around_system(plain: Callable[[Any], int]) -> Callable[[Any], int]:
        def system(command: Any) -> int:
            adoption = hooks.adoption
            if adoption.off() and adoption.forked:
                return plain(command)
            code = subprocess.call(command, shell=True, close_fds=False)
            return -code if code < 0 else code << 8

        return system

    hooks.put(subprocess, "_fork_exec", around_fork_exec)
    hooks.put(_posixsubprocess, "fork_exec", around_fork_exec)
    hooks.put(os, "system", around_system)
    hooks.put(os, "fork", around_fork)
    hooks.put(os, "forkpty", around_fork)
    hooks.put(os, "posix_spawn", around_posix_spawn)
    hooks.put(os, "posix_spawnp", around_posix_spawn)
    hooks.put(multiprocessing.process.BaseProcess, "start", around_start)
    _wrap_uvloop(hooks)


def _wrap_uvloop(hooks: _Hooks) -> None:
    """The same for uvloop, once it was imported: it starts its programs in C."""

    def around_loop_start(plain: Callable[..., Any]) -> Callable[..., Any]:
        async def start(self: Any, *arguments: Any, **options: Any) -> Any:
            adoption = hooks.adoption
            if adoption.off():
                begun = plain(self, *arguments, **options)
                return await (begun if adoption.forked else _Bequeathing(adoption, None, begun))
            owner = adoption.owner()
            with adoption.start():
                if owner is None:
                    result = await _Bequeathing(adoption, None, plain(self, *arguments, **options))
                    adoption.note_outside(result[0].get_pid())
                    return result
                tag = adoption.tag_for(owner)
                environment = os.environ if options.get("env") is None else options["env"]
                marks = {os.fsdecode(key): os.fsdecode(value) for key, value in _marks(tag).items()}
                options["env"] = {**environment, **marks}
                name = _base(arguments[1]) if len(arguments) > 1 else "program"
                begun = functools.partial(adoption.enter_unnamed, owner, name, tag)
                result = await _Bequeathing(adoption, tag, plain(self, *arguments, **options), begun)
                adoption.enter(owner, result[0].get_pid(), name, tag)
                return result

        return start

    uvloop = sys.modules.get("uvloop")
    if uvloop is not None:
        hooks.put(uvloop.Loop, "subprocess_exec", around_loop_start)
        hooks.put(uvloop.Loop, "subprocess_shell", around_loop_start)


def _starts_what_is_shared() -> bool:
    """Whether ``multiprocessing`` is starting a helper of its own here."""
    frame = sys._getframe(2)  # who called the wrapper
    if frame.f_globals.get("__name__") == "multiprocessing.util" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _SHARED


def _start_method(process: Any) -> str | None:
    method: str | None = getattr(process, "_start_method", None)
    return multiprocessing.get_start_method() if method is None else method


def _fork_server() -> int:
    """The pid of the fork server of ``multiprocessing``, which runs from now on."""
    from multiprocessing import forkserver

    forkserver.ensure_running()
    return int(cast(Any, forkserver)._forkserver._forkserver_pid)


_MARK_PREFIXES = (procfs.HOST_MARKER + b"=", procfs.SCOPE_MARKER + b"=")


def _marks(tag: int) -> dict[bytes, bytes]:
    return {procfs.HOST_MARKER: host_marker(), procfs.SCOPE_MARKER: b"%d" % tag}


def _base(path: Any) -> str:
    return os.path.basename(os.fsdecode(path))
