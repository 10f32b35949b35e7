"""A session over HTTP: `holdfast.protocol.interface.SessionLike` on a `Client`."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import httpx2
import msgspec

from holdfast import ids
from holdfast.client.schedules import RemoteSchedule
from holdfast.client.wire import connecting, decode, described, error_of, refuse_unauthorized, segment, unreachable
from holdfast.errors import HoldfastError, InvalidKey, RateLimited, ServerUnreachable, Unavailable, WaitExpired
from holdfast.protocol.call_hash import hash_of, question_id_of
from holdfast.protocol.events import Event, Gap, MessageSettled, SessionDeletedEvent
from holdfast.protocol.interface import answer
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    MailboxItem,
    Policy,
    Question,
    Receipt,
    RunView,
    SessionExport,
    SessionStop,
    SessionView,
    Settlement,
    TreeNode,
    check_seconds,
)
from holdfast.protocol.schedules import Miss
from holdfast.protocol.sse import FrameDecoder
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES
from holdfast.protocol.stopping import StopReceipt

if TYPE_CHECKING:
    from holdfast.client.client import Client

__all__ = ["RemoteSession"]

T = TypeVar("T")

_WAIT_S = 25.0
_STOP_S = 600.0
_POLL_S = 0.25
_SILENCE_S = 45.0
_PAGE = 1000
_REPLY_S = 60.0
_FIRST_DELAY_S = 0.1
_MOST_DELAY_S = 5.0


class _Outcome(msgspec.Struct):
    receipt: Receipt
    status: str
    text: str = ""


class _Pending(msgspec.Struct):
    stop_id: str


class _Entries(msgspec.Struct):
    entries: list[Entry]


class _Items(msgspec.Struct):
    items: list[MailboxItem]


class _Questions(msgspec.Struct):
    questions: list[Question]


class _Runs(msgspec.Struct):
    runs: list[RunView]


_frame: msgspec.json.Decoder[Event | Gap] = msgspec.json.Decoder(Event | Gap)


class RemoteSession:
    """A session of a server. Made by `Client.session`. Cancelling a caller ends its wait, never the work."""

    __slots__ = ("_client", "_path", "key")

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        if not key:
            raise InvalidKey("'' is not a session key")
        self._path = f"/v1/sessions/{segment(key)}"
        self.key = key

    def __repr__(self) -> str:
        return f"<RemoteSession {self.key!r} at {self._client.url}>"

    # ── Messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def send(
        self,
        content: str,
        *,
        policy: Policy = "queue",
        idempotency_key: str | None = None,
        agent: str | None = None,
        quiet_s: float | None = None,
        max_wait_s: float | None = None,
        attachments: Sequence[Attachment] = (),
    ) -> Receipt:
        """See `SessionLike.send`. Generates a missing `idempotency_key`, so that a retry is safe."""
        response = await self._post_message(
            {}, 0.0, content, policy, idempotency_key, agent, quiet_s, max_wait_s, attachments
        )
        return decode(response, Receipt)

    async def ask(
        self,
        content: str,
        *,
        timeout_s: float | None = None,
        policy: Policy = "queue",
        idempotency_key: str | None = None,
        agent: str | None = None,
        quiet_s: float | None = None,
        max_wait_s: float | None = None,
        attachments: Sequence[Attachment] = (),
    ) -> str:
        """See `SessionLike.ask`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        wait_s = _WAIT_S if timeout_s is None else max(0.0, min(_WAIT_S, timeout_s))
        response = await self._post_message(
            {"wait": f"{wait_s:.3f}"},
            wait_s,
            content,
            policy,
            idempotency_key,
            agent,
            quiet_s,
            max_wait_s,
            attachments,
        )
        if response.status_code == 200:
            outcome = decode(response, _Outcome)
            if outcome.status == "completed":
                return outcome.text
            return answer(await self.message(outcome.receipt.message_id))
        receipt = decode(response, Receipt)
        return answer(await self._wait(receipt.message_id, timeout_s, deadline))

    async def _post_message(
        self,
        query: dict[str, str],
        wait_s: float,
        content: str,
        policy: Policy,
        idempotency_key: str | None,
        agent: str | None,
        quiet_s: float | None,
        max_wait_s: float | None,
        attachments: Sequence[Attachment],
    ) -> httpx2.Response:
        body: dict[str, object] = {
            "content": content,
            "policy": policy,
            "idempotency_key": ids.message_id() if idempotency_key is None else idempotency_key,
        }
        optional = {"agent": agent, "quiet_s": quiet_s, "max_wait_s": max_wait_s, "attachments": tuple(attachments)}
        body.update((name, value) for name, value in optional.items() if value not in (None, ()))
        return await self._client.request(
            "POST", f"{self._path}/messages", body=body, query=query, repeatable=True, reply_s=wait_s + 30.0
        )

    async def wait(self, message_id: str, *, timeout_s: float | None = None) -> Settlement:
        """See `SessionLike.wait`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        return await self._wait(message_id, timeout_s, deadline)

    async def _wait(self, message_id: str, timeout_s: float | None, deadline: float | None) -> Settlement:
        loop = asyncio.get_running_loop()
        path = f"{self._path}/messages/{segment(message_id)}"
        while True:
            wait_s = _WAIT_S if deadline is None else max(0.0, min(_WAIT_S, deadline - loop.time()))
            response = await self._client.request(
                "GET", path, query={"wait": f"{wait_s:.3f}"}, repeatable=True, reply_s=wait_s + 30.0
            )
            settlement = decode(response, Settlement)
            if settlement.state in TERMINAL_MESSAGE_STATES:
                return settlement
            if deadline is not None and loop.time() >= deadline:
                raise WaitExpired(f"the message is not settled after {timeout_s:g} s")
            await asyncio.sleep(0 if wait_s else _POLL_S)

    async def withdraw(self, message_id: str) -> Settlement:
        """See `SessionLike.withdraw`."""
        path = f"{self._path}/messages/{segment(message_id)}"
        return decode(await self._client.request("DELETE", path, repeatable=True), Settlement)

    async def message(self, message_id: str) -> Settlement:
        """See `SessionLike.message`."""
        return await self._client.read(f"{self._path}/messages/{segment(message_id)}", Settlement)

    # ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncGenerator[Event | Gap, None]:
        """See `SessionLike.events`. Reconnects automatically, without loss or repeats.

        Raises:
            ServerUnreachable: the reconnect failed within the client's ``reconnect_s``.
            Unauthenticated: the key was revoked or the token has expired.
        """
        cursor = after
        patience = _Patience(self._client, self.key)
        while True:
            closed = False
            try:
                async with self._open(cursor, follow) as response:
                    if response.status_code != 200:
                        await response.aread()
                        raise error_of(response)
                    decoder = FrameDecoder()
                    async for chunk in response.aiter_raw():
                        patience.renew()
                        for frame in decoder.feed(chunk):
                            cursor = frame.id or cursor
                            if frame.event == "closed":
                                refuse_unauthorized(frame.data)
                                closed = True
                                continue
                            event = _frame.decode(frame.data)
                            yield event
                            if _ends(event, follow):
                                return
                if not closed:
                    return
                failure: HoldfastError = ServerUnreachable(f"{self._client.url} ended the stream: it is shutting down")
            except httpx2.TransportError as error:
                failure = unreachable(self._client.url, error)
            except (Unavailable, RateLimited) as error:
                failure = error
            await patience.wait(failure)

    @asynccontextmanager
    async def _open(self, cursor: str | None, follow: str | None) -> AsyncGenerator[httpx2.Response, None]:
        query = {name: value for name, value in (("after", cursor), ("follow", follow)) if value is not None}
        stream = self._client.http.stream(
            "GET",
            f"{self._client.url}{self._path}/events",
            params=query,
            headers={"accept": "text/event-stream"},
            timeout=httpx2.Timeout(_SILENCE_S, connect=5.0, pool=None),
        )
        async with AsyncExitStack() as stack:
            with connecting():
                response = await stack.enter_async_context(stream)
            yield response

    # ── Stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def interrupt(
        self, reason: str = "", *, run_id: str | None = None, grace_s: float | None = None
    ) -> StopReceipt:
        """See `SessionLike.interrupt`."""
        body = {"reason": reason, "run_id": run_id, "grace_s": grace_s}
        response = await self._client.request(
            "POST", f"{self._path}/interrupt", body=body, repeatable=run_id is not None, reply_s=_REPLY_S
        )
        return await self._stopped(response, StopReceipt)

    async def stop(self, reason: str = "", *, grace_s: float | None = None) -> SessionStop:
        """See `SessionLike.stop`."""
        body = {"reason": reason, "grace_s": grace_s}
        response = await self._client.request("POST", f"{self._path}/stop", body=body, reply_s=_REPLY_S)
        return await self._stopped(response, SessionStop)

    async def delete(self) -> SessionStop:
        """See `SessionLike.delete`."""
        response = await self._client.request("DELETE", self._path, reply_s=_REPLY_S)
        return await self._stopped(response, SessionStop)

    async def _stopped(self, response: httpx2.Response, kind: type[T]) -> T:
        """Poll for the result of a stop until it is available. Raises `WaitExpired` after ten minutes."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _STOP_S
        while response.status_code == 202:
            stop_id = decode(response, _Pending).stop_id
            if loop.time() > deadline:
                raise WaitExpired(
                    f"stop {stop_id} is still in progress after {_STOP_S:g} s", hint="see 'holdfast tree'"
                )
            await asyncio.sleep(_POLL_S)
            response = await self._client.request("GET", f"{self._path}/stops/{stop_id}", repeatable=True)
        return decode(response, kind)

    # ── Questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def questions(self) -> list[Question]:
        """See `SessionLike.questions`."""
        return (await self._client.read(f"{self._path}/approvals", _Questions)).questions

    async def answer(self, question: Question | str, text: str) -> Answer:
        """See `SessionLike.answer`."""
        return await self._decide(question, {"decision": "answer", "text": text})

    async def approve(self, question: Question | str, *, note: str = "", call_hash: str | None = None) -> Answer:
        """See `SessionLike.approve`. Sends the client's ``approval_key`` where one is required."""
        body: dict[str, object] = {"decision": "approve", "text": note, "call_hash": hash_of(question, call_hash)}
        if self._client.approval_key is not None:
            body["approval_key"] = self._client.approval_key
        return await self._decide(question, body)

    async def deny(self, question: Question | str, *, reason: str = "") -> Answer:
        """See `SessionLike.deny`."""
        return await self._decide(question, {"decision": "deny", "text": reason})

    async def _decide(self, question: Question | str, body: dict[str, object]) -> Answer:
        path = f"{self._path}/approvals/{segment(question_id_of(question))}"
        response = await self._client.request("POST", path, body=body, repeatable=True, reply_s=_REPLY_S)
        return decode(response, Answer)

    # ── Schedules ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedule(
        self,
        text: str,
        *,
        every_s: float | None = None,
        cron: str | None = None,
        timezone: str = "UTC",
        schedule_id: str | None = None,
        agent: str | None = None,
        overlap: Policy = "queue",
        miss: Miss = "skip",
        initial_delay_s: float | None = None,
        jitter_s: float = 0.0,
        max_runs: int | None = None,
    ) -> RemoteSchedule:
        """See `SessionLike.schedule`. Generates a missing `schedule_id`, so that a retry is safe."""
        check_seconds(every_s=every_s, initial_delay_s=initial_delay_s, jitter_s=jitter_s)  # JSON has no NaN
        schedule = RemoteSchedule(self._client, ids.schedule_id() if schedule_id is None else schedule_id)
        body: dict[str, object] = {"session": self.key, "text": text, "schedule_id": schedule.schedule_id}
        body |= {"timezone": timezone, "overlap": overlap, "miss": miss, "jitter_s": jitter_s}
        optional = {"every_s": every_s, "cron": cron, "agent": agent, "max_runs": max_runs}
        optional["initial_delay_s"] = initial_delay_s
        body.update((name, value) for name, value in optional.items() if value is not None)
        await self._client.request("POST", "/v1/schedules", body=body, repeatable=True)
        return schedule

    # ── Editing the transcript ───────────────────────────────────────────────────────────────────────────────────────

    async def retry(self) -> Receipt:
        """See `SessionLike.retry`."""
        return decode(await self._edit("retry"), Receipt)

    async def undo(self) -> list[Entry]:
        """See `SessionLike.undo`."""
        return decode(await self._edit("undo"), _Entries).entries

    async def compact(self, *, keep: int = 4) -> list[Entry]:
        """See `SessionLike.compact`. Waits up to ten minutes for the model."""
        return decode(await self._edit("compact", {"keep": keep}, reply_s=_STOP_S), _Entries).entries

    async def branch(self, key: str, *, through_n: int | None = None) -> SessionView:
        """See `SessionLike.branch`."""
        return decode(await self._edit("branch", {"key": key, "through_n": through_n}), SessionView)

    async def export(self) -> SessionExport:
        """See `SessionLike.export`."""
        return await self._client.read(f"{self._path}/export", SessionExport)

    async def import_history(self, export: SessionExport) -> SessionView:
        """See `SessionLike.import_history`."""
        body = msgspec.to_builtins(export)
        return decode(await self._edit("import", body), SessionView)

    async def _edit(
        self, action: str, body: dict[str, object] | None = None, *, reply_s: float = _REPLY_S
    ) -> httpx2.Response:
        """Post an edit. Never retried: a second one would edit the result of the first."""
        return await self._client.request("POST", f"{self._path}/{action}", body=body or {}, reply_s=reply_s)

    # ── Attachments ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def attach(self, body: bytes, *, media_type: str, name: str = "") -> Attachment:
        """See `SessionLike.attach`."""
        response = await self._client.upload("/v1/attachments", body, media_type=media_type, name=name)
        return decode(response, Attachment)

    async def attachment(self, digest: str) -> tuple[Attachment, bytes]:
        """See `SessionLike.attachment`."""
        path = f"/v1/attachments/{segment(digest)}"
        response = await self._client.request("GET", path, repeatable=True, reply_s=_REPLY_S)
        return described(digest, response), response.content

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def info(self) -> SessionView:
        """See `SessionLike.info`."""
        return await self._client.read(self._path, SessionView)

    async def transcript(self) -> list[Entry]:
        """See `SessionLike.transcript`."""
        entries: list[Entry] = []
        while True:
            query = {"after": str(entries[-1].n if entries else 0), "limit": str(_PAGE)}
            page = (await self._client.read(f"{self._path}/transcript", _Entries, query=query)).entries
            entries += page
            if len(page) < _PAGE:
                return entries

    async def mailbox(self) -> list[MailboxItem]:
        """See `SessionLike.mailbox`."""
        return (await self._client.read(f"{self._path}/mailbox", _Items)).items

    async def tree(self) -> TreeNode:
        """See `SessionLike.tree`."""
        return await self._client.read(f"{self._path}/tree", TreeNode)

    async def run(self, run_id: str) -> RunView:
        """See `SessionLike.run`."""
        return await self._client.read(f"{self._path}/runs/{segment(run_id)}", RunView)

    async def runs(self) -> list[RunView]:
        """See `SessionLike.runs`."""
        return (await self._client.read(f"{self._path}/runs", _Runs)).runs


def _ends(event: Event | Gap, follow: str | None) -> bool:
    """Whether the server ends the stream after this event."""
    if isinstance(event, MessageSettled):
        return event.message_id == follow
    return isinstance(event, SessionDeletedEvent)


class _Patience:
    """Reconnect timing of an event stream: growing pauses within the client's ``reconnect_s``."""

    __slots__ = ("_attempt", "_client", "_cut_at", "_spread")

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._spread = 0.75 + (zlib.crc32(key.encode()) % 1000) / 2000  # spreads the reconnects of many sessions
        self._attempt = 0
        self._cut_at: float | None = None

    def renew(self) -> None:
        """Record that the connection works."""
        if self._cut_at is not None:
            self._attempt = 0
            self._cut_at = None
            if self._client.on_back is not None:
                self._client.on_back()

    async def wait(self, failure: HoldfastError) -> None:
        """Pause before the next attempt. Raises `failure` once ``reconnect_s`` is over."""
        now = asyncio.get_running_loop().time()
        if self._cut_at is None:
            self._cut_at = now
            if self._client.on_cut is not None:
                self._client.on_cut(failure)
        delay_s = min(_MOST_DELAY_S, _FIRST_DELAY_S * 2**self._attempt) * self._spread
        self._attempt += 1
        if now - self._cut_at + delay_s > self._client.reconnect_s:
            raise failure
        await asyncio.sleep(delay_s)
