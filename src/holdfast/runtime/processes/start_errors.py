"""Errors for programs that could not be started, the same as ``subprocess`` raises."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.runtime.processes.spec import Argument

__all__ = ["pid_or_error"]


def pid_or_error(started: int | tuple[str, int], argv: Sequence[Argument], cwd: Argument | None) -> int:
    """Return the reported pid.

    Raises:
        OSError: the start failed; the subclass is the same as with ``subprocess``.
    """
    if isinstance(started, int):
        return started
    stage, number = started
    match stage:
        case "chdir":
            raise OSError(number, os.strerror(number), os.fspath(cwd) if cwd is not None else os.getcwd())
        case "exec":
            raise OSError(number, os.strerror(number), os.fspath(argv[0]))
        case "reaper":
            why = "its reaper exited first; it was killed, or the zygote failed"
            raise OSError(number, f"failed to start {os.fsdecode(argv[0])}: {why}")
        case "lease":
            why = "the lease of this host has ended, so another host may run its work"
            raise OSError(number, f"failed to start {os.fsdecode(argv[0])}: {why}")
        case _:
            raise OSError(number, f"failed to start {os.fsdecode(argv[0])} ({stage}): {os.strerror(number)}")
