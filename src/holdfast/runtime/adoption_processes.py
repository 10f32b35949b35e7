"""Adoption of programs that foreign code starts by itself in a scope, so that they end with the scope.

While installed, programs that Python starts with ``subprocess``, ``asyncio.create_subprocess_*``, ``multiprocessing``,
``os.system``, ``os.fork`` and ``os.posix_spawn`` in a scope become a `ForeignProcess` of that scope. Invariants:

- The program's exit status stays its starter's: this module never waits for a pid that foreign code was given. It waits
  only for orphans that came to this process, which is a child subreaper meanwhile.
- Each scope has a number, which is in the tag (`holdfast.runtime.foreign`) that everything started in it inherits. If
  the tag is sealed (`holdfast.runtime.seal`), no process can lose it. The number is also in the environment, if one can
  be given. Attribution does not depend on parents, sessions or groups.
- A process that C code starts on some thread is unclaimed: it carries the number of this process. It belongs to a scope
  if it is a child of a thread that works for that scope now and has not worked for another since. Otherwise it is
  reported to the operator, and no scope that was open then may report that nothing is left.
- A scope's members are complete: when an adopted program ends and leaves strays, these are adopted before its end is
  reported.
- Each adopted program is identified by a pidfd that was opened while its pid could not be reused.
- A program has its tag from its first moment: during a start, of which only one runs at a time, the tag is set on this
  process.

Known gap: a process that C code of an extension starts by itself, on another thread and at the moment of a start, gets
that start's tag.

Resources shared between scopes must be started outside of them (a process pool that was filled in a scope ends with
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
"""Delays before a kill whose zygote was killed is sent to another zygote, which takes a moment to be available."""

_LOOK_PAUSE_S = 0.004
_TICK_S = 1.0
_HASTY_TICK_S = 0.02
_MANY = 100
_UNKNOWN_ZOMBIE_S = 5.0
_ROUNDS = 8
_STRUCK_S = 1.0
"""Time for a killed program without an owner to die of its signal."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_TOLD_PER_TURN = 32
_SHARED = frozenset({"multiprocessing.resource_tracker", "multiprocessing.forkserver"})
"""Modules whose helper processes are shared. The module that starts a program decides, never its command line."""


class Owner(Protocol):
    """Owner of adopted programs: a scope."""

    def adopt_process(self, process: ForeignProcess, /) -> bool:
        """Adopt the process; False if this owner accepts no more, and it is killed. Callable from any thread."""
        ...


class ForeignProcess:
    """A program that foreign code started in a scope, or a stray of one that has ended.

    Attributes:
        pid: its pid; only its starter waits for it. A stray is waited for here.
        name: display name.
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
        self._unnamed = unnamed  # its starter may wait for it, but has not learnt its pid yet
        self._ended: Once[bool] = Once()

    def __repr__(self) -> str:
        return f"<ForeignProcess {self.name} pid={self.pid}{' ended' if self.ended else ''}>"

    @property
    def ended(self) -> bool:
        """True once it no longer runs, whether or not its starter has waited for it."""
        return self._ended.value is not None

    async def wait_ended(self) -> None:
        """Wait until it no longer runs."""
        await self._ended.wait()

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once from the reading thread when it ends; at once if it has."""
        if not self._ended.add(callback):
            callback()

    def signal(self, signum: int) -> bool:
        """Signal exactly this program; False if it has ended or must not be signalled. Callable from any thread."""
        with self._lock:  # against the reading thread's close: afterwards the number may belong to another program
            if self._pidfd < 0:
                return False
            try:
                procfs.pidfd_signal(self._pidfd, signum)
            except OSError:
                return False
        return True

    def _give_up_pidfd(self) -> int:
        """Return the pidfd for the caller to close; negative if it was already given up."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
        return pidfd


class Restorer:
    """Undoes an `install`; also a context manager."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def restore(self) -> None:
        """Restore the previous way to start programs. Idempotent."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Restorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


class Unclaimed(NamedTuple):
    """A process whose start was not observed.

    Attributes:
        pid: its pid.
        started: start time in clock ticks since boot.
        thread: native id of the thread of this process that is its parent.
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
    """State of one installation. Used by threads that start programs and by the reading thread of the host."""

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
        """Tag of this process, and so of what C code starts in it."""
        return foreign.make_tag(self.pid, self.started, foreign.UNCLAIMED)

    @property
    def outside_tag(self) -> int:
        """Tag of what is started outside of scopes."""
        return foreign.make_tag(self.pid, self.started, foreign.OUTSIDE)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: it adopts nothing, and a lock may be held for ever there."""
        return os.getpid() != self.pid

    def off(self) -> bool:
        """Whether starts here are not adopted: in a forked child, and after the installation ended. Even then, starts
        of threads that an ended scope left behind are refused.

        Raises:
            ScopeClosed: as `current`.
        """
        if self.forked:
            return True
        if self.ended:
            self.current()
        return self.ended

    def owner(self) -> Owner | None:
        """Return the scope that a start belongs to now; None outside of scopes and in forked children."""
        return None if self.forked else self.current()

    def tag_for(self, owner: Owner) -> int:
        """Return the tag of what ``owner`` starts now."""
        with self._lock:
            family = self._families.get(id(owner))
            if family is None:
                family = _Family(owner, self._free_tag())
                self._families[id(owner)] = family
                self._by_tag[family.tag] = family
                self._busy = True
            return family.tag

    def _free_tag(self) -> int:
        """Return an unused tag. Numbers continue those of earlier installations, whose leftovers are not ours."""
        while True:
            tag = foreign.make_tag(self.pid, self.started, next(_numbers) % (foreign.HELPERS - 1) + 1)
            if tag not in self._by_tag:
                return tag

    def known_tag(self, owner: object) -> int | None:
        """Return the tag of what ``owner`` has started so far; None if it has started nothing."""
        family = self._families.get(id(owner))
        return None if family is None else family.tag

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Surround a start until the new pid is known: meanwhile, no unknown child is taken for an orphan."""
        self.begin()
        try:
            yield
        finally:
            self.finish()

    def begin(self) -> None:
        """Note the begin of a start."""
        with self._lock:
            self._starting += 1
            self._busy = True

    def finish(self) -> None:
        """Note the end of a start: the new pid is known, or the start failed."""
        with self._lock:
            self._starting -= 1

    @contextlib.contextmanager
    def bequeath(self, tag: int | None) -> Iterator[None]:
        """Give this tag to what is started in the block, from its first moment, because it inherits our limits; None:
        the tag of starts outside of scopes. All starts pass here one by one, so none gets the tag of another."""
        with _inheritance:
            limits = self.seal.limits()
            self.seal.put(0, self.outside_tag if tag is None else tag)
            try:
                yield
            finally:
                if limits is not None and os.getpid() == self.pid:  # a forked child keeps it
                    self.seal.restore(0, limits)

    def unadopted(self) -> contextlib.AbstractContextManager[None]:
        """Surround a start while `off`: what starts after the installation ended is not adopted and outlives this
        process."""
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
        """Enter a program that was just started for ``owner``, or is an orphan of it, and was not waited for yet.

        If the owner accepts no more, the program and what it had started by then are dead on return, because no other
        code waits for them.
        """
        if not self._enter(owner, pid, name, tag, orphan=orphan):
            self._enter_strays(self._family(owner, tag))

    def _family(self, owner: Owner, tag: int) -> _Family:
        """Return the family of ``owner``, which may have been forgotten since `tag_for`."""
        with self._lock:
            family = self._families.get(id(owner))
            if family is None:
                family = self._by_tag[tag] = self._families[id(owner)] = _Family(owner, tag)
            return family

    def _enter(self, owner: Owner, pid: int, name: str, tag: int, *, orphan: bool, unnamed: bool = False) -> bool:
        """Enter a program; False if it was refused and killed, or is just being entered by another thread."""
        self.seal.put(pid, tag)
        stat = procfs.read_stat(pid)
        try:
            pidfd = procfs.pidfd_open(pid)
        except ProcessLookupError:
            return True  # ended, and other code waited for any child
        except OSError:
            os.kill(pid, signal.SIGKILL)  # it is not held by a pidfd, and was not waited for: the pid is still its own
            raise
        started = 0 if stat is None else stat.started
        process = ForeignProcess(pid, name, started, tag, pidfd, orphan=orphan, unnamed=unnamed)
        with self._lock:
            known = self._known.get(pid)
            if known is not None and known.started == started:  # found as a stray while its start was under way
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
        self.processes.watch(pidfd, lambda: self._end(process, family))
        return taken

    def _enter_strays(self, *families: _Family) -> bool:
        """Adopt the orphans of these families, one call at a time, so that at its end all of them are adopted or dead.
        Return False if there may be more: they appear faster than they can be found."""
        tags = {family.tag: family for family in families}
        with self._entering_strays:
            ended: set[int] = set()
            for _ in range(_ROUNDS):  # those ended since the listing may have left strays
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
        """Return live orphans with these tags that were not adopted, and those that have ended. The latter are reaped
        if it is certain that they are orphans."""
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
        """Enter a program that was just started for ``owner`` and whose pid is not known yet. It counts as an orphan
        until then, in case its start is cut and no other code waits for it. But its starter gets time to wait for it:
        an event loop keeps its resources for a program for ever if other code waits for it."""
        with self._lock:  # it may already be known as a stray of a program that just ended: then it is one of these
            for known in self._known.values():
                known._unnamed = known._unnamed or (known._orphan and known._tag == tag)
        for pid in self._strangers():
            if self._tag_of(pid) == tag and not self._enter(owner, pid, name, tag, orphan=True, unnamed=True):
                self._enter_strays(self._family(owner, tag))

    def _is_adopted(self, pid: int) -> bool:
        """Whether a scope of an earlier installation left this older child; otherwise its starter waits for it."""
        tag = self._carried_tag(pid)
        if tag is None or foreign.scope_of_tag(tag) in (foreign.OUTSIDE, foreign.HELPERS):
            return False
        return foreign.host_of_tag(tag) == foreign.host_of_tag(self.own_tag)

    def note_outside(self, pid: int) -> None:
        """Note a program that was started outside of any scope."""
        self._outside.add(pid)

    # -- ends

    def _end(self, process: ForeignProcess, family: _Family) -> None:
        """Handle the end of an adopted program, in the reading thread. Its strays are our children by now; one search
        finds those of all programs that ended at the same time."""
        self._let_go(process)
        with self._lock:
            alone = not self._just_ended
            self._just_ended.append((process, family))
        if alone:
            self.processes.call_in_reading_thread(self._sweep)

    def _sweep(self) -> None:
        """Adopt the strays of all that ended, then report the ends. In the reading thread. If strays appear faster than
        they
        can be found, their scope must wait: its stop kills them."""
        with self._lock:
            swept, self._just_ended = self._just_ended, []
        families = {id(family): family for _, family in swept}
        try:
            complete = self._enter_strays(*families.values())
        except BaseException:  # out of descriptors: a stray that cannot be held must not block its scope
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
        """Forget a family that is empty and whose owner starts nothing any more. The caller holds the lock."""
        owner = family.owner
        if not family.live and getattr(owner, "closed", True) and self._families.get(id(owner)) is family:
            del self._families[id(owner)]
            del self._by_tag[family.tag]

    def _orphans(self) -> tuple[list[int], bool]:
        """Return our children that neither foreign code nor the process host started, and whether that is certain:
        during a start, one of them may be the new process."""
        children = procfs.children(self.pid)  # first, so that processes started later are not among them
        with self._lock:
            certain = self._starting == 0
            ours = self.processes.zygote_pids()
            unknown = [pid for pid in children if pid not in self._outside and pid not in ours]
            return [pid for pid in unknown if (known := self._known.get(pid)) is None or known._orphan], certain

    def _strangers(self) -> list[int]:
        """Return orphans that were not adopted."""
        orphans, _ = self._orphans()
        return [pid for pid in orphans if pid not in self._known]

    def _tag_of(self, pid: int) -> int | None:
        """Return the tag that it carries; if tags can be lost, else the one in its environment."""
        tag = self._carried_tag(pid)
        if not self.seal.sealed and (tag is None or foreign.scope_of_tag(tag) == foreign.UNCLAIMED):
            tag = foreign.marked_tag_of(pid) or tag
        return tag

    def _carried_tag(self, pid: int) -> int | None:
        return None if self.seal.carrier is None else foreign.tag_of(pid, self.seal.carrier)

    def tick(self) -> float:
        """Forget children that were reaped; reap orphans that ended. Runs about once a second while there are any.
        Return
        the seconds until the next call: few when orphans end by the hundred."""
        self._just_buried = 0
        self._tick()
        return _TICK_S if self._just_buried < _MANY else _HASTY_TICK_S

    def _tick(self) -> None:
        now = time.monotonic()
        if self._buried != self.processes.buried_zygotes:  # a zygote has ended: its reapers become our children
            self._buried = self.processes.buried_zygotes
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
        children = set(procfs.children(self.pid))  # last, so that processes started meanwhile are not forgotten
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
        """Reap ended orphans that are certainly not another's, or that no code waited for in seconds; return True if
        orphans are left."""
        with self._burying:  # so that no pid is waited for twice
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
        """Reap the orphans among the killed, and report the ends that waited for the kill. In the reading thread, after
        a kill."""
        self.bury(tags.__contains__)
        with self._lock:
            over = [(process, family) for process, family in self._restless if family.tag in tags]
            self._restless = [one for one in self._restless if one not in over]
        self._tell_ends(over)

    def unclaimed(self) -> list[Unclaimed]:
        """Return children of this process whose start was not observed or that belong to no scope: orphans, and what C
        code started on a thread."""
        with self._lock:
            ours = self.processes.zygote_pids()
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
        if found and self.seal.carrier is None:  # without tags, one of them may be a program whose start is under way
            with self._lock:
                found = [one for one in found if one.pid not in self._known and one.pid not in self._outside]
        return found

    def claim(self) -> list[Unclaimed]:
        """Assign to its scope each of `unclaimed` that a scope certainly started; return the others."""
        left = []
        for one in self.unclaimed():
            home = self.home(one.thread) if one.thread != self.pid else None
            if home is None:
                left.append(one)
                continue
            tag = self.tag_for(home)
            for pid in (one.pid, *procfs.descendants(one.pid)):
                self.seal.put(pid, tag)
            if getattr(home, "closed", False):  # from an abandoned thread
                self.passes.ask({tag: []}, KILL_BOUND_S)
        return left

    def strangers_since(self, left: Sequence[Unclaimed], since: float) -> int:
        """Return how many of these a scope opened ``since`` (clock ticks since boot) may have started. Report each to
        the operator once."""
        mine = [one for one in left if one.started >= int(since)]
        for one in mine:
            if (one.pid, one.started) not in self._told:
                self._told.add((one.pid, one.started))
                _report(f"{one.pid} {procfs.command(one.pid)}")
        return len(mine)

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer all searches requested on this loop."""
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
            self.processes.unwatch(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Stop watching, soon."""
        self.processes.call_in_reading_thread(self._let_all_go)

    def _let_all_go(self) -> None:
        with self._lock:
            known = list(self._known.values())
        for process in known:
            self._let_go(process)


_numbers = itertools.count()

_inheritance = threading.RLock()
"""Held around each start, by every installation: all share the limit that is inherited."""


def _renew_lock() -> None:
    global _inheritance
    _inheritance = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # its holder may not exist in the child
_log = logging.getLogger("holdfast.runtime")
_adoption: _Adoption | None = None


async def kill_trees(
    roots: Sequence[ForeignProcess], *, owner: Owner | None = None, bound_s: float = KILL_BOUND_S
) -> TreeResult:
    """Kill adopted programs of a scope with everything they ever started; their starters still get the exit statuses.

    A zygote's fork does it, so a busy interpreter does not delay it; concurrent kills share it. On return, the killed
    processes no longer run.

    Parameters:
        roots: programs adopted by one or more scopes; everything that belongs to these scopes is killed.
        owner: a scope whose programs are killed too, even if all known ones have ended.
        bound_s: time limit.
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
    """Kill what any scope's foreign code started, and what C code started in this process; for the end of a host."""
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
            result = answer.value or TreeResult(proven=False)  # it may have come while the loop was blocked
        bound_s = end_at - time.monotonic()
        if result != TreeResult(proven=False) or bound_s <= 0 or again_s is None:
            break
        await asyncio.sleep(again_s)  # the zygote was killed during it: ask another one
    if result == TreeResult(proven=False):  # no zygote could be asked: at least the roots can be killed
        result = TreeResult(killed=_kill_roots(roots), proven=False)
    return result


def leave_thread() -> None:
    """Assign what C code started on the calling thread, which stops working for a scope, to that scope."""
    adoption = _adoption
    if adoption is None or adoption.forked:
        return
    listed = procfs.read_text("/proc/thread-self/children")
    if listed and any(pid not in adoption._known and pid not in adoption._outside for pid in map(int, listed.split())):
        adoption.claim()


def may_have_started(owner: Owner) -> bool:
    """Whether foreign code was observed to start a program in this scope."""
    return _adoption is not None and _adoption.known_tag(owner) is not None


def strangers(since: float) -> int:
    """Return the number of live processes that a scope opened ``since`` (clock ticks since boot) may have started but
    that cannot be attributed, because C code started them. They are left alone and reported to the operator.

    Processes that were certainly started on a thread of a scope are assigned to that scope and do not count.
    """
    if _adoption is None:
        return 0
    return _adoption.strangers_since(_adoption.claim(), since)


def look_soon(loop: asyncio.AbstractEventLoop, since: float, tell: Callable[[int], object]) -> None:
    """Call ``tell`` with the number of `strangers`; one search answers all requests made meanwhile.

    This happens in one of the next turns of the loop. Each turn answers some requests, so that the ends of many scopes
    do not stall the loop. If the last search was just before, it happens after a pause: a search reads a file for each
    thread, so stops that end one by one share it.
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
    """Reap this child if it has ended; return whether nothing is left to reap."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _await_end(pidfd: int, timeout_s: float) -> None:
    """Block this thread until the process of the descriptor no longer runs, or the time is over."""
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
    """Adopt what foreign code starts in a scope, from now on and in the whole process.

    Parameters:
        current: returns the scope that the running code is in; it may raise to refuse a start.
        processes: its zygote does the killing; None for that of this process. The zygote is started now, so that it can
            kill what is left if this process is killed.
        sealed: whether to make tags indelible, for good: see `holdfast.runtime.seal` for the cost.
        home: returns the scope that a thread (by native id) works for. A thread that stops working for a scope must
            call `leave_thread`.
        lingers: whether threads of ended scopes still run. If so at the end, ``current`` keeps refusing their starts,
            although nothing is adopted any more, and the next installation takes over without a gap.

    Raises:
        RuntimeError: already installed.
    """
    global _adoption, _hooks
    if _adoption is not None:
        raise RuntimeError("foreign processes are already adopted; call restore() of the first install() first")
    if not supported():
        return Restorer(lambda: None)
    if _hooks is not None and sealed and not current_seal().sealed:  # their tag would block a seal
        _hooks.take_off()
        _hooks = None
    processes = process_host() if processes is None else processes
    adoption = _Adoption(current, processes, seal() if sealed else current_seal(), home, lingers)
    processes.start()
    if _hooks is None:
        _hooks = _Hooks(adoption)
    else:
        _hooks.pass_to(adoption)
    processes.set_tick(adoption.tick)
    _adoption = adoption

    def undo() -> None:
        global _adoption, _hooks
        adoption.ended = True
        _adoption = None
        processes.set_tick(None)
        adoption.close()
        if _hooks is not None and not lingers():
            _hooks.take_off()
            _hooks = None

    return Restorer(undo)


class _Hooks:
    """Changes to this process while programs are adopted, and afterwards as long as starts of abandoned threads must be
    refused.

    Parameters:
        adoption: installation that decides about starts.
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
        """Let another installation decide from the next start on."""
        self.adoption = adoption
        _wrap_uvloop(self)

    def put(self, place: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Wrap a function that starts processes, once."""
        if any(known[:2] == (place, name) for known in self._plain):
            return
        plain = getattr(place, name)
        self._plain.append((place, name, plain))
        setattr(place, name, wrapper(plain))

    def take_off(self) -> None:
        """Restore the process as it was."""
        while self._plain:
            place, name, plain = self._plain.pop()
            setattr(place, name, plain)
        self._prctl(_PR_SET_CHILD_SUBREAPER, self._subreaper.value, 0, 0, 0)
        if self._limits is not None:
            with _inheritance:
                self.adoption.seal.restore(0, self._limits)


_hooks: _Hooks | None = None


def _report(stranger: str) -> None:
    """Report a process that certainly belongs to no scope to the operator only."""
    _log.warning(
        "C code started a process that cannot be attributed to a session: %s; sessions that were open then cannot be "
        "proven stopped while it lives; start programs with run.process or subprocess",
        redact(stranger),
    )


class _Bequeathing:
    """Awaits a start by uvloop, which creates the program before it waits for anything.

    Parameters:
        begun: called once the program exists: a caller that waits for the rest of its start may be cancelled and never
            learn its pid.
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
    """Wrap all ways to start a process."""

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
            if pid == 0:  # a lock may be held for ever here, by a thread that does not exist in the child
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
            with adoption.bequeath_by(_fork_server(), tag):  # it is not our child but the server's
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
    """Do the same for uvloop, which starts programs in C, once it was imported."""

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
    frame = sys._getframe(2)  # the caller of the wrapper
    if frame.f_globals.get("__name__") == "multiprocessing.util" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _SHARED


def _start_method(process: Any) -> str | None:
    method: str | None = getattr(process, "_start_method", None)
    return multiprocessing.get_start_method() if method is None else method


def _fork_server() -> int:
    """Return the pid of the fork server of ``multiprocessing``, starting it if necessary."""
    from multiprocessing import forkserver

    forkserver.ensure_running()
    return int(cast(Any, forkserver)._forkserver._forkserver_pid)


_MARK_PREFIXES = (procfs.HOST_MARKER + b"=", procfs.SCOPE_MARKER + b"=")


def _marks(tag: int) -> dict[bytes, bytes]:
    return {procfs.HOST_MARKER: host_marker(), procfs.SCOPE_MARKER: b"%d" % tag}


def _base(path: Any) -> str:
    return os.path.basename(os.fsdecode(path))
