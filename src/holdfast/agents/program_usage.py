"""The interfaces to a host's accounts of what the programs and files of each principal use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.runtime import Process
    from holdfast.runtime.processes.program_cgroup import CgroupSpec

__all__ = ["ProgramAccounts", "WatchedProgram"]


class WatchedProgram(Protocol):
    """A running program whose use of resources counts for its principal."""

    @property
    def ended_because(self) -> str:
        """Why the host ended the program: its principal used too much. Empty if the host did not end it."""
        ...


class ProgramAccounts(Protocol):
    """The host's accounts of what the programs of each principal use: memory, processes, descriptors and disk."""

    def known_fault(self, principal: str, folder: Path, *, shared: bool) -> str:
        """Return why a workspace must not grow, as last measured; empty if it may. Blocks for a file system call.

        Parameters:
            folder: the folder that counts for the principal.
            shared: whether other principals use the folder too; then only what it grows by counts.
        """
        ...

    def admit_write(self, principal: str, folder: Path, size: int, *, shared: bool) -> str:
        """Count a file that a tool of this process is about to write; return why it must not, or an empty string.

        A workspace that was not measured yet must not grow; `measure` changes that. Blocks for a file system call.

        Parameters:
            size: number of bytes of the file.
            folder, shared: the workspace, as for `known_fault`.
        """
        ...

    async def measure(self, principal: str, folder: Path, *, shared: bool) -> None:
        """Measure a workspace now, for at most a few seconds; see `known_fault`."""
        ...

    def cgroup_of(self, principal: str) -> CgroupSpec | None:
        """Return the cgroup in which a principal's programs have to start; None if the kernel limits no sums."""
        ...

    def watch(self, principal: str, process: Process, *, folder: Path | None, shared: bool) -> WatchedProgram:
        """Count what a program and its descendants use until they are gone; end it if its principal uses too much.

        The program must have been started in `cgroup_of` the principal.

        Parameters:
            principal: the principal that the program runs for; empty if it serves the host, which then counts as one.
            folder, shared: the workspace that the program writes, as for `known_fault`; None if its files are not
                counted.
        """
        ...
