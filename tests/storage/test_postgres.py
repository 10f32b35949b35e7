"""The statements on a real PostgreSQL, so that the port and its rows fit the store that is to come.

`PostgresTrial` is a backend that runs the tables and reads in SQL, a connection for each store and a transaction for
each write. Because a session is written only ``WHERE fence = … AND next_seq = …``, a transaction that lost a race
writes nothing and is done again, under READ COMMITTED and with any number of connections.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from holdfast.errors import HoldfastError, SessionBusy, StaleFence, StorageError
from holdfast.protocol.events import TextDelta, encode_event
from holdfast.storage import transactions
from holdfast.storage.backend import Counters
from holdfast.storage.port import Lease, RunCommit, Send, Store
from holdfast.storage.sql import statements
from holdfast.storage.sql.reads import SqlReads
from holdfast.storage.sql.tables import SessionChanged, SqlTables
from holdfast.testing.suites.store import STORE_CHECKS, run_store_check
from tests.storage.audit import audit
from tests.storage.postgres_server import postgres

NUL, FOR_NUL = "\0", "\ue000"
"""PostgreSQL's text has no NUL. A store has to put something else in its place; this one is a trial."""


class PostgresDatabase:
    def __init__(self, connection):
        self.connection = connection

    def _execute(self, statement, parameters):
        mapped = [value.replace(NUL, FOR_NUL) if isinstance(value, str) else value for value in parameters]
        return self.connection.execute(statements.for_postgres(statement), mapped)

    def query(self, name, *parameters):
        return [
            tuple(value.replace(FOR_NUL, NUL) if isinstance(value, str) else value for value in row)
            for row in self._execute(statements.block(name), parameters).fetchall()
        ]

    def rows(self, name, *parameters):
        yield from self.query(name, *parameters)

    def write(self, name, *parameters):
        return self._execute(statements.block(name), parameters).rowcount

    def write_large(self, name, *parameters, value):
        self._execute(statements.block(name), (*parameters, bytes(value)))

    def read_large(self, name, *parameters, start, size):
        rows = self.query(name, *parameters)
        return bytes(rows[0][0][start : start + size]) if rows else None

    def write_rows(self, name, rows, *, large):
        return self._execute(statements.many(name, len(rows)), [value for row in rows for value in row]).rowcount


class PostgresTables(SqlTables):
    _database: PostgresDatabase

    def new_session_number(self):
        return self._database.connection.execute("SELECT nextval('session_session_seq')").fetchone()[0]


class PostgresTrial:
    """The backend on PostgreSQL. Blocks; not for use."""

    engine = "postgres"
    path = ""
    version = ""

    def __init__(self, address):
        self.address = address
        self.connection = None
        self.counters = Counters()
        self.retries = 0

    async def open(self, *, node_id, at):
        self.connect(node_id=node_id, at=at)

    def connect(self, *, node_id="n", at=1.0):
        self.connection = psycopg.connect(self.address, autocommit=True)
        self.epoch = PostgresDatabase(self.connection).query("add_node", node_id, at)[0][0]
        return self

    async def close(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def tables(self):
        tables = PostgresTables(PostgresDatabase(self.connection), epoch=self.epoch, last_number=0)
        tables.counters = self.counters
        return tables

    def transact(self, action):
        if self.connection is None:
            raise StorageError("the store is not open")
        for _ in range(200):
            try:
                with self.connection.transaction():
                    tables = self.tables()
                    result = action(tables)
                    tables.flush()
                    return result
            except (SessionChanged, psycopg.errors.UniqueViolation) as error:
                self.retries += 1
                lost = error
        raise StorageError("no luck") from lost

    def write(self, verb, action):
        future = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self.transact(action))
        except HoldfastError as error:
            future.set_exception(error)
        return future

    async def read(self, query):
        if self.connection is None:
            raise StorageError("the store is not open")
        return query(SqlReads(PostgresDatabase(self.connection)))


@pytest.fixture(scope="module")
def server():
    with postgres() as address:
        yield address


@pytest.fixture
def address(server):
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        for statement in statements.for_postgres(statements.block("schema")).split(";\n"):
            connection.execute(statement)
    return server


def message(n, *, key="k", policy="queue", room=True):
    return Send(
        principal="p",
        key=key,
        agent=None,
        default_agent="demo",
        message_id=f"m{n}",
        content="hello",
        policy=policy,
        at=float(n),
        run_id=f"r{n}" if room else None,
    )


def blocked(address, pid):
    """Wait until the connection with that backend waits for a lock."""
    with psycopg.connect(address, autocommit=True) as connection:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            waits = connection.execute(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", [pid]
            ).fetchone()
            if waits is not None:
                return
        raise AssertionError("it does not wait")


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_the_statements_conform_on_postgres(check, address):
    run_store_check(check, lambda: Store(PostgresTrial(address)))


def test_of_twenty_rejecting_sends_on_twenty_connections_one_starts(address):
    barrier = threading.Barrier(20, timeout=20)

    def send(n):
        trial = PostgresTrial(address).connect()
        barrier.wait()
        try:
            return trial.transact(lambda tables: transactions.send(tables, message(n, policy="reject"))).disposition
        except SessionBusy:
            return "busy"
        finally:
            trial.connection.close()

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(send, range(20), timeout=60))
    assert sorted(answers) == ["busy"] * 19 + ["started"]


def test_concurrent_sends_and_appends_from_many_connections_are_whole_and_in_order(address):
    first = PostgresTrial(address).connect()
    claim = first.transact(lambda tables: transactions.send(tables, message(0))).claim
    barrier = threading.Barrier(6, timeout=20)

    def write(n):
        trial = PostgresTrial(address).connect()
        barrier.wait()
        for i in range(25):
            if n % 2:
                trial.transact(lambda tables, i=i: transactions.send(tables, message(1000 * n + i)))
            else:
                events = [encode_event(TextDelta(run_id=claim.lease.run_id, text=f"{n}.{i}"))] * 3
                trial.transact(lambda tables, events=events: transactions.append(tables, claim.lease, events, 0))
        trial.connection.close()
        return trial.retries

    with ThreadPoolExecutor(6) as pool:
        retries = sum(pool.map(write, range(6), timeout=60))
    assert retries > 0, "they did not meet"
    events = SqlReads(PostgresDatabase(first.connection)).events(claim.lease.session, after=0, limit=10_000)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len(events) == 2 + 75 + 75 * 3
    bodies = [event.body for event in events if event.kind == "text.delta"]
    assert all(bodies[i] == bodies[i + 1] == bodies[i + 2] for i in range(0, len(bodies), 3)), "torn packs"
    asyncio.run(audit(Store(first)))
    first.connection.close()


def append_checked_by(select):
    """The faulty form: the fence is checked by a statement of its own, before the write."""

    def append(connection, lease, waiting):
        with connection.transaction():
            found = connection.execute(select, [lease.session, lease.fence, lease.run_id]).fetchone()
            if found is None:
                raise StaleFence("stale")
            waiting()
            connection.execute(
                "INSERT INTO event (session, last_seq, first_seq, run_id, at, body) VALUES (%s, 99, 99, %s, 1, 'late')",
                [lease.session, lease.run_id],
            )

    return append


def append_fenced(connection, lease, waiting):
    """The form of the store: what was read long ago does not matter, the write itself checks."""
    trial = PostgresTrial("")
    trial.connection, trial.epoch = connection, 1
    with connection.transaction():
        tables = trial.tables()
        result = transactions.append(tables, lease, [("text.delta", b"{}")], 0)
        assert result.events
        waiting()
        tables.flush()


@pytest.mark.parametrize(
    ("append", "holds"),
    [
        (append_checked_by("SELECT 1 FROM session WHERE session = %s AND fence = %s AND run_id = %s"), False),
        (
            append_checked_by("SELECT 1 FROM session WHERE session = %s AND fence = %s AND run_id = %s FOR KEY SHARE"),
            False,
        ),
        (append_fenced, True),
    ],
    ids=["plain-select", "for-key-share", "inside-the-update"],
)
def test_only_a_fence_inside_the_update_stops_a_stale_append(address, append, holds):
    old = PostgresTrial(address).connect(node_id="old")
    claim = old.transact(lambda tables: transactions.send(tables, message(0))).claim
    new = PostgresTrial(address).connect(node_id="new")

    def take_over():
        rescued = new.transact(lambda tables: transactions.rescue(tables, 5.0))
        assert rescued[0].lease.fence > claim.lease.fence

    if holds:
        with pytest.raises(SessionChanged):
            append(old.connection, claim.lease, take_over)
    else:
        append(old.connection, claim.lease, take_over)
    late = old.connection.execute("SELECT count(*) FROM event WHERE last_seq > 2").fetchone()[0]
    assert late == (0 if holds else 1)
    for trial in (old, new):
        trial.connection.close()


def test_an_append_that_waited_for_the_rescuer_is_refused_too(address):
    old = PostgresTrial(address).connect(node_id="old")
    claim = old.transact(lambda tables: transactions.send(tables, message(0))).claim
    new = PostgresTrial(address).connect(node_id="new")
    pid = old.connection.info.backend_pid
    with ThreadPoolExecutor(1) as pool:
        with new.connection.transaction():
            tables = new.tables()
            transactions.rescue(tables, 5.0)
            tables.flush()
            events = [("text.delta", b"{}")]
            late = pool.submit(old.transact, lambda tables: transactions.append(tables, claim.lease, events, 0))
            blocked(address, pid)
        with pytest.raises(StaleFence):
            late.result(timeout=20)
    assert old.retries == 1, "it read the old row, waited for the lock, and was told by the write"
    for trial in (old, new):
        trial.connection.close()


def test_readiness_by_sub_select_wedges_a_session(address):
    """The trap itself: a row lock is waited for, and the sub-select still sees the snapshot from before."""
    with psycopg.connect(address, autocommit=True) as one, psycopg.connect(address, autocommit=True) as two:
        one.execute("CREATE TABLE box (session bigint, open boolean)")
        one.execute("CREATE TABLE slot (session bigint PRIMARY KEY, ready boolean)")
        one.execute("INSERT INTO slot VALUES (1, false)")
        with ThreadPoolExecutor(1) as pool:
            with one.transaction():
                one.execute("INSERT INTO box VALUES (1, true)")
                one.execute("UPDATE slot SET ready = true WHERE session = 1")
                release = pool.submit(
                    two.execute,
                    "UPDATE slot SET ready = EXISTS (SELECT 1 FROM box WHERE box.session = slot.session AND open)",
                )
                blocked(address, two.info.backend_pid)
            release.result(timeout=20)
        assert one.execute("SELECT ready FROM slot").fetchone() == (False,), "a message waits, and nobody sees it"


def test_readiness_by_counters_does_not_wedge(address):
    holder = PostgresTrial(address).connect()
    claim = holder.transact(lambda tables: transactions.send(tables, message(0))).claim
    sender = PostgresTrial(address).connect()
    pid = holder.connection.info.backend_pid
    commit = RunCommit(lease=claim.lease, status="completed", at=9.0)
    with ThreadPoolExecutor(1) as pool:
        with sender.connection.transaction():
            tables = sender.tables()
            assert transactions.send(tables, message(1)).disposition == "queued"
            tables.flush()
            ends = pool.submit(holder.transact, lambda tables: transactions.commit_run(tables, commit))
            blocked(address, pid)
        done = ends.result(timeout=20)
    assert (done.waiting, holder.retries) == (1, 1)
    reads = SqlReads(PostgresDatabase(sender.connection))
    assert [ready.session for ready in reads.ready(limit=9)] == [claim.lease.session]
    again = sender.transact(lambda tables: transactions.claim(tables, claim.lease.session, "r9", 10.0))
    assert again.lease == Lease(claim.lease.session, "r9", claim.lease.fence + 1)
    for trial in (holder, sender):
        trial.connection.close()
