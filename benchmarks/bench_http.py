"""HTTP: durable runs per second against a bare ASGI echo, first event, idle readers, streamed chunks.

The server is ``holdfast serve`` in a process of its own, on SQLite with ``synchronous=FULL``; the load comes from raw
sockets in this process, so that the client costs little. The echo is a bare ASGI application on the same uvicorn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import holdfast
from benchmarks.disk import sync_latency_s
from benchmarks.load import load, request
from benchmarks.peer_langgraph import PeerFigures, PeerMissing, measure
from benchmarks.rows import Row, print_rows

__all__ = ["rows"]

ROOT = Path(__file__).parent.parent
SESSIONS = 50
RUNS_S = 4.0
ROUNDS = 3
"""Holdfast and the echo take turns, so that what else the machine does hits both."""
READERS = 10_000
CHUNKS = 60_000
PACED_CLIENTS = 100
PACED_PER_S = 50
PACED_S = 6.0


# ── What the servers run ─────────────────────────────────────────────────────────────────────────────────────────────


@holdfast.agent(name="noop")
async def noop(run: holdfast.Run) -> str:
    """Answer at once."""
    return "ok"


@holdfast.agent(name="chatter")
async def chatter(run: holdfast.Run) -> None:
    """Emit as many chunks as the message asks for, as fast as they are taken."""
    for _ in range(int(run.text)):
        await run.emit("chunk ")


@holdfast.agent(name="paced")
async def paced(run: holdfast.Run) -> None:
    """Emit 50 chunks a second for as many seconds as the message says."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(int(float(run.text) * PACED_PER_S)):
        await asyncio.sleep(max(0.0, began + number / PACED_PER_S - loop.time()))
        await run.emit("chunk ")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """A bare ASGI application: it gives back the body it gets."""
    body = (await receive())["body"]
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(frozen=True)
class Server:
    """A server process and where it listens."""

    port: int
    process: psutil.Process


@contextlib.contextmanager
def holdfast_server(folder: str) -> Iterator[Server]:
    """``holdfast serve`` with the agents above, on a new SQLite file in `folder`."""
    environment = {
        **os.environ,
        "HOLDFAST_PRINCIPAL_RATE_PER_S": "0",
        "HOLDFAST_PRINCIPAL_STREAMS": str(READERS * 2),
        "HOLDFAST_LOG_LEVEL": "error",
        "PYTHONPATH": str(ROOT),
    }
    agents = [f"benchmarks.bench_http:{name}" for name in ("noop", "chatter", "paced")]
    command = [sys.executable, "-c", "from holdfast.cli import main; main()", "serve", *agents, "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline())
            yield Server(int(ready["url"].rpartition(":")[2]), psutil.Process(process.pid))
        finally:
            process.terminate()


@contextlib.contextmanager
def echo_server() -> Iterator[Server]:
    """The bare echo on uvicorn, set up as Holdfast's."""
    program = (
        "import asyncio, socket, uvicorn, uvloop\n"
        "from benchmarks.bench_http import echo\n"
        "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "c = uvicorn.Config(echo, http='httptools', lifespan='off', log_config=None, access_log=False,"
        " server_header=False, loop='none')\n"
        "asyncio.Runner(loop_factory=uvloop.new_event_loop).run(uvicorn.Server(c).serve(sockets=[s]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield Server(port, psutil.Process(process.pid))
        finally:
            process.terminate()


# ── The load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def sends(count: int, *, agent: str = "noop") -> list[bytes]:
    """One send with a wait for each of `count` sessions."""
    body = json.dumps({"content": "x", "agent": agent}).encode()
    return [request("POST", f"/v1/sessions/s{number}/messages?wait=30", body) for number in range(count)]


async def post(port: int, key: str, content: str, agent: str) -> dict[str, Any]:
    """Send one message and return the receipt."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"content": content, "agent": agent}).encode()
    writer.write(request("POST", f"/v1/sessions/{key}/messages", body))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    receipt: dict[str, Any] = json.loads(await reader.readexactly(length))
    writer.close()
    return receipt


_PART_BREAK = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")
_KEPT_BYTES = 64
"""More than an event's first line with a break in it."""


async def count_chunks(port: int, path: str) -> tuple[int, float]:
    """Read a stream to its end: how many text deltas it had, and how long that took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(request("GET", path))
    chunks, began, rest = 0, time.perf_counter(), b""
    needle = b"event: text.delta"
    while data := await reader.read(1 << 20):
        data = rest + data
        rest = data[-_KEPT_BYTES:]
        # An event may lie in two parts of the body. What is kept is counted with the next data.
        chunks += _PART_BREAK.sub(b"", data).count(needle) - _PART_BREAK.sub(b"", rest).count(needle)
        if data.endswith(b"0\r\n\r\n"):
            chunks += _PART_BREAK.sub(b"", rest).count(needle)
            break
    writer.close()
    return chunks, time.perf_counter() - began


# ── The figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def peer() -> PeerFigures | None:
    """The peer's figures, or None with the reason printed."""
    try:
        return measure(sessions=SESSIONS, seconds=RUNS_S)
    except PeerMissing as missing:
        print(f"skipped: the rows against langgraph dev, because {missing}", file=sys.stderr)
        return None


def peer_rows(rate: float, first_s: float, other: PeerFigures, sync_s: float) -> list[Row]:
    """Durable Holdfast against the peer in memory."""
    least = 20.0 if sync_s <= 0.002 else 4.0
    where = f"fdatasync {sync_s * 1000:.2f} ms"
    note = f"langgraph dev {other.version} in memory: {other.runs_per_s:.0f}/s with {other.setting} at a time; {where}"
    ratio, sooner = rate / other.runs_per_s, first_s / other.first_event_s
    return [
        Row(
            name="… against langgraph dev at its best setting",
            value=ratio,
            unit="x",
            target=f">= {least:g}",
            met=ratio >= least,
            note=note,
        ),
        Row(
            name="create → first event against langgraph dev, p50",
            value=sooner,
            unit="x",
            target="<= 0.02",
            met=sooner <= 0.02,
            note=f"its: {other.first_event_s * 1000:.0f} ms; {where}",
        ),
    ]


async def run_rows(server: Server, bare: Server, sync_s: float, other: PeerFigures | None) -> list[Row]:
    """Durable no-op runs at 50 sessions, and the way to the first event at one."""
    runs = sends(SESSIONS)
    rates, ratios, echo_rates, latencies = [], [], [], []
    await load(bare.port, runs, 1.0)
    await load(server.port, runs, 1.0)
    for _ in range(ROUNDS):
        echo_rate, _ = await load(bare.port, runs, RUNS_S)
        rate, taken = await load(server.port, runs, RUNS_S)
        rates.append(rate)
        ratios.append(rate / echo_rate)
        echo_rates.append(echo_rate)
        latencies += taken
    rate, ratio = statistics.median(rates), statistics.median(ratios)
    where = f"fdatasync {sync_s * 1000:.2f} ms"
    firsts = []
    for number in range(200):
        began = time.perf_counter()
        receipt = await post(server.port, f"first{number}", "x", "noop")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        path = f"/v1/sessions/first{number}/events?follow={receipt['message_id']}"
        writer.write(request("GET", path))
        await reader.readuntil(b"event: ")
        firsts.append(time.perf_counter() - began)
        writer.close()
    first_s = statistics.median(firsts)
    bound_s = 3 * sync_s + 0.003
    return [
        Row(
            name="HTTP, durable no-op runs, 50 sessions",
            value=rate,
            unit="/s",
            note=f"p50 {statistics.median(latencies) * 1000:.1f} ms, {where}",
        ),
        Row(
            name="… against a bare ASGI echo on the same server",
            value=ratio,
            unit="x",
            target=">= 0.2",
            met=ratio >= 0.2,
            note=f"echo {statistics.median(echo_rates):,.0f}/s, in turns; {where}",
        ),
        Row(
            name="create a session → first event, p50",
            value=first_s * 1000,
            unit="ms",
            target=f"<= {bound_s * 1000:.2f}",
            met=first_s <= bound_s,
            note=f"3 commits + 3 ms; {where}",
        ),
        *(peer_rows(rate, first_s, other, sync_s) if other is not None else []),
    ]


async def chunk_rows(server: Server, sync_s: float) -> list[Row]:
    """One reader of an unpaced stream, and 100 readers of paced ones."""
    began = time.perf_counter()
    receipt = await post(server.port, "chatter", str(CHUNKS), "chatter")
    path = f"/v1/sessions/chatter/events?after={receipt['cursor']}&follow={receipt['message_id']}"
    chunks, _ = await count_chunks(server.port, path)
    rate = chunks / (time.perf_counter() - began)
    receipts = [await post(server.port, f"paced{n}", str(PACED_S), "paced") for n in range(PACED_CLIENTS)]
    readers = [
        asyncio.create_task(
            count_chunks(
                server.port,
                f"/v1/sessions/paced{n}/events?after={receipt['cursor']}&follow={receipt['message_id']}",
            )
        )
        for n, receipt in enumerate(receipts)
    ]
    await asyncio.sleep(1.0)
    before, began = sum(server.process.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(PACED_S - 2.0)
    share = (sum(server.process.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    counts = [count for count, _ in await asyncio.gather(*readers)]
    expected = int(PACED_S * PACED_PER_S)
    return [
        Row(
            name="one SSE client, chunks",
            value=rate,
            unit="/s",
            target=">= 30000",
            met=rate >= 30_000 and chunks == CHUNKS,
            note=f"{chunks} of {CHUNKS} read, all stored; fdatasync {sync_s * 1000:.2f} ms",
        ),
        Row(
            name=f"{PACED_CLIENTS} SSE clients at {PACED_PER_S} chunks/s, CPU",
            value=share * 100,
            unit="%",
            target="<= 30",
            met=share <= 0.30 and min(counts) == expected,
            note=f"{min(counts)} to {max(counts)} of {expected} chunks each, stored; fdatasync {sync_s * 1000:.2f} ms",
        ),
    ]


async def idle_rows(server: Server) -> list[Row]:
    """Memory of idle SSE readers, each of a session of its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    readers = min(READERS, (hard - 4096) // 2 - 200)  # a principal has half of the connections
    await asyncio.gather(*(post(server.port, f"idle{n % 1000}", "x", "noop") for n in range(1000)))
    await asyncio.sleep(1.0)
    before = server.process.memory_info().rss
    writers = []
    for n in range(readers):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request("GET", f"/v1/sessions/idle{n % 1000}/events"))
        await reader.readuntil(b"event: ")
        writers.append(writer)
    each = (server.process.memory_info().rss - before) / readers
    for writer in writers:
        writer.close()
    return [
        Row(
            name=f"{readers:,} idle SSE readers, memory each",
            value=each / 1000,
            unit="KB",
            target="<= 20",
            met=each <= 20_000,
            note="resident, 1,000 sessions",
        )
    ]


def rows() -> list[Row]:
    """All figures of this module."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        sync_s = sync_latency_s()
        other = peer()
        with echo_server() as bare, holdfast_server(folder) as server:
            found = asyncio.run(run_rows(server, bare, sync_s, other))
            found += asyncio.run(chunk_rows(server, sync_s))
        with holdfast_server(folder) as server:
            found += asyncio.run(idle_rows(server))
    return found


if __name__ == "__main__":
    print_rows(rows())
