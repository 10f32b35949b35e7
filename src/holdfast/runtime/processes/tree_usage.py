"""Memory, tasks and descriptors that process trees use.

The meter, a fork of the zygote, imports this module, so its imports must be cheap. Invariants:

- `quick_usage` costs about 50 µs per process and never walks page tables. Its memory is an upper bound of what the
  processes have mapped, because pages that processes share, such as those of libraries, count once for each process.
- `exact_memory` costs about 0.1 ms per process and 7 ms per GiB. It divides shared pages among the processes that map
  them, leaves out files' pages, which the kernel can reclaim, and adds files in memory: `tmpfs` mounts and ``memfd``.
- What a process refuses to show counts with its upper bound, so a process gains nothing by hiding.
"""

from __future__ import annotations

import os
import stat

from holdfast.runtime.processes import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ProcessUsage",
    "exact_memory",
    "memory_file_device",
    "open_files",
    "quick_usage",
    "unmapped_memory",
    "written_bytes",
]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_HIDDEN_BYTES = 8 << 20
"""Bytes that an unreadable process may share with its forks: the wall's first processes are forks of the zygote."""
_INODE_BYTES = 1024
"""Memory that the kernel uses for an inode of a file in memory."""


class ProcessUsage:
    """Resources that one process uses.

    Attributes:
        pid: process id.
        tasks: number of threads; 1 for a zombie.
        resident: bytes in memory, shared pages included.
        files: number of open descriptors.
        system_ticks: system CPU time, including that of children that were waited for.
    """

    __slots__ = ("files", "pid", "resident", "system_ticks", "tasks")

    def __init__(self, pid: int, tasks: int, resident: int, files: int, system_ticks: int) -> None:
        self.pid = pid
        self.tasks = tasks
        self.resident = resident
        self.files = files
        self.system_ticks = system_ticks


def quick_usage(reaper: int, limit_tasks: int) -> list[ProcessUsage]:
    """Return the usage of the processes below a reaper; stop once they have more than ``limit_tasks`` tasks.

    The result comes from one reading, which may skip a process whose parent ends meanwhile.
    """
    found: list[ProcessUsage] = []
    seen = {reaper}
    frontier = procfs.children_once(reaper)
    tasks = 0
    while frontier and tasks <= limit_tasks:
        pid = frontier.pop()
        if pid in seen:
            continue
        seen.add(pid)
        line = procfs.read_text(f"/proc/{pid}/stat")
        if not line:
            continue
        fields = line[line.rindex(b")") + 2 :].split()
        threads = max(1, int(fields[17]))
        usage = ProcessUsage(
            pid, threads, int(fields[21]) * _PAGE, _descriptors(pid), int(fields[12]) + int(fields[14])
        )
        found.append(usage)
        tasks += threads
        frontier += _children(pid, threads)
    return found


def _children(pid: int, threads: int) -> list[int]:
    if threads == 1:
        listed = procfs.read_text(f"/proc/{pid}/task/{pid}/children")
        if listed is not None:
            return list(map(int, listed.split()))
    return procfs.children_once(pid)


def _descriptors(pid: int) -> int:
    """Return the number of open descriptors; from Linux 6.2 on without listing them."""
    try:
        return os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # ended, or of another user
        return 0


def exact_memory(processes: Iterable[ProcessUsage], scratch: Iterable[bytes]) -> tuple[dict[int, int], int, int]:
    """Measure the memory of processes that are the whole of one or several trees.

    Parameters:
        processes: the processes.
        scratch: paths, as the processes see them, at which they have file systems of their own in memory.

    Returns:
        The bytes of each process by pid without shared memory, the bytes of shared memory that they map, and the bytes
        of their files in memory. The latter two overlap where a file is mapped.
    """
    private: dict[int, int] = {}
    mapped = 0
    files: dict[tuple[int, int], int] = {}
    device = memory_file_device()
    for usage in processes:
        rollup = procfs.read_text(f"/proc/{usage.pid}/smaps_rollup")
        fields = dict(_fields(rollup)) if rollup else {}
        if b"Pss_Anon" in fields:
            private[usage.pid] = fields[b"Pss_Anon"] + fields.get(b"SwapPss", 0)
            mapped += fields.get(b"Pss_Shmem", 0)
        else:
            private[usage.pid] = _unshared(usage)
        for scratch_path in scratch:
            _add_mount(files, usage.pid, scratch_path)
        _add_memory_files(files, usage, device)
    return private, mapped, sum(files.values())


def _fields(rollup: bytes) -> Iterable[tuple[bytes, int]]:
    for line in rollup.splitlines()[1:]:
        name, _, rest = line.partition(b":")
        yield name, int(rest.split()[0]) * 1024


def _unshared(usage: ProcessUsage) -> int:
    """Return the upper bound of an unreadable process: zero for a small one, such as a first process of a wall."""
    sizes = (procfs.read_text(f"/proc/{usage.pid}/statm") or b"0 0 0").split()
    return max(0, (int(sizes[1]) - int(sizes[2])) * _PAGE - _HIDDEN_BYTES)


def _add_mount(files: dict[tuple[int, int], int], pid: int, path: bytes) -> None:
    """Add the file system in memory that a process sees at a path, unless it is this machine's own."""
    inside = b"/proc/%d/root" % pid
    try:
        device = os.stat(inside + path).st_dev
        if (device, 0) in files or device in (os.stat(inside).st_dev, os.stat(path).st_dev):
            return
        size = os.statvfs(inside + path)
    except OSError:
        return
    inodes = size.f_files - size.f_ffree
    files[device, 0] = (size.f_blocks - size.f_bfree) * size.f_frsize + inodes * _INODE_BYTES


def _add_memory_files(files: dict[tuple[int, int], int], usage: ProcessUsage, device: int) -> None:
    """Add the files that a process made with ``memfd_create`` and holds open."""
    for info in open_files(usage.pid):
        if info.st_dev == device:
            files[device, info.st_ino] = info.st_blocks * 512


def open_files(pid: int) -> list[os.stat_result]:
    """Return the status of the regular files that a process holds open; empty if they cannot be listed."""
    found: list[os.stat_result] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            info = os.stat(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode):
            found.append(info)
    return found


_memory_device: int | None = None


def memory_file_device() -> int:
    """Return the device number of the files that ``memfd_create`` makes; -1 if unsupported."""
    global _memory_device
    if _memory_device is None:
        try:
            fd = os.memfd_create("holdfast")
        except (AttributeError, OSError):
            _memory_device = -1
        else:
            _memory_device = os.fstat(fd).st_dev
            os.close(fd)
    return _memory_device


def unmapped_memory() -> int:
    """Return the bytes of the whole machine that no process need have mapped: shared memory, and what was swapped out.

    By as much as it grows, a principal may use more than `quick_usage` sees.
    """
    fields = dict(line.split()[:2] for line in (procfs.read_text("/proc/meminfo") or b"").splitlines())
    shared, swap, free = (int(fields.get(name, 0)) for name in (b"Shmem:", b"SwapTotal:", b"SwapFree:"))
    return (shared + swap - free) * 1024


def written_bytes(processes: Iterable[ProcessUsage]) -> int | None:
    """Return the bytes that the living processes have written to files; None if one of them hides that."""
    total = 0
    for usage in processes:
        read = procfs.read_text(f"/proc/{usage.pid}/io")
        if read is None and procfs.start_time(usage.pid) is not None:
            return None
        for line in (read or b"").splitlines():
            if line.startswith(b"write_bytes:"):
                total += int(line.split()[1])
    return total
