"""Bytes and inodes of each principal's workspace, and which program to end for a quota or the disk's reserve.

The meter process runs this. Invariants:

- A workspace is walked only if it may be above a limit: what it held at the last walk, and all that was written to its
  file system since then. Otherwise a look costs one system call per workspace.
- What others delete on the file system does not hide what was written: the changes of its free space are added up from
  look to look, and what was freed counts as if as much had been written.
- A program is ended only if a finished walk found more than the limit, and noticeably more than the walk before: a
  program that deletes files of a full workspace continues.
- Of the programs of a principal, the one that wrote most since the last walk is ended. If the free space of a file
  system is below the reserve, the same holds for all programs whose workspace is there. A program that wrote nothing
  continues. Where a program hides what it wrote, its system time stands for that.
"""

from __future__ import annotations

import os
import time

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.folder_usage import FolderWalk
from holdfast.runtime.processes.tree_usage import ProcessUsage, open_files, quick_usage, written_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["FolderMeter"]

_SLICE_S = 0.02
"""Maximum time of one look that all walks take together."""
_TASKS = 512
_NOTICED_BYTES = 65_536
_NOTICED_INODES = 16
_MARGIN = 2
"""A walk ends above this multiple of a limit, so that growth above the limit is seen."""
_ALERT = 4
"""Written bytes are counted once the free space is below this multiple of the reserve."""


class _Writer:
    """A watched program and what it has written so far.

    Attributes:
        work: bytes written and system ticks used; bytes count as None if the program hides them.
        at_walk, at_look: `work` at the last walk of its workspace, and at the last look at an almost full disk.
    """

    __slots__ = ("at_look", "at_walk", "reaper", "started", "watch", "work")

    def __init__(self, watch: int, reaper: int, started: int) -> None:
        self.watch = watch
        self.reaper = reaper
        self.started = started
        self.work: _Work = (0, 0)
        self.at_walk: _Work = (0, 0)
        self.at_look: _Work = (0, 0)

    def processes(self) -> list[ProcessUsage]:
        """Return the processes of the program."""
        return quick_usage(self.reaper, _TASKS) if procfs.start_time(self.reaper) == self.started else []

    def measure(self) -> None:
        """Update `work`."""
        processes = self.processes()
        self.work = written_bytes(processes), sum(usage.system_ticks for usage in processes)

    def wrote_since(self, before: _Work) -> int:
        """Return how many bytes the program may have written since `before`; its system time, if it hides that."""
        if self.work[0] is None or before[0] is None:
            return self.worked_since(before)
        return self.work[0] - before[0]

    def worked_since(self, before: _Work) -> int:
        """Return the system ticks that the program has used since `before`."""
        return self.work[1] - before[1]


class _Folder:
    """The workspace of a principal."""

    __slots__ = (
        "answers",
        "asked",
        "bytes",
        "fault",
        "free_at",
        "grown_bytes",
        "grown_inodes",
        "inodes",
        "inodes_free_at",
        "known",
        "limit_bytes",
        "limit_inodes",
        "path",
        "stale",
        "steps",
        "walk",
        "writers",
    )

    def __init__(self, path: bytes) -> None:
        self.path = path
        self.limit_bytes = 0
        self.limit_inodes = 0
        self.writers: dict[int, _Writer] = {}
        self.walk: FolderWalk | None = None
        self.steps: Iterator[None] = iter(())
        self.known = False
        self.stale = True
        """Whether the folder has to be walked in any case."""
        self.bytes = 0
        self.inodes = 0
        self.fault = ""
        self.free_at = 0
        self.inodes_free_at = 0
        self.grown_bytes = 0
        """What may have been written to the file system since the last walk began."""
        self.grown_inodes = 0
        self.asked = 0
        """Number of the latest order to measure it."""
        self.answers = 0
        """The latest order before the begin of the last walk. A walk that began earlier may have missed a change."""


class FolderMeter:
    """Looks at the workspaces of all principals.

    Parameters:
        reserve_bytes: free space that each file system has to keep.
    """

    def __init__(self, reserve_bytes: int) -> None:
        self._reserve_bytes = reserve_bytes
        self._folders: dict[_Key, _Folder] = {}
        self._folder_of: dict[int, _Key] = {}

    @property
    def busy(self) -> bool:
        """Whether a program is watched or a folder has to be measured."""
        return bool(self._folders)

    def obey(self, message: tuple[Any, ...]) -> None:
        """Take a message of the host."""
        match message:
            case ("watch", int(watch), str(owner), int(reaper), int(started), _, tuple(place)):
                self._folder(owner, place).writers[watch] = _Writer(watch, reaper, started)
                self._folder_of[watch] = (owner, place[0])
            case ("measure", str(owner), tuple(place), int(number)):
                folder = self._folder(owner, place)
                folder.stale, folder.asked = True, max(folder.asked, number)
            case ("unwatch", int(watch)) if watch in self._folder_of:
                folder = self._folders[self._folder_of.pop(watch)]
                del folder.writers[watch]
                folder.stale = folder.stale or not folder.writers

    def _folder(self, owner: str, place: tuple[bytes, int, int]) -> _Folder:
        """Return the folder of a principal, with the limits that the host gave last."""
        path, limit_bytes, limit_inodes = place
        folder = self._folders.get((owner, path))
        if folder is None:
            folder = self._folders[owner, path] = _Folder(path)
        folder.limit_bytes, folder.limit_inodes = limit_bytes, limit_inodes
        return folder

    def look(self, now: float) -> list[tuple[Any, ...]]:
        """Look at every folder once; return the reports."""
        reports = []
        spaces = {key: space for key, folder in self._folders.items() if (space := _space(folder.path)) is not None}
        reports += self._keep_reserve(spaces)
        for key, folder in list(self._folders.items()):
            space = spaces.get(key)
            if space is not None:
                self._note_growth(folder, space)
            if folder.walk is None and (folder.stale or self._suspects(folder)):
                self._begin(folder, space)
            elif folder.walk is None and not folder.writers:
                del self._folders[key]
        walking = {key: folder for key, folder in self._folders.items() if folder.walk is not None}
        stop_at = time.monotonic() + _SLICE_S
        while walking and time.monotonic() < stop_at:
            for key, folder in list(walking.items()):
                if next(folder.steps, _END) is _END:
                    del walking[key]
                    reports += self._finish(key[0], folder)
        return reports

    def _note_growth(self, folder: _Folder, space: os.statvfs_result) -> None:
        """Add what may have been written to the folder's file system since the last look."""
        free, inodes_free = space.f_bfree * space.f_frsize, space.f_ffree
        folder.grown_bytes += abs(folder.free_at - free)
        folder.grown_inodes += abs(folder.inodes_free_at - inodes_free)
        folder.free_at, folder.inodes_free_at = free, inodes_free

    def _suspects(self, folder: _Folder) -> bool:
        """Return whether the folder may be above a limit and is still growing."""
        grown, new = folder.grown_bytes, folder.grown_inodes
        return (grown > _NOTICED_BYTES and folder.bytes + grown > folder.limit_bytes) or (
            new > _NOTICED_INODES and folder.inodes + new > folder.limit_inodes
        )

    def _begin(self, folder: _Folder, space: os.statvfs_result | None) -> None:
        folder.stale, folder.answers = False, folder.asked
        folder.free_at = 0 if space is None else space.f_bfree * space.f_frsize
        folder.inodes_free_at = 0 if space is None else space.f_ffree
        folder.grown_bytes = folder.grown_inodes = 0
        folder.walk = FolderWalk(folder.path, _MARGIN * folder.limit_bytes, _MARGIN * folder.limit_inodes)
        folder.steps = folder.walk.steps()

    def _finish(self, owner: str, folder: _Folder) -> list[tuple[Any, ...]]:
        """Take the result of a walk; return it, and the program to end."""
        walk = folder.walk
        assert walk is not None
        folder.walk = None
        size, inodes = walk.bytes + _deleted_bytes(folder), walk.inodes
        for writer in folder.writers.values():
            writer.measure()
        grew, spread = size - folder.bytes > _NOTICED_BYTES, inodes - folder.inodes > _NOTICED_INODES
        if not folder.known:  # what a program has found already there is not its fault
            grew = spread = True
        folder.known, folder.bytes, folder.inodes, folder.fault = True, size, inodes, walk.fault
        reports: list[tuple[Any, ...]] = [("folder", owner, folder.path, size, inodes, walk.fault, folder.answers)]
        writers = list(folder.writers.values())
        if grew and size > folder.limit_bytes:
            reports += self._end("disk", size, {one: one.wrote_since(one.at_walk) for one in writers})
        elif spread and inodes > folder.limit_inodes:
            reports += self._end("inodes", inodes, {one: one.worked_since(one.at_walk) for one in writers})
        for writer in writers:
            writer.at_walk = writer.work
        return reports

    def _end(self, resource: str, used: int, parts: dict[_Writer, int]) -> list[tuple[Any, ...]]:
        """Return a report for the program with the largest part, if that is any."""
        worst = max(parts, key=lambda one: (parts[one], one.watch), default=None)
        if worst is None or parts[worst] <= 0:
            return []
        self.obey(("unwatch", worst.watch))
        return [("over", worst.watch, resource, used)]

    def _keep_reserve(self, spaces: dict[_Key, os.statvfs_result]) -> list[tuple[Any, ...]]:
        """Return the programs to end because a file system has too little free space."""
        of_device: dict[int, tuple[int, list[_Writer]]] = {}
        for key, space in spaces.items():
            free = space.f_bavail * space.f_frsize
            if free < _ALERT * self._reserve_bytes:
                writers = of_device.setdefault(space.f_fsid, (free, []))[1]
                writers += self._folders[key].writers.values()
        reports: list[tuple[Any, ...]] = []
        for free, writers in of_device.values():
            for writer in writers:
                writer.measure()
            if free < self._reserve_bytes:
                reports += self._end("reserve", free, {one: one.wrote_since(one.at_look) for one in writers})
            for writer in writers:
                writer.at_look = writer.work
        return reports


_Work = tuple["int | None", int]
_Key = tuple[str, bytes]
"""A principal and the path of a workspace."""
_END = object()


def _space(path: bytes) -> os.statvfs_result | None:
    try:
        return os.statvfs(path)
    except OSError:  # deleted meanwhile, or not made yet
        return None


def _deleted_bytes(folder: _Folder) -> int:
    """Return the bytes of files of the folder's file system that programs have deleted but still hold open."""
    try:
        device = os.stat(folder.path).st_dev
    except OSError:
        return 0
    files: dict[int, int] = {}
    for writer in folder.writers.values():
        for usage in writer.processes():
            for info in open_files(usage.pid):
                if info.st_dev == device and info.st_nlink == 0:
                    files[info.st_ino] = info.st_blocks * 512
    return sum(files.values())
