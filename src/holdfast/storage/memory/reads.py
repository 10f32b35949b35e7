# ruff: noqa: D102 - `Store` documents the reads
"""The reads of a store in dictionaries."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from heapq import nlargest
from itertools import islice

from holdfast.protocol.events import Stored, encode_json
from holdfast.protocol.messages import (
    Attachment,
    Entry,
    Grant,
    MailboxItem,
    Question,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.schedules import SET_BACK_S, ScheduleView
from holdfast.protocol.transcript import memory_bytes
from holdfast.storage.event_packs import journal
from holdfast.storage.memory.tables import MemoryTables
from holdfast.storage.rows import ready_since
from holdfast.storage.values import ALL_BYTES, DueQuestion, DueSchedule, KeyRecord, OldEvents, Ready
from holdfast.storage.views import (
    due_of,
    live_run,
    mailbox_items,
    ready_of,
    schedule_due,
    schedule_view,
    session_view,
    settlement_of,
)

__all__ = ["MemoryReads"]


class MemoryReads:
    """Implementation of `holdfast.storage.backend.Reads` on the dictionaries of `MemoryTables`."""

    __slots__ = ("_tables",)

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables

    def events(self, session: int, *, after: int, limit: int, limit_bytes: int) -> Sequence[Stored]:
        return self._tables.events(session, after, limit, limit_bytes)

    def oldest_seq(self, session: int) -> int:
        found = self._tables.sessions.get(session)
        if found is None:
            return 1
        return found.log[0].first_seq if found.log else found.row.next_seq

    def old_events(
        self, *, before: float, after: tuple[float, int] | None, limit_bytes: int
    ) -> tuple[Sequence[OldEvents], tuple[float, int] | None]:
        """Return the old events of whole sessions, in the order of their numbers."""
        read: list[OldEvents] = []
        size = 0
        for number, session in self._tables.sessions.items():
            row, packs = session.row, session.log[: self._tables.old_packs(session, before)]
            if packs and row.deleted_at is None and (after is None or number > after[1]):
                events = tuple(event for pack in packs for event in pack.events)
                read.append(OldEvents(session=number, principal=row.principal, key=row.key, events=events))
                size += sum(len(pack.body) for pack in packs)
                if size >= limit_bytes:
                    return read, (0.0, number)
        return read, None

    def run_events(self, session: int, run_id: str) -> Sequence[Stored]:
        found = self._tables.sessions.get(session)
        return tuple(journal((pack.events for pack in found.log if pack.run_id == run_id) if found else ()))

    def transcript(self, session: int, *, after: int, limit: int, limit_bytes: int) -> Sequence[Entry]:
        row = self._tables.get(session)
        if row is None:
            return ()
        entries = self._tables.entries(session, row.history_id)
        first = bisect_right(entries, after, key=lambda entry: entry.n)
        if limit_bytes == ALL_BYTES:
            return tuple(entries[first : first + limit])
        some: list[Entry] = []
        size = 0
        while len(some) < limit and size < limit_bytes and first + len(some) < len(entries):
            some.append(entries[first + len(some)])
            size += len(encode_json(some[-1]))
        return tuple(some)

    def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int:
        row = self._tables.get(session)
        if row is None:
            return ()
        entries = self._tables.entries(session, row.history_id)
        if self._tables.sessions[session].size > limit_bytes and (size := memory_bytes(entries)) > limit_bytes:
            return size
        return tuple(entries)

    def kept(self, session: int, n: int) -> str:
        found = self._tables.sessions.get(session)
        return "" if found is None else found.kept.get(n, "")

    def questions(self, session: int) -> Sequence[Question]:
        row = self._tables.get(session)
        return row.questions if row else ()

    def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        return due_of(self._tables.asking.values(), before=before, limit=limit)

    def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        return self._tables.attachment(principal, digest)

    def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        found = self._tables.attachments.get(principal, {}).get(digest)
        return None if found is None else (found.attachment, found.body)

    def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        found = self.attachment(principal, digest)
        return None if found is None else found[1][start : start + size]

    def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        row = self._tables.find(principal, key)
        return None if row is None else (row.session, session_view(row, waiting=len(row.waiting)))

    def sessions(self, *, principal: str | None, limit: int, before: tuple[float, int] | None) -> Sequence[SessionView]:
        rows = [
            session.row
            for session in self._tables.sessions.values()
            if (principal is None or session.row.principal == principal)
            and (before is None or (session.row.updated_at, session.row.session) < before)
        ]
        found = nlargest(limit, rows, key=lambda row: (row.updated_at, row.session))
        return tuple(session_view(row, waiting=len(row.waiting)) for row in found)

    def live_sessions(self) -> int:
        return sum(map(len, self._tables.owned.values()))

    def mailbox(self, session: int) -> Sequence[MailboxItem]:
        row = self._tables.get(session)
        return mailbox_items(row.waiting) if row else ()

    def settlement(self, session: int, message_id: str) -> Settlement | None:
        row = self._tables.get(session)
        known = self._tables.known_message(row, message_id) if row else None
        if row is None or known is None:
            return None
        ended = self._tables.ended_run(row, known.run_id) if known.run_id is not None else None
        return settlement_of(known, ended)

    def run(self, session: int, run_id: str) -> RunView | None:
        row = self._tables.get(session)
        if row is None:
            return None
        if row.run_id == run_id:
            return live_run(row)
        ended = self._tables.ended_run(row, run_id)
        return ended.view if ended else None

    def runs(self, session: int, *, limit: int) -> Sequence[RunView]:
        found = self._tables.sessions.get(session)
        if found is None:
            return ()
        live = live_run(found.row)
        ended = [run.view for run in reversed(found.runs.values())]
        return tuple(([live] if live else []) + ended)[:limit]

    def ready(self, *, limit: int) -> Sequence[Ready]:
        rows = sorted(self._tables.ready.values(), key=lambda row: (ready_since(row), row.session))
        return tuple(ready_of(row) for row in rows[:limit])

    def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]:
        turns: Counter[str] = Counter()
        found = []
        for row in self._tables.due_schedules(now=now, decided_after=now + SET_BACK_S):
            found.append((turns[row.principal], row.due_at, row.schedule, row))
            turns[row.principal] += 1
        found.sort(key=lambda item: item[:3])
        return tuple(schedule_due(row) for *_, row in found[:limit])

    def next_schedule(self) -> float | None:
        return self._tables.by_due[0][0] if self._tables.by_due else None

    def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        row = self._tables.find_schedule(principal, schedule_id)
        return None if row is None else (schedule_due(row), schedule_view(row))

    def schedules(self, *, principal: str | None, session: str | None, limit: int) -> Sequence[ScheduleView]:
        rows = (
            row
            for row in self._tables.schedules.values()
            if principal is None or (row.principal == principal and session in (None, row.spec.session))
        )
        return tuple(schedule_view(row) for row in islice(rows, limit))

    def grants(self, principal: str, session: int | None) -> Sequence[Grant]:
        return self._tables.grants.of(principal, session)

    def stored_bytes(self, principal: str) -> int:
        return self._tables.stored_bytes(principal)

    def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]:
        return self._tables.stored.most_common(limit)

    def keys(self) -> Sequence[KeyRecord]:
        return tuple(self._tables.keys.values())
