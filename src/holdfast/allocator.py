"""Configuration of the C library's memory allocator for a server."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_large_blocks"]

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 262_144


def return_large_blocks() -> bool:
    """Make glibc return blocks of 256 kB or more to the kernel as soon as they are freed.

    Return whether the setting took effect. By default, when a large block is freed, glibc raises its threshold for
    returning blocks to that block's size (at most 32 MB). It takes later blocks below the threshold from heaps, which
    keep the memory of freed blocks. Memory that was used only briefly by requests and responses would therefore stay
    allocated.
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except AttributeError:  # another C library
        return False
