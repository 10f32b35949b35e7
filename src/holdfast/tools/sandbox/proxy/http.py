"""Heads and bodies of HTTP/1.1 as a proxy must read them: strictly, because two readings of one request are a hole.

Invariants
- A request has one target, which the Host header repeats, and a body whose length is unambiguous. Everything else is
  refused: two lengths, a length with a transfer coding, line breaks other than CR LF, folded lines, spaces before a
  colon, control characters.
- The request that is sent to the server is written anew from what was understood, with ``connection: close``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast.errors import ToolFailed
from holdfast.tools.sandbox.proxy.rules import ProxyTarget, parse_authority

__all__ = ["ChunkedBody", "InvalidHead", "ProxyRequest", "parse_request", "refusal", "rewrite_response"]

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])(?: |$)")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[\t\x20-\x7e]*)?\r\n")
_CHUNK_LINE_BYTES = 1024
_TRAILER_BYTES = 8192
_LENGTH_DIGITS = 18
_OF_CONNECTION = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"upgrade",
    )
)
"""Fields for the proxy, which are not passed on."""
_NEVER_NAMED = frozenset((b"content-length", b"host", b"transfer-encoding"))

_Fields = list[tuple[bytes, bytes, bytes]]
"""Name, name in lower case, value."""


class InvalidHead(Exception):
    """A head that is not strictly HTTP/1.1; the text holds nothing of the head."""


class ProxyRequest(NamedTuple):
    """A request to the proxy.

    Parameters:
        method: method of the request; ``CONNECT`` asks for a tunnel.
        target: host and port to connect to.
        head: head to send to the server; empty for a tunnel.
        length: number of bytes of the body; None for a body in chunks.
    """

    method: str
    target: ProxyTarget
    head: bytes
    length: int | None


def parse_request(head: bytes) -> ProxyRequest:
    """Return the request of a head, which includes the empty line at its end.

    Raises:
        InvalidHead: if the head is invalid or ambiguous.
        ToolFailed: if the target is not a host that the proxy can connect to.
    """
    line, fields = _split(head)
    words = line.split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise InvalidHead("the request line is not 'METHOD target HTTP/1.1'")
    method, target, version = words
    if _TOKEN.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise InvalidHead("the request line is not 'METHOD target HTTP/1.1'")
    length = _body_length(fields, version)
    if method == b"CONNECT":
        if length != 0:
            raise InvalidHead("CONNECT must not have a body")
        address = parse_authority(target.decode(), None)
        _check_host(fields, address, address.port, required=False)
        return ProxyRequest("CONNECT", address, b"", 0)
    address, path = _split_url(target.decode())
    _check_host(fields, address, 80, required=version == b"HTTP/1.1")
    host = address.authority.removesuffix(":80")
    dropped = _OF_CONNECTION | _named_by_connection(fields) | {b"host"}
    kept = [b"%s: %s" % (name, value) for name, lower, value in fields if lower not in dropped]
    first = b"%s %s %s" % (method, path.encode(), version)
    written = b"\r\n".join([first, f"Host: {host}".encode(), *kept, b"Connection: close", b"", b""])
    return ProxyRequest(method.decode(), address, written, length)


def rewrite_response(head: bytes, method: str) -> tuple[int, bytes, int | None]:
    """Return a response's status, its head for the client, and its body length; None if the body ends with the stream.

    Parameters:
        head: head from the server, including the empty line at its end.
        method: method of the request.

    Raises:
        InvalidHead: if the head is not HTTP/1.1.
    """
    line, fields = _split(head)
    found = _STATUS.match(line)
    if found is None or found[1] == b"101":
        raise InvalidHead("the server's response is not HTTP/1.1")
    status = int(found[1])
    if status < 200:
        return status, head, 0
    lengths = {value for _, lower, value in fields if lower == b"content-length"}
    length: int | None = None
    if method == "HEAD" or status in (204, 304):
        length = 0
    elif len(lengths) == 1 and not any(lower == b"transfer-encoding" for _, lower, _ in fields):
        length = _number(lengths.pop())
    dropped = _OF_CONNECTION | _named_by_connection(fields)
    kept = [b"%s: %s" % (name, value) for name, lower, value in fields if lower not in dropped]
    return status, b"\r\n".join([line, *kept, b"Connection: close", b"", b""]), length


def refusal(status: str, text: str) -> bytes:
    """Return a whole response that tells the client why the proxy does not carry out the request."""
    body = f"Request {'blocked' if status.startswith('403') else 'failed'}: {text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


class ChunkedBody:
    """Reader of a body in chunks that knows where the body ends.

    `feed` returns the bytes to pass on, which are the input without chunk extensions. After ``done``, input is ignored.
    """

    def __init__(self) -> None:
        self.done = False
        self._left = 0
        self._in_trailer = False
        self._buffer = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the client and return the bytes to send to the server.

        Raises:
            InvalidHead: if the body is not strictly in chunks.
        """
        written: list[bytes] = []
        self._buffer += data
        while not self.done and (piece := self._next()) is not None:
            written.append(piece)
        return b"".join(written)

    def _next(self) -> bytes | None:
        """Return the next complete part of the buffer; None if more input is needed."""
        if self._left > 2:
            piece = self._buffer[: self._left - 2]
            self._buffer = self._buffer[len(piece) :]
            self._left -= len(piece)
            return piece or None
        if self._left:
            if len(self._buffer) < self._left:
                return None
            if self._buffer[: self._left] != b"\r\n"[-self._left :]:
                raise InvalidHead("a chunk of the body does not end with CR LF")
            self._left, self._buffer = 0, self._buffer[self._left :]
            return b"\r\n"
        return self._next_trailer() if self._in_trailer else self._next_size()

    def _next_size(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > _CHUNK_LINE_BYTES:
                raise InvalidHead("the size of a chunk is too long")
            return None
        found = _CHUNK_SIZE.fullmatch(self._buffer[: end + 1])
        if found is None or end > _CHUNK_LINE_BYTES:
            raise InvalidHead("the size of a chunk is invalid")
        self._buffer = self._buffer[end + 1 :]
        size = int(found[1], 16)
        if size:
            self._left = size + 2
            return b"%x\r\n" % size
        self._in_trailer = True
        return b"0\r\n"

    def _next_trailer(self) -> bytes | None:
        """Drop the trailer fields: they could change what the checked head meant."""
        end = self._buffer.find(b"\r\n")
        if end < 0 or end > _TRAILER_BYTES:
            if len(self._buffer) > _TRAILER_BYTES:
                raise InvalidHead("the trailer of the body is too long")
            return None
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        if line:
            return b""
        self.done = True
        return b"\r\n"


def _split(head: bytes) -> tuple[bytes, _Fields]:
    line, *rows = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if _VALUE.fullmatch(line) is None:
        raise InvalidHead("the first line contains control characters")
    fields: _Fields = []
    for row in rows:
        name, colon, value = row.partition(b":")
        if not colon or _TOKEN.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise InvalidHead("a header field is invalid")
        fields.append((name, name.lower(), value.strip(b" \t")))
    return line, fields


def _body_length(fields: _Fields, version: bytes) -> int | None:
    lengths = [value for _, lower, value in fields if lower == b"content-length"]
    codings = [value for _, lower, value in fields if lower == b"transfer-encoding"]
    if codings:
        if lengths or len(codings) > 1 or codings[0].lower() != b"chunked" or version != b"HTTP/1.1":
            raise InvalidHead("the length of the body is ambiguous")
        return None
    if len(lengths) > 1 or (lengths and _number(lengths[0]) is None):
        raise InvalidHead("the length of the body is ambiguous")
    return _number(lengths[0]) if lengths else 0


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) <= _LENGTH_DIGITS else None


def _split_url(url: str) -> tuple[ProxyTarget, str]:
    if url.startswith("/"):
        raise InvalidHead("the target must be a whole URL, as this is a proxy")
    scheme, slashes, rest = url.partition("://")
    if not slashes or scheme.lower() != "http":
        raise ToolFailed("only http:// URLs are requested directly; for https://, use CONNECT")
    end = next((at for at, letter in enumerate(rest) if letter in "/?#\\"), len(rest))
    authority, path = rest[:end], rest[end:]
    if "@" in authority or "#" in path or path.startswith("\\"):
        raise InvalidHead("the URL contains a user name, a fragment or a backslash")
    return parse_authority(authority, 80), path if path.startswith("/") else f"/{path}"


def _check_host(fields: _Fields, target: ProxyTarget, default_port: int, *, required: bool) -> None:
    hosts = [value for _, lower, value in fields if lower == b"host"]
    if len(hosts) > 1 or (required and not hosts):
        raise InvalidHead("the request must have one Host header")
    if hosts:
        try:
            named = parse_authority(hosts[0].decode("ascii"), default_port)
        except (ToolFailed, UnicodeDecodeError):
            named = None
        if named != target:
            raise InvalidHead("the Host header does not match the target")


def _named_by_connection(fields: _Fields) -> frozenset[bytes]:
    """Return the fields that Connection declares as meant for the proxy only."""
    values = [value for _, lower, value in fields if lower == b"connection"]
    named = frozenset(word.strip(b" \t").lower() for value in values for word in value.split(b","))
    if named & _NEVER_NAMED:
        raise InvalidHead("Connection must not name the fields that frame the request")
    return named
