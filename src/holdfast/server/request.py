"""HTTP requests to the API, on raw ASGI without a framework.

A handler is called with a `Request`, and returns a `Response` or raises a `HoldfastError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from holdfast.errors import BodyTooLarge, InvalidRequest, MalformedBody, UnsupportedMediaType
from holdfast.host.budgets import FREE_BYTES, Budgets
from holdfast.server.caller import Caller
from holdfast.server.connections import CONNECTION
from holdfast.server.credentials import CredentialUse
from holdfast.server.delivery import PIECE_BYTES, TAKEN_PER_S, Receive, ResponseDelivery, Scope, Send
from holdfast.server.response import JSON_HEADERS, Headers, Response, send_response
from holdfast.settings import Settings

__all__ = ["Request"]

T = TypeVar("T")

_UNSENT_EVERY_S = 0.01
_PLAIN_BYTES = 1_000_000
_MOST_OPENED = 100_000
_MOST_COMMAS = 1_000_000
_JSON_FIELDS = b"".join([b"%s: %s\r\n" % field for field in JSON_HEADERS]) + b"content-length: %d\r\n"


class ConnectionWriter(Protocol):
    """Interface of the connection on which a request arrived; its methods never wait."""

    on_lost: Callable[[], object] | None
    """Callback for a client that disconnects while a request is in progress, called without arguments."""

    def take_body(self) -> bytes | None:
        """Return the request's body if all of it has arrived; otherwise return None."""
        ...

    def answer_now(self, status: int, fields: bytes, body: bytes) -> bool:
        """Write the whole response. Return False, without writing, if the response cannot be written immediately."""
        ...

    def write_part(self, data: bytes) -> bool:
        """Write a part of a response body. Return False, without writing, if it cannot be written immediately."""
        ...

    def unsent(self) -> int:
        """Return the number of written bytes that are still unsent or, on Linux, unacknowledged by the client."""
        ...


class Request(ResponseDelivery):
    """A request to the API. Use it only in the task that handles the request.

    The attribute ``started`` is True once the handler has begun to write the response.

    Parameters:
        scope, receive, send: arguments of the ASGI application.
        headers: headers of the request, with names in lower case.
        caller: authenticated caller.
        settings: settings of the server, which contain its limits.
        path: decoded values of the path's placeholders, by name.
        extra: headers to add to the response.
        use: registration of the request under the caller's credential.
        agents: names of the agents that the caller may use; None if the caller may use all agents.
        budgets: budgets of the host; `release` releases the charges of the request.
    """

    __slots__ = (
        "_query",
        "agents",
        "caller",
        "connection",
        "extra",
        "headers",
        "path",
        "receive",
        "use",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        headers: Mapping[bytes, bytes],
        caller: Caller,
        settings: Settings,
        path: Mapping[str, str],
        use: CredentialUse,
        agents: frozenset[str] | None,
        budgets: Budgets,
        extra: Headers = (),
    ) -> None:
        super().__init__(scope, send, principal=caller.principal, budgets=budgets, settings=settings)
        self.use = use
        self.connection: ConnectionWriter | None = scope.get(CONNECTION)
        self.agents = agents
        self.receive = receive
        self.headers = headers
        self.caller = caller
        self.path = path
        self.extra = extra
        self._query: Mapping[str, str] | None = None

    def query(self, name: str) -> str | None:
        """Return the value of a query parameter; None if the parameter is missing or empty.

        Raises:
            InvalidRequest: if the query string is invalid or not UTF-8, or if a parameter is repeated.
        """
        return self._parameters().get(name) or None

    def _parameters(self) -> Mapping[str, str]:
        if self._query is None:
            self._query = _parse_query(self.scope["query_string"])
        return self._query

    def check_query(self, names: tuple[str, ...]) -> None:
        """Raise `InvalidRequest` if the query contains a parameter that is not in `names`."""
        if not self.scope["query_string"]:
            return
        for name in self._parameters():
            if name not in names:
                hint = f"use {', '.join(names)}" if names else "this route takes no parameters"
                raise InvalidRequest(f"unknown parameter {name!r} in the query", hint=hint)

    async def read_json(
        self, decoder: msgspec.json.Decoder[T], *, optional: bool = False, limit_bytes: int | None = None
    ) -> T:
        """Read and decode the JSON body.

        Parameters:
            decoder: decoder for the type of the body.
            optional: whether to decode a missing body as an empty object.
            limit_bytes: maximum size of the body in bytes; None applies the setting ``body_limit_bytes``.

        Raises:
            UnsupportedMediaType: if the content type is not JSON.
            BodyTooLarge: if the body exceeds the limit, or if a large body may contain too many values, which would
                take far more memory than the body itself.
            MalformedBody: if the body is not JSON, or if it is nested too deeply.
            InvalidRequest: if the JSON does not match the type, or if the body did not arrive in time.
            BudgetExceeded, HostBusy: if no memory for a large body became available in time.
        """
        raw = await self._read(limit_bytes)
        if len(raw) > _PLAIN_BYTES:
            _check_values(raw)
        media_type = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"application/json":
            given = media_type.decode("latin-1") or "missing"
            raise UnsupportedMediaType(f"the content type is {given}")
        if not raw and optional:
            raw = b"{}"
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f"invalid request body: {error}", hint="see GET /openapi.json for the expected fields"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedBody(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise MalformedBody("the body is nested too deeply", hint="send a flat JSON object") from None

    async def read_bytes(self, *, limit_bytes: int) -> bytes | bytearray:
        """Read and return the raw body.

        Parameters:
            limit_bytes: maximum size of the body in bytes.

        Raises:
            BodyTooLarge: if the body exceeds the limit.
            InvalidRequest: if the body did not arrive in time.
            BudgetExceeded, HostBusy: if no memory for a large body became available in time.
        """
        return await self._read(limit_bytes)

    async def respond(self, response: Response) -> None:
        """Write a complete response. A large body is written in chunks, and its memory is charged to the principal.

        Raises as `ResponseDelivery.send`.
        """
        if len(response.body) > FREE_BYTES:
            await self.charge_memory(len(response.body), in_memory=True)
            await self.begin(response.status, response.all_headers(self.extra))
            await self.write(response.body)
            await self.write(b"\n")
            await self.end()
            return
        self.started = True
        plain = not (response.headers or self.extra)
        if self.connection is not None and plain:
            line = response.line()
            if self.connection.answer_now(response.status, _JSON_FIELDS % len(line), line):
                return
        await send_response(self.send, response, extra=self.extra)

    def write_now(self, data: bytes) -> bool:
        """Write a part of the response body if this is possible without waiting, and return whether it was written.

        If the result is False, nothing was written, because earlier data is still unread or `data` is large. The
        caller must then use `write`.
        """
        connection = self.connection
        if connection is None or len(data) > PIECE_BYTES or not data or not connection.write_part(data):
            return False
        self.took(len(data))
        return True

    async def all_sent(self) -> None:
        """Wait until the client has acknowledged all written data."""
        while self.connection is not None and self.connection.unsent():  # noqa: ASYNC110 - the kernel sends no event
            await asyncio.sleep(_UNSENT_EVERY_S)

    async def begin_json(self) -> None:
        """Write the head of a JSON response with status 200 and no known length. Raises as `ResponseDelivery.put`."""
        await self.begin(200, [*JSON_HEADERS, *self.extra])

    async def _read(self, limit_bytes: int | None) -> bytes | bytearray:
        """Read the body, and charge the memory of a large body.

        The timeout is ``body_timeout_s`` for each megabyte of the size limit.
        """
        usual = self.settings.body_limit_bytes
        limit = usual if limit_bytes is None else limit_bytes
        within_s = self.settings.body_timeout_s * max(1, limit // 1_000_000)
        too_large = f"the body is larger than {limit:,} bytes"
        setting = "body_limit_bytes" if limit_bytes is None else "attachment_limit_bytes"
        hint = f"send less, or raise the server's setting {setting} (HOLDFAST_{setting.upper()})"
        length = self.headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            raise BodyTooLarge(too_large, hint=hint)
        charge = await self.charge_memory(2 * int(length)) if int(length) > FREE_BYTES else None
        here = self.connection.take_body() if self.connection is not None and charge is None else None
        if here is not None:
            if len(here) > limit:
                raise BodyTooLarge(too_large, hint=hint)
            return here
        try:
            async with asyncio.timeout(within_s):
                message = await self.receive()
                body: bytes = message.get("body", b"")
                if not message.get("more_body"):
                    if len(body) > limit:
                        raise BodyTooLarge(too_large, hint=hint)
                    return body
                whole = bytearray(body)
                while message.get("more_body"):
                    if len(whole) > limit:
                        raise BodyTooLarge(too_large, hint=hint)
                    if len(whole) > FREE_BYTES and (charge is None or len(whole) > charge.amount):
                        charge = charge or await self.charge_memory(FREE_BYTES)  # it has no content-length
                        room = self.budgets.memory.share - charge.amount
                        charge.grow(min(room, len(whole) - charge.amount + FREE_BYTES))
                    message = await self.receive()
                    whole += message.get("body", b"")
        except TimeoutError:
            raise InvalidRequest(
                f"the body did not arrive within {within_s:g} s", hint="send it without pauses"
            ) from None
        if len(whole) > limit:
            raise BodyTooLarge(too_large, hint=hint)
        if len(whole) > FREE_BYTES:
            await self.budgets.loop_time.turn(self.principal, len(whole) / TAKEN_PER_S)
        return whole


def _check_values(raw: bytes | bytearray) -> None:
    """Raise `BodyTooLarge` if a large body may contain too many values.

    The number of values is estimated by counting the characters ``{``, ``[`` and ``,``, even within strings.
    """
    for marks, most in (((b"{", b"["), _MOST_OPENED), ((b",",), _MOST_COMMAS)):
        count = sum(raw.count(mark) for mark in marks)
        if count > most:
            told = " and ".join(mark.decode() for mark in marks)
            raise BodyTooLarge(
                f"the body has {count:,} of the characters {told}, more than the {most:,} allowed",
                hint="split it, for example into several sessions",
            )


@lru_cache(maxsize=256)
def _parse_query(raw: bytes) -> Mapping[str, str]:
    """Parse a query string. Raises `InvalidRequest` if the query string is invalid.

    Results are cached, because the same few queries recur.
    """
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=20)
    except ValueError as error:
        raise InvalidRequest(f"invalid query: {error}", hint="encode it as UTF-8") from None
    parameters = dict(pairs)
    if len(parameters) < len(pairs):
        raise InvalidRequest("a query parameter is repeated", hint="send each one once")
    return parameters
