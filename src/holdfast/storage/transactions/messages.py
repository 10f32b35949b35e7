"""Transactions on messages: send, withdraw and steer."""

from __future__ import annotations

from holdfast.errors import (
    AlreadySettled,
    IdempotencyMismatch,
    MailboxFull,
    SessionAgentMissing,
    SessionDeleted,
    UnknownAgent,
    UnknownMessage,
)
from holdfast.protocol.events import MessageAccepted, MessageSettled, MessageSteered, Stored, plain
from holdfast.protocol.mailbox_policies import collect_due_at, decide, occupancy
from holdfast.protocol.messages import Attachment, Message, Policy, Settlement
from holdfast.protocol.stopping import Cause
from holdfast.storage.backend import Tables
from holdfast.storage.rows import Mail, SessionRow, due_at
from holdfast.storage.transactions.attachments import stored_attachments
from holdfast.storage.transactions.session_log import (
    EventLog,
    check_quota,
    claim_of,
    existing_session,
    is_elsewhere,
    new_session,
    require_lease,
    start_run,
    stop_run,
)
from holdfast.storage.transactions.transcript_edits import check_retry, drop_retried
from holdfast.storage.values import Lease, Send, SendResult, Served, Steered

__all__ = ["agent_for", "send", "steer", "withdraw"]


def agent_for(row: SessionRow | None, request: Send) -> str:
    """Return the name of the agent that the session has once it has the message."""
    if request.agent is not None:
        return request.agent
    if row is None or row.agent in request.takes_over:
        return request.default_agent
    return row.agent


def _check_served(row: SessionRow, agent: str, request: Send, served: Served) -> None:
    """Raise `SessionAgentMissing` if the host no longer has the session's agent."""
    if agent not in served:
        visible = served.keys() if request.agents is None else served.keys() & request.agents
        available = ", ".join(sorted(visible)) or "none"
        raise SessionAgentMissing(
            f"session {row.key!r} belongs to agent {agent!r}, which this host does not have; nothing was stored",
            hint=f"name another agent with the message (agent=, --agent; available: {available}), "
            "or use another session",
        )


def _check_agents(row: SessionRow | None, request: Send, agent: str, allowed: frozenset[str]) -> None:
    """Raise `UnknownAgent` if the message would reach an agent that the sender may not use."""
    hearing = {agent}
    if row is not None and row.run_id is not None and request.policy == "steer":
        hearing.add(row.run_agent)
    for name in sorted(hearing - allowed):
        raise UnknownAgent(f"unknown agent {name!r}", hint="choose an agent that your key allows")


def _check_mailbox_size(row: SessionRow, more: int, limit: int) -> None:
    size = sum([mail.size for mail in row.waiting])
    if size + more > limit:
        raise MailboxFull(
            f"session {row.key!r} has {size:,} characters of queued messages, and its limit is {limit:,}",
            hint="send the message again after a run has taken some of the queued messages",
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
    agent = agent_for(row, request)
    if row is not None and request.served is not None:
        _check_served(row, agent, request, request.served)
    if request.agents is not None:
        _check_agents(row, request, agent, request.agents)
    target = None if row is None else row.run_id
    waiting = 0 if row is None else len(row.waiting)
    policy: Policy = request.policy  # type: ignore[assignment]  # decide() refuses any other word
    room = request.run_id is not None and (row is None or not is_elsewhere(tables, row))
    decision = decide(occupancy(run_id=target, waiting=waiting, room=room, policy=policy), request.policy)
    if not decision.start and waiting >= request.mailbox_limit:
        raise MailboxFull(
            f"session {request.key!r} has {waiting} queued messages, and its limit is {request.mailbox_limit}"
        )
    if row is not None and row.waiting and not decision.start:
        _check_mailbox_size(row, len(request.content), request.mailbox_size)
    check_quota(tables, request.principal, len(request.content), request.stored_limit)
    if request.retry_of is not None:
        check_retry(tables, row, request.retry_of)
    attachments: tuple[Attachment, ...] = ()
    if request.attachments:
        attachments = stored_attachments(tables, request.principal, request.attachments)
    at = request.at
    content = plain(request.content)
    fresh = row is None
    if row is None:
        row = new_session(
            tables,
            request.principal,
            request.key,
            agent=agent,
            at=at,
            limit=request.session_limit,
        )
    else:
        tables.refuse_used_message_id(row, request.message_id)

    log = EventLog(row)
    if request.retry_of is not None:
        drop_retried(tables, row, request.retry_of, log, at)
    seq = log.add(
        MessageAccepted(at=at, message_id=request.message_id, content=content, policy=policy, attachments=attachments)
    )
    row.agent = agent
    message = Message(
        message_id=request.message_id,
        seq=seq,
        content=content,
        policy=policy,
        accepted_at=at,
        attachments=attachments,
    )
    mail = Mail(message, seq, 0.0, target)
    if decision.append_to_batch:
        last = row.waiting[-1] if row.waiting else None
        batch, first_at = seq, at
        if last is not None and last.message.policy == "collect":
            batch = last.batch
            first_at = next(m.message.accepted_at for m in row.waiting if m.batch == batch)
        due = collect_due_at(at=at, quiet_s=request.quiet_s, first_at=first_at, max_wait_s=request.max_wait_s)
        mail = Mail(message, batch, due, target)
    if decision.take_all_waiting:
        row.sweep = seq
    row.updated_at = at

    taken: tuple[Mail, ...] = ()
    run_id = target
    only_starts = False
    if decision.start:
        assert request.run_id is not None
        run_id = request.run_id
        only_starts = not (row.waiting or decision.take_all_waiting or request.retry_of)
        earlier, taken, row.waiting = row.waiting, (*row.waiting, mail), ()
        start_run(tables, row, log, taken, run_id=run_id, at=at, served=request.served)
        if earlier:
            tables.take(row, earlier, run_id)
    else:
        row.waiting = (*row.waiting, mail)
    if decision.interrupt:
        stop_run(row, log, _cause_of(policy, at, request.message_id), at)
    if fresh:
        tables.add_session(row)
    elif only_starts:
        tables.save_start(row)
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
        not_before=due_at(row) if decision.append_to_batch else 0.0,
        events=events,
    )


def _cause_of(policy: Policy, at: float, message_id: str) -> Cause:
    if policy == "rollback":
        return Cause(kind="rollback", reason="a newer message rolls it back", at=at, message_id=message_id)
    return Cause(kind="message", reason="a newer message came", at=at, message_id=message_id)


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
    log = EventLog(row)
    log.add(MessageSettled(at=at, message_id=message_id, state="withdrawn"))
    row.waiting = tuple(other for other in row.waiting if other is not mail)
    row.updated_at = at
    tables.save(row)
    tables.withdraw(row, (mail,), at)
    return Settlement(message_id=message_id, state="withdrawn"), log.write(tables, None, at)


def steer(tables: Tables, lease: Lease, step: int, at: float) -> Steered:
    """See `Store.steer`."""
    row = require_lease(tables, lease)
    if row.cause is not None:
        return Steered(messages=())
    taken = tuple(mail for mail in row.waiting if mail.message.policy == "steer" and mail.target_run_id == lease.run_id)
    if not taken:
        return Steered(messages=())
    log = EventLog(row)
    for mail in taken:
        log.add(MessageSteered(at=at, message_id=mail.message.message_id, run_id=lease.run_id, step=step))
    row.waiting = tuple(mail for mail in row.waiting if mail not in taken)
    row.taken = (*row.taken, *taken)
    row.steered += len(taken)
    row.updated_at = at
    tables.save(row)
    tables.take(row, taken, lease.run_id)
    messages = tuple(mail.message for mail in tables.unshelve(row, taken))
    return Steered(messages=messages, events=log.write(tables, lease.run_id, at))
