"""The native API under ``/v1``: each handler turns one request into one call of the host.

A caller reaches sessions only through `Native.session`, which asks the host for the session of *its* principal. This
is the only place that decides ownership.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, cast
from urllib.parse import quote

import msgspec
from msgspec import Meta

from holdfast import errors
from holdfast.host import DrainReport, Host, HostStatistics, Incident, Session
from holdfast.host.budgets import SMALL_MESSAGE_CHARACTERS, BudgetUsage
from holdfast.protocol.messages import (
    Attachment,
    Entry,
    MailboxItem,
    MessageState,
    Policy,
    Receipt,
    RunView,
    SessionStop,
    SessionView,
    Settlement,
    TreeNode,
)
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.server.auth import KeyRing, KeyRole
from holdfast.server.connections import CONNECTION
from holdfast.server.exchange import Answer, Caller, Exchange, encode
from holdfast.server.exports import give_list, give_transcript
from holdfast.server.operations import Query, Table
from holdfast.server.principal_work import Ended, find_work, stop_principal
from holdfast.server.sse import Streams
from holdfast.server.stops import StopResult, Stops, StopTicket
from holdfast.settings import Settings

__all__ = ["ALL", "LIMIT", "LIST_LIMIT", "TABLE", "Body", "Name", "Native", "Text"]

TABLE = Table()
_YEAR_S = 366 * 86400.0
LIST_LIMIT = 1000
_MOST = 2**53

Text = Annotated[str, Meta(max_length=2000)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Duration = Annotated[float, Meta(ge=0, le=_YEAR_S)]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the request bodies; unknown fields are refused."""


class SendBody(Body, frozen=True, kw_only=True):
    """A message to send.

    ``quiet_s`` and ``max_wait_s`` apply to policy ``collect``; ``attachments`` lists upload responses or digests.
    """

    content: str
    policy: str = "queue"
    idempotency_key: Name | None = None
    agent: Name | None = None
    quiet_s: Duration | None = None
    max_wait_s: Duration | None = None
    attachments: Annotated[list[str | Attachment], Meta(max_length=100)] = []


class InterruptBody(Body, frozen=True, kw_only=True):
    """A reason, the run to interrupt (default: the active one), and the grace period for cleanup, in seconds."""

    reason: Text = ""
    run_id: Name | None = None
    grace_s: Duration | None = None


class StopBody(Body, frozen=True, kw_only=True):
    """A reason, and the grace period for cleanup, in seconds."""

    reason: Text = ""
    grace_s: Duration | None = None


class DrainBody(Body, frozen=True, kw_only=True):
    """Time for active runs to finish, in seconds (default: the setting ``drain_s``)."""

    deadline_s: Duration | None = None


class KeyBody(Body, frozen=True, kw_only=True):
    """An API key to create: its principal, role and label.

    ``agents``: agents that it may name (default: the server's public agents). ``approval_key``: an existing approval
    key, required for the role ``approver`` where approvals need one.
    """

    principal: Name
    role: KeyRole = "user"
    label: Annotated[str, Meta(max_length=200)] = ""
    agents: Annotated[list[Name], Meta(max_length=1000)] | None = None
    approval_key: Annotated[str, Meta(max_length=200)] = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a message sent with ``?wait=``."""

    status: MessageState
    text: str
    cause: Cause | None
    error: str | None
    message_id: str
    run_id: str | None
    receipt: Receipt


class StopPending(msgspec.Struct, frozen=True, kw_only=True):
    """A stop in progress; poll ``/v1/sessions/{key}/stops/{stop_id}``."""

    session: str
    stop_id: str


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions, most recently changed first."""

    sessions: list[SessionView]


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """The entries that the model sees, in order."""

    entries: list[Entry]


class Mailbox(msgspec.Struct, frozen=True, kw_only=True):
    """Queued messages, in order."""

    items: list[MailboxItem]


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """Runs, newest first."""

    runs: list[RunView]


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret."""

    key_id: str
    principal: str
    role: KeyRole
    label: str
    created_at: float
    revoked_at: float | None
    agents: list[str] | None = None


class KeyList(msgspec.Struct, frozen=True, kw_only=True):
    """All keys, including revoked ones."""

    keys: list[KeyView]


class KeyRevoked(msgspec.Struct, frozen=True, kw_only=True):
    """All keys, and the work of the key's principal: what was stopped, and what continues.

    Parameters:
        keys: all keys.
        principal: owner of the key.
        stopped: sessions whose runs and background work were stopped and whose queued messages were withdrawn.
        paused: schedules that were paused.
        running: sessions that continue: with a run, queued messages or background work.
        active: schedules that continue.
    """

    keys: list[KeyView]
    principal: str
    stopped: list[str]
    paused: list[str]
    running: list[str]
    active: list[str]


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A new key and its secret, which is shown only once."""

    key: KeyView
    secret: str


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """The server: its version, kind of store, and the agents that the caller may name.

    ``approval_key_required``: the agents' programs run unsandboxed, so approvals require a person. ``budgets``: usage
    of scarce resources by principal; keys without role admin see only their own. Admin keys also see the store's file,
    the host's statistics and the newest incidents.
    """

    version: str
    store: str
    agents: list[str]
    default_agent: str
    approval_key_required: bool
    statistics: HostStatistics | None
    incidents: list[Incident]
    budgets: dict[str, BudgetUsage]


_send_body = msgspec.json.Decoder(SendBody)
_interrupt_body = msgspec.json.Decoder(InterruptBody)
_stop_body = msgspec.json.Decoder(StopBody)
_drain_body = msgspec.json.Decoder(DrainBody)
_key_body = msgspec.json.Decoder(KeyBody)

_WAIT = Query("wait", "number", "Wait up to this many seconds for the result.", least=0)
LIMIT = Query(
    "limit", "integer", f"Maximum number of items (default 100, at most {LIST_LIMIT}).", least=1, most=LIST_LIMIT
)
_PAGE = (
    Query("after", "integer", "Return only entries with a greater `n`.", least=0, most=_MOST),
    Query(
        "limit", "integer", f"Maximum number of entries (default and at most {LIST_LIMIT}).", least=1, most=LIST_LIMIT
    ),
)
ALL = Query("all", "boolean", "`true` includes all principals (admin only).")


class Native:
    """The handlers of the native API. Use them from one event loop only.

    Parameters:
        host: the started host.
        keys: the API keys.
    """

    def __init__(self, host: Host, keys: KeyRing) -> None:
        self.host = host
        self.keys = keys
        self.settings: Settings = host.settings
        self.streams = Streams(host.budgets)
        self.stops = Stops(host.budgets.stops)
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Settlement]] = set()
        self._closing = False
        self._public_agents = frozenset(host.settings.public_agents or (host.default_agent,))
        self.approval_key_required = any(agent.unwalled for agent in host.agents.values())
        """Whether programs of an agent could use any credential that is in a file or an environment."""

    def close_waits(self) -> None:
        """Answer every request that waits for a settlement with the current state; the server is shutting down."""
        self._closing = True
        self.streams.closing()
        for settling in self._waiting:
            settling.cancel()

    def session(self, exchange: Exchange) -> Session:
        """Return the caller's session that the path names."""
        return self.session_named(exchange, exchange.path["key"])

    def session_named(self, exchange: Exchange, key: str) -> Session:
        """Return a session of the caller, limited to the agents that the caller may name."""
        return self.host.session(key, principal=exchange.caller.principal, agents=exchange.agents)

    def approver(self, caller: Caller, secret: str, principal: str) -> str:
        """Return the id of an approval key for the calls of `principal`.

        Raises:
            ApprovalKeyRequired: the key is wrong; the operator is notified who tried it.
            RateLimited: the caller has tried too many wrong keys.
        """
        who = caller.owner or caller.principal
        self.host.budgets.wrong_keys.check(who)
        try:
            return self.keys.approver(secret, principal)
        except errors.ApprovalKeyRequired:
            if secret:
                self.host.budgets.wrong_keys.take(who)
                self.host.budgets.tell(who, f"{who}: tried a wrong approval key", kind="approval key")
            raise

    def agents_of(self, caller: Caller) -> frozenset[str] | None:
        """Return the agents that a caller may name; None: all of them."""
        if caller.agents is not None:
            return caller.agents
        if caller.role == "admin" or "*" in self.settings.public_agents:
            return None
        return self._public_agents

    # ── Messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @TABLE.enter(
        "POST",
        "/v1/sessions/{key}/messages",
        body=SendBody,
        query=(_WAIT,),
        answers={202: Receipt, 200: Outcome},
        errors=(
            errors.SessionBusy,
            errors.MailboxFull,
            errors.IdempotencyMismatch,
            errors.SessionDeleted,
            errors.UnknownAgent,
            errors.UnknownPolicy,
            errors.UnknownAttachment,
            errors.InvalidKey,
            errors.Draining,
        ),
    )
    async def send_message(self, exchange: Exchange) -> Answer:
        """Send a message to the session.

        The response is 202 with a receipt once the message is durable. With `?wait=`, it is 200 with the outcome if the
        message is settled within that time.
        """
        wait_s = exchange.number("wait", most=self.settings.wait_limit_s)
        body = await exchange.body(_send_body)
        large = len(body.content) > SMALL_MESSAGE_CHARACTERS
        writing = await exchange.take_write(len(body.content.encode())) if large else None
        try:
            receipt, settling = await self.session(exchange).send_expecting(
                body.content,
                policy=cast(Policy, body.policy),  # the store refuses unknown policies by name
                idempotency_key=body.idempotency_key,
                agent=body.agent,
                quiet_s=body.quiet_s,
                max_wait_s=body.max_wait_s,
                attachments=[_attachment(one) for one in body.attachments],
            )
        finally:
            if writing is not None:
                writing.release()
        settled = await self._settled(exchange, settling, wait_s)
        if settled is None:
            return Answer(202, encode(receipt))
        outcome = Outcome(
            status=settled.state,
            text=settled.text,
            cause=settled.cause,
            error=settled.error,
            message_id=settled.message_id,
            run_id=settled.run_id,
            receipt=receipt,
        )
        return Answer(200, encode(outcome))

    @TABLE.enter(
        "GET",
        "/v1/sessions/{key}/messages/{message_id}",
        query=(_WAIT,),
        answers={200: Settlement},
        errors=(errors.UnknownSession, errors.UnknownMessage, errors.SessionDeleted),
    )
    async def get_message(self, exchange: Exchange) -> Answer:
        """Return the state of a message; `state` is `accepted` or `taken` until it is settled."""
        wait_s = exchange.number("wait", most=self.settings.wait_limit_s)
        session = self.session(exchange)
        message_id = exchange.path["message_id"]
        settled = await self._settled(exchange, await session.expect(message_id), wait_s) if wait_s else None
        return Answer(200, encode(settled or await session.message(message_id)))

    @TABLE.enter(
        "DELETE",
        "/v1/sessions/{key}/messages/{message_id}",
        answers={200: Settlement},
        errors=(errors.UnknownSession, errors.UnknownMessage, errors.AlreadySettled, errors.SessionDeleted),
    )
    async def withdraw_message(self, exchange: Exchange) -> Answer:
        """Withdraw a queued message."""
        return Answer(200, encode(await self.session(exchange).withdraw(exchange.path["message_id"])))

    async def _settled(
        self, exchange: Exchange, settling: asyncio.Future[Settlement], wait_s: float | None
    ) -> Settlement | None:
        """Wait up to `wait_s` seconds, until the server shuts down or the client disconnects. None: not settled."""
        if not wait_s or self._closing:
            settling.cancel()
            return None
        timer = self._loop.call_later(wait_s, settling.cancel)
        self._waiting.add(settling)
        connection = exchange.scope.get(CONNECTION)
        if connection is not None:
            connection.on_lost = settling.cancel
        try:
            return await settling
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None
        finally:
            timer.cancel()
            self._waiting.discard(settling)
            if connection is not None:
                connection.on_lost = None

    # ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @TABLE.enter(
        "GET",
        "/v1/sessions/{key}/events",
        query=(
            Query(
                "after",
                "string",
                "Return only events after this cursor (`0`: all). `Last-Event-ID` takes precedence.",
            ),
            Query("follow", "string", "End the stream after the event that settles this message (an id)."),
        ),
        answers={200: "text/event-stream"},
        errors=(errors.UnknownSession, errors.UnknownMessage, errors.InvalidCursor, errors.SessionDeleted),
    )
    async def stream_events(self, exchange: Exchange) -> None:
        """Stream the session's events as Server-Sent Events, from the beginning or after a cursor, and follow new ones.

        Without a cursor, or after `0`, the stream of a session that does not exist yet waits for its first message.

        A frame is `id: <cursor>`, `event: <kind>`, `data: <the event as JSON>`. A `gap` frame reports missed events; a
        `closed` frame is the last one when the server shuts down.
        """
        await self.streams.serve_sse(exchange, self.session(exchange))

    # ── Stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @TABLE.enter(
        "POST",
        "/v1/sessions/{key}/interrupt",
        body=InterruptBody,
        optional_body=True,
        query=(_WAIT,),
        answers={200: StopReceipt, 202: StopPending},
        errors=(errors.UnknownSession, errors.SessionDeleted),
    )
    async def interrupt_session(self, exchange: Exchange) -> Answer:
        """Interrupt the active run, or exactly `run_id`; queued messages run next.

        The response is the receipt, or 202 and a stop id if the stop takes longer than the wait.
        """
        body = await exchange.body(_interrupt_body, optional=True)
        session = self.session(exchange)
        return await self._stopped(
            exchange, lambda: session.interrupt(body.reason, run_id=body.run_id, grace_s=body.grace_s)
        )

    @TABLE.enter(
        "POST",
        "/v1/sessions/{key}/stop",
        body=StopBody,
        optional_body=True,
        query=(_WAIT,),
        answers={200: SessionStop, 202: StopPending},
        errors=(errors.UnknownSession, errors.SessionDeleted),
    )
    async def stop_session(self, exchange: Exchange) -> Answer:
        """Stop the session's run and background work, and withdraw its queued messages."""
        body = await exchange.body(_stop_body, optional=True)
        session = self.session(exchange)
        return await self._stopped(exchange, lambda: session.stop(body.reason, grace_s=body.grace_s))

    @TABLE.enter(
        "GET",
        "/v1/sessions/{key}/stops/{stop_id}",
        answers={200: StopReceipt | SessionStop, 202: StopPending},
        errors=(errors.UnknownStop, errors.UnknownSession, errors.SessionDeleted),
    )
    async def get_stop(self, exchange: Exchange) -> Answer:
        """Return the result of an interrupt, stop or delete that took longer than its wait."""
        ticket = self.stops.find(exchange.caller.principal, exchange.path["key"], exchange.path["stop_id"])
        return _stop_answer(ticket)

    async def _stopped(self, exchange: Exchange, stop: Callable[[], Awaitable[StopResult]]) -> Answer:
        wait_s = exchange.number("wait", most=self.settings.wait_limit_s)
        ticket = await self.stops.run(
            exchange.caller.principal,
            exchange.path["key"],
            stop,
            wait_s=self.settings.stop_wait_s if wait_s is None else wait_s,
        )
        return _stop_answer(ticket)

    # ── Sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @TABLE.enter("GET", "/v1/sessions", query=(LIMIT, ALL), answers={200: SessionList})
    async def list_sessions(self, exchange: Exchange) -> Answer:
        """List your sessions, most recently changed first."""
        await exchange.take_turn()
        limit = exchange.whole("limit", least=1, most=LIST_LIMIT) or 100
        found = await self.host.sessions(principal=self.whose(exchange), limit=limit)
        return Answer(200, encode(SessionList(sessions=list(found))))

    @TABLE.enter(
        "GET", "/v1/sessions/{key}", answers={200: SessionView}, errors=(errors.UnknownSession, errors.SessionDeleted)
    )
    async def get_session(self, exchange: Exchange) -> Answer:
        """Return the session's current state."""
        return Answer(200, encode(await self.session(exchange).info()))

    @TABLE.enter(
        "DELETE",
        "/v1/sessions/{key}",
        answers={200: SessionStop, 202: StopPending},
        errors=(errors.UnknownSession, errors.SessionDeleted),
    )
    async def delete_session(self, exchange: Exchange) -> Answer:
        """Stop and delete the session; afterwards its key answers 410 for a while."""
        return await self._stopped(exchange, self.session(exchange).delete)

    @TABLE.enter(
        "GET",
        "/v1/sessions/{key}/transcript",
        query=_PAGE,
        answers={200: Transcript},
        errors=(errors.UnknownSession, errors.SessionDeleted),
    )
    async def get_transcript(self, exchange: Exchange) -> Answer | None:
        """Return the entries that the model sees, in order: at most `limit` entries after entry `after`."""
        after = exchange.whole("after", least=0, most=_MOST) or 0
        limit = exchange.whole("limit", least=1, most=LIST_LIMIT) or LIST_LIMIT
        return await give_transcript(exchange, self.session(exchange), after=after, limit=limit)

    @TABLE.enter(
        "GET",
        "/v1/sessions/{key}/mailbox",
        answers={200: Mailbox},
        errors=(errors.UnknownSession, errors.SessionDeleted),
    )
    async def get_mailbox(self, exchange: Exchange) -> Answer | None:
        """List the queued messages, in order."""
        await exchange.take_turn()
        return await give_list(exchange, "items", await self.session(exchange).mailbox())

    @TABLE.enter(
        "GET", "/v1/sessions/{key}/tree", answers={200: TreeNode}, errors=(errors.UnknownSession, errors.SessionDeleted)
    )
    async def get_session_tree(self, exchange: Exchange) -> Answer:
        """Return the session's live tasks, threads and processes."""
        await exchange.take_turn()
        return Answer(200, encode(await self.session(exchange).tree()))

    @TABLE.enter(
        "GET", "/v1/sessions/{key}/runs", answers={200: RunList}, errors=(errors.UnknownSession, errors.SessionDeleted)
    )
    async def list_runs(self, exchange: Exchange) -> Answer | None:
        """List the session's newest runs, newest first."""
        await exchange.take_turn()
        return await give_list(exchange, "runs", await self.session(exchange).runs())

    @TABLE.enter(
        "GET",
        "/v1/sessions/{key}/runs/{run_id}",
        answers={200: RunView},
        errors=(errors.UnknownSession, errors.UnknownRun, errors.SessionDeleted),
    )
    async def get_run(self, exchange: Exchange) -> Answer:
        """Return a run with its answer, cause, error and stop receipt."""
        return Answer(200, encode(await self.session(exchange).run(exchange.path["run_id"])))

    # ── The host ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @TABLE.enter("GET", "/v1/tree", query=(ALL,), answers={200: TreeNode})
    async def get_tree(self, exchange: Exchange) -> Answer:
        """Return the tree of your live tasks, threads and processes."""
        await exchange.take_turn()
        return Answer(200, encode(self.host.tree(principal=self.whose(exchange))))

    @TABLE.enter("GET", "/v1/server", answers={200: ServerView})
    async def get_server(self, exchange: Exchange) -> Answer:
        """Return the server's version, store, agents and statistics."""
        from holdfast import __version__

        host = self.host
        info = await host.store.info()
        admin = exchange.caller.role == "admin"
        view = ServerView(
            version=__version__,
            store=f"{info.engine} {info.path}" if admin else info.engine,
            agents=sorted(host.agents.keys() if exchange.agents is None else exchange.agents & host.agents.keys()),
            default_agent=host.default_agent,
            approval_key_required=self.approval_key_required,
            statistics=host.statistics() if admin else None,
            incidents=list(host.incidents.newest) if admin else [],
            budgets=await self._budgets(None if admin else exchange.caller.principal),
        )
        return Answer(200, encode(view))

    async def _budgets(self, principal: str | None) -> dict[str, BudgetUsage]:
        """Return the usage of each budget, including stored bytes, for all principals or for one."""
        store, limit = self.host.store, self.host.stored_limit
        if principal is None:
            stored: dict[str, float] = dict(await store.most_stored(limit=20))
        else:
            stored = {principal: await store.stored_bytes(principal)}
        usage = BudgetUsage(used=sum(stored.values()), limit=limit, share=limit, refused=0, principals=stored)
        return self.host.budgets.usage(principal) | {"stored": usage}

    @TABLE.enter("POST", "/v1/drain", body=DrainBody, optional_body=True, answers={200: DrainReport}, admin=True)
    async def drain(self, exchange: Exchange) -> Answer:
        """Refuse new work, let runs finish by the deadline, and report what remains; reads are still served."""
        body = await exchange.body(_drain_body, optional=True)
        return Answer(200, encode(await self.host.drain(deadline_s=body.deadline_s)))

    @TABLE.enter("GET", "/v1/keys", answers={200: KeyList}, admin=True)
    async def list_keys(self, exchange: Exchange) -> Answer:
        """List all API keys, including revoked ones, without their secrets."""
        records = await self.keys.records()
        return Answer(200, encode(KeyList(keys=[key_view(record) for record in records])))

    @TABLE.enter("POST", "/v1/keys", body=KeyBody, answers={201: KeyCreated}, admin=True)
    async def create_key(self, exchange: Exchange) -> Answer:
        """Create an API key. From the first one on, every request requires a key.

        The secret appears only in this response.
        """
        body = await exchange.body(_key_body)
        if body.role == "approver" and self.approval_key_required:
            # Otherwise an agent with a key could create one for itself.
            self.approver(exchange.caller, body.approval_key, body.principal)
        exchange.use.release()  # a request without a key that creates the first one still gets its answer
        record, secret = await self.keys.create(
            principal=body.principal, role=body.role, label=body.label, agents=body.agents
        )
        return Answer(201, encode(KeyCreated(key=key_view(record), secret=secret)))

    @TABLE.enter(
        "DELETE",
        "/v1/keys/{key_id}",
        query=(
            Query("stop", "boolean", "`true` also stops its principal's work, even if the key is already revoked."),
        ),
        answers={200: KeyRevoked},
        errors=(errors.UnknownKey,),
        admin=True,
    )
    async def revoke_key(self, exchange: Exchange) -> Answer:
        """Revoke an API key at once, and end the streams and requests that use it.

        Runs, background work and schedules of its principal continue and are listed; `?stop=true` stops them.
        """
        stop = exchange.flag("stop")
        exchange.use.release()  # a caller that revokes its own key still gets the answer
        record = await self.keys.revoke(exchange.path["key_id"], again=stop)
        ended = await stop_principal(self.host, record.principal) if stop else Ended((), ())
        left = await find_work(self.host, record.principal)
        view = KeyRevoked(
            keys=[key_view(one) for one in await self.keys.records()],
            principal=record.principal,
            stopped=list(ended.sessions),
            paused=list(ended.schedules),
            running=list(left.sessions),
            active=list(left.schedules),
        )
        return Answer(200, encode(view))

    @staticmethod
    def whose(exchange: Exchange) -> str | None:
        """Return the principal whose items are listed; None (all) with ``?all=true`` and an admin key."""
        if not exchange.flag("all"):
            return exchange.caller.principal
        if exchange.caller.role != "admin":
            raise errors.Forbidden("only admin keys may list all principals' sessions", hint="omit ?all=")
        return None


def _attachment(named: str | Attachment) -> Attachment:
    """Return the attachment that a message names; the store completes a digest."""
    return Attachment(digest=named, media_type="") if isinstance(named, str) else named


def key_view(record: Any) -> KeyView:
    """Return a key's record without its hash."""
    return KeyView(
        key_id=record.key_id,
        principal=record.principal,
        role=record.role,
        label=record.label,
        created_at=record.created_at,
        revoked_at=record.revoked_at,
        agents=None if record.agents is None else list(record.agents),
    )


def _stop_answer(ticket: StopTicket) -> Answer:
    if ticket.result.done():
        return Answer(200, encode(ticket.result.result()))
    location = f"/v1/sessions/{quote(ticket.key, safe='')}/stops/{ticket.stop_id}"
    return Answer(
        202,
        encode(StopPending(session=ticket.key, stop_id=ticket.stop_id)),
        ((b"location", location.encode("ascii")),),
    )
