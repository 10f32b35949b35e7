"""SOCKS version 5 (RFC 1928) as far as programs need it: CONNECT to a name or address, without authentication."""

from __future__ import annotations

import ipaddress

from holdfast.errors import ToolFailed
from holdfast.tools.sandbox.proxy.rules import ProxyTarget, parse_authority
from holdfast.tools.sandbox.proxy.stream import SocketStream

__all__ = ["CONNECTED", "NOT_ALLOWED", "UNREACHABLE", "VERSION", "UnsupportedRequest", "read_target", "reply"]

VERSION = 5
CONNECTED, NOT_ALLOWED, UNREACHABLE = 0, 2, 4
_NOT_SUPPORTED, _NO_SUCH_ADDRESS_KIND = 7, 8
_CONNECT = 1
_V4, _NAME, _V6 = 1, 3, 4


class UnsupportedRequest(Exception):
    """A request other than CONNECT.

    Parameters:
        answer: bytes to send before the connection is closed.
    """

    def __init__(self, answer: bytes) -> None:
        super().__init__("unsupported request")
        self.answer = answer


def reply(code: int) -> bytes:
    """Return the proxy's reply to a request."""
    return bytes((VERSION, code, 0, _V4, 0, 0, 0, 0, 0, 0))


async def read_target(stream: SocketStream) -> ProxyTarget:
    """Negotiate the method and return the target of the request.

    Raises:
        UnsupportedRequest: the client wants authentication, or something else than a connection.
        ToolFailed: the target is not a valid host.
        EOFError: the client has gone.
    """
    _, count = await stream.read_exactly(2)
    if 0 not in await stream.read_exactly(count):
        raise UnsupportedRequest(bytes((VERSION, 0xFF)))
    await stream.write(bytes((VERSION, 0)))
    version, command, _, kind = await stream.read_exactly(4)
    if version != VERSION or command != _CONNECT:
        raise UnsupportedRequest(reply(_NOT_SUPPORTED))
    if kind == _V4:
        host = str(ipaddress.IPv4Address(await stream.read_exactly(4)))
    elif kind == _V6:
        host = f"[{ipaddress.IPv6Address(await stream.read_exactly(16)).compressed}]"
    elif kind == _NAME:
        (length,) = await stream.read_exactly(1)
        name = await stream.read_exactly(length)
        try:
            host = name.decode("ascii")
        except UnicodeDecodeError as error:
            raise ToolFailed("invalid host name") from error
        if ":" in host or "[" in host:  # an address as a name
            host = f"[{host.strip('[]')}]"
    else:
        raise UnsupportedRequest(reply(_NO_SUCH_ADDRESS_KIND))
    port = int.from_bytes(await stream.read_exactly(2), "big")
    return parse_authority(f"{host}:{port}", None)
