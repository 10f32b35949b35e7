"""The rows that every backend keeps.

The transactions (`holdfast.storage.transactions`) work only on these rows, so that backends differ only in where the
rows are: in dictionaries, or in SQL.

- While a run is active, its state is in its session's row; when it ends, it gets its own row.
- A run without a holder (holder 0) is parked; once it waits for nothing, it is ready to be claimed again.
- The transcript is a chain of history rows from the session's ``history_id`` backwards: of runs that wrote entries, and
  of edits. A ``whole`` row replaces all rows before it, so reading ends there; they stay in the chain for undo. Entries
  are numbered by a counter that only grows: a number is never used for two entries.
- The state of a message is derived: a queued one has neither a run nor a withdrawal; that of a taken one follows from
  its run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from holdfast.protocol.messages import Entry, Message, Question, RunState, RunView
from holdfast.protocol.schedules import Firing, Progress, ScheduleSpec
from holdfast.protocol.stopping import Cause

__all__ = [
    "NOBODY",
    "EndedRun",
    "HistoryRow",
    "KnownMessage",
    "Mail",
    "ScheduleRow",
    "SessionRow",
    "due_at",
    "question_due",
    "ready_since",
]

NOBODY: Final = 0
"""Holder of a parked run; epochs begin at 1."""


class Mail(NamedTuple):
    """A message with the data to choose the next run: its batch, when it is due, the run it targets.

    If its content is only in the store, ``shelved`` is its length and ``content`` is empty (see `Tables.unshelve`).
    """

    message: Message
    batch: int
    due_at: float = 0.0
    target_run_id: str | None = None
    shelved: int = 0

    @property
    def size(self) -> int:
        """Length of its content in characters."""
        return self.shelved or len(self.message.content)


@dataclass(slots=True)
class SessionRow:
    """A session, its mailbox and its active run. Only transactions change it.

    Parameters:
        session: id of the row, which is also the public number; never reused.
        next_seq, next_n: numbers of the next event and of the next transcript entry.
        fence, holder: number that grows with every claim, rescue and park; epoch of the node that holds the run.
        run_id … cause: the active run; ``started_seq`` is the seq of its ``run.started``.
        append_nth, append_seq: last numbered append under this lease, and its first seq.
        sweep: the next run takes every queued message up to this seq.
        last_run_id: the last ended run.
        history_id: the newest history row.
        waiting: the mailbox, in order.
        taken: messages of the active run; the last ``steered`` of them arrived while it ran.
        rolled_back: whether the active run is to be rolled back.
        resumed_as: run id with which a claim resumed the run, to recognize a repeated claim.
        questions: open questions of the active run, oldest first.
        answered: ids of its answered questions, with the seq of ``run.resumed``.
    """

    session: int
    principal: str
    key: str
    agent: str
    created_at: float
    updated_at: float
    next_seq: int = 1
    next_n: int = 1
    fence: int = 0
    holder: int = 0
    run_id: str | None = None
    run_state: RunState = "running"
    run_agent: str = ""
    attempt: int = 0
    started_at: float = 0.0
    started_seq: int = 0
    cause: Cause | None = None
    append_nth: int = 0
    append_seq: int = 0
    sweep: int = 0
    last_run_id: str | None = None
    deleted_at: float | None = None
    history_id: str | None = None
    waiting: tuple[Mail, ...] = ()
    taken: tuple[Mail, ...] = ()
    steered: int = 0
    rolled_back: bool = False
    resumed_as: str | None = None
    questions: tuple[Question, ...] = ()
    answered: tuple[tuple[str, int], ...] = ()


class KnownMessage(NamedTuple):
    """An accepted message, with the run that took it; ``withdrawn`` if it was withdrawn."""

    message_id: str
    seq: int
    body_hash: bytes
    run_id: str | None
    withdrawn: bool


class EndedRun(msgspec.Struct, frozen=True, gc=False):
    """A run that has ended: its view, its last fence, and what its commit wrote, for a repeated commit.

    ``last_n`` is the number of the last entry ever written when it ended, its own included.
    """

    view: RunView
    fence: int
    started_seq: int
    commit_seq: int
    end_seq: int
    next_run_id: str | None
    previous_run_id: str | None
    last_n: int
    rolled_back: bool


class HistoryRow(msgspec.Struct, frozen=True, gc=False):
    """A piece of a transcript, written by a run or an edit. ``last_n`` is the number of its last entry.

    ``previous_id`` is the row before it; a ``whole`` row replaces that one and all before it.
    """

    history_id: str
    previous_id: str | None
    whole: bool
    last_n: int
    entries: tuple[Entry, ...]


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A schedule.

    Parameters:
        schedule: id of the row, never reused; 0 until it is written.
        principal, schedule_id: owner, and id among the owner's schedules.
        revision: increases by one with every write.
        spec: what the schedule does, and when.
        progress: progress so far.
        paused: whether its ticks are paused.
        last: outcome of the newest tick.
        problem: why that tick did not fire, for display.
        broken: why its body is unreadable; if set, only its ids, revision and session are known. Never written.
    """

    schedule: int = 0
    principal: str
    schedule_id: str
    revision: int
    spec: ScheduleSpec
    progress: Progress
    paused: bool = False
    last: Firing | None = None
    problem: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    broken: str | None = None

    @property
    def due_at(self) -> float | None:
        """Time of its next check, or None."""
        return None if self.paused else self.progress.due_at


def due_at(row: SessionRow) -> float:
    """Return when the next message may be taken; 0 if one may be taken at once, or if none waits."""
    if not row.waiting or row.waiting[0].message.seq <= row.sweep:
        return 0.0
    batch = row.waiting[0].batch
    due = 0.0
    for mail in row.waiting:
        if mail.batch != batch:
            break
        due = mail.due_at
    return due


def ready_since(row: SessionRow) -> float | None:
    """Return the time since which the session has waited to be claimed; None if it does not wait."""
    if row.run_id is not None:
        return row.started_at if row.holder == NOBODY and not row.questions else None
    return row.waiting[0].message.accepted_at if row.waiting else None


def question_due(row: SessionRow) -> float | None:
    """Return when the first open question is due; None if none has a due time."""
    if not row.questions:
        return None
    return min((question.due_at for question in row.questions if question.due_at), default=None)
