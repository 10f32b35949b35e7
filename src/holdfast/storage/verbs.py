"""Transactions that write, shared by all stores: they decide, change the session's row and write through `Tables`.

Each function is called inside one transaction. A refusal raises **before** the first change, so that it writes
nothing. Nothing here awaits, blocks or reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from holdfast.errors import (
    AlreadySettled,
    IdempotencyMismatch,
    InvalidRequest,
    MailboxFull,
    SessionDeleted,
    UnknownAgent,
    UnknownMessage,
    UnknownSession,
)
from holdfast.protocol.decisions import Waiting, collect_due_at, decide, occupancy, take
from holdfast.protocol.events import (
    MessageAccepted,
    MessageSettled,
    RunFinished,
    RunRestarted,
    RunRolledBack,
    SessionDeletedEvent,
    Stored,
    plain,
)
from holdfast.protocol.messages import Attachment, Message, Policy, RunView, Settlement
from holdfast.protocol.states import next_run_state
from holdfast.protocol.stopping import Cause
from holdfast.storage.history import (
    add_attachment,
    check_retry,
    drop_retried,
    edit_history,
    kept_attachments,
    number_entries,
)
from holdfast.storage.port import (
    ALL_BYTES,
    Appended,
    Claim,
    Committed,
    Interrupt,
    Interrupted,
    Lease,
    NotReady,
    RunCommit,
    Send,
    SendResult,
    Stopped,
)
from holdfast.storage.records import EndedRun, HistoryRow, Mail, SessionRow, Tables, due_at, ended_state
from holdfast.storage.session_log import (
    Log,
    check_quota,
    claim_again,
    claim_of,
    existing_session,
    free,
    held,
    new_session,
    stale,
    start_run,
    stop_run,
)
from holdfast.storage.suspending import answer, park, resume, steer, suspend

__all__ = [
    "add_attachment",
    "answer",
    "append",
    "claim",
    "commit_run",
    "delete_session",
    "edit_history",
    "interrupt",
    "park",
    "rescue",
    "restart",
    "send",
    "steer",
    "stop_session",
    "suspend",
    "withdraw",
]


_ASKED = frozenset(("user", "stop"))
"""Kinds of interrupt that take effect even if the store failed to record them."""
_SET_BACK_S = 1.0
"""A message accepted this much later than now was accepted before the clock was set back."""


def _choose(row: SessionRow, now: float) -> tuple[tuple[Mail, ...], tuple[Mail, ...]]:
    """Return what the next run takes, and what stays."""
    waiting = row.waiting
    if len(waiting) == 1:
        mail = waiting[0]
        due = mail.message.seq <= row.sweep or _due_at(mail, now) <= now
        return (waiting, ()) if due else ((), waiting)
    seqs = set(
        take(
            [Waiting(mail.message.seq, mail.batch, _due_at(mail, now)) for mail in waiting], sweep=row.sweep, now=now
        ).seqs
    )
    return (
        tuple(mail for mail in waiting if mail.message.seq in seqs),
        tuple(mail for mail in waiting if mail.message.seq not in seqs),
    )


def _due_at(mail: Mail, now: float) -> float:
    """Return when a message may be taken. One from the future has waited for an unknown time: take it at once."""
    return 0.0 if now < mail.message.accepted_at - _SET_BACK_S else mail.due_at


def _check_agents(row: SessionRow | None, request: Send, allowed: frozenset[str]) -> None:
    """Raise `UnknownAgent` if the message would reach an agent that the sender may not use."""
    hearing = {request.agent or (request.default_agent if row is None else row.agent)}
    if row is not None and row.run_id is not None and request.policy == "steer":
        hearing.add(row.run_agent)
    for name in sorted(hearing - allowed):
        raise UnknownAgent(f"unknown agent {name!r}", hint="use one that your key allows")


def _check_mailbox_size(row: SessionRow, more: int, limit: int) -> None:
    size = sum([mail.size for mail in row.waiting])
    if size + more > limit:
        raise MailboxFull(
            f"queued messages have {size:,} characters in session {row.key!r}, and its limit is {limit:,}",
            hint="retry after a run has taken some of them",
        )


def send(tables: Tables, request: Send) -> SendResult:
    """See `Store.send`."""
    row = tables.find(request.principal, request.key)
    if row is not None:
        if row.deleted_at is not None:
            raise SessionDeleted(f"session {request.key!r} was deleted")
        if request.idempotency_key is not None:
            known = tables.by_idempotency_key(row, request.idempotency_key)
            if known is not None:
                if known.body_hash != request.body_hash:
                    raise IdempotencyMismatch(
                        f"idempotency key {request.idempotency_key!r} was already used for another message"
                    )
                tables.counters.duplicates_prevented += 1
                return SendResult(
                    session=row.session,
                    number=row.session,
                    message_id=known.message_id,
                    seq=known.seq,
                    disposition="duplicate",
                    run_id=known.run_id,
                )
    if request.agents is not None:
        _check_agents(row, request, request.agents)
    target = None if row is None else row.run_id
    waiting = 0 if row is None else len(row.waiting)
    policy: Policy = request.policy  # type: ignore[assignment]  # decide() refuses any other word
    decision = decide(
        occupancy(run_id=target, waiting=waiting, room=request.run_id is not None, policy=policy), request.policy
    )
    if not decision.start and waiting >= request.mailbox_limit:
        raise MailboxFull(
            f"{waiting} messages wait in session {request.key!r}, and its limit is {request.mailbox_limit}"
        )
    if row is not None and row.waiting and not decision.start:
        _check_mailbox_size(row, len(request.content), request.mailbox_size)
    check_quota(tables, request.principal, len(request.content), request.stored_limit)
    if request.retry_of is not None:
        check_retry(tables, row, request.retry_of)
    attachments: tuple[Attachment, ...] = ()
    if request.attachments:
        attachments = kept_attachments(tables, request.principal, request.attachments)
    at = request.at
    content = plain(request.content)
    fresh = row is None
    if row is None:
        row = new_session(
            tables,
            request.principal,
            request.key,
            agent=request.agent or request.default_agent,
            at=at,
            limit=request.session_limit,
        )
    else:
        tables.refuse_used_message_id(row, request.message_id)

    log = Log(row)
    if request.retry_of is not None:
        drop_retried(tables, row, request.retry_of, log, at)
    seq = log.add(
        MessageAccepted(at=at, message_id=request.message_id, content=content, policy=policy, attachments=attachments)
    )
    if request.agent is not None:
        row.agent = request.agent
    message = Message(
        message_id=request.message_id,
        seq=seq,
        content=content,
        policy=policy,
        accepted_at=at,
        attachments=attachments,
    )
    mail = Mail(message, seq, 0.0, target)
    if decision.join:
        last = row.waiting[-1] if row.waiting else None
        batch, first_at = seq, at
        if last is not None and last.message.policy == "collect":
            batch = last.batch
            first_at = next(m.message.accepted_at for m in row.waiting if m.batch == batch)
        due = collect_due_at(at=at, quiet_s=request.quiet_s, first_at=first_at, max_wait_s=request.max_wait_s)
        mail = Mail(message, batch, due, target)
    if decision.sweep:
        row.sweep = seq
    row.updated_at = at

    taken: tuple[Mail, ...] = ()
    run_id = target
    if decision.start:
        assert request.run_id is not None
        run_id = request.run_id
        earlier, taken, row.waiting = row.waiting, (*row.waiting, mail), ()
        start_run(tables, row, log, taken, run_id, at)
        if earlier:
            tables.take(row, earlier, run_id)
    else:
        row.waiting = (*row.waiting, mail)
    if decision.interrupt:
        stop_run(row, log, _cause_of(policy, at, request.message_id), at)
    if fresh:
        tables.add_session(row)
    else:
        tables.save(row)
    tables.add_message(row, mail, idempotency_key=request.idempotency_key, body_hash=request.body_hash)
    if decision.start:
        tables.take(row, (mail,), run_id or "")
    if attachments:
        tables.use_attachments(row, [attachment.digest for attachment in attachments])
    events = log.write(tables, run_id, at)
    return SendResult(
        session=row.session,
        number=row.session,
        message_id=request.message_id,
        seq=seq,
        disposition=decision.disposition,
        run_id=run_id,
        claim=claim_of(tables, row, events[-1:]) if decision.start else None,
        interrupt=target if decision.interrupt else None,
        not_before=due_at(row) if decision.join else 0.0,
        events=events,
    )


def _cause_of(policy: Policy, at: float, message_id: str) -> Cause:
    if policy == "rollback":
        return Cause(kind="rollback", reason="a newer message rolls it back", at=at, message_id=message_id)
    return Cause(kind="message", reason="a newer message came", at=at, message_id=message_id)


def claim(tables: Tables, session: int, run_id: str, at: float) -> Claim | NotReady:
    """See `Store.claim`."""
    row = tables.get(session)
    if row is None:
        raise UnknownSession(f"no such session number: {session}")
    if row.run_id is not None:
        if row.holder == tables.epoch and run_id in (row.run_id, row.resumed_as):
            return claim_again(tables, row)
        return resume(tables, row, run_id, at) or NotReady(waiting=len(row.waiting), busy=True)
    taken, left = _choose(row, at)
    if not taken or tables.ended_run(row, run_id) is not None:
        return NotReady(waiting=len(row.waiting), not_before=due_at(row))
    row.waiting = left
    row.updated_at = at
    log = Log(row)
    start_run(tables, row, log, taken, run_id, at)
    tables.save(row)
    tables.take(row, taken, run_id)
    return claim_of(tables, row, log.write(tables, run_id, at))


def append(
    tables: Tables, lease: Lease, events: Sequence[tuple[str, bytes]], nth: int, stored_limit: int = ALL_BYTES
) -> Appended:
    """See `Store.append`."""
    row = held(tables, lease)
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
    log = Log(row)
    first = row.next_seq
    for kind, body in events:
        log.add_raw(kind, body)
    if nth:
        row.append_nth, row.append_seq = nth, first
    tables.save(row)
    return Appended(events=log.write(tables, lease.run_id, row.updated_at))


def commit_run(tables: Tables, commit: RunCommit) -> Committed:
    """See `Store.commit_run`."""
    lease = commit.lease
    row = tables.get(lease.session)
    if row is None or row.run_id != lease.run_id or row.fence != lease.fence:
        ended = None if row is None else tables.ended_run(row, lease.run_id)
        if row is None or ended is None or ended.fence != lease.fence:
            raise stale(tables, lease, row)
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
    log = Log(row)
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
    free(row)
    row.updated_at = at

    chosen: tuple[Mail, ...] = ()
    next_log = Log(row)
    if commit.next_run_id is not None and row.waiting:
        chosen, left = _choose(row, at)
        if chosen:
            row.waiting = left
            start_run(tables, row, next_log, chosen, commit.next_run_id, at)
    next_run_id = commit.next_run_id if chosen else None
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
    events = log.write(tables, lease.run_id, at)
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
    """Return about how many bytes a commit adds: the text is stored in ``run.finished`` and in the run."""
    size = 2 * len(commit.text)
    for _, body in commit.events:
        size += len(body)
    for entry in commit.entries:
        size += len(entry.content)
        if entry.kept is not None:
            size += len(entry.kept.body)
    return size


def _without_content(view: RunView) -> RunView:
    """Return a run of a deleted session without its content, because its commit may still be retried."""
    return msgspec.structs.replace(view, text="", error=None, receipt=None)


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
    """Return why a user stopped the run, if the store failed to record that at the time."""
    cause = commit.cause
    while cause is not None and cause.parent is not None:
        cause = cause.parent
    if commit.status != "interrupted" or row.cause is not None or cause is None or cause.kind not in _ASKED:
        return None
    return cause


def _final_state(
    row: SessionRow, status: Literal["completed", "failed", "interrupted"]
) -> Literal["completed", "failed", "interrupted"]:
    """Return how the state table ends a run in this state: an error while stopping is an interrupt.

    A run that ends by itself no longer waits for an answer. One that is rolled back is interrupted, however it ended.
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


def interrupt(tables: Tables, request: Interrupt) -> Interrupted:
    """See `Store.interrupt`."""
    row = existing_session(tables, request.principal, request.key)
    if row.run_id is None or (request.run_id is not None and request.run_id != row.run_id):
        return Interrupted(session=row.session, number=row.session, run_id=None)
    log = Log(row)
    if stop_run(row, log, request.cause, request.at):
        row.updated_at = request.at
        tables.save(row)
    return Interrupted(
        session=row.session,
        number=row.session,
        run_id=row.run_id,
        events=log.write(tables, row.run_id, request.at),
    )


def _stop(tables: Tables, row: SessionRow, log: Log, cause: Cause, at: float) -> tuple[Message, ...]:
    if row.run_id is not None:
        stop_run(row, log, cause, at)
    withdrawn = row.waiting
    row.waiting = ()
    for mail in withdrawn:
        log.add(MessageSettled(at=at, message_id=mail.message.message_id, state="withdrawn"))
    if withdrawn:
        withdrawn = tables.unshelve(row, withdrawn)
        tables.withdraw(row, withdrawn, at)
    return tuple(mail.message for mail in withdrawn)


def stop_session(tables: Tables, request: Interrupt) -> Stopped:
    """See `Store.stop_session`."""
    row = existing_session(tables, request.principal, request.key)
    if request.run_id is not None and request.run_id != row.run_id:
        return Stopped(session=row.session, number=row.session, run_id=None)
    log = Log(row)
    was = row.rolled_back
    withdrawn = _stop(tables, row, log, request.cause, request.at)
    if log.events or row.rolled_back != was:
        row.updated_at = request.at
        tables.save(row)
    return Stopped(
        session=row.session,
        number=row.session,
        run_id=row.run_id,
        withdrawn=withdrawn,
        events=log.write(tables, row.run_id, request.at),
    )


def delete_session(tables: Tables, principal: str, key: str, at: float, cause: Cause) -> Stopped:
    """See `Store.delete_session`."""
    row = existing_session(tables, principal, key)
    log = Log(row)
    withdrawn = _stop(tables, row, log, cause, at)
    log.add(SessionDeletedEvent(at=at, reason=cause.reason))
    row.deleted_at = row.updated_at = at
    tables.save(row)
    events = log.write(tables, row.run_id, at)
    if row.run_id is None:  # otherwise the end of the run does it
        tables.purge_contents(row)
    return Stopped(session=row.session, number=row.session, run_id=row.run_id, withdrawn=withdrawn, events=events)


def withdraw(
    tables: Tables, principal: str, key: str, message_id: str, at: float
) -> tuple[Settlement, tuple[Stored, ...]]:
    """See `Store.withdraw`."""
    row = existing_session(tables, principal, key)
    for mail in row.waiting:
        if mail.message.message_id == message_id:
            break
    else:
        known = tables.known_message(row, message_id)
        if known is None:
            raise UnknownMessage(f"no such message: {message_id!r} in session {key!r}")
        if not known.withdrawn:
            raise AlreadySettled(f"message {message_id!r} was taken by run {known.run_id}")
        return Settlement(message_id=message_id, state="withdrawn"), ()
    log = Log(row)
    log.add(MessageSettled(at=at, message_id=message_id, state="withdrawn"))
    row.waiting = tuple(other for other in row.waiting if other is not mail)
    row.updated_at = at
    tables.save(row)
    tables.withdraw(row, (mail,), at)
    return Settlement(message_id=message_id, state="withdrawn"), log.write(tables, None, at)


def rescue(tables: Tables, at: float) -> tuple[Claim, ...]:
    """See `Store.rescue`."""
    claims = []
    for row in tables.orphans():
        row.fence += 1
        row.holder = tables.epoch
        row.attempt += 1
        row.append_nth = row.append_seq = 0
        row.resumed_as = None
        row.updated_at = at
        tables.save(row)
        claims.append(claim_of(tables, row))
    return tuple(claims)


def restart(tables: Tables, lease: Lease, at: float, discard_from: int | None = None) -> Appended:
    """See `Store.restart`."""
    row = held(tables, lease)
    if discard_from is None:
        discard_from = row.started_seq + 1
    log = Log(row)
    log.add(RunRestarted(at=at, run_id=lease.run_id, attempt=row.attempt, discard_from=discard_from))
    row.updated_at = at
    tables.save(row)
    return Appended(events=log.write(tables, lease.run_id, at))
