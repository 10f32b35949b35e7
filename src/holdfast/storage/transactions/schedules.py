"""Transactions on schedules: put, pause, delete and fire.

Invariants:

- One transaction writes a tick's message and advances the schedule past that tick, so neither change is durable without
  the other.
- A refused message does not stop its schedule: the refusal is recorded, and the next tick fires on time. If a
  schedule's ticks cannot be computed, for example because its time zone no longer exists, the schedule is paused, so
  that it is not retried in a loop.
- An unreadable schedule does not stop other schedules: the next check of the unreadable schedule is postponed, and its
  stored body stays unchanged until the schedule is replaced or deleted.
- A schedule fires only if it still has the revision that the caller read. Every change of a schedule creates a new
  revision.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import (
    Conflict,
    InvalidRequest,
    InvalidSchedule,
    LimitExceeded,
    MailboxFull,
    ScheduleBroken,
    ScheduleChanged,
    ScheduleFinished,
    SessionBusy,
    UnknownAgent,
    UnknownSchedule,
)
from holdfast.protocol import schedules
from holdfast.protocol.schedules import Cadence, Firing, ScheduleView
from holdfast.storage.backend import Tables
from holdfast.storage.rows import ScheduleRow
from holdfast.storage.transactions import messages
from holdfast.storage.transactions.session_log import check_quota
from holdfast.storage.values import Fire, Fired, PutSchedule, Send, SendResult
from holdfast.storage.views import schedule_view

__all__ = ["delete_schedule", "fire_schedule", "pause_schedule", "put_schedule"]

_PASSING = (SessionBusy, MailboxFull)
"""Temporary refusals, which are not reported as problems of the schedule."""
_LOOK_AGAIN_S = 3600.0
"""Time after which an unreadable schedule is checked again, because a newer Holdfast may have been installed."""
_BODY_HASH = b"schedule"
"""Body hash of messages from schedules. Real hashes have a different length, so it never equals one of them."""
_replace = msgspec.structs.replace


def _seed(principal: str, schedule_id: str) -> str:
    return f"{principal}\0{schedule_id}"


def _changed(row: ScheduleRow, **fields: Any) -> ScheduleRow:
    return _replace(row, revision=row.revision + 1, **fields)


def put_schedule(tables: Tables, request: PutSchedule) -> ScheduleView:
    """See `Store.put_schedule`."""
    principal, schedule_id, spec, at = request.principal, request.schedule_id, request.spec, request.at
    row = tables.find_schedule(principal, schedule_id)
    if row is None:
        if tables.schedules_of(principal) >= request.limit:
            raise LimitExceeded(
                f"{principal!r} already has {request.limit} schedules, the maximum",
                hint="delete schedules that you do not need",
            )
        check_quota(tables, principal, len(spec.text), request.stored_limit)
        row = ScheduleRow(
            principal=principal,
            schedule_id=schedule_id,
            revision=1,
            spec=spec,
            progress=schedules.begin(spec, _seed(principal, schedule_id), at),
            created_at=at,
            updated_at=at,
        )
        tables.add_schedule(row)
        tables.grow(principal, len(spec.text))
        return schedule_view(row)
    if row.spec == spec:
        return schedule_view(row)
    growth = len(spec.text) - len(row.spec.text)
    if growth > 0:
        check_quota(tables, principal, growth, request.stored_limit)
    progress = row.progress
    if _cadence(row.spec) != _cadence(spec):
        progress = schedules.begin(spec, _seed(principal, schedule_id), at)
    row = _changed(
        row,
        spec=spec,
        progress=progress,
        problem=None,
        broken=None,
        created_at=at if row.broken is not None else row.created_at,
        updated_at=at,
    )
    tables.save_schedule(row)
    tables.grow(principal, growth)
    return schedule_view(row)


def _cadence(spec: Cadence) -> tuple[object, ...]:
    return tuple(getattr(spec, field) for field in Cadence.__struct_fields__)


def _existing(tables: Tables, principal: str, schedule_id: str) -> ScheduleRow:
    row = tables.find_schedule(principal, schedule_id)
    if row is None:
        raise UnknownSchedule(f"no such schedule: {schedule_id!r}")
    return row


def _check_whole(row: ScheduleRow) -> None:
    if row.broken is not None:
        raise ScheduleBroken(f"schedule {row.schedule_id!r} is broken: {row.broken}")


def pause_schedule(tables: Tables, principal: str, schedule_id: str, paused: bool, at: float) -> ScheduleView:
    """See `Store.pause_schedule`."""
    row = _existing(tables, principal, schedule_id)
    _check_whole(row)
    if row.paused is not paused:
        progress = row.progress
        if not paused:
            progress = schedules.resumed(row.spec, _seed(principal, schedule_id), progress, at)
        row = _changed(row, paused=paused, progress=progress, problem=None, updated_at=at)
        tables.save_schedule(row)
    return schedule_view(row)


def delete_schedule(tables: Tables, principal: str, schedule_id: str) -> ScheduleView:
    """See `Store.delete_schedule`."""
    row = _existing(tables, principal, schedule_id)
    tables.drop_schedule(row)
    tables.grow(row.principal, -len(row.spec.text))
    return schedule_view(row)


def fire_schedule(tables: Tables, request: Fire) -> Fired:
    """See `Store.fire_schedule`."""
    row = tables.schedule(request.schedule)
    if row is None or row.revision != request.revision:
        if request.by_hand:
            raise ScheduleChanged
        return Fired(outcome="changed", schedule=None if row is None else schedule_view(row))
    return _fire_by_hand(tables, row, request) if request.by_hand else _fire_due(tables, row, request)


def _fire_due(tables: Tables, row: ScheduleRow, request: Fire) -> Fired:
    at = request.send.at
    if row.broken is not None:
        tables.put_off_schedule(row, at=at, until=at + _LOOK_AGAIN_S)
        return Fired(outcome="broken", schedule=schedule_view(row), problem=row.broken)
    if row.paused:
        return Fired(outcome="waits", schedule=schedule_view(row))
    try:
        tick_at, progress = schedules.step(row.spec, _seed(row.principal, row.schedule_id), row.progress, at)
    except InvalidSchedule as error:
        lost = _changed(row, paused=True, problem=error.message, updated_at=at)
        tables.save_schedule(lost)
        return Fired(outcome=error.code, schedule=schedule_view(lost), problem=error.message)
    missed = progress.missed - row.progress.missed
    if tick_at is None:
        if progress == row.progress:
            return Fired(outcome="waits", schedule=schedule_view(row))
        outcome = "missed" if missed else "set_back"
        last = Firing(outcome="missed", tick_at=row.progress.tick_at, at=at) if missed else row.last
        row = _changed(row, progress=progress, last=last, updated_at=at)
        tables.save_schedule(row)
        return Fired(outcome=outcome, missed=missed, schedule=schedule_view(row))

    sent: SendResult | None = None
    problem: str | None = None
    try:
        sent = _send(tables, row, request, f"schedule:{row.schedule}:{tick_at:.3f}")
    except (Conflict, InvalidRequest, LimitExceeded, UnknownAgent) as refusal:
        if request.is_shared and isinstance(refusal, UnknownAgent):
            return Fired(outcome="waits", schedule=schedule_view(row))
        outcome = refusal.code
        problem = None if isinstance(refusal, _PASSING) else refusal.message
    else:
        outcome = "duplicate" if sent.disposition == "duplicate" else "fired"
    if outcome != "duplicate":
        progress = schedules.counted(row.spec, progress, fired=sent is not None)
    last = Firing(outcome=outcome, tick_at=tick_at, at=at, message_id=None if sent is None else sent.message_id)
    known = row.problem
    row = _changed(row, progress=progress, last=last, problem=problem, updated_at=at)
    tables.save_schedule(row)
    return Fired(
        outcome=outcome,
        missed=missed,
        sent=sent,
        schedule=schedule_view(row),
        problem=problem if problem != known else None,
    )


def _fire_by_hand(tables: Tables, row: ScheduleRow, request: Fire) -> Fired:
    _check_whole(row)
    if row.progress.tick_at is None:
        raise ScheduleFinished(f"schedule {row.schedule_id!r} is finished")
    sent = _send(tables, row, request, f"schedule:{row.schedule}:{request.send.message_id}")
    at = request.send.at
    progress = schedules.counted(row.spec, row.progress, fired=True)
    last = Firing(outcome="fired", at=at, message_id=sent.message_id)
    row = _changed(row, progress=progress, last=last, problem=None, updated_at=at)
    tables.save_schedule(row)
    return Fired(outcome="fired", sent=sent, schedule=schedule_view(row))


def _send(tables: Tables, row: ScheduleRow, request: Fire, idempotency_key: str) -> SendResult:
    """Send the schedule's message; a refusal changes nothing.

    Raises `UnknownAgent` if the host does not have the schedule's agent, and otherwise the errors of `messages.send`.
    """
    send: Send = _replace(request.send, idempotency_key=idempotency_key, body_hash=_BODY_HASH)
    session = tables.find(send.principal, send.key)
    agent = messages.agent_for(session, send)
    if send.served is not None and agent not in send.served:
        there = ", ".join(sorted(send.served))
        raise UnknownAgent(
            f"unknown agent {agent!r}: schedule {row.schedule_id!r} needs it",
            hint=f"save the schedule with one of these agents: {there}; or delete the schedule",
        )
    idle = session is None or (session.run_id is None and not session.waiting)
    if send.policy == "reject" and send.run_id is None and idle:  # the host has no room: wait for it
        send = _replace(send, policy="queue")
    return messages.send(tables, send)
