"""Which entries of a workspace's root a session made: those it may change without asking a person.

What a session did not make is everything else: files of a template, of people, and of other sessions. Only the entries
of the root are distinguished. What lies in a folder that the session made counts as made by it; what lies in any other
folder does not. So the work is bounded by the number of the root's entries, however large its folders are.

Invariants
- An entry is known by its inode and its time of birth, so a rename keeps it and an entry that takes its place does not
  inherit it. A program cannot change either.
- Only what appears while programs of exactly one session run, or what a file tool writes, is made by a session. What
  appears at any other time, or while programs of several sessions run, was made by none of them.
- The record lies outside of every workspace, so programs cannot reach it. An unreadable or lost record means that the
  session made nothing, and its programs must ask.
- Entries that a session did not make are mount points of its programs, which can neither rename nor link them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

__all__ = ["ENTRIES_LIMIT", "MadeEntries", "made_entries"]

ENTRIES_LIMIT = 256
"""Maximum number of entries of a root that are protected one by one; beyond it, the root itself is protected."""
_SCAN_LIMIT = 4096
"""Maximum number of entries of a root that are looked at; in a larger root, the session made nothing."""

Identity = tuple[int, int]
"""Inode and time of birth in nanoseconds."""

_STATX_BTIME = 0x800
_AT_SYMLINK_NOFOLLOW = 0x100
_BUFFER = 256
_BTIME_AT = 0x50
_libc = ctypes.CDLL(None, use_errno=True)


class _Root:
    """The sessions that work in one root, as far as they are known to this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.sessions: dict[str, MadeEntries] = {}

    def running(self) -> list[MadeEntries]:
        return [session for session in self.sessions.values() if session.windows]

    def scan(self) -> dict[str, Identity] | None:
        """Return the entries of the root by name; None if there are too many, or the root is gone."""
        found: dict[str, Identity] = {}
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            with os.scandir(folder) as listed:
                for entry in listed:
                    if len(found) == _SCAN_LIMIT:
                        return None
                    with contextlib.suppress(FileNotFoundError):
                        found[entry.name] = _identity(folder, entry.name)
        except OSError:
            return None
        finally:
            os.close(folder)
        return found


class MadeEntries:
    """The entries of a root that one session made. All methods block, and may be called from any thread."""

    def __init__(self, root: _Root, record: Path | None) -> None:
        self._root = root
        self._record = record
        self._made = _read(record)
        self._foreign: set[Identity] = set()
        """Entries that were there when the session's programs began, and what appeared while others ran too."""
        self.windows = 0
        """Number of programs of the session that run now."""

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[str, ...]]:
        """Attribute what appears within the block to the session; yield the paths that its programs may not change.

        Within the block, a program of the session runs.
        """
        protected = self.begin()
        try:
            yield protected
        finally:
            self.end()

    def begin(self) -> tuple[str, ...]:
        """Note that a program of the session starts, and return the paths that it may not change."""
        root = self._root
        with root.lock:
            for session in root.running():
                session._look()
            found = root.scan()
            if not self.windows:
                self._foreign = set() if found is None else set(found.values()) - self._made
            self.windows += 1
            return self._protected(found)

    def end(self) -> None:
        """Note that a program of the session ended."""
        root = self._root
        with root.lock:
            for session in root.running():
                session._look()
            self.windows -= 1
            if not self.windows:
                self._forget_gone()

    def _look(self) -> None:
        """Attribute what appeared since the last look: to the session, or to none if other sessions run too."""
        found = self._root.scan()
        if found is None:
            return
        fresh = set(found.values()) - self._foreign - self._made
        if not fresh:
            return
        if len(self._root.running()) == 1:
            self._made |= fresh
            self._write()
        else:
            self._foreign |= fresh

    def _forget_gone(self) -> None:
        found = self._root.scan()
        if found is not None and not self._made <= set(found.values()):
            self._made &= set(found.values())
            self._write()

    def _protected(self, found: dict[str, Identity] | None) -> tuple[str, ...]:
        path = self._root.path
        if found is None:
            return (path,)
        names = sorted(name for name, identity in found.items() if identity not in self._made)
        if len(names) > ENTRIES_LIMIT:
            return (path,)
        whole = [os.path.join(path, name) for name in names]
        return tuple(one for one in whole if not os.path.islink(one))  # a link cannot be a mount point

    def paths(self) -> tuple[str, ...]:
        """Return at most `ENTRIES_LIMIT` paths that the session made, for programs whose root is protected."""
        with self._root.lock:
            found = self._root.scan() or {}
            names = sorted(name for name, identity in found.items() if identity in self._made)
            whole = [os.path.join(self._root.path, name) for name in names]
            return tuple(one for one in whole if not os.path.islink(one))[:ENTRIES_LIMIT]

    def is_made(self, name: str) -> bool:
        """Return whether the session may change the root's entry `name`: it made it, or it does not exist yet."""
        with self._root.lock:
            folder = os.open(self._root.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                identity = _identity(folder, name)
            except FileNotFoundError:
                return True
            finally:
                os.close(folder)
            for session in self._root.running():
                session._look()
            return identity in self._made

    @contextlib.contextmanager
    def creating(self, folder: int, name: str) -> Iterator[None]:
        """Attribute the entry `name` of a folder to the session, which is created within the block.

        Only entries of the root are recorded. No other session is given the entry in the meantime, so the block must be
        short.

        Parameters:
            folder: descriptor of the folder.
            name: name of the entry.
        """
        with self._root.lock:
            yield
            if not os.path.samestat(os.fstat(folder), os.stat(self._root.path)):
                return
            identity = _identity(folder, name)
            if identity not in self._made:
                self._made.add(identity)
                if len(self._made) > 2 * _SCAN_LIMIT:
                    self._forget_gone()
                self._write()

    def _write(self) -> None:
        """Write the record. A record that is lost with the machine only makes the session ask, so it is not synced."""
        if self._record is None:
            return
        part = self._record.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(sorted(self._made)))
            part.replace(self._record)


def _read(record: Path | None) -> set[Identity]:
    if record is None:
        return set()
    try:
        return set(msgspec.json.decode(record.read_bytes(), type=list[tuple[int, int]]))
    except (OSError, msgspec.MsgspecError):
        return set()


_ROOTS_LIMIT = 1024
_roots: dict[tuple[str, Path | None], _Root] = {}
_guard = threading.Lock()


def made_entries(root: Path, session: str, *, folder: Path | None) -> MadeEntries:
    """Return the entries that a session made in a root.

    Parameters:
        root: real path of the root.
        session: name of the session, never used again by another session of the same store.
        folder: folder of the records; None keeps them in memory.
    """
    with _guard:
        if len(_roots) > _ROOTS_LIMIT:
            for place, root_ in list(_roots.items()):
                if place[1] is not None and not root_.running():  # their records are read again
                    del _roots[place]
        known = _roots.setdefault((str(root), folder), _Root(str(root)))
        found = known.sessions.get(session)
        if found is None:
            record = None if folder is None else folder / f"{_digest(str(root))}-{_digest(session)}.json"
            found = known.sessions[session] = MadeEntries(known, record)
        return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _identity_by_statx(folder: int, name: str) -> Identity:
    buffer = ctypes.create_string_buffer(_BUFFER)
    if _libc.statx(folder, os.fsencode(name), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME | 0x100, buffer) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)
    mask = struct.unpack_from("I", buffer, 0)[0]
    inode = struct.unpack_from("Q", buffer, 0x20)[0]
    seconds, nanoseconds = struct.unpack_from("qI", buffer, _BTIME_AT)
    return inode, seconds * 1_000_000_000 + nanoseconds if mask & _STATX_BTIME else 0


def _identity_by_stat(folder: int, name: str) -> Identity:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return found.st_ino, int(getattr(found, "st_birthtime", 0.0) * 1e9)


_identity: Callable[[int, str], Identity] = _identity_by_statx if hasattr(_libc, "statx") else _identity_by_stat
