"""A stream from one host to ten readers at another, over PostgreSQL and NATS, against bare NATS."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import nats
import uvloop

import holdfast
from benchmarks.rows import Row, print_rows
from holdfast.proof.storm.nats_server import NatsServer
from holdfast.proof.storm.postgres_server import PostgresServer
from holdfast.protocol.events import TextDelta, encode_event
from holdfast.settings import Settings
from holdfast.storage.postgres import PostgresStore

CHUNKS = 20_000
READERS = 10
TURNS = 5
PIECES = 300
"""Pieces of a slow stream, whose delays are measured."""
EVERY_S = 0.02


@holdfast.agent(name="writer")
async def _writer(run: holdfast.Run) -> None:
    for n in range(CHUNKS):
        await run.emit(f"piece {n:06} of it")


@holdfast.agent(name="silent")
async def _silent(run: holdfast.Run) -> None:
    pass


@holdfast.agent(name="slow_writer")
async def _slow_writer(run: holdfast.Run) -> None:
    for _ in range(PIECES):
        await run.emit(f"{time.perf_counter()}")
        await asyncio.sleep(EVERY_S)


@contextlib.asynccontextmanager
async def _hosts(url: str, nats_url: str) -> AsyncIterator[Sequence[holdfast.Host]]:
    """Two hosts that hear each other."""
    settings = Settings(nats=nats_url)
    agents = [_silent, _writer, _slow_writer]
    async with (
        holdfast.Host(agents=agents, store=PostgresStore(url, nats=nats_url), settings=settings) as one,
        holdfast.Host(agents=agents, store=PostgresStore(url, nats=nats_url), settings=settings) as two,
    ):
        for host in (one, two):
            assert host.store.cluster is not None
            while host.store.cluster.signals.problem is not None:
                await asyncio.sleep(0.01)
        yield one, two


async def _streamed(url: str, nats_url: str, key: str) -> float:
    """Chunks per second to each of the readers."""
    async with _hosts(url, nats_url) as (one, two):

        async def read() -> int:
            count = 0
            async for event in two.session(key).events():
                count += event.kind == "text.delta"
                if count == CHUNKS:
                    break
            return count

        await one.session(key).ask("begin", agent="silent")
        readers = [asyncio.ensure_future(read()) for _ in range(READERS)]
        await asyncio.sleep(0.2)
        start = time.perf_counter()
        await one.session(key).send("go", agent="writer")
        counts = await asyncio.gather(*readers)
        took_s = time.perf_counter() - start
        assert counts == [CHUNKS] * READERS
        return CHUNKS / took_s


async def _bare(nats_url: str) -> float:
    """Chunks per second to each of the readers of a bare NATS subject, with a message for each chunk."""
    publisher = await nats.connect(nats_url)
    clients = [await nats.connect(nats_url) for _ in range(READERS)]
    done: list[asyncio.Future[None]] = []

    async def read(client: Any) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.append(future)
        count = 0

        async def on_message(_: Any) -> None:
            nonlocal count
            count += 1
            if count == CHUNKS:
                future.set_result(None)

        await client.subscribe("chunks", cb=on_message)
        await client.flush()

    for client in clients:
        await read(client)
    bodies = [
        encode_event(TextDelta(run_id="r_" + "0" * 27, text=f"piece {n:06} of it", at=time.time()))[1]
        for n in range(CHUNKS)
    ]
    start = time.perf_counter()
    for body in bodies:
        await publisher.publish("chunks", body)
    await publisher.flush()
    await asyncio.gather(*done)
    took_s = time.perf_counter() - start
    for client in (publisher, *clients):
        await client.close()
    return CHUNKS / took_s


async def _delays(url: str, nats_url: str, key: str) -> list[float]:
    """Seconds from each piece at one host to a reader at another."""
    delays = []
    async with _hosts(url, nats_url) as (one, two):
        await one.session(key).send("go", agent="slow_writer")
        async for event in two.session(key).events():
            if isinstance(event, TextDelta):
                delays.append(time.perf_counter() - float(event.text))
            elif event.kind == "run.finished":
                break
    return sorted(delays[PIECES // 10 :])


def rows() -> list[Row]:
    """All rows of this benchmark."""
    ours, bare = [], []
    with tempfile.TemporaryDirectory(prefix="pg-") as folder, NatsServer() as nats_server:
        postgres = PostgresServer(Path(folder), durable=True)
        postgres.start()
        try:
            for turn in range(TURNS):
                bare.append(uvloop.run(_bare(nats_server.url())))
                ours.append(uvloop.run(_streamed(postgres.url(), nats_server.url(), f"s{turn}")))
            over_nats = uvloop.run(_delays(postgres.url(), nats_server.url(), "delays"))
            over_postgres = uvloop.run(_delays(postgres.url(), "", "delays2"))
        finally:
            postgres.stop()
    ratio = statistics.median(o / b for o, b in zip(ours, bare, strict=True))
    p50, p99 = (over_nats[int(len(over_nats) * part)] * 1e3 for part in (0.5, 0.99))
    other = over_postgres[len(over_postgres) // 2] * 1e3
    note = f"one stream of {PIECES} pieces, one every {EVERY_S * 1e3:.0f} ms; fsync on"
    return [
        Row(
            name=f"stream to {READERS} readers at another host / bare NATS",
            value=ratio,
            unit="x",
            target=">= 0.5",
            met=ratio >= 0.5,
            note=(
                f"{statistics.median(ours):,.0f} stored chunks/s to each reader against {statistics.median(bare):,.0f} "
                f"messages/s to {READERS} clients of nats-py, which stores none; all clients in one process, fsync on; "
                f"median of {TURNS}"
            ),
        ),
        Row(name="piece at a reader at another host, p50", value=p50, unit="ms", note=f"{note}; by NOTIFY {other:.1f}"),
        Row(name="piece at a reader at another host, p99", value=p99, unit="ms", note=note),
    ]


if __name__ == "__main__":
    print_rows(rows())
