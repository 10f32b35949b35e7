"""Keep other programs of the same user out of this process's memory."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["make_undumpable"]

_PR_SET_DUMPABLE = 4


def make_undumpable() -> bool:
    """Deny this user's other programs ptrace, ``/proc/<pid>/mem`` and ``environ``, and disable core dumps.

    Root keeps access. Return whether this took effect; it is supported on Linux only. A fork inherits the setting, an
    exec resets it.
    """
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)
