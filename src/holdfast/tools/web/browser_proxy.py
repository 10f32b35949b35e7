"""A browser's proxy, which connects only to checked addresses.

A browser that has no other route to the network does not resolve names itself. So the address rules apply to
everything that a page requests: redirects, frames, scripts, images, sockets, and names whose address changes.

Invariants
- Each browser connection leads to one checked host. A plain request is sent with ``connection: close``, so that no
  request for another host can follow on the same connection.
- A connection ends when either side closes it, and all connections end when the `WebGate` closes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from urllib.parse import urlsplit

from holdfast.errors import ScopeClosed, ToolFailed
from holdfast.runtime import Scope, current_scope
from holdfast.tools.web.addresses import AddressRules

__all__ = ["WebGate"]

_HEAD_BYTES = 65_536
_HEAD_S = 30.0
_CONNECT_S = 10.0
_PIECE_BYTES = 65_536
_CONNECTIONS = 256
_REFUSALS = 100


class WebGate:
    """A proxy that listens on ``gate.url`` within ``async with WebGate(rules) as gate:``.

    The proxy's tasks run in the scope that is current when the block is entered.

    Parameters:
        rules: rules for the addresses and ports that the proxy connects to.
    """

    def __init__(self, rules: AddressRules) -> None:
        self._rules = rules
        self._server: asyncio.Server | None = None
        self._scope: Scope | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._refused: OrderedDict[str, str] = OrderedDict()
        self.url = ""

    async def __aenter__(self) -> WebGate:
        self._scope = current_scope()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    def refusal(self, host: str) -> str | None:
        """Return why a connection to the host was last refused, or None if no refusal is recorded."""
        return self._refused.get(host)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        self._open.add(writer)
        try:
            if len(self._open) > _CONNECTIONS:
                return
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, url, first = _understood(head)
            host, port = self._rules.check_url(url)
            try:
                answers, upstream = await self._connect(host, port)
            except ToolFailed as error:
                self._note(host, error.message)
                raise
            self._open.add(upstream)
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            else:
                upstream.write(first)
            assert self._scope is not None
            backward = self._scope.spawn(_pass_on(answers, writer), name=f"from {host}")
            try:
                await _pass_on(reader, upstream)
            finally:
                backward.interrupt.trigger("the browser has closed the connection", kind="stop")
        except ToolFailed as error:
            _refuse(writer, error.message)
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _refuse(writer, "not a valid proxy request")
        except (OSError, TimeoutError, ScopeClosed):
            pass  # the browser or the server disconnected, or the gate is closing
        finally:
            for one in (writer, upstream):
                if one is not None:
                    self._open.discard(one)
                    one.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        problem: Exception | None = None
        for address in await self._rules.addresses(host, port):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(address, port)
            except (OSError, TimeoutError) as error:
                problem = error
        raise ToolFailed(f"{host} is unreachable: {problem or 'no response'}")

    def _note(self, host: str, text: str) -> None:
        self._refused[host] = text
        self._refused.move_to_end(host)
        if len(self._refused) > _REFUSALS:
            self._refused.popitem(last=False)


def _understood(head: bytes) -> tuple[str, str, bytes]:
    """Return the method and URL of a proxy request, and the request head to send to the server.

    Raises:
        ValueError: if `head` is not a valid request head.
    """
    line, *fields = head.rstrip(b"\r\n").split(b"\r\n")
    method, target, version = line.decode("ascii").split(" ")
    if method == "CONNECT":
        return method, f"https://{target}/", b""
    parts = urlsplit(target)
    path = parts._replace(scheme="", netloc="").geturl() or "/"
    kept = [field for field in fields if not field.lower().startswith((b"proxy-", b"connection:", b"keep-alive:"))]
    first = f"{method} {path if path.startswith('/') else '/' + path} {version}".encode()
    return method, target, b"\r\n".join([first, *kept, b"connection: close", b"", b""])


def _refuse(writer: asyncio.StreamWriter, text: str) -> None:
    body = f"Request blocked: {text}\n".encode()
    head = f"HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {len(body)}\r\n"
    with contextlib.suppress(OSError):
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes from `reader` to `writer` until either side closes, then close `writer`."""
    try:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
