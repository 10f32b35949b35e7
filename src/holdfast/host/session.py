"""In-process session handle: implements `holdfast.protocol.session_api.SessionAPI` on a `Host`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import msgspec

from holdfast import ids
from holdfast.errors import (
    InvalidRequest,
    SessionBusy,
    SessionDeleted,
    UnknownMessage,
    UnknownRun,
    WaitExpired,
    WaitsForItself,
)
from holdfast.host import attachments as attachment_ops
from holdfast.host import transcript_edits
from holdfast.host.budgets import PAGE_BYTES, Charge
from holdfast.host.log_reader import SessionLog, open_log
from holdfast.host.message_sender import check_key
from holdfast.host.question_answers import Answerer, give_answer
from holdfast.protocol.call_hash import hash_call, hash_of, question_id_of
from holdfast.protocol.events import Event, Gap, Stored, decode_event, number_in
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Decision,
    Entry,
    Grant,
    GrantScope,
    HistoryEdit,
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
from holdfast.protocol.session_api import answer
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.protocol.transcript import memory_bytes
from holdfast.runtime import current_scope
from holdfast.storage.port import Edited, InterruptRequest

if TYPE_CHECKING:
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.grants import Grants
    from holdfast.host.log_follower import LogFollower
    from holdfast.host.message_sender import MessageSender
    from holdfast.host.node_requests import NodeRequests
    from holdfast.host.run_accounting import RunAccounting
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.scheduler import Schedule, Scheduler
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.settlements import Settlements
    from holdfast.host.stop_coordinator import StopCoordinator
    from holdfast.host.suspension import Suspension
    from holdfast.host.tree import TaskTree

__all__ = ["Session", "SessionParts"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionParts:
    """The parts of a host that its session handles use; the last two only if other hosts use the store too."""

    context: HostContext
    agents: AgentRegistry
    directory: SessionDirectory
    settlements: Settlements
    accounting: RunAccounting
    launcher: RunLauncher
    suspension: Suspension
    sender: MessageSender
    stops: StopCoordinator
    scheduler: Scheduler
    tree: TaskTree
    grants: Grants
    follower: LogFollower | None
    node_requests: NodeRequests | None


class Session:
    """A handle to a session of a host, made by `Host.session`. Several handles may refer to the same session.

    Call all methods on the host's loop. If a caller is cancelled, it stops waiting, but the requested work continues.
    """

    __slots__ = ("_agent", "_agents", "_context", "_parts", "key", "principal")

    def __init__(
        self, parts: SessionParts, principal: str, key: str, agent: str | None, agents: frozenset[str] | None = None
    ) -> None:
        self._parts = parts
        self._context = parts.context
        self._agent = agent
        self._agents = agents
        self.principal = principal
        self.key = check_key(key)

    def __repr__(self) -> str:
        return f"<Session {self.key!r} of {self.principal!r}>"

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def send(self, content: str, **options: Unpack[SendKeywords]) -> Receipt:
        """See `SessionAPI.send`."""
        return await self._parts.sender.send(
            self.principal,
            self.key,
            content,
            SendOptions(**options),
            handle_agent=self._agent,
            agents=self._agents,
        )

    async def wait(self, message_id: str, *, timeout_s: float | None = None) -> Settlement:
        """See `SessionAPI.wait`."""
        future = await self.expect(message_id)
        if not future.done():
            try:
                self._refuse_to_wait_for_itself()
            except WaitsForItself:
                future.cancel()
                raise
        return await self._settled(future, timeout_s)

    def _refuse_to_wait_for_itself(self) -> None:
        """Raise `WaitsForItself` if the caller belongs to a run of this session.

        The message may settle only after that run has ended.
        """
        scope = current_scope()
        while scope is not None:
            run = self._parts.launcher.live.get(scope.name)
            if run is not None and (run.actor.principal, run.actor.key) == (self.principal, self.key):
                raise WaitsForItself(f"run {run.run_id} waits for a message of its own session {self.key!r}")
            scope = scope.parent

    async def expect(self, message_id: str) -> asyncio.Future[Settlement]:
        """Return a future of a message's settlement. Cancel the future to stop waiting. Raises `UnknownMessage`."""
        future = self._expect(message_id)
        try:
            row = await self._row()
            if self._parts.follower is not None:
                self._parts.follower.expect(row, message_id, future, look=False)
            settlement = await self._settlement(row, message_id)  # after both, so that nothing is missed
        except BaseException:
            future.cancel()
            raise
        if settlement.state in TERMINAL_MESSAGE_STATES and not future.done():
            future.set_result(settlement)
        return future

    def _expect(self, message_id: str) -> asyncio.Future[Settlement]:
        settlements = self._parts.settlements
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
        """See `SessionAPI.ask`."""
        self._refuse_to_wait_for_itself()
        _, future = await self.send_expecting(content, SendOptions(**options))
        return answer(await self._settled(future, timeout_s))

    async def send_expecting(self, content: str, options: SendOptions) -> tuple[Receipt, asyncio.Future[Settlement]]:
        """Send a message and return its receipt and a future of its settlement. Cancel the future to stop waiting."""
        message_id = ids.message_id()
        future = self._expect(message_id)
        try:
            receipt = await self._parts.sender.send(
                self.principal,
                self.key,
                content,
                options,
                message_id=message_id,
                handle_agent=self._agent,
                agents=self._agents,
            )
        except BaseException:
            future.cancel()
            raise
        if receipt.message_id != message_id:  # a duplicate: the first one may already be settled
            future.cancel()
            future = await self.expect(receipt.message_id)
        elif self._parts.follower is not None:
            is_here = receipt.disposition == "started"  # unless another host takes the run over, which the poll finds
            self._parts.follower.expect(number_in(receipt.cursor), message_id, future, look=not is_here)
        return receipt, future

    async def withdraw(self, message_id: str) -> Settlement:
        """See `SessionAPI.withdraw`."""
        row = await self._row()
        done = self._context.store.withdraw(self.principal, self.key, message_id, at=self._context.now())
        done.add_done_callback(functools.partial(self._withdrawn, row), context=self._context.variables)
        settlement, _ = await asyncio.shield(done)
        return settlement

    def _withdrawn(self, row: int, done: asyncio.Future[tuple[Settlement, tuple[Stored, ...]]]) -> None:
        if done.exception() is None:
            settlement, events = done.result()
            self._parts.accounting.withdrawn(row, [settlement], events)

    async def message(self, message_id: str) -> Settlement:
        """See `SessionAPI.message`."""
        return await self._settlement(await self._row(), message_id)

    async def _settlement(self, row: int, message_id: str) -> Settlement:
        settlement = await self._context.store.settlement(row, message_id)
        if settlement is None:
            raise UnknownMessage(f"no such message: {message_id!r} in session {self.key!r}")
        return settlement

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def interrupt(
        self, reason: str = "", *, run_id: str | None = None, grace_s: float | None = None
    ) -> StopReceipt:
        """See `SessionAPI.interrupt`."""
        _check_stop(reason, grace_s)
        cause = Cause(kind="user", reason=reason, origin=self.key, at=self._context.now())
        done = self._context.store.interrupt(
            InterruptRequest(
                principal=self.principal, key=self.key, cause=cause, at=cause.at, run_id=run_id, grace_s=grace_s
            )
        )
        stopping = self._parts.stops.execute(self.principal, self.key, done, cause, grace_s, background=False)
        receipt, _ = await asyncio.shield(stopping)
        return receipt

    async def stop(self, reason: str = "", *, grace_s: float | None = None) -> SessionStop:
        """See `SessionAPI.stop`."""
        _check_stop(reason, grace_s)
        cause = Cause(kind="stop", reason=reason, origin=self.key, at=self._context.now())
        done = self._context.store.stop_session(
            InterruptRequest(principal=self.principal, key=self.key, cause=cause, at=cause.at, grace_s=grace_s)
        )
        stopping = self._parts.stops.execute(self.principal, self.key, done, cause, grace_s, background=True)
        receipt, withdrawn = await asyncio.shield(stopping)
        return SessionStop(session=self.key, receipt=receipt, withdrawn=withdrawn)

    async def delete(self) -> SessionStop:
        """See `SessionAPI.delete`."""
        cause = Cause(kind="stop", reason="the session was deleted", origin=self.key, at=self._context.now())
        done = self._context.store.delete_session(self.principal, self.key, at=cause.at, cause=cause)
        stopping = self._parts.stops.execute(self.principal, self.key, done, cause, None, background=True)
        receipt, withdrawn = await asyncio.shield(stopping)
        return SessionStop(session=self.key, receipt=receipt, withdrawn=withdrawn)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────────────────

    async def questions(self) -> list[Question]:
        """See `SessionAPI.questions`."""
        return [_with_hash(question) for question in await self._context.store.questions(await self._row())]

    async def answer(self, question: Question | str, text: str) -> Answer:
        """See `SessionAPI.answer`."""
        return await self.decide(question_id_of(question), "answered", text)

    async def approve(
        self,
        question: Question | str,
        *,
        note: str = "",
        call_hash: str | None = None,
        scope: GrantScope = "call",
    ) -> Answer:
        """See `SessionAPI.approve`."""
        bound = hash_of(question, call_hash)
        return await self.decide(question_id_of(question), "approved", note, call_hash=bound, scope=scope)

    async def deny(self, question: Question | str, *, reason: str = "") -> Answer:
        """See `SessionAPI.deny`."""
        return await self.decide(question_id_of(question), "denied", reason)

    async def decide(
        self,
        question_id: str,
        decision: Decision,
        text: str,
        *,
        call_hash: str = "",
        scope: GrantScope = "call",
        answerer: Answerer | None = None,
    ) -> Answer:
        """Record an answer to a question. Servers use this method to say who answered.

        If `answerer` is None, the answer is recorded as given by the session's owner in the host's process. Raises the
        errors of `SessionAPI.answer` and `SessionAPI.approve`.
        """
        return await give_answer(
            self._context,
            self._parts.suspension,
            self.principal,
            self.key,
            question_id,
            decision,
            text,
            call_hash=call_hash,
            scope=scope,
            answerer=answerer or Answerer(self.principal, "host"),
        )

    async def grants(self) -> list[Grant]:
        """See `SessionAPI.grants`."""
        return await self._parts.grants.of_session(self.principal, self.key)

    # ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedule(
        self, text: str, *, schedule_id: str | None = None, **spec: Unpack[ScheduleKeywords]
    ) -> Schedule:
        """See `SessionAPI.schedule`."""
        return await self.put_schedule(schedule_id, ScheduleSpec(session=self.key, text=text, **spec))

    async def put_schedule(self, schedule_id: str | None, spec: ScheduleSpec) -> Schedule:
        """Create or replace a schedule of this session. Raises the errors of `SessionAPI.schedule`."""
        found = await self._context.store.find_session(self.principal, self.key)
        if found is not None and found[1].state == "deleted":
            raise SessionDeleted(f"the session {self.key!r} was deleted")
        agent = spec.agent or self._agent
        await self.check_agent(agent)
        spec = msgspec.structs.replace(spec, agent=agent)
        return await self._parts.scheduler.put(self.principal, schedule_id, spec)

    # ── transcript edits ─────────────────────────────────────────────────────────────────────────────────────────

    async def check_agent(self, agent: str | None) -> None:
        """Raise `UnknownAgent` if this caller may not use `agent`. None checks the session's agent."""
        if self._agents is None:
            return
        if agent is None:
            found = await self._context.store.find_session(self.principal, self.key)
            agent = self._parts.agents.default if found is None else found[1].agent
        self._parts.agents.find(agent, among=self._agents)

    async def retry(self) -> Receipt:
        """See `SessionAPI.retry`."""
        last = await transcript_edits.last_run(self._context, self.principal, await self._row())
        return await self._parts.sender.send(
            self.principal,
            self.key,
            last.content,
            SendOptions(policy="reject", attachments=last.attachments),
            handle_agent=self._agent,
            agents=self._agents,
            retry_of=last.run_id,
        )

    async def undo(self) -> list[Entry]:
        """See `SessionAPI.undo`."""
        return transcript_edits.shown((await self._edit("undo")).removed)

    async def compact(self, *, keep: int = 4) -> list[Entry]:
        """See `SessionAPI.compact`."""
        if keep < 0:
            raise InvalidRequest(f"keep is {keep!r}; it must be a number of messages, 0 or more")
        await self.compact_history(keep)
        return await self.transcript()

    async def compact_history(self, keep: int) -> None:
        """Compact the transcript as `compact` does, without returning it; callers can then read it page by page."""
        await self.check_agent(None)
        view = await self.info()
        if view.run_id is not None or view.waiting:
            raise SessionBusy("the session has an active run or waiting messages", hint="wait until it is idle")
        agent, row = self._parts.agents.find(view.agent), await self._row()
        await transcript_edits.compact(self._context, self._parts.directory, self.principal, self.key, agent, row, keep)

    async def _edit(
        self, kind: HistoryEdit, entries: Sequence[Entry] = (), *, key: str | None = None, agent: str = ""
    ) -> Edited:
        """Edit the transcript of this session or, if `key` is given, of another session of the same owner."""
        return await transcript_edits.edit(
            self._context, self._parts.directory, self.principal, key or self.key, kind, entries, agent=agent
        )

    async def fork(self, key: str, *, through_n: int | None = None) -> SessionView:
        """See `SessionAPI.fork`."""
        if through_n is not None and through_n < 0:
            raise InvalidRequest(f"through_n is {through_n!r}; it must be the number of an entry, or 0 for none")
        other = Session(self._parts, self.principal, key, self._agent)
        row = await self._row()
        async with transcript_edits.charged(self._context, self.principal, row) as (whole, charge):
            kept = transcript_edits.through(whole, through_n)
            entries = await transcript_edits.with_states(self._context, row, kept, charge)
            view = await self.info()
            await self.check_agent(view.agent)
            await self._edit("branch", entries, key=key, agent=view.agent)
        return await other.info()

    async def export(self) -> SessionExport:
        """See `SessionAPI.export`."""
        view = await self.info()
        entries = await self.transcript()
        digests = {attachment.digest for entry in entries for attachment in entry.attachments}
        return SessionExport(
            key=self.key,
            agent=view.agent,
            exported_at=self._context.now(),
            entries=tuple(entries),
            attachments={digest: (await self.attachment(digest))[1] for digest in sorted(digests)},
        )

    async def import_history(self, export: SessionExport) -> SessionView:
        """See `SessionAPI.import_history`."""
        entries = transcript_edits.check_import(export)
        known = {attachment.digest: attachment for entry in entries for attachment in entry.attachments}
        for digest, body in export.attachments.items():
            attachment = known.get(digest)
            if attachment is None:
                continue  # unused
            kept = await self.attach(body, media_type=attachment.media_type, name=attachment.name)
            if kept.digest != digest:
                raise InvalidRequest(f"the bytes of attachment {digest[:16]}… do not match its digest")
        agents = self._parts.agents
        allowed = agents.by_name.keys() if self._agents is None else self._agents & agents.by_name.keys()
        agent = export.agent if export.agent in allowed else self._agent or agents.default
        await self.check_agent(agent)
        await self._edit("import", entries, agent=agent)
        return await self.info()

    async def attach(self, body: bytes | bytearray, *, media_type: str, name: str = "") -> Attachment:
        """See `SessionAPI.attach`."""
        return await attachment_ops.keep(self._context, self.principal, body, media_type=media_type, name=name)

    async def attachment_about(self, digest: str) -> Attachment:
        """Return an attachment's metadata, without reading its bytes. Raises `UnknownAttachment`."""
        return await attachment_ops.about(self._context, self.principal, digest)

    async def attachment(self, digest: str) -> tuple[Attachment, bytes]:
        """See `SessionAPI.attachment`."""
        return await attachment_ops.fetch(self._context, self.principal, digest)

    async def attachment_part(self, digest: str, *, start: int, size: int) -> bytes:
        """Return at most `size` bytes of an attachment, starting at `start`. Raises `UnknownAttachment`."""
        return await attachment_ops.fetch_part(self._context, self.principal, digest, start=start, size=size)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def open_log(
        self, *, after: str | None = None, follow: str | None = None, keepalive_s: float | None = None
    ) -> SessionLog:
        """Return a reader that yields the log in batches of stored events. The caller must close the reader.

        The reader yields None after each `keepalive_s` seconds without an event. This method raises the errors of
        `SessionAPI.events` before it returns the reader.
        """
        seconds = self._context.settings.keepalive_s if keepalive_s is None else keepalive_s
        return await open_log(
            self._context,
            self._parts.directory,
            self.principal,
            self.key,
            after=after,
            follow=follow,
            keepalive_s=seconds,
        )

    async def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncGenerator[Event | Gap, None]:
        """See `SessionAPI.events`."""
        async with aclosing(await self.open_log(after=after, follow=follow)) as reader:
            async for batch in reader:
                if isinstance(batch, Gap):
                    yield batch
                else:
                    for stored in batch or ():
                        yield decode_event(stored)

    async def info(self) -> SessionView:
        """See `SessionAPI.info`."""
        return (await self._parts.directory.find(self.principal, self.key))[1]

    async def transcript(self) -> list[Entry]:
        """See `SessionAPI.transcript`."""
        entries = await self._context.store.transcript(await self._row())
        if not entries:
            await self._row()  # raises if deleted in the meantime
        return transcript_edits.shown(entries)

    async def transcript_page(self, *, after: int, limit: int, reader: str | None = None) -> tuple[list[Entry], Charge]:
        """Return up to `limit` entries with n > `after`, in order, and a charge that the caller must release.

        If no entries follow `after`, the list is empty. The read is charged to the principal `reader`; None charges
        the session's own principal.

        Raises:
            UnknownSession, SessionDeleted: if the session does not exist or was deleted.
            BudgetExceeded, HostBusy: if the wait for memory times out.
        """
        row = await self._row()

        async def read() -> list[Entry]:
            found = await self._context.store.transcript(row, after=after, limit=limit, limit_bytes=PAGE_BYTES)
            if not found:
                await self._row()  # raises if deleted in the meantime
            return transcript_edits.shown(found)

        return await self._context.budgets.read_page(reader or self.principal, read, memory_bytes)

    async def newest_entries(self, limit: int, *, reader: str) -> tuple[list[Entry], Charge]:
        """Return up to the newest `limit` entries, in order, and a charge that the caller must release.

        The list is shorter if the entries are large. The reads are charged to the principal `reader`. Raises as
        `transcript_page`.
        """
        newest = await self._newest_number(reader)
        while True:
            entries, charge = await self.transcript_page(after=max(0, newest - limit), limit=limit, reader=reader)
            if limit == 1 or not entries or entries[-1].n >= newest:
                return entries, charge
            charge.release()  # the page is full before its last entry
            limit //= 2

    async def _newest_number(self, reader: str) -> int:
        """Return the number of the newest entry, 0 if the transcript is empty. Found by bisection."""
        low, high = 0, 64
        while found := await self._number_after(high, reader):
            low, high = found, 2 * found
        while low < high:
            middle = (low + high) // 2
            found = await self._number_after(middle, reader)
            low, high = (found, high) if found else (low, middle)
        return low

    async def has_entry(self, n: int) -> bool:
        """Return whether the transcript has an entry numbered `n`."""
        return await self._number_after(n - 1, self.principal) == n

    async def _number_after(self, n: int, reader: str) -> int:
        """Return the number of the first entry after `n`, or 0. The entry is read but not kept in memory."""
        row = await self._row()
        budgets, within_s = self._context.budgets, self._context.settings.stream_stall_s
        with await budgets.reads.wait_for(reader, 1, within_s=within_s):
            found = await self._context.store.transcript(row, after=n, limit=1)
            return found[0].n if found else 0

    async def mailbox(self) -> list[MailboxItem]:
        """See `SessionAPI.mailbox`."""
        return list(await self._context.store.mailbox(await self._row()))

    async def tree(self) -> TreeNode:
        """See `SessionAPI.tree`."""
        own = self._parts.tree.of_session(row := await self._row(), self.key)
        return own if (others := self._parts.node_requests) is None else await others.complete_tree(own, row)

    async def run(self, run_id: str) -> RunView:
        """See `SessionAPI.run`."""
        view = await self._context.store.run(await self._row(), run_id)
        if view is None:
            raise UnknownRun(f"no such run: {run_id!r} in session {self.key!r}")
        return view

    async def runs(self) -> list[RunView]:
        """See `SessionAPI.runs`."""
        return list(await self._context.store.runs(await self._row()))

    async def _row(self) -> int:
        return (await self._parts.directory.find(self.principal, self.key))[0]


def _with_hash(question: Question) -> Question:
    """Return the question with its call hash, which older versions did not store."""
    if question.kind == "question" or question.call_hash:
        return question
    return msgspec.structs.replace(question, call_hash=hash_call(question))


def _check_stop(reason: str, grace_s: float | None) -> None:
    if not isinstance(reason, str):
        raise InvalidRequest("the reason for a stop must be text (str)")
    check_text(reason)
    check_seconds(grace_s=grace_s)
