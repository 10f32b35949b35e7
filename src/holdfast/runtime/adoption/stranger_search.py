"""Search for processes that C code started; assign each to its scope if the scope is certain, else report it.

Such a process carries the tag of this process. It belongs to a scope if its parent is a thread that still works for
that scope and has worked for no other scope since the process was started.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.logs import redact
from holdfast.runtime.adoption.adopted_programs import AdoptedPrograms
from holdfast.runtime.adoption.tag_inheritance import TagInheritance
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes import tags as process_tags
from holdfast.runtime.processes.foreign_process import Owner

__all__ = ["StrangerSearch", "Unclaimed"]

_LOOK_PAUSE_S = 0.004
_TOLD_PER_TURN = 32

_log = logging.getLogger("holdfast.runtime")


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


class StrangerSearch:
    """Searches of one installation. `claim` and `strangers_since` are callable from any thread.

    Parameters:
        programs: programs whose start was observed.
        tags: tags of this process.
        home: returns the scope that the thread with this native id works for; None if it works for no scope.
        kill: kills all processes with a tag.
    """

    def __init__(
        self,
        programs: AdoptedPrograms,
        tags: TagInheritance,
        home: Callable[[int], Owner | None],
        kill: Callable[[int], object],
    ) -> None:
        self._programs = programs
        self._tags = tags
        self._home = home
        self._kill = kill
        self._waiting: dict[asyncio.AbstractEventLoop, list[tuple[float, Callable[[int], object]]]] = {}
        self._looked_at = -math.inf
        self._told: set[tuple[int, int]] = set()

    def unclaimed(self) -> list[Unclaimed]:
        """Return live children of this process whose start was not observed and that carry no scope's tag.

        Such a process is an orphan, or C code started it on a thread.
        """
        known = self._programs.known_pids()
        found = []
        for thread, pid in procfs.children_of_threads(self._tags.pid):
            if pid in known:
                continue
            tag = self._tags.read_or_marked(pid)
            if tag is not None and process_tags.scope_of_tag(tag) != process_tags.UNCLAIMED:
                continue
            stat = procfs.read_stat(pid)
            if stat is not None and not stat.dead:
                found.append(Unclaimed(pid, stat.started, thread))
        if found and self._tags.seal.carrier is None:  # without tags, one may be a program whose start is under way
            known = self._programs.known_pids()
            found = [one for one in found if one.pid not in known]
        return found

    def claim(self) -> list[Unclaimed]:
        """Assign each process of `unclaimed` to its scope if the scope is certain; return the remaining processes."""
        left = []
        for one in self.unclaimed():
            home = self._home(one.thread) if one.thread != self._tags.pid else None
            if home is None:
                left.append(one)
                continue
            tag = self._programs.tag_for(home)
            for pid in (one.pid, *procfs.descendants(one.pid)):
                self._tags.seal.put(pid, tag)
            if getattr(home, "closed", False):  # from an abandoned thread
                self._kill(tag)
        return left

    def strangers_since(self, left: Sequence[Unclaimed], since: float) -> int:
        """Return how many processes of ``left`` a scope may have started; report each to the operator once.

        Parameters:
            left: processes that `claim` could not assign.
            since: time at which the scope was opened, in clock ticks since boot.
        """
        mine = [one for one in left if one.started >= int(since)]
        for one in mine:
            if (one.pid, one.started) not in self._told:
                self._told.add((one.pid, one.started))
                _report(f"{one.pid} {procfs.command(one.pid)}")
        return len(mine)

    def look_soon(self, loop: asyncio.AbstractEventLoop, since: float, tell: Callable[[int], object]) -> None:
        """Call ``tell`` with the result of `strangers_since`, in one of the loop's next iterations."""
        waiting = self._waiting.setdefault(loop, [])
        waiting.append((since, tell))
        if len(waiting) > 1:
            return
        pause_s = self._looked_at + _LOOK_PAUSE_S - time.monotonic()
        if pause_s > 0:
            loop.call_later(pause_s, self._look, loop, context=contextvars.Context())
        else:
            loop.call_soon(self._look, loop, context=contextvars.Context())

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer all searches requested on this loop."""
        asked = self._waiting.pop(loop)
        left = self.claim()
        self._looked_at = time.monotonic()
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


def _report(stranger: str) -> None:
    """Report a process that cannot be attributed to a scope, to the operator only."""
    _log.warning(
        "C code started a process that cannot be attributed to a session: %s; sessions that were open then cannot be "
        "proven stopped while it lives; start programs with run.process or subprocess",
        redact(stranger),
    )
