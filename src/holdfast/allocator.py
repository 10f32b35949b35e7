"""Configuration of the C library's memory allocator for a server."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_large_blocks"]

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 262_144


def return_large_blocks() -> bool:
    """Make blocks of 256 kB and more return to the kernel as soon as they are freed. Return whether that is supported.

    By default, once a large block was freed, glibc allocates blocks of up to 32 MB in per-thread heaps and keeps them
    when they are freed. Memory that requests and responses used only briefly would then stay allocated forever.
    """
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
    except AttributeError:  # another C library
        return False
