"""Protection of this process's memory from other programs of the same user."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["make_undumpable"]

_PR_SET_DUMPABLE = 4


def make_undumpable() -> bool:
    """Prevent this user's other programs from reading this process's memory, and disable core dumps.

    ptrace and access to ``mem`` and ``environ`` in ``/proc/<pid>`` are denied to all users but root. A forked process
    inherits the setting; exec resets it. Return whether the setting took effect, which is possible on Linux only.
    """
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)
