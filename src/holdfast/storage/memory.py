# ruff: noqa: D102 - the port documents the verbs
"""The in-memory store: for tests, demos, and as the reference model for other stores.

Each verb runs in one step of the event loop, so nothing can come between its check and its write. Accepted data lives
as long as the store object: it may be closed and opened again, as a new epoch, but does not outlive the process.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import msgspec

from holdfast.errors import StorageError, StoreLocked
from holdfast.protocol.events import Stored, encode_json
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    MailboxItem,
    Question,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.schedules import SET_BACK_S, ScheduleView
from holdfast.protocol.stopping import Cause
from holdfast.protocol.transcript import memory_bytes
from holdfast.storage import scheduling, verbs
from holdfast.storage.memory_tables import MemoryTables
from holdfast.storage.port import (
    ALL_BYTES,
    ALL_ENTRIES,
    Answered,
    Appended,
    Claim,
    Committed,
    DueQuestion,
    DueSchedule,
    Edited,
    EditHistory,
    Fire,
    Fired,
    Interrupt,
    Interrupted,
    KeyRecord,
    Lease,
    NotReady,
    Parked,
    PutSchedule,
    Ready,
    RunCommit,
    Send,
    SendResult,
    Steered,
    Stopped,
    StoreInfo,
)
from holdfast.storage.records import (
    due_of,
    journal,
    live_run,
    mailbox_items,
    ready_of,
    ready_since,
    schedule_due,
    schedule_view,
    session_view,
    settlement_of,
)

__all__ = ["MemoryStore"]

_T = TypeVar("_T")


class MemoryStore:
    """A `Store` in memory.

    Parameters:
        yielding: write in a task of its own, one verb after the other, so that other tasks run before and after each,
            and results arrive in the order of the writes, as from a real store's writer; for exploring schedules.
    """

    def __init__(self, *, yielding: bool = False) -> None:
        self._tables = MemoryTables()
        self._yielding = yielding
        self._node_id: str | None = None
        self._given: deque[Callable[[], None]] = deque()
        self._bell: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closing = False

    def _write(self, verb: Callable[[MemoryTables], _T]) -> asyncio.Future[_T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        if self._writer is None:
            self._run(verb, future)
        else:
            self._given.append(lambda: self._run(verb, future))
            if self._bell is not None and not self._bell.done():
                self._bell.set_result(None)
        return future

    async def _write_in_turn(self) -> None:
        """Writer of a yielding store. Ends when the store is closed and everything is written."""
        while True:
            while self._given:
                self._given.popleft()()
                await asyncio.sleep(0)
            if self._closing:
                return
            self._bell = asyncio.get_running_loop().create_future()
            await self._bell

    def _run(self, verb: Callable[[MemoryTables], _T], future: asyncio.Future[_T]) -> None:
        try:
            result = self._now(verb)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def _now(self, verb: Callable[[MemoryTables], _T]) -> _T:
        if self._node_id is None:
            raise StorageError("the store is not open")
        result = verb(self._tables)
        self._tables.counters.commits += 1
        return result

    async def _do(self, verb: Callable[[MemoryTables], _T]) -> _T:
        if self._yielding:
            await asyncio.sleep(0)
        return self._now(verb)

    async def open(self, *, node_id: str, at: float) -> None:
        if self._node_id is not None:
            raise StoreLocked("this memory store is already open")
        self._node_id = node_id
        self._tables.epoch += 1
        if self._yielding:
            self._closing = False
            self._writer = asyncio.get_running_loop().create_task(self._write_in_turn())

    async def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            self._closing = True
            if self._bell is not None and not self._bell.done():
                self._bell.set_result(None)
            await writer
        self._node_id = None

    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return self._write(lambda tables: verbs.send(tables, request))

    def claim(self, session: int, *, run_id: str, at: float) -> asyncio.Future[Claim | NotReady]:
        return self._write(lambda tables: verbs.claim(tables, session, run_id, at))

    def append(
        self, lease: Lease, events: Sequence[tuple[str, bytes]], *, nth: int = 0, stored_limit: int = ALL_BYTES
    ) -> asyncio.Future[Appended]:
        return self._write(lambda tables: verbs.append(tables, lease, events, nth, stored_limit))

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        return self._write(lambda tables: verbs.commit_run(tables, commit))

    def interrupt(self, request: Interrupt) -> asyncio.Future[Interrupted]:
        return self._write(lambda tables: verbs.interrupt(tables, request))

    def stop_session(self, request: Interrupt) -> asyncio.Future[Stopped]:
        return self._write(lambda tables: verbs.stop_session(tables, request))

    def withdraw(
        self, principal: str, key: str, message_id: str, *, at: float
    ) -> asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]:
        return self._write(lambda tables: verbs.withdraw(tables, principal, key, message_id, at))

    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        return self._write(lambda tables: verbs.delete_session(tables, principal, key, at, cause))

    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        return self._write(lambda tables: verbs.steer(tables, lease, step, at))

    def suspend(self, lease: Lease, question: Question) -> asyncio.Future[Appended]:
        return self._write(lambda tables: verbs.suspend(tables, lease, question))

    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        return self._write(lambda tables: verbs.answer(tables, principal, key, answer))

    def park(self, lease: Lease, *, at: float) -> asyncio.Future[Parked]:
        return self._write(lambda tables: verbs.park(tables, lease, at))

    async def questions(self, session: int) -> Sequence[Question]:
        def read(tables: MemoryTables) -> Sequence[Question]:
            row = tables.get(session)
            return row.questions if row else ()

        return await self._do(read)

    async def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        return await self._do(lambda tables: due_of(tables.asking.values(), before=before, limit=limit))

    def edit_history(self, request: EditHistory) -> asyncio.Future[Edited]:
        return self._write(lambda tables: verbs.edit_history(tables, request))

    def add_attachment(
        self,
        principal: str,
        attachment: Attachment,
        body: bytes | bytearray,
        *,
        at: float,
        limit_bytes: int,
        stored_limit: int = ALL_BYTES,
    ) -> asyncio.Future[Attachment]:
        return self._write(
            lambda tables: verbs.add_attachment(tables, principal, attachment, body, at, limit_bytes, stored_limit)
        )

    async def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        return await self._do(lambda tables: tables.attachment(principal, digest))

    async def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        def read(tables: MemoryTables) -> tuple[Attachment, bytes] | None:
            found = tables.attachments.get(principal, {}).get(digest)
            return None if found is None else (found.attachment, found.body)

        return await self._do(read)

    async def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        found = await self.attachment(principal, digest)
        return None if found is None else found[1][start : start + size]

    def put_schedule(self, request: PutSchedule) -> asyncio.Future[ScheduleView]:
        return self._write(lambda tables: scheduling.put_schedule(tables, request))

    def pause_schedule(
        self, principal: str, schedule_id: str, *, paused: bool, at: float
    ) -> asyncio.Future[ScheduleView]:
        return self._write(lambda tables: scheduling.pause_schedule(tables, principal, schedule_id, paused, at))

    def delete_schedule(self, principal: str, schedule_id: str) -> asyncio.Future[ScheduleView]:
        return self._write(lambda tables: scheduling.delete_schedule(tables, principal, schedule_id))

    def fire_schedule(self, request: Fire) -> asyncio.Future[Fired]:
        return self._write(lambda tables: scheduling.fire_schedule(tables, request))

    async def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        def read(tables: MemoryTables) -> Sequence[DueSchedule]:
            turns: Counter[str] = Counter()
            found = []
            for row in tables.due_schedules(now=now, decided_after=now + SET_BACK_S):
                found.append((turns[row.principal], row.due_at, row.schedule, row))
                turns[row.principal] += 1
            found.sort(key=lambda item: item[:3])
            return tuple(schedule_due(row) for *_, row in found[:limit])

        return await self._do(read)

    async def next_schedule(self) -> float | None:
        return await self._do(lambda tables: tables.by_due[0][0] if tables.by_due else None)

    async def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        def read(tables: MemoryTables) -> tuple[DueSchedule, ScheduleView] | None:
            row = tables.find_schedule(principal, schedule_id)
            return None if row is None else (schedule_due(row), schedule_view(row))

        return await self._do(read)

    async def schedules(
        self, *, principal: str | None, limit: int, session: str | None = None
    ) -> Sequence[ScheduleView]:
        def read(tables: MemoryTables) -> Sequence[ScheduleView]:
            rows = (
                row
                for row in tables.schedules.values()
                if principal is None or (row.principal == principal and session in (None, row.spec.session))
            )
            return tuple(schedule_view(row) for row in islice(rows, limit))

        return await self._do(read)

    async def rescue(self, *, at: float) -> Sequence[Claim]:
        return await self._write(lambda tables: verbs.rescue(tables, at))

    def restart(self, lease: Lease, *, at: float, discard_from: int | None = None) -> asyncio.Future[Appended]:
        return self._write(lambda tables: verbs.restart(tables, lease, at, discard_from))

    async def ready(self, *, limit: int) -> Sequence[Ready]:
        def read(tables: MemoryTables) -> Sequence[Ready]:
            rows = sorted(tables.ready.values(), key=lambda row: (ready_since(row), row.session))
            return tuple(ready_of(row) for row in rows[:limit])

        return await self._do(read)

    async def stored_bytes(self, principal: str) -> int:
        return await self._do(lambda tables: tables.stored_bytes(principal))

    async def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]:
        return await self._do(lambda tables: tables.stored.most_common(limit))

    async def read_events(
        self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Stored]:
        return await self._do(lambda tables: tables.events(session, after, limit, limit_bytes))

    async def oldest_seq(self, session: int) -> int:
        def read(tables: MemoryTables) -> int:
            found = tables.sessions.get(session)
            if found is None:
                return 1
            return found.log[0].first_seq if found.log else found.row.next_seq

        return await self._do(read)

    async def run_events(self, session: int, run_id: str) -> Sequence[Stored]:
        def read(tables: MemoryTables) -> Sequence[Stored]:
            found = tables.sessions.get(session)
            return tuple(journal((pack.events for pack in found.log if pack.run_id == run_id) if found else ()))

        return await self._do(read)

    async def transcript(
        self, session: int, *, after: int = 0, limit: int = ALL_ENTRIES, limit_bytes: int = ALL_BYTES
    ) -> Sequence[Entry]:
        def read(tables: MemoryTables) -> Sequence[Entry]:
            row = tables.get(session)
            if row is None:
                return ()
            entries = tables.entries(session, row.history_id)
            first = bisect_right(entries, after, key=lambda entry: entry.n)
            if limit_bytes == ALL_BYTES:
                return tuple(entries[first : first + limit])
            some: list[Entry] = []
            size = 0
            while len(some) < limit and size < limit_bytes and first + len(some) < len(entries):
                some.append(entries[first + len(some)])
                size += len(encode_json(some[-1]))
            return tuple(some)

        return await self._do(read)

    async def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        def read(tables: MemoryTables) -> Sequence[Entry] | int:
            row = tables.get(session)
            if row is None:
                return ()
            entries = tables.entries(session, row.history_id)
            if tables.sessions[session].size > limit_bytes and (size := memory_bytes(entries)) > limit_bytes:
                return size
            return tuple(entries)

        return await self._do(read)

    async def kept(self, session: int, n: int) -> str:
        def read(tables: MemoryTables) -> str:
            found = tables.sessions.get(session)
            return "" if found is None else found.kept.get(n, "")

        return await self._do(read)

    async def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        def read(tables: MemoryTables) -> tuple[int, SessionView] | None:
            row = tables.find(principal, key)
            return None if row is None else (row.session, session_view(row, waiting=len(row.waiting)))

        return await self._do(read)

    async def sessions(
        self, *, principal: str | None, limit: int, before: float | None = None
    ) -> Sequence[SessionView]:
        def read(tables: MemoryTables) -> Sequence[SessionView]:
            rows = [
                session.row
                for session in tables.sessions.values()
                if (principal is None or session.row.principal == principal)
                and (before is None or session.row.updated_at < before)
            ]
            rows.sort(key=lambda row: (-row.updated_at, -row.session))
            return tuple(session_view(row, waiting=len(row.waiting)) for row in rows[:limit])

        return await self._do(read)

    async def mailbox(self, session: int) -> Sequence[MailboxItem]:
        def read(tables: MemoryTables) -> Sequence[MailboxItem]:
            row = tables.get(session)
            return mailbox_items(row.waiting) if row else ()

        return await self._do(read)

    async def settlement(self, session: int, message_id: str) -> Settlement | None:
        def read(tables: MemoryTables) -> Settlement | None:
            row = tables.get(session)
            known = tables.known_message(row, message_id) if row else None
            if row is None or known is None:
                return None
            ended = tables.ended_run(row, known.run_id) if known.run_id is not None else None
            return settlement_of(known, ended)

        return await self._do(read)

    async def run(self, session: int, run_id: str) -> RunView | None:
        def read(tables: MemoryTables) -> RunView | None:
            row = tables.get(session)
            if row is None:
                return None
            if row.run_id == run_id:
                return live_run(row)
            ended = tables.ended_run(row, run_id)
            return ended.view if ended else None

        return await self._do(read)

    async def runs(self, session: int, *, limit: int = 100) -> Sequence[RunView]:
        def read(tables: MemoryTables) -> Sequence[RunView]:
            found = tables.sessions.get(session)
            if found is None:
                return ()
            live = live_run(found.row)
            ended = [run.view for run in reversed(found.runs.values())]
            return tuple(([live] if live else []) + ended)[:limit]

        return await self._do(read)

    async def prune(
        self,
        *,
        events_before: float,
        tombstones_before: float,
        idempotency_before: float,
        attachments_before: float = 0.0,
    ) -> int:
        return await self._do(
            lambda tables: tables.prune(
                events_before=events_before,
                tombstones_before=tombstones_before,
                idempotency_before=idempotency_before,
                attachments_before=attachments_before,
            )
        )

    async def add_key(self, record: KeyRecord) -> None:
        def write(tables: MemoryTables) -> None:
            if record.key_id in tables.keys:
                raise StorageError(f"key {record.key_id!r} already exists")
            tables.keys[record.key_id] = record

        await self._do(write)

    async def keys(self) -> Sequence[KeyRecord]:
        return await self._do(lambda tables: tuple(tables.keys.values()))

    async def revoke_key(self, key_id: str, *, at: float) -> bool:
        def write(tables: MemoryTables) -> bool:
            record = tables.keys.get(key_id)
            if record is None or record.revoked_at is not None:
                return False
            tables.keys[key_id] = msgspec.structs.replace(record, revoked_at=at)
            return True

        return await self._do(write)

    async def info(self) -> StoreInfo:
        def read(tables: MemoryTables) -> StoreInfo:
            return StoreInfo(
                engine="memory",
                path="",
                version="1",
                commits=tables.counters.commits,
                batches=tables.counters.batches,
                sessions=sum(map(len, tables.owned.values())),
                stale_writes_refused=tables.counters.stale_writes_refused,
                duplicates_prevented=tables.counters.duplicates_prevented,
            )

        return await self._do(read)
