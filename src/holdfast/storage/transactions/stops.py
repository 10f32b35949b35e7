"""Transactions that interrupt a run, stop a session or delete a session."""

from __future__ import annotations

from holdfast.protocol.events import MessageSettled, SessionDeletedEvent, encode_json
from holdfast.protocol.messages import Message
from holdfast.protocol.stopping import Cause
from holdfast.storage.backend import Tables
from holdfast.storage.rows import NOBODY, SessionRow
from holdfast.storage.transactions.session_log import EventLog, existing_session, stop_run
from holdfast.storage.values import InterruptRequest, InterruptResult, Stopped, StopRequest

__all__ = ["delete_session", "interrupt", "stop_session"]


def interrupt(tables: Tables, request: InterruptRequest) -> InterruptResult:
    """See `Store.interrupt`."""
    row = existing_session(tables, request.principal, request.key)
    if row.run_id is None or (request.run_id is not None and request.run_id != row.run_id):
        return InterruptResult(session=row.session, number=row.session, run_id=None)
    log = EventLog(row)
    _hurry_elsewhere(tables, row, request)
    if stop_run(row, log, request.cause, request.at, _grace_s(tables, row, request)):
        row.updated_at = request.at
        tables.save(row)
    return InterruptResult(
        session=row.session,
        number=row.session,
        run_id=row.run_id,
        events=log.write(tables, row.run_id, request.at),
    )


def _grace_s(tables: Tables, row: SessionRow, request: InterruptRequest) -> float | None:
    """Return the grace period to record: this node's own runs get it without the log."""
    return None if row.holder in (NOBODY, tables.epoch) else request.grace_s


def _hurry_elsewhere(tables: Tables, row: SessionRow, request: InterruptRequest) -> None:
    """Tell the node with a run that is being stopped already of the new grace period, which the log does not repeat."""
    grace_s = _grace_s(tables, row, request)
    if row.run_id is not None and row.cause is not None and grace_s is not None:
        asked = StopRequest(row.key, request.cause, row.next_seq, grace_s, row.run_id)
        tables.ask_others(row.session, "interrupt", encode_json(asked))


def _stop(
    tables: Tables, row: SessionRow, log: EventLog, cause: Cause, at: float, grace_s: float | None = None
) -> tuple[Message, ...]:
    if row.run_id is not None:
        stop_run(row, log, cause, at, grace_s)
    withdrawn = row.waiting
    row.waiting = ()
    for mail in withdrawn:
        log.add(MessageSettled(at=at, message_id=mail.message.message_id, state="withdrawn"))
    if withdrawn:
        withdrawn = tables.unshelve(row, withdrawn)
        tables.withdraw(row, withdrawn, at)
    return tuple(mail.message for mail in withdrawn)


def stop_session(tables: Tables, request: InterruptRequest) -> Stopped:
    """See `Store.stop_session`."""
    row = existing_session(tables, request.principal, request.key)
    if request.run_id is not None and request.run_id != row.run_id:
        return Stopped(session=row.session, number=row.session, run_id=None)
    log = EventLog(row)
    was = row.rolled_back
    _hurry_elsewhere(tables, row, request)
    withdrawn = _stop(tables, row, log, request.cause, request.at, _grace_s(tables, row, request))
    if log.events or row.rolled_back != was:
        row.updated_at = request.at
        tables.save(row)
    return Stopped(
        session=row.session,
        number=row.session,
        run_id=row.run_id,
        withdrawn=withdrawn,
        events=log.write(tables, row.run_id, request.at),
        requests=_stop_elsewhere(tables, row, StopRequest(row.key, request.cause, row.next_seq, request.grace_s)),
    )


def _stop_elsewhere(tables: Tables, row: SessionRow, request: StopRequest) -> tuple[int, ...]:
    """Ask other nodes to stop their background work, in the same transaction, so that no crash keeps it alive."""
    return tuple(tables.ask_others(row.session, "stop", encode_json(request)))


def delete_session(tables: Tables, principal: str, key: str, at: float, cause: Cause) -> Stopped:
    """See `Store.delete_session`."""
    row = existing_session(tables, principal, key)
    log = EventLog(row)
    withdrawn = _stop(tables, row, log, cause, at)
    log.add(SessionDeletedEvent(at=at, reason=cause.reason))
    row.deleted_at = row.updated_at = at
    tables.save(row)
    tables.grants.drop_all_of(row)
    events = log.write(tables, row.run_id, at)
    if row.run_id is None:  # otherwise the end of the run does it
        tables.purge_contents(row)
    return Stopped(
        session=row.session,
        number=row.session,
        run_id=row.run_id,
        withdrawn=withdrawn,
        events=events,
        requests=_stop_elsewhere(tables, row, StopRequest(key, cause, row.next_seq)),
    )
