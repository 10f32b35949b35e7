"""Values that `ProcessHost` returns: its statistics, and the result of a program that ran to completion."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.runtime.processes.tree import TreeResult

__all__ = ["Completed", "ProcessHostStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHostStatistics:
    """A snapshot of a `ProcessHost`.

    Parameters:
        started: number of programs started so far.
        live: number of programs whose process tree is not yet gone.
        killed: number of processes killed so far.
        survivors: number of processes so far that outlived the time limit of a kill.
        reapers: number of running reapers.
    """

    started: int
    live: int
    killed: int
    survivors: int
    reapers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Result of `ProcessHost.run_blocking`.

    Parameters:
        returncode: exit code of the program; if a signal ended it, the negative signal number.
        stdout, stderr: complete output of the program.
        tree: result of killing the descendants that the program left running.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    tree: TreeResult
