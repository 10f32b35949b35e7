"""Many nodes on one PostgreSQL: one run at a time, no lost and no doubled write, whoever waits for whom.

A node here is a store of its own, with its own connections; a transaction that is held open is done by hand.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psycopg
import pytest

from holdfast import failpoints
from holdfast.errors import SessionBusy, StaleFence, StoreUnreachable
from holdfast.protocol.events import TextDelta, encode_event
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import InterruptRequest, RunCommit, Send
from holdfast.storage.postgres import PostgresStore
from holdfast.storage.postgres.database import statement

DELTA = [encode_event(TextDelta(run_id="r", text="x"))]


def message(n, *, key="k", principal="p", policy="queue", room=True, **more):
    return Send(
        principal=principal,
        key=key,
        agent=None,
        default_agent="demo",
        message_id=f"m{n}",
        content="hello",
        policy=policy,
        at=float(n),
        run_id=f"r{n}" if room else None,
        **more,
    )


@asynccontextmanager
async def nodes(url, count, *, lease_s=30.0):
    async with AsyncExitStack() as opened:
        stores = [PostgresStore(url, lease_s=lease_s) for _ in range(count)]
        for n, store in enumerate(stores):
            await store.open(node_id=f"n{n}", at=1.0)
            opened.push_async_callback(store.close)
        yield stores


def run(main):
    asyncio.run(asyncio.wait_for(main(), 60))


def end_lease(url, epoch):
    """The lease of a node is over, though it still lives, as of one that was stopped and goes on."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE node SET lease_until = clock_timestamp() - interval '1 s' WHERE epoch = %s", [epoch])


def blocked(url, count=1):
    """Wait until as many connections of this database wait for a lock."""
    with psycopg.connect(url, autocommit=True) as connection:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            ((waiting,),) = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ).fetchall()
            if waiting >= count:
                return
        raise AssertionError("nobody waits for a lock")


async def log_of(store, session):
    events = await store.read_events(session, after=0, limit=100_000)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


def test_of_twenty_rejecting_sends_on_ten_nodes_one_starts(postgres_url):
    async def main():
        async with nodes(postgres_url, 10) as stores:
            sends = [stores[n % 10].send(message(n, policy="reject")) for n in range(20)]
            answers: list[Any] = await asyncio.gather(*sends, return_exceptions=True)
            busy = [answer for answer in answers if isinstance(answer, SessionBusy)]
            (started,) = [answer for answer in answers if not isinstance(answer, Exception)]
            assert started.disposition == "started"
            assert len(busy) == 19
            assert len(await log_of(stores[0], started.session)) == 2

    run(main)


def test_concurrent_sends_and_appends_of_many_nodes_are_whole_and_in_order(postgres_url):
    async def main():
        async with nodes(postgres_url, 4) as stores:
            claim = (await stores[0].send(message(0))).claim

            async def write(n):
                for i in range(25):
                    if n == 0:
                        await stores[0].append(claim.lease, DELTA * 3, nth=i + 1)
                    else:
                        sent = await stores[n].send(message(1000 * n + i))
                        assert sent.disposition == "queued"

            await asyncio.gather(*map(write, range(4)))
            events = await log_of(stores[1], claim.lease.session)
            assert len(events) == 2 + 75 + 75
            assert len(await stores[2].mailbox(claim.lease.session)) == 75
            done = await stores[0].commit_run(
                RunCommit(lease=claim.lease, status="completed", at=9.0, next_run_id="next")
            )
            assert done.claim is not None
            assert done.waiting == 74

    run(main)


def test_the_same_idempotency_key_on_all_nodes_at_once_is_one_message(postgres_url):
    async def main():
        async with nodes(postgres_url, 5) as stores:
            requests = [message(n, idempotency_key="once", body_hash=b"h") for n in range(10)]
            answers = await asyncio.gather(*(stores[n % 5].send(request) for n, request in enumerate(requests)))
            assert sorted(answer.disposition for answer in answers) == ["duplicate"] * 9 + ["started"]
            assert len({answer.message_id for answer in answers}) == 1

    run(main)


def test_new_sessions_of_all_nodes_have_numbers_of_their_own_and_are_counted(postgres_url):
    async def main():
        async with nodes(postgres_url, 3) as stores:
            sends = [stores[n % 3].send(message(n, key=f"k{n % 40}")) for n in range(120)]
            answers = await asyncio.gather(*sends)
            assert len({answer.session for answer in answers}) == 40
            assert sorted(answer.disposition for answer in answers) == ["queued"] * 80 + ["started"] * 40
            for store in stores:
                assert (await store.info()).sessions == 40

    run(main)


def append_checked_by(select):
    """The faulty form: the fence is checked by a statement of its own, before the write."""

    def append(connection, lease, take_over):
        with connection.transaction():
            assert connection.execute(select, [lease.session, lease.fence, lease.run_id]).fetchone() is not None
            take_over()
            connection.execute(
                "INSERT INTO event (session, last_seq, first_seq, run_id, at, body) VALUES (%s, 99, 99, %s, 1, 'late')",
                [lease.session, lease.run_id],
            )

    return append


CHECK = "SELECT 1 FROM session WHERE session = %s AND fence = %s AND run_id = %s"


@pytest.mark.parametrize("select", [CHECK, CHECK + " FOR KEY SHARE"], ids=["plain-select", "for-key-share"])
def test_a_fence_outside_of_the_write_lets_a_stale_append_in(postgres_url, select):
    """The trap itself."""

    async def main():
        async with nodes(postgres_url, 2) as (old, new):
            claim = (await old.send(message(0))).claim
            with psycopg.connect(postgres_url, autocommit=True) as late, ThreadPoolExecutor(1) as pool:
                loop = asyncio.get_running_loop()
                end_lease(postgres_url, 1)

                def take_over():
                    assert len(asyncio.run_coroutine_threadsafe(new.rescue(at=5.0), loop).result(20)) == 1

                await loop.run_in_executor(pool, append_checked_by(select), late, claim.lease, take_over)
            assert await new.read_events(claim.lease.session, after=2, limit=9) != ()

    run(main)


def test_a_stalled_node_writes_nothing_after_its_runs_were_taken_over(postgres_url):
    async def main():
        async with nodes(postgres_url, 2) as (old, new):
            claim = (await old.send(message(0))).claim
            assert await new.rescue(at=4.0) == (), "the lease lasts"
            end_lease(postgres_url, 1)
            (mine,) = await new.rescue(at=5.0)
            assert mine.lease.fence > claim.lease.fence
            before = await log_of(new, claim.lease.session)
            commit = RunCommit(lease=claim.lease, status="completed", at=6.0, text="late")
            for late in (old.append(claim.lease, DELTA), old.commit_run(commit), old.restart(claim.lease, at=6.0)):
                with pytest.raises(StaleFence):
                    await late
            assert await log_of(new, claim.lease.session) == before
            assert (await old.info()).stale_writes_refused == 3
            await new.commit_run(RunCommit(lease=mine.lease, status="completed", at=7.0))
            assert (await old.send(message(1))).disposition == "started", "the node goes on, in a new epoch"
            assert await new.rescue(at=8.0) == ()

    run(main)


def test_a_node_that_stops_within_a_transaction_does_not_hold_up_the_take_over(postgres_url):
    """Within a pipeline, no timeout of the database ends its transaction: the take-over does. Nothing is written."""

    async def main():
        async with nodes(postgres_url, 2) as (stopped, new):
            claim = (await stopped.send(message(0))).claim
            before = await log_of(new, claim.lease.session)
            loop = asyncio.get_running_loop()
            taken: list[Any] = []

            async def take_over():
                return await new.rescue(at=5.0)

            def at_commit(name):
                if name == "postgres.before_commit" and not taken:
                    taken.append(None)
                    end_lease(postgres_url, 1)
                    taken.extend(asyncio.run_coroutine_threadsafe(take_over(), loop).result(4))

            with failpoints.attend(at_commit), pytest.raises(StaleFence):
                await stopped.append(claim.lease, DELTA)
            _, mine = taken
            assert mine.lease.session == claim.lease.session
            assert await log_of(new, claim.lease.session) == before
            await new.append(mine.lease, DELTA)
            assert (await stopped.send(message(1))).disposition == "queued", "the node goes on, in a new epoch"

    run(main)


def test_two_nodes_that_rescue_at_once_share_the_runs(postgres_url):
    async def main():
        async with nodes(postgres_url, 3) as (old, *others):
            sent = await asyncio.gather(*(old.send(message(n, key=f"k{n}")) for n in range(20)))
            end_lease(postgres_url, 1)
            taken = await asyncio.gather(*(other.rescue(at=5.0) for other in others))
            claims = [claim for one in taken for claim in one]
            assert sorted(claim.lease.session for claim in claims) == sorted(one.session for one in sent)
            assert all(claim.attempt == 2 for claim in claims)

    run(main)


def test_readiness_by_sub_select_wedges_a_session(postgres_url):
    """The trap itself: a row lock is waited for, and the sub-select still sees the snapshot from before."""
    with psycopg.connect(postgres_url, autocommit=True) as one, psycopg.connect(postgres_url, autocommit=True) as two:
        one.execute("CREATE TEMP TABLE gone (a int)")
        for name in ("box (session bigint, open boolean)", "slot (session bigint PRIMARY KEY, ready boolean)"):
            one.execute(f"DROP TABLE IF EXISTS {name.partition(' ')[0]}")
            one.execute(f"CREATE TABLE {name}")
        try:
            one.execute("INSERT INTO box VALUES (1, false)")
            one.execute("INSERT INTO slot VALUES (1, false)")
            with ThreadPoolExecutor(1) as pool:
                with one.transaction():
                    one.execute("INSERT INTO box VALUES (1, true)")
                    one.execute("UPDATE slot SET ready = true WHERE session = 1")
                    release = pool.submit(
                        two.execute,
                        "UPDATE slot SET ready = EXISTS (SELECT 1 FROM box WHERE box.session = slot.session AND open)",
                    )
                    blocked(postgres_url)
                release.result(timeout=20)
            assert one.execute("SELECT ready FROM slot").fetchone() == (False,), "a message waits, and nobody sees it"
        finally:
            one.execute("DROP TABLE box, slot")


def test_a_commit_that_waited_for_a_send_sees_its_message(postgres_url):
    async def main():
        async with nodes(postgres_url, 2) as (holder, sender):
            claim = (await holder.send(message(0))).claim
            commits: list[Any] = []

            def at_commit(name):
                if name == "postgres.before_commit" and not commits:
                    commits.append(None)
                    loop.call_soon_threadsafe(commit)
                    blocked(postgres_url)

            def commit():
                commits.append(holder.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0)))

            loop = asyncio.get_running_loop()
            with failpoints.attend(at_commit):
                assert (await sender.send(message(1))).disposition == "queued"
                while len(commits) < 2:
                    await asyncio.sleep(0)
                done = await commits[1]
            assert done.waiting == 1
            assert [ready.session for ready in await sender.ready(limit=9)] == [claim.lease.session]
            again = await sender.claim(claim.lease.session, run_id="r9", at=10.0)
            assert again.lease.fence == claim.lease.fence + 1

    run(main)


def test_a_refusal_rests_on_no_cached_row(postgres_url):
    """The holder keeps the session's row. What another node has changed since is seen also by what writes nothing."""

    async def main():
        async with nodes(postgres_url, 2) as (holder, other):
            claim = (await holder.send(message(0))).claim
            steering = message(1, policy="steer", room=False)
            assert (await other.send(steering)).disposition == "steering"
            steered = await holder.steer(claim.lease, step=1, at=3.0)
            assert [one.message_id for one in steered.messages] == ["m1"]
            await other.interrupt(
                InterruptRequest(principal="p", key="k", cause=Cause(kind="user", reason="enough", at=4.0), at=4.0)
            )
            await other.send(message(2, policy="steer", room=False))
            assert (await holder.steer(claim.lease, step=2, at=5.0)).messages == ()

    run(main)


# ── lost replies ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Cut:
    """Ends the writer's connection at a failpoint, once; at ``commit_sent``, when the database has committed."""

    def __init__(self, url, point, *, epoch=1):
        self.url, self.point, self.epoch = url, f"postgres.{point}", epoch
        self.cuts = 0

    def __call__(self, name):
        if name != self.point or self.cuts:
            return
        self.cuts += 1
        with psycopg.connect(self.url, autocommit=True) as connection:
            if name == "postgres.commit_sent":
                while connection.execute(WRITERS).fetchone() is not None:
                    time.sleep(0.001)
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND application_name = 'holdfast'"
            )


WRITERS = (
    "SELECT 1 FROM pg_locks WHERE locktype = 'relation' AND relation = 'writer'::regclass AND mode = 'RowExclusiveLock'"
)


@pytest.mark.parametrize("point", ["before_write", "before_commit", "commit_sent", "after_commit"])
def test_a_cut_connection_loses_and_doubles_no_write(postgres_url, point):
    async def main():
        async with nodes(postgres_url, 1) as (store,):
            claim = (await store.send(message(0))).claim
            with failpoints.attend(Cut(postgres_url, point)) as _:
                writes = [store.append(claim.lease, DELTA) for _ in range(5)]  # not numbered: repeating would double
                writes.append(store.send(message(1)))  # without a key: repeating would be refused
                answers = await asyncio.gather(*writes)
            assert answers[-1].disposition == "queued"
            events = await log_of(store, claim.lease.session)
            assert [event.kind for event in events].count("text.delta") == 5
            assert [event.kind for event in events].count("message.accepted") == 2
            appended = [event for answer in answers[:-1] for event in answer.events]
            assert [event for event in events if event.kind == "text.delta"] == appended
            await store.append(claim.lease, DELTA)
            done = await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0))
            assert done.waiting == 1

    run(main)


def test_a_commit_without_a_reply_for_long_fails_in_doubt_and_the_next_write_goes_on(postgres_url, monkeypatch):
    monkeypatch.setattr("holdfast.storage.postgres.write_connection._RESOLVE_S", 0.0)
    failing: list[bool] = []
    real = psycopg.connect

    def connect(*arguments, **more):
        if failing:
            raise psycopg.OperationalError("connection refused")
        return real(*arguments, **more)

    def at(name):
        if name == "postgres.commit_sent" and not failing:
            cut(name)
            failing.append(True)

    cut = Cut(postgres_url, "commit_sent")

    async def main():
        async with nodes(postgres_url, 1) as (store,):
            request = message(0, idempotency_key="one", body_hash=b"h")
            monkeypatch.setattr("holdfast.storage.postgres.connection.psycopg.connect", connect)
            with failpoints.attend(at):
                with pytest.raises(StoreUnreachable, match="may be stored"):
                    await store.send(request)
            with pytest.raises(StoreUnreachable):
                await store.send(message(1, key="b"))
            with pytest.raises(StoreUnreachable):
                await store.ready(limit=1)
            failing.clear()
            assert (await store.send(request)).disposition == "duplicate", "it was stored"
            assert (await store.send(message(2, key="b"))).disposition == "started"

    try:
        run(main)
    finally:
        failing.clear()


def test_a_feed_reads_below_the_oldest_transaction_in_progress(postgres_url):
    """A row with a smaller commit_no, whose transaction commits last, is not missed."""

    async def main():
        async with nodes(postgres_url, 2) as (slow, fast):
            with psycopg.connect(postgres_url, autocommit=True) as reader:

                def feed(after):
                    return reader.execute(statement("feed"), (after, 100)).fetchall()

                def at_commit(name):
                    if name != "postgres.before_commit" or first:
                        return
                    first.append(None)
                    asyncio.run_coroutine_threadsafe(send_fast(), loop).result(20)
                    seen.extend(feed(0))
                    plain.extend(reader.execute("SELECT max(commit_no) FROM event").fetchall())

                async def send_fast():
                    await fast.send(message(2, principal="q"))

                first: list[object] = []
                seen: list[object] = []
                plain: list[tuple[int]] = []
                loop = asyncio.get_running_loop()
                with failpoints.attend(at_commit):
                    sent = await slow.send(message(1))
                ((fastest,),) = plain
                while len(everything := feed(0)) < 2:  # transactions of other tests on this server count, too
                    await asyncio.sleep(0.005)
                assert seen == [], "the fast one began after the slow one, which was still in progress"
                assert [row[1] for row in everything] == [sent.session, everything[1][1]]
                assert everything[0][0] < fastest == everything[1][0], "max(commit_no) would have missed the slow one"
                assert feed(everything[-1][0]) == []

    run(main)


def test_no_write_needs_a_prepared_statement(postgres_url):
    async def main():
        async with nodes(f"{postgres_url}&prepared_statements=off", 1) as (store,):
            claim = (await store.send(message(0))).claim
            for _ in range(10):
                await store.append(claim.lease, DELTA)
                await store.read_events(claim.lease.session, after=0, limit=10)
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                # What a pgbouncer in transaction mode would mix up stays in no session.
                settings = connection.execute("SELECT current_setting('statement_timeout')").fetchone()
            assert settings == ("0",)
            await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0))

    run(main)
