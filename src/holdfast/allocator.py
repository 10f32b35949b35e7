"""The C library's allocator, told what a server wants of it."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_large_blocks"]

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 262_144


def return_large_blocks() -> bool:
    """Have blocks of 256 kB and more go back to the kernel as soon as they are freed; whether that could be set.

    By itself glibc keeps blocks of up to 32 MB for later once one was freed, in one heap for each thread: what bodies
    and answers took for a moment would count for ever.
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except AttributeError:  # another C library
        return False
