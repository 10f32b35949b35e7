"""Keep other programs of the same user out of this process's memory."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["make_undumpable"]

_PR_SET_DUMPABLE = 4


def make_undumpable() -> bool:
    """Refuse ptrace, ``/proc/<pid>/mem`` and ``environ``, and core dumps to programs of this user that are not root.

    Returns whether the kernel did so; on other systems than Linux it does not. A fork inherits it, an exec undoes it.
    """
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)
