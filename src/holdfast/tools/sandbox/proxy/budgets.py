"""Limits on what programs send, receive and keep open, per program and per principal.

Bytes count in both directions, after they were read. So each connection may exceed a budget by the bytes of one read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from holdfast.errors import ToolFailed

__all__ = ["NetworkBudgets", "PrincipalTraffic", "Traffic", "TrafficTable"]

_WINDOW_S = 3600.0
_BURST = 200.0
_PER_S = 200.0
_RESOLVING = 8
_PRINCIPALS = 10_000


class NetworkBudgets(NamedTuple):
    """Limits for one program and for all programs of its principal.

    Parameters:
        program_connections: maximum number of open connections of the program.
        program_bytes: maximum number of bytes that the program sends and receives.
        principal_connections: maximum number of open connections of all programs of the principal.
        principal_bytes: maximum number of bytes that all programs of the principal send and receive in an hour.
    """

    program_connections: int = 256
    program_bytes: int = 1 << 30
    principal_connections: int = 512
    principal_bytes: int = 8_000_000_000


class PrincipalTraffic:
    """Traffic of all programs of one principal."""

    def __init__(self) -> None:
        self.open = 0
        self.programs = 0
        self.resolving = asyncio.Semaphore(_RESOLVING)
        """Lookups of names in progress. A name server that does not answer keeps threads busy, so they are bounded."""
        self._bytes = 0
        self._window_end = 0.0
        self._allowance = _BURST
        self._refilled_at = 0.0

    def add_bytes(self, count: int) -> int:
        """Count bytes and return the number of bytes in the current hour."""
        now = asyncio.get_running_loop().time()
        if now >= self._window_end:
            self._window_end = now + _WINDOW_S
            self._bytes = 0
        self._bytes += count
        return self._bytes

    def accept_pause_s(self) -> float:
        """Count one accepted connection and return the time to wait before the next one is accepted."""
        now = asyncio.get_running_loop().time()
        self._allowance = min(_BURST, self._allowance + (now - self._refilled_at) * _PER_S) - 1.0
        self._refilled_at = now
        return 0.0 if self._allowance >= 0 else -self._allowance / _PER_S

    def is_idle(self) -> bool:
        """Return whether the principal has no program and no traffic in the current hour."""
        return not self.programs and asyncio.get_running_loop().time() >= self._window_end


class TrafficTable:
    """The traffic of the principals; those without programs are forgotten after an hour, or if there are too many."""

    def __init__(self) -> None:
        self._principals: OrderedDict[str, PrincipalTraffic] = OrderedDict()

    def of(self, principal: str) -> PrincipalTraffic:
        """Return the traffic of a principal."""
        found = self._principals.setdefault(principal, PrincipalTraffic())
        self._principals.move_to_end(principal)
        for name, other in list(self._principals.items())[:2]:  # the least recently used ones
            if other is not found and (other.is_idle() or (len(self._principals) > _PRINCIPALS and not other.programs)):
                del self._principals[name]
        return found


class Traffic:
    """Traffic of one program.

    Parameters:
        budgets: limits for the program and its principal.
        principal: traffic of the program's principal.
    """

    def __init__(self, budgets: NetworkBudgets, principal: PrincipalTraffic) -> None:
        self.budgets = budgets
        self.principal = principal
        self.open = 0
        self.connections = 0
        self.sent_bytes = 0
        self.received_bytes = 0

    def start_connection(self) -> None:
        """Count a new connection; it counts until `end_connection`, even if this method raises.

        Raises:
            ToolFailed: if the program or its principal has too many open connections.
        """
        budgets = self.budgets
        self.connections += 1
        self.open += 1
        self.principal.open += 1
        if self.open > budgets.program_connections:
            raise ToolFailed(f"the program already has {budgets.program_connections} open connections")
        if self.principal.open > budgets.principal_connections:
            raise ToolFailed(f"the user's programs already have {budgets.principal_connections} open connections")
        self._check(self.principal.add_bytes(0))

    def end_connection(self) -> None:
        """Count the end of a connection."""
        self.open -= 1
        self.principal.open -= 1

    def add_sent(self, count: int) -> None:
        """Count bytes from the program.

        Raises:
            ToolFailed: if a budget is exceeded.
        """
        self.sent_bytes += count
        self._check(self.principal.add_bytes(count))

    def add_received(self, count: int) -> None:
        """Count bytes for the program.

        Raises:
            ToolFailed: if a budget is exceeded.
        """
        self.received_bytes += count
        self._check(self.principal.add_bytes(count))

    def _check(self, of_principal: int) -> None:
        budgets = self.budgets
        if self.sent_bytes + self.received_bytes > budgets.program_bytes:
            raise ToolFailed(f"the program has used its network budget of {budgets.program_bytes:,} bytes")
        if of_principal > budgets.principal_bytes:
            raise ToolFailed(f"the user's programs have used {budgets.principal_bytes:,} bytes of network this hour")
