"""Owner of a listening port on this machine: the local token goes only to a server of the same user or of root.

Linux shows the owner of each socket in ``/proc/net``. Elsewhere the owner is unknown, and every server is accepted.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigurationError

__all__ = ["owners_of_listener", "refuse_foreign_listener"]

_LISTEN = "0A"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def refuse_foreign_listener(host: str, port: int) -> None:
    """Refuse to connect to `host` if a socket of another user would accept the connection.

    Raises:
        ConfigurationError: if such a socket exists; the message contains the other user's id.
    """
    trusted = {0, os.geteuid()}
    for address in _addresses(host):
        foreign = owners_of_listener(address, port) - trusted
        if foreign:
            uids = ", ".join(str(uid) for uid in sorted(foreign))
            raise ConfigurationError(
                f"another user (uid {uids}) listens on {host} port {port}: the local token is not sent there",
                hint="stop that program, choose another port with HOLDFAST_PORT, or use an API key with --key",
            )


def owners_of_listener(address: Address, port: int) -> set[int]:
    """Return the ids of the users whose sockets accept connections to `address`.

    Sockets bound to `address` take precedence over sockets bound to all addresses.
    """
    exact: set[int] = set()
    everywhere: set[int] = set()
    for bound, uid in _listeners(port):
        if bound == address or getattr(bound, "ipv4_mapped", None) == address:
            exact.add(uid)
        elif bound.is_unspecified and bound.version >= address.version:
            everywhere.add(uid)
    return exact or everywhere


def _listeners(port: int) -> Iterator[tuple[Address, int]]:
    """Yield the address and the owner's user id of each socket that listens on `port`."""
    for table in _TABLES:
        try:
            lines = table.read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == _LISTEN and int(number, 16) == port:
                yield _read_address(address), int(fields[7])


def _read_address(text: str) -> Address:
    """Parse an address from ``/proc/net``: four-byte words in the machine's byte order, in hexadecimal."""
    words = (int(text[start : start + 8], 16) for start in range(0, len(text), 8))
    return ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def _addresses(host: str) -> list[Address]:
    """Return the addresses that `host` resolves to; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]
