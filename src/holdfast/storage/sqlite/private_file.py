"""Protection of a store's file and folder: their modes, their owners, and files planted beside them.

- Files are created with mode 0600 and Holdfast's own folder (``.holdfast``) with 0700, whatever the umask. SQLite gives
  its side files the mode of the database.
- SQLite replays a rollback journal beside a database before it looks for the WAL, so whoever can create a journal there
  controls the store's contents. A store is in WAL mode from its first page on, so such a journal is never Holdfast's.
- SQLite replays a log (``-wal``) too. A database or log in a shared folder is refused unless it belongs to the
  current user, root or the folder's owner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import stat

from holdfast.errors import ConfigurationError, StoreCorrupt, StoreReadOnly
from holdfast.settings import DATA_FOLDER

__all__ = [
    "create_private_file",
    "prepare_folder",
    "refuse_foreign_files",
    "refuse_other_content",
    "set_journal_aside",
    "store_path",
    "sync_folder",
    "wider_mode",
]

_log = logging.getLogger("holdfast.storage")
_MAGIC = b"SQLite format 3\0"
_WAL_VERSIONS = b"\x02\x02"
_VERSIONS_AT = 18


def store_path(path: str) -> str:
    """Return the real path of a store's file, without following links at or in Holdfast's own folder."""
    folder, name = os.path.split(os.path.abspath(path))
    if os.path.basename(folder) != DATA_FOLDER:
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(os.path.dirname(folder)), DATA_FOLDER, name)


def prepare_folder(folder: str) -> None:
    """Check the folder of a store. Create Holdfast's own folder, with a ``.gitignore``, if it does not exist.

    Raises:
        ConfigurationError: if a folder other than Holdfast's own does not exist, or if Holdfast's own folder is not a
            folder, is a link, belongs to another user or is accessible to other users.
        StoreReadOnly: if the folder cannot be created.
    """
    if os.path.basename(folder) != DATA_FOLDER:
        if not os.path.isdir(folder):
            raise ConfigurationError(f"no such folder: {folder}", hint="create it, or name another file with --store")
        return
    try:
        _make_folder(folder)
        status = os.lstat(folder)
    except OSError as error:
        raise StoreReadOnly(
            f"failed to create {folder}: {os.strerror(error.errno or 0)}",
            hint="make its parent folder writable, or name another file with --store",
        ) from error
    if stat.S_ISLNK(status.st_mode):
        raise ConfigurationError(
            f"{folder} is a symbolic link", hint="replace it with a folder, or name another file with --store"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{folder} is not a folder", hint="move it away, or name another file with --store")
    if status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{folder} belongs to {_user(status.st_uid)}, but this process runs as {_user(os.geteuid())}",
            hint=f"run Holdfast as {_user(status.st_uid)}, or name another file with --store",
        )
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(
            f"{folder} is accessible to other users: its mode is {stat.S_IMODE(status.st_mode):o}, "
            f"and the bits {mode:o} must be cleared",
            hint=f"chmod 700 {folder}",
        )


def _make_folder(folder: str) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        return
    os.chmod(folder, 0o700)  # where the umask took even its own rights away
    descriptor = os.open(os.path.join(folder, ".gitignore"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("*\n")


def create_private_file(path: str) -> None:
    """Create an empty database file that only this user can read, unless the file exists.

    Raises:
        ConfigurationError: if `refuse_foreign_files` refuses the file or a side file.
        StoreReadOnly: if the file cannot be created.
    """
    refuse_foreign_files(path)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        refuse_foreign_files(path)
    except OSError as error:
        raise StoreReadOnly(f"failed to create {path}: {os.strerror(error.errno or 0)}") from error


def refuse_foreign_files(path: str) -> None:
    """Check who owns the database `path` and its side files ``-wal`` and ``-shm``, if they exist.

    Raises:
        ConfigurationError: if one of these files is not a regular file (for example, a link), or belongs to an
            untrusted user. The current user is trusted; outside Holdfast's own folder, so are root and the folder's
            owner.
    """
    for file in (path, f"{path}-wal", f"{path}-shm"):
        if os.path.lexists(file):
            _check_file(file)


def refuse_other_content(path: str) -> None:
    """Raise `ConfigurationError` if `path` is a folder, `StoreCorrupt` if it is neither a SQLite database nor empty.

    A file that does not exist, or that cannot be read, is not refused. Closing the file ends all locks that this
    process has on it, so call this only while no database connection of this process uses the file.
    """
    if os.path.isdir(path):
        raise ConfigurationError(f"{path} is a folder", hint="name a file in it with --store, such as holdfast.db")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return
    try:
        begins = os.read(descriptor, len(_MAGIC)) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
    if begins not in (b"", _MAGIC):
        raise StoreCorrupt(
            f"{path} is not a database; nothing was changed",
            hint="if it was a Holdfast store, restore a backup; if not, name another file with --store",
        )


def _check_file(path: str) -> None:
    """Refuse a file that is not a regular file or belongs to an untrusted user (see `refuse_foreign_files`)."""
    folder = os.path.dirname(path)
    trusted = {os.geteuid()}
    if os.path.basename(folder) != DATA_FOLDER:
        trusted |= {0, os.stat(folder).st_uid}
    status = os.lstat(path)
    if stat.S_ISREG(status.st_mode) and status.st_uid in trusted:
        return
    what = "is not a regular file" if status.st_uid in trusted else f"belongs to {_user(status.st_uid)}"
    raise ConfigurationError(f"{path} {what}", hint="move it away, or name another file with --store")


def set_journal_aside(path: str) -> None:
    """Rename a rollback journal beside the database `path`. Call this before each connection to the database.

    Raises:
        StoreCorrupt: if a journal exists and the database is not in WAL mode, so that the journal may belong to the
            database.
        StoreReadOnly: if the journal cannot be moved.
    """
    journal = f"{path}-journal"
    if not os.path.lexists(journal):
        return
    versions = b""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        versions = file.read(_VERSIONS_AT + len(_WAL_VERSIONS))[_VERSIONS_AT:]
    if versions not in (b"", _WAL_VERSIONS):
        raise StoreCorrupt(
            f"{journal} exists beside {path}, which is not in WAL mode; nothing was changed",
            hint="if the database is a Holdfast store, move the journal away: a store never has such a journal",
        )
    aside = f"{path}-refused-journal"
    try:
        os.replace(journal, aside)
    except FileNotFoundError:
        return  # another connection that is being made has moved it
    except OSError as error:
        raise StoreReadOnly(
            f"{journal}: rename failed: {os.strerror(error.errno or 0)}",
            hint="remove this journal: it does not belong to Holdfast and would change the stored data",
        ) from error
    _log.warning("ignored %s, which is not Holdfast's, and moved it to %s", journal, aside)


def sync_folder(folder: str) -> None:
    """Flush a folder's directory entries to disk, for example after a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wider_mode(path: str) -> int:
    """Return the file's mode bits that grant access to other users; 0 if the file is private or missing."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o077
    except FileNotFoundError:
        return 0


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
