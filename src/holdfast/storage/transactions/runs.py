"""Transactions on runs: claim, append, commit, rescue and restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from holdfast.errors import HoldfastError, InvalidRequest, UnknownSession
from holdfast.protocol.events import MessageSettled, RunFinished, RunRestarted, RunRolledBack, Stored, plain
from holdfast.protocol.mailbox_policies import Waiting, select_batch
from holdfast.protocol.messages import RunView, Settlement
from holdfast.protocol.states import next_run_state
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.storage.backend import Tables
from holdfast.storage.rows import CLOCKS_DIFFER_S, HANDED_OVER, NOBODY, EndedRun, HistoryRow, Mail, SessionRow, due_at
from holdfast.storage.transactions.questions import resume
from holdfast.storage.transactions.session_log import (
    EventLog,
    check_quota,
    claim_again,
    claim_of,
    is_elsewhere,
    is_served,
    release_slot,
    require_lease,
    stale_fence,
    start_run,
    stop_run,
)
from holdfast.storage.transactions.transcript_edits import number_entries
from holdfast.storage.values import ALL_BYTES, Append, Appended, Claim, Committed, Lease, NotReady, RunCommit, Served
from holdfast.storage.views import ended_state

__all__ = ["append", "append_all", "claim", "commit_run", "rescue", "restart"]

_ASKED: Final = frozenset(("user", "stop"))
"""Kinds of interrupt that take effect even if the store failed to record them."""


def _choose(row: SessionRow, now: float) -> tuple[tuple[Mail, ...], tuple[Mail, ...]]:
    """Return the messages that the next run takes, and the messages that stay queued."""
    waiting = row.waiting
    if len(waiting) == 1:
        mail = waiting[0]
        due = mail.message.seq <= row.sweep or _due_at(mail, now) <= now
        return (waiting, ()) if due else ((), waiting)
    seqs = set(
        select_batch(
            [Waiting(mail.message.seq, mail.batch, _due_at(mail, now)) for mail in waiting],
            take_all_waiting=row.sweep,
            now=now,
        ).seqs
    )
    return (
        tuple(mail for mail in waiting if mail.message.seq in seqs),
        tuple(mail for mail in waiting if mail.message.seq not in seqs),
    )


def _due_at(mail: Mail, now: float) -> float:
    """Return the time at which a run may take the message.

    If the message was accepted in the future, the time it has waited is unknown, so the result is 0.
    """
    return 0.0 if now < mail.message.accepted_at - CLOCKS_DIFFER_S else mail.due_at


def claim(tables: Tables, session: int, run_id: str, at: float, served: Served | None = None) -> Claim | NotReady:
    """See `Store.claim`."""
    row = tables.get(session)
    if row is None:
        raise UnknownSession(f"no such session number: {session}")
    if not is_served(row, served):
        return NotReady(waiting=len(row.waiting), busy=row.run_id is not None)
    if row.run_id is not None and row.holder == tables.epoch and run_id in (row.run_id, row.resumed_as):
        return claim_again(tables, row)
    needs_files = row.cause is None and row.resumed_as != HANDED_OVER  # else a node may end it without them
    if needs_files and is_elsewhere(tables, row):
        return NotReady(waiting=len(row.waiting), busy=row.run_id is not None)
    if row.run_id is not None:
        return resume(tables, row, run_id, at) or NotReady(waiting=len(row.waiting), busy=True)
    taken, left = _choose(row, at)
    if not taken or tables.ended_run(row, run_id) is not None:
        return NotReady(waiting=len(row.waiting), not_before=due_at(row))
    row.waiting = left
    row.updated_at = at
    log = EventLog(row)
    start_run(tables, row, log, taken, run_id=run_id, at=at, served=served)
    tables.save(row)
    tables.take(row, taken, run_id)
    return claim_of(tables, row, log.write(tables, run_id, at))


def append(
    tables: Tables, lease: Lease, events: Sequence[tuple[str, bytes]], nth: int, stored_limit: int = ALL_BYTES
) -> Appended:
    """See `Store.append`."""
    row = require_lease(tables, lease)
    if nth and nth == row.append_nth:
        tables.counters.duplicates_prevented += 1
        first = row.append_seq
        return Appended(events=tuple(Stored(first + i, kind, body) for i, (kind, body) in enumerate(events)))
    if nth and nth != row.append_nth + 1:
        raise InvalidRequest(f"append {nth} of run {lease.run_id} does not follow append {row.append_nth}")
    if not events:
        return Appended(events=())
    for _, body in events:
        if b"\n" in body:
            raise InvalidRequest("an event's JSON must be one line")
    check_quota(tables, row.principal, sum([len(body) for _, body in events]), stored_limit)
    log = EventLog(row)
    first = row.next_seq
    for kind, body in events:
        log.add_raw(kind, body)
    if nth:
        row.append_nth, row.append_seq = nth, first
    tables.save_append(row)
    return Appended(events=log.write(tables, lease.run_id, row.updated_at))


def append_all(tables: Tables, appends: Sequence[Append], stored_limit: int) -> list[Appended | HoldfastError]:
    """See `Store.append_all`."""
    results: list[Appended | HoldfastError] = []
    for request in appends:
        try:
            results.append(append(tables, request.lease, request.events, request.nth, stored_limit))
        except HoldfastError as refusal:
            # The frames that it passed through hold it too, and with it all results, until a garbage collection.
            results.append(refusal.with_traceback(None))
    return results


def commit_run(tables: Tables, commit: RunCommit) -> Committed:
    """See `Store.commit_run`."""
    lease = commit.lease
    row = tables.get(lease.session)
    if row is None or row.run_id != lease.run_id or row.fence != lease.fence:
        ended = None if row is None else tables.ended_run(row, lease.run_id)
        if row is None or ended is None or ended.fence != lease.fence:
            raise stale_fence(tables, lease, row)
        tables.counters.duplicates_prevented += 1
        return _commit_again(tables, row, ended)
    for _, body in commit.events:
        if b"\n" in body:
            raise InvalidRequest("an event's JSON must be one line")
    check_quota(tables, row.principal, _commit_bytes(commit), commit.stored_limit)

    at = commit.at
    unrecorded = _unrecorded_stop(row, commit)
    status = _final_state(row, commit.status)
    cause = commit.cause if status == "completed" else commit.cause or row.cause
    text = plain(commit.text)
    error = None if commit.error is None else plain(commit.error)
    taken = row.taken
    started_seq = row.started_seq
    rolled_back = row.rolled_back
    log = EventLog(row)
    commit_seq = row.next_seq
    for kind, body in commit.events:
        log.add_raw(kind, body)
    if unrecorded is not None:
        stop_run(row, log, unrecorded, at)
    if rolled_back:
        log.add(RunRolledBack(at=at, run_id=lease.run_id, not_undone=commit.not_undone))
    log.add(
        RunFinished(
            at=at,
            run_id=lease.run_id,
            status=status,
            text=text,
            cause=cause,
            error=error,
            receipt=commit.receipt,
            usage=commit.usage,
        )
    )
    settled = "superseded" if rolled_back else status
    for mail in taken:
        log.add(MessageSettled(at=at, message_id=mail.message.message_id, state=settled, run_id=lease.run_id))
    view = RunView(
        run_id=lease.run_id,
        agent=row.run_agent,
        state=status,
        attempt=row.attempt,
        messages=tuple([mail.message.message_id for mail in taken]),
        started_at=row.started_at,
        ended_at=at,
        cause=cause,
        error=error,
        text=text,
        receipt=commit.receipt,
        usage=commit.usage,
    )
    end_seq = row.next_seq - 1
    history = None
    if (commit.entries or commit.replaces_history) and not rolled_back:
        entries = number_entries(tables, row, commit.entries)
        history = HistoryRow(lease.run_id, row.history_id, commit.replaces_history, row.next_n - 1, entries)
        row.history_id = lease.run_id
    last_n = row.next_n - 1
    previous_run_id, row.last_run_id = row.last_run_id, lease.run_id
    events = log.write(tables, lease.run_id, at)
    only_ends = not (row.waiting or row.questions or row.holder == NOBODY or row.deleted_at is not None)
    release_slot(row)
    row.updated_at = at

    chosen: tuple[Mail, ...] = ()
    next_log = EventLog(row)
    may_start = is_served(row, commit.served) and not is_elsewhere(tables, row)
    if commit.next_run_id is not None and row.waiting and may_start:
        chosen, left = _choose(row, at)
        if chosen:
            row.waiting = left
            start_run(tables, row, next_log, chosen, run_id=commit.next_run_id, at=at, served=commit.served)
    next_run_id = commit.next_run_id if chosen else None
    if only_ends:
        tables.save_end(row)
    else:
        tables.save(row)
    ended = EndedRun(
        view, lease.fence, started_seq, commit_seq, end_seq, next_run_id, previous_run_id, last_n, rolled_back
    )
    if row.deleted_at is None:
        tables.add_run(row, ended, history)
    else:
        row.history_id = None
        tables.add_run(row, msgspec.structs.replace(ended, view=_without_content(view)), None)
        tables.purge_contents(row, keep_run_id=lease.run_id)
    next_claim = None
    if next_run_id is not None:
        tables.take(row, chosen, next_run_id)
        started = next_log.write(tables, next_run_id, at)
        next_claim = claim_of(tables, row, started)
        events += started
    return Committed(
        events=events,
        settled=_settlements(ended),
        claim=next_claim,
        waiting=len(row.waiting),
        not_before=due_at(row),
    )


def _commit_bytes(commit: RunCommit) -> int:
    """Return the approximate bytes that a commit adds: the text is stored in ``run.finished`` and in the run."""
    size = 2 * len(commit.text)
    for _, body in commit.events:
        size += len(body)
    for entry in commit.entries:
        size += len(entry.content)
        if entry.agent_state is not None:
            size += len(entry.agent_state.body)
    return size


def _without_content(view: RunView) -> RunView:
    """Return a run of a deleted session without its content: its commit may be retried, and its receipt awaited."""
    receipt = view.receipt
    if receipt is not None:
        receipt = StopReceipt(
            scope=receipt.scope,
            cause=Cause(kind=receipt.cause.kind, at=receipt.cause.at),
            outcome=receipt.outcome,
            stopped=receipt.stopped,
            elapsed_s=receipt.elapsed_s,
            proof=receipt.proof,
        )
    return msgspec.structs.replace(view, text="", error=None, receipt=receipt)


def _commit_again(tables: Tables, row: SessionRow, ended: EndedRun) -> Committed:
    events = tables.events_between(row, ended.commit_seq, ended.end_seq)
    next_claim = None
    if ended.next_run_id is not None and row.run_id == ended.next_run_id and row.holder == tables.epoch:
        next_claim = claim_again(tables, row)
        events += next_claim.events
    return Committed(
        events=events,
        settled=_settlements(ended),
        claim=next_claim,
        waiting=len(row.waiting),
        not_before=due_at(row),
    )


def _unrecorded_stop(row: SessionRow, commit: RunCommit) -> Cause | None:
    """Return the cause of a stop by a user that the store failed to record at the time; otherwise return None."""
    cause = commit.cause
    while cause is not None and cause.parent is not None:
        cause = cause.parent
    if commit.status != "interrupted" or row.cause is not None or cause is None or cause.kind not in _ASKED:
        return None
    return cause


def _final_state(
    row: SessionRow, status: Literal["completed", "failed", "interrupted"]
) -> Literal["completed", "failed", "interrupted"]:
    """Return the final state according to the state table: an error while stopping counts as an interrupt.

    A suspended run that completes or fails is treated as resumed, because it no longer waits for an answer. A run that
    is rolled back counts as interrupted, whatever its `status`.
    """
    state = row.run_state
    if row.rolled_back:
        status = "interrupted"
    elif state == "suspended" and status != "interrupted":
        state = next_run_state(state, "resume")
    match status:
        case "completed":
            next_run_state(state, "complete")
            return "completed"
        case "failed":
            return "failed" if next_run_state(state, "fail") == "failed" else "interrupted"
        case "interrupted":
            next_run_state(next_run_state(state, "interrupt"), "stopped")
            return "interrupted"


def _settlements(ended: EndedRun) -> tuple[Settlement, ...]:
    view = ended.view
    state = "superseded" if ended.rolled_back else ended_state(view)
    return tuple(
        [
            Settlement(
                message_id=message_id,
                state=state,
                run_id=view.run_id,
                text=view.text,
                cause=view.cause,
                error=view.error,
            )
            for message_id in view.messages
        ]
    )


def rescue(tables: Tables, at: float, served: Served | None = None) -> tuple[Claim, ...]:
    """See `Store.rescue`."""
    claims = []
    for row in tables.orphans():
        row.fence += 1
        is_ours = is_served(row, served)
        row.holder = tables.epoch if is_ours else NOBODY
        row.attempt += 1
        row.append_nth = row.append_seq = 0
        row.resumed_as = None if is_ours else HANDED_OVER
        row.updated_at = at
        tables.save(row)
        if is_ours:
            claims.append(claim_of(tables, row))
    return tuple(claims)


def restart(tables: Tables, lease: Lease, at: float, discard_from: int | None = None) -> Appended:
    """See `Store.restart`."""
    row = require_lease(tables, lease)
    if discard_from is None:
        discard_from = row.started_seq + 1
    log = EventLog(row)
    log.add(RunRestarted(at=at, run_id=lease.run_id, attempt=row.attempt, discard_from=discard_from))
    row.updated_at = at
    tables.save(row)
    return Appended(events=log.write(tables, lease.run_id, at))
