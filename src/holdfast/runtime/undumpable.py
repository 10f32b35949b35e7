"""Closes a process to others of the same user: its memory, environment and descriptors, and ptrace.

The kernel shows ``/proc/<pid>/environ``, ``mem`` and ``fd`` of a process that cannot be dumped to root only, and lets
nobody else trace it. A fork inherits that and an exec takes it back, so each program that is to be closed closes itself
first thing. There are no core dumps of it, and debuggers and profilers of the same user cannot attach.
"""

from __future__ import annotations

import os
import sys

__all__ = ["become_undumpable", "descriptor_count"]

_PR_SET_DUMPABLE = 4


def become_undumpable() -> None:
    """Close this process, for good or until it executes another program. Does nothing where it cannot be done."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def descriptor_count(pid: int) -> int | None:
    """Return how many descriptors a process has open; None when it is gone or does not show it.

    Those of a closed process can be counted, not listed, and that from Linux 6.2 on.
    """
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        pass
    except OSError:
        return None
    try:
        return os.stat(f"/proc/{pid}/fd").st_size or None
    except OSError:
        return None
