"""Hide passwords of store URLs in this process's arguments, which everyone on the machine can read."""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["hide_passwords"]

_PASSWORD: Final = re.compile(rb"postgres(?:ql)?://[^:@/?#\0]*:([^\0]*)@|[?&](?:ssl)?password=([^&\0]*)")
_ARG_START: Final = 45
"""Position of ``arg_start`` in ``/proc/self/stat``, after the name of the program; ``arg_end`` follows."""


def hide_passwords() -> None:
    """Overwrite passwords of PostgreSQL URLs in the arguments that ``ps`` shows. It works on Linux only.

    `sys.argv` stays as it is. Until this call, others could read the password: HOLDFAST_STORE is the better place.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if not start < end:
            return
        for found in _PASSWORD.finditer(ctypes.string_at(start, end - start)):
            at, until = found.span(1 if found[1] is not None else 2)
            ctypes.memset(start + at, ord("*"), until - at)
