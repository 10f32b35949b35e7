"""The account that a program's use of resources counts for: a principal and its workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.agents.program_usage import ProgramAccounts, WatchedProgram
    from holdfast.runtime import Process
    from holdfast.runtime.processes.program_cgroup import CgroupSpec

__all__ = ["Account"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account of one program that is about to start.

    Parameters:
        programs: the accounts of the host.
        principal: the principal that the program runs for; empty if it serves the host.
        folder: the workspace that the program writes; None if its files are not counted.
        shared: whether other principals use that workspace too.
        full: why the workspace must not grow; empty if it may.
    """

    programs: ProgramAccounts
    principal: str
    folder: Path | None
    shared: bool
    full: str = ""

    @property
    def cgroup(self) -> CgroupSpec | None:
        """The cgroup in which the program has to start; None if the kernel limits no sums."""
        return self.programs.cgroup_of(self.principal)

    def watch(self, process: Process) -> WatchedProgram:
        """Count what the started program uses until it is gone."""
        return self.programs.watch(self.principal, process, folder=self.folder, shared=self.shared)
