"""Input history of ``holdfast chat``, kept across starts in a file that only this user can read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

__all__ = ["ChatHistory", "history_path", "open_history"]

_MAX_ENTRIES = 1000
_MAX_CHARS = 16_384
"""Longer inputs, such as pasted files, are not stored."""
_MAX_BYTES = 1 << 20
"""A larger file is reduced to its newest entries when it is opened."""


class ChatHistory(FileHistory):
    """History in a file. A file that cannot be read or written costs the history, never the chat."""

    def load_history_strings(self) -> Iterable[str]:
        """Return the newest entries, the newest one first."""
        try:
            return list(islice(super().load_history_strings(), _MAX_ENTRIES))
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append an entry to the file, unless it is too long."""
        if len(string) <= _MAX_CHARS:
            with suppress(OSError):
                super().store_string(string)


def history_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the history: ``holdfast/chat_history`` in the XDG folder for state.

    Return None for a user without a home directory.
    """
    state = environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    except RuntimeError:  # neither HOME nor the user database names one
        return None
    return folder / "holdfast" / "chat_history"


def open_history(path: Path | None) -> History:
    """Return the history in `path`, which is created if needed, or one in memory if the file cannot be used."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _MAX_BYTES:
            _shorten(path)
    except OSError:
        return InMemoryHistory()
    return ChatHistory(str(path))


def _shorten(path: Path) -> None:
    """Rewrite the file with its newest entries only."""
    entries = ChatHistory(str(path)).load_history_strings()
    shorter = path.with_name(f"{path.name}.{os.getpid()}")
    os.close(os.open(shorter, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    rewritten = ChatHistory(str(shorter))
    for entry in reversed(list(entries)):
        rewritten.store_string(entry)
    os.replace(shorter, path)
