"""Programs of principals in one folder, with quotas, for the tests of quotas."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from holdfast.host.program_quotas import ProgramLimits, ProgramQuotas, Watched
from holdfast.runtime import Process, Scope
from holdfast.runtime.processes.cgroup_delegation import ProgramCgroups

__all__ = ["MIB", "ROOMY", "Place", "run", "scope_of"]

MIB = 1 << 20
ROOMY = ProgramLimits(
    memory_bytes=1 << 40, processes=10_000, files=100_000, disk_bytes=1 << 40, inodes=1 << 30, reserve_bytes=0
)


class Place:
    """Quotas, and what they reported.

    Parameters:
        cgroups: the cgroups that enforce them; None if they are only measured.
        limits: the limits that differ from `ROOMY`.
    """

    def __init__(self, folder: Path, cgroups: ProgramCgroups | None = None, /, **limits: int) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.reports: list[tuple[str, str, str]] = []
        self.quotas = ProgramQuotas(
            msgspec.structs.replace(ROOMY, **limits), lambda *report: self.reports.append(report), cgroups=cgroups
        )

    async def start(
        self, scope: Scope, source: str, *, principal: str = "alice", shared: bool = False, **options: Any
    ) -> tuple[Process, Watched]:
        """Start a Python program in the folder.

        Parameters:
            options: options of `Scope.process` that differ, also ``argv``.
        """
        started: dict[str, Any] = {"argv": [sys.executable, "-I", "-S", "-c", source], "cwd": self.folder} | options
        process = await scope.process(**started, cgroup=self.quotas.cgroup_of(principal))
        self.processes.append(process)
        return process, self.quotas.watch(principal, process, folder=self.folder, shared=shared)


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def scope_of(place: Place) -> AsyncIterator[Scope]:
    """A scope at whose end the programs are killed and the quotas closed."""
    async with Scope("programs", grace_s=0.1) as scope:
        try:
            yield scope
        finally:
            for process in place.processes:
                await process.kill_tree()
            place.quotas.close()
