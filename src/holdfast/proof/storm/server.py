"""A server that a storm owns: a separate process on loopback, which the storm starts, kills and shuts down."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from holdfast import failpoints
from holdfast.clock import system_clock
from holdfast.errors import ServerUnreachable
from holdfast.host import DrainReport
from holdfast.proof.history import (
    Drained,
    DrainRequested,
    FailpointHit,
    HostAbsent,
    HostExited,
    HostKilled,
    HostReady,
    HostStarted,
)
from holdfast.proof.limits import Limits
from holdfast.proof.storm.agent import STAMPS_VARIABLE, STORM_VARIABLE
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.settings import Settings

__all__ = ["OwnServer", "free_port"]

_PROGRAM = """\
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
from holdfast.cli import main
main()
"""
"""A server that is killed when the storm ends (PR_SET_PDEATHSIG), however it ends."""
_AGENTS = ("holdfast.proof.storm.served:replayable", "holdfast.proof.storm.served:plain")


class _Line(msgspec.Struct):
    """Part of the server's own report on stdout."""

    event: str
    report: DrainReport | None = None


_line = msgspec.json.Decoder(_Line)


_FIRST_PORT, _PORTS = 20_000, 12_000
_numbers = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """Return a free TCP port on the loopback interface.

    The port is outside the range that Linux assigns to outgoing connections, so no such connection can take the port
    before the server binds it, or during a restart. Each process starts its search at a different port.
    """
    while True:
        port = _FIRST_PORT + next(_numbers) % _PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class OwnServer:
    """The incarnations of one server, of which at most one is alive. Use it on one event loop.

    Parameters:
        folder: folder for the server's store, the side file of stamps and the server's stderr.
        settings: the server's settings; those that differ from the defaults are passed in the environment.
        first: number of the first incarnation.
        numbers: numbers of the incarnations, which several servers of one storm share; if given, `first` is ignored.
        agents: agents to serve, as ``module:name``, which are imported from the folder in which the storm was started;
            if empty, the storm's own agents are served.
        program: Python source that the server's process executes; if empty, the process executes ``holdfast``, and is
            killed when the storm's process ends.
    """

    def __init__(
        self,
        folder: Path,
        recorder: StormRecorder,
        limits: Limits,
        storm: str,
        settings: Settings,
        *,
        first: int = 1,
        numbers: Iterator[int] | None = None,
        agents: tuple[str, ...] = (),
        program: str = "",
    ) -> None:
        self.incarnation = 0
        self._numbers = numbers or itertools.count(first)
        self._frozen_at: float | None = None
        self._agents = agents or _AGENTS
        self._program = program or _PROGRAM
        self.storm = storm
        self.url = f"http://127.0.0.1:{settings.port}"
        self.stamps = folder / "stamps"
        self.errors = folder / "stderr"
        self._errors_from = 0
        self.drain_timeout_s = settings.drain_timeout_s
        self._folder = folder
        self._recorder = recorder
        self._limits = limits
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")} | {
            STAMPS_VARIABLE: str(self.stamps),
            STORM_VARIABLE: storm,
        }
        for field, value in msgspec.structs.asdict(settings).items():
            if value != getattr(Settings(), field):
                self._environment[f"HOLDFAST_{field.upper()}"] = (
                    ",".join(value) if isinstance(value, tuple) else str(value)
                )
        if agents:
            known = os.environ.get("PYTHONPATH", "")
            self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), known)))
        self._process: Process | None = None
        self._ready: asyncio.Future[bool] | None = None
        self._report: DrainReport | None = None
        self._listener: asyncio.Task[None] | None = None

    def export(self, name: str, value: str) -> None:
        """Set an environment variable for all later incarnations."""
        self._environment[name] = value

    @property
    def pid(self) -> int:
        """Pid of the newest incarnation. Raises `ServerUnreachable` if none was started."""
        if self._process is None:
            raise ServerUnreachable("the storm's server has not been started")
        return self._process.pid

    @property
    def memory(self) -> int:
        """Resident memory of the newest incarnation, in bytes; 0 if the incarnation's process has ended."""
        with suppress(psutil.Error, ServerUnreachable):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0

    async def start(self, failpoint: str | None = None, *, environment: Mapping[str, str] | None = None) -> bool:
        """Start the next incarnation; return True once it is ready, or False if it exits before that.

        Parameters:
            failpoint: name of the failpoint at which the incarnation kills itself, if any.
            environment: additional environment variables for this incarnation.

        Raises:
            ServerUnreachable: if the incarnation neither became ready nor exited within ``ready_s``.
        """
        self.incarnation = next(self._numbers)
        environment = {**self._environment, **(environment or {})}
        if failpoint is not None:
            environment[failpoints.VARIABLE] = failpoint
        with self.errors.open("ab") as errors:
            self._errors_from = errors.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                self._program,
                "serve",
                "--json",
                *self._agents,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._process = process
        self._recorder.note(HostStarted, incarnation=self.incarnation, pid=process.pid)
        self._report = None
        self._ready = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen(process, self._ready), name="storm server's stdout")
        try:
            async with asyncio.timeout(self._limits.ready_s):
                ready = await asyncio.shield(self._ready)
        except TimeoutError:
            raise ServerUnreachable(f"the storm's server did not answer: {self.tail()}") from None
        if ready:
            self._recorder.note(HostReady, incarnation=self.incarnation)
        return ready

    async def _listen(self, process: Process, ready: asyncio.Future[bool]) -> None:
        assert process.stdout is not None
        async for text in process.stdout:
            line = _line.decode(text)
            if line.event == "ready" and not ready.done():
                ready.set_result(True)
            elif line.event == "stopped":
                self._report = line.report
        if not ready.done():
            ready.set_result(False)

    def freeze(self) -> None:
        """Stop the server's process with SIGSTOP."""
        self._frozen_at = system_clock.monotonic()
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the server's process continue, if it is stopped."""
        frozen_at, self._frozen_at = self._frozen_at, None
        if frozen_at is not None:
            os.kill(self.pid, signal.SIGCONT)
            self._recorder.note(HostAbsent, incarnation=self.incarnation, began_at=frozen_at)

    async def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until its process has ended."""
        assert self._process is not None
        self.thaw()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._gone()
        self._recorder.note(HostKilled, incarnation=self.incarnation)

    async def died_at(self, failpoint: str, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether the server killed itself at the failpoint.

        Raises `ServerUnreachable` if the server ended in another way.
        """
        assert self._process is not None
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        code = await self._gone()
        if code != -signal.SIGKILL:
            raise ServerUnreachable(f"the storm's server ended with code {code} at {failpoint}: {self.tail()}")
        self._recorder.note(FailpointHit, incarnation=self.incarnation, name=failpoint)
        self._recorder.note(HostKilled, incarnation=self.incarnation, failpoint=failpoint)
        return True

    async def refused(self) -> int:
        """Record the exit of an incarnation that exited before it became ready, and return the exit code."""
        code = await self._gone()
        self._recorder.note(HostExited, incarnation=self.incarnation, code=code)
        return code

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return self._process is not None and self._process.returncode is None

    async def end(self) -> None:
        """Send SIGTERM, so that the server drains and exits; record the report of the drain and the exit."""
        assert self._process is not None
        self._recorder.note(DrainRequested, incarnation=self.incarnation, deadline_s=self.drain_timeout_s)
        self._process.terminate()
        began = system_clock.monotonic()
        try:
            async with asyncio.timeout(self.drain_timeout_s + self._limits.drain_slack_s + 10.0):
                code = await self._gone()
        except TimeoutError:
            return await self.kill()
        if self._report is not None:
            self._recorder.note(
                Drained,
                incarnation=self.incarnation,
                elapsed_s=max(self._report.elapsed_s, system_clock.monotonic() - began),
                finished=self._report.finished,
                interrupted=self._report.interrupted,
                parked=self._report.suspended,
                orphans=self._report.orphans,
            )
        self._recorder.note(HostExited, incarnation=self.incarnation, code=code)

    async def _gone(self) -> int:
        assert self._process is not None
        assert self._listener is not None
        code = await self._process.wait()
        await self._listener
        return code

    def tail(self) -> str:
        """Return the last lines that this incarnation wrote to stderr."""
        try:
            written = self.errors.read_bytes()[self._errors_from :]
        except FileNotFoundError:
            written = b""
        return written.decode("utf-8", "replace")[-2000:].strip() or "no output"
