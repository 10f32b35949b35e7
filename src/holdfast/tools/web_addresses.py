"""Which addresses the tools may reach: the public internet, and what an operator names besides.

Every address of a request is judged, never its name: a name is resolved once, and the connection goes to an address
that was judged. So neither redirects, nor names that change their address meanwhile, nor other ways to write an address
(decimal, octal, IPv4 inside of IPv6) lead to this machine or the network that it is in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from holdfast.errors import ConfigurationError, ToolFailed

__all__ = ["AddressRules"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_V4_SPECIAL = tuple(
    map(ipaddress.IPv4Network, ("0.0.0.0/8", "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "224.0.0.0/3"))
)
"""Besides what `ipaddress` knows: this network, a cloud's own service, protocol assignments, relays, multicast."""
_V6_GLOBAL = ipaddress.IPv6Network("2000::/3")
_V6_SPECIAL = tuple(map(ipaddress.IPv6Network, ("2001::/23", "2002::/16", "3fff::/20")))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ADDRESSES_LIMIT = 4


class AddressRules:
    """What may be reached.

    Parameters:
        networks: addresses that may be reached though they are not public, as ``"10.1.0.0/16"`` or ``"127.0.0.1"``.
        ports: the ports that may be reached; None: all.

    Raises:
        ConfigurationError: something that is no network.
    """

    def __init__(self, networks: Sequence[str] = (), ports: Sequence[int] | None = (80, 443)) -> None:
        try:
            self._networks: tuple[_Network, ...] = tuple(map(ipaddress.ip_network, networks))
        except ValueError as error:
            raise ConfigurationError(
                f"allowed networks: {error}", hint="name addresses or networks, as in ['127.0.0.1', '10.1.0.0/16']"
            ) from error
        self._ports = ports

    def permits(self, address: str) -> bool:
        """Whether this address may be reached."""
        try:
            plain = _unwrapped(ipaddress.ip_address(address.partition("%")[0]))
        except ValueError:
            return False
        return _is_public(plain) or any(plain.version == net.version and plain in net for net in self._networks)

    def check_url(self, url: str) -> tuple[str, int]:
        """The host and port of a URL; whether they may be reached is for `addresses` to say.

        Raises:
            ToolFailed: it is no URL of the web, it has a user name, or its port is not allowed.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ToolFailed(f"{url[:200]!r} is no URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ToolFailed(f"{url[:200]!r} is no URL of the web; give one that begins with https:// or http://")
        if "@" in parts.netloc:
            raise ToolFailed("the URL has a user name before its host; such URLs are not fetched")
        if port is None:
            port = 443 if parts.scheme == "https" else 80
        if self._ports is not None and port not in self._ports:
            allowed = ", ".join(map(str, self._ports))
            raise ToolFailed(f"port {port} may not be reached; allowed are: {allowed}")
        return parts.hostname, port

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of the host that may be reached, in the order to try them; not empty.

        Raises:
            ToolFailed: there is none.
        """
        found = await _resolve(host, port)
        permitted = [address for address in found if self.permits(address)]
        if not permitted:
            raise ToolFailed(
                f"{host} is at {found[0]}, which is not on the public internet; the operator does not allow that"
            )
        return permitted[:_ADDRESSES_LIMIT]


async def _resolve(host: str, port: int) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ToolFailed(f"the host {host!r} is not known: {getattr(error, 'strerror', None) or error}") from error
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


def _unwrapped(address: _Address) -> _Address:
    """The IPv4 address that an IPv6 one stands for, else itself."""
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
