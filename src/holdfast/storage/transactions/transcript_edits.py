"""Transactions that change a transcript while no run is active.

A change either adds a new history row or makes the previous history row the newest; the rows themselves never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.errors import (
    HistoryChanged,
    InvalidRequest,
    NothingToUndo,
    SessionBusy,
)
from holdfast.protocol.events import HistoryEdited, plain
from holdfast.protocol.messages import Attachment, Entry, HistoryEdit
from holdfast.storage.backend import Tables
from holdfast.storage.rows import HistoryRow, SessionRow
from holdfast.storage.transactions.attachments import stored_attachments
from holdfast.storage.transactions.session_log import EventLog, check_quota, existing_session, new_session
from holdfast.storage.values import Edited, EditHistory

__all__ = ["check_retry", "drop_retried", "edit_history", "number_entries"]


def number_entries(tables: Tables, row: SessionRow, entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Number the entries consecutively, and write the texts of their agent states to separate rows."""
    replace = msgspec.structs.replace
    first = row.next_n
    row.next_n = first + len(entries)
    numbered = [
        replace(entry, n=n) if entry.content.isascii() else replace(entry, n=n, content=plain(entry.content))
        for n, entry in enumerate(entries, first)
    ]
    for index, entry in enumerate(numbered):
        if entry.agent_state is not None and entry.agent_state.body:
            tables.add_kept(row, entry.n, plain(entry.agent_state.body))
            numbered[index] = replace(entry, agent_state=replace(entry.agent_state, body="", n=entry.n))
    return tuple(numbered)


def check_retry(tables: Tables, row: SessionRow | None, run_id: str) -> None:
    """Check that the run `run_id` can be retried.

    Raises `SessionBusy` if the session is not idle, and `HistoryChanged` if the session does not exist, the run is not
    the session's last ended run, or the transcript was edited after the run.
    """
    if row is None:
        raise HistoryChanged("the session has no run to retry")
    if row.run_id is not None or row.waiting:
        raise SessionBusy("the session has an active run or queued messages", hint="retry when the session is idle")
    ended = None if row.last_run_id != run_id else tables.ended_run(row, run_id)
    if ended is None:
        raise HistoryChanged(f"run {run_id!r} is not the last ended run of this session")
    newest = tables.history(row)
    if newest is not None and newest.last_n > ended.last_n:
        raise HistoryChanged(f"the transcript was edited after run {run_id!r}")


def drop_retried(tables: Tables, row: SessionRow, run_id: str, log: EventLog, at: float) -> None:
    """Remove the entries of the run `run_id` from the transcript, if the run added entries."""
    newest = tables.history(row)
    if newest is not None and newest.history_id == run_id:
        restored = _step_back(tables, row, newest)
        log.add(_edited("retry", at, removed=newest.entries, added=restored))


def _step_back(tables: Tables, row: SessionRow, newest: HistoryRow) -> int:
    """Make the previous history row the newest; return the number of replaced entries that this restores."""
    tables.step_back(row, newest)
    return len(tables.transcript(row, newest.previous_id)) if newest.whole else 0


def _edited(edit: HistoryEdit, at: float, *, removed: Sequence[Entry], added: int) -> HistoryEdited:
    return HistoryEdited(at=at, edit=edit, from_n=removed[0].n if removed else 0, added=added)


def edit_history(tables: Tables, request: EditHistory) -> Edited:
    """See `Store.edit_history`."""
    match request.edit:
        case "undo":
            return _undo(tables, request)
        case "compact" | "branch" | "import":
            return _replace(tables, request)
        case "retry":
            raise InvalidRequest("edit_history does not accept the edit 'retry'", hint="call send with retry_of")


def _undo(tables: Tables, request: EditHistory) -> Edited:
    row = existing_session(tables, request.principal, request.key)
    newest = _check_idle(tables, row, request)
    if newest is None:
        raise NothingToUndo("the transcript is empty")
    log = EventLog(row)
    restored = _step_back(tables, row, newest)
    log.add(_edited("undo", request.at, removed=newest.entries, added=restored))
    row.updated_at = request.at
    tables.save(row)
    return _done(tables, row, newest.entries, log, request.at)


def _replace(tables: Tables, request: EditHistory) -> Edited:
    row = tables.find(request.principal, request.key)
    fresh = row is None and request.edit != "compact"
    if row is None and fresh:
        stored_attachments(tables, request.principal, _attached(request))
        row = new_session(
            tables, request.principal, request.key, agent=request.agent, at=request.at, limit=request.session_limit
        )
        newest = None
    else:
        row = existing_session(tables, request.principal, request.key)
        newest = _check_idle(tables, row, request)
        if newest is not None and request.edit != "compact":
            raise SessionBusy(f"session {request.key!r} already has a history", hint="use a new key")
        stored_attachments(tables, request.principal, _attached(request))
    size = sum(len(entry.content) for entry in request.entries)
    check_quota(tables, request.principal, size, request.stored_limit)
    removed = tables.transcript(row, row.history_id) if newest is not None else ()
    if fresh:
        tables.add_session(row)
    log = EventLog(row)
    entries = number_entries(tables, row, request.entries)
    seq = log.add(_edited(request.edit, request.at, removed=removed, added=len(entries)))
    history = HistoryRow(f"edit_{seq}", row.history_id, True, row.next_n - 1, entries)
    row.history_id = history.history_id
    row.updated_at = request.at
    tables.save(row)
    tables.add_edit(row, history)
    tables.use_attachments(row, [attachment.digest for attachment in _attached(request)])
    return _done(tables, row, removed, log, request.at)


def _attached(request: EditHistory) -> list[Attachment]:
    return [attachment for entry in request.entries for attachment in entry.attachments]


def _check_idle(tables: Tables, row: SessionRow, request: EditHistory) -> HistoryRow | None:
    """Return the newest history row, if any. Raises `SessionBusy` or `HistoryChanged` if the edit is refused."""
    if row.run_id is not None or row.waiting:
        raise SessionBusy(
            "the session has an active run or queued messages", hint="edit its history when the session is idle"
        )
    newest = tables.history(row)
    last_n = newest.entries[-1].n if newest is not None and newest.entries else 0
    if request.expected_n is not None and request.expected_n != last_n:
        raise HistoryChanged(f"the transcript ends with entry {last_n}, not {request.expected_n}")
    return newest


def _done(tables: Tables, row: SessionRow, removed: tuple[Entry, ...], log: EventLog, at: float) -> Edited:
    return Edited(session=row.session, number=row.session, removed=removed, events=log.write(tables, None, at))
