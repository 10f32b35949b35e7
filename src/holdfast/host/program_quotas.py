"""Quotas of what the programs of each principal use together: memory, processes, descriptors, disk and inodes.

Two meters (`holdfast.runtime.processes.meter`) look at the programs every 0.1 s, while there are any. Invariants:

- A principal's quotas hold for all of its programs, of whatever tool, session and run.
- If a principal is above a quota, its largest program is ended through the program's reaper, from the reading thread,
  so a busy event loop delays nothing. The program's result has the reason, and the operator gets an incident.
- A program is only ended for what its own principal uses, or for what it wrote when a disk is almost full.
- Nothing runs while no program does: the meters end by themselves.

Between two looks a principal may use more than its quota: as much as its programs take within `REACTION_S`, and on disk
also what they write during a walk through a large workspace. Not so where the kernel limits memory and processes by
cgroups: there, nothing is used above the quota. The kernel ends a program for memory; a principal that has as many
processes as it may loses its largest program.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.protocol.stopping import LEASE_LOST
from holdfast.runtime.process_host import process_host
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.meter_link import MeterLink
from holdfast.runtime.processes.tree import KILL_BOUND_S, ReaperTree

if TYPE_CHECKING:
    from holdfast.runtime import Process
    from holdfast.runtime.process_host import ProcessHost
    from holdfast.runtime.processes.cgroup_delegation import ProgramCgroups
    from holdfast.runtime.processes.program_cgroup import CgroupSpec

__all__ = ["ENFORCED_BY", "PROGRAM_RESOURCES", "REACTION_S", "ProgramLimits", "ProgramQuotas", "Watched", "shown_bytes"]

PROGRAM_RESOURCES = ("memory", "processes", "files", "disk", "inodes")
"""The resources that have a quota."""

ENFORCED_BY = {"memory": "memory", "processes": "pids"}
"""The resources that the kernel can limit, with the controller of cgroups that does."""

REACTION_S = 0.25
"""Time from the use of too much to the end of the program: a look every 0.1 s, its duration, and the kill."""

_MEASURE_S = 10.0
_ASK_AGAIN_S = 3.0
_SCRATCH = (b"/tmp", b"/dev/shm")
"""Where a walled program has file systems of its own in memory, which count as its memory."""
_KNOWN_FOLDERS = 10_000
_UNLIMITED = 1 << 61
_NO_PLACE = (b"", _UNLIMITED, _UNLIMITED)
_BLOCK_BYTES = 4096
"""Files occupy whole blocks."""
_names = itertools.count(1)
"""Numbers that keep the cgroups of several hosts in this process apart."""

Report = Callable[[str, str, str], None]
"""Callback for an ended program: the principal, the resource, and a text."""


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The quotas of each principal.

    Parameters:
        memory_bytes: bytes of memory, shared memory and files in memory included.
        processes: processes and threads.
        files: open descriptors.
        disk_bytes, inodes: bytes and entries of the workspaces.
        reserve_bytes: free space that a disk keeps.
    """

    memory_bytes: int
    processes: int
    files: int
    disk_bytes: int
    inodes: int
    reserve_bytes: int

    def of(self, resource: str) -> int:
        """Return the quota of a resource."""
        match resource:
            case "memory":
                return self.memory_bytes
            case "processes":
                return self.processes
            case "files":
                return self.files
            case "disk":
                return self.disk_bytes
            case _:
                return self.inodes


class Watched:
    """A watched program. Implements `holdfast.agents.program_usage.WatchedProgram`.

    Attributes:
        reason: why the host ended it; empty if it did not.
    """

    __slots__ = ("_out_of_memory", "principal", "reason", "tree")

    def __init__(self, principal: str, tree: ReaperTree | None, out_of_memory: str) -> None:
        self.principal = principal
        self.tree = tree
        self.reason = ""
        self._out_of_memory = out_of_memory

    @property
    def ended_because(self) -> str:
        """Why the host or the kernel ended the program: its principal used too much, or the host's lease ended."""
        if not self.reason and self.tree is not None and self.tree.lease_ended:
            return LEASE_LOST
        if not self.reason and self.tree is not None and self.tree.out_of_memory:
            return self._out_of_memory
        return self.reason


class _Folder:
    """The last measurement of a principal's workspace.

    Attributes:
        base_bytes, base_inodes: what a shared folder held at first; None until that is known.
        bytes, inodes: what it held at the last measurement, and the files that tools wrote since then.
        is_measured: whether it was measured.
        measured: callbacks of calls that wait for a measurement, each with the number of its order.
    """

    __slots__ = ("base_bytes", "base_inodes", "bytes", "fault", "inodes", "is_measured", "measured", "path", "shared")

    def __init__(self, path: Path, shared: bool) -> None:
        self.path = path
        self.shared = shared
        self.base_bytes: int | None = None if shared else 0
        self.base_inodes = 0
        self.bytes = 0
        self.inodes = 0
        self.fault = ""
        self.is_measured = False
        self.measured: list[tuple[int, Callable[[], object]]] = []


class ProgramQuotas:
    """The accounts of a host. Implements `holdfast.agents.program_usage.ProgramAccounts`. Thread-safe.

    Parameters:
        limits: quotas of each principal.
        report: callback for each program that was ended; called in the reading thread.
        host: the process host whose programs are watched; None means that of this process.
        on_start: called for each program that `watch` gets; None means no call.
        cgroups: where the kernel limits the programs' sums; None if it does not.
    """

    def __init__(
        self,
        limits: ProgramLimits,
        report: Report,
        host: ProcessHost | None = None,
        on_start: Callable[[], None] | None = None,
        cgroups: ProgramCgroups | None = None,
    ) -> None:
        self.limits = limits
        self.ended: dict[str, int] = dict.fromkeys((*PROGRAM_RESOURCES, "reserve"), 0)
        """Number of programs that were ended, by resource."""
        self._report = report
        self._host = host
        self._on_start = on_start
        self._cgroups = cgroups
        self._name = next(_names)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._watched: dict[int, Watched] = {}
        self._links: tuple[MeterLink, MeterLink] | None = None
        self._sums: dict[str, tuple[int, int, int]] = {}
        self._folders: OrderedDict[tuple[str, Path], _Folder] = OrderedDict()

    def is_enforced(self, resource: str) -> bool:
        """Return whether the kernel limits the sum of a resource, so that a principal cannot exceed it."""
        return self._cgroups is not None and ENFORCED_BY.get(resource) in self._cgroups.controllers

    # ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────

    def cgroup_of(self, principal: str) -> CgroupSpec | None:
        """Return the cgroup in which a principal's programs have to start; None if the kernel limits no sums."""
        if self._cgroups is None:
            return None
        limits = self.limits
        owner = self._owner(principal)
        return self._cgroups.spec_of(owner, memory_bytes=limits.memory_bytes, processes=limits.processes)

    def _owner(self, principal: str) -> str:
        return f"{principal} {self._name}"

    def watch(self, principal: str, process: Process, *, folder: Path | None, shared: bool = False) -> Watched:
        """Count what a program uses until its tree is gone; end the program if its principal uses too much.

        Without reapers, programs are not watched.

        Parameters:
            principal: the principal that the program runs for; empty if it serves the host.
            folder: the workspace that it writes; None if its files are not counted.
        """
        if self._on_start is not None:
            self._on_start()
        tree = process.tree
        out_of_memory = self._explain(principal, "memory", self.limits.memory_bytes)
        watched = Watched(principal, tree if isinstance(tree, ReaperTree) else None, out_of_memory)
        if watched.tree is None:
            return watched
        known = None if folder is None else self._folder(principal, folder, shared)
        if tree.gone.value is not None:
            self._tell_memory(watched)
            if known is not None:
                self._ask_to_measure(principal, known)
            return watched
        place = _NO_PLACE if known is None else self._place(principal, known)
        with self._lock:
            number = next(self._numbers)
            self._watched[number] = watched
        reaper = watched.tree.reaper
        message = (
            "watch",
            number,
            principal,
            reaper,
            procfs.start_time(reaper) or 0,
            list(_SCRATCH),
            place,
        )
        programs, folders = self._meters()
        programs.add(number, message)
        if folder is not None:
            folders.add(number, message)
        if not tree.gone.add(lambda: self._forget(number)):
            self._forget(number)
        return watched

    def _forget(self, number: int) -> None:
        with self._lock:
            watched = self._watched.pop(number, None)
            if watched is None:
                return
            if not any(one.principal == watched.principal for one in self._watched.values()):
                self._sums.pop(watched.principal, None)
        self._tell_memory(watched)
        for link in self._meters():
            link.remove(number)

    def _tell_memory(self, watched: Watched) -> None:
        """Report a program that is gone if the kernel ended it for its principal's memory."""
        if watched.tree is not None and watched.tree.out_of_memory and not watched.reason:
            self._tell(watched, "memory")

    def _meters(self) -> tuple[MeterLink, MeterLink]:
        with self._lock:
            if self._links is None:
                host, limits = self._host or process_host(), self.limits
                memory = _UNLIMITED if self.is_enforced("memory") else limits.memory_bytes
                processes = limits.processes - self.is_enforced("processes")
                of_programs = ("programs", memory, processes, limits.files)
                self._links = (
                    MeterLink(of_programs, host, self._hear),
                    MeterLink(("folders", limits.reserve_bytes), host, self._hear),
                )
            return self._links

    def close(self) -> None:
        """Let the meters end. Call this when the host has ended its programs."""
        for link in self._links or ():
            link.close()

    def _hear(self, report: tuple[Any, ...]) -> None:
        """Handle a report of a meter, in the reading thread."""
        match report:
            case ("usage", dict(sums)):
                with self._lock:
                    living = {watched.principal for watched in self._watched.values()}
                    self._sums.update({name: found for name, found in sums.items() if name in living})
            case ("over", int(number), str(resource), int(used)):
                self._end(number, resource, used)
            case ("folder", str(principal), bytes(path), int(size), int(inodes), str(fault), int(number)):
                self._measured(principal, Path(os.fsdecode(path)), size, inodes, fault, number)

    def _end(self, number: int, resource: str, used: int) -> None:
        """End a program because its principal uses too much."""
        with self._lock:
            watched = self._watched.get(number)
        if watched is None or watched.tree is None or watched.ended_because:
            return
        watched.reason = self._explain(watched.principal, resource, used)
        self._tell(watched, resource)  # before its end, so that who waits for the end finds it counted
        watched.tree.ask_kill(0.0, KILL_BOUND_S)

    def _tell(self, watched: Watched, resource: str) -> None:
        assert watched.tree is not None
        self.ended[resource] += 1
        self._report(watched.principal, resource, f"ended `{watched.tree.name}`: {watched.ended_because}")

    def _explain(self, principal: str, resource: str, used: int) -> str:
        whose, limit = _owned(principal, "programs"), self.limits.of(resource)
        match resource:
            case "memory":
                return f"{whose} used {shown_bytes(used)} of memory; the limit is {shown_bytes(limit)}"
            case "processes":
                return f"{whose} had {used:,} processes and threads; the limit is {limit:,}"
            case "files":
                return f"{whose} had {used:,} open files; the limit is {limit:,}"
            case "reserve":
                reserve = shown_bytes(self.limits.reserve_bytes)
                return f"the disk of the workspace has only {shown_bytes(used)} free; {reserve} are kept in reserve"
            case _:
                return self._full(principal, resource, used)

    # ── workspaces ───────────────────────────────────────────────────────────────────────────────────────────────

    def known_fault(self, principal: str, folder: Path, *, shared: bool = False) -> str:
        """Return why a workspace must not grow: it was full when it was last measured, or its disk is full."""
        return self._fault(principal, self._folder(principal, folder, shared)) or self._short_of_space(folder)

    def admit_write(self, principal: str, folder: Path, size: int, *, shared: bool = False) -> str:
        """Count a file that a tool of this process is about to write; return why it must not, or an empty string.

        The file counts with its full size until the workspace is measured again. Where no meter can run, only the
        disk's reserve is checked.
        """
        size = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        short = self._short_of_space(folder, size)
        if short or not procfs.supported():
            return short
        known = self._folder(principal, folder, shared)
        with self._lock:
            if not known.is_measured:
                return "the size of the workspace could not be measured; try again later"
            fault = self._fault(principal, known, more=size)
            if not fault:
                known.bytes += size
                known.inodes += 1
            return fault

    def _short_of_space(self, folder: Path, more: int = 0) -> str:
        try:
            space = os.statvfs(folder)
        except OSError:  # it is made later, or the start fails with the reason
            return ""
        free = space.f_bavail * space.f_frsize
        if free - more >= self.limits.reserve_bytes:
            return ""
        kept = shown_bytes(self.limits.reserve_bytes)
        return f"the disk of the workspace has only {shown_bytes(free)} free; {kept} are kept in reserve"

    async def measure(self, principal: str, folder: Path, *, shared: bool = False) -> None:
        """Measure a workspace as it is now, by a walk that begins after this call; give up after a while."""
        known = self._folder(principal, folder, shared)
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def settle() -> None:
            if not done.done():
                done.set_result(None)

        def wake() -> None:
            loop.call_soon_threadsafe(settle)

        with self._lock:
            number = next(self._numbers)
            known.measured.append((number, wake))
        try:
            async with asyncio.timeout(_MEASURE_S):
                while not done.done():
                    self._ask_to_measure(principal, known, number)  # a meter that is about to end does not answer
                    await asyncio.wait((done,), timeout=_ASK_AGAIN_S)
        except TimeoutError:
            return
        finally:
            with self._lock:
                if (number, wake) in known.measured:
                    known.measured.remove((number, wake))

    def _folder(self, principal: str, path: Path, shared: bool) -> _Folder:
        with self._lock:
            known = self._folders.get((principal, path))
            if known is None:
                known = self._folders[principal, path] = _Folder(path, shared)
                while len(self._folders) > _KNOWN_FOLDERS:
                    self._folders.popitem(last=False)
            self._folders.move_to_end((principal, path))
            return known

    def _ask_to_measure(self, principal: str, known: _Folder, number: int = 0) -> None:
        self._meters()[1].ask(("measure", principal, self._place(principal, known), number))

    def _place(self, principal: str, known: _Folder) -> tuple[bytes, int, int]:
        """Return a workspace as a meter gets it; one whose first size is unknown is measured without a limit."""
        if known.base_bytes is None:
            return os.fsencode(known.path), _UNLIMITED, _UNLIMITED
        limits = self.limits
        return os.fsencode(known.path), known.base_bytes + limits.disk_bytes, known.base_inodes + limits.inodes

    def _measured(self, principal: str, path: Path, size: int, inodes: int, fault: str, number: int) -> None:
        with self._lock:
            known = self._folders.get((principal, path))
            if known is None:
                return
            first = known.base_bytes is None
            if known.base_bytes is None:
                known.base_bytes, known.base_inodes = size, inodes
            known.bytes, known.inodes, known.fault = size - known.base_bytes, inodes - known.base_inodes, fault
            known.is_measured = True
            waiting = [wake for asked, wake in known.measured if asked <= number]
            known.measured = [one for one in known.measured if one[0] > number]
        if first:
            self._ask_to_measure(principal, known)
        for wake in waiting:
            wake()

    def _fault(self, principal: str, known: _Folder, more: int = 0) -> str:
        """Return why a workspace must not grow, or not by a file of `more` bytes, as far as known; empty if it may."""
        if known.fault and not known.shared:
            return f"the workspace {known.fault}; correct that with a tool that deletes or moves files"
        if known.bytes + more > self.limits.disk_bytes:
            return self._full(principal, "disk", known.bytes, more)
        if known.inodes + bool(more) > self.limits.inodes:
            return self._full(principal, "inodes", known.inodes)
        return ""

    def _full(self, principal: str, resource: str, used: int, more: int = 0) -> str:
        limit, whose = self.limits.of(resource), _owned(principal, "workspace")
        if resource == "disk":
            added = f" and has no room for {shown_bytes(more)}" if more else ""
            return f"{whose} holds {shown_bytes(used)}{added}; the limit is {shown_bytes(limit)}; delete files"
        return f"{whose} holds {used:,} files and folders; the limit is {limit:,}; delete files"

    # ── usage ────────────────────────────────────────────────────────────────────────────────────────────────────

    def usage(self, principal: str | None = None) -> dict[str, dict[str, int]]:
        """Return what each principal uses, by resource: of programs that run, and of workspaces as last measured.

        Parameters:
            principal: only this principal; None returns all of them. Where the kernel counts, each costs two reads.
        """
        with self._lock:
            sums = {name: one for name, one in self._sums.items() if principal in (None, name)}
            folders = [
                (key[0], known.bytes, known.inodes)
                for key, known in self._folders.items()
                if principal in (None, key[0])
            ]
        found: dict[str, dict[str, int]] = {
            "memory": {name: one[0] for name, one in sums.items()},
            "processes": {name: one[1] for name, one in sums.items()},
            "files": {name: one[2] for name, one in sums.items()},
            "disk": {},
            "inodes": {},
        }
        for resource, controller in ENFORCED_BY.items():
            if self._cgroups is not None and self.is_enforced(resource):
                found[resource] = {name: self._cgroups.used(self._owner(name), controller) for name in sums}
        for name, size, inodes in folders:
            found["disk"][name] = found["disk"].get(name, 0) + max(0, size)
            found["inodes"][name] = found["inodes"].get(name, 0) + max(0, inodes)
        return found


def _owned(principal: str, what: str) -> str:
    """Return whose programs or workspace it is, for a person."""
    if not principal:
        return f"the host's {what}"
    return f"the workspace of user {principal}" if what == "workspace" else f"user {principal}'s {what}"


def shown_bytes(amount: int) -> str:
    """Format a number of bytes for a person: ``2.1 GiB``, ``512 MiB``."""
    size = float(amount)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return (
                f"{size:,.0f} {unit}" if unit == "bytes" or size >= 100 or size == int(size) else f"{size:,.1f} {unit}"
            )
        size /= 1024
    raise AssertionError(amount)
