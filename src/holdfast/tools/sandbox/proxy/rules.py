"""Hosts and ports that a program may reach through the proxy, and the strict reading of a target's name.

A rule is a host (``example.org``), all hosts below one (``*.example.org``), an address, or ``*`` for every public host;
each with an optional port (``example.org:8443``, ``*:*``). Without a port, a rule allows the ports 80 and 443. Rules
compare names; `AddressRules` judges what the names resolve to.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import ConfigurationError, ToolFailed

__all__ = ["ANY_HOST", "HostRules", "ProxyTarget", "parse_authority"]

ANY_HOST = "*"
"""Rule that allows every public host."""

_PORTS = (80, 443)
_RULES_LIMIT = 256
_SHOWN_RULES = 10
_NAME_LIMIT = 253
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_HINT = "use rules such as 'example.org', '*.example.org', 'example.org:8443' or '*'"


class ProxyTarget(NamedTuple):
    """A host and port to connect to; the host is a lower-case name without a final dot, or an address."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """Host and port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Rule(NamedTuple):
    host: str
    below: bool
    ports: tuple[int, ...] | None

    def names(self, host: str) -> bool:
        """Return whether the rule is about this host."""
        if self.below:
            return host.endswith(f".{self.host}") and not _is_address(host)
        return self.host in (ANY_HOST, host)


class HostRules:
    """The hosts and ports that one program may reach.

    Parameters:
        rules: allowed hosts; empty allows no host.

    Raises:
        ConfigurationError: if a rule is invalid, or if there are more than 256 of them.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        if len(rules) > _RULES_LIMIT:
            raise ConfigurationError(f"{len(rules)} allowed hosts are too many; the limit is {_RULES_LIMIT}")
        self._texts = tuple(rules)
        self._rules = tuple(map(_parse_rule, rules))

    def check(self, target: ProxyTarget) -> None:
        """Check that a rule allows the target.

        Raises:
            ToolFailed: if no rule allows the host, or the rules for the host do not include the port.
        """
        about = [rule for rule in self._rules if rule.names(target.host)]
        if not about:
            shown = ", ".join(self._texts[:_SHOWN_RULES]) or "none"
            more = f" and {len(self._texts) - _SHOWN_RULES} more" if len(self._texts) > _SHOWN_RULES else ""
            raise ToolFailed(f"host {target.host} is not allowed; allowed: {shown}{more}")
        if not any(rule.ports is None or target.port in rule.ports for rule in about):
            ports = sorted({port for rule in about for port in rule.ports or ()})
            allowed = ", ".join(map(str, ports))
            raise ToolFailed(f"port {target.port} of {target.host} is not allowed; allowed ports: {allowed}")


def parse_authority(text: str, default_port: int | None) -> ProxyTarget:
    """Return the target that an authority names, such as ``example.org:443`` or ``[2606:4700::1111]``.

    Parameters:
        text: host and port, without a user name.
        default_port: port to use if the text has none; None requires a port.

    Raises:
        ToolFailed: if the text is not strictly an authority.
    """
    if text.startswith("["):
        inside, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ToolFailed(f"invalid target {text[:100]!r}")
        host, colon, port = _parse_v6(inside), rest[:1], rest[1:]
    else:
        name, colon, port = text.partition(":")
        host = _parse_name(name)
    if not colon:
        if default_port is None:
            raise ToolFailed(f"target {text[:100]!r} has no port")
        return ProxyTarget(host, default_port)
    if not _is_port(port):
        raise ToolFailed(f"invalid port in target {text[:100]!r}")
    return ProxyTarget(host, int(port))


def _parse_name(text: str) -> str:
    name = text.lower().removesuffix(".")
    if len(name) > _NAME_LIMIT or not text.isascii() or _NAME.fullmatch(name) is None:
        raise ToolFailed(f"invalid host name {text[:100]!r}")
    return name


def _parse_v6(text: str) -> str:
    try:
        if "%" in text:
            raise ValueError("an address with a zone is local")
        return ipaddress.IPv6Address(text).compressed
    except ValueError as error:
        raise ToolFailed(f"invalid address {text[:100]!r}") from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _parse_rule(text: str) -> _Rule:
    """Return the rule that an operator wrote; unlike a client, an operator may write a name in any alphabet."""
    host, port = text, ""
    if text.count(":") == 1 or text.startswith("["):
        host, _, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
        if not port and text.endswith(":"):
            raise ConfigurationError(f"invalid allowed host {text!r}: the port is missing", hint=_HINT)
    try:
        return _Rule(*_parse_pattern(host), _parse_ports(port))
    except (ToolFailed, UnicodeError, ValueError) as error:
        raise ConfigurationError(f"invalid allowed host {text!r}", hint=_HINT) from error


def _parse_pattern(host: str) -> tuple[str, bool]:
    if host == ANY_HOST:
        return host, False
    if ":" in host:
        return _parse_v6(host.removeprefix("[").removesuffix("]")), False
    below = host.startswith("*.")
    name = host.removeprefix("*.")
    return _parse_name(name if name.isascii() else name.encode("idna").decode("ascii")), below


def _parse_ports(text: str) -> tuple[int, ...] | None:
    if text == "*":
        return None
    if not text:
        return _PORTS
    if not _is_port(text):
        raise ValueError(f"invalid port {text}")
    return (int(text),)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65536
