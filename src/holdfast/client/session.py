"""Implementation of `holdfast.protocol.session_api.SessionAPI` over HTTP."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from typing import TypeVar, Unpack

import httpx2
import msgspec

from holdfast import ids
from holdfast.client.schedules import RemoteSchedule
from holdfast.client.transport import Transport
from holdfast.client.wire import decode, described, error_of, refuse_unauthorized, segment, unreachable
from holdfast.errors import HoldfastError, InvalidKey, RateLimited, ServerUnreachable, Unavailable, WaitExpired
from holdfast.protocol.call_hash import hash_of, question_id_of
from holdfast.protocol.events import Event, Gap, MessageSettled, SessionDeletedEvent
from holdfast.protocol.http import (
    CompactBody,
    DecisionBody,
    ForkBody,
    GrantList,
    InterruptBody,
    Mailbox,
    NothingBody,
    QuestionList,
    RunList,
    ScheduleBody,
    SendBody,
    SendOutcome,
    StopBody,
    StopPending,
    Transcript,
)
from holdfast.protocol.messages import (
    Answer,
    Attachment,
    Entry,
    Grant,
    GrantScope,
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
)
from holdfast.protocol.schedules import ScheduleKeywords, ScheduleSpec
from holdfast.protocol.send_options import SendKeywords, SendOptions
from holdfast.protocol.session_api import answer
from holdfast.protocol.sse import FrameDecoder
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES
from holdfast.protocol.stopping import StopReceipt

__all__ = ["RemoteSession"]

T = TypeVar("T")

_WAIT_S = 25.0
_STOP_S = 600.0
_POLL_S = 0.25
_PAGE = 1000
_REPLY_S = 60.0
_FIRST_DELAY_S = 0.1
_MOST_DELAY_S = 5.0


_frame: msgspec.json.Decoder[Event | Gap] = msgspec.json.Decoder(Event | Gap)


class RemoteSession:
    """Handle to a session on a server, returned by `Client.session`.

    Cancelling a method call ends only the wait for the response; the server continues the work.
    """

    __slots__ = ("_path", "_transport", "key")

    def __init__(self, transport: Transport, key: str) -> None:
        self._transport = transport
        if not key:
            raise InvalidKey("'' is not a session key")
        self._path = f"/v1/sessions/{segment(key)}"
        self.key = key

    def __repr__(self) -> str:
        return f"<RemoteSession {self.key!r} at {self._transport.url}>"

    # ── Messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def send(self, content: str, **options: Unpack[SendKeywords]) -> Receipt:
        """See `SessionAPI.send`. If `idempotency_key` is omitted, a key is generated, so that a retry is safe."""
        return decode(await self._post_message(content, SendOptions(**options)), Receipt)

    async def ask(self, content: str, *, timeout_s: float | None = None, **options: Unpack[SendKeywords]) -> str:
        """See `SessionAPI.ask`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        wait_s = _WAIT_S if timeout_s is None else max(0.0, min(_WAIT_S, timeout_s))
        response = await self._post_message(content, SendOptions(**options), wait_s=wait_s)
        if response.status_code == 200:
            outcome = decode(response, SendOutcome)
            if outcome.status == "completed":
                return outcome.text
            return answer(await self.message(outcome.receipt.message_id))
        receipt = decode(response, Receipt)
        return answer(await self._wait(receipt.message_id, timeout_s, deadline))

    async def _post_message(
        self, content: str, options: SendOptions, *, wait_s: float | None = None
    ) -> httpx2.Response:
        if options.idempotency_key is None:
            options = msgspec.structs.replace(options, idempotency_key=ids.message_id())
        return await self._transport.request(
            "POST",
            f"{self._path}/messages",
            body=SendBody.of(content, options),
            query={} if wait_s is None else {"wait": f"{wait_s:.3f}"},
            repeatable=True,
            reply_s=(wait_s or 0.0) + 30.0,
        )

    async def wait(self, message_id: str, *, timeout_s: float | None = None) -> Settlement:
        """See `SessionAPI.wait`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        return await self._wait(message_id, timeout_s, deadline)

    async def _wait(self, message_id: str, timeout_s: float | None, deadline: float | None) -> Settlement:
        loop = asyncio.get_running_loop()
        path = f"{self._path}/messages/{segment(message_id)}"
        while True:
            wait_s = _WAIT_S if deadline is None else max(0.0, min(_WAIT_S, deadline - loop.time()))
            response = await self._transport.request(
                "GET", path, query={"wait": f"{wait_s:.3f}"}, repeatable=True, reply_s=wait_s + 30.0
            )
            settlement = decode(response, Settlement)
            if settlement.state in TERMINAL_MESSAGE_STATES:
                return settlement
            if deadline is not None and loop.time() >= deadline:
                raise WaitExpired(f"the message is not settled after {timeout_s:g} s")
            await asyncio.sleep(0 if wait_s else _POLL_S)

    async def withdraw(self, message_id: str) -> Settlement:
        """See `SessionAPI.withdraw`."""
        path = f"{self._path}/messages/{segment(message_id)}"
        return decode(await self._transport.request("DELETE", path, repeatable=True), Settlement)

    async def message(self, message_id: str) -> Settlement:
        """See `SessionAPI.message`."""
        return await self._transport.read(f"{self._path}/messages/{segment(message_id)}", Settlement)

    # ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def events(self, *, after: str | None = None, follow: str | None = None) -> AsyncGenerator[Event | Gap, None]:
        """See `SessionAPI.events`. Reconnects automatically, without losing or repeating events.

        Raises:
            ServerUnreachable: if no reconnect succeeded within the transport's ``reconnect_s``.
            Unauthenticated: if the key was revoked or the token has expired.
        """
        cursor = after
        reconnect = _Reconnect(self._transport, self.key)
        while True:
            closed = False
            query = {name: value for name, value in (("after", cursor), ("follow", follow)) if value is not None}
            try:
                async with self._transport.stream(f"{self._path}/events", query=query) as response:
                    if response.status_code != 200:
                        await response.aread()
                        raise error_of(response)
                    decoder = FrameDecoder()
                    async for chunk in response.aiter_raw():
                        reconnect.renew()
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
                failure: HoldfastError = ServerUnreachable(
                    f"{self._transport.url} ended the stream: it is shutting down"
                )
            except httpx2.TransportError as error:
                failure = unreachable(self._transport.url, error)
            except (Unavailable, RateLimited) as error:
                failure = error
            await reconnect.wait(failure)

    # ── Stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def interrupt(
        self, reason: str = "", *, run_id: str | None = None, grace_s: float | None = None
    ) -> StopReceipt:
        """See `SessionAPI.interrupt`."""
        body = InterruptBody(reason=reason, run_id=run_id, grace_s=grace_s)
        response = await self._transport.request(
            "POST", f"{self._path}/interrupt", body=body, repeatable=run_id is not None, reply_s=_REPLY_S
        )
        return await self._stopped(response, StopReceipt)

    async def stop(self, reason: str = "", *, grace_s: float | None = None) -> SessionStop:
        """See `SessionAPI.stop`."""
        body = StopBody(reason=reason, grace_s=grace_s)
        response = await self._transport.request("POST", f"{self._path}/stop", body=body, reply_s=_REPLY_S)
        return await self._stopped(response, SessionStop)

    async def delete(self) -> SessionStop:
        """See `SessionAPI.delete`."""
        response = await self._transport.request("DELETE", self._path, reply_s=_REPLY_S)
        return await self._stopped(response, SessionStop)

    async def _stopped(self, response: httpx2.Response, kind: type[T]) -> T:
        """Poll until the result of a stop is available, and return the result.

        Raises `WaitExpired` if the result is not available after ten minutes.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _STOP_S
        while response.status_code == 202:
            stop_id = decode(response, StopPending).stop_id
            if loop.time() > deadline:
                raise WaitExpired(
                    f"stop {stop_id} is still in progress after {_STOP_S:g} s", hint="tree() shows what still runs"
                )
            await asyncio.sleep(_POLL_S)
            response = await self._transport.request("GET", f"{self._path}/stops/{stop_id}", repeatable=True)
        return decode(response, kind)

    # ── Questions ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def questions(self) -> list[Question]:
        """See `SessionAPI.questions`."""
        return (await self._transport.read(f"{self._path}/approvals", QuestionList)).questions

    async def answer(self, question: Question | str, text: str) -> Answer:
        """See `SessionAPI.answer`."""
        return await self._decide(question, DecisionBody(decision="answer", text=text))

    async def approve(
        self,
        question: Question | str,
        *,
        note: str = "",
        call_hash: str | None = None,
        scope: GrantScope = "call",
    ) -> Answer:
        """See `SessionAPI.approve`. If the client's ``approval_key`` is set, it is sent with the approval."""
        body = DecisionBody(
            decision="approve",
            text=note,
            call_hash=hash_of(question, call_hash),
            scope=scope,
            approval_key=self._transport.approval_key or "",
        )
        return await self._decide(question, body)

    async def deny(self, question: Question | str, *, reason: str = "") -> Answer:
        """See `SessionAPI.deny`."""
        return await self._decide(question, DecisionBody(decision="deny", text=reason))

    async def _decide(self, question: Question | str, body: DecisionBody) -> Answer:
        path = f"{self._path}/approvals/{segment(question_id_of(question))}"
        response = await self._transport.request("POST", path, body=body, repeatable=True, reply_s=_REPLY_S)
        return decode(response, Answer)

    async def grants(self) -> list[Grant]:
        """See `SessionAPI.grants`."""
        return (await self._transport.read("/v1/grants", GrantList, query={"session": self.key})).grants

    # ── Schedules ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedule(
        self, text: str, *, schedule_id: str | None = None, **spec: Unpack[ScheduleKeywords]
    ) -> RemoteSchedule:
        """See `SessionAPI.schedule`. If `schedule_id` is omitted, an id is generated, so that a retry is safe."""
        checked = ScheduleSpec(session=self.key, text=text, **spec)
        check_seconds(every_s=checked.every_s, initial_delay_s=checked.initial_delay_s, jitter_s=checked.jitter_s)
        schedule = RemoteSchedule(self._transport, ids.schedule_id() if schedule_id is None else schedule_id)
        body = ScheduleBody.of(checked, schedule.schedule_id)
        await self._transport.request("POST", "/v1/schedules", body=body, repeatable=True)
        return schedule

    # ── Editing the transcript ───────────────────────────────────────────────────────────────────────────────────────

    async def retry(self) -> Receipt:
        """See `SessionAPI.retry`."""
        return decode(await self._edit("retry", NothingBody()), Receipt)

    async def undo(self) -> list[Entry]:
        """See `SessionAPI.undo`."""
        return decode(await self._edit("undo", NothingBody()), Transcript).entries

    async def compact(self, *, keep: int = 4) -> list[Entry]:
        """See `SessionAPI.compact`. Waits up to ten minutes for the server's response."""
        return decode(await self._edit("compact", CompactBody(keep=keep), reply_s=_STOP_S), Transcript).entries

    async def fork(self, key: str, *, through_n: int | None = None) -> SessionView:
        """See `SessionAPI.fork`."""
        return decode(await self._edit("fork", ForkBody(key=key, through_n=through_n)), SessionView)

    async def export(self) -> SessionExport:
        """See `SessionAPI.export`."""
        return await self._transport.read(f"{self._path}/export", SessionExport)

    async def import_history(self, export: SessionExport) -> SessionView:
        """See `SessionAPI.import_history`."""
        return decode(await self._edit("import", export), SessionView)

    async def _edit(self, action: str, body: msgspec.Struct, *, reply_s: float = _REPLY_S) -> httpx2.Response:
        """Post an edit of the transcript. Never retried, because a second edit would change the result of the first."""
        return await self._transport.request("POST", f"{self._path}/{action}", body=body, reply_s=reply_s)

    # ── Attachments ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def attach(self, body: bytes, *, media_type: str, name: str = "") -> Attachment:
        """See `SessionAPI.attach`."""
        response = await self._transport.upload("/v1/attachments", body, media_type=media_type, name=name)
        return decode(response, Attachment)

    async def attachment(self, digest: str) -> tuple[Attachment, bytes]:
        """See `SessionAPI.attachment`."""
        path = f"/v1/attachments/{segment(digest)}"
        response = await self._transport.request("GET", path, repeatable=True, reply_s=_REPLY_S)
        return described(digest, response), response.content

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def info(self) -> SessionView:
        """See `SessionAPI.info`."""
        return await self._transport.read(self._path, SessionView)

    async def transcript(self) -> list[Entry]:
        """See `SessionAPI.transcript`."""
        entries: list[Entry] = []
        while True:
            query = {"after": str(entries[-1].n if entries else 0), "limit": str(_PAGE)}
            page = (await self._transport.read(f"{self._path}/transcript", Transcript, query=query)).entries
            entries += page
            if len(page) < _PAGE:
                return entries

    async def mailbox(self) -> list[MailboxItem]:
        """See `SessionAPI.mailbox`."""
        return (await self._transport.read(f"{self._path}/mailbox", Mailbox)).items

    async def tree(self) -> TreeNode:
        """See `SessionAPI.tree`."""
        return await self._transport.read(f"{self._path}/tree", TreeNode)

    async def run(self, run_id: str) -> RunView:
        """See `SessionAPI.run`."""
        return await self._transport.read(f"{self._path}/runs/{segment(run_id)}", RunView)

    async def runs(self) -> list[RunView]:
        """See `SessionAPI.runs`."""
        return (await self._transport.read(f"{self._path}/runs", RunList)).runs


def _ends(event: Event | Gap, follow: str | None) -> bool:
    """Return whether the server ends the event stream after `event`."""
    if isinstance(event, MessageSettled):
        return event.message_id == follow
    return isinstance(event, SessionDeletedEvent)


class _Reconnect:
    """Exponential backoff between reconnects of an event stream, limited by the transport's ``reconnect_s``."""

    __slots__ = ("_attempt", "_cut_at", "_spread", "_transport")

    def __init__(self, transport: Transport, key: str) -> None:
        self._transport = transport
        self._spread = 0.75 + (zlib.crc32(key.encode()) % 1000) / 2000  # spreads the reconnects of many sessions
        self._attempt = 0
        self._cut_at: float | None = None

    def renew(self) -> None:
        """Reset the backoff, because the connection has delivered data."""
        if self._cut_at is not None:
            self._attempt = 0
            self._cut_at = None
            if self._transport.on_back is not None:
                self._transport.on_back()

    async def wait(self, failure: HoldfastError) -> None:
        """Pause before the next attempt, for at least as long as the server asks.

        Raises `failure` if the pause would exceed ``reconnect_s``.
        """
        now = asyncio.get_running_loop().time()
        if self._cut_at is None:
            self._cut_at = now
            if self._transport.on_cut is not None:
                self._transport.on_cut(failure)
        delay_s = min(_MOST_DELAY_S, _FIRST_DELAY_S * 2**self._attempt) * self._spread
        delay_s = max(delay_s, failure.retry_after_s or 0.0)
        self._attempt += 1
        if now - self._cut_at + delay_s > self._transport.reconnect_s:
            raise failure
        await asyncio.sleep(delay_s)
