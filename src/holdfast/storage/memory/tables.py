# ruff: noqa: D102 - `Tables` documents its methods
"""The tables of a store as dictionaries.

Changes take effect at once and are never undone, so a transaction must refuse a request before its first change.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from holdfast.errors import StorageError
from holdfast.protocol.events import Stored
from holdfast.protocol.messages import Attachment, Entry
from holdfast.protocol.transcript import memory_bytes
from holdfast.storage.backend import Counters, PruneTimes
from holdfast.storage.event_packs import unpack_events
from holdfast.storage.memory.grants import MemoryGrants
from holdfast.storage.rows import (
    NOBODY,
    EndedRun,
    HistoryRow,
    KnownMessage,
    Mail,
    ScheduleRow,
    SessionRow,
    ready_since,
)
from holdfast.storage.values import ALL_BYTES, KeyRecord, OldEvents, RequestKind

__all__ = ["MemoryTables"]


class _Pack(msgspec.Struct, frozen=True, gc=False):
    """Events that were written together, packed as in SQL so that the garbage collector has fewer objects to scan."""

    first_seq: int
    last_seq: int
    run_id: str | None
    at: float
    commit_no: int
    body: bytes

    @property
    def events(self) -> list[Stored]:
        """Unpack and return the events."""
        return unpack_events(self.last_seq, self.body)


class _Message(msgspec.Struct, gc=False):
    """An accepted message and its outcome."""

    message_id: str
    seq: int
    body_hash: bytes
    accepted_at: float
    idempotency_key: str | None
    run_id: str | None = None
    withdrawn: bool = False

    def known(self) -> KnownMessage:
        return KnownMessage(self.message_id, self.seq, self.body_hash, self.run_id, self.withdrawn)


class _Attachment(msgspec.Struct, gc=False):
    """An attachment of a principal, with the time of its last upload."""

    attachment: Attachment
    body: bytes
    at: float


class _Session:
    """One session's rows. ``entries`` is the transcript as of the history row ``shown``."""

    __slots__ = ("attached", "by_key", "entries", "history", "kept", "log", "messages", "row", "runs", "shown", "size")

    def __init__(self, row: SessionRow) -> None:
        self.row = row
        self.log: list[_Pack] = []
        self.messages: dict[str, _Message] = {}
        self.by_key: dict[str, str] = {}
        self.runs: dict[str, EndedRun] = {}
        self.history: dict[str, HistoryRow] = {}
        self.kept: dict[int, str] = {}
        self.entries: list[Entry] = []
        self.shown: str | None = None
        self.attached: set[str] = set()
        self.size = 0
        """Counted bytes of the session except its events. They are dropped with the session or its contents."""


_ROW_BYTES = 512
"""Approximate memory of a message, a run or an attachment besides its contents."""
_SESSION_BYTES = 2048


class MemoryTables:
    """The tables as dictionaries (see `holdfast.storage.backend.Tables`)."""

    def __init__(self) -> None:
        self.epoch = 0
        self.workspace_pool: str | None = None
        self.counters = Counters()
        self.sessions: dict[int, _Session] = {}
        self.stored: Counter[str] = Counter()
        self.by_name: dict[tuple[str, str], _Session] = {}
        self.owned: dict[str, set[int]] = {}
        self.ready: dict[int, SessionRow] = {}
        self.asking: dict[int, SessionRow] = {}
        self.attachments: dict[str, dict[str, _Attachment]] = {}
        self.keys: dict[str, KeyRecord] = {}
        self.grants = MemoryGrants(self.grow)
        self.schedules: dict[int, ScheduleRow] = {}
        self.by_due: list[tuple[float, int]] = []
        """Due time and id of each schedule; sorted."""
        self._newest_decision = -math.inf
        self._schedule_ids: dict[tuple[str, str], int] = {}
        self._schedule_counts: Counter[str] = Counter()
        self._last_schedule = 0
        self._last_number = 0
        self._commit_no = 0

    def find(self, principal: str, key: str) -> SessionRow | None:
        session = self.by_name.get((principal, key))
        return None if session is None else session.row

    def get(self, session: int) -> SessionRow | None:
        found = self.sessions.get(session)
        return None if found is None else found.row

    def live_sessions(self, principal: str) -> int:
        return len(self.owned.get(principal, ()))

    def stored_bytes(self, principal: str) -> int:
        return self.stored[principal]

    def grow(self, principal: str, amount: int) -> None:
        self.stored[principal] += amount
        if not self.stored[principal]:
            del self.stored[principal]

    def new_session_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def by_idempotency_key(self, row: SessionRow, key: str) -> KnownMessage | None:
        session = self.sessions[row.session]
        message_id = session.by_key.get(key)
        return None if message_id is None else session.messages[message_id].known()

    def known_message(self, row: SessionRow, message_id: str) -> KnownMessage | None:
        message = self.sessions[row.session].messages.get(message_id)
        return None if message is None else message.known()

    def ended_run(self, row: SessionRow, run_id: str) -> EndedRun | None:
        return self.sessions[row.session].runs.get(run_id)

    def events_between(self, row: SessionRow, first: int, last: int) -> tuple[Stored, ...]:
        return tuple(e for e in self.events(row.session, first - 1, last - first + 1) if e.seq <= last)

    def events(self, session: int, after: int, limit: int, limit_bytes: int = ALL_BYTES) -> list[Stored]:
        """Return events with seq > after, in whole packs until `limit` events or `limit_bytes` are reached."""
        found = self.sessions.get(session)
        out: list[Stored] = []
        if found is None:
            return out
        log = found.log
        size = 0
        for index in range(bisect_left(log, after + 1, key=lambda pack: pack.last_seq), len(log)):
            events = log[index].events
            out.extend(events if log[index].first_seq > after else [e for e in events if e.seq > after])
            size += sum([len(event.body) for event in events])
            if len(out) >= limit or size >= limit_bytes:
                break
        return out

    def orphans(self) -> Sequence[SessionRow]:
        rows = [
            s.row
            for s in self.sessions.values()
            if s.row.run_id is not None and s.row.holder not in (self.epoch, NOBODY)
        ]
        return sorted(rows, key=lambda row: (row.started_at, row.session))

    def ask_others(self, session: int, kind: RequestKind, body: bytes) -> Sequence[int]:
        return ()

    def add_session(self, row: SessionRow) -> None:
        session = _Session(row)
        self.sessions[row.session] = session
        self._count(row, _SESSION_BYTES)
        self.by_name[row.principal, row.key] = session
        self.owned.setdefault(row.principal, set()).add(row.session)
        self.save(row)

    def save(self, row: SessionRow) -> None:
        if ready_since(row) is not None:
            self.ready[row.session] = row
        elif row.session in self.ready:
            del self.ready[row.session]
        if row.questions:
            self.asking[row.session] = row
        elif row.session in self.asking:
            del self.asking[row.session]
        if row.deleted_at is not None:
            self.owned[row.principal].discard(row.session)

    def save_append(self, row: SessionRow) -> None:
        """Do nothing: neither readiness nor questions have changed."""

    def save_start(self, row: SessionRow) -> None:
        """Do nothing: neither readiness nor questions have changed."""

    def save_end(self, row: SessionRow) -> None:
        """Do nothing: neither readiness nor questions have changed."""

    def refuse_used_message_id(self, row: SessionRow, message_id: str) -> None:
        if message_id in self.sessions[row.session].messages:
            raise StorageError(f"message id {message_id!r} was already used in this session")

    def add_message(self, row: SessionRow, mail: Mail, *, idempotency_key: str | None, body_hash: bytes) -> None:
        session = self.sessions[row.session]
        message = mail.message
        self._count(row, _ROW_BYTES)  # its content is in the event
        session.messages[message.message_id] = _Message(
            message.message_id, message.seq, body_hash, message.accepted_at, idempotency_key
        )
        if idempotency_key is not None:
            session.by_key[idempotency_key] = message.message_id

    def unshelve(self, row: SessionRow, mails: tuple[Mail, ...]) -> tuple[Mail, ...]:
        return mails

    def take(self, row: SessionRow, mails: Sequence[Mail], run_id: str) -> None:
        messages = self.sessions[row.session].messages
        for mail in mails:
            messages[mail.message.message_id].run_id = run_id

    def withdraw(self, row: SessionRow, mails: Sequence[Mail], at: float) -> None:
        messages = self.sessions[row.session].messages
        for mail in mails:
            messages[mail.message.message_id].withdrawn = True

    def add_events(
        self, row: SessionRow, run_id: str | None, at: float, first_seq: int, last_seq: int, body: bytes
    ) -> None:
        self._commit_no += 1
        pack = _Pack(first_seq, last_seq, run_id, at, self._commit_no, body)
        log = self.sessions[row.session].log
        if log and log[-1].last_seq > last_seq:
            insort(log, pack, key=lambda other: other.last_seq)
        else:
            log.append(pack)
        self.grow(row.principal, len(body))

    def add_run(self, row: SessionRow, run: EndedRun, history: HistoryRow | None) -> None:
        session = self.sessions[row.session]
        session.runs[run.view.run_id] = run
        self._count(row, _ROW_BYTES + len(run.view.text))
        if history is not None:
            session.history[history.history_id] = history
            self._count(row, memory_bytes(history.entries))
            if session.shown == history.previous_id and not history.whole:
                session.entries.extend(history.entries)
                session.shown = history.history_id

    def add_kept(self, row: SessionRow, n: int, body: str) -> None:
        self.sessions[row.session].kept[n] = body
        self._count(row, len(body))

    def add_edit(self, row: SessionRow, history: HistoryRow) -> None:
        self.sessions[row.session].history[history.history_id] = history
        self._count(row, memory_bytes(history.entries))

    def _count(self, row: SessionRow, amount: int) -> None:
        """Add to the counted bytes that are dropped only with the session or its contents."""
        self.sessions[row.session].size += amount
        self.grow(row.principal, amount)

    def step_back(self, row: SessionRow, newest: HistoryRow) -> None:
        row.history_id = newest.previous_id

    def history(self, row: SessionRow) -> HistoryRow | None:
        return None if row.history_id is None else self.sessions[row.session].history[row.history_id]

    def transcript(self, row: SessionRow, history_id: str | None) -> tuple[Entry, ...]:
        return tuple(self.entries(row.session, history_id))

    def entries(self, session: int, history_id: str | None) -> list[Entry]:
        """Return the transcript as of the history row `history_id`. The caller must not modify the list."""
        found = self.sessions[session]
        if found.shown != history_id:
            chain: list[HistoryRow] = []
            newest = history_id
            while newest is not None:
                chain.append(found.history[newest])
                newest = None if chain[-1].whole else chain[-1].previous_id
            found.entries = [entry for piece in reversed(chain) for entry in piece.entries]
            found.shown = history_id
        return found.entries

    def attachment(self, principal: str, digest: str) -> Attachment | None:
        found = self.attachments.get(principal, {}).get(digest)
        return None if found is None else found.attachment

    def attached_bytes(self, principal: str) -> int:
        return sum(len(found.body) for found in self.attachments.get(principal, {}).values())

    def add_attachment(self, principal: str, attachment: Attachment, body: bytes | bytearray, at: float) -> None:
        self.attachments.setdefault(principal, {})[attachment.digest] = _Attachment(attachment, bytes(body), at)
        self.grow(principal, len(body))

    def touch_attachment(self, principal: str, digest: str, at: float) -> None:
        found = self.attachments[principal][digest]
        found.at = max(found.at, at)

    def use_attachments(self, row: SessionRow, digests: Iterable[str]) -> None:
        self.sessions[row.session].attached.update(digests)

    def find_schedule(self, principal: str, schedule_id: str) -> ScheduleRow | None:
        number = self._schedule_ids.get((principal, schedule_id))
        return None if number is None else self.schedules[number]

    def schedule(self, schedule: int) -> ScheduleRow | None:
        return self.schedules.get(schedule)

    def schedules_of(self, principal: str) -> int:
        return self._schedule_counts[principal]

    def add_schedule(self, row: ScheduleRow) -> None:
        self._last_schedule += 1
        row = msgspec.structs.replace(row, schedule=self._last_schedule)
        self._schedule_ids[row.principal, row.schedule_id] = row.schedule
        self._schedule_counts[row.principal] += 1
        self.save_schedule(row)

    def save_schedule(self, row: ScheduleRow) -> None:
        self._not_due(row)
        self.schedules[row.schedule] = row
        self._newest_decision = max(self._newest_decision, row.progress.decided_at)
        if row.due_at is not None:
            insort(self.by_due, (row.due_at, row.schedule))

    def put_off_schedule(self, row: ScheduleRow, *, at: float, until: float) -> None:
        raise AssertionError("schedules in memory are never unreadable")

    def drop_schedule(self, row: ScheduleRow) -> None:
        self._not_due(row)
        del self.schedules[row.schedule]
        del self._schedule_ids[row.principal, row.schedule_id]
        self._schedule_counts[row.principal] -= 1

    def _not_due(self, row: ScheduleRow) -> None:
        known = self.schedules.get(row.schedule)
        if known is not None and known.due_at is not None:
            del self.by_due[bisect_left(self.by_due, (known.due_at, row.schedule))]

    def due_schedules(self, *, now: float, decided_after: float) -> Iterator[ScheduleRow]:
        """Yield, in order of due time, schedules that are due or whose next tick was determined after `decided_after`.

        A `decided_after` in the future finds schedules that were last checked before the clock was set back.
        """
        due = bisect_right(self.by_due, now, key=lambda item: item[0])
        end = len(self.by_due) if self._newest_decision > decided_after else due
        for index in range(end):
            row = self.schedules[self.by_due[index][1]]
            if index < due or row.progress.decided_at > decided_after:
                yield row

    def purge_contents(self, row: SessionRow, *, keep_run_id: str | None = None) -> None:
        session = self.sessions[row.session]
        session.messages.clear()
        session.by_key.clear()
        session.history.clear()
        session.kept.clear()
        session.entries.clear()
        session.attached.clear()
        session.shown = None
        session.runs = {run_id: run for run_id, run in session.runs.items() if run_id == keep_run_id}
        left = _SESSION_BYTES  # the tombstone
        self.grow(row.principal, left - session.size - sum(len(pack.body) for pack in session.log[:-1]))
        session.size = left
        del session.log[:-1]
        row.history_id = None

    def _drop_attachments(self, before: float) -> int:
        used = {(session.row.principal, digest) for session in self.sessions.values() for digest in session.attached}
        dropped = 0
        for principal, kept in self.attachments.items():
            for digest in [digest for digest, found in kept.items() if found.at < before]:
                if (principal, digest) not in used:
                    self.grow(principal, -len(kept.pop(digest).body))
                    dropped += 1
        return dropped

    def prune(self, before: PruneTimes, after: tuple[Any, ...]) -> tuple[int, tuple[Any, ...] | None]:
        """Prune all sessions in one call; `after` is ignored."""
        dropped = 0
        for session in list(self.sessions.values()):
            row = session.row
            if row.deleted_at is not None and row.deleted_at < before.tombstones and row.run_id is None:
                del self.sessions[row.session]
                del self.by_name[row.principal, row.key]
                self.grow(row.principal, -session.size - sum(len(pack.body) for pack in session.log))
                dropped += 1
                continue
            dropped += self._drop_packs(session, self.old_packs(session, before.events))
            open_ids = {mail.message.message_id for mail in (*row.waiting, *row.taken)}
            for message_id, message in session.messages.items():
                if message_id in open_ids or message.accepted_at >= before.idempotency:
                    continue
                if message.idempotency_key is not None:
                    del session.by_key[message.idempotency_key]
                    message.idempotency_key = None
                    dropped += 1
        return dropped + self._drop_attachments(before.attachments), None

    @staticmethod
    def old_packs(session: _Session, before: float) -> int:
        """Return the number of the session's oldest packs that pruning drops."""
        row = session.row
        keep = row.started_seq if row.run_id is not None else row.next_seq
        for count, pack in enumerate(session.log):
            if pack.at >= before or pack.last_seq >= keep:
                return count
        return len(session.log)

    def _drop_packs(self, session: _Session, count: int) -> int:
        self.grow(session.row.principal, -sum(len(pack.body) for pack in session.log[:count]))
        del session.log[:count]
        return count

    def drop_old_events(self, read: Sequence[OldEvents], *, before: float) -> int:
        dropped = 0
        for old in read:
            session = self.sessions.get(old.session)
            if session is not None and session.row.deleted_at is None:
                last_seq = old.events[-1].seq
                known = sum(pack.last_seq <= last_seq for pack in session.log)
                dropped += self._drop_packs(session, min(known, self.old_packs(session, before)))
        return dropped

    def add_key(self, record: KeyRecord) -> None:
        if record.key_id in self.keys:
            raise StorageError(f"key {record.key_id!r} already exists")
        self.keys[record.key_id] = record

    def revoke_key(self, key_id: str, at: float) -> bool:
        record = self.keys.get(key_id)
        if record is None or record.revoked_at is not None:
            return False
        self.keys[key_id] = msgspec.structs.replace(record, revoked_at=at)
        return True
