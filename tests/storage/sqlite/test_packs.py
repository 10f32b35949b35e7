"""The rows of a stream on disk: merged once, killed at any point of it, and numbered in the order of the commits."""

import asyncio
import itertools
import os
import signal
import sqlite3
import time
import zlib
from contextlib import closing

import pytest

from holdfast import failpoints
from holdfast.protocol.events import Stored, TextDelta, ToolStarted, encode_event
from holdfast.storage import SqliteStore
from holdfast.storage.backend import PruneTimes
from holdfast.storage.event_packs import merge_packs, pack_events, unpack_events
from holdfast.storage.port import RunCommit, Send
from holdfast.storage.sql.merger import EventsDropped
from tests.storage.audit import audit_file

PIECES = 20


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(bounded())


async def begin(path, at=100.0):
    store = SqliteStore(str(path))
    await store.open(node_id="n", at=at)
    return store


async def start(store, key, message_id):
    sent = await store.send(
        Send(
            principal="p", key=key, agent=None, default_agent="demo", message_id=message_id, content="x",
            policy="queue", at=101.0, run_id=f"r_{message_id}",
        )
    )  # fmt: skip
    return sent.claim


def piece(claim, number):
    return encode_event(TextDelta(run_id=claim.lease.run_id, text=f"piece {number} ", at=1.7e9 + number / 49))


async def stream(store, claim, first, last):
    for number in range(first, last + 1):
        yield await store.append(claim.lease, [piece(claim, number)], nth=number)


def rows(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(
            "SELECT commit_no, session, first_seq, last_seq, body FROM event ORDER BY rowid"
        ).fetchall()


async def a_merge(path, shown, point, nth):
    """Show what is appended, then die at a failpoint of the transactions that merge it."""
    store = await begin(path)
    claims = [await start(store, key, key) for key in ("k", "l")]
    for number in range(1, PIECES + 1):
        for claim in claims:
            appended = await store.append(claim.lease, [piece(claim, number)], nth=number)
            if claim is claims[0]:
                os.write(shown, appended.events[0].body + b"\n")
    await store.commit_run(RunCommit(lease=claims[0].lease, status="completed", at=102.0, text="done"))
    with failpoints.arm(point, error=None, nth=nth):
        await store.close()
    os._exit(0)


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("before_write", 1),
        ("before_write", 2),
        ("between_writes", 1),
        ("between_writes", 2),
        ("before_commit", 1),
        ("before_commit", 2),
        ("after_commit", 2),
    ],
)
def test_a_kill_while_rows_are_merged_loses_nothing_that_a_reader_saw(tmp_path, point, nth):
    path, answers = tmp_path / "store.db", tmp_path / "shown"
    pid = os.fork()
    if pid == 0:
        try:
            shown = os.open(answers, os.O_WRONLY | os.O_CREAT)
            asyncio.run(a_merge(path, shown, f"sqlite.merge.{point}", nth))
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == signal.SIGKILL, "the merge did not pass this point"

    async def main():
        store = await begin(path, 200.0)
        log = await store.read_events(1, after=0, limit=1000)
        await store.close()
        return log

    log = run(main())
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    bodies = [event.body for event in log if event.kind == "text.delta"]
    assert bodies == answers.read_bytes().splitlines()
    assert len(bodies) == PIECES
    assert "run.finished" in [event.kind for event in log]


def test_numbers_of_commits_only_grow_in_the_order_of_the_rows_whatever_becomes_of_the_rows(tmp_path):
    path = tmp_path / "store.db"
    highest = 0

    def check():
        nonlocal highest
        found = [number for number, *_ in rows(path)]
        assert found == sorted(set(found)), "in order of rowid, and none twice"
        new = [number for number in found if number > highest]
        highest = max([highest, *found])
        return new

    async def main():
        for opening in range(3):
            store = await begin(path)
            claims = [await start(store, f"k{n}", f"m{opening}{n}") for n in range(3)]
            for number in range(1, PIECES + 1):
                await asyncio.gather(*[store.append(c.lease, [piece(c, number)], nth=number) for c in claims])
            assert check()
            for claim in claims:
                await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=102.0))
                assert check(), "what a run's end writes has a new number"
            await store.prune(events_before=999.0 if opening else 0.0, tombstones_before=0.0, idempotency_before=0.0)
            check()
            await store.close()
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("VACUUM")
            check()

    run(main())


def test_a_stream_is_merged_beside_the_work_and_no_merged_row_is_written_again(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        store = await begin(path)
        claims = [await start(store, f"k{n}", f"m{n}") for n in range(20)]
        for number in range(1, 121):
            await asyncio.gather(*[store.append(c.lease, [piece(c, number)], nth=number) for c in claims])
        while len(merged := [row for row in rows(path) if row[4][:1] == b"\x01"]) < 20:
            await store.info()
        streamed = await store.stored_bytes("p")
        await store.close()
        return merged, streamed

    async def stored_bytes():
        store = await begin(path)
        stored = await store.stored_bytes("p")
        await store.close()
        return stored

    merged, streamed = run(main())
    assert len(merged) == 20, "one for each stream"
    assert set(merged) < set(rows(path))
    assert len(rows(path)) == 40, "the first pass, the rest"
    assert run(stored_bytes()) < streamed
    with closing(sqlite3.connect(path)) as connection:
        counted = "SELECT sum(length(body)) FROM event", "SELECT sum(length(body)) FROM message"
        sizes = [connection.execute(query).fetchone()[0] for query in counted]
    assert run(stored_bytes()) == sum(sizes)


def test_rows_dropped_while_they_are_merged_stay_dropped(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        store = await begin(path)
        claims = [await start(store, key, key) for key in ("k", "l")]
        for claim in claims:
            async for _ in stream(store, claim, 1, PIECES):
                pass
        log = await store.read_events(2, after=0, limit=1000)
        with pytest.raises(EventsDropped):
            await store.backend.write("prune", drop_between_steps)
        assert await store.read_events(2, after=0, limit=1000) == log
        await store.close()

    def drop_between_steps(tables):
        assert tables.merger.step()
        tables.drop("p", "prune_events", 1, 4)
        tables.merger.step()

    run(main())


def test_a_row_of_an_older_form_is_read_beside_a_merged_one():
    deltas = [Stored(n, *encode_event(TextDelta(run_id="r", text=str(n), at=1.5 * n))) for n in range(1, 9)]
    assert unpack_events(8, pack_events(deltas)) == deltas
    merged = merge_packs([pack_events(deltas[:3]), pack_events(deltas[3:])])
    assert merged[:1] == b"\x01"
    assert unpack_events(8, merged) == deltas


@pytest.mark.parametrize(
    "body",
    [
        b'{"kind":"text.delta","at":1.0,"run_id":"r","text":"x"}',
        b'{"kind":"text.delta","at":01.0,"run_id":"r","text":"x"}',
        b'{"kind":"text.delta","at":1.10,"run_id":"r","text":"x"}',
        b'{"kind":"text.delta","at":1e9,"run_id":"r","text":"x"}',
        b'{"kind":"text.delta","at":-1.5,"run_id":"r","text":"x"}',
        b'{"kind":"text.delta","at":1.12345678,"run_id":"r","text":"x"}',
        b'{"kind":"text.delta","at":.5,"run_id":"r","text":"x"}',
        b'{"kind":"text.delta","run_id":"r","text":"x"}',
        b'{"kind":"text.delta","at":1.0,"run_id":"r","text":"x","more":"y"}',
        b'{"kind":"text.delta","at":1.0,"run_id":"r","text":"\\",\\"text\\":\\""}',
        b"{}",
        b"",
    ],
)
def test_every_body_is_kept_to_the_byte(body):
    plain = encode_event(TextDelta(run_id="r", text="between", at=7.25))
    for bodies in ([body] * 30, [body, plain[1]] * 15, [plain[1], plain[1], body] * 10):
        events = [Stored(n, "text.delta", json) for n, json in enumerate(bodies, 1)]
        merged = merge_packs([pack_events([event]) for event in events])
        assert merged[:1] == b"\x01"
        assert unpack_events(len(bodies), merged) == events
    assert zlib.decompress(merged[1:])


def hostile(count):
    """Return JSON of `count` kilobytes, in which a tool's arguments look like the JSON of deltas."""
    arguments = [*[{"at": 1, "text": ""} for _ in range(50 * count)], 1]
    return encode_event(ToolStarted(run_id="r", call_id="c", name="t", arguments=arguments, at=1.5))[1]


def test_json_that_looks_like_many_deltas_is_packed_in_linear_time():
    """All others wait for the pass, so no text of a user may make it slow."""

    def cpu_s(count):
        events = [Stored(n, "tool.started", hostile(count)) for n in range(1, 5)]
        began = time.process_time()
        merged = merge_packs([pack_events([event]) for event in events])
        took_s = time.process_time() - began
        assert unpack_events(4, merged) == events
        return took_s

    assert min(cpu_s(32) for _ in range(5)) < 60 * min(cpu_s(2) for _ in range(5)), "16 times as much"


def appended(tables, first, number, at=100.0):
    row = tables.get(1)
    for n in range(first, first + number):
        body = pack_events([Stored(n, *encode_event(TextDelta(run_id="r", text=str(n), at=2.5 * n)))])
        tables.add_events(row, "r", at, n, n, body)
    tables.flush()


def test_a_pass_stays_small_when_rows_are_added_faster_than_they_are_merged(tmp_path):
    """A pass over all that was added during the last one would take longer each time, without end."""
    path = tmp_path / "store.db"
    added = itertools.count(1_000, 512)

    async def main():
        store = await begin(path)
        await start(store, "k", "m")
        found = await store.backend.write("append", add_and_merge)
        await store.close()
        return found

    def count(tables, only=""):
        return tables._database._connection.execute(f"SELECT count(*) FROM event {only}").fetchone()[0]

    def add_and_merge(tables):
        replaced = []
        for _ in range(140):
            appended(tables, next(added), 512)
            before = count(tables)
            tables.merger.step()
            replaced.append(before - count(tables))
        while tables.merger.is_due:
            tables.merger.step()
        return replaced, count(tables, "WHERE substr(body, 1, 1) <> x'01'")

    replaced, small = run(main())
    assert 0 < max(replaced) <= 2_048
    assert small < 2_100, "the rows that waited are merged when there is time"


def test_a_merged_row_is_as_old_as_its_newest_event_though_the_clock_was_set_back(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        store = await begin(path)
        claim = await start(store, "k", "m")
        await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=102.0))
        await store.backend.write("append", add_and_merge)
        before = {"tombstones_before": 0.0, "idempotency_before": 0.0, "attachments_before": 0.0}
        await store.prune(events_before=150.0, **before)
        log = await store.read_events(1, after=0, limit=1000)
        await store.close()
        return log

    def add_and_merge(tables):
        row = tables.get(1)
        appended(tables, row.next_seq, 8, at=200.0)
        appended(tables, row.next_seq + 8, 8, at=120.0)
        row.next_seq += 16
        while tables.merger.step():
            pass

    log = run(main())
    audit_file(path)
    assert len(log) >= 16, "half of them are not old"


def test_rows_dropped_during_a_pass_spoil_it_for_no_other_session(tmp_path):
    path = tmp_path / "store.db"

    async def main():
        store = await begin(path)
        claims = [await start(store, key, key) for key in ("k", "l", "m")]
        for claim in claims:
            async for _ in stream(store, claim, 1, PIECES):
                pass
        await store.commit_run(RunCommit(lease=claims[0].lease, status="completed", at=102.0))
        logs = [await store.read_events(session, after=0, limit=1000) for session in (2, 3)]
        await store.backend.write("prune", prune_between_steps)
        assert [await store.read_events(session, after=0, limit=1000) for session in (2, 3)] == logs
        assert await store.read_events(1, after=0, limit=1000) == []
        await store.close()

    def prune_between_steps(tables):
        assert tables.merger.step()
        tables.prune(PruneTimes(tombstones=0.0, events=999.0, idempotency=0.0, attachments=0.0), ())
        while tables.merger.step():
            pass

    run(main())
    merged = [(session, first, last) for _, session, first, last, body in rows(path) if body[:1] == b"\x01"]
    assert merged == [(2, 1, PIECES + 2), (3, 1, PIECES + 2)]
