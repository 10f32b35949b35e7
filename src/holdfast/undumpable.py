"""Keep other programs of the same user out of this process's memory."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["make_undumpable"]

_PR_SET_DUMPABLE = 4


def make_undumpable() -> bool:
    """Deny ptrace, ``/proc/<pid>/mem`` and ``environ``, and core dumps to this user's programs that are not root.

    Return whether the kernel did so; it does on Linux only. A fork inherits it, an exec undoes it.
    """
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)
