"""Streamed chunks: CPU time of the server for each chunk delivered, against a bare ASGI stream of the same bytes.

The server is ``holdfast serve`` in a process of its own, on SQLite with ``synchronous=FULL``: each chunk is stored
before a reader gets it. The floor is a bare ASGI application on the same uvicorn that writes the same frames at the
same pace. The two take turns. Streams pause after each chunk and never catch up, so that a busy machine makes them
slower, not burstier. Readers connect before the first chunk, so none is read in bulk.

``python -m benchmarks.bench_chunks /path/to/other`` measures the Holdfast of another checkout in the same turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from benchmarks.bench_http import post
from benchmarks.disk import sync_latency_s
from benchmarks.load import request
from benchmarks.rows import Row, print_rows, ratio_row

__all__ = ["rows"]

ROOT = Path(__file__).parent.parent
ROUNDS = 5
WARM = 4_000
MEASURED = 10_000
"""Chunks delivered before, and during, a measurement."""
FRAME = b'id: %d-1\nevent: text.delta\ndata: {"seq":%d,"kind":"text.delta","at":1764000000.123456,"text":"chunk "}\n\n'
NEEDLE = b"event: text.delta"
_CPUCLOCK_SCHED = 2
"""With a pid, the name of a process's CPU clock in Linux (``man 3 clock_getcpuclockid``)."""


@dataclass(frozen=True)
class Shape:
    """How many streams there are, how many readers each has, and how many chunks a second it gets."""

    name: str
    streams: int
    readers: int
    per_s: int
    at_most: float


SHAPES = (
    Shape("chunk stored and read, 100 streams x 50/s", 100, 1, 50, 2.5),
    Shape("chunk stored and read, 1,000 streams x 5/s", 1000, 1, 5, 3.0),
    Shape("chunk delivered, one stream x 5/s, 1,000 readers", 1, 1000, 5, 1.3),
)


# ── What the servers run ─────────────────────────────────────────────────────────────────────────────────────────────


@holdfast.agent(name="dripping")
async def dripping(run: holdfast.Run) -> None:
    """Emit as many chunks a second as the message says, until stopped."""
    pause_s = 1 / int(run.text)
    while True:
        await run.emit("chunk ")
        await asyncio.sleep(pause_s)


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Stream frames of a chunk at the rate that the path gives, until the client disconnects."""
    pause_s = 1 / int(scope["path"][1:])
    gone = asyncio.ensure_future(_disconnected(receive))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    number = 0
    while not gone.done():
        number += 1
        await send({"type": "http.response.body", "body": FRAME % (number, number), "more_body": True})
        await asyncio.sleep(pause_s)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Server:
    """A server process and where it listens."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU time of the process, user and system."""
        return time.clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)


@contextlib.contextmanager
def _started(command: list[str], folder: str, environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """A server's first line and its pid."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")} | environment
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline(), process.pid
        finally:
            process.terminate()


@contextlib.contextmanager
def holdfast_server(tree: Path, folder: str) -> Iterator[Server]:
    """``holdfast serve`` of a checkout, on a new SQLite file in `folder`."""
    environment = {
        "HOLDFAST_PRINCIPAL_RATE_PER_S": "0",
        "HOLDFAST_PRINCIPAL_STREAMS": "4000",
        "HOLDFAST_PRINCIPAL_CONNECTIONS": "4000",
        "HOLDFAST_PRINCIPAL_RUNS": "2000",
        "HOLDFAST_MAX_RUNS": "2000",
        "HOLDFAST_DRAIN_TIMEOUT_S": "1",
        "HOLDFAST_LOG_LEVEL": "error",
        "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(ROOT))),
    }
    command = [
        sys.executable,
        "-c",
        "from holdfast.cli import main; main()",
        "serve",
        "benchmarks.bench_chunks:dripping",
    ]
    with _started([*command, "--port", "0", "--json"], folder, environment) as (line, pid):
        yield Server(int(json.loads(line)["url"].rpartition(":")[2]), pid)


@contextlib.contextmanager
def bare_server(folder: str) -> Iterator[Server]:
    """The bare stream on uvicorn, set up as Holdfast's."""
    program = (
        "import asyncio, socket, uvicorn, uvloop\n"
        "from benchmarks.bench_chunks import bare\n"
        "s = socket.create_server(('127.0.0.1', 0), backlog=2048); print(s.getsockname()[1], flush=True)\n"
        "c = uvicorn.Config(bare, http='httptools', lifespan='off', log_config=None, access_log=False,"
        " server_header=False, loop='none', timeout_graceful_shutdown=1)\n"
        "asyncio.Runner(loop_factory=uvloop.new_event_loop).run(uvicorn.Server(c).serve(sockets=[s]))\n"
    )
    with _started([sys.executable, "-c", program], folder, {"PYTHONPATH": str(ROOT)}) as (line, pid):
        yield Server(int(line), pid)


# ── The load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Counts:
    heads = 0
    chunks = 0

    async def reach(self, chunks: int = 0, *, heads: int = 0) -> None:
        """Wait until so many chunks, or heads of responses, have arrived."""
        while self.chunks < chunks or self.heads < heads:
            await asyncio.sleep(0.02)


class _Reader(asyncio.Protocol):
    """Count the chunks that arrive on one stream."""

    def __init__(self, payload: bytes, counts: _Counts) -> None:
        self._payload = payload
        self._counts = counts
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        if not self._rest:
            self._counts.heads += 1
        data = self._rest + data
        self._counts.chunks += data.count(NEEDLE)
        self._rest = data[-len(NEEDLE) + 1 :]


async def _cost_us(
    server: Server, payloads: list[bytes], begin: Callable[[], Awaitable[object]] | None = None
) -> float:
    """CPU time for a delivered chunk in microseconds, with one reader for each payload; `begin` starts the streams."""
    loop, counts = asyncio.get_running_loop(), _Counts()
    readers = []
    for payload in payloads:
        _, reader = await loop.create_connection(lambda p=payload: _Reader(p, counts), "127.0.0.1", server.port)  # type: ignore[misc]
        readers.append(reader)
    if begin is not None:
        await counts.reach(heads=len(readers))
        await begin()
    await counts.reach(WARM)
    chunks, cpu_s = counts.chunks, server.cpu_s()
    await counts.reach(chunks + MEASURED)
    spent_s, delivered = server.cpu_s() - cpu_s, counts.chunks - chunks
    for reader in readers:
        reader.transport.close()
    return spent_s / delivered * 1e6


async def _stored_us(server: Server, shape: Shape, turn: int) -> float:
    """The cost of a chunk that Holdfast stores and delivers. The runs are stopped afterwards."""
    keys = [f"t{turn}s{number}" for number in range(shape.streams)]
    payloads = [request("GET", f"/v1/sessions/{key}/events") for key in keys]

    async def begin() -> None:
        for key in keys:
            await post(server.port, key, str(shape.per_s), "dripping")

    cost_us = await _cost_us(server, payloads * shape.readers, begin)
    for key in keys:
        await _interrupt(server.port, key)
    return cost_us


async def _interrupt(port: int, key: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("POST", f"/v1/sessions/{key}/interrupt", b"{}"))
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def compare(
    floor: Server, servers: list[Server], shape: Shape, rounds: int
) -> tuple[list[float], list[list[float]]]:
    """Costs of the floor, and of each server, a figure for each round."""
    payloads = [request("GET", f"/{shape.per_s}")] * shape.streams * shape.readers
    bare_us: list[float] = []
    stored_us: list[list[float]] = [[] for _ in servers]
    for turn in range(rounds):
        bare_us.append(await _cost_us(floor, payloads))
        for server, figures in zip(servers, stored_us, strict=True):
            figures.append(await _stored_us(server, shape, turn))
    return bare_us, stored_us


def measure(trees: list[Path], shapes: tuple[Shape, ...] = SHAPES, rounds: int = ROUNDS) -> list[Row]:
    """A row for each shape and checkout."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = []
    sync_s = sync_latency_s()
    for shape in shapes:
        with contextlib.ExitStack() as stack:
            folders = [
                stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-")) for _ in trees
            ]
            floor = stack.enter_context(bare_server(folders[0]))
            servers = [
                stack.enter_context(holdfast_server(tree, folder)) for tree, folder in zip(trees, folders, strict=True)
            ]
            bare_us, stored_us = asyncio.run(compare(floor, servers, shape, rounds))
        for tree, figures in zip(trees, stored_us, strict=True):
            ratio = statistics.median([one / least for one, least in zip(figures, bare_us, strict=True)])
            note = (
                f"{statistics.median(figures):.1f} µs CPU, bare ASGI stream {statistics.median(bare_us):.1f} µs, "
                f"{rounds} turns; fdatasync {sync_s * 1000:.2f} ms"
            )
            name = shape.name if tree == ROOT else f"… of {tree.name}"
            found.append(ratio_row(name, ratio, at_most=shape.at_most, note=note))
    return found


def rows() -> list[Row]:
    """All figures of this module."""
    return measure([ROOT])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, nargs="*", help="other checkouts")
    parser.add_argument("--row", type=int, choices=range(len(SHAPES)), help="measure this row only")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often they take turns")
    asked = parser.parse_args()
    shapes = SHAPES if asked.row is None else (SHAPES[asked.row],)
    print_rows(measure([ROOT, *(tree.resolve() for tree in asked.other)], shapes, asked.rounds))
