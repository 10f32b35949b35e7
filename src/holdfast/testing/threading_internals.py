"""The private names of `threading` that the explorer needs, each behind a public one.

Conditions, events and queues of the standard library are written in Python on top of locks. An explored schedule gives
them locks of its own, which a condition treats as it treats the interpreter's: by private methods.

`PRIVATE_NAMES` lists what is used. Checked on CPython 3.11;
``tests/testing/test_stdlib_internals.py`` fails on a Python in which one of them is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["CLOCK", "MAKE_LOCK", "PRIVATE_NAMES", "acquire_restore", "is_owned", "lock_of_event", "release_save"]

PRIVATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "threading": ("_allocate_lock", "_time"),
    "threading.Condition": ("_lock",),
    "threading.Event": ("_cond",),
    "threading.RLock": ("_acquire_restore", "_is_owned", "_release_save"),
}
"""The names by their owners."""

MAKE_LOCK: Final = "_allocate_lock"
"""The name in `threading` by which a condition makes the lock that a waiter waits for."""
CLOCK: Final = "_time"
"""The name in `threading` of its monotonic clock."""


def lock_of_event(event: threading.Event) -> object:
    """Return the lock of an event's condition."""
    condition: Any = event._cond  # type: ignore[attr-defined]
    return getattr(condition, "_lock", None)


def is_owned(lock: Any) -> bool:
    """Whether this thread holds a re-entrant lock of the interpreter's."""
    return bool(lock._is_owned())


def release_save(lock: Any) -> Any:
    """Release a re-entrant lock of the interpreter's entirely; return what `acquire_restore` needs."""
    return lock._release_save()


def acquire_restore(lock: Any, saved: Any) -> None:
    """Take a re-entrant lock of the interpreter's as often as it was held before `release_save`."""
    lock._acquire_restore(saved)
