"""Register the programs that scopes adopt, adopt descendants that outlive a program (strays), and report each end.

Invariants
- Each program is identified by a pidfd that was opened while its pid could not be reused.
- When an adopted program ends and leaves strays, the strays are adopted before the program's end is reported.
- This process reaps only orphans that were reparented to it, never a pid that foreign code owns.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from holdfast.runtime.adoption.tag_inheritance import TagInheritance
from holdfast.runtime.process_host import ProcessHost
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.foreign_process import ForeignProcess, Owner

__all__ = ["AdoptedPrograms", "Family"]

_TICK_S = 1.0
_HASTY_TICK_S = 0.02
_MANY = 100
_UNKNOWN_ZOMBIE_S = 5.0
_ROUNDS = 8
_STRUCK_S = 1.0
"""Time limit for the death of a program that was killed because its owner refused it."""


class Family:
    """The adopted programs of one owner.

    Attributes:
        refused: pids of processes that were killed because the owner refused them, and that no kill has reported yet.
    """

    __slots__ = ("live", "owner", "refused", "tag")

    def __init__(self, owner: Owner, tag: int) -> None:
        self.owner = owner
        self.tag = tag
        self.live: set[ForeignProcess] = set()
        self.refused: list[int] = []


class AdoptedPrograms:
    """Known programs of one installation, shared by threads that start programs and the host's reading thread.

    Parameters:
        processes: process host whose reading thread watches the programs.
        tags: tags of this process.
        before_listing: called about once a second, before ended children are forgotten.
    """

    def __init__(self, processes: ProcessHost, tags: TagInheritance, before_listing: Callable[[], object]) -> None:
        self._processes = processes
        self._tags = tags
        self._before_listing = before_listing
        self._lock = threading.Lock()
        self._families: dict[int, Family] = {}  # by id of the owner, which the family keeps alive
        self._by_tag: dict[int, Family] = {}
        self._known: dict[int, ForeignProcess] = {}
        self._outside = {pid for pid in procfs.children(tags.pid) if not self._is_adopted(pid)}
        self._starting = 0
        self._tick_at = 0.0
        self._burying = threading.Lock()
        self._entering_strays = threading.Lock()
        self._just_ended: list[tuple[ForeignProcess, Family]] = []
        self._restless: list[tuple[ForeignProcess, Family]] = []
        self._just_buried = 0
        self._zombies: dict[int, float] = {}
        self._busy = False
        self._buried = 0

    # -- starts

    def tag_for(self, owner: Owner) -> int:
        """Return the tag for programs that ``owner`` starts now."""
        with self._lock:
            family = self._families.get(id(owner))
            if family is None:
                family = Family(owner, self._free_tag())
                self._families[id(owner)] = family
                self._by_tag[family.tag] = family
                self._busy = True
            return family.tag

    def _free_tag(self) -> int:
        """Return an unused tag.

        Scope numbers continue across installations, because processes of earlier installations may still run.
        """
        while True:
            tag = self._tags.of_scope(next(_numbers) % (process_tags.HELPERS - 1) + 1)
            if tag not in self._by_tag:
                return tag

    def known_tag(self, owner: object) -> int | None:
        """Return the tag of the programs that ``owner`` has started; None if it has started none."""
        family = self._families.get(id(owner))
        return None if family is None else family.tag

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        """Context manager for a start: until the new pid is known, no unknown child is taken for an orphan."""
        self.begin()
        try:
            yield
        finally:
            self.finish()

    def begin(self) -> None:
        """Record the beginning of a start."""
        with self._lock:
            self._starting += 1
            self._busy = True

    def finish(self) -> None:
        """Record the end of a start: the new pid is known, or the start failed."""
        with self._lock:
            self._starting -= 1

    def enter(self, owner: Owner, pid: int, name: str, tag: int, *, orphan: bool = False) -> None:
        """Add an unreaped process: a program that was just started for ``owner``, or an orphan of such a program.

        If the owner accepts no more programs, this program and its descendants are killed before this method returns,
        because no other code waits for them.
        """
        if not self._enter(owner, pid, name, tag, orphan=orphan):
            self.enter_strays(self.family_of(owner, tag))

    def family_of(self, owner: Owner, tag: int) -> Family:
        """Return the family of ``owner``; create it again if it was forgotten after `tag_for`."""
        with self._lock:
            family = self._families.get(id(owner))
            if family is None:
                family = self._by_tag[tag] = self._families[id(owner)] = Family(owner, tag)
            return family

    def _enter(self, owner: Owner, pid: int, name: str, tag: int, *, orphan: bool, unnamed: bool = False) -> bool:
        """Add a program; return False if its owner refused it, so that it was killed, or if it was already added."""
        self._tags.seal.put(pid, tag)
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
                known.is_orphan = known.is_orphan and orphan
                known.is_unnamed = known.is_unnamed or unnamed
                os.close(pidfd)
                return False
            family = self._families.get(id(owner))
            if family is None:  # its last other program ended since tag_for()
                family = self._by_tag[tag] = self._families[id(owner)] = Family(owner, tag)
            family.live.add(process)
            self._known[pid] = process
        taken = owner.adopt_process(process)
        if not taken:
            with self._lock:  # before its death, after which a kill may report
                family.refused += [pid] if procfs.lives(pid, started) else []
            process.signal(signal.SIGKILL)
            _await_end(pidfd, _STRUCK_S)
        self._processes.watch(pidfd, lambda: self._end(process, family))
        return taken

    def enter_strays(self, *families: Family) -> bool:
        """Adopt the orphans of these families; return True if all of them are adopted or dead.

        Return False if orphans may be left, because they appear faster than they can be found. Concurrent calls run one
        after the other.
        """
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

    def _strays(self, tags: Mapping[int, Family]) -> tuple[dict[int, Family], set[int]]:
        """Return the live and the ended orphans with these tags that were not adopted.

        The ended ones are reaped if it is certain that they are orphans.
        """
        living: dict[int, Family] = {}
        over: set[int] = set()
        with self._burying:
            orphans, certain = self._orphans()
            for pid in orphans:
                family = None if pid in self._known else tags.get(self._tags.read_or_marked(pid) or 0)
                if family is None:
                    continue
                if (certain and _bury_now(pid)) or (stat := procfs.read_stat(pid)) is None or stat.dead:
                    over.add(pid)
                else:
                    living[pid] = family
        return living, over

    def enter_unnamed(self, owner: Owner, name: str, tag: int) -> None:
        """Add a program that was just started for ``owner`` by code that does not know the pid yet.

        Until the starter knows the pid, the program counts as an orphan, in case the start is cancelled and no other
        code waits for the program. But the starter gets time to reap the program: if other code reaped it, the event
        loop would never release the program's resources.
        """
        with self._lock:  # it may already be known as a stray of a program that just ended: then it is one of these
            for known in self._known.values():
                known.is_unnamed = known.is_unnamed or (known.is_orphan and known.tag == tag)
        for pid in self._strangers():
            if self._tags.read_or_marked(pid) != tag:
                continue
            if not self._enter(owner, pid, name, tag, orphan=True, unnamed=True):
                self.enter_strays(self.family_of(owner, tag))

    def _is_adopted(self, pid: int) -> bool:
        """Whether a scope of an earlier installation left this child behind; otherwise its starter waits for it."""
        tag = self._tags.read(pid)
        if tag is None or process_tags.scope_of_tag(tag) in (process_tags.OUTSIDE, process_tags.HELPERS):
            return False
        return process_tags.host_of_tag(tag) == process_tags.host_of_tag(self._tags.own)

    def note_outside(self, pid: int) -> None:
        """Record a program that was started outside any scope."""
        self._outside.add(pid)

    # -- ends

    def _end(self, process: ForeignProcess, family: Family) -> None:
        """Handle the end of an adopted program, in the reading thread.

        The program's strays are children of this process by now. One search finds the strays of all programs that ended
        at the same time.
        """
        self._let_go(process)
        with self._lock:
            alone = not self._just_ended
            self._just_ended.append((process, family))
        if alone:
            self._processes.call_in_reading_thread(self._sweep)

    def _sweep(self) -> None:
        """Adopt the strays of all programs that have ended, then report the ends. In the reading thread.

        If strays appear faster than they can be found, the ends are reported later: by the next complete search, or
        when the stop of the scope has killed the strays.
        """
        with self._lock:
            swept, self._just_ended = self._just_ended, []
        families = {id(family): family for _, family in swept}
        try:
            complete = self.enter_strays(*families.values())
        except BaseException:  # out of descriptors: a stray that cannot be held must not block its scope
            self._tell_ends(swept)
            raise
        if complete:
            self._tell_ends(swept)
            return
        with self._lock:
            self._restless += swept
            self._busy = True

    def _tell_ends(self, swept: list[tuple[ForeignProcess, Family]]) -> None:
        with self._lock:
            for process, family in swept:
                family.live.discard(process)
                self._forget_idle(family)
        for process, _ in swept:
            process.mark_ended()

    def _forget_idle(self, family: Family) -> None:
        """Forget a family that is empty and whose owner can start nothing more. The caller holds the lock."""
        owner = family.owner
        if not family.live and getattr(owner, "closed", True) and self._families.get(id(owner)) is family:
            del self._families[id(owner)]
            del self._by_tag[family.tag]

    def is_known(self, pid: int) -> bool:
        """Return whether ``pid`` is a known child of this process: adopted, or started outside scopes."""
        return pid in self._known or pid in self._outside

    def known_pids(self) -> set[int]:
        """Return all known pids, including those of the zygotes."""
        with self._lock:
            return {*self._known, *self._outside, *self._processes.zygote_pids()}

    def take_refused(self, tags: Iterable[int]) -> tuple[int, ...]:
        """Return the pids of `Family.refused` once, for a kill of these tags that has ended."""
        taken: list[int] = []
        with self._lock:
            for tag in tags:
                if (family := self._by_tag.get(tag)) is not None:
                    taken += family.refused
                    family.refused = []
        return tuple(taken)

    def all_tags(self) -> list[int]:
        """Return the tags of all owners."""
        return list(self._by_tag)

    def _orphans(self) -> tuple[list[int], bool]:
        """Return the children of this process that neither foreign code nor the process host started.

        Also return whether this is certain: during a start, one of them may be the new process.
        """
        children = procfs.children(self._tags.pid)  # first, so that processes started later are not among them
        with self._lock:
            certain = self._starting == 0
            ours = self._processes.zygote_pids()
            unknown = [pid for pid in children if pid not in self._outside and pid not in ours]
            return [pid for pid in unknown if (known := self._known.get(pid)) is None or known.is_orphan], certain

    def _strangers(self) -> list[int]:
        """Return orphans that were not adopted."""
        orphans, _ = self._orphans()
        return [pid for pid in orphans if pid not in self._known]

    def tick(self) -> float:
        """Forget children that were reaped, reap orphans that have ended, and return the seconds until the next call.

        The interval is one second, or 20 ms after a call that reaped at least 100 orphans.
        """
        self._just_buried = 0
        self._tick()
        return _TICK_S if self._just_buried < _MANY else _HASTY_TICK_S

    def _tick(self) -> None:
        now = time.monotonic()
        if self._buried != self._processes.buried_zygotes:  # a zygote has ended: its reapers become our children
            self._buried = self._processes.buried_zygotes
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
        self._before_listing()
        children = set(procfs.children(self._tags.pid))  # last, so that processes started meanwhile are not forgotten
        with self._lock:
            self._outside -= outside - children
            for pid in ended:
                if pid not in children:
                    self._known.pop(pid, None)
        nobodys = (process_tags.UNCLAIMED, process_tags.OUTSIDE, process_tags.HELPERS)
        if (
            self.bury(lambda tag: tag is not None and process_tags.scope_of_tag(tag) not in nobodys)
            or self._known
            or self._outside
            or self._families
        ):
            self._busy = True

    def bury(self, ours: Callable[[int | None], bool]) -> bool:
        """Reap ended orphans that no other code waits for, or that no code has reaped for 5 seconds.

        Return True if orphans may be left.

        Parameters:
            ours: called with the tag of an orphan, or None if it has no tag; returns True if certainly no other code
                waits for the orphan.
        """
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
            if ours(self._tags.read(pid)) and not (known is not None and known.is_unnamed):
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

    def conclude(self, tags: frozenset[int]) -> None:
        """Reap orphans that a kill has ended; report ends that were held back until then. In the reading thread."""
        self.bury(tags.__contains__)
        with self._lock:
            over = [(process, family) for process, family in self._restless if family.tag in tags]
            self._restless = [one for one in self._restless if one not in over]
        self._tell_ends(over)

    def _let_go(self, process: ForeignProcess) -> None:
        """Stop watching the program and close its pidfd, unless it is closed. In the reading thread."""
        pidfd = process.give_up_pidfd()
        if pidfd >= 0:
            self._processes.unwatch(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Make the reading thread stop watching all programs; return without waiting for this to happen."""
        self._processes.call_in_reading_thread(self._let_all_go)

    def _let_all_go(self) -> None:
        with self._lock:
            known = list(self._known.values())
        for process in known:
            self._let_go(process)


_numbers = itertools.count()


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
