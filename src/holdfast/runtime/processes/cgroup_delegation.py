"""Find the cgroup (v2) that is delegated to this process, and divide it between this process and its programs.

Below the delegated cgroup, the kernel then has:

- ``holdfast-server``: this process, its zygote, reapers, meters and workers. A process that was started in a subgroup
  stays there.
- ``holdfast-programs.<pid>.<start time>``: the programs of the process with this identity. It gives way to the server.
- in that, a cgroup for each owner, with its limits, and in that one for each program
  (`holdfast.runtime.processes.program_cgroup`).

Invariants:

- Nothing is written unless a cgroup is delegated to this process and contains no process of others. A cgroup is
  delegated if systemd marked it (``Delegate=``), if it is the root of a cgroup namespace, or if this user owns it but
  not its parent. The root of the whole machine is never used.
- Only this process and its descendants are moved.
- What a dead process has left is removed at the next start. A cgroup that contains a process cannot be removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.runtime.processes import procfs

if TYPE_CHECKING:
    from holdfast.runtime.processes.program_cgroup import CgroupSpec

__all__ = ["Hierarchy", "ProgramCgroups", "find_delegated", "find_hierarchy", "take_cgroups"]

_CONTROLLERS = ("cpu", "memory", "pids")
_LIMITING = frozenset({"memory", "pids"})
_SERVER = "holdfast-server"
_PROGRAMS = re.compile(r"holdfast-programs\.(\d+)\.(\d+)")
_MARKS = ("user.delegate", "trusted.delegate")
_MOVES = 20
_SHOWN_CHARACTERS = 32


class _Unusable(Exception):
    """Why no cgroup can be used."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The tree of cgroups that this process sees.

    Parameters:
        mount: where it is mounted.
        own: folder of this process's cgroup.
    """

    mount: str
    own: str


class ProgramCgroups:
    """The cgroup of this process's programs.

    Parameters:
        folder: its folder.
        controllers: the controllers that limit its children: ``memory``, ``pids`` and ``cpu``, or some of them.
    """

    def __init__(self, folder: str, controllers: frozenset[str]) -> None:
        self.folder = folder
        self.controllers = controllers
        self._counts_swap = os.path.exists(f"{folder}/memory.swap.max")

    def spec_of(self, owner: str, *, memory_bytes: int, processes: int) -> CgroupSpec:
        """Return the cgroup of an owner, for `ProcessHost.spawn`. Swap is not used: it would add to the memory."""
        limits: dict[bytes, bytes] = {}
        if "memory" in self.controllers:
            limits[b"memory.max"] = b"%d" % memory_bytes
        if "memory" in self.controllers and self._counts_swap:
            limits[b"memory.swap.max"] = b"0"
        if "pids" in self.controllers:
            limits[b"pids.max"] = b"%d" % processes
        return os.fsencode(self._path_of(owner)), limits

    def used(self, owner: str, controller: str) -> int:
        """Return the bytes of ``memory``, or the number of ``pids``, of an owner; 0 if it has no programs."""
        text = procfs.read_text(f"{self._path_of(owner)}/{controller}.current")
        return int(text) if text else 0

    def _path_of(self, owner: str) -> str:
        digest = hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return f"{self.folder}/{re.sub('[^0-9A-Za-z]', '-', owner)[:_SHOWN_CHARACTERS]}.{digest}"


def find_hierarchy(mounts: str, membership: str) -> Hierarchy | str:
    """Return the hierarchy, or why it cannot be used.

    Parameters:
        mounts: the content of ``/proc/self/mountinfo``.
        membership: the content of ``/proc/self/cgroup``.
    """
    own = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), None)
    if own is None:
        return "the kernel has no cgroup v2"
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        if not kind.startswith("cgroup2 "):
            continue
        root, mount = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), text) for text in fields.split()[3:5])
        inside = os.path.relpath(own, root)
        if ".." not in own.split("/") and not inside.startswith(".."):  # outside of the namespace, or of the mount
            return Hierarchy(mount, os.path.normpath(os.path.join(mount, inside)))
    return "no cgroup v2 is mounted that contains this process"


def find_delegated(hierarchy: Hierarchy) -> str:
    """Return the folder of the cgroup that is delegated to this process: its own, or the one above its own.

    Raises:
        _Unusable: no such cgroup exists.
    """
    above = [os.path.dirname(hierarchy.own)] if hierarchy.own != hierarchy.mount else []
    for folder in (hierarchy.own, *above):
        if _is_delegated(folder, hierarchy.mount):
            return folder
    raise _Unusable(f"the cgroup {hierarchy.own} is not delegated to this process")


def _is_delegated(folder: str, mount: str) -> bool:
    if _read(f"{folder}/cgroup.type").strip() != "domain":  # the machine's root has no type
        return False
    if not all(os.access(folder + name, os.W_OK) for name in ("", "/cgroup.procs", "/cgroup.subtree_control")):
        return False
    if folder == mount or any(_mark(folder, name) == b"1" for name in _MARKS):
        return True
    me = os.geteuid()
    return me != 0 and os.stat(folder).st_uid == me != os.stat(os.path.dirname(folder)).st_uid


def _mark(folder: str, name: str) -> bytes:
    try:
        return os.getxattr(folder, name)
    except OSError:
        return b""


_lock = threading.Lock()
_taken: tuple[int, ProgramCgroups | str] = (0, "")


def take_cgroups() -> ProgramCgroups | str:
    """Divide the delegated cgroup, once in each process; return the reason why that is impossible otherwise."""
    global _taken
    with _lock:
        if _taken[0] != os.getpid():
            _taken = (os.getpid(), _take())
        return _taken[1]


def _take() -> ProgramCgroups | str:
    try:
        hierarchy = find_hierarchy(_read("/proc/self/mountinfo"), _read("/proc/self/cgroup"))
        if isinstance(hierarchy, str):
            return hierarchy
        folder = find_delegated(hierarchy)
        available = set(_read(f"{folder}/cgroup.controllers").split())
        if not available & _LIMITING:
            return f"the cgroup {folder} has neither the controller memory nor pids"
        if folder == hierarchy.own:
            _move_processes(folder)
        enabled = _enable(folder, available)
        if not enabled & _LIMITING:
            return f"the controllers of {folder} cannot be enabled"
        _sweep(folder)
        programs = f"{folder}/holdfast-programs.{os.getpid()}.{procfs.start_time(os.getpid())}"
        os.makedirs(programs, exist_ok=True)
        if "cpu" in enabled:
            _give_way(programs)
        return ProgramCgroups(programs, frozenset(_enable(programs, enabled)))
    except _Unusable as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _move_processes(folder: str) -> None:
    """Move this process and its descendants out of a cgroup: one with controllers for its children holds no process."""
    server = f"{folder}/{_SERVER}"
    for _ in range(_MOVES):
        inside = {int(pid) for pid in _read(f"{folder}/cgroup.procs").split()}
        if not inside:
            return
        foreign = sorted(inside - {os.getpid(), *procfs.descendants(os.getpid())})
        if foreign:
            shown = os.fsdecode(procfs.command_name(foreign[0]))
            raise _Unusable(f"the cgroup {folder} contains another process: {foreign[0]} ({shown})")
        os.makedirs(server, exist_ok=True)
        # This process first, so that it forks no more of them here.
        for pid in sorted(inside, key=lambda pid: pid != os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                _write(f"{server}/cgroup.procs", str(pid))
    raise _Unusable(f"the processes of {folder} fork faster than they can be moved")


def _enable(folder: str, controllers: set[str]) -> set[str]:
    """Enable controllers for the children of a cgroup, as far as possible; return those that are enabled."""
    for controller in _CONTROLLERS:
        if controller in controllers:
            with contextlib.suppress(OSError):
                _write(f"{folder}/cgroup.subtree_control", f"+{controller}")
    return controllers & set(_read(f"{folder}/cgroup.subtree_control").split()) & set(_CONTROLLERS)


def _give_way(programs: str) -> None:
    """Give the processor to programs only if the server does not need it."""
    try:
        _write(f"{programs}/cpu.idle", "1")
    except OSError:  # before Linux 5.15
        _write(f"{programs}/cpu.weight", "1")


def _sweep(folder: str) -> None:
    """Remove what dead processes have left in a delegated cgroup."""
    for name in os.listdir(folder):
        found = _PROGRAMS.fullmatch(name)
        if found is None or procfs.lives(int(found[1]), int(found[2])):
            continue
        for path, _, _ in os.walk(f"{folder}/{name}", topdown=False):
            with contextlib.suppress(OSError):  # it contains a process that is about to end
                os.rmdir(path)


def _read(path: str) -> str:
    return os.fsdecode(procfs.read_text(path) or b"")


def _write(path: str, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())
