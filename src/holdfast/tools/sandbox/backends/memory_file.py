"""Files in memory without a name, which pass data to a program without showing it in arguments."""

from __future__ import annotations

import os

__all__ = ["memory_files"]


def memory_files(*contents: bytes) -> tuple[int, ...]:
    """Return descriptors of new files with these contents, for the caller to close."""
    fds: list[int] = []
    try:
        for content in contents:
            fds.append(os.memfd_create("holdfast", os.MFD_CLOEXEC))
            with os.fdopen(os.dup(fds[-1]), "wb") as file:
                file.write(content)
            os.lseek(fds[-1], 0, os.SEEK_SET)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return tuple(fds)
