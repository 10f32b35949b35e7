"""A session handle for its owner, in-process: `holdfast.protocol.interface.SessionLike` on a `Host`."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple, Unpack

import msgspec

from holdfast import ids
from holdfast.errors import (
    Draining,
    InvalidKey,
    InvalidRequest,
    SessionDeleted,
    UnknownMessage,
    UnknownRun,
    UnknownSession,
    WaitExpired,
    WaitsForItself,
)
from holdfast.host import attaching, history
from holdfast.host.budgets import PAGE_BYTES, Charge
from holdfast.host.dispatch import receipt_of
from holdfast.host.readers import SessionLog, open_log
from holdfast.host.schedules import Schedule
from holdfast.protocol.call_hash import hash_call, hash_of, question_id_of
from holdfast.protocol.events import Event, Gap, Stored, decode_event
from holdfast.protocol.interface import answer
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Decision,
    Entry,
    MailboxItem,
    Question,
    Receipt,
    RunView,
    SessionExport,
    SessionStop,
    SessionView,
    Settlement,
    TreeNode,
    check_seconds,
    check_text,
)
from holdfast.protocol.schedules import ScheduleKeywords, ScheduleSpec
from holdfast.protocol.send_options import SendKeywords, SendOptions
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.protocol.transcript import memory_bytes
from holdfast.runtime import current_scope
from holdfast.storage.port import Interrupt, Send

if TYPE_CHECKING:
    from holdfast.host.host import Host

__all__ = ["Answerer", "Session"]

KEY_LENGTH = 200


class Answerer(NamedTuple):
    """The author of an answer: the credential's owner, the credential, and the approval key if one was required."""

    principal: str
    via: str
    approval_key: str = ""


class Session:
    """A handle to a session of a host. Made by `Host.session`; any number may refer to the same session.

    Call all methods on the host's loop. A caller that is cancelled gives up its wait, never the work.
    """

    __slots__ = ("_agent", "_agents", "_host", "key", "principal")

    def __init__(
        self, host: Host, principal: str, key: str, agent: str | None, agents: frozenset[str] | None = None
    ) -> None:
        if not isinstance(key, str):
            raise InvalidKey(f"a session key must be text (str), not {key!r}")
        if not 0 < len(key) <= KEY_LENGTH or not key.isprintable() or "/" in key:
            raise InvalidKey(f"{key[:KEY_LENGTH]!r} is not a session key")
        self._host = host
        self._agent = agent
        self._agents = agents
        self.principal = principal
        self.key = key

    def __repr__(self) -> str:
        return f"<Session {self.key!r} of {self.principal!r}>"

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def send(self, content: str, **options: Unpack[SendKeywords]) -> Receipt:
        """See `SessionLike.send`."""
        return await self._send(ids.message_id(), content, SendOptions(**options))

    async def _send(
        self, message_id: str, content: str, options: SendOptions, *, retry_of: str | None = None
    ) -> Receipt:
        host = self._host
        idempotency_key, attachments = options.idempotency_key, options.attachments
        if not isinstance(content, str):
            raise InvalidRequest("a message's content must be text (str)")
        if not isinstance(idempotency_key, (str, type(None))):
            raise InvalidRequest("an idempotency key must be text (str)")
        if "\0" in content or "\0" in (idempotency_key or ""):
            raise InvalidRequest("the message contains a NUL character", hint="remove it from the content and the key")
        for attachment in attachments:
            if not isinstance(attachment, Attachment):
                raise InvalidRequest("attachments must be values returned by attach()")
        check_text(content + (idempotency_key or ""))
        check_seconds(quiet_s=options.quiet_s, max_wait_s=options.max_wait_s)
        body_hash = b""
        if idempotency_key is not None:
            if not 0 < len(idempotency_key) <= KEY_LENGTH:
                raise InvalidRequest(f"an idempotency key must have 1 to {KEY_LENGTH} characters")
            said = "\0".join(
                (options.policy, options.agent or "", content, *(attachment.digest for attachment in attachments))
            )
            body_hash = hashlib.blake2b(said.encode(), digest_size=16).digest()
        agent = options.agent or self._agent
        if agent is not None:
            host.find_agent(agent, among=self._agents)
        if host.draining:
            raise Draining("this host is shutting down and accepts no new messages")
        settings = host.settings
        reserved = host.dispatch.admission.reserve(self.principal)
        if not reserved:
            host.incidents.kept["P14"] += 1
        request = Send(
            principal=self.principal,
            key=self.key,
            agent=agent,
            default_agent=host.default_agent,
            message_id=message_id,
            content=content,
            policy=options.policy,
            at=host.now(),
            idempotency_key=idempotency_key,
            body_hash=body_hash,
            run_id=ids.run_id() if reserved else None,
            quiet_s=settings.quiet_s if options.quiet_s is None else options.quiet_s,
            max_wait_s=settings.max_wait_s if options.max_wait_s is None else options.max_wait_s,
            mailbox_limit=settings.mailbox_limit,
            mailbox_size=settings.mailbox_size,
            session_limit=settings.principal_sessions,
            stored_limit=host.stored_limit,
            attachments=tuple(attachments),
            retry_of=retry_of,
            agents=self._agents,
        )
        done = host.store.send(request)
        done.add_done_callback(functools.partial(host.dispatch.sent, request), context=host.context)
        try:
            result = await asyncio.shield(done)
        finally:
            del done  # breaks a cycle of its error and this frame, which would keep the message in memory
        return receipt_of(self.key, result)

    async def wait(self, message_id: str, *, timeout_s: float | None = None) -> Settlement:
        """See `SessionLike.wait`."""
        future = await self.expect(message_id)
        if not future.done():
            try:
                self._refuse_to_wait_for_itself()
            except WaitsForItself:
                future.cancel()
                raise
        return await self._settled(future, timeout_s)

    def _refuse_to_wait_for_itself(self) -> None:
        """Raise `WaitsForItself` in a run of this session, which would wait for its successor until its deadline."""
        scope = current_scope()
        while scope is not None:
            run = self._host.live.get(scope.name)
            if run is not None and (run.actor.principal, run.actor.key) == (self.principal, self.key):
                raise WaitsForItself(f"run {run.run_id} waits for a message of its own session {self.key!r}")
            scope = scope.parent

    async def expect(self, message_id: str) -> asyncio.Future[Settlement]:
        """Return a future of a message's settlement. Cancel it to stop waiting. Raises `UnknownMessage`."""
        future = self._expect(message_id)
        try:
            settlement = await self.message(message_id)  # after `_expect`, so that nothing is missed in between
        except BaseException:
            future.cancel()
            raise
        if settlement.state in TERMINAL_MESSAGE_STATES and not future.done():
            future.set_result(settlement)
        return future

    def _expect(self, message_id: str) -> asyncio.Future[Settlement]:
        settlements = self._host.settlements
        future = settlements.expect(message_id)
        future.add_done_callback(lambda done: settlements.forget(message_id, done))
        return future

    async def _settled(self, future: asyncio.Future[Settlement], timeout_s: float | None) -> Settlement:
        if timeout_s is None:
            return await future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise WaitExpired(f"the message is not settled after {timeout_s:g} s") from None

    async def ask(self, content: str, *, timeout_s: float | None = None, **options: Unpack[SendKeywords]) -> str:
        """See `SessionLike.ask`."""
        self._refuse_to_wait_for_itself()
        _, future = await self.send_expecting(content, SendOptions(**options))
        return answer(await self._settled(future, timeout_s))

    async def send_expecting(self, content: str, options: SendOptions) -> tuple[Receipt, asyncio.Future[Settlement]]:
        """Send, and also return a future of the message's settlement. Cancel it to stop waiting."""
        message_id = ids.message_id()
        future = self._expect(message_id)
        try:
            receipt = await self._send(message_id, content, options)
        except BaseException:
            future.cancel()
            raise
        if receipt.message_id != message_id:  # a duplicate: the first one may already be settled
            future.cancel()
            future = await self.expect(receipt.message_id)
        return receipt, future

    async def withdraw(self, message_id: str) -> Settlement:
        """See `SessionLike.withdraw`."""
        row = await self._row()
        done = self._host.store.withdraw(self.principal, self.key, message_id, at=self._host.now())
        done.add_done_callback(functools.partial(self._withdrawn, row), context=self._host.context)
        settlement, _ = await asyncio.shield(done)
        return settlement

    def _withdrawn(self, row: int, done: asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]) -> None:
        if done.exception() is None:
            settlement, events = done.result()
            self._host.withdrawn(row, [settlement], events)

    async def message(self, message_id: str) -> Settlement:
        """See `SessionLike.message`."""
        settlement = await self._host.store.settlement(await self._row(), message_id)
        if settlement is None:
            raise UnknownMessage(f"no such message: {message_id!r} in session {self.key!r}")
        return settlement

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def interrupt(
        self, reason: str = "", *, run_id: str | None = None, grace_s: float | None = None
    ) -> StopReceipt:
        """See `SessionLike.interrupt`."""
        _check_stop(reason, grace_s)
        cause = Cause(kind="user", reason=reason, origin=self.key, at=self._host.now())
        done = self._host.store.interrupt(
            Interrupt(principal=self.principal, key=self.key, cause=cause, at=cause.at, run_id=run_id)
        )
        stopping = self._host.stopping(self.principal, self.key, done, cause, grace_s, background=False)
        receipt, _ = await asyncio.shield(stopping)
        return receipt

    async def stop(self, reason: str = "", *, grace_s: float | None = None) -> SessionStop:
        """See `SessionLike.stop`."""
        _check_stop(reason, grace_s)
        cause = Cause(kind="stop", reason=reason, origin=self.key, at=self._host.now())
        done = self._host.store.stop_session(
            Interrupt(principal=self.principal, key=self.key, cause=cause, at=cause.at)
        )
        stopping = self._host.stopping(self.principal, self.key, done, cause, grace_s, background=True)
        receipt, withdrawn = await asyncio.shield(stopping)
        return SessionStop(session=self.key, receipt=receipt, withdrawn=withdrawn)

    async def delete(self) -> SessionStop:
        """See `SessionLike.delete`."""
        cause = Cause(kind="stop", reason="the session was deleted", origin=self.key, at=self._host.now())
        done = self._host.store.delete_session(self.principal, self.key, at=cause.at, cause=cause)
        stopping = self._host.stopping(self.principal, self.key, done, cause, None, background=True)
        receipt, withdrawn = await asyncio.shield(stopping)
        return SessionStop(session=self.key, receipt=receipt, withdrawn=withdrawn)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    async def questions(self) -> list[Question]:
        """See `SessionLike.questions`."""
        return [_with_hash(question) for question in await self._host.store.questions(await self._row())]

    async def answer(self, question: Question | str, text: str) -> Answer:
        """See `SessionLike.answer`."""
        return await self.decide(question_id_of(question), "answered", text)

    async def approve(self, question: Question | str, *, note: str = "", call_hash: str | None = None) -> Answer:
        """See `SessionLike.approve`."""
        return await self.decide(question_id_of(question), "approved", note, call_hash=hash_of(question, call_hash))

    async def deny(self, question: Question | str, *, reason: str = "") -> Answer:
        """See `SessionLike.deny`."""
        return await self.decide(question_id_of(question), "denied", reason)

    async def decide(
        self,
        question_id: str,
        decision: Decision,
        text: str,
        *,
        call_hash: str = "",
        answerer: Answerer | None = None,
    ) -> Answer:
        """Give an answer on behalf of `answerer`, for servers; None: the session's owner, in this process.

        Raises as `SessionLike.answer` and `approve`.
        """
        host = self._host
        for given_text in (question_id, text, call_hash):
            if not isinstance(given_text, str):
                raise InvalidRequest("a question's id and its answer must be text (str)")
        check_text(question_id + text + call_hash)
        if "\0" in text:
            raise InvalidRequest("the answer contains a NUL character", hint="remove it from the answer")
        who = Answerer(self.principal, "host") if answerer is None else answerer
        given = Answer(
            question_id=question_id,
            decision=decision,
            text=text,
            by=who.principal,
            at=host.now(),
            on_behalf_of="" if who.principal == self.principal else self.principal,
            via=who.via,
            approval_key=who.approval_key,
            call_hash=call_hash,
        )
        done = host.store.answer(self.principal, self.key, given)
        told = functools.partial(host.dispatch.parked.answered, self.principal, self.key, question_id)
        done.add_done_callback(told, context=host.context)
        return (await asyncio.shield(done)).answer

    # ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedule(
        self, text: str, *, schedule_id: str | None = None, **spec: Unpack[ScheduleKeywords]
    ) -> Schedule:
        """See `SessionLike.schedule`."""
        return await self.put_schedule(schedule_id, ScheduleSpec(session=self.key, text=text, **spec))

    async def put_schedule(self, schedule_id: str | None, spec: ScheduleSpec) -> Schedule:
        """Create or replace a schedule of this session; as `SessionLike.schedule`."""
        found = await self._host.store.find_session(self.principal, self.key)
        if found is not None and found[1].state == "deleted":
            raise SessionDeleted(f"the session {self.key!r} was deleted")
        agent = spec.agent or self._agent
        await self.check_agent(agent)
        spec = msgspec.structs.replace(spec, agent=agent)
        return await self._host.timetable.put(self.principal, schedule_id, spec)

    # ── transcript edits ─────────────────────────────────────────────────────────────────────────────────────────

    async def check_agent(self, agent: str | None) -> None:
        """Raise `UnknownAgent` if this caller may not use the agent; None: the session's own."""
        if self._agents is None:
            return
        if agent is None:
            found = await self._host.store.find_session(self.principal, self.key)
            agent = self._host.default_agent if found is None else found[1].agent
        self._host.find_agent(agent, among=self._agents)

    async def retry(self) -> Receipt:
        """See `SessionLike.retry`."""
        last = await history.last_run(self._host, self.principal, await self._row())
        options = SendOptions(policy="reject", attachments=last.attachments)
        return await self._send(ids.message_id(), last.content, options, retry_of=last.run_id)

    async def undo(self) -> list[Entry]:
        """See `SessionLike.undo`."""
        return history.shown((await history.edit(self._host, self.principal, self.key, "undo")).removed)

    async def compact(self, *, keep: int = 4) -> list[Entry]:
        """See `SessionLike.compact`."""
        if keep < 0:
            raise InvalidRequest(f"keep is {keep!r}; it must be a number of messages, 0 or more")
        await self.compact_history(keep)
        return await self.transcript()

    async def compact_history(self, keep: int) -> None:
        """Same as `compact`, for callers that read the new transcript page by page."""
        await self.check_agent(None)
        await history.compact(self._host, self, keep)

    async def branch(self, key: str, *, through_n: int | None = None) -> SessionView:
        """See `SessionLike.branch`."""
        if through_n is not None and through_n < 0:
            raise InvalidRequest(f"through_n is {through_n!r}; it must be the number of an entry, or 0 for none")
        other = Session(self._host, self.principal, key, self._agent)
        row = await self._row()
        async with history.charged(self._host, self.principal, row) as (whole, charge):
            entries = await history.with_states(self._host, row, history.through(whole, through_n), charge)
            view = await self.info()
            await self.check_agent(view.agent)
            await history.edit(self._host, self.principal, key, "branch", entries, agent=view.agent)
        return await other.info()

    async def export(self) -> SessionExport:
        """See `SessionLike.export`."""
        view = await self.info()
        entries = await self.transcript()
        digests = {attachment.digest for entry in entries for attachment in entry.attachments}
        return SessionExport(
            key=self.key,
            agent=view.agent,
            exported_at=self._host.now(),
            entries=tuple(entries),
            attachments={digest: (await self.attachment(digest))[1] for digest in sorted(digests)},
        )

    async def import_history(self, export: SessionExport) -> SessionView:
        """See `SessionLike.import_history`."""
        entries = history.check_import(export)
        known = {attachment.digest: attachment for entry in entries for attachment in entry.attachments}
        for digest, body in export.attachments.items():
            attachment = known.get(digest)
            if attachment is None:
                continue  # unused
            kept = await self.attach(body, media_type=attachment.media_type, name=attachment.name)
            if kept.digest != digest:
                raise InvalidRequest(f"the bytes of attachment {digest[:16]}… do not match its digest")
        allowed = self._host.agents.keys() if self._agents is None else self._agents & self._host.agents.keys()
        agent = export.agent if export.agent in allowed else self._agent or self._host.default_agent
        await self.check_agent(agent)
        await history.edit(self._host, self.principal, self.key, "import", entries, agent=agent)
        return await self.info()

    async def attach(self, body: bytes | bytearray, *, media_type: str, name: str = "") -> Attachment:
        """See `SessionLike.attach`."""
        return await attaching.keep(self._host, self.principal, body, media_type=media_type, name=name)

    async def attachment_about(self, digest: str) -> Attachment:
        """Return an attachment without its bytes. Raises `UnknownAttachment`."""
        return await attaching.about(self._host, self.principal, digest)

    async def attachment(self, digest: str) -> tuple[Attachment, bytes]:
        """See `SessionLike.attachment`."""
        return await attaching.fetch(self._host, self.principal, digest)

    async def attachment_part(self, digest: str, *, start: int, size: int) -> bytes:
        """Return at most `size` bytes of an attachment, starting at `start`. Raises `UnknownAttachment`."""
        return await attaching.fetch_part(self._host, self.principal, digest, start=start, size=size)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def open_log(
        self, *, after: str | None = None, follow: str | None = None, keepalive_s: float | None = None
    ) -> SessionLog:
        """Return the log in batches of stored rows, for servers; None after `keepalive_s` seconds without an event.

        Raises as `events`, before the first batch. The caller must close the reader.
        """
        seconds = self._host.settings.keepalive_s if keepalive_s is None else keepalive_s
        return await open_log(self._host, self.principal, self.key, after=after, follow=follow, keepalive_s=seconds)

    async def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncGenerator[Event | Gap, None]:
        """See `SessionLike.events`."""
        async with aclosing(await self.open_log(after=after, follow=follow)) as reader:
            async for batch in reader:
                if isinstance(batch, Gap):
                    yield batch
                else:
                    for stored in batch or ():
                        yield decode_event(stored)

    async def info(self) -> SessionView:
        """See `SessionLike.info`."""
        return (await self._found())[1]

    async def transcript(self) -> list[Entry]:
        """See `SessionLike.transcript`."""
        entries = await self._host.store.transcript(await self._row())
        if not entries:
            await self._row()  # raises if deleted in the meantime
        return history.shown(entries)

    async def transcript_page(self, *, after: int, limit: int) -> tuple[list[Entry], Charge]:
        """Return up to `limit` entries with n > `after`, in order; empty after the last. Release their charge.

        Raises:
            UnknownSession: see there.
            BudgetExceeded, HostBusy: timed out waiting for memory.
        """
        row = await self._row()

        async def read() -> list[Entry]:
            found = await self._host.store.transcript(row, after=after, limit=limit, limit_bytes=PAGE_BYTES)
            if not found:
                await self._row()  # raises if deleted in the meantime
            return history.shown(found)

        return await self._host.budgets.read_page(self.principal, read, memory_bytes)

    async def has_entry(self, n: int) -> bool:
        """Return whether the transcript has an entry of that number; the entry is in memory only briefly."""
        row = await self._row()
        budgets, within_s = self._host.budgets, self._host.settings.stream_stall_s
        with await budgets.reads.wait_for(self.principal, 1, within_s=within_s):
            found = await self._host.store.transcript(row, after=n - 1, limit=1)
            return bool(found) and found[0].n == n

    async def mailbox(self) -> list[MailboxItem]:
        """See `SessionLike.mailbox`."""
        return list(await self._host.store.mailbox(await self._row()))

    async def tree(self) -> TreeNode:
        """See `SessionLike.tree`."""
        return self._host.session_tree(await self._row(), self.key)

    async def run(self, run_id: str) -> RunView:
        """See `SessionLike.run`."""
        view = await self._host.store.run(await self._row(), run_id)
        if view is None:
            raise UnknownRun(f"no such run: {run_id!r} in session {self.key!r}")
        return view

    async def runs(self) -> list[RunView]:
        """See `SessionLike.runs`."""
        return list(await self._host.store.runs(await self._row()))

    async def _found(self) -> tuple[int, SessionView]:
        found = await self._host.store.find_session(self.principal, self.key)
        if found is None:
            raise UnknownSession(f"no such session: {self.key!r}")
        if found[1].state == "deleted":
            raise SessionDeleted(f"session {self.key!r} was deleted")
        return found

    async def _row(self) -> int:
        return (await self._found())[0]


def _with_hash(question: Question) -> Question:
    """Add the hash to a question stored by an older version."""
    if question.kind == "question" or question.call_hash:
        return question
    return msgspec.structs.replace(question, call_hash=hash_call(question))


def _check_stop(reason: str, grace_s: float | None) -> None:
    if not isinstance(reason, str):
        raise InvalidRequest("the reason of a stop must be text (str)")
    check_text(reason)
    check_seconds(grace_s=grace_s)
