"""Private names of the standard library that identify executors and their threads, each behind a public function.

The threads of a `concurrent.futures.ThreadPoolExecutor` belong to no scope; only the submitted calls do. No public API
identifies such a thread or the default executor of a loop.

`PRIVATE_NAMES` lists these names. The names were checked on CPython 3.11; ``tests/testing/test_stdlib_internals.py``
fails on a Python version that lacks one of them.
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
"""Private names, by the module or class that defines them."""

_WORKER: Final[Any] = getattr(concurrent.futures.thread, "_worker", None)
_WORKER_CODE: Final[CodeType | None] = getattr(_WORKER, "__code__", None)


def default_executor(loop: asyncio.AbstractEventLoop) -> Any:
    """Return the executor of ``run_in_executor(None, ...)``, or None while the loop has none."""
    return getattr(loop, "_default_executor", None)


def is_executor_thread(thread: threading.Thread) -> bool:
    """Whether an executor created the thread; also correct before the thread has started."""
    return _WORKER is not None and getattr(thread, "_target", None) is _WORKER


def waits_for_a_call(innermost: CodeType) -> bool:
    """Whether a thread whose innermost frame runs this code is an idle thread of an executor."""
    return innermost is _WORKER_CODE
