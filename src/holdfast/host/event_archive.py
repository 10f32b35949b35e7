"""The archive of events: files to which a host writes events before retention deletes them from the store.

Each line of a file is one event as readers get it, with the principal, the key and the number of its session. A host
writes to files of its own, one for each day. A batch is on disk before the store deletes its events. If a host ends
between the two, the same events are written again, so a reader of the files must drop repeated lines: the session's
number and ``seq`` identify an event.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.protocol.events import encode_json, shown, wire
from holdfast.storage.sqlite.private_file import sync_folder
from holdfast.storage.values import OldEvents

__all__ = ["EventArchive", "archive_folder"]


def archive_folder(setting: str) -> str:
    """Return the real path of the folder that the setting ``event_archive`` names."""
    return os.path.realpath(os.path.expanduser(setting))


class EventArchive:
    """Writes old events to files. Its methods block; call one at a time, from any thread.

    Parameters:
        setting: the setting ``event_archive``. The folder is created if it does not exist; hosts may share it.
        node_id: id of the host, part of the names of its files.
    """

    def __init__(self, setting: str, node_id: str) -> None:
        self._folder = Path(archive_folder(setting))
        self._node_id = node_id

    def open(self) -> None:
        """Create the folder, for this user only. Raises `ConfigurationError` if files cannot be created in it."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "this user may not create files in it")
        except OSError as error:
            why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
            raise ConfigurationError(
                f"event_archive {self._folder} cannot be used: {why}",
                hint="set it to a folder that the server may write, or leave it empty to delete old events unarchived",
            ) from error

    def add(self, read: Sequence[OldEvents], *, at: float) -> int:
        """Write events and wait until they are on disk; return their number. The time `at` chooses the file.

        Raises `OSError` if they cannot be written. The file then ends with the line with which it ended before.
        """
        path = self._folder / f"events-{datetime.fromtimestamp(at, UTC):%Y-%m-%d}-{self._node_id}.jsonl"
        lines = [line for old in read for line in _lines(old)]
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, b"".join(lines))
                os.fsync(descriptor)
                if not size:
                    sync_folder(os.fspath(self._folder))  # it has a new file
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        return len(lines)


def _lines(old: OldEvents) -> Iterable[bytes]:
    about = encode_json({"principal": old.principal, "session": old.key, "number": old.session})
    return [b"%b,%b\n" % (about[:-1], wire(event)[1:]) for event in shown(old.events)]


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
