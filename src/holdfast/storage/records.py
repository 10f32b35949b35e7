"""The rows that every store keeps, the tables it offers to transactions, and the views built from rows.

The transactions (`holdfast.storage.verbs`) work on these rows and on nothing else, so that stores differ only in where
the rows are: in dictionaries, or in SQL.

- While a run is active, its state is in its session's row; it gets a row of its own once, when it ends.
- A run without a holder (holder 0) is parked; once it waits for nothing, it is ready to be claimed again.
- The transcript is a chain of history rows from the session's ``history_id`` backwards: of runs that wrote entries, and
  of edits. A ``whole`` row stands for all of it, so reading ends there; the row it replaced is still its predecessor,
  for undo. Entries are numbered by a counter that only grows: a number is never used for two entries.
- A message has no state of its own: a queued one has neither a run nor a withdrawal, and the others follow their run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from holdfast.protocol.events import Stored, encode_json
from holdfast.protocol.messages import (
    Attachment,
    Entry,
    MailboxItem,
    Message,
    Question,
    RunState,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.schedules import Firing, Progress, ScheduleSpec, ScheduleView
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import DueQuestion, DueSchedule, Ready

__all__ = [
    "NOBODY",
    "Counters",
    "EndedRun",
    "HistoryRow",
    "KnownMessage",
    "Mail",
    "ScheduleRow",
    "SessionRow",
    "Tables",
    "due_at",
    "due_of",
    "ended_state",
    "journal",
    "live_run",
    "mailbox_items",
    "pack_entries",
    "pack_events",
    "question_due",
    "ready_of",
    "ready_since",
    "schedule_due",
    "schedule_view",
    "session_view",
    "settlement_of",
    "unpack_entries",
    "unpack_events",
]

NOBODY: Final = 0
"""Holder of a parked run; epochs begin at 1."""


class Mail(NamedTuple):
    """A message with the data to choose the next run: its batch, when it is due, the run it targets.

    If the store alone has its content, ``shelved`` is its length and ``content`` is empty (see `Tables.unshelve`).
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
        fence, holder: number that grows with every claim and rescue; epoch of the node that holds the run.
        run_id … cause: the active run; ``started_seq`` is the seq of its ``run.started``.
        append_nth, append_seq: last numbered append under this lease, and its first seq.
        sweep: the next run takes every queued message up to this seq.
        last_run_id: the last ended run.
        history_id: the newest history row.
        waiting: the mailbox, in order.
        taken: messages of the active run; the last ``steered`` of them arrived while it ran.
        rolled_back: whether the active run is to be rolled back.
        resumed_as: run id of the claim that resumed the run, for a repeated claim.
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
        spec: what it does, and when.
        progress: its progress so far.
        paused: whether it currently has no ticks.
        last: outcome of the newest tick.
        problem: why that tick did not fire, for people.
        broken: why its body is unreadable; then only its ids, revision and session are known. Never written.
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


@dataclass(slots=True)
class Counters:
    """Counters of a store since it was opened."""

    commits: int = 0
    batches: int = 0
    stale_writes_refused: int = 0
    duplicates_prevented: int = 0


class Tables(Protocol):
    """Operations of a store for transactions, inside one transaction.

    The caller may change rows it was given; ``save`` (or ``add_session``) makes the change part of the transaction.
    Reads see what the same transaction wrote.
    """

    epoch: int
    counters: Counters

    def find(self, principal: str, key: str) -> SessionRow | None:
        """Return the session with that key; a deleted one until it is purged."""
        ...

    def get(self, session: int) -> SessionRow | None:
        """Return the session with that number."""
        ...

    def live_sessions(self, principal: str) -> int:
        """Return the number of the principal's sessions, without deleted ones."""
        ...

    def stored_bytes(self, principal: str) -> int:
        """Return the number of bytes that the principal's rows take."""
        ...

    def grow(self, principal: str, amount: int) -> None:
        """Count bytes that were written (dropped, if negative); ``add_…`` and ``prune`` do so by themselves."""
        ...

    def new_session_number(self) -> int:
        """Return a number that no session ever had."""
        ...

    def by_idempotency_key(self, row: SessionRow, key: str) -> KnownMessage | None:
        """Return the message that was accepted under that key."""
        ...

    def known_message(self, row: SessionRow, message_id: str) -> KnownMessage | None:
        """Return the message with that id, queued or not."""
        ...

    def ended_run(self, row: SessionRow, run_id: str) -> EndedRun | None:
        """Return the run with that id, if it has ended."""
        ...

    def events_between(self, row: SessionRow, first: int, last: int) -> tuple[Stored, ...]:
        """Return events first ≤ seq ≤ last."""
        ...

    def orphans(self) -> Sequence[SessionRow]:
        """Return sessions whose run another epoch holds (parked ones excluded), the longest running first."""
        ...

    def add_session(self, row: SessionRow) -> None:
        """Write a new session."""
        ...

    def save(self, row: SessionRow) -> None:
        """Write a changed session."""
        ...

    def refuse_used_message_id(self, row: SessionRow, message_id: str) -> None:
        """Raise `StorageError` if the session has a message with that id (or let the write fail and be undone)."""
        ...

    def add_message(self, row: SessionRow, mail: Mail, *, idempotency_key: str | None, body_hash: bytes) -> None:
        """Write a queued message."""
        ...

    def unshelve(self, row: SessionRow, mails: tuple[Mail, ...]) -> tuple[Mail, ...]:
        """Return these messages of the session with their contents; rows that were read may lack large ones."""
        ...

    def take(self, row: SessionRow, mails: Sequence[Mail], run_id: str) -> None:
        """Record the run of messages that were queued."""
        ...

    def withdraw(self, row: SessionRow, mails: Sequence[Mail], at: float) -> None:
        """Record that messages were withdrawn."""
        ...

    def add_events(
        self, row: SessionRow, run_id: str | None, at: float, first_seq: int, last_seq: int, body: bytes
    ) -> None:
        """Write events of these numbers, as `pack_events` packs them."""
        ...

    def add_run(self, row: SessionRow, run: EndedRun, history: HistoryRow | None) -> None:
        """Write an ended run, with its piece of the transcript."""
        ...

    def add_kept(self, row: SessionRow, n: int, body: str) -> None:
        """Write the state that an agent keeps with the entry of that number."""
        ...

    def add_edit(self, row: SessionRow, history: HistoryRow) -> None:
        """Write a history row without a run; it is ``whole``."""
        ...

    def history(self, row: SessionRow) -> HistoryRow | None:
        """Return the newest history row."""
        ...

    def transcript(self, row: SessionRow, history_id: str | None) -> tuple[Entry, ...]:
        """Return all entries as of that history row, in order."""
        ...

    def attachment(self, principal: str, digest: str) -> Attachment | None:
        """Return the principal's attachment with that digest."""
        ...

    def attached_bytes(self, principal: str) -> int:
        """Return the number of bytes that the principal's attachments take."""
        ...

    def add_attachment(self, principal: str, attachment: Attachment, body: bytes | bytearray, at: float) -> None:
        """Write an attachment that the principal does not have."""
        ...

    def touch_attachment(self, principal: str, digest: str, at: float) -> None:
        """Record that an attachment was uploaded again."""
        ...

    def use_attachments(self, row: SessionRow, digests: Iterable[str]) -> None:
        """Record that the session refers to these; existing references stay unchanged."""
        ...

    def purge_contents(self, row: SessionRow, *, keep_run_id: str | None = None) -> None:
        """Drop messages, runs, transcript and events of a deleted session except its last pack of events.

        Parameters:
            keep_run_id: run whose row stays, so that its commit may be repeated.
        """
        ...

    def find_schedule(self, principal: str, schedule_id: str) -> ScheduleRow | None:
        """Return the principal's schedule with that id."""
        ...

    def schedule(self, schedule: int) -> ScheduleRow | None:
        """Return the schedule of that row."""
        ...

    def schedules_of(self, principal: str) -> int:
        """Return the number of the principal's schedules."""
        ...

    def add_schedule(self, row: ScheduleRow) -> None:
        """Write a new schedule; the store assigns its row id."""
        ...

    def save_schedule(self, row: ScheduleRow) -> None:
        """Write a changed schedule; its revision has increased by one."""
        ...

    def put_off_schedule(self, row: ScheduleRow, *, at: float, until: float) -> None:
        """Postpone the next check of an unreadable schedule to ``until`` or later; what is stored stays."""
        ...

    def drop_schedule(self, row: ScheduleRow) -> None:
        """Forget a schedule."""
        ...


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
    """Return since when the session waits to be claimed; None if it does not."""
    if row.run_id is not None:
        return row.started_at if row.holder == NOBODY and not row.questions else None
    return row.waiting[0].message.accepted_at if row.waiting else None


def question_due(row: SessionRow) -> float | None:
    """Return when the first open question is due; None if none ever is."""
    if not row.questions:
        return None
    return min((question.due_at for question in row.questions if question.due_at), default=None)


def due_of(rows: Iterable[SessionRow], *, before: float, limit: int) -> tuple[DueQuestion, ...]:
    """Return due questions of these sessions, the longest due first."""
    due = [
        DueQuestion(principal=row.principal, key=row.key, question=question)
        for row in sorted(rows, key=lambda row: row.session)
        for question in row.questions
        if question.due_at and question.due_at < before
    ]
    due.sort(key=lambda item: item.question.due_at)
    return tuple(due[:limit])


def live_run(row: SessionRow) -> RunView | None:
    """Return the active run."""
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
    """Return the session for people. ``waiting`` is given, because a reader may not have loaded the mailbox."""
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
    )


def settlement_of(known: KnownMessage, ended: EndedRun | None) -> Settlement:
    """Return the outcome of a message, from its row and the row of its run, if that has ended."""
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
    """Return the state of an ended run, which is also that of its messages unless it was rolled back."""
    match run.state:
        case "completed" | "failed" | "interrupted":
            return run.state
        case _:
            raise AssertionError(f"run {run.run_id} has not ended: it is {run.state}")


def mailbox_items(waiting: Sequence[Mail]) -> tuple[MailboxItem, ...]:
    """Return queued messages for people."""
    return tuple(
        MailboxItem(message=mail.message, due_at=mail.due_at, target_run_id=mail.target_run_id) for mail in waiting
    )


def ready_of(row: SessionRow) -> Ready:
    """Return a session that has messages and no run, or a parked run that waits for nothing."""
    if row.run_id is not None:
        return Ready(session=row.session, principal=row.principal, key=row.key, agent=row.run_agent, not_before=0.0)
    return Ready(session=row.session, principal=row.principal, key=row.key, agent=row.agent, not_before=due_at(row))


def schedule_due(row: ScheduleRow) -> DueSchedule:
    """Return a schedule for firing."""
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
    """Return a schedule for people."""
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


_NOT_OF_A_RUN: Final = ("message.accepted", "history.edited")


def journal(packs: Iterable[Iterable[Stored]]) -> Iterable[Stored]:
    """Return the events of one run from the packs with its id: a pack may begin with earlier events."""
    return (event for pack in packs for event in pack if event.kind not in _NOT_OF_A_RUN)


_entry_decoder = msgspec.json.Decoder(Entry)


def pack_events(events: Iterable[Stored]) -> bytes:
    """Return one body for consecutive events: lines of ``<kind> <json>``. JSON has no raw newline, kinds no space."""
    return b"\n".join([b"%b %b" % (kind.encode(), body) for _, kind, body in events])


def unpack_events(last_seq: int, body: bytes) -> list[Stored]:
    """Return the events of a pack that ends at ``last_seq``."""
    lines = body.split(b"\n")
    seq = last_seq - len(lines)
    out = []
    for line in lines:
        seq += 1
        kind, _, json = line.partition(b" ")
        out.append(Stored(seq, kind.decode(), json))
    return out


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """Return one body for consecutive transcript entries: a line of JSON each."""
    return b"\n".join([encode_json(entry) for entry in entries])


class _Numbered(msgspec.Struct):
    """Number of an entry, without the rest of it."""

    n: int = 0


_number_decoder = msgspec.json.Decoder(_Numbered)


def entries_after(body: bytes, after: int) -> Iterator[tuple[Entry, int]]:
    """Yield the entries of a pack with n > after, each with its JSON length; decoded on request."""
    start = 0
    while start < len(body):
        end = body.find(b"\n", start)
        line = memoryview(body)[start : len(body) if end < 0 else end]
        if _number_decoder.decode(line).n > after:
            yield _entry_decoder.decode(line), len(line)
        start += len(line) + 1


def unpack_entries(body: bytes) -> list[Entry]:
    """Return the entries of a pack."""
    return [_entry_decoder.decode(line) for line in body.split(b"\n")]
