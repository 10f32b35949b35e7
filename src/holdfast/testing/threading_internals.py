"""The private names of `threading` that the explorer needs, each behind a public one.

Conditions, events and queues of the standard library are written in Python on top of locks. An explored schedule
replaces these locks; a condition calls the same private methods on them as on the built-in locks.

`PRIVATE_NAMES` lists the names, which were checked on CPython 3.11.
``tests/testing/test_stdlib_internals.py`` fails on Python versions that lack any of these names.
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
"""The private names, by the module or class that owns them."""

MAKE_LOCK: Final = "_allocate_lock"
"""Name of the `threading` function with which a condition creates a lock for each waiter."""
CLOCK: Final = "_time"
"""Name of the monotonic clock function in `threading`."""


def lock_of_event(event: threading.Event) -> object:
    """Return the lock of an event's condition."""
    condition: Any = event._cond  # type: ignore[attr-defined]
    return getattr(condition, "_lock", None)


def is_owned(lock: Any) -> bool:
    """Whether this thread holds a built-in re-entrant lock."""
    return bool(lock._is_owned())


def release_save(lock: Any) -> Any:
    """Release a built-in re-entrant lock entirely; return the state that `acquire_restore` restores."""
    return lock._release_save()


def acquire_restore(lock: Any, saved: Any) -> None:
    """Acquire a built-in re-entrant lock as many times as it was held before `release_save`."""
    lock._acquire_restore(saved)
