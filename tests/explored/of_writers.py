"""The SQLite writer: what was answered is durable, each write is answered once, and errors stay with their write."""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from holdfast.errors import HoldfastError, SessionBusy, StorageError
from holdfast.protocol.stopping import Cause
from holdfast.storage import SqliteStore
from holdfast.storage.backend import Tables
from holdfast.storage.port import Claim, InterruptRequest, NotReady, RunCommit, Send
from holdfast.storage.sql import readers, writer
from holdfast.storage.sql.tables import SqlTables
from holdfast.storage.sql.writer import FailureStep, Writer
from holdfast.storage.sqlite import checkpoints
from holdfast.storage.sqlite import snapshots as snapshots_module
from holdfast.storage.sqlite.checkpoints import Checkpoints
from holdfast.storage.sqlite.snapshots import Snapshots
from holdfast.testing import start_thread
from tests.explored.model import Model, fault
from tests.explored.session_faults import a_session_that_is_busy_starts_another_run
from tests.storage.audit import audit

ITEM = "SQLite writer"
MERGED = "merged"
MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Thousands of transactions, of which none has to survive the machine."""


class Passes:
    """Merges in steps: a pass is due from the beginning, its second step fails, and another pass is due at the end."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.steps = 0

    @property
    def is_due(self) -> bool:
        """Whether a step of the first pass is left."""
        return self.steps < 2

    def step(self) -> bool:
        """Write in a transaction of its own; return whether a step of the pass is left."""
        assert not self._disk.pending, "a step inside the transaction of a batch"
        self.steps += 1
        self._disk.pending.append(MERGED)
        if self.steps == 2:
            raise ValueError("the rows have changed")
        return self.steps == 1


class Disk:
    """A database that is a list of words; a transaction is what was written since it began."""

    def __init__(self, *, broken_commits: Sequence[int] = ()) -> None:
        self.durable: list[str] = []
        self.pending: list[str] = []
        self.open_now = False
        self.commits = 0
        self._broken_commits = set(broken_commits)
        self.tables = cast(
            SqlTables,
            SimpleNamespace(
                counters=SimpleNamespace(commits=0, stale_writes_refused=0, duplicates_prevented=0, batches=0),
                finish=lambda: None,
                forget=lambda: None,
                trim=lambda: None,
                merger=Passes(self),
            ),
        )

    @property
    def written(self) -> list[str]:
        """The durable words of callers."""
        return [word for word in self.durable if word != MERGED]

    def open(self) -> SqlTables:
        """Open it."""
        assert not self.open_now
        self.open_now = True
        return self.tables

    def begin(self, verbs: Sequence[str]) -> None:
        """Begin a transaction."""
        assert self.open_now
        assert not self.pending, "a transaction inside of another"

    def commit(self) -> None:
        """Make it durable, unless the disk fails now."""
        self.commits += 1
        if self.commits in self._broken_commits:
            raise OSError("the disk failed")
        self.durable += self.pending
        self.pending = []

    def roll_back(self) -> None:
        """Undo it."""
        self.pending = []

    def after_failure(self, error: Exception, attempt: int, writes: int) -> FailureStep:
        """Its writes are done again, one by one."""
        return "split"

    def translate(self, error: Exception) -> Exception:
        """The error as callers see it."""
        return error if isinstance(error, HoldfastError) else StorageError(str(error))

    def passing(self, point: str, verbs: Sequence[str]) -> None:
        """Nothing fails here."""

    def close(self) -> None:
        """Close it."""
        self.open_now = False

    def write(self, word: str) -> Callable[[Tables], str]:
        """A verb that writes a word; one that is refused, or broken, if the word says so."""

        def act(_: Tables) -> str:
            if word == "refused":
                raise SessionBusy("no")
            self.pending.append(word)
            if word == "broken":
                raise ValueError("a fault in the verb")
            return word.upper()

        return act


async def ask(store: Writer, disk: Disk, word: str) -> str:
    """Write a word; what was answered, and that an answer means durable."""
    try:
        answered = await store.submit("send", disk.write(word))
    except HoldfastError:
        assert word not in disk.durable, "refused, and yet written"
        return "refused"
    assert answered == word.upper(), "the answer of another write"
    assert word in disk.durable, "answered before it was durable"
    return word


async def writes_at_once() -> None:
    """Writers of one batch or several: one is refused, one has a fault, one goes away while it waits."""
    disk = Disk()
    store = Writer(disk, name="writer")
    await store.open()
    async with asyncio.timeout(60):
        words = ["a", "refused", "broken", "b"]
        tasks = [asyncio.create_task(ask(store, disk, word)) for word in words]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.wait(tasks)
        await store.close()
    assert [task.result() for task in tasks[:3]] == ["a", "refused", "refused"]
    assert "broken" not in disk.durable
    assert disk.durable.count("a") == 1, "written twice, or not at all"
    assert not disk.open_now, "the thread did not end"


async def commits_that_fail() -> None:
    """The disk fails at the first commit: the batch is done again, write by write, and each answer stays true."""
    disk = Disk(broken_commits=(1, 3))
    store = Writer(disk, name="writer")
    await store.open()
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(ask(store, disk, word) for word in "abc"))
        await store.close()
    assert sorted(word for word in answers if word != "refused") == sorted(disk.written)


async def close_while_writing() -> None:
    """The store is closed, twice, while others write: what was accepted is written, the rest is refused."""
    disk = Disk()
    store = Writer(disk, name="writer")
    await store.open()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        writes = [group.create_task(ask(store, disk, word)) for word in "ab"]
        closing = [group.create_task(store.close()) for _ in range(2)]
    assert all(task.done() for task in closing)
    assert sorted(task.result() for task in writes if task.result() != "refused") == sorted(disk.written)
    assert await ask(store, disk, "late") == "refused"
    assert not disk.open_now


async def a_store_in_a_file() -> None:
    """A session in a real file: a holder against a sender, an interrupt and readers, on the writer's own thread.

    No checkpoints beside it: their thread is a real one, and shares nothing with the others but the database. No read
    counts as long: that goes by the clock.
    """
    with (
        tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder,
        patch.object(Checkpoints, "open"),
        patch.object(readers, "_LONG_READ_S", math.inf),
    ):
        store = SqliteStore(f"{folder}/store.db")
        async with asyncio.timeout(600):
            await store.open(node_id="n", at=1.0)
            await _race(store)
            await audit(store)
            await store.close()


async def _race(store: SqliteStore) -> None:
    def message(name: str, policy: Any) -> Send:
        return Send(
            principal="p", key="k", agent=None, default_agent="demo", message_id=f"m_{name}", content=name,
            policy=policy, at=1.0, run_id=f"r_{name}", quiet_s=0.0,
        )  # fmt: skip

    async def hold(claim: Claim | None) -> None:
        while claim is not None:
            await store.append(claim.lease, [("text.delta", b'{"kind":"text.delta","run_id":"r","text":"t"}')])
            done = await store.commit_run(
                RunCommit(lease=claim.lease, status="completed", at=2.0, next_run_id=f"{claim.lease.run_id}_")
            )
            claim = done.claim

    async def send(name: str, policy: Any) -> None:
        await hold((await store.send(message(name, policy))).claim)

    async def interrupt() -> None:
        found = await store.find_session("p", "k")
        if found is not None:
            await store.interrupt(InterruptRequest(principal="p", key="k", cause=Cause(kind="user"), at=1.0))
            claim = await store.claim(found[0], run_id="r_claimed", at=1.0)
            if not isinstance(claim, NotReady):
                await hold(claim)

    async with asyncio.TaskGroup() as group:
        group.create_task(send("a", "queue"))
        group.create_task(send("b", "interrupt"))
        group.create_task(interrupt())


class Log:
    """A write-ahead log as SQLite keeps it: a commit uses it again when all of it is copied and no read needs it."""

    def __init__(self) -> None:
        self.pages = 0
        self.copied = 0
        self.longest = 0
        self.reads: dict[LogConnection, int] = {}

    def commit(self, pause: Callable[[], object]) -> None:
        """Write a page, in a transaction that others run beside."""
        used_again = self.copied == self.pages and not any(self.reads.values())
        pause()
        if used_again and self.copied == self.pages:
            self.pages = self.copied = 0
            self.reads = dict.fromkeys(self.reads, 0)
        self.pages += 1
        self.longest = max(self.longest, self.pages)


class LogConnection:
    """A connection to the log: the writer's, the checkpoints' or a read's."""

    total_changes = 0

    def __init__(self, log: Log, pause: Callable[[], object]) -> None:
        self._log = log
        self._pause = pause
        self._ended = False

    def execute(self, sql: str) -> LogConnection:
        """Copy what the reads allow, while others go on."""
        assert "PASSIVE" in sql
        pages = self._log.pages
        upto = min((pages, *(mark or pages for mark in self._log.reads.values())))
        self._pause()
        self._log.copied = max(self._log.copied, min(upto, self._log.pages))
        return self

    def fetchone(self) -> tuple[int, int, int]:
        """What the checkpoint answers."""
        return 0, self._log.pages, self._log.copied

    def interrupt(self) -> None:
        """End the read that runs, if one does."""
        self._ended = self in self._log.reads

    def close(self) -> None:
        """Close it."""

    def read(self) -> str:
        """Read for ever; finish only when the log is so short that nobody ends the read."""
        log = self._log
        log.reads[self] = 0 if log.copied == log.pages else log.pages
        self._ended = False
        try:
            for _ in range(3):
                self._pause()
                if self._ended:
                    error = sqlite3.OperationalError("interrupted")
                    error.sqlite_errorcode = sqlite3.SQLITE_INTERRUPT
                    raise error
            return "rows"
        finally:
            del log.reads[self]


async def checkpoints_beside_commits_and_reads() -> None:
    """A writer commits, one transaction fails, another never ends; a read is ended and runs again."""
    with (
        patch.multiple(checkpoints, _FIRST_AFTER=1, _REUSE_AT=1, READS_END_AT=1),
        patch.multiple(snapshots_module, READS_END_AT=1, _INTERRUPTIONS=3),
    ):
        await _commit_and_read()


async def _commit_and_read() -> None:
    log, turns = Log(), threading.Lock()

    def pause() -> None:
        with turns:
            pass

    def connection() -> sqlite3.Connection:
        return cast(sqlite3.Connection, LogConnection(log, pause))

    snapshots = Snapshots()
    work = Checkpoints(connection, snapshots, sync=pause)

    def write() -> None:
        writing = LogConnection(log, pause)
        work.open()
        for number in range(1, 5):
            work.begin()
            if number == 2:
                work.rolled_back()
                continue
            log.commit(pause)
            writing.total_changes = number
            work.committed(cast(sqlite3.Connection, writing))
        work.begin()  # never ended, as when the writer fails
        work.close()

    def read() -> str:
        reader = LogConnection(log, pause)
        return snapshots.read(cast(sqlite3.Connection, reader), reader.read)

    async with asyncio.timeout(60):
        _, rows = await asyncio.gather(start_thread(write), start_thread(read))
    assert rows == "rows"
    assert log.copied <= log.pages


@fault
def a_transaction_that_failed_is_never_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Checkpoints, "rolled_back", lambda self: None)


@fault
def reads_are_held_back_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Snapshots, "resume", lambda self: None)


@fault
def closing_does_not_end_the_transaction(patch: pytest.MonkeyPatch) -> None:
    rolled_back = Checkpoints.rolled_back

    def close(self: Checkpoints) -> None:
        self._closing = True
        self._requests.put(False)
        assert self._thread is not None
        self._thread.join()
        rolled_back(self)

    patch.setattr(Checkpoints, "close", close)


@fault
def answered_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    submit = Writer.submit

    def early(self: Writer, verb: str, action: Any) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def act(tables: Tables) -> Any:
            result = action(tables)
            writer.call_loop(future.get_loop(), writer.succeed, future, result)
            return result

        def pass_on(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                writer.fail(future, error)

        submit(self, verb, act).add_done_callback(pass_on)
        return future

    patch.setattr(Writer, "submit", early)


@fault
def a_batch_is_written_once_more_without_being_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "roll_back", lambda self: None)
    patch.setattr(Disk, "begin", lambda self, verbs: None)


@fault
def a_step_that_fails_ends_the_writer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writer, "_merge_step", lambda self, loop, tables: tables.merger.step())


@fault
def answers_are_given_to_others(patch: pytest.MonkeyPatch) -> None:
    deliver = Writer._deliver
    patch.setattr(Writer, "_deliver", lambda self, batch, outcomes: deliver(self, batch, outcomes[::-1]))


@fault
def close_does_not_wait_for_what_was_accepted(patch: pytest.MonkeyPatch) -> None:
    async def close(self: Writer) -> None:
        thread, ended = self._thread, self._ended
        assert thread is not None
        assert ended is not None
        self._closing = True
        self._batches.put(None)
        await asyncio.shield(ended)
        thread.join()

    patch.setattr(Writer, "close", close)


@fault
def the_lock_of_the_hand_over_is_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Writer, "_prepared", lambda self: None)


MODELS = (
    Model(
        item=ITEM,
        name="writes at once, refused, faulty and abandoned",
        promise="P5: answered means durable; each write is answered once, with its own answer",
        scenario=writes_at_once,
        faults=(answered_before_it_is_durable, answers_are_given_to_others, a_step_that_fails_ends_the_writer),
    ),
    Model(
        item=ITEM,
        name="commits that fail",
        promise="P11: what failed has changed nothing, what was answered is there",
        scenario=commits_that_fail,
        faults=(a_batch_is_written_once_more_without_being_undone, the_lock_of_the_hand_over_is_never_released),
    ),
    Model(
        item=ITEM,
        name="closed while writing",
        promise="P12: what was accepted is written, the rest is refused; P8: the thread ends",
        scenario=close_while_writing,
        faults=(close_does_not_wait_for_what_was_accepted,),
    ),
    Model(
        item=ITEM,
        name="checkpoints beside commits and reads",
        promise="P10: no deadlock of the writer, the checkpoints and the reads; P8: the thread ends",
        scenario=checkpoints_beside_commits_and_reads,
        faults=(
            a_transaction_that_failed_is_never_ended,
            reads_are_held_back_for_ever,
            closing_does_not_end_the_transaction,
        ),
        share=0.3,
    ),
    Model(
        item=ITEM,
        name="a session in a real file",
        promise="P4, P5: one run at a time, nothing lost, with the writer and readers in their threads",
        scenario=a_store_in_a_file,
        faults=(a_session_that_is_busy_starts_another_run,),
        share=0.03,
    ),
)
