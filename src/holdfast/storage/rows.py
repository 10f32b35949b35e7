"""The rows that every backend keeps.

The transactions (`holdfast.storage.transactions`) work only on these rows, so backends differ only in where they keep
the rows: in dictionaries or in SQL tables.

- While a run is active, its state is stored in the session's row. When the run ends, it gets a row of its own.
- A run without a holder (holder 0) is parked. Once the run has no open questions, it is ready to be claimed again.
- The transcript is a chain of history rows, read backwards from the session's ``history_id``. Runs that wrote entries
  and edits each have a history row. A ``whole`` row replaces all rows before it, so reading ends there; the replaced
  rows stay in the chain for undo. Entries are numbered by a counter that only grows, so no number is used twice.
- The state of a message is derived. A queued message has neither a run nor a withdrawal; the state of a message that a
  run took follows from the state of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from holdfast.protocol.messages import Entry, Message, Question, RunState, RunView
from holdfast.protocol.schedules import Firing, Progress, ScheduleSpec
from holdfast.protocol.stopping import Cause

__all__ = [
    "CLOCKS_DIFFER_S",
    "HANDED_OVER",
    "LEFT_TO_OTHERS",
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
CLOCKS_DIFFER_S: Final = 1.0
"""If a message was accepted more than this many seconds in the future, the clock was set back since, or the clock of
the host that accepted it is ahead."""
HANDED_OVER: Final = ""
"""``resumed_as`` of a run that was parked because its holder ended, by a node that does not have the run's agent."""
LEFT_TO_OTHERS: Final = "left to others"
"""The same, by a node that has the agent, but not the session's files or no free slot: the run resumes elsewhere."""


class Mail(NamedTuple):
    """A message with the data that determines which run takes it: its batch, due time and target run.

    If the message's content was not loaded from the store, ``shelved`` is the length of the content and the message's
    ``content`` is empty; `Tables.unshelve` loads the content.
    """

    message: Message
    batch: int
    due_at: float = 0.0
    target_run_id: str | None = None
    shelved: int = 0

    @property
    def size(self) -> int:
        """Length of the message's content, in characters."""
        return self.shelved or len(self.message.content)


@dataclass(slots=True)
class SessionRow:
    """A session, its mailbox and its active run. Only transactions change it.

    Parameters:
        session: id of the row, which is also the session's public number; never reused.
        next_seq, next_n: numbers of the next event and of the next transcript entry.
        fence: number that grows with every claim, rescue and park.
        holder: epoch of the node that holds the active run; 0 for a parked run.
        run_id … cause: fields of the active run; ``started_seq`` is the seq of its ``run.started`` event.
        append_nth, append_seq: number of the last append under the current lease, and the seq of its first event.
        sweep: seq up to which the next run takes all queued messages.
        last_run_id: id of the last ended run.
        history_id: id of the newest history row; None if the transcript is empty.
        events_since: time of the oldest stored event, or an earlier time; None if no event is stored. Only SQL backends
            use it, to find old events.
        workspace_pool: pool of the node on which the session first used files. Only nodes of this pool continue the
            session; None allows all.
        waiting: messages in the mailbox, in order.
        taken: messages of the active run. The run took the last ``steered`` messages of this list after its start.
        rolled_back: whether the active run is to be rolled back.
        resumed_as: run id with which a claim resumed the active run, kept to recognize a repeated claim; or
            `HANDED_OVER` or `LEFT_TO_OTHERS`.
        questions: open questions of the active run, oldest first.
        answered: ids of the active run's answered questions, each with the seq of its ``run.resumed`` event.
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
    run_version: str = ""
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
    events_since: float | None = None
    workspace_pool: str | None = None
    waiting: tuple[Mail, ...] = ()
    taken: tuple[Mail, ...] = ()
    steered: int = 0
    rolled_back: bool = False
    resumed_as: str | None = None
    questions: tuple[Question, ...] = ()
    answered: tuple[tuple[str, int], ...] = ()


class KnownMessage(NamedTuple):
    """An accepted message, with the id of the run that took the message, and whether the message was withdrawn."""

    message_id: str
    seq: int
    body_hash: bytes
    run_id: str | None
    withdrawn: bool


class EndedRun(msgspec.Struct, frozen=True, gc=False):
    """A run that has ended, with the data needed to answer a repeated commit.

    ``last_n`` is the number of the session's newest transcript entry after the run, including the run's entries.
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
    """A piece of a transcript, written by a run or an edit.

    ``last_n`` is the number of the last entry of the piece. ``previous_id`` is the id of the previous row; a ``whole``
    row replaces all previous rows.
    """

    history_id: str
    previous_id: str | None
    whole: bool
    last_n: int
    entries: tuple[Entry, ...]


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A schedule.

    Parameters:
        schedule: id of the row, never reused; 0 until the row is written.
        principal, schedule_id: owner of the schedule, and the schedule's id, unique among the owner's schedules.
        revision: number that every write increases by one.
        spec: message and cadence of the schedule.
        progress: progress of the schedule so far.
        paused: whether the schedule is paused.
        last: outcome of the newest tick; None before the first tick.
        problem: why the newest tick did not fire, for display, if a person must solve the problem; otherwise None.
        broken: why the stored body is unreadable; None if it is readable. If set, only the ids, revision and session of
            the schedule are known. This field is never written.
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
        """Time at which to check the schedule next; None if it is paused, finished or unreadable."""
        return None if self.paused else self.progress.due_at


def due_at(row: SessionRow) -> float:
    """Return the time at which a run may take the next message.

    The result is 0 if the message may be taken at once or if no message waits.
    """
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
    """Return the time since which the session has waited to be claimed; None if the session does not wait."""
    if row.run_id is not None:
        return row.started_at if row.holder == NOBODY and not row.questions else None
    return row.waiting[0].message.accepted_at if row.waiting else None


def question_due(row: SessionRow) -> float | None:
    """Return the earliest due time of the open questions; None if no open question has a due time."""
    if not row.questions:
        return None
    return min((question.due_at for question in row.questions if question.due_at), default=None)
