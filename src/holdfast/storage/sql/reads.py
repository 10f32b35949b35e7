# ruff: noqa: D102 - `Store` documents the reads
"""The reads of a store in SQL, on one connection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, Final

import msgspec

from holdfast.protocol.events import Stored
from holdfast.protocol.messages import Attachment, Entry, Grant, MailboxItem, Question, RunView, SessionView, Settlement
from holdfast.protocol.schedules import SET_BACK_S, ScheduleView
from holdfast.storage.event_packs import journal, unpack_events
from holdfast.storage.sql.columns import (
    decode_attachment,
    decode_grant,
    decode_live,
    decode_run,
    ended_of,
    known_of,
    load,
    mail_of,
    row_of,
    schedule_of,
)
from holdfast.storage.sql.database import Database
from holdfast.storage.sql.pruner import read_old_events
from holdfast.storage.sql.transcripts import read_all_entries, read_entries
from holdfast.storage.values import ALL_BYTES, DueQuestion, DueSchedule, KeyRecord, OldEvents, Ready
from holdfast.storage.views import (
    due_of,
    live_run,
    mailbox_items,
    schedule_due,
    schedule_view,
    session_view,
    settlement_of,
)

__all__ = ["SqlReads", "ready_of"]

_FAR: Final = 2.0**62
"""A time later than all others that fits into a 64-bit integer."""


class SqlReads:
    """Implementation of `holdfast.storage.backend.Reads` in SQL.

    Parameters:
        database: database that runs the statements.
    """

    def __init__(self, database: Database) -> None:
        self._query = database.query
        self._database = database

    def events(self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES) -> list[Stored]:
        """Return events with seq > after, in whole packs until `limit` events or `limit_bytes` are reached."""
        out: list[Stored] = []
        size = 0
        with closing(self._database.rows("events_after", session, after, limit)) as rows:
            for last_seq, body in rows:
                pack = unpack_events(last_seq, body)
                out.extend(pack if pack[0].seq > after else [event for event in pack if event.seq > after])
                size += sum([len(event.body) for event in pack])
                if len(out) >= limit or size >= limit_bytes:
                    break
        return out

    def stored_bytes(self, principal: str) -> int:
        rows = self._query("stored_bytes", principal)
        return int(rows[0][0]) if rows else 0

    def most_stored(self, *, limit: int) -> tuple[tuple[str, int], ...]:
        return tuple((principal, int(size)) for principal, size in self._query("most_stored", limit))

    def oldest_seq(self, session: int) -> int:
        rows = self._query("oldest_event", session) or self._query("next_seq", session)
        return int(rows[0][0]) if rows else 1

    def old_events(
        self, *, before: float, after: tuple[float, int] | None, limit_bytes: int
    ) -> tuple[list[OldEvents], tuple[float, int] | None]:
        return read_old_events(self._database, before, after, limit_bytes=limit_bytes)

    def run_events(self, session: int, run_id: str) -> tuple[Stored, ...]:
        view = self._ended_or_live(session, run_id)
        if view is None:
            return ()
        packs: Iterable[list[Stored]] = (
            unpack_events(last_seq, body) for last_seq, body in self._query("run_events", session, view[1], run_id)
        )
        return tuple(journal(packs))

    def transcript(self, session: int, *, after: int, limit: int, limit_bytes: int = ALL_BYTES) -> tuple[Entry, ...]:
        for (newest,) in self._query("history_id", session):
            return tuple(
                read_entries(self._database, session, newest, after=after, limit=limit, limit_bytes=limit_bytes)
            )
        return ()

    def transcript_within(self, session: int, *, limit_bytes: int) -> tuple[Entry, ...] | int:
        for (newest,) in self._query("history_id", session):
            entries = read_all_entries(self._database, session, newest, limit_bytes=limit_bytes)
            if entries is None:
                return int(self._query("transcript_bytes", newest, session, session, session)[0][0])
            return tuple(entries)
        return ()

    def kept(self, session: int, n: int) -> str:
        for (body,) in self._query("kept", session, n):
            return bytes(body).decode()
        return ""

    def questions(self, session: int) -> tuple[Question, ...]:
        for columns in self._query("session_by_number", session):
            return row_of(columns)[0].questions
        return ()

    def due_questions(self, *, before: float, limit: int) -> tuple[DueQuestion, ...]:
        rows = [row_of(columns)[0] for columns in self._query("asking", before, limit)]
        return due_of(rows, before=before, limit=limit)

    def attachment_about(self, principal: str, digest: str) -> Attachment | None:
        for (about,) in self._query("attachment", principal, digest):
            return decode_attachment(about)
        return None

    def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None:
        for (about,) in self._query("attachment", principal, digest):
            attachment = decode_attachment(about)
            body = self.attachment_part(principal, digest, start=0, size=attachment.size_bytes)
            return None if body is None else (attachment, body)
        return None

    def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None:
        return self._database.read_large("attachment_body", principal, digest, start=start, size=size)

    def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None:
        for columns in self._query("session_by_key", principal, key):
            row, waiting, _ = row_of(columns)
            return row.session, session_view(row, waiting=waiting)
        return None

    def sessions(
        self, *, principal: str | None, limit: int, before: tuple[float, int] | None
    ) -> tuple[SessionView, ...]:
        at, number = (math.inf, 0) if before is None else before
        position = (int(max(-_FAR, min(at, _FAR))), at, number, limit)
        rows = (
            self._query("sessions", *position, *position)
            if principal is None
            else self._query("sessions_of_principal", principal, *position, principal, *position)
        )
        views = []
        for columns in rows:
            row, waiting, _ = row_of(columns)
            views.append(session_view(row, waiting=waiting))
        return tuple(views)

    def mailbox(self, session: int) -> tuple[MailboxItem, ...]:
        with closing(self._database.rows("waiting_messages", session)) as rows:
            return mailbox_items(map(mail_of, rows))

    def settlement(self, session: int, message_id: str) -> Settlement | None:
        known = known_of(self._query("message_by_id", session, message_id))
        if known is None:
            return None
        ended = None if known.run_id is None else ended_of(self._query("ended_run", session, known.run_id))
        return settlement_of(known, ended)

    def _live(self, session: int) -> tuple[RunView, int] | None:
        for columns in self._query("session_by_number", session):
            row = load(self._database, columns)
            view = live_run(row)
            return None if view is None else (view, row.started_seq)
        return None

    def _ended_or_live(self, session: int, run_id: str) -> tuple[RunView, int] | None:
        live = self._live(session)
        if live is not None and live[0].run_id == run_id:
            return live
        ended = ended_of(self._query("ended_run", session, run_id))
        return None if ended is None else (ended.view, ended.started_seq)

    def run(self, session: int, run_id: str) -> RunView | None:
        found = self._ended_or_live(session, run_id)
        return None if found is None else found[0]

    def runs(self, session: int, *, limit: int) -> tuple[RunView, ...]:
        live = self._live(session)
        with closing(self._database.rows("ended_runs", session, session, limit, session)) as rows:
            ended = [decode_run(body) for (body,) in rows]
        if live is not None and all(run.run_id != live[0].run_id for run in ended):
            ended.insert(0, live[0])
        return tuple(ended[:limit])

    def ready(self, *, limit: int) -> tuple[Ready, ...]:
        return ready_of(self._query("ready", limit))

    def due_schedules(self, *, now: float, limit: int) -> tuple[DueSchedule, ...]:
        rows = self._query("due_schedules", now, now + SET_BACK_S, limit)
        return tuple(schedule_due(schedule_of(columns)) for columns in rows)

    def next_schedule(self) -> float | None:
        due_at: float | None = self._query("next_schedule")[0][0]
        return due_at

    def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None:
        for columns in self._query("schedule_by_id", principal, schedule_id):
            row = schedule_of(columns)
            return schedule_due(row), schedule_view(row)
        return None

    def schedules(self, *, principal: str | None, session: str | None, limit: int) -> tuple[ScheduleView, ...]:
        match principal, session:
            case None, _:
                rows = self._query("schedules", limit)
            case str(), None:
                rows = self._query("schedules_of_principal", principal, limit)
            case _:
                rows = self._query("schedules_of_session", principal, session, limit)
        return tuple(schedule_view(schedule_of(columns)) for columns in rows)

    def grants(self, principal: str, session: int | None) -> tuple[Grant, ...]:
        if session is None:
            rows = self._query("grants_of_principal", principal)
        else:
            rows = self._query("grants_of_session", principal, session)
        return tuple(decode_grant(body) for (body,) in rows)

    def keys(self) -> tuple[KeyRecord, ...]:
        return tuple(
            KeyRecord(
                key_id=key_id,
                principal=principal,
                role=role,
                digest=bytes(digest),
                created_at=created_at,
                label=label,
                revoked_at=revoked_at,
                agents=None if agents is None else tuple(msgspec.json.decode(agents, type=list[str])),
            )
            for key_id, principal, role, digest, created_at, label, revoked_at, agents in self._query("keys")
        )

    def live_sessions(self) -> int:
        rows = self._query("all_live_sessions")
        return int(rows[0][0]) if rows else 0


def ready_of(rows: Sequence[tuple[Any, ...]]) -> tuple[Ready, ...]:
    """Return the ready sessions in the rows of the statement ``ready``."""
    return tuple(
        Ready(
            session=session,
            principal=principal,
            key=key,
            agent=agent if run is None else decode_live(run).agent,
            not_before=due,
        )
        for session, principal, key, agent, due, run in rows
    )
