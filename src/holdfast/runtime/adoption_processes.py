"""Adopting the programs that foreign code starts by itself inside a scope, so that they end with it.

While installed, what Python starts by ``subprocess``, ``asyncio.create_subprocess_*``, ``multiprocessing``,
``os.system``, ``os.fork`` and ``os.posix_spawn`` inside a scope becomes a `ForeignProcess` of that scope. Invariants:

- The program's exit status stays its starter's: nothing here waits for a pid that foreign code was given. Only
  orphans that came home to this process, which is a child subreaper meanwhile, are waited for.
- A scope has a number; the number is in the tag (`holdfast.runtime.foreign`) that everything started in it inherits,
  and in the environment where one can be given. Attribution needs no luck with parents, sessions or groups.
- A scope's members are complete: when an adopted program ends and leaves strays, these are adopted before its end is
  told.
- Each adopted program is named by a pidfd that was opened while its pid could not be recycled.
- A program has its tag from its first moment: for the time of the start, which no two share, it is ours.

Known gaps: what C code of an extension starts by itself, on another thread and just in the moment of a start, has that
start's tag. The fork server's children have no marker, and get their tag only when they run.

What is shared between scopes must be started outside of them (a process pool that was filled inside a scope ends with
that scope). The resource tracker and the fork server of ``multiprocessing`` are known to be shared and left alone.
"""

from __future__ import annotations

import _posixsubprocess
import asyncio
import contextlib
import ctypes
import functools
import itertools
import multiprocessing.process
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, Protocol

from holdfast.runtime import foreign, procfs
from holdfast.runtime.once import Once
from holdfast.runtime.processes import ProcessHost, process_host
from holdfast.runtime.starting import backlog_pauses, host_marker
from holdfast.runtime.trees import KILL_BOUND_S, TreeResult
from holdfast.runtime.zygote_link import supported

__all__ = ["ForeignProcess", "Owner", "Restorer", "install", "kill_trees"]

_ANSWER_S = 1.0
_AGAIN_S = (0.01, 0.1)
"""When the zygote was killed over a kill, another one is asked after this, each once: it takes a moment to be known."""

_TICK_S = 1.0
_UNKNOWN_ZOMBIE_S = 5.0
_STARTING_S = 0.5
_STARTING_PAUSE_S = 0.005
_STRUCK_S = 1.0
"""How long a program that nobody takes any more may need to die of its signal."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SHARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


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

    __slots__ = ("_ended", "_orphan", "_pidfd", "_tag", "_unnamed", "name", "pid", "started")

    def __init__(self, pid: int, name: str, started: int, tag: int, pidfd: int, *, orphan: bool, unnamed: bool) -> None:
        self.pid = pid
        self.name = name
        self.started = started
        self._tag = tag
        self._pidfd = pidfd
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


class _Family:
    """The adopted programs of one owner."""

    __slots__ = ("live", "owner", "tag")

    def __init__(self, owner: Owner, tag: int) -> None:
        self.owner = owner
        self.tag = tag
        self.live: set[ForeignProcess] = set()


class _Adoption:
    """What is known while installed. Entered by threads that start programs and by the reading thread of the host."""

    def __init__(self, current: Callable[[], Owner | None], processes: ProcessHost) -> None:
        self.current = current
        self.processes = processes
        self.pid = os.getpid()
        self.started = procfs.start_time(self.pid) or 0
        self._lock = threading.Lock()
        self._inheritance = threading.RLock()
        self._families: dict[int, _Family] = {}  # by id of the owner, which the family keeps alive
        self._by_tag: dict[int, _Family] = {}
        self._number = _first_number()
        self._known: dict[int, ForeignProcess] = {}
        self._outside: set[int] = set()
        self._starting = 0
        self._tick_at = 0.0
        self._burying = threading.Lock()
        self._entering_strays = threading.Lock()
        self._zombies: dict[int, float] = {}
        self._busy = False
        self._buried = 0

    # -- starts

    @property
    def own_tag(self) -> int:
        """The tag of this process, and so of what is started outside of scopes."""
        return foreign.make_tag(self.pid, self.started, 0)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: it adopts nothing, and a lock may be held for ever there."""
        return os.getpid() != self.pid

    def owner(self) -> Owner | None:
        """The scope that a start belongs to now; None outside of scopes and in forked children."""
        return None if self.forked else self.current()

    def tag_for(self, owner: Owner) -> int:
        """The tag of what ``owner`` starts now."""
        with self._lock:
            family = self._families.get(id(owner))
            if family is None:
                self._number = self._number % (foreign.SCOPES - 1) + 1
                while foreign.make_tag(self.pid, self.started, self._number) in self._by_tag:
                    self._number = self._number % (foreign.SCOPES - 1) + 1
                family = _Family(owner, foreign.make_tag(self.pid, self.started, self._number))
                self._families[id(owner)] = family
                self._by_tag[family.tag] = family
            return family.tag

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
        with self._inheritance:
            if tag is None:
                yield
                return
            _tag_process(0, tag)
            try:
                yield
            finally:
                _tag_process(0, self.own_tag)

    def enter(self, owner: Owner, pid: int, name: str, tag: int, *, orphan: bool = False) -> None:
        """A program was started for ``owner`` just now, or is an orphan of its; it was not waited for yet.

        When the owner takes nothing any more, it is dead when this returns, with what it had started by then: nobody
        else waits for them.
        """
        if not self._enter(owner, pid, name, tag, orphan=orphan):
            self._enter_strays(owner, tag)

    def _enter(self, owner: Owner, pid: int, name: str, tag: int, *, orphan: bool, unnamed: bool = False) -> bool:
        """False if it was not taken, and is dead then; or if it is just being taken in by another thread."""
        _tag_process(pid, tag)
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
            procfs.strike(pid, signal.SIGKILL, lambda now: now.started == started)
            _await_end(pidfd, _STRUCK_S)
        self.processes._watch(pidfd, lambda: self._end(process, family))
        return taken

    def _enter_strays(self, owner: Owner, tag: int) -> None:
        """Take in the orphans with this tag; one round of this at a time, so that at its end all of them are taken, or
        dead."""
        with self._entering_strays:
            ended: set[int] = set()
            complete = False
            while not complete:  # who ended since it was listed may have left strays that were no children of ours then
                complete = True
                for pid in self._strangers():
                    stat = procfs.read_stat(pid)
                    if stat is None or stat.dead:
                        complete = complete and pid in ended
                        ended.add(pid)
                    elif self._tag_of(pid) == tag:
                        complete = self._enter(owner, pid, procfs.command(pid), tag, orphan=True) and complete

    def enter_unnamed(self, owner: Owner, name: str, tag: int) -> None:
        """A program was started for ``owner`` just now, and its pid is not told yet. It is an orphan until then, in
        case that nobody else waits for it when its start is cut; but its starter is given the time to: a loop whose
        program somebody else waits for keeps what it holds for it, for ever."""
        with self._lock:  # as a stray of a program that ended just now it may be known already: it is one of these
            for known in self._known.values():
                known._unnamed = known._unnamed or (known._orphan and known._tag == tag)
        for pid in self._strangers():
            if self._tag_of(pid) == tag and not self._enter(owner, pid, name, tag, orphan=True, unnamed=True):
                self._enter_strays(owner, tag)

    def note_outside(self, pid: int) -> None:
        """A program was started outside of any scope."""
        self._outside.add(pid)

    # -- ends

    def _end(self, process: ForeignProcess, family: _Family) -> None:
        """In the reading thread: an adopted program has ended. Its strays are children of ours by now."""
        self._let_go(process)
        try:
            self._enter_strays(family.owner, family.tag)
        finally:  # a stray that cannot be held, for want of a descriptor, must not keep its scope waiting
            with self._lock:
                family.live.discard(process)
                if not family.live and self._families.get(id(family.owner)) is family:
                    del self._families[id(family.owner)]
                    del self._by_tag[family.tag]
            process._ended.set(True)

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
        tag = foreign.tag_of(pid)
        if tag is None or foreign.scope_of_tag(tag) == 0:
            tag = foreign.marked_tag_of(pid) or tag
        return tag

    def tick(self) -> None:
        """Forget who was waited for; wait for orphans that ended. About once a second, when there is anything."""
        now = time.monotonic()
        if self._buried != self.processes._buried:  # a zygote has ended: the reapers that it leaves come home to us
            self._buried = self.processes._buried
            self._busy = True
        if not self._busy or now < self._tick_at:
            return
        self._tick_at = now + _TICK_S
        with self._lock:
            self._busy = False
            outside = set(self._outside)
            ended = [pid for pid, process in self._known.items() if process.ended]
        children = set(procfs.children(self.pid))  # after: who is started meanwhile is not forgotten
        with self._lock:
            self._outside -= outside - children
            for pid in ended:
                if pid not in children:
                    del self._known[pid]
        if self.bury(lambda tag: tag is not None and foreign.scope_of_tag(tag) != 0) or self._known or self._outside:
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
            stat = procfs.read_stat(pid)
            if stat is None:
                continue
            left = True
            if not stat.dead:
                continue
            since = zombies[pid] = self._zombies.get(pid, now)
            known = self._known.get(pid)
            nobodys = ours(foreign.tag_of(pid)) and not (known is not None and known._unnamed)
            if nobodys or now - since > _UNKNOWN_ZOMBIE_S:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                del zombies[pid]
        self._zombies = zombies
        return left

    # -- kills

    def unattributed(self, since: int) -> tuple[tuple[str, ...], bool]:
        """Orphans that came home after ``since`` and carry nobody's tag; and whether it is certain (see `_orphans`)."""
        found = []
        orphans, certain = self._orphans()
        for pid in orphans:
            if pid in self._known:
                continue
            stat = procfs.read_stat(pid)
            if stat is None or stat.dead or stat.started < since:
                continue
            tag = self._tag_of(pid)
            if tag is None or foreign.scope_of_tag(tag) == 0:
                found.append(pid)
        return procfs.names(found), certain

    def _let_go(self, process: ForeignProcess) -> None:
        """Close its pidfd, once. In the reading thread."""
        pidfd, process._pidfd = process._pidfd, -1
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


_numbers = itertools.count(1, foreign.SCOPES // 8)


def _first_number() -> int:
    """Where an installation begins to count its scopes: far from the one before, whose kills may still be at work."""
    return next(_numbers) % (foreign.SCOPES - 1)


def _tag_process(pid: int, tag: int) -> None:
    """Have ``pid`` carry the tag; where it cannot (another user's program, a hard limit), its marker remains."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.prlimit(pid, foreign.RLIMIT_LOCKS)
        resource.prlimit(pid, foreign.RLIMIT_LOCKS, (tag, hard))


_adoption: _Adoption | None = None


async def kill_trees(roots: Sequence[ForeignProcess], *, bound_s: float = KILL_BOUND_S) -> TreeResult:
    """Kill adopted programs of a scope with all they ever started; their starters still get the exit statuses.

    A zygote's fork does it, so a busy interpreter does not delay it. When this returns, those killed run no more.

    Parameters:
        roots: what one or more scopes adopted; all that belongs to these scopes is killed.
        bound_s: how long to try.
    """
    end_at = time.monotonic() + bound_s
    for again_s in (*_AGAIN_S, None):
        request = _Request(roots, bound_s)
        for pause_s in backlog_pauses():
            if request.submit():
                break
            await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(bound_s + _ANSWER_S):
                result = await request.answer.wait()
        except TimeoutError:
            result = request.answer.value or TreeResult(proven=False)  # it may have come while the loop was held up
        bound_s = end_at - time.monotonic()
        if result != TreeResult(proven=False) or bound_s <= 0 or again_s is None:
            break
        await asyncio.sleep(again_s)  # the zygote was killed over it: another one is asked
    deadline = time.monotonic() + _STARTING_S
    while True:
        concluded = request.conclude(result, last=time.monotonic() >= deadline)
        if concluded is not None:
            return concluded
        await asyncio.sleep(_STARTING_PAUSE_S)


class _Request:
    """One call of `kill_trees`."""

    def __init__(self, roots: Sequence[ForeignProcess], bound_s: float) -> None:
        self._adoption = _adoption
        self._tags = frozenset(root._tag for root in roots)
        self._since = min((root.started for root in roots), default=0)
        if not roots or self._adoption is None:
            self.answer: Once[TreeResult] = Once()
            self.answer.set(TreeResult(proven=not roots))
            self.submit: Callable[[], bool] = lambda: True
            return
        pairs = [(root.pid, root.started) for root in roots if not root.ended]
        try:
            killer = self._adoption.processes._send_killer(sorted(self._tags), pairs, bound_s)
        except OSError:  # no descriptor is left: the roots at least can be hit with those they have
            self.answer = Once()
            self.answer.set(TreeResult(killed=_kill_roots(roots), proven=False))
            self.submit = lambda: True
            return
        self.answer = killer.answer
        self.submit = killer.submit

    def conclude(self, result: TreeResult, *, last: bool) -> TreeResult | None:
        """Wait for the orphans among the killed, and name who could not be attributed.

        None when one of them may be a program that somebody else is just starting, unless this is the last attempt.
        """
        if self._adoption is None or not self._tags:
            return result
        self._adoption.bury(self._tags.__contains__)
        unattributed, certain = self._adoption.unattributed(self._since)
        if unattributed and not (certain or last):
            return None
        return TreeResult(
            killed=result.killed,
            survivors=result.survivors,
            unattributed=unattributed,
            proven=result.proven,
        )


def _await_end(pidfd: int, timeout_s: float) -> None:
    """Wait, in this thread, until the process of the descriptor runs no more, or the time is over."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(timeout_s * 1000)


def _kill_roots(roots: Sequence[ForeignProcess]) -> tuple[int, ...]:
    hit = []
    for root in roots:
        with contextlib.suppress(OSError):  # it ended just now, or is another user's
            if not root.ended:
                procfs.pidfd_signal(root._pidfd, signal.SIGKILL)
                hit.append(root.pid)
    return tuple(hit)


def install(current: Callable[[], Owner | None], processes: ProcessHost | None = None) -> Restorer:
    """Adopt, from now on and in the whole process, what foreign code starts inside a scope.

    Parameters:
        current: says which scope the running code is in.
        processes: whose zygote does the killing; None for the one of this process. It is started now: what it finds
            when this process is killed, it kills.

    Raises:
        RuntimeError: it is installed already.
    """
    global _adoption
    if _adoption is not None:
        raise RuntimeError("foreign processes are adopted already; restore() the first install() before the next")
    if not supported():
        return Restorer(lambda: None)
    processes = process_host() if processes is None else processes
    adoption = _Adoption(current, processes)
    processes.start()
    limits = resource.getrlimit(foreign.RLIMIT_LOCKS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(foreign.RLIMIT_LOCKS, (adoption.own_tag, limits[1]))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    restore = _wrap(adoption)
    processes._set_tick(adoption.tick)
    _adoption = adoption

    def undo() -> None:
        global _adoption
        _adoption = None
        restore()
        processes._set_tick(None)
        adoption.close()
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(foreign.RLIMIT_LOCKS, limits)

    return Restorer(undo)


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


def _wrap(adoption: _Adoption) -> Callable[[], None]:
    """Put wrappers around all ways to start a process; returns what takes them off again."""
    undo: list[tuple[Any, str, Any]] = []

    def put(place: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        plain = getattr(place, name)
        undo.append((place, name, plain))
        setattr(place, name, wrapper(plain))

    def around_fork_exec(plain: Callable[..., int]) -> Callable[..., int]:
        def fork_exec(*arguments: Any) -> int:
            if adoption.forked:
                return plain(*arguments)
            owner = adoption.owner()
            words = arguments[0]
            with adoption.start():
                if owner is None or any(shared in os.fsdecode(word) for word in words for shared in _SHARED):
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
            if adoption.forked:
                return plain()
            owner = adoption.owner()
            tag = None if owner is None else adoption.tag_for(owner)
            adoption.begin()
            try:
                with adoption.bequeath(None):  # the child tags itself, before anything else
                    result = plain()
            except BaseException:
                adoption.finish()
                raise
            pid = result if isinstance(result, int) else result[0]
            if pid == 0:  # a lock may be held for ever here, by a thread that was not forked along
                if tag is not None:
                    _tag_process(0, tag)
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
            if adoption.forked:
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
            plain(self)
            owner = adoption.owner()
            if owner is not None and getattr(self._popen, "method", None) == "forkserver":  # not a child of ours
                adoption.enter(owner, self.pid, self.name, adoption.tag_for(owner))

        return start

    def around_loop_start(plain: Callable[..., Any]) -> Callable[..., Any]:
        async def start(self: Any, *arguments: Any, **options: Any) -> Any:
            if adoption.forked:
                return await plain(self, *arguments, **options)
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

    def around_system(plain: Callable[[Any], int]) -> Callable[[Any], int]:
        def system(command: Any) -> int:
            if adoption.forked:
                return plain(command)
            code = subprocess.call(command, shell=True, close_fds=False)
            return -code if code < 0 else code << 8

        return system

    put(subprocess, "_fork_exec", around_fork_exec)
    put(_posixsubprocess, "fork_exec", around_fork_exec)
    put(os, "system", around_system)
    put(os, "fork", around_fork)
    put(os, "forkpty", around_fork)
    put(os, "posix_spawn", around_posix_spawn)
    put(os, "posix_spawnp", around_posix_spawn)
    put(multiprocessing.process.BaseProcess, "start", around_start)
    uvloop = sys.modules.get("uvloop")
    if uvloop is not None:  # starts its programs in C
        put(uvloop.Loop, "subprocess_exec", around_loop_start)
        put(uvloop.Loop, "subprocess_shell", around_loop_start)

    def restore() -> None:
        while undo:
            place, name, plain = undo.pop()
            setattr(place, name, plain)

    return restore


_MARK_PREFIXES = (procfs.HOST_MARKER + b"=", procfs.SCOPE_MARKER + b"=")


def _marks(tag: int) -> dict[bytes, bytes]:
    return {procfs.HOST_MARKER: host_marker(), procfs.SCOPE_MARKER: b"%d" % tag}


def _base(path: Any) -> str:
    return os.path.basename(os.fsdecode(path))
