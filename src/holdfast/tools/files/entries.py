"""Entries of a workspace folder: their type, name and content, and a recursive walk.

Each entry is accessed by its name and its folder's descriptor, so a concurrent change cannot redirect the access.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from holdfast.errors import ToolFailed

__all__ = [
    "DEPTH_LIMIT",
    "LIST_FOLDER",
    "UNFIT",
    "DirectoryEntry",
    "Place",
    "Version",
    "is_binary",
    "kind",
    "link_target",
    "open_regular",
    "printable",
    "version",
    "walk_folder",
]

LIST_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DEPTH_LIMIT = 64
UNFIT = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Characters that are not allowed in names and are never shown: ASCII control characters and lone surrogates."""

_NAMES_LIMIT = 100_000
_CHUNK_BYTES = 1 << 20
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

Version = tuple[int, int, int] | None
"""Fingerprint of a file's content: inode, size and modification time; None if the file does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A resolved path: a name in an open folder.

    The file need not exist. If it exists, it was not a link when the path was resolved.

    Parameters:
        folder: descriptor of the folder.
        name: name of the file in `folder`; ``.`` means the root itself.
        path: path relative to the root, for display.
    """

    folder: int
    name: str
    path: str

    def status(self) -> os.stat_result | None:
        """Return the status of the file, or None if the file does not exist."""
        try:
            return os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """An entry found by a walk; it is valid until the walk yields the next entry.

    Parameters:
        folder: descriptor of the folder that contains the entry.
        name: name of the entry in `folder`.
        path: path relative to the root, for display.
        status: status of the entry; for a link, of the link itself and not of its target.
    """

    folder: int
    name: str
    path: str
    status: os.stat_result

    @property
    def is_file(self) -> bool:
        """Whether the entry is a regular file."""
        return stat.S_ISREG(self.status.st_mode)

    def read(self, limit_bytes: int) -> bytes:
        """Return at most the first `limit_bytes` bytes of the file.

        Raises:
            OSError: if the file is unreadable.
            ToolFailed: if the entry no longer exists or is not a regular file.
        """
        with os.fdopen(open_regular(Place(folder=self.folder, name=self.name, path=self.path)), "rb", 0) as file:
            parts = []
            while limit_bytes > 0 and (data := file.read(min(limit_bytes, _CHUNK_BYTES))):
                parts.append(data)
                limit_bytes -= len(data)
            return b"".join(parts)

    def line(self) -> str:
        """Return a one-line description of the entry."""
        mode = self.status.st_mode
        if stat.S_ISDIR(mode):
            return f"{self.path}/"
        if stat.S_ISLNK(mode):
            return f"{self.path} -> {printable(link_target(self.name, self.folder) or '?')}"
        return f"{self.path}  {self.status.st_size:,} bytes" if self.is_file else f"{self.path}  ({kind(mode)})"


def walk_folder(folder: int, above: str, depth: int, unsearched: Collection[str]) -> Iterator[DirectoryEntry]:
    """Yield the entries in and below a folder, including private ones, and close the descriptor `folder`."""
    try:
        with os.scandir(folder) as listed:
            names = sorted(entry.name for entry in itertools.islice(listed, _NAMES_LIMIT + 1))
        if len(names) > _NAMES_LIMIT:
            raise ToolFailed(f"{above or './'} has more than {_NAMES_LIMIT:,} entries; use a program to list it")
        for name in names:
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            path = above + printable(name)
            yield DirectoryEntry(folder=folder, name=name, path=path, status=status)
            if stat.S_ISDIR(status.st_mode) and depth > 1 and name not in unsearched:
                try:
                    below = os.open(name, LIST_FOLDER, dir_fd=folder)
                except OSError:
                    continue
                yield from walk_folder(below, f"{path}/", depth - 1, unsearched)
    finally:
        os.close(folder)


def version(status: os.stat_result | None) -> Version:
    """Return the fingerprint of a file's content, computed from the file's status."""
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def is_binary(data: bytes) -> bool:
    """Return whether the data contains a null byte and is therefore treated as binary."""
    return b"\0" in data


def printable(name: str) -> str:
    """Replace the unprintable characters of a file name with U+FFFD."""
    if UNFIT.search(name):
        name = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return UNFIT.sub("\ufffd", name)


def kind(mode: int) -> str:
    """Return the name of a mode's file type with its article, such as ``a folder``."""
    match stat.S_IFMT(mode):
        case stat.S_IFREG:
            return "a file"
        case stat.S_IFDIR:
            return "a folder"
        case stat.S_IFLNK:
            return "a symbolic link"
        case stat.S_IFIFO:
            return "a named pipe"
        case stat.S_IFSOCK:
            return "a socket"
        case _:
            return "a device"


def link_target(name: str, folder: int) -> str | None:
    """Return the target of a symbolic link, or None if `name` is not a link."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:  # not a link, or missing: the caller finds out when it opens the name
        return None


def open_regular(place: Place) -> int:
    """Open the regular file at a place for reading and return its descriptor.

    Raises:
        ToolFailed: if the file does not exist or is not a regular file.
        OSError: if opening the file fails.
    """
    status = place.status()
    if status is None:
        raise ToolFailed(f"no such file: {place.path}")
    if stat.S_ISREG(status.st_mode):  # check first: merely opening a device can have side effects
        fd = os.open(place.name, _OPEN_FILE, dir_fd=place.folder)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            return fd
        os.close(fd)
    raise ToolFailed(f"{place.path} is {kind(status.st_mode)}, not a file")
