"""Building blocks of transactions: numbering of a session's events, lease checks, and start and stop of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.errors import LimitExceeded, QuotaExceeded, SessionDeleted, StaleFence, UnknownSession
from holdfast.protocol.events import Event, RunStarted, RunStopping, Stored, encode_event
from holdfast.protocol.states import next_run_state
from holdfast.protocol.stopping import Cause
from holdfast.storage.backend import Tables
from holdfast.storage.event_packs import pack_events
from holdfast.storage.rows import Mail, SessionRow
from holdfast.storage.values import Claim, Lease, Served

__all__ = [
    "EventLog",
    "check_quota",
    "claim_again",
    "claim_of",
    "existing_session",
    "is_elsewhere",
    "is_served",
    "new_session",
    "release_slot",
    "require_lease",
    "stale_fence",
    "start_run",
    "stop_run",
]


_PACK_BYTES = 262_144


class EventLog:
    """Collects and numbers events of a session. If the session was already deleted, further events are dropped."""

    __slots__ = ("closed", "events", "row")

    def __init__(self, row: SessionRow) -> None:
        self.row = row
        self.closed = row.deleted_at is not None
        self.events: list[Stored] = []

    def add(self, event: Event) -> int:
        """Add an event and return its seq."""
        row = self.row
        seq = row.next_seq
        if not self.closed:
            row.next_seq = seq + 1
            kind, body = encode_event(event)
            self.events.append(Stored(seq, kind, body))
        return seq

    def add_raw(self, kind: str, body: bytes) -> int:
        """Add an encoded event and return its seq."""
        seq = self.row.next_seq
        if not self.closed:
            self.row.next_seq = seq + 1
            self.events.append(Stored(seq, kind, body))
        return seq

    def write(self, tables: Tables, run_id: str | None, at: float) -> tuple[Stored, ...]:
        """Write and return the added events.

        The events are written in packs of up to about ``_PACK_BYTES``, because readers always load whole packs.
        """
        events = self.events
        if not events:
            return ()
        body = pack_events(events)
        if len(body) <= _PACK_BYTES:
            tables.add_events(self.row, run_id, at, events[0].seq, events[-1].seq, body)
        else:
            for some in _parts(events):
                tables.add_events(self.row, run_id, at, some[0].seq, some[-1].seq, pack_events(some))
        return tuple(events)


def _parts(events: Sequence[Stored]) -> Iterator[Sequence[Stored]]:
    """Yield the events in parts of at most ``_PACK_BYTES``; a single larger event is a part by itself."""
    start = size = 0
    for index, event in enumerate(events):
        size += len(event.body)
        if size > _PACK_BYTES and index > start:
            yield events[start:index]
            start, size = index, len(event.body)
    yield events[start:]


def check_quota(tables: Tables, principal: str, amount: int, limit: int) -> None:
    """Raise `QuotaExceeded` if storing `amount` more bytes would take the principal over its limit."""
    stored = tables.stored_bytes(principal)
    if stored + amount > limit:
        raise QuotaExceeded(f"{principal!r} has {stored:,} bytes stored, and its limit is {limit:,}")


def existing_session(tables: Tables, principal: str, key: str) -> SessionRow:
    """Return the principal's session `key`. Raises `UnknownSession`, or `SessionDeleted` if it was deleted."""
    row = tables.find(principal, key)
    if row is None:
        raise UnknownSession(f"no such session: {key!r}")
    if row.deleted_at is not None:
        raise SessionDeleted(f"session {key!r} was deleted")
    return row


def new_session(tables: Tables, principal: str, key: str, *, agent: str, at: float, limit: int) -> SessionRow:
    """Return a new, unwritten session row. Raises `LimitExceeded` if the principal already has `limit` sessions."""
    if tables.live_sessions(principal) >= limit:
        raise LimitExceeded(
            f"{principal!r} already has {limit} sessions, the maximum", hint="delete sessions that you do not need"
        )
    return SessionRow(
        session=tables.new_session_number(), principal=principal, key=key, agent=agent, created_at=at, updated_at=at
    )


def require_lease(tables: Tables, lease: Lease) -> SessionRow:
    """Return the session of the lease. Raises `StaleFence` if the lease has become invalid."""
    row = tables.get(lease.session)
    if row is None or row.run_id != lease.run_id or row.fence != lease.fence:
        raise stale_fence(tables, lease, row)
    return row


def is_elsewhere(tables: Tables, row: SessionRow) -> bool:
    """Return whether the session has files that this node does not have."""
    return row.workspace_pool is not None and row.workspace_pool != tables.workspace_pool


def stale_fence(tables: Tables, lease: Lease, row: SessionRow | None) -> StaleFence:
    """Count a write under a stale lease, and return the error for it."""
    tables.counters.stale_writes_refused += 1
    if row is None:
        why = "its session was purged"
    elif row.run_id == lease.run_id:
        why = f"it was taken over or parked: its fence is now {row.fence}, not {lease.fence}"
    else:
        why = "it no longer holds the session"
    return StaleFence(f"run {lease.run_id} may not write: {why}", hint="stop this run; its results are discarded")


def is_served(row: SessionRow, served: Served | None) -> bool:
    """Return whether a host with these agents may continue the session's run or, without a run, start the next one.

    A run continues with the version of its agent with which it began. Any host that has the agent may end a run that
    was interrupted.
    """
    if served is None:
        return True
    if row.run_id is None:
        return row.agent in served
    version = served.get(row.run_agent)
    return version is not None and (row.run_version in ("", version) or row.cause is not None)


def start_run(
    tables: Tables,
    row: SessionRow,
    log: EventLog,
    taken: tuple[Mail, ...],
    *,
    run_id: str,
    at: float,
    served: Served | None,
) -> None:
    """Start a new run in the session's free slot, and add its ``run.started`` to the log."""
    row.fence += 1
    row.holder = tables.epoch
    row.run_id = run_id
    row.run_state = "running"
    row.run_agent = row.agent
    row.run_version = "" if served is None else served.get(row.agent, "")
    row.attempt = 1
    row.started_at = at
    row.append_nth = row.append_seq = 0
    row.taken = taken
    row.started_seq = log.add(_started(row))


def release_slot(row: SessionRow) -> None:
    """Free the session's slot by clearing all fields of the run that has ended."""
    row.run_id = None
    row.run_state = "running"
    row.cause = None
    row.taken = ()
    row.steered = 0
    row.rolled_back = False
    row.resumed_as = None
    row.questions = ()
    row.answered = ()
    row.append_nth = row.append_seq = 0


def _started(row: SessionRow) -> RunStarted:
    assert row.run_id is not None
    taken = row.taken[: -row.steered] if row.steered else row.taken
    return RunStarted(
        at=row.started_at,
        run_id=row.run_id,
        agent=row.run_agent,
        messages=tuple([mail.message.message_id for mail in taken]),
    )


def claim_of(
    tables: Tables,
    row: SessionRow,
    events: tuple[Stored, ...] = (),
    *,
    resumed: bool = False,
    handed_over: bool = False,
) -> Claim:
    """Return a claim of the session's active run, with the events that the claim wrote."""
    assert row.run_id is not None
    return Claim(
        lease=Lease(row.session, row.run_id, row.fence),
        number=row.session,
        principal=row.principal,
        key=row.key,
        agent=row.run_agent,
        attempt=row.attempt,
        messages=tuple([mail.message for mail in tables.unshelve(row, row.taken)]),
        started_seq=row.started_seq,
        interrupt=row.cause,
        events=events,
        questions=row.questions,
        resumed=resumed,
        handed_over=handed_over,
        workspace_pool=row.workspace_pool,
        epoch=tables.epoch,
    )


def claim_again(tables: Tables, row: SessionRow) -> Claim:
    """Return the result of the earlier claim to a caller that repeats the claim."""
    if row.resumed_as is not None:
        return claim_of(tables, row, resumed=True)
    kind, body = encode_event(_started(row))
    return claim_of(tables, row, (Stored(row.started_seq, kind, body),))


def stop_run(row: SessionRow, log: EventLog, cause: Cause, at: float, grace_s: float | None = None) -> bool:
    """Record an interrupt of the active run, and return whether the session row was changed.

    If an interrupt is already recorded, its cause is kept; a rollback is then recorded in addition. An interrupt drops
    the run's open questions.
    """
    assert row.run_id is not None
    takes_back = cause.kind == "rollback" and not row.rolled_back
    row.rolled_back |= takes_back
    if row.cause is not None:
        return takes_back
    row.run_state = next_run_state(row.run_state, "interrupt")
    row.cause = cause
    row.questions = ()
    log.add(RunStopping(at=at, run_id=row.run_id, cause=cause, grace_s=grace_s))
    return True
