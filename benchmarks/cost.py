"""CPU time of a durable run over HTTP, of a stop and of work in process, this tree against another checkout.

``python -m benchmarks.cost /path/to/other`` starts a server of each tree, lets them take turns, and prints the median
of the ratios with its interval; then it does the same with `benchmarks.workloads` (``--only`` takes one of the two).
The other checkout needs an environment of its own in ``.venv``, or what it needs is installed here. CPU time is that
of the server's process, in user and system mode, by the scheduler's own account in nanoseconds. Each pair is four
short turns, this tree, the other, the other, this tree, and the next one the other way round: a load that grows or
falls meanwhile falls on both alike. ``--self`` compares the other checkout with itself: the interval has to hold 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row, print_rows
from benchmarks.workloads import WORKLOADS

__all__ = ["compared", "in_process", "median_interval"]

ROOT = Path(__file__).parent.parent
SESSIONS = 20
RUNS, STOPS = 100, 60
"""Operations of a turn."""
PAIRS = 30
_WARM = 6
"""Turns of each tree before it is measured."""
TARGET = 1.03
_CPUCLOCK_SCHED = 2
"""With a pid, the name of a process's CPU clock in Linux (``man 3 clock_getcpuclockid``)."""
_MAIN = "from holdfast.cli import main; main()"
_AGENTS = """\
import asyncio
import holdfast


@holdfast.agent(name="noop")
async def noop(run):
    return "ok"


@holdfast.agent(name="waits")
async def waits(run):
    await asyncio.sleep(1000)
"""


@dataclass(frozen=True)
class _Server:
    port: int
    key: str
    pid: int

    def cpu_s(self) -> float:
        """User and system time of the process so far."""
        return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)


@contextlib.contextmanager
def _served(tree: Path, folder: Path) -> Iterator[_Server]:
    """``holdfast serve`` of that tree, durable, in an empty folder."""
    own = tree / ".venv" / "bin" / "python"
    python = str(own if own.exists() else sys.executable)
    agents, home = folder / "agents", folder / "home"
    agents.mkdir(parents=True)
    home.mkdir()
    (agents / "cost_agents.py").write_text(_AGENTS, "utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")} | {
        "HOLDFAST_STORE": f"sqlite:///{home / 'cost.db'}",
        "HOLDFAST_PRINCIPAL_RATE_PER_S": "0",
        "HOLDFAST_LOG_LEVEL": "error",
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(agents))),
    }
    made = subprocess.run(
        [python, "-c", _MAIN, "keys", "create", "bench", "--role", "admin", "--json"],
        cwd=home,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    command = [python, "-c", _MAIN, "serve", "cost_agents:noop", "cost_agents:waits", "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
            yield _Server(port, json.loads(made.stdout)["secret"], process.pid)
        finally:
            process.terminate()


class _Connection:
    """One kept connection. Of one loop."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._server.port)

    async def post(self, path: str, body: dict[str, object]) -> None:
        """Send and read the whole answer. Raises `RuntimeError` when it is none of 2xx."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {self._server.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if length:
            await self._reader.readexactly(int(length))
        else:
            await self._reader.readuntil(b"\r\n0\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(answer.decode())

    def close(self) -> None:
        self._writer.close()


async def _run(connection: _Connection, session: str) -> None:
    await connection.post(f"/v1/sessions/{session}/messages?wait=30", {"content": "x", "agent": "noop"})


async def _stop(connection: _Connection, session: str) -> None:
    await connection.post(f"/v1/sessions/{session}/messages", {"content": "x", "agent": "waits"})
    await connection.post(f"/v1/sessions/{session}/interrupt", {"reason": "measured"})


async def _cpu_s(server: _Server, act: Callable[[_Connection, str], Awaitable[None]], count: int, kind: str) -> float:
    """CPU seconds of the server for one act, over some sessions at once."""

    async def one(number: int) -> None:
        connection = _Connection(server)
        await connection.open()
        for _ in range(count // SESSIONS):
            await act(connection, f"{kind}-{number}")
        connection.close()

    before = server.cpu_s()
    await asyncio.gather(*(one(number) for number in range(SESSIONS)))
    return (server.cpu_s() - before) / (count // SESSIONS * SESSIONS)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of order statistics that holds the median with at least 95 %."""
    ordered, count = sorted(values), len(values)
    outside, cut = 2 * 0.5**count, 0
    while cut + 1 < count // 2 and outside + 2 * math.comb(count, cut + 1) * 0.5**count <= 0.05:
        cut += 1
        outside += 2 * math.comb(count, cut) * 0.5**count
    return ordered[cut], ordered[-1 - cut]


async def _ratios(here: _Server, there: _Server, pairs: int) -> list[Row]:
    rows = []
    for kind, act, count in (("durable HTTP run", _run, RUNS), ("send and stop of a run", _stop, STOPS)):
        for server in (here, there):
            for _ in range(_WARM):
                await _cpu_s(server, act, count, kind.split()[0])  # what is made once is there afterwards
        ratios, own = [], []
        for pair in range(pairs):
            taken = {here: 0.0, there: 0.0}
            for server in (here, there, there, here) if pair % 2 else (there, here, here, there):
                taken[server] += await _cpu_s(server, act, count, kind.split()[0])
            ratios.append(taken[here] / taken[there])
            own.append(taken[here] / 2)
        rows.append(_row(kind, ratios, f"{statistics.median(own) * 1e6:.0f} µs CPU here"))
    return rows


def _row(name: str, ratios: Sequence[float], note: str) -> Row:
    low, high = median_interval(ratios)
    median = statistics.median(ratios)
    note = f"interval {low:.3f}–{high:.3f}, {len(ratios)} pairs; {note}"
    return Row(name=name, value=median, unit="x", target=f"<= {TARGET:g}", met=median <= TARGET, note=note)


@contextlib.contextmanager
def _working(tree: Path) -> Iterator[Callable[[str], float]]:
    """The workloads of `benchmarks.workloads` in a process of that tree: a function from a name to microseconds."""
    own = tree / ".venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    with subprocess.Popen(
        [str(own if own.exists() else sys.executable), str(ROOT / "benchmarks" / "workloads.py")],
        env=environment | {"PYTHONPATH": str(tree / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        asked, answered = process.stdin, process.stdout
        assert asked is not None
        assert answered is not None

        def measure(name: str) -> float:
            print(name, file=asked, flush=True)
            return float(answered.readline())

        try:
            yield measure
        finally:
            asked.close()


def in_process(this: Path, other: Path, *, pairs: int) -> list[Row]:
    """The ratios of the first tree's CPU time to the other's for work in process."""
    rows = []
    with _working(this.resolve()) as here, _working(other.resolve()) as there:
        for name in WORKLOADS:
            for measure in (here, there):
                measure(name)
            ratios, own = [], []
            for pair in range(pairs):
                taken = {here: 0.0, there: 0.0}
                for measure in (here, there, there, here) if pair % 2 else (there, here, here, there):
                    taken[measure] += measure(name)
                ratios.append(taken[here] / taken[there])
                own.append(taken[here] / 2)
            rows.append(_row(name, ratios, f"{statistics.median(own):.3g} µs CPU here"))
    return rows


def compared(this: Path, other: Path, *, pairs: int = PAIRS) -> list[Row]:
    """The ratios of the first tree's CPU time to the other's."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-cost-") as name,
        _served(this.resolve(), Path(name) / "here") as here,
        _served(other.resolve(), Path(name) / "there") as there,
    ):
        return asyncio.run(_ratios(here, there, pairs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="how often they take turns, at least 10")
    parser.add_argument("--self", action="store_true", help="the other checkout against itself")
    parser.add_argument("--only", choices=("server", "process"), help="measure one half only")
    asked = parser.parse_args()
    this = asked.other if asked.self else ROOT
    if asked.only != "process":
        print_rows(compared(this, asked.other, pairs=asked.pairs))
    if asked.only != "server":
        print_rows(in_process(this, asked.other, pairs=asked.pairs))
