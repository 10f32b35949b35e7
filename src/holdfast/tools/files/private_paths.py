"""Files of this process's hosts that no tool may reach, such as their stores."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence

from holdfast.storage.sqlite.private_file import store_path

__all__ = ["kept_private", "private_paths", "store_paths"]

_BESIDE_A_STORE = ("", "-journal", "-lock", "-refused-journal", "-shm", "-token", "-wal", ".d")
_private: tuple[str, ...] = ()
_changing = threading.Lock()


def store_paths(store: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the real paths of a store's file and of its companion files, whether or not they exist."""
    file = store_path(os.fspath(store))
    return tuple(file + suffix for suffix in _BESIDE_A_STORE)


@contextlib.contextmanager
def kept_private(paths: Sequence[str]) -> Iterator[None]:
    """Make files and folders inaccessible to all workspaces of this process until the block exits.

    Blocks may be nested.

    Parameters:
        paths: real paths of the files and folders.
    """
    global _private
    with _changing:
        _private += tuple(paths)
    try:
        yield
    finally:
        with _changing:
            left = list(_private)
            for path in paths:
                left.remove(path)
            _private = tuple(left)


def private_paths() -> tuple[str, ...]:
    """Return the real paths that are private now, whether or not they exist."""
    return _private
