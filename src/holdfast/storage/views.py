"""Public views and values for hosts, built from rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from holdfast.protocol.messages import MailboxItem, RunView, SessionView, Settlement
from holdfast.protocol.schedules import ScheduleView
from holdfast.storage.rows import EndedRun, KnownMessage, Mail, ScheduleRow, SessionRow, due_at
from holdfast.storage.values import DueQuestion, DueSchedule, Ready

__all__ = [
    "due_of",
    "ended_state",
    "live_run",
    "mailbox_items",
    "ready_of",
    "schedule_due",
    "schedule_view",
    "session_view",
    "settlement_of",
]


def due_of(rows: Iterable[SessionRow], *, before: float, limit: int) -> tuple[DueQuestion, ...]:
    """Return at most `limit` questions of these sessions that are due before `before`, the earliest due time first."""
    due = [
        DueQuestion(principal=row.principal, key=row.key, question=question)
        for row in sorted(rows, key=lambda row: row.session)
        for question in row.questions
        if question.due_at and question.due_at < before
    ]
    due.sort(key=lambda item: item.question.due_at)
    return tuple(due[:limit])


def live_run(row: SessionRow) -> RunView | None:
    """Return the public view of the session's active run; None if no run is active."""
    if row.run_id is None:
        return None
    return RunView(
        run_id=row.run_id,
        agent=row.run_agent,
        state=row.run_state,
        attempt=row.attempt,
        messages=tuple(mail.message.message_id for mail in row.taken),
        started_at=row.started_at,
        cause=row.cause,
        questions=row.questions,
    )


def session_view(row: SessionRow, *, waiting: int) -> SessionView:
    """Return the public view of a session with `waiting` queued messages; the row's mailbox may not be loaded."""
    state: Literal["idle", "running", "suspended", "stopping", "deleted"] = "idle"
    if row.deleted_at is not None:
        state = "deleted"
    elif row.run_id is not None:
        match row.run_state:
            case "running" | "suspended" | "stopping":
                state = row.run_state
            case _:
                raise AssertionError(f"an ended run holds the slot: {row.run_state}")
    return SessionView(
        key=row.key,
        principal=row.principal,
        number=row.session,
        agent=row.agent,
        state=state,
        seq=row.next_seq - 1,
        waiting=waiting,
        run_id=row.run_id,
        created_at=row.created_at,
        updated_at=row.updated_at,
        workspace_pool=row.workspace_pool,
    )


def settlement_of(known: KnownMessage, ended: EndedRun | None) -> Settlement:
    """Return the outcome of a message from its row and, if its run has ended, the row of the run."""
    if known.withdrawn:
        return Settlement(message_id=known.message_id, state="withdrawn")
    if known.run_id is None:
        return Settlement(message_id=known.message_id, state="accepted")
    if ended is None:
        return Settlement(message_id=known.message_id, state="taken", run_id=known.run_id)
    run = ended.view
    return Settlement(
        message_id=known.message_id,
        state="superseded" if ended.rolled_back else ended_state(run),
        run_id=run.run_id,
        text=run.text,
        cause=run.cause,
        error=run.error,
    )


def ended_state(run: RunView) -> Literal["completed", "failed", "interrupted"]:
    """Return the state of an ended run; its messages have the same state unless the run was rolled back."""
    match run.state:
        case "completed" | "failed" | "interrupted":
            return run.state
        case _:
            raise AssertionError(f"run {run.run_id} has not ended: it is {run.state}")


def mailbox_items(waiting: Iterable[Mail]) -> tuple[MailboxItem, ...]:
    """Return the public views of queued messages."""
    return tuple(
        MailboxItem(message=mail.message, due_at=mail.due_at, target_run_id=mail.target_run_id) for mail in waiting
    )


def ready_of(row: SessionRow) -> Ready:
    """Return the `Ready` of a session that has queued messages and no run, or a parked run without open questions."""
    if row.run_id is not None:
        return Ready(session=row.session, principal=row.principal, key=row.key, agent=row.run_agent, not_before=0.0)
    return Ready(session=row.session, principal=row.principal, key=row.key, agent=row.agent, not_before=due_at(row))


def schedule_due(row: ScheduleRow) -> DueSchedule:
    """Return the `DueSchedule` that a host needs to check and fire a schedule."""
    return DueSchedule(
        schedule=row.schedule,
        revision=row.revision,
        principal=row.principal,
        schedule_id=row.schedule_id,
        spec=row.spec,
        due_at=row.due_at,
    )


def _state(row: ScheduleRow) -> Literal["active", "paused", "finished", "broken"]:
    if row.broken is not None:
        return "broken"
    return "finished" if row.progress.tick_at is None else "paused" if row.paused else "active"


def schedule_view(row: ScheduleRow) -> ScheduleView:
    """Return the public view of a schedule."""
    progress = row.progress
    return ScheduleView(
        **msgspec.structs.asdict(row.spec),
        schedule_id=row.schedule_id,
        principal=row.principal,
        state=_state(row),
        next_at=row.due_at,
        fired=progress.fired,
        missed=progress.missed,
        refused=progress.refused,
        last=row.last,
        problem=row.broken or row.problem,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
