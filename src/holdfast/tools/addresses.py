"""Addresses that tools may reach: the public internet, and the networks that an operator adds.

The rules apply to addresses, not to host names: each name is resolved once per request, and the connection uses an
address that has been checked. So redirects, names that change their address, and unusual spellings of an address
(decimal, octal, IPv4 inside IPv6) never lead to this machine or its network. A public address that this machine itself
has is refused as well, because services that listen on all addresses would be reachable there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from holdfast.errors import ConfigurationError, ToolFailed

__all__ = ["AddressRules", "resolve_host"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_V4_SPECIAL = tuple(
    map(ipaddress.IPv4Network, ("0.0.0.0/8", "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "224.0.0.0/3"))
)
"""Networks that `ipaddress` may count as global: this network, cloud services, protocols, relays and multicast."""
_V6_GLOBAL = ipaddress.IPv6Network("2000::/3")
_V6_SPECIAL = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2002::/16", "3fff::/20")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ADDRESSES_LIMIT = 4


class AddressRules:
    """Rules for the addresses and ports that tools may reach.

    Parameters:
        networks: non-public addresses and networks to allow, such as ``"127.0.0.1"`` or ``"10.1.0.0/16"``.
        ports: ports to allow; None allows all ports.

    Attributes:
        ports: the allowed ports.

    Raises:
        ConfigurationError: if an entry of `networks` is not a valid address or network.
    """

    def __init__(self, networks: Sequence[str] = (), ports: Sequence[int] | None = (80, 443)) -> None:
        try:
            self._networks: tuple[_Network, ...] = tuple(map(ipaddress.ip_network, networks))
        except ValueError as error:
            raise ConfigurationError(
                f"allowed networks: {error}", hint="use addresses or networks, such as ['127.0.0.1', '10.1.0.0/16']"
            ) from error
        self.ports = ports

    def permits(self, address: str) -> bool:
        """Return whether the rules allow an address; an invalid address is not allowed."""
        try:
            plain = _unwrapped(address)
        except ValueError:
            return False
        return _is_public(plain) or self._is_named(plain)

    def check_url(self, url: str) -> tuple[str, int]:
        """Check the form and port of a URL and return its host and port; `addresses` checks the host.

        Raises:
            ToolFailed: if the URL is not an HTTP URL, contains a user name, or has a port that is not allowed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ToolFailed(f"{url[:200]!r} is not a valid URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ToolFailed(f"{url[:200]!r} is not a web URL; use one that starts with https:// or http://")
        if "@" in parts.netloc:
            raise ToolFailed("the URL contains a user name; remove it")
        if port is None:
            port = 443 if parts.scheme == "https" else 80
        if self.ports is not None and port not in self.ports:
            allowed = ", ".join(map(str, self.ports))
            raise ToolFailed(f"port {port} is not allowed; allowed ports: {allowed}")
        return parts.hostname, port

    async def addresses(self, host: str, port: int) -> list[str]:
        """Resolve a host and return at least one allowed address, in the order in which to try the addresses.

        Raises:
            ToolFailed: if the host is unknown or none of its addresses is allowed.
        """
        return self.permitted(host, await _resolve(host, port))

    def permitted(self, host: str, found: Sequence[str]) -> list[str]:
        """Return the allowed ones of the addresses of a host, in the order in which to try the addresses.

        Raises:
            ToolFailed: if none of the addresses is allowed.
        """
        allowed = [one for one in found if self.permits(one) and not self._is_unnamed_own(_unwrapped(one))]
        if not allowed:
            raise ToolFailed(
                f"{host} resolves to {found[0]}, which is not on the public internet and not allowed by the operator"
            )
        return allowed[:_ADDRESSES_LIMIT]

    def _is_named(self, address: _Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)

    def _is_unnamed_own(self, address: _Address) -> bool:
        return not self._is_named(address) and _is_own(address)


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host; blocks, so call it in a thread.

    Raises:
        ToolFailed: if the host is unknown.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ToolFailed(f"unknown host {host!r}: {getattr(error, 'strerror', None) or error}") from error
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


async def _resolve(host: str, port: int) -> list[str]:
    return await asyncio.get_running_loop().run_in_executor(None, resolve_host, host, port)


def _is_own(address: _Address) -> bool:
    """Return whether an address belongs to this machine, judged by the source address that packets to it would have."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a UDP connect sends nothing
        try:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
        except OSError:  # no route
            return False


def _unwrapped(text: str) -> _Address:
    """Return the IPv4 address embedded in an IPv6 address, or else the address itself.

    Raises:
        ValueError: if `text` is not an address.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not any(address in network for network in _V4_SPECIAL)
    return address.is_global and address in _V6_GLOBAL and not any(address in network for network in _V6_SPECIAL)
