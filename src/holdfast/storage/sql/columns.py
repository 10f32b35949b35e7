"""Conversion of `SessionRow` and the other row types to and from SQL columns and JSON bodies."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import msgspec

from holdfast.errors import format_error
from holdfast.protocol.events import encode_json
from holdfast.protocol.messages import Attachment, Grant, Message, Question, RunState, RunView
from holdfast.protocol.schedules import LEAST_EVERY_S, Progress, ScheduleSpec
from holdfast.protocol.stopping import Cause
from holdfast.storage.event_packs import unpack_entries
from holdfast.storage.rows import (
    EndedRun,
    HistoryRow,
    KnownMessage,
    Mail,
    ScheduleRow,
    SessionRow,
    due_at,
    question_due,
    ready_since,
)
from holdfast.storage.sql.database import Database
from holdfast.storage.values import KeyRecord

__all__ = [
    "LIVE_COLUMN",
    "decode_attachment",
    "decode_grant",
    "decode_live",
    "decode_run",
    "ended_of",
    "key_columns",
    "known_of",
    "listed_at",
    "live_run",
    "load",
    "mail_of",
    "new_columns",
    "piece_of",
    "row_of",
    "schedule_columns",
    "schedule_of",
    "shelve",
    "state_columns",
]


LIVE_COLUMN = -12
"""Index, from the end, of the active run's column in `state_columns`, the only column that may be large."""
_SHORT = 80
"""Maximum length, in characters, of a message content that stays in memory."""


class _LiveRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of the active run in the session's row."""

    agent: str
    attempt: int
    started_at: float
    started_seq: int
    messages: tuple[str, ...]
    state: RunState = "running"
    cause: Cause | None = None
    steered: int = 0
    rolled_back: bool = False
    resumed_as: str | None = None
    questions: tuple[Question, ...] = ()
    answered: tuple[tuple[str, int], ...] = ()
    version: str = ""


decode_live = msgspec.json.Decoder(_LiveRun).decode
decode_run = msgspec.json.Decoder(RunView).decode
_decode_message = msgspec.json.Decoder(Message).decode
decode_grant = msgspec.json.Decoder(Grant).decode
decode_attachment = msgspec.json.Decoder(Attachment).decode
_decode_schedule = msgspec.json.Decoder(ScheduleRow).decode


def mail_of(columns: tuple[Any, ...]) -> Mail:
    """Convert a row of the statement ``waiting_messages`` or ``taken_message`` to a message."""
    body, batch, due, target = columns
    return Mail(_decode_message(body), batch, due, target)


def shelve(mails: Iterable[Mail]) -> tuple[Mail, ...]:
    """Return the messages without their long contents, which stay in the database."""
    return tuple([_shelved(mail) if len(mail.message.content) > _SHORT else mail for mail in mails])


def _shelved(mail: Mail) -> Mail:
    content = mail.message.content
    return mail._replace(message=msgspec.structs.replace(mail.message, content=""), shelved=len(content))


def known_of(rows: list[tuple[Any, ...]]) -> KnownMessage | None:
    """Convert the result of ``message_by_id`` or ``message_by_idempotency_key``; None if `rows` is empty."""
    if not rows:
        return None
    message_id, seq, body_hash, run_id, withdrawn_at = rows[0]
    return KnownMessage(message_id, seq, bytes(body_hash), run_id, withdrawn_at is not None)


def ended_of(rows: list[tuple[Any, ...]]) -> EndedRun | None:
    """Convert the result of the statement ``ended_run``; None if `rows` is empty."""
    if not rows:
        return None
    body, fence, started_seq, commit_seq, end_seq, next_run_id, previous_run_id, last_n, rolled_back = rows[0]
    return EndedRun(
        decode_run(body),
        fence,
        started_seq,
        commit_seq,
        end_seq,
        next_run_id,
        previous_run_id,
        last_n,
        bool(rolled_back),
    )


def piece_of(history_id: str, columns: tuple[Any, ...]) -> HistoryRow:
    """Convert a row of the statement ``run_piece`` or ``edit_piece`` to the history row `history_id`."""
    previous_id, whole, last_n, entries = columns
    return HistoryRow(history_id, previous_id, bool(whole), last_n, tuple(unpack_entries(entries) if entries else ()))


def row_of(columns: tuple[Any, ...]) -> tuple[SessionRow, int, tuple[str, ...]]:
    """Return a session without messages, the number of its queued messages, and the message ids of the active run."""
    row = SessionRow(*columns[:11])
    row.append_nth, row.append_seq, row.sweep, row.last_run_id = columns[12:16]
    row.deleted_at, row.history_id, row.events_since, row.workspace_pool, waiting = columns[16:]
    if row.run_id is None:
        return row, waiting, ()
    live = decode_live(columns[11])
    row.run_agent = live.agent
    row.run_version = live.version
    row.attempt = live.attempt
    row.started_at = live.started_at
    row.started_seq = live.started_seq
    row.run_state = live.state
    row.cause = live.cause
    row.steered = live.steered
    row.rolled_back = live.rolled_back
    row.resumed_as = live.resumed_as
    row.questions = live.questions
    row.answered = live.answered
    return row, waiting, live.messages


def load(database: Database, columns: tuple[Any, ...]) -> SessionRow:
    """Return a session with its queued and taken messages, whose long contents are left out (see `shelve`)."""
    row, waiting, taken = row_of(columns)
    if waiting:
        with closing(database.rows("waiting_messages", row.session)) as rows:
            row.waiting = shelve(mail_of(columns) for columns in rows)
    row.taken = shelve(
        mail_of(columns) for message_id in taken for columns in database.query("taken_message", row.session, message_id)
    )
    return row


def listed_at(row: SessionRow) -> int:
    """Return ``updated_at`` in whole seconds, the column by which sessions are listed."""
    return int(row.updated_at)


def new_columns(row: SessionRow) -> tuple[object, ...]:
    """Return the columns that ``add_sessions`` writes, in order."""
    identity = (row.session, row.principal, row.key, row.created_at, row.events_since, listed_at(row))
    return (*identity, *state_columns(row))


def live_run(row: SessionRow) -> bytes:
    """Return the column that contains the state of the active run."""
    return encode_json(
        _LiveRun(
            row.run_agent,
            row.attempt,
            row.started_at,
            row.started_seq,
            tuple([mail.message.message_id for mail in row.taken]),
            row.run_state,
            row.cause,
            row.steered,
            row.rolled_back,
            row.resumed_as,
            row.questions,
            row.answered,
            row.run_version,
        )
    )


def state_columns(row: SessionRow) -> tuple[object, ...]:
    """Return the columns that ``add_sessions`` and ``save_sessions`` write, in order."""
    live = live_run(row) if row.run_id is not None else None
    waiting = row.waiting
    return (
        row.agent,
        row.updated_at,
        row.next_seq,
        row.next_n,
        row.fence,
        row.holder,
        row.run_id,
        live,
        row.append_nth,
        row.append_seq,
        row.sweep,
        row.last_run_id,
        row.history_id,
        len(waiting),
        ready_since(row),
        0.0 if row.run_id is not None else due_at(row),
        question_due(row),
        row.deleted_at,
        row.workspace_pool,
    )


def schedule_of(columns: tuple[Any, ...]) -> ScheduleRow:
    """Convert a row to a schedule. If the row's body is unreadable, the schedule's ``broken`` describes the error.

    No error is raised in that case, so that the other schedules continue.
    """
    schedule, principal, schedule_id, revision, session, body = columns
    try:
        row = _decode_schedule(body)
        if row.spec.every_s is not None and not row.spec.every_s >= LEAST_EVERY_S:
            raise ValueError(f"every_s is {row.spec.every_s}")  # its ticks would be endless or uncountable
        return msgspec.structs.replace(row, schedule=schedule)
    except (TypeError, ValueError, RecursionError) as error:
        return ScheduleRow(
            schedule=schedule,
            principal=principal,
            schedule_id=schedule_id,
            revision=revision,
            spec=ScheduleSpec(session=session, text=""),
            progress=Progress(anchor_at=0.0, tick_at=None, due_at=None, decided_at=0.0),
            broken=f"damaged, or written by a newer version: {format_error(error)}",
        )


def key_columns(record: KeyRecord) -> tuple[object, ...]:
    """Return the columns that ``add_key`` writes, in order."""
    return (
        record.key_id,
        record.principal,
        record.role,
        record.digest,
        record.created_at,
        record.label,
        record.revoked_at,
        None if record.agents is None else msgspec.json.encode(record.agents).decode(),
    )


def schedule_columns(row: ScheduleRow) -> tuple[object, ...]:
    """Return the columns that ``add_schedule`` and ``save_schedule`` write, in order."""
    due_at = row.due_at
    return (
        row.revision,
        row.spec.session,
        due_at,
        None if due_at is None else row.progress.decided_at,
        encode_json(row),
    )
