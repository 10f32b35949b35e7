"""The private names by which threads of executors are known, each behind a public one.

A thread of a `concurrent.futures.ThreadPoolExecutor` has no owner: only its calls count. Nothing public tells such a
thread from another, nor which executor a loop uses by default.

`PRIVATE_NAMES` lists what is used. Checked on CPython 3.11;
``tests/testing/test_stdlib_internals.py`` fails on a Python in which one of them is missing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import threading
from collections.abc import Mapping
from types import CodeType
from typing import Any, Final

__all__ = ["PRIVATE_NAMES", "default_executor", "is_executor_thread", "waits_for_a_call"]

PRIVATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "asyncio.BaseEventLoop": ("_default_executor",),
    "concurrent.futures.thread": ("_worker",),
    "threading.Thread": ("_target",),
}
"""The names by their owners."""

_WORKER: Final[Any] = getattr(concurrent.futures.thread, "_worker", None)
_WORKER_CODE: Final[CodeType | None] = getattr(_WORKER, "__code__", None)


def default_executor(loop: asyncio.AbstractEventLoop) -> Any:
    """Return the executor of ``run_in_executor(None, ...)``, or None while the loop has none."""
    return getattr(loop, "_default_executor", None)


def is_executor_thread(thread: threading.Thread) -> bool:
    """Whether an executor made the thread; known before it runs."""
    return _WORKER is not None and getattr(thread, "_target", None) is _WORKER


def waits_for_a_call(innermost: CodeType) -> bool:
    """Whether a thread whose innermost code this is belongs to an executor and is idle."""
    return innermost is _WORKER_CODE
