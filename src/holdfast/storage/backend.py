# ruff: noqa: D102 - `Store` documents the reads
"""Interface of a backend, which keeps the rows of a store and runs its transactions and reads.

To add a kind of store, write a `Backend` with its `Tables` and `Reads`. A backend on an SQL database reuses the tables
and reads of `holdfast.storage.sql`, and implements `holdfast.storage.sql.database.Database`, which runs the statements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from holdfast.protocol.events import Stored
from holdfast.protocol.messages import (
    Attachment,
    Entry,
    Grant,
    MailboxItem,
    Question,
    RunView,
    SessionView,
    Settlement,
)
from holdfast.protocol.schedules import ScheduleView
from holdfast.storage.cluster import Cluster
from holdfast.storage.rows import EndedRun, HistoryRow, KnownMessage, Mail, ScheduleRow, SessionRow
from holdfast.storage.values import (
    DueQuestion,
    DueSchedule,
    KeyRecord,
    OldEvents,
    Ready,
    RequestKind,
    StoreHealth,
)

__all__ = ["Backend", "Counters", "GrantTable", "PruneTimes", "Reads", "Tables"]

_T = TypeVar("_T")


@dataclass(slots=True)
class Counters:
    """Counters of a store since it was opened."""

    commits: int = 0
    batches: int = 0
    stale_writes_refused: int = 0
    duplicates_prevented: int = 0


class PruneTimes(NamedTuple):
    """Times before which each kind of row is old, in seconds since the epoch; see `Store.prune`."""

    tombstones: float
    events: float
    idempotency: float
    attachments: float


class GrantTable(Protocol):
    """Operations on grants that a backend provides inside one transaction. They count the bytes that they write."""

    def add(self, session: int, grant: Grant) -> None:
        """Write a grant for the session with that number; 0 means all sessions of the grant's principal.

        Raises `StorageError` if the grant's id is already in use.
        """
        ...

    def count(self, principal: str) -> int:
        """Return the number of the principal's grants."""
        ...

    def find(self, principal: str, grant_id: str) -> Grant | None:
        """Return the principal's grant with that id; None if it does not exist."""
        ...

    def drop(self, grant: Grant) -> None:
        """Delete a grant."""
        ...

    def drop_all_of(self, row: SessionRow) -> None:
        """Delete the grants that hold only for this session."""
        ...


class Tables(Protocol):
    """Operations that a backend provides inside one transaction.

    A caller may change the session rows that these methods return; ``save`` (or ``add_session``) makes the change part
    of the transaction. Reads see the writes of the same transaction.
    """

    @property
    def epoch(self) -> int:
        """Epoch of the writing node."""
        ...

    @property
    def workspace_pool(self) -> str | None:
        """Name of the pool of nodes that share the writing node's workspaces; None if it declares no pool."""
        ...

    @property
    def counters(self) -> Counters:
        """Counters that transactions increment."""
        ...

    @property
    def grants(self) -> GrantTable:
        """The grants."""
        ...

    def find(self, principal: str, key: str) -> SessionRow | None:
        """Return the session with that key, even if it was deleted but not yet purged; None if it does not exist."""
        ...

    def get(self, session: int) -> SessionRow | None:
        """Return the session with that number; None if it does not exist."""
        ...

    def live_sessions(self, principal: str) -> int:
        """Return the number of the principal's sessions, not counting deleted sessions."""
        ...

    def stored_bytes(self, principal: str) -> int:
        """Return the size of the principal's rows, in bytes."""
        ...

    def grow(self, principal: str, amount: int) -> None:
        """Add `amount`, which may be negative, to the principal's stored bytes.

        The ``add_…`` methods and ``prune`` already count the bytes that they write or drop.
        """
        ...

    def new_session_number(self) -> int:
        """Return a session number that was never used before."""
        ...

    def by_idempotency_key(self, row: SessionRow, key: str) -> KnownMessage | None:
        """Return the message that was accepted under that idempotency key; None if it does not exist."""
        ...

    def known_message(self, row: SessionRow, message_id: str) -> KnownMessage | None:
        """Return the message with that id, queued or not; None if it does not exist."""
        ...

    def ended_run(self, row: SessionRow, run_id: str) -> EndedRun | None:
        """Return the ended run with that id; None if no ended run has that id."""
        ...

    def events_between(self, row: SessionRow, first: int, last: int) -> tuple[Stored, ...]:
        """Return the session's events with `first` ≤ seq ≤ `last`."""
        ...

    def orphans(self) -> Sequence[SessionRow]:
        """Return the sessions with a run that another epoch holds (parked runs excluded), the oldest run first."""
        ...

    def ask_others(self, session: int, kind: RequestKind, body: bytes) -> Sequence[int]:
        """Ask the other nodes that have a part of the session to do something; return the requests' ids.

        A ``stop`` is asked of nodes with background work, also of those that are gone and cannot reply; the others of
        the living nodes with the run or background work.
        """
        ...

    def add_session(self, row: SessionRow) -> None:
        """Write a new session."""
        ...

    def save_append(self, row: SessionRow) -> None:
        """Write a session of which only ``next_seq``, ``append_nth`` and ``append_seq`` have changed."""
        ...

    def save_start(self, row: SessionRow) -> None:
        """Write a session without queued messages, in which only a run has started, perhaps of another agent."""
        ...

    def save_end(self, row: SessionRow) -> None:
        """Write a session without queued messages, in which only a run without open questions has ended."""
        ...

    def save(self, row: SessionRow) -> None:
        """Write a changed session."""
        ...

    def refuse_used_message_id(self, row: SessionRow, message_id: str) -> None:
        """Raise `StorageError` if the session has a message with that id.

        A backend that can undo writes may do nothing here and let the later write of the message fail.
        """
        ...

    def add_message(self, row: SessionRow, mail: Mail, *, idempotency_key: str | None, body_hash: bytes) -> None:
        """Write a queued message."""
        ...

    def unshelve(self, row: SessionRow, mails: tuple[Mail, ...]) -> tuple[Mail, ...]:
        """Return these messages of the session with their contents; large contents may not have been loaded yet."""
        ...

    def take(self, row: SessionRow, mails: Sequence[Mail], run_id: str) -> None:
        """Record that a run took these queued messages."""
        ...

    def withdraw(self, row: SessionRow, mails: Sequence[Mail], at: float) -> None:
        """Record that these queued messages were withdrawn."""
        ...

    def add_events(
        self, row: SessionRow, run_id: str | None, at: float, first_seq: int, last_seq: int, body: bytes
    ) -> None:
        """Write the events from `first_seq` to `last_seq` as one row, with the next ``commit_no``.

        `body` contains them as packed by `pack_events`. ``commit_no`` increases with every row, in commit order, and no
        number is used twice.
        """
        ...

    def add_run(self, row: SessionRow, run: EndedRun, history: HistoryRow | None) -> None:
        """Write an ended run and its history row. `history` is None if the run does not change the transcript."""
        ...

    def add_kept(self, row: SessionRow, n: int, body: str) -> None:
        """Write the agent state that belongs to the transcript entry `n`."""
        ...

    def add_edit(self, row: SessionRow, history: HistoryRow) -> None:
        """Write the history row of an edit, which is always ``whole``."""
        ...

    def step_back(self, row: SessionRow, newest: HistoryRow) -> None:
        """Undo `newest`, the session's newest history row: make the row before it the newest again."""
        ...

    def history(self, row: SessionRow) -> HistoryRow | None:
        """Return the session's newest history row; None if the transcript is empty."""
        ...

    def transcript(self, row: SessionRow, history_id: str | None) -> tuple[Entry, ...]:
        """Return all entries as of that history row, in order."""
        ...

    def attachment(self, principal: str, digest: str) -> Attachment | None:
        """Return the principal's attachment with that digest; None if it does not exist."""
        ...

    def attached_bytes(self, principal: str) -> int:
        """Return the total size of the principal's attachments, in bytes."""
        ...

    def add_attachment(self, principal: str, attachment: Attachment, body: bytes | bytearray, at: float) -> None:
        """Write an attachment that the principal does not have yet."""
        ...

    def touch_attachment(self, principal: str, digest: str, at: float) -> None:
        """Record that an attachment was uploaded again."""
        ...

    def use_attachments(self, row: SessionRow, digests: Iterable[str]) -> None:
        """Record that the session refers to these attachments; existing references stay unchanged."""
        ...

    def purge_contents(self, row: SessionRow, *, keep_run_id: str | None = None) -> None:
        """Drop the messages, runs, transcript and events of a deleted session, except for its last pack of events.

        Parameters:
            row: the deleted session.
            keep_run_id: id of a run whose row is kept, so that the run's commit may be repeated; None keeps no run.
        """
        ...

    def find_schedule(self, principal: str, schedule_id: str) -> ScheduleRow | None:
        """Return the principal's schedule with that id; None if it does not exist."""
        ...

    def schedule(self, schedule: int) -> ScheduleRow | None:
        """Return the schedule with that row id; None if it does not exist."""
        ...

    def schedules_of(self, principal: str) -> int:
        """Return the number of the principal's schedules."""
        ...

    def add_schedule(self, row: ScheduleRow) -> None:
        """Write a new schedule; the store assigns its row id."""
        ...

    def save_schedule(self, row: ScheduleRow) -> None:
        """Write a changed schedule, whose revision the caller has increased by one."""
        ...

    def put_off_schedule(self, row: ScheduleRow, *, at: float, until: float) -> None:
        """Postpone the next check of an unreadable schedule to ``until`` or later; its stored body stays unchanged."""
        ...

    def drop_schedule(self, row: ScheduleRow) -> None:
        """Delete a schedule."""
        ...

    def prune(self, before: PruneTimes, after: tuple[Any, ...]) -> tuple[int, tuple[Any, ...] | None]:
        """Prune a small batch of old rows, as described in `Store.prune`.

        Return the number of rows dropped or changed, and the ``after`` for the next call, which is None at the end. The
        first call passes an empty ``after``; its contents are private to the backend.
        """
        ...

    def drop_old_events(self, read: Sequence[OldEvents], *, before: float) -> int:
        """Drop events that ``old_events`` returned, as described in `Store.drop_old_events`."""
        ...

    def add_key(self, record: KeyRecord) -> None:
        """Write an API key. Raises `StorageError` if the key's id is already in use."""
        ...

    def revoke_key(self, key_id: str, at: float) -> bool:
        """Revoke a key; return False if no valid key has that id."""
        ...


class Reads(Protocol):
    """Reads of committed data, each from one snapshot. The methods of `Store` document these reads."""

    def events(self, session: int, *, after: int, limit: int, limit_bytes: int) -> Sequence[Stored]: ...
    def oldest_seq(self, session: int) -> int: ...
    def old_events(
        self, *, before: float, after: tuple[float, int] | None, limit_bytes: int
    ) -> tuple[Sequence[OldEvents], tuple[float, int] | None]: ...
    def run_events(self, session: int, run_id: str) -> Sequence[Stored]: ...
    def transcript(self, session: int, *, after: int, limit: int, limit_bytes: int) -> Sequence[Entry]: ...
    def transcript_within(self, session: int, *, limit_bytes: int) -> Sequence[Entry] | int: ...
    def kept(self, session: int, n: int) -> str: ...
    def questions(self, session: int) -> Sequence[Question]: ...
    def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]: ...
    def attachment_about(self, principal: str, digest: str) -> Attachment | None: ...
    def attachment(self, principal: str, digest: str) -> tuple[Attachment, bytes] | None: ...
    def attachment_part(self, principal: str, digest: str, *, start: int, size: int) -> bytes | None: ...
    def find_session(self, principal: str, key: str) -> tuple[int, SessionView] | None: ...
    def sessions(
        self, *, principal: str | None, limit: int, before: tuple[float, int] | None
    ) -> Sequence[SessionView]: ...
    def live_sessions(self) -> int: ...
    def mailbox(self, session: int) -> Sequence[MailboxItem]: ...
    def settlement(self, session: int, message_id: str) -> Settlement | None: ...
    def run(self, session: int, run_id: str) -> RunView | None: ...
    def runs(self, session: int, *, limit: int) -> Sequence[RunView]: ...
    def ready(self, *, limit: int) -> Sequence[Ready]: ...
    def due_schedules(self, *, now: float, limit: int) -> Sequence[DueSchedule]: ...
    def next_schedule(self) -> float | None: ...
    def schedule(self, principal: str, schedule_id: str) -> tuple[DueSchedule, ScheduleView] | None: ...
    def schedules(self, *, principal: str | None, session: str | None, limit: int) -> Sequence[ScheduleView]: ...
    def grants(self, principal: str, session: int | None) -> Sequence[Grant]: ...
    def stored_bytes(self, principal: str) -> int: ...
    def most_stored(self, *, limit: int) -> Sequence[tuple[str, int]]: ...
    def keys(self) -> Sequence[KeyRecord]: ...


class Backend(Protocol):
    """Keeps the rows of one store.

    Call the methods of a backend only on the event loop that opened the backend.
    """

    @property
    def engine(self) -> str:
        """Kind of the backend, for display."""
        ...

    @property
    def path(self) -> str:
        """Path of the backend's file; empty if the backend has no file."""
        ...

    @property
    def version(self) -> str:
        """Version of the backend's schema, for display."""
        ...

    @property
    def counters(self) -> Counters:
        """Counters since the backend was opened."""
        ...

    @property
    def cluster(self) -> Cluster | None:
        """The nodes that share the backend; None if only one node can use it."""
        ...

    async def open(self, *, node_id: str, at: float) -> None:
        """Open the backend; see `Store.open`."""
        ...

    async def close(self) -> None:
        """Close the backend; see `Store.close`."""
        ...

    def health(self) -> StoreHealth:
        """Return whether the backend can be used now, without waiting."""
        ...

    def write(self, verb: str, action: Callable[[Tables], _T]) -> asyncio.Future[_T]:
        """Run an action as one transaction. The future returns the action's result once its writes are durable.

        Actions run one after the other, in the order of the calls, and their futures are resolved in that order. An
        action runs even if the caller is cancelled. An action that raises a `HoldfastError` must have written nothing,
        because its database transaction may contain other actions. After any other error, a backend that can undo
        writes undoes them and may run the action again. Errors are raised only by the future.

        Parameters:
            verb: name of the store's method, for failpoints and traces.
            action: called with the tables, possibly in another thread; it must neither await nor block.
        """
        ...

    def read(self, query: Callable[[Reads], _T]) -> Awaitable[_T]:
        """Run a query on committed data, which includes all writes whose futures were resolved before the call.

        Parameters:
            query: called with the reads, possibly in another thread; it must neither await nor block.
        """
        ...
