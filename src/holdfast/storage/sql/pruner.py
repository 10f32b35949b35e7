"""Pruning in SQL, in small batches, each in its own transaction: concurrent runs wait for at most one batch.

Old rows are found by indexes on times, so pruning a store of any size without old rows takes four index lookups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final, Protocol

from holdfast.protocol.events import Stored
from holdfast.storage.backend import PruneTimes
from holdfast.storage.event_packs import unpack_events
from holdfast.storage.rows import SessionRow
from holdfast.storage.sql.columns import decode_run, row_of
from holdfast.storage.sql.database import Database
from holdfast.storage.sql.transcripts import ALL_LANDMARKS
from holdfast.storage.values import ALL_ENTRIES, OldEvents

__all__ = ["PrunerTables", "drop_old_events", "prune_batch", "purge_contents", "purge_session", "read_old_events"]

_SESSIONS: Final = 50
_PACKS: Final = 500
"""Maximum number of packs of events that one batch drops from a session. A batch ends at this number, so it drops
fewer than twice as many."""
_MESSAGES: Final = 200
_ATTACHMENTS: Final = 50

_Position = tuple[Any, ...]
"""Position after which a stage continues: the columns of its last row, in index order."""


class PrunerTables(Protocol):
    """The tables that pruning uses."""

    def get(self, session: int) -> SessionRow | None:
        """Return the session with that number."""
        ...

    def drop(self, principal: str, name: str, *parameters: object) -> int:
        """Execute a statement that deletes rows, and return their number."""
        ...

    def drop_events(self, row: SessionRow, *, before: int) -> int:
        """Delete the events that are packed up to a number below `before`, and return the number of packs."""
        ...

    def drop_session(self, row: SessionRow) -> None:
        """Delete a tombstone with all its rows."""
        ...


def prune_batch(
    tables: PrunerTables, database: Database, before: PruneTimes, after: _Position
) -> tuple[int, _Position | None]:
    """Prune the next batch after the position `after`, which is empty for the first batch.

    Return the number of rows dropped or changed, and the position for the next call, or None at the end.
    """
    first, *rest = after or (0,)
    position: _Position | None = tuple(rest) or None
    dropped = 0
    for stage in range(first, len(_STAGES)):
        pruned, last = _STAGES[stage](tables, database, before[stage], position)
        dropped += pruned
        if last is not None:
            return dropped, (stage, *last)
        position = None
    return dropped, None


def _tombstones(
    tables: PrunerTables, database: Database, before: float, after: _Position | None
) -> tuple[int, _Position | None]:
    found = database.query("tombstones", before, *(after or (-math.inf, 0)), _SESSIONS)
    for _, session in found:
        row = tables.get(session)
        if row is not None:  # another node may have purged it
            tables.drop_session(row)
    return len(found), _next(found, _SESSIONS)


def _events(
    tables: PrunerTables, database: Database, before: float, after: _Position | None
) -> tuple[int, _Position | None]:
    found = database.query("sessions_with_events", before, *(after or (-math.inf, 0)), _SESSIONS)
    dropped = 0
    for number, (since, session) in enumerate(found):
        row = tables.get(session)
        if row is None:
            continue
        old = _drop_oldest(tables, database, row, before=before)
        dropped += old
        if dropped >= _PACKS:
            # A session with more old events is found again, because its time is now later, or the same.
            return dropped, (since, session - 1) if old == _PACKS else _next(found[: number + 1], number + 1)
    return dropped, _next(found, _SESSIONS)


def read_old_events(
    database: Database, before: float, after: tuple[float, int] | None, *, limit_bytes: int
) -> tuple[list[OldEvents], tuple[float, int] | None]:
    """Read the next old events after the position `after`; see `Store.old_events`."""
    found = database.query("sessions_with_events", before, *(after or (-math.inf, 0)), _SESSIONS)
    read: list[OldEvents] = []
    packs, size = 0, 0
    for since, session in found:
        columns = database.query("session_by_number", session)
        row = row_of(columns[0])[0] if columns else None
        if row is None or row.deleted_at is not None:
            continue
        keep = _kept_from(row)
        events: list[Stored] = []
        with closing(database.rows("oldest_packs", session, _PACKS - packs)) as rows:
            for last_seq, at, body in rows:
                if last_seq >= keep or at >= before:
                    break
                events += unpack_events(last_seq, body)
                packs += 1
                size += len(body)
                if size >= limit_bytes:
                    break
        if events:
            read.append(OldEvents(session=session, principal=row.principal, key=row.key, events=tuple(events)))
        if packs >= _PACKS or size >= limit_bytes:
            # If this session has more old events, it is found again, because its time is later then, or the same.
            return read, (since, session - 1)
    return read, found[-1] if len(found) == _SESSIONS else None


def drop_old_events(tables: PrunerTables, database: Database, read: Sequence[OldEvents], *, before: float) -> int:
    """Drop events that `read_old_events` has read, and return the number of packs; see `Store.drop_old_events`."""
    dropped = 0
    for old in read:
        row = tables.get(old.session)
        if row is not None and row.deleted_at is None:
            dropped += _drop_oldest(tables, database, row, before=before, last_seq=old.events[-1].seq)
    return dropped


def _kept_from(row: SessionRow) -> int:
    """Return the seq from which on the session's events are kept: those of the active run."""
    return row.next_seq if row.run_id is None else row.started_seq


def _drop_oldest(
    tables: PrunerTables, database: Database, row: SessionRow, *, before: float, last_seq: float = math.inf
) -> int:
    """Drop at most `_PACKS` packs of old events that end at `last_seq` or earlier, and return their number."""
    keep = _kept_from(row)
    packs = database.query("oldest_events", row.session, _PACKS + 1)
    old = 0
    while old < min(len(packs), _PACKS) and packs[old][0] < keep and packs[old][1] < before:
        if packs[old][0] > last_seq:
            break
        old += 1
    if old:
        tables.drop_events(row, before=packs[old - 1][0] + 1)
    since = packs[old][1] if old < len(packs) else None
    if row.events_since != since:
        row.events_since = since
        database.write("set_events_since", since, row.session)
    return old


def _keys(
    tables: PrunerTables, database: Database, before: float, after: _Position | None
) -> tuple[int, _Position | None]:
    found = database.query("messages_with_keys", before, *(after or (-math.inf, 0, 0)), _MESSAGES)
    dropped = sum(database.write("forget_idempotency_key", message_id, session) for _, session, _, message_id in found)
    return dropped, _next([row[:3] for row in found], _MESSAGES)


def _attachments(
    tables: PrunerTables, database: Database, before: float, after: _Position | None
) -> tuple[int, _Position | None]:
    found = database.query("old_attachments", before, *(after or (-math.inf, "", "")), _ATTACHMENTS)
    dropped = sum(tables.drop(principal, "drop_unused_attachment", principal, digest) for _, principal, digest in found)
    return dropped, _next(found, _ATTACHMENTS)


def _next(found: list[tuple[Any, ...]], limit: int) -> _Position | None:
    """Return the position after these rows; None if there were fewer than `limit`, so these were the last."""
    return found[-1] if len(found) == limit else None


def purge_contents(
    tables: PrunerTables, database: Database, row: SessionRow, *, keep_run_id: str | None = None
) -> None:
    """Drop the rows listed in `Tables.purge_contents`; the session's row is not changed."""
    _purge(tables, database, row, keep_run_id)
    tables.drop_events(row, before=row.next_seq - 1)


def purge_session(tables: PrunerTables, database: Database, row: SessionRow) -> None:
    """Drop all rows of a tombstone."""
    _purge(tables, database, row, None)
    tables.drop_events(row, before=row.next_seq)
    database.write("purge_session", row.session)


def _purge(tables: PrunerTables, database: Database, row: SessionRow, keep_run_id: str | None) -> None:
    for (body,) in database.query("ended_runs", row.session, row.session, ALL_ENTRIES, row.session):
        run = decode_run(body)
        if run.run_id != keep_run_id:
            tables.drop(row.principal, "purge_run", run.run_id, row.session)
        for message_id in run.messages:
            tables.drop(row.principal, "purge_message", message_id, row.session)
    for name in ("purge_withdrawn_messages", "purge_edits", "purge_kept"):
        tables.drop(row.principal, name, row.session)
    database.write("drop_landmarks", row.session, ALL_LANDMARKS)
    database.write("purge_attachment_uses", row.session)


_STAGES: Final = (_tombstones, _events, _keys, _attachments)
