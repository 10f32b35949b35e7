"""A folder for the temporary files of one program without namespaces. The zygote imports this module.

The reaper makes the folder, and removes it when no process of the program is left. If the reaper is killed, it stays.
"""

from __future__ import annotations

import os

__all__ = ["make_scratch", "remove_scratch"]

_PLACE = b"/tmp/holdfast-scratch-"


def make_scratch() -> bytes:
    """Make an empty folder that only this user can enter, and return its path."""
    path = _PLACE + os.urandom(8).hex().encode()
    os.mkdir(path, 0o700)
    return path


def remove_scratch(path: bytes) -> None:
    """Remove the folder with its contents; what cannot be removed stays."""
    try:
        for folder, folders, names in os.walk(path, topdown=False):
            for name in names:
                os.unlink(os.path.join(folder, name))
            for name in folders:
                inner = os.path.join(folder, name)
                if os.path.islink(inner):
                    os.unlink(inner)
                else:
                    os.rmdir(inner)
        os.rmdir(path)
    except (OSError, RecursionError):
        return
