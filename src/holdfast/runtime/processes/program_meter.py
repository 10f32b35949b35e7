"""Sums of memory, tasks and descriptors over the programs of each principal, and which program to end.

The meter process runs this. Invariants:

- A principal's quick sum is an upper bound. Only if it is above the limit is its memory measured exactly, and only the
  exact sum ends a program. An exact figure is trusted for `_TRUST_S`, corrected by what was added since.
- If several programs are above a limit together, the largest is ended first. A program that is to be ended counts no
  longer, so another is ended only if the rest is still above the limit.
- A look at one program ends once it has more tasks than its principal may have.
"""

from __future__ import annotations

import time

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.tree_usage import ProcessUsage, exact_memory, quick_usage, unmapped_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ProgramMeter"]

_TRUST_S = 1.0
_EXACT_BOUND_S = 0.1
_REPORT_S = 0.5


class _Watched:
    """A watched program."""

    __slots__ = ("processes", "reaper", "scratch", "started")

    def __init__(self, reaper: int, started: int, scratch: list[bytes]) -> None:
        self.reaper = reaper
        self.started = started
        self.scratch = scratch
        self.processes: list[ProcessUsage] = []


class _Owner:
    """A principal's watched programs, and what is known of its memory."""

    __slots__ = ("first_shared", "measured_at", "programs", "shared", "shared_at", "slack")

    def __init__(self) -> None:
        self.programs: dict[int, _Watched] = {}
        self.first_shared = unmapped_memory()
        """Shared memory of the machine before the principal's first program."""
        self.shared = 0
        """The principal's shared memory when it was last measured exactly."""
        self.shared_at = self.first_shared
        """Shared memory of the machine at that time."""
        self.slack: dict[int, int] = {}
        """By how much the quick figure of each process was too high then, by pid; negative if it has swapped."""
        self.measured_at = 0.0


class ProgramMeter:
    """Looks at the programs of all principals.

    Parameters:
        memory_bytes, tasks, files: limits of each principal.
    """

    def __init__(self, memory_bytes: int, tasks: int, files: int) -> None:
        self._memory_bytes = memory_bytes
        self._tasks = tasks
        self._files = files
        self._owners: dict[str, _Owner] = {}
        self._owner_of: dict[int, str] = {}
        self._reported = 0.0

    @property
    def busy(self) -> bool:
        """Whether a program is watched."""
        return bool(self._owner_of)

    def obey(self, message: tuple[Any, ...]) -> None:
        """Take a message of the host."""
        match message:
            case ("watch", int(watch), str(name), int(reaper), int(started), list(scratch), _):
                owner = self._owners.get(name)
                if owner is None:
                    owner = self._owners[name] = _Owner()
                owner.programs[watch] = _Watched(reaper, started, scratch)
                self._owner_of[watch] = name
            case ("unwatch", int(watch)):
                self._forget(watch)

    def _forget(self, watch: int) -> None:
        name = self._owner_of.pop(watch, None)
        if name is not None:
            owner = self._owners[name]
            del owner.programs[watch]
            if not owner.programs:
                del self._owners[name]

    def look(self, now: float) -> list[tuple[Any, ...]]:
        """Measure every principal once; return the reports."""
        reports: list[tuple[Any, ...]] = []
        sums: dict[str, tuple[int, int, int]] = {}
        shared = unmapped_memory()
        for name, owner in list(self._owners.items()):
            self._measure(owner)
            reports += self._judge(owner, shared, now)
            sums[name] = (self._bound(owner, shared), _tasks(owner), _files(owner))
        if now - self._reported >= _REPORT_S:
            self._reported = now
            names = list(sums)
            for first in range(0, len(names), 200):
                reports.append(("usage", {name: sums[name] for name in names[first : first + 200]}))
        return reports

    def _measure(self, owner: _Owner) -> None:
        for watched in owner.programs.values():
            here = procfs.start_time(watched.reaper) == watched.started
            watched.processes = quick_usage(watched.reaper, self._tasks) if here else []

    def _bound(self, owner: _Owner, shared: int) -> int:
        """Return the memory of a principal: exact where it was measured, else an upper bound."""
        own = sum(_resident(owner, watched) for watched in owner.programs.values())
        return own + max(0, owner.shared + shared - owner.shared_at)

    def _judge(self, owner: _Owner, shared: int, now: float) -> list[tuple[Any, ...]]:
        """Return a report for each program that has to end, and forget these programs."""
        reports: list[tuple[Any, ...]] = []
        while owner.programs:
            resource, used, size = self._excess(owner, shared, now)
            if not resource:
                break
            largest = max(owner.programs, key=lambda watch: size[watch])
            reports.append(("over", largest, resource, used))
            self._forget(largest)
        return reports

    def _excess(self, owner: _Owner, shared: int, now: float) -> tuple[str, int, dict[int, int]]:
        """Return the resource of which a principal uses too much, how much, and the part of each program."""
        if (tasks := _tasks(owner)) > self._tasks:
            return "processes", tasks, {watch: _tasks_of(one) for watch, one in owner.programs.items()}
        if (files := _files(owner)) > self._files:
            return "files", files, {watch: _files_of(one) for watch, one in owner.programs.items()}
        if now - owner.measured_at > _TRUST_S:
            owner.slack.clear()
        if self._bound(owner, shared) <= self._memory_bytes:
            return "", 0, {}
        size = _measure_exactly(owner, shared, now)
        return ("memory", sum(size.values()), size) if sum(size.values()) > self._memory_bytes else ("", 0, {})


def _measure_exactly(owner: _Owner, shared: int, now: float) -> dict[int, int]:
    """Measure a principal's memory; return the bytes of each program, its part of the shared memory included."""
    owner.slack.clear()
    size: dict[int, int] = {}
    mapped = in_files = 0
    stop_at = time.monotonic() + _EXACT_BOUND_S
    for watch, watched in owner.programs.items():
        private: dict[int, int] = {}
        own_mapped = own_files = 0
        if time.monotonic() < stop_at:
            private, own_mapped, own_files = exact_memory(watched.processes, watched.scratch)
        for usage in watched.processes:
            owner.slack[usage.pid] = usage.resident - private.get(usage.pid, usage.resident)
        size[watch] = sum(private.get(usage.pid, usage.resident) for usage in watched.processes)
        size[watch] += max(own_mapped, own_files)
        mapped += own_mapped
        in_files += own_files
    # A mapped file is in both sums. All of it was added to the machine's since the principal's first program.
    least = max(mapped, in_files)
    owner.shared = min(mapped + in_files, max(least, shared - owner.first_shared))
    owner.shared_at = shared
    owner.measured_at = now
    if size and owner.shared > least:
        size[max(size, key=lambda watch: size[watch])] += owner.shared - least
    return size


def _resident(owner: _Owner, watched: _Watched) -> int:
    slack = owner.slack
    return sum(max(0, usage.resident - slack.get(usage.pid, 0)) for usage in watched.processes)


def _tasks_of(watched: _Watched) -> int:
    return sum(usage.tasks for usage in watched.processes)


def _tasks(owner: _Owner) -> int:
    return sum(_tasks_of(watched) for watched in owner.programs.values())


def _files_of(watched: _Watched) -> int:
    return sum(usage.files for usage in watched.processes)


def _files(owner: _Owner) -> int:
    return sum(_files_of(watched) for watched in owner.programs.values())
