"""A real server under attack: `holdfast serve` with default settings, little memory, few descriptors, and a bystander.

    async with attacked_server(tmp_path) as server:
        lines = [await server.line() for _ in range(1000)]   # the attack is in place, or
        async with server.bystander(sends=200, stops=3):     # goes on while somebody else works
            await flood(lines)
        await server.check(accused="mallory")

- The server's memory is watched by the kernel's own high-water mark, so no peak is missed; a server above the limit is
  killed, as a kernel with that limit would. `RLIMIT_AS` and `RLIMIT_DATA` are no use: they count stacks and mappings
  that are never touched, and nothing says whose fault a refusal was.
- The bystander is a process of its own: the attack's event loop does not slow its clock.
- `check` judges; a test may look at the figures itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from holdfast.proof.raw_connection import RawConnection
from holdfast.proof.storm.server import free_port

__all__ = ["ATTACKER", "BYSTANDER", "AttackedServer", "Figures", "attacked_server"]

ATTACKER = "mallory"
"""The principal that attacks with a key."""
BYSTANDER = "bystander"
"""The principal that must not feel it."""

MEMORY_LIMIT_BYTES = 512 << 20
MEMORY_SLACK_BYTES = 200 << 20
DESCRIPTORS = 1024
_LATENCY_FLOOR_S = 0.020
_STOP_S = 15.0
_READY_S = 40.0
_END_S = 60.0
_LOOK_S = 0.05
_WARM_SENDS = 200

_ROOT = Path(__file__).resolve().parents[3]
_PROGRAM = """\
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
import mmap, os, struct, time
from holdfast.clock import SystemClock
if os.path.exists({1!r}):
    file = open({1!r}, "r+b")
    ahead = mmap.mmap(file.fileno(), 8)
    SystemClock.now = staticmethod(lambda: time.time() + struct.unpack_from("d", ahead)[0])
from holdfast.cli import main
main()
"""
_CLOCK = "clock"
_SETTINGS: dict[str, object] = {"drain_timeout_s": 1.0}
"""Not the default, as runs that never end would hold up the end of each test."""
_AGENTS = ("tests.system.attacks.agents:echo", "tests.system.attacks.agents:endless")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a bystander saw: the times of its sends and stops in seconds, and what failed."""

    sends_s: Sequence[float]
    stops_s: Sequence[float]
    failures: Sequence[str]

    @property
    def p99_s(self) -> float:
        """The time within which 99 of 100 sends were answered."""
        ordered = sorted(self.sends_s)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


@dataclass
class AttackedServer:
    """A server that answers, its keys, and what is known of it so far. Of one loop.

    Parameters:
        url, port, pid: where and which it is.
        folder: the folder that it was started in.
        keys: secrets of API keys by principal: of `ATTACKER`, `BYSTANDER` and ``admin``.
        quiet: the bystander's figures before the attack.
        quiet_bytes: its memory before the attack.
    """

    url: str
    port: int
    pid: int
    folder: Path
    keys: dict[str, str] = field(default_factory=dict)
    quiet: Figures | None = None
    quiet_bytes: int = 0
    attacked: Figures | None = None
    process: asyncio.subprocess.Process | None = None
    _worker: asyncio.subprocess.Process | None = None

    async def line(self, principal: str | None = None, *, small: bool = False) -> RawConnection:
        """A raw connection; its requests carry the principal's key, or none. Raises `OSError`."""
        line = RawConnection(self.port, self.keys[principal] if principal else "none")
        try:
            await line.open(small=small)
        except BaseException:
            line.drop()
            raise
        return line

    def http(self, principal: str, **options: Any) -> httpx2.AsyncClient:
        """A client with the principal's key; open it with ``async with``."""
        headers = {"authorization": f"Bearer {self.keys[principal]}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=30, trust_env=False, **options)

    @asynccontextmanager
    async def bystander(self, *, sends: int = 200, stops: int = 3) -> AsyncIterator[None]:
        """Let the bystander work while the body attacks; returns when both are done. Figures are in ``attacked``."""
        async with asyncio.TaskGroup() as group:
            working = group.create_task(self._work(sends, stops))
            yield
        self.attacked = working.result()

    async def _work(self, sends: int, stops: int) -> Figures:
        assert self._worker is not None
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(json.dumps({"sends": sends, "stops": stops}).encode() + b"\n")
        return Figures(**json.loads(await self._worker.stdout.readline()))

    @property
    def alive(self) -> bool:
        """Whether the server's process still runs."""
        return self.process is not None and self.process.returncode is None

    @property
    def peak_bytes(self) -> int:
        """The most memory that the server has had since it was quiet, beyond what it had then."""
        return _status(self.pid, "VmHWM") - self.quiet_bytes

    @property
    def descriptors(self) -> int:
        """Descriptors that the server has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def set_clock(self, ahead_s: float) -> None:
        """Let the server's wall clock jump: from now on it is so far ahead of this machine's, or behind."""
        with (self.folder / _CLOCK).open("r+b") as file:
            file.write(struct.pack("d", ahead_s))

    def log(self) -> str:
        """Everything that the server wrote for people."""
        return (self.folder / "serve.log").read_text("utf-8", "replace")

    async def incidents(self) -> list[dict[str, Any]]:
        """The newest incidents as an operator sees them."""
        async with self.http("admin") as http:
            answer = await http.get("/v1/server")
            answer.raise_for_status()
            found: list[dict[str, Any]] = answer.json()["incidents"]
            return found

    async def doctor(self) -> str:
        """What ``holdfast doctor`` says to an operator of this server."""
        return (await self.command("doctor", "--json"))[1]

    async def command(self, *arguments: str) -> tuple[int, str]:
        """Run a command of ``holdfast`` as an operator; its exit code, and what it said."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from holdfast.cli import main; main()",
            *arguments,
            "--url",
            self.url,
            "--key",
            self.keys["admin"],
            cwd=self.folder,
            env=_environment({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode()

    async def check(self, *, accused: str | None = None, latency: bool = False) -> None:
        """Fail unless the server lives in bounded memory and the bystander got everything it asked for.

        Parameters:
            accused: a name (principal or address) that `doctor` must say.
            latency: the bystander's p99 is judged, too: for tests marked ``nightly``, with 2,000 sends.
        """
        assert self.alive, f"the server is dead: {self.log()[-2000:]}"
        peak = self.peak_bytes
        assert peak <= MEMORY_SLACK_BYTES, f"{peak >> 20} MB above {self.quiet_bytes >> 20} MB"
        assert self.attacked is not None, "no bystander was there"
        assert self.quiet is not None
        assert not self.attacked.failures, self.attacked.failures
        assert max(self.attacked.stops_s, default=0.0) <= _STOP_S, self.attacked.stops_s
        if latency:
            assert "PYTEST_XDIST_WORKER" not in os.environ, "mark it `alone`: its neighbours would be judged"
            allowed = max(3 * self.quiet.p99_s, _LATENCY_FLOOR_S)
            assert self.attacked.p99_s <= allowed, f"p99 {self.attacked.p99_s:.4f} s, {self.quiet.p99_s:.4f} s before"
        if accused is not None:
            said = await self.doctor()
            assert accused in said, said


@asynccontextmanager
async def attacked_server(
    folder: Path,
    *,
    agents: Sequence[str] = _AGENTS,
    settings: Mapping[str, object] | None = None,
    descriptors: int = DESCRIPTORS,
    memory_bytes: int = MEMORY_LIMIT_BYTES,
    clock: bool = False,
) -> AsyncIterator[AttackedServer]:
    """A server in a process of its own with default settings, quiet and measured; afterwards it is ended.

    Parameters:
        folder: where it is started; its store and logs lie there.
        agents: what it serves, as ``module:name``; the bystander needs the first one to answer, and ``endless``.
        settings: for tests that must shorten a deadline; never a bound.
        descriptors: its ``ulimit -n``, soft and hard.
        memory_bytes: it is killed above that.
        clock: `AttackedServer.set_clock` is used.
    """
    port = free_port()
    if clock:
        (folder / _CLOCK).write_bytes(struct.pack("d", 0.0))
    values = {f"HOLDFAST_{name.upper()}": str(value) for name, value in (_SETTINGS | dict(settings or {})).items()}
    with (folder / "serve.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _PROGRAM.format(descriptors, str(folder / _CLOCK)),
            "serve",
            "--json",
            *agents,
            cwd=folder,
            env=_environment(values | {"HOLDFAST_PORT": str(port)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    server = AttackedServer(f"http://127.0.0.1:{port}", port, process.pid, folder, process=process)
    watching: asyncio.Task[None] | None = None
    try:
        await _make_ready(server, process)
        watching = asyncio.create_task(_watch(process, memory_bytes))
        yield server
    finally:
        if watching is not None:
            watching.cancel()
        await _end(server._worker)
        await _end(process)


async def _make_ready(server: AttackedServer, process: asyncio.subprocess.Process) -> None:
    """Wait until it answers, make the keys, and let the bystander work in quiet."""
    assert process.stdout is not None
    async with asyncio.timeout(_READY_S):
        line = await process.stdout.readline()
    assert line, server.log()
    ready = json.loads(line)
    token = Path(ready["token_file"]).read_text().strip() if ready["token_file"] else ""
    await _make_keys(server, token, ready["agents"])
    server._worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.system.attacks.bystander",
        str(server.port),
        server.keys[BYSTANDER],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=1 << 24,
    )
    await server._work(_WARM_SENDS // 2, 2)  # what is made once is there afterwards
    server.quiet = await server._work(_WARM_SENDS, 2)
    assert not server.quiet.failures, server.quiet.failures
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the high-water mark begins anew
    server.quiet_bytes = _status(server.pid, "VmRSS")


async def _make_keys(server: AttackedServer, token: str, agents: list[str]) -> None:
    """Keys of an operator and of two users, who may name any of the agents."""
    bearer = token
    async with httpx2.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as http:
        for principal, role in (("admin", "admin"), (ATTACKER, "user"), (BYSTANDER, "user")):
            headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
            wanted = {"principal": principal, "role": role} | ({"agents": agents} if role == "user" else {})
            answer = await http.post("/v1/keys", json=wanted, headers=headers)
            assert answer.status_code == 201, answer.text
            server.keys[principal] = answer.json()["secret"]
            bearer = server.keys["admin"]


async def _watch(process: asyncio.subprocess.Process, limit_bytes: int) -> None:
    """Kill the server once it has more memory than it may, as the kernel would."""
    while process.returncode is None:
        if _status(process.pid, "VmRSS") > limit_bytes:
            process.kill()
            return
        await asyncio.sleep(_LOOK_S)


async def _end(process: asyncio.subprocess.Process | None) -> None:
    """End a process by SIGTERM, and by SIGKILL if that takes too long."""
    if process is None or process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise


def _status(pid: int, name: str) -> int:
    """A figure of ``/proc/<pid>/status`` in bytes; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server with default settings that finds the agents of tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    path = os.pathsep.join(filter(None, (str(_ROOT), kept.get("PYTHONPATH", ""))))
    return {**kept, "PYTHONPATH": path, **more}
