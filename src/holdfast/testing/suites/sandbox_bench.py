"""The bench on which the suite of walls tests a backend: a workspace, a folder of the server beside it, and starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.runtime.process_host import PIPE, Process, TreeResult, process_host
from holdfast.tools.sandbox.network import open_network
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.port import Launch, SandboxBackend
from holdfast.tools.sandbox.sandbox import Sandbox

__all__ = ["LIMIT_S", "SECRET", "WallBench", "WalledRun", "assert_ok", "open_bench", "read_line"]

LIMIT_S = 30.0
"""Timeout of one program, in seconds."""
SECRET = "hunter2-of-the-conformance-suite"
"""Content of a file, or value of a variable, that no program may see without being given it."""


@dataclass(frozen=True, kw_only=True)
class WalledRun:
    """How a program ended.

    Parameters:
        stdout, stderr: its output.
        returncode: its exit code.
        tree: proof that nothing of it is left.
    """

    stdout: str
    stderr: str
    returncode: int
    tree: TreeResult


class WallBench:
    """A backend, a workspace, and a folder of the server beside it.

    Attributes:
        folder: the workspace.
        outside: a folder that no program was given; it contains the file ``secret``.
    """

    def __init__(self, backend: SandboxBackend, root: Path) -> None:
        self.backend = backend
        self.folder = root / "workspace"
        self.outside = root / "server"
        self.folder.mkdir()
        self.outside.mkdir()
        (self.outside / "secret").write_text(SECRET)

    def launch(self, argv: Sequence[str], sandbox: Sandbox | None = None, **granted: Any) -> Launch:
        """Return how to start a program behind the wall; blocks."""
        return self.backend.launch(plan_wall(sandbox or Sandbox(), folder=self.folder, **granted), argv)

    async def run(
        self, program: str | Sequence[str], sandbox: Sandbox | None = None, *, input: bytes = b"", **granted: Any
    ) -> WalledRun:
        """Run a shell command or a program with arguments, with its network, and wait until its tree is gone."""
        argv = ["/bin/sh", "-c", program] if isinstance(program, str) else program
        launch = await open_network(await asyncio.to_thread(self.launch, argv, sandbox, **granted))
        try:
            ended = await asyncio.to_thread(
                process_host().run_blocking,
                launch.argv,
                input=input,
                timeout_s=LIMIT_S,
                cwd=launch.directory,
                env=launch.environment,
                wall=launch.wall,
                pass_fds=launch.pass_fds,
                confirm=launch.confirm,
            )
        finally:
            for fd in launch.pass_fds:
                os.close(fd)
            if launch.network is not None:
                launch.network.close()
        told = (ended.stdout.decode("utf-8", "replace"), ended.stderr.decode("utf-8", "replace"))
        return WalledRun(stdout=told[0], stderr=told[1], returncode=ended.returncode, tree=ended.tree)

    async def python(self, script: str, sandbox: Sandbox | None = None, **granted: Any) -> WalledRun:
        """Run a script with this interpreter."""
        return await self.run([sys.executable, "-I", "-S", "-c", textwrap.dedent(script)], sandbox, **granted)

    async def start(self, command: str, **granted: Any) -> Process:
        """Start a shell command whose output is read from ``stdout``."""
        launch = await asyncio.to_thread(self.launch, ["/bin/sh", "-c", command], **granted)
        try:
            return await process_host().spawn(
                launch.argv,
                stdin=PIPE,
                stdout=PIPE,
                cwd=launch.directory,
                env=launch.environment,
                wall=launch.wall,
                pass_fds=launch.pass_fds,
                confirm=launch.confirm,
            )
        finally:
            for fd in launch.pass_fds:
                os.close(fd)


@contextlib.asynccontextmanager
async def open_bench(subject: Callable[[], SandboxBackend]) -> AsyncIterator[WallBench]:
    """Open a bench with a new workspace."""
    backend = await asyncio.to_thread(subject)
    reason = await asyncio.to_thread(backend.probe)
    assert reason is None, f"the machine cannot use the backend {backend.name}: {reason}"
    with tempfile.TemporaryDirectory(prefix="holdfast-suite-") as root:
        yield WallBench(backend, await asyncio.to_thread(Path(root).resolve))


async def read_line(process: Process) -> str:
    """Return the next line of a program's output."""
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        return (await process.stdout.readline()).decode().strip()


def assert_ok(ended: WalledRun) -> None:
    """Assert that a program succeeded."""
    assert ended.returncode == 0, f"exit code {ended.returncode}: {ended.stdout}{ended.stderr}"
