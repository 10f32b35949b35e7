"""Hosts on one PostgreSQL database: runs against bare psycopg, interrupts between hosts, and heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import uvloop
from msgspec.structs import replace

import holdfast
from benchmarks.bench_store import SESSIONS, request_of
from benchmarks.rows import Row, growth_rows, print_rows
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.protocol.events import TextDelta, encode_event
from holdfast.protocol.messages import Entry
from holdfast.settings import Settings
from holdfast.storage.port import RunCommit, Store
from holdfast.storage.postgres import PostgresStore
from holdfast.storage.postgres.database import PostgresDatabase, statement
from holdfast.storage.postgres.write_connection import PostgresWriteConnection

RUNS = 20
"""Runs of each session in a turn."""
TURNS = 5
INTERRUPTS = 300
NODES = (1, 10, 100)
_Statement = tuple[str, Sequence[object]]
_Transaction = list[_Statement]


@contextlib.contextmanager
def _server(*, durable: bool) -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        server = PostgresServer(Path(folder), durable=durable)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _new_database(server: PostgresServer, name: str) -> str:
    """The URL of a new database with the tables of a store."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    asyncio.run(_prepare(server.url(name)))
    return server.url(name)


async def _prepare(url: str) -> None:
    store = PostgresStore(url)
    await store.open(node_id="n", at=time.time())
    await store.close()


async def _cycle(store: Store, key: str) -> None:
    """A whole run: message and claim, an append, and the end."""
    result = await store.send(replace(request_of(key), principal=key))
    assert result.claim is not None
    lease = result.claim.lease
    await store.append(lease, [encode_event(TextDelta(run_id=lease.run_id, text="hi", at=1.0))])
    entries = [Entry(role="user", content="hello"), Entry(role="assistant", content="hi")]
    await store.commit_run(RunCommit(lease=lease, status="completed", at=time.time(), text="hi", entries=entries))


async def _holdfast(url: str) -> float:
    """Seconds per run, with one task for each session."""
    store = PostgresStore(url)
    await store.open(node_id="n", at=time.time())

    async def one(key: str, count: int) -> None:
        for _ in range(count):
            await _cycle(store, key)

    await asyncio.gather(*(one(f"k{n}", 2) for n in range(SESSIONS)))
    start = time.perf_counter()
    await asyncio.gather(*(one(f"k{n}", RUNS) for n in range(SESSIONS)))
    took_s = time.perf_counter() - start
    await store.close()
    return took_s / (RUNS * SESSIONS)


async def _recorded(url: str) -> list[list[_Transaction]]:
    """The transactions of the same runs, for each session, as the store writes them one at a time."""
    transactions: list[_Transaction] = []
    begin, execute = PostgresWriteConnection.begin, PostgresDatabase.execute

    def begun(self: PostgresWriteConnection, verbs: Sequence[str]) -> None:
        transactions.append([])
        begin(self, verbs)

    def executed(self: PostgresDatabase, text: str, parameters: Sequence[object] = ()) -> Any:
        if self.epoch:  # of the connection that writes
            transactions[-1].append((text, parameters))
        return execute(self, text, parameters)

    store = PostgresStore(url)
    await store.open(node_id="n", at=time.time())
    found = []
    with (
        mock.patch.object(PostgresWriteConnection, "begin", begun),
        mock.patch.object(PostgresDatabase, "execute", executed),
    ):
        for n in range(SESSIONS):
            transactions = []
            for _ in range(RUNS):
                await _cycle(store, f"k{n}")
            found.append([one for one in transactions if one])
    await store.close()
    return found


async def _bare(url: str, work: list[list[_Transaction]], *, pipelined: bool) -> float:
    """Seconds per run of coroutines that issue the same statements, with a connection for each session."""
    connections = [await psycopg.AsyncConnection.connect(url, autocommit=True) for _ in work]

    async def one(connection: psycopg.AsyncConnection[Any], transactions: list[_Transaction]) -> None:
        for transaction in transactions:
            async with contextlib.AsyncExitStack() as opened:
                if pipelined:
                    await opened.enter_async_context(connection.pipeline())
                await opened.enter_async_context(connection.transaction())
                for text, parameters in transaction:
                    await connection.execute(text, parameters, binary=True)

    start = time.perf_counter()
    await asyncio.gather(*map(one, connections, work))
    took_s = time.perf_counter() - start
    for connection in connections:
        await connection.close()
    return took_s / (RUNS * SESSIONS)


def run_rows() -> list[Row]:
    """Runs per second of the store against coroutines that issue the statements of these runs themselves."""
    ours, bare, pipelined = [], [], []
    with _server(durable=True) as server:
        for turn in range(TURNS):
            work = uvloop.run(_recorded(_new_database(server, f"recorded{turn}")))
            bare.append(uvloop.run(_bare(_new_database(server, f"bare{turn}"), work, pipelined=False)))
            ours.append(uvloop.run(_holdfast(_new_database(server, f"ours{turn}"))))
            pipelined.append(uvloop.run(_bare(_new_database(server, f"pipelined{turn}"), work, pipelined=True)))
    ratio = statistics.median(b / o for b, o in zip(bare, ours, strict=True))
    other = statistics.median(b / o for b, o in zip(pipelined, ours, strict=True))
    return [
        Row(
            name=f"runs on PostgreSQL, {SESSIONS} sessions / bare psycopg coroutines",
            value=ratio,
            unit="x",
            target=">= 0.8",
            met=ratio >= 0.8,
            note=(
                f"{1 / min(ours):.0f} runs/s against {1 / min(bare):.0f}; the same statements without the fence of "
                f"the node; a principal for each session, fsync on; in pipeline mode {1 / min(pipelined):.0f}, and the "
                f"ratio {other:.2f}; median of {TURNS}"
            ),
        )
    ]


@holdfast.agent(name="waits")
async def _waits(run: holdfast.Run) -> None:
    await asyncio.Event().wait()


async def _interrupts(url: str) -> list[float]:
    """Seconds from an interrupt at one host to the receipt of the run, which another host has."""
    settings = Settings(principal_rate_per_s=0.0)
    times = []
    async with (
        holdfast.Host(agents=[_waits], store=PostgresStore(url), settings=settings) as holder,
        holdfast.Host(agents=[_waits], store=PostgresStore(url), settings=settings) as other,
    ):
        for n in range(INTERRUPTS):
            await holder.session(f"s{n % SESSIONS}").send("wait")
            began = time.perf_counter()
            receipt = await other.session(f"s{n % SESSIONS}").interrupt("enough")
            times.append(time.perf_counter() - began)
            assert (receipt.outcome, receipt.proof) == ("gone", "observed")
    return times


def interrupt_rows() -> list[Row]:
    """An interrupt at a host that does not have the run."""
    with _server(durable=True) as server:
        times = sorted(uvloop.run(_interrupts(server.url()))[SESSIONS:])
    p50, p99 = times[len(times) // 2] * 1e3, times[int(len(times) * 0.99)] * 1e3
    note = f"from the call to the receipt, signals by NOTIFY, fsync on, {len(times)} runs"
    return [
        Row(name="interrupt at another host, p50", value=p50, unit="ms", target="<= 20", met=p50 <= 20, note=note),
        Row(name="interrupt at another host, p99", value=p99, unit="ms", target="<= 150", met=p99 <= 150, note=note),
    ]


def _heartbeats_us(url: str, nodes: int, rounds: int = 20) -> tuple[float, float]:
    """Microseconds for one heartbeat of each node, and for one ``SELECT 1`` on each of the same connections."""
    with contextlib.ExitStack() as opened:
        beating = []
        for n in range(nodes):
            connection = opened.enter_context(psycopg.connect(url, autocommit=True))
            ((epoch,),) = connection.execute(statement("register_node"), (f"node{n}", 0.0, 10.0, None)).fetchall()
            beating.append((connection, epoch))
        beats, floors = [], []
        for _ in range(rounds):
            start = time.perf_counter()
            for connection, epoch in beating:
                connection.execute(statement("heartbeat"), (10.0, epoch))
            between = time.perf_counter()
            for connection, _ in beating:
                connection.execute("SELECT 1")
            beats.append(between - start)
            floors.append(time.perf_counter() - between)
        return statistics.median(beats) * 1e6, statistics.median(floors) * 1e6


def heartbeat_rows() -> list[Row]:
    """The heartbeats of a cluster: each node writes one row, however many sessions it holds."""
    points, ratios = [], []
    with _server(durable=False) as server:
        for nodes in NODES:
            beat, floor = _heartbeats_us(_new_database(server, f"beats{nodes}"), nodes)
            points.append((nodes, beat))
            ratios.append((nodes, beat / floor))
    return [
        *growth_rows(
            "one heartbeat of each node",
            points,
            unit="us",
            of="nodes",
            exponent_at_most=1.1,
            note="one after another, each on its own connection; fsync off",
        ),
        *growth_rows(
            "a heartbeat / SELECT 1 on the same connection",
            ratios,
            unit="x",
            of="nodes",
            exponent_at_most=0.1,
            note="in the same turns; a ratio that does not grow means that the cost of heartbeats is O(nodes)",
        ),
    ]


def rows() -> list[Row]:
    """All rows of this benchmark."""
    return [*run_rows(), *interrupt_rows(), *heartbeat_rows()]


if __name__ == "__main__":
    print_rows(rows())
