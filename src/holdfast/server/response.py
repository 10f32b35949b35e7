"""A complete response of the API, and functions that write it on raw ASGI."""

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
    """A complete response: its status, JSON body and further headers."""

    status: int
    body: bytes
    headers: Headers = ()

    def all_headers(self, extra: Headers) -> list[tuple[bytes, bytes]]:
        """Return every header of the response, with those of `extra`."""
        return [*JSON_HEADERS, (b"content-length", str(len(self.body)).encode()), *self.headers, *extra]


async def send_response(send: Send, response: Response, *, extra: Headers = ()) -> None:
    """Write a whole response."""
    await send({"type": "http.response.start", "status": response.status, "headers": response.all_headers(extra)})
    await send({"type": "http.response.body", "body": response.body})


async def send_refusal(receive: Receive, send: Send, response: Response, *, extra: Headers = ()) -> None:
    """Write a whole response to a request whose body is still arriving, and close the connection.

    Data that arrives within a moment is read and dropped: closing at once would reset the connection, and the client
    would never see the response.
    """
    headers = [*response.all_headers(extra), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b""})
