"""Complete API responses, and functions that send them as ASGI messages."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

import msgspec

from holdfast.server.delivery import Receive, Send

__all__ = ["JSON_HEADERS", "Headers", "Response", "encode", "send_refusal", "send_response"]

Headers = tuple[tuple[bytes, bytes], ...]

encode = msgspec.json.Encoder().encode
"""Encode a value as JSON."""

JSON_HEADERS: Headers = (
    (b"content-type", b"application/json"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
)
_LINGER_S = 1.0


class Response(NamedTuple):
    """A complete API response, with its status, its JSON value and its headers in addition to `JSON_HEADERS`."""

    status: int
    body: bytes
    headers: Headers = ()

    def line(self) -> bytes:
        """Return the body to write: the JSON value and a line break, so that a terminal shows its prompt below it."""
        return self.body + b"\n"

    def all_headers(self, extra: Headers) -> list[tuple[bytes, bytes]]:
        """Return all headers of the response, followed by the headers in `extra`."""
        return [*JSON_HEADERS, (b"content-length", str(len(self.body) + 1).encode()), *self.headers, *extra]


async def send_response(send: Send, response: Response, *, extra: Headers = ()) -> None:
    """Write a complete response, with `extra` as additional headers."""
    await send({"type": "http.response.start", "status": response.status, "headers": response.all_headers(extra)})
    await send({"type": "http.response.body", "body": response.line()})


async def send_refusal(receive: Receive, send: Send, response: Response, *, extra: Headers = ()) -> None:
    """Write a complete response to a request whose body is still arriving, and close the connection.

    For up to a second, arriving data is read and dropped. If the connection were closed while data is unread, the
    kernel would reset the connection, and the client might never see the response.
    """
    headers = [*response.all_headers(extra), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.line(), "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b""})
