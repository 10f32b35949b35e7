"""Bytes and inodes of folders whose contents are hostile, measured in small steps.

The meter, a fork of the zygote, imports this module, so its imports must be cheap. Invariants:

- A walk follows no link, stays on the folder's file system, and opens each folder relative to its parent, so a rename
  or a link that is made meanwhile leads nowhere else.
- A walk ends as soon as the sum is above a limit. It holds at most `_DEPTH` folders open; a deeper or unreadable folder
  is a fault of the whole folder, so nothing can be hidden there.
- Each file counts once, however many names it has, with the blocks that it occupies.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    _OpenFolder = tuple[int, Any]
    """A descriptor of a folder, and an iterator over its entries that has to be closed."""

__all__ = ["FolderWalk"]

_DEPTH = 100
_STEP = 100
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderWalk:
    """One walk through a folder; iterate over `steps` to continue it.

    Parameters:
        path: path of the folder.
        limit_bytes, limit_inodes: the walk ends once it has found more.

    Attributes:
        bytes, inodes: what was found so far.
        fault: why the folder cannot be measured; empty if it can. A folder that does not exist is empty.
    """

    def __init__(self, path: bytes, limit_bytes: int, limit_inodes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._limit_inodes = limit_inodes
        self._linked: set[int] = set()
        self._device = 0
        self.bytes = 0
        self.inodes = 0
        self.fault = ""

    def steps(self) -> Iterator[None]:
        """Walk, and yield after every hundred entries."""
        try:
            folder = os.open(self._path, _LIST)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self.fault = f"cannot be read: {os.strerror(error.errno or 0)}"
            return
        self._device = os.fstat(folder).st_dev
        open_folders: list[_OpenFolder] = []
        pending = 0
        try:
            self._enter(folder, open_folders)
            while open_folders and not self._decided():
                folder, entries = open_folders[-1]
                entry = next(entries, None)
                if entry is None:
                    entries.close()
                    os.close(folder)
                    open_folders.pop()
                    continue
                below = self._count(entry, folder)
                if below is not None:
                    if len(open_folders) >= _DEPTH:
                        self.fault = f"has folders nested more than {_DEPTH} levels deep"
                        os.close(below)
                        return
                    self._enter(below, open_folders)
                pending += 1
                if pending >= _STEP:
                    pending = 0
                    yield
        finally:
            for folder, entries in open_folders:
                entries.close()
                os.close(folder)

    def _decided(self) -> bool:
        return bool(self.fault) or self.bytes > self._limit_bytes or self.inodes > self._limit_inodes

    def _enter(self, folder: int, open_folders: list[_OpenFolder]) -> None:
        try:
            entries = os.scandir(folder)
        except OSError as error:
            os.close(folder)
            self.fault = f"has a folder that cannot be read: {os.strerror(error.errno or 0)}"
            return
        open_folders.append((folder, entries))

    def _count(self, entry: os.DirEntry[str], folder: int) -> int | None:
        """Count an entry; return a descriptor of it if it is a folder on the same file system."""
        try:
            status = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
            if status.st_dev != self._device:
                return None
            is_folder = stat.S_ISDIR(status.st_mode)
            if status.st_nlink > 1 and not is_folder:
                if status.st_ino in self._linked:
                    return None
                self._linked.add(status.st_ino)
            self.bytes += status.st_blocks * 512
            self.inodes += 1
            return os.open(entry.name, _LIST, dir_fd=folder) if is_folder else None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # else it was moved meanwhile
                self.fault = f"has a folder that cannot be read: {os.strerror(error.errno or 0)}"
            return None
