"""MCP over HTTP: a transport in which a failed request affects only that request.

The MCP client closes the connection and fails all calls on it if sending a single request fails. With this transport,
the failed request gets an error response instead. The transport also limits the size of responses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx2
import msgspec

from holdfast.errors import format_error

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

__all__ = ["open_http"]

_CONNECT_S = 10.0
_MESSAGE_BYTES = 16_000_000
_INTERNAL_ERROR = -32603
_TOLD = frozenset((401, 403, 407, 429))


class _Bounded(httpx2.AsyncByteStream):
    """A response body that raises `StreamError` while it is read if it exceeds the size limit."""

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._inner:
            size += len(chunk)
            if size > _MESSAGE_BYTES:
                raise httpx2.StreamError(f"the response exceeds {_MESSAGE_BYTES:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Contained(httpx2.AsyncBaseTransport):
    """A transport that returns an error response for a failed request, so that only its caller is affected."""

    def __init__(self) -> None:
        self._inner = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.ProtocolError as error:  # the error's text may contain the sent data, including keys
            return _failure(request, f"{request.url.host} violated the HTTP protocol ({type(error).__name__})")
        except httpx2.TransportError as error:
            return _failure(request, f"no connection to {request.url.host}: {format_error(error)}")
        if response.status_code >= 500 or response.status_code in _TOLD:
            await response.aclose()
            return _failure(request, f"{request.url.host} responded {response.status_code} {response.reason_phrase}")
        kind = response.headers.get("content-type", "").lower()
        if not kind.startswith("text/event-stream"):  # stream events have their own limit
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


def _failure(request: httpx2.Request, text: str) -> httpx2.Response:
    """Return a JSON-RPC error response without a request id, which the MCP session fills in."""
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": _INTERNAL_ERROR, "message": text}}
    headers = {"content-type": "application/json"}
    return httpx2.Response(502, headers=headers, content=msgspec.json.encode(body), request=request)


@asynccontextmanager
async def open_http(url: str, *, headers: Mapping[str, str]) -> AsyncGenerator[TransportStreams, None]:
    """Yield the message streams from and to a server; no request is sent before the first message.

    Parameters:
        url: URL of the server's MCP endpoint.
        headers: headers to send with every request, such as ``authorization``.
    """
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(None, connect=_CONNECT_S)  # callers set the deadlines of calls
    async with httpx2.AsyncClient(headers=dict(headers), timeout=timeout, transport=_Contained()) as http:
        async with streamable_http_client(url, http_client=http, max_sse_event_size=_MESSAGE_BYTES) as streams:
            yield streams
