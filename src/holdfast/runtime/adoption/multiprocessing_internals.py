"""Private names of `multiprocessing` that the runtime and the leak detector need, each behind a public function.

``multiprocessing`` starts two long-lived helper processes: the resource tracker and the fork server. No public API
returns their pids or the start method of a process.

`PRIVATE_NAMES` lists these names. The names were checked on CPython 3.11; ``tests/testing/test_stdlib_internals.py``
fails on a Python version that lacks one of them.
"""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["PRIVATE_NAMES", "fork_server_pid", "kept_descriptors", "kept_pids", "start_method_of"]

PRIVATE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "multiprocessing.Process": ("_start_method",),
    "multiprocessing.forkserver": ("_forkserver",),
    "multiprocessing.forkserver.ForkServer": ("_forkserver_alive_fd", "_forkserver_pid"),
    "multiprocessing.resource_tracker": ("_resource_tracker",),
    "multiprocessing.resource_tracker.ResourceTracker": ("_fd", "_pid"),
}
"""Private names, by the module or class that defines them."""


def start_method_of(process: Any) -> str | None:
    """Return the start method of a ``multiprocessing`` process, such as ``spawn``."""
    method: str | None = getattr(process, "_start_method", None)
    return multiprocessing.get_start_method() if method is None else method


def fork_server_pid() -> int:
    """Return the pid of the fork server, starting it if necessary."""
    from multiprocessing import forkserver

    forkserver.ensure_running()
    server: Any = forkserver
    return int(server._forkserver._forkserver_pid)


def kept_pids() -> set[int]:
    """Return the pids of the resource tracker and the fork server, if they run."""
    return _numbers(getattr(_tracker(), "_pid", None), getattr(_fork_server(), "_forkserver_pid", None))


def kept_descriptors() -> set[int]:
    """Return the descriptors that connect this process to the resource tracker and the fork server, if they run."""
    return _numbers(getattr(_tracker(), "_fd", None), getattr(_fork_server(), "_forkserver_alive_fd", None))


def _tracker() -> object:
    return getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)


def _fork_server() -> object:
    return getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)


def _numbers(*found: object) -> set[int]:
    return {number for number in found if isinstance(number, int)}
