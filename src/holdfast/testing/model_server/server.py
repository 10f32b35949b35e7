"""HTTP server that answers each request from a script, and records how the answer ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from holdfast.errors import format_error
from holdfast.protocol.messages import Usage
from holdfast.protocol.model import CallPart, EndPart, ModelRequest, Part, ReasoningPart, TextPart
from holdfast.testing.model_server.wires import ChatWire, MessagesWire, ResponsesWire, WireFormat

if TYPE_CHECKING:
    from types import TracebackType

    from holdfast.agents.model import Model

__all__ = ["Exchange", "ModelServer", "Reply", "Script"]

Fault = Literal["cut", "short", "garbage", "error", "stall"]

_WIRES: dict[str, type[WireFormat]] = {
    "/v1/chat/completions": ChatWire,
    "/v1/responses": ResponsesWire,
    "/v1/messages": MessagesWire,
}
_USAGE = Usage(input_tokens=10, output_tokens=5)
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 429: "Too Many Requests"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of a script.

    Parameters:
        text, reasoning: texts of the answer and of the reasoning that precedes it.
        calls: name and arguments of each requested call. Arguments given as text are sent unchanged, even if they are
            not JSON.
        reason: finish reason; ``stop`` is sent as ``calls`` if there are calls.
        usage: token counts to report.
        piece: maximum number of characters in a piece of text.
        pace_s: delay before each piece, in seconds.
        headers_s: delay before the status line, in seconds; with `math.inf`, the status line is never sent.
        status: HTTP status; with a status other than 200, the answer is an error with `message`.
        message: text of the error.
        retry_after_s: value of an error's ``Retry-After`` header, in seconds; None omits the header.
        fault: fault to inject after `after` pieces; None sends the complete answer. ``cut`` breaks the connection,
            ``short`` ends the answer early but as valid HTTP, ``garbage`` sends invalid JSON, ``error`` sends an error
            inside the stream, and ``stall`` stops sending.
        after: number of complete pieces to send before the fault.
    """

    text: str = ""
    reasoning: str = ""
    calls: Sequence[tuple[str, dict[str, Any] | str]] = ()
    reason: Literal["stop", "length", "calls", "refused", "other"] = "stop"
    usage: Usage = _USAGE
    piece: int = 8
    pace_s: float = 0.0
    headers_s: float = 0.0
    status: int = 200
    message: str = "scripted error"
    retry_after_s: float | None = None
    fault: Fault | None = None
    after: int = 1

    def parts(self) -> Iterator[Part]:
        """Yield the answer in pieces."""
        for at in range(0, len(self.reasoning), self.piece):
            yield ReasoningPart(text=self.reasoning[at : at + self.piece])
        for at in range(0, len(self.text), self.piece):
            yield TextPart(text=self.text[at : at + self.piece])
        for name, arguments in self.calls:
            yield CallPart(name=name, arguments=arguments)
        yield EndPart(usage=self.usage, reason=self.reason)


Script: TypeAlias = "Sequence[Reply] | Callable[[ModelRequest], Reply] | Model"


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, and how its answer ended. Times are in seconds, from ``loop.time()`` of the server's event loop.

    Parameters:
        path, headers, body: path, headers and decoded JSON body of the request.
        connection: number of the connection that carried the request, counted from 1.
        opened_at: time at which the request was complete.
        headers_sent: whether the status line was sent.
        pieces: number of pieces of the answer sent so far.
        ended: how the answer ended: ``whole``, ``faulty`` (with the scripted fault) or ``closed`` (the client closed
            the connection first). None means that the answer is in progress.
        ended_at: time at which the answer ended; 0 while the answer is in progress.
    """

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    connection: int
    opened_at: float
    headers_sent: bool = False
    pieces: int = 0
    ended: Literal["whole", "faulty", "closed"] | None = None
    ended_at: float = 0.0
    _watchers: list[asyncio.Future[None]] = field(default_factory=list)

    async def until(self, *, pieces: int = 0, ended: bool = False, limit_s: float = 10.0) -> None:
        """Wait until `pieces` pieces were sent or, if `ended` is true, until the answer has ended.

        Raises:
            TimeoutError: if this takes longer than `limit_s`.
        """
        async with asyncio.timeout(limit_s):
            while self.ended is None if ended else self.pieces < pieces:
                await _next_change(self._watchers)

    def _end(self, how: Literal["whole", "faulty", "closed"]) -> None:
        if self.ended is None:
            self.ended, self.ended_at = how, asyncio.get_running_loop().time()
            _changed(self._watchers)

    def _sent(self) -> None:
        self.pieces += 1
        _changed(self._watchers)


class ModelServer:
    """A model provider that answers from a script. The server runs within an ``async with ModelServer(…)`` block.

    Parameters:
        script: a sequence of replies, one for each request (requests after the last reply fail with status 500), a
            function that takes the request and returns a reply, or a `Model` whose answers are forwarded.
        key: the API key that requests must have; None accepts any key.
        host, port: address to listen on; port 0 picks a free port.
    """

    def __init__(self, script: Script, *, key: str | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self._script = script
        self._given = 0
        self._host = host
        self._port = port
        self._connections: set[_Connection] = set()
        self._watchers: list[asyncio.Future[None]] = []
        self._server: asyncio.Server | None = None
        self.key = key
        self.opened = 0
        """Number of connections made so far."""
        self.exchanges: list[Exchange] = []
        """All requests so far, oldest first."""

    async def __aenter__(self) -> ModelServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [connection.drop() for connection in list(self._connections)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """Base URL, without a path."""
        return f"http://{self._host}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make ``openai:…`` and ``anthropic:…`` models use this server."""
        key = self.key or "any"
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": key,
        }

    @property
    def connected(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def requests(self, count: int, *, limit_s: float = 10.0) -> Exchange:
        """Wait for the `count`-th request and return it. Raise `TimeoutError` after `limit_s` seconds."""
        async with asyncio.timeout(limit_s):
            while len(self.exchanges) < count:
                await _next_change(self._watchers)
        return self.exchanges[count - 1]

    async def disconnected(self, *, limit_s: float = 10.0) -> None:
        """Wait until no connection is open. Raise `TimeoutError` after `limit_s` seconds."""
        async with asyncio.timeout(limit_s):
            while self._connections:
                await _next_change(self._watchers)

    def _connected(self, connection: _Connection) -> int:
        self._connections.add(connection)
        self.opened += 1
        return self.opened

    def _disconnected(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        _changed(self._watchers)

    def _received(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        _changed(self._watchers)

    def _answer(self, request: ModelRequest) -> Reply | AsyncIterator[Part]:
        script = self._script
        if not isinstance(script, Sequence):
            if not callable(script):
                return _parts_of(script, request)
            try:
                return script(request)
            except Exception as error:
                return Reply(status=500, message=f"the script raised {format_error(error)}")
        if self._given == len(script):
            return Reply(status=500, message=f"the script has {self._given} replies, and all were given")
        self._given += 1
        return script[self._given - 1]


async def _parts_of(model: Model, request: ModelRequest) -> AsyncIterator[Part]:
    async with model.stream(request) as parts:
        async for part in parts:
            yield part


class _Connection(asyncio.Protocol):
    """One connection, whose task answers the requests one after the other and ends with the connection."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._more: asyncio.Future[None] | None = None
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    # ── events of the transport ──────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._number = self._server._connected(self)
        self._task = asyncio.get_running_loop().create_task(self._serve(transport))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    def eof_received(self) -> bool:
        self._gone()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
        self._server._disconnected(self)

    def _gone(self) -> None:
        if self._exchange is not None:
            self._exchange._end("closed")
        if self._task is not None:
            self._task.cancel()

    def drop(self) -> asyncio.Task[None]:
        """Abort the connection, cancel the connection's task, and return this task."""
        assert self._transport is not None and self._task is not None
        self._task.cancel()
        self._transport.abort()
        return self._task

    # ── the requests ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, transport: asyncio.Transport) -> None:
        try:
            while True:
                while (end := self._buffer.find(b"\r\n\r\n")) < 0:
                    await self._receive()
                head = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
                method, path = head[0].split(" ")[:2]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
                length = int(headers.get("content-length", "0"))
                while len(self._buffer) < end + 4 + length:
                    await self._receive()
                content = bytes(self._buffer[end + 4 : end + 4 + length])
                del self._buffer[: end + 4 + length]
                await self._handle(transport, method, path.partition("?")[0], headers, content)
        finally:
            transport.close()

    async def _receive(self) -> None:
        self._more = asyncio.get_running_loop().create_future()
        await self._more

    async def _handle(
        self, transport: asyncio.Transport, method: str, path: str, headers: dict[str, str], content: bytes
    ) -> None:
        kind = _WIRES.get(path)
        if kind is None or method != "POST":
            self._refuse(transport, ChatWire, 404, f"no such route: {method} {path}; use {', '.join(_WIRES)}")
            return
        try:
            body = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            self._refuse(transport, kind, 400, f"the body is not a JSON object: {error}")
            return
        now = asyncio.get_running_loop().time()
        exchange = Exchange(path=path, headers=headers, body=body, connection=self._number, opened_at=now)
        self._exchange = exchange
        self._server._received(exchange)
        wire = kind(body, len(self._server.exchanges))
        if self._server.key is not None and wire.key_of(headers) != self._server.key:
            self._refuse(transport, kind, 401, "Incorrect API key provided")
        elif (objection := wire.objection()) is not None:
            self._refuse(transport, kind, 400, objection)
        else:
            answer = self._server._answer(wire.request())
            if isinstance(answer, Reply):
                await self._reply(transport, exchange, wire, answer)
            else:
                await self._pass_on(transport, exchange, wire, answer)
        exchange._end("whole")
        self._exchange = None

    def _refuse(
        self, transport: asyncio.Transport, wire: type[WireFormat], status: int, message: str, more: str = ""
    ) -> None:
        body = wire.error(status, message)
        head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\ncontent-type: application/json\r\n{more}"
        transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def _pass_on(
        self, transport: asyncio.Transport, exchange: Exchange, wire: WireFormat, parts: AsyncIterator[Part]
    ) -> None:
        self._begin(transport, exchange, wire)
        try:
            async for part in parts:
                _write_chunk(transport, wire.part(part))
                exchange._sent()
        except Exception as error:
            _write_chunk(transport, wire.broken(f"the model raised {format_error(error)}"))
        transport.write(b"0\r\n\r\n")

    async def _reply(self, transport: asyncio.Transport, exchange: Exchange, wire: WireFormat, reply: Reply) -> None:
        await _pause(reply.headers_s)
        if reply.status != 200:
            more = "" if reply.retry_after_s is None else f"retry-after: {reply.retry_after_s:g}\r\n"
            self._refuse(transport, type(wire), reply.status, reply.message, more)
            return
        self._begin(transport, exchange, wire)
        for n, part in enumerate(reply.parts()):
            if n == reply.after and reply.fault is not None:
                await self._fail(transport, exchange, wire, reply.fault)
                return
            await _pause(reply.pace_s)
            _write_chunk(transport, wire.part(part))
            exchange._sent()
        transport.write(b"0\r\n\r\n")

    def _begin(self, transport: asyncio.Transport, exchange: Exchange, wire: WireFormat) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        transport.write(head)
        exchange.headers_sent = True
        _write_chunk(transport, wire.start())

    async def _fail(self, transport: asyncio.Transport, exchange: Exchange, wire: WireFormat, fault: Fault) -> None:
        match fault:
            case "stall":
                await _pause(math.inf)
            case "cut":
                exchange._end("faulty")
                transport.write(b'40\r\ndata: {"id": "cut he')
                transport.close()
                await _pause(math.inf)  # until the connection is lost
            case "garbage":
                _write_chunk(transport, b"data: {\xff\xfe this is not JSON\n\ndata: [DONE]\n\n")
            case "error":
                _write_chunk(transport, wire.broken("the provider broke down in the middle"))
            case "short":
                pass
        exchange._end("faulty")
        transport.write(b"0\r\n\r\n")


def _write_chunk(transport: asyncio.Transport, data: bytes) -> None:
    transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def _pause(seconds: float) -> None:
    if seconds == math.inf:
        await asyncio.get_running_loop().create_future()
    elif seconds > 0:
        await asyncio.sleep(seconds)


async def _next_change(watchers: list[asyncio.Future[None]]) -> None:
    change = asyncio.get_running_loop().create_future()
    watchers.append(change)
    try:
        await change
    finally:
        watchers.remove(change)


def _changed(watchers: list[asyncio.Future[None]]) -> None:
    for change in watchers:
        if not change.done():
            change.set_result(None)
