"""Group commit: one batch in flight, errors that stay with their write, answers in order, and nothing left behind."""

import asyncio
import gc
import os
import threading
import weakref

import pytest

from holdfast import failpoints
from holdfast.errors import StorageError, StoreCorrupt
from holdfast.protocol.messages import AgentState, Entry
from holdfast.protocol.stopping import Cause
from holdfast.storage import SqliteStore
from holdfast.storage.backend import Counters
from holdfast.storage.port import Claim, InterruptRequest, Lease, RunCommit, Send
from holdfast.storage.sql import writer
from holdfast.storage.sql.writer import Writer


class FakeMerger:
    """Has nothing to merge."""

    is_due = False

    def step(self):
        return False


class FakeTables:
    def __init__(self):
        self.counters = Counters()
        self.merger = FakeMerger()
        self.written = []

    def finish(self):
        pass

    def forget(self):
        self.written.append("forgotten")

    def trim(self):
        pass


class FakeConnection:
    """Notes what the thread does; ``gate`` holds commits while it is closed."""

    def __init__(self):
        self.tables = FakeTables()
        self.gate = threading.Event()
        self.gate.set()
        self.committing = threading.Event()
        self.batches = []
        self.closed = False
        self.error = None

    def open(self):
        if self.error is not None:
            raise self.error
        return self.tables

    def begin(self, verbs):
        self.batches.append(list(verbs))

    def commit(self):
        self.committing.set()
        assert self.gate.wait(20)

    def roll_back(self):
        self.batches.append("rolled back")

    def after_failure(self, error, attempt, writes):
        return "split"

    def translate(self, error):
        return error

    def passing(self, point, verbs):
        pass

    def close(self):
        self.closed = True


def run(scenario):
    async def main():
        async with asyncio.timeout(20):
            connection = FakeConnection()
            subject = Writer(connection, name="test-writer")
            await subject.open()
            try:
                await scenario(connection, subject)
            finally:
                connection.gate.set()
                await subject.close()
            assert connection.closed
            assert not [t for t in threading.enumerate() if t.name == "test-writer"]

    asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def test_what_comes_while_a_batch_is_in_flight_goes_together_in_the_next():
    async def scenario(connection, subject):
        connection.gate.clear()
        first = [subject.submit(f"a{n}", lambda tables: 1) for n in range(3)]
        await until(connection.committing.is_set)
        later = [subject.submit(f"b{n}", lambda tables: 1) for n in range(5)]
        await asyncio.sleep(0)
        assert connection.batches == [["a0", "a1", "a2"]]
        assert not any(future.done() for future in first), "answered before it was durable"
        connection.gate.set()
        await asyncio.gather(*first, *later)
        assert connection.batches == [["a0", "a1", "a2"], ["b0", "b1", "b2", "b3", "b4"]]

    run(scenario)


def test_answers_come_in_the_order_of_the_writes():
    async def scenario(connection, subject):
        order = []

        def submit(n):
            future = subject.submit("w", lambda tables: n)
            future.add_done_callback(lambda done: order.append(done.result()))
            return future

        futures = []
        for n in range(2000):
            futures.append(submit(n))
            if n % 300 == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*futures)
        assert order == list(range(2000))
        assert max(len(batch) for batch in connection.batches) <= writer._BATCH_LIMIT

    run(scenario)


def test_an_unexpected_error_is_undone_alone():
    async def scenario(connection, subject):
        def fails(tables):
            raise ValueError("odd")

        good = [subject.submit("good", lambda tables: 1) for _ in range(2)]
        bad = subject.submit("bad", fails)
        good.append(subject.submit("good", lambda tables: 1))
        assert await asyncio.gather(*good) == [1, 1, 1]
        with pytest.raises(ValueError, match="odd"):
            await bad
        assert connection.batches == [
            ["good", "good", "bad", "good"], "rolled back", ["good"], ["good"], ["bad"], "rolled back", ["good"],
        ]  # fmt: skip
        assert connection.tables.counters.commits == 3

    run(scenario)


def test_a_refusal_does_not_disturb_its_batch():
    async def scenario(connection, subject):
        def refuses(tables):
            raise StorageError("no")

        refused = subject.submit("refused", refuses)
        good = subject.submit("good", lambda tables: 1)
        assert await good == 1
        with pytest.raises(StorageError, match="no"):
            await refused
        assert connection.batches == [["refused", "good"]]

    run(scenario)


def test_the_buffer_is_bounded(monkeypatch):
    monkeypatch.setattr(writer, "_BUFFER_LIMIT", 10)

    async def scenario(connection, subject):
        connection.gate.clear()
        held = subject.submit("held", lambda tables: 1)
        await until(connection.committing.is_set)
        waiting = [subject.submit("waits", lambda tables: 1) for _ in range(10)]
        with pytest.raises(StorageError, match="wait for the disk"):
            await subject.submit("too many", lambda tables: 1)
        connection.gate.set()
        await asyncio.gather(held, *waiting)

    run(scenario)


def test_a_cancelled_caller_does_not_stop_the_others():
    async def scenario(connection, subject):
        connection.gate.clear()
        futures = [subject.submit("w", lambda tables, n=n: n) for n in range(3)]
        await until(connection.committing.is_set)
        futures[1].cancel()
        connection.gate.set()
        assert await asyncio.gather(*futures[::2]) == [0, 2]

    run(scenario)


def test_close_writes_what_was_given_and_refuses_more():
    async def scenario(connection, subject):
        futures = [subject.submit("w", lambda tables, n=n: n) for n in range(writer._BATCH_LIMIT + 5)]
        await asyncio.gather(subject.close(), subject.close())
        assert [future.result() for future in futures] == list(range(writer._BATCH_LIMIT + 5))
        with pytest.raises(StorageError, match="closed"):
            await subject.submit("late", lambda tables: 1)

    run(scenario)


def test_the_loop_makes_way_again_and_again_while_a_batch_is_in_flight_and_then_rests():
    async def scenario(connection, subject):
        connection.gate.clear()
        write = subject.submit("w", lambda tables: 1)
        await until(lambda: subject.gil_yields >= 3)
        assert not write.done()
        connection.gate.set()
        await write
        await until(lambda: not subject._watching)
        gil_yields = subject.gil_yields
        for _ in range(1000):
            await asyncio.sleep(0)
        assert subject.gil_yields == gil_yields

    run(scenario)


def test_the_thread_never_gives_back_what_the_loop_holds_while_it_makes_way():
    async def scenario(connection, subject):
        connection.gate.clear()
        write = subject.submit("w", lambda tables: 1)
        await until(connection.committing.is_set)
        assert subject._preparing.acquire(timeout=5)
        connection.gate.set()
        await write
        subject._preparing.release()

    run(scenario)


def test_an_open_that_fails_leaves_no_thread():
    async def main():
        connection = FakeConnection()
        connection.error = StoreCorrupt("broken")
        subject = Writer(connection, name="test-writer")
        with pytest.raises(StoreCorrupt):
            await subject.open()
        await subject.close()
        assert connection.closed
        assert not [t for t in threading.enumerate() if t.name == "test-writer"]

    asyncio.run(main())


def test_a_loop_that_is_closed_under_the_writer_ends_its_thread():
    connection = FakeConnection()
    subject = Writer(connection, name="test-writer")

    async def main():
        await subject.open()
        connection.gate.clear()
        subject.submit("w", lambda tables: 1)
        await until(connection.committing.is_set)

    asyncio.run(main())
    thread = subject._thread
    assert thread is not None
    connection.gate.set()
    thread.join(10)
    assert not thread.is_alive()
    assert connection.closed


def request(n, *, key="k", idempotency_key=None):
    return Send(
        principal="p", key=key, agent=None, default_agent="demo", message_id=f"m{n}", content="x", policy="queue",
        at=float(n), run_id=f"r{n}", idempotency_key=idempotency_key,
    )  # fmt: skip


def test_every_verb_can_be_repeated_after_its_reply_was_lost(tmp_path):
    async def lost(store, verb, ask):
        with (
            failpoints.arm(f"sqlite.{verb}.after_commit", error=StorageError("the reply was lost")),
            pytest.raises(StorageError, match="lost"),
        ):
            await ask()
        return await ask()

    async def main():
        store = SqliteStore(str(tmp_path / "store.db"))
        await store.open(node_id="n", at=1.0)
        sent = await lost(store, "send", lambda: store.send(request(1, idempotency_key="i")))
        assert (sent.disposition, sent.run_id) == ("duplicate", "r1")
        claim = await store.claim(sent.session, run_id="r1", at=2.0)
        assert isinstance(claim, Claim)
        assert claim.lease == Lease(sent.session, "r1", 1)
        events = [("text.delta", b"{}")] * 2
        appended = await lost(store, "append", lambda: store.append(claim.lease, events, nth=1))
        assert [event.seq for event in appended.events] == [3, 4]
        await store.send(request(2))
        cause = Cause(kind="user")
        stop = InterruptRequest(principal="p", key="k", cause=cause, at=3.0)
        hit = await lost(store, "interrupt", lambda: store.interrupt(stop))
        assert (hit.run_id, hit.events) == ("r1", ())
        commit = RunCommit(
            lease=claim.lease, status="interrupted", at=4.0, entries=[Entry(role="user", content="x")], next_run_id="r3"
        )
        done = await lost(store, "commit_run", lambda: store.commit_run(commit))
        assert done.claim.lease.run_id == "r3"
        assert [event.kind for event in done.events] == ["run.finished", "message.settled", "run.started"]
        assert len(await store.transcript(sent.session)) == 1
        waits = await store.send(Send(**{**fields(request(5, key="b")), "run_id": None}))
        claimed = await lost(store, "claim", lambda: store.claim(waits.session, run_id="r5", at=6.0))
        assert claimed.lease.fence == 1
        await store.send(request(6))
        settled, events = await lost(store, "withdraw", lambda: store.withdraw("p", "k", "m6", at=7.0))
        assert (settled.state, events) == ("withdrawn", ())
        log = await store.read_events(sent.session, after=0, limit=100)
        assert [event.seq for event in log] == list(range(1, len(log) + 1))
        assert sum(event.kind == "message.settled" for event in log) == 2
        await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("point", ["before_write", "between_writes", "before_commit"])
def test_a_commit_that_broke_off_leaves_nothing_for_the_one_that_is_tried_again(tmp_path, point):
    kept = Entry(role="user", content="x", agent_state=AgentState(by="a", body="state"))

    async def main():
        store = SqliteStore(str(tmp_path / "store.db"))
        await store.open(node_id="n", at=1.0)
        claim = (await store.send(request(1))).claim
        assert claim is not None
        commit = RunCommit(lease=claim.lease, status="completed", at=4.0, entries=[kept])
        with (
            failpoints.arm(f"sqlite.commit_run.{point}", error=StorageError("now")),
            pytest.raises(StorageError, match="now"),
        ):
            await store.commit_run(commit)
        await store.commit_run(commit)
        assert [entry.agent_state for entry in await store.transcript(claim.lease.session)] == [AgentState(by="a", n=1)]
        assert await store.kept(claim.lease.session, 1) == "state"
        await store.close()

    asyncio.run(main())


def fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_a_closed_store_leaves_no_thread_descriptor_or_reference(tmp_path):
    async def main(n):
        store = SqliteStore(str(tmp_path / "store.db"))
        await store.open(node_id="n", at=1.0)
        await store.send(request(n))
        await store.find_session("p", "k")
        await store.close()
        return weakref.ref(store)

    asyncio.run(main(0))
    threads = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    for n in range(1, 6):
        gone = asyncio.run(main(n))
    left = set(threading.enumerate())
    assert left <= threads
    assert not [
        thread.name
        for thread in left
        if thread.name.startswith(("holdfast-writer", "holdfast-reader", "holdfast-checkpoints"))
    ]
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    gc.collect()
    assert gone() is None
