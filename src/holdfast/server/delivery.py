"""Budget charges of a request, and delivery of its response: charged, in pieces, to clients that keep reading.

Every request body and every response body passes through here (`tests/server/test_accounting.py` checks it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.host.budgets import FREE_BYTES, Budgets, Charge
from holdfast.settings import Settings

__all__ = ["CUT", "WAIT_S", "Delivery", "Receive", "Scope", "Send", "cut_connection"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CUT = "holdfast.cut"
"""Where the server's protocol puts into the scope how a connection is cut."""
WAIT_S = 5.0
"""How long a large body or a list waits for room."""
WRITTEN_PER_S = 500_000_000
"""Bytes of large answers that a loop writes in a second; a reader that keeps up would let it do nothing else."""
STORED_PER_S = 40_000_000
"""Bytes of large messages that loop and store handle in a second. A principal gets a quarter of it in the long run."""
TAKEN_PER_S = 80_000_000
"""Bytes of large bodies that a host takes in a second: to decode and to store them makes others wait."""
_PIECE_BYTES = 65_536
_LEAST_RATE = 10_000
"""Bytes per second that the reader of a large answer takes in the long run; a slower one uses up its stall time."""


class Delivery:
    """One request's charges and the way of its answer. It belongs to the one task that handles the request.

    Parameters:
        scope, send: of ASGI.
        principal: who is charged; `UNKNOWN` until a key was seen.
        budgets: of the host.
        settings: the server's limits.
    """

    __slots__ = ("_charges", "_patience_s", "_send", "budgets", "principal", "scope", "settings", "started")

    def __init__(self, scope: Scope, send: Send, *, principal: str, budgets: Budgets, settings: Settings) -> None:
        self.scope = scope
        self.principal = principal
        self.budgets = budgets
        self.settings = settings
        self.started = False
        self._send = send
        self._charges: list[Charge] | None = None
        self._patience_s = settings.stream_stall_s

    def hold(self, charge: Charge) -> Charge:
        """Hold a charge until the request has ended."""
        if self._charges is None:
            self._charges = []
        self._charges.append(charge)
        return charge

    def release(self) -> None:
        """Give back what the request holds."""
        if self._charges is not None:
            for charge in self._charges:
                charge.release()
            self._charges = None

    async def charge_memory(self, amount: int, *, in_memory: bool = False) -> Charge:
        """Charge memory and hold it until the request has ended. As `Budget.wait_for`."""
        memory = self.budgets.memory
        amount = min(amount, memory.share)
        return self.hold(await memory.wait_for(self.principal, amount, within_s=WAIT_S, in_memory=in_memory))

    async def take_turn(self) -> None:
        """Wait for the principal's turn to read a list whole, and hold it. Raises `BudgetExceeded`, `HostBusy`."""
        self.hold(await self.budgets.listings.wait_for(self.principal, 1, within_s=WAIT_S))

    async def take_write(self, amount: int) -> Charge:
        """Wait for the principal's turn to store a large message, and charge it; until then it is charged as memory.

        Release the charge once it is stored. Raises `BudgetExceeded`, `HostBusy`.
        """
        memory, writes = self.budgets.memory, self.budgets.writes
        size = min(amount, memory.share)
        with await memory.wait_for(self.principal, size, within_s=WAIT_S, in_memory=True):
            await self.budgets.loop_time.turn(self.principal, amount / STORED_PER_S)
            return await writes.wait_for(self.principal, min(amount, writes.share), within_s=WAIT_S)

    def take_edit(self) -> None:
        """Hold one of the principal's edits of histories until the request has ended. Raises `BudgetExceeded`."""
        self.hold(self.budgets.edits.charge(self.principal))

    async def work(self, encode: Callable[[], bytes]) -> bytes:
        """Encode a piece on the loop at the expense of the principal, and give the others their turn."""
        return await self.budgets.loop_time.run(self.principal, encode)

    async def put(self, message: MutableMapping[str, Any]) -> None:
        """Write one ASGI message of the response.

        Raises:
            TimeoutError: the reader took nothing for ``stream_stall_s``, or less than ``_LEAST_RATE`` for too long; the
                connection is cut.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send(message)
        except TimeoutError:
            cut_connection(self.scope)
            raise
        earned_s = len(message.get("body", b"")) / _LEAST_RATE
        self._patience_s = min(self.settings.stream_stall_s, self._patience_s - (loop.time() - began) + earned_s)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Write one ASGI message of the response; a large body is charged and goes in pieces. Raises as `put`."""
        body = message.get("body", b"")
        if len(body) <= FREE_BYTES:
            await self.put(message)  # answers before it may be unread still
            return
        await self.charge_memory(len(body), in_memory=True)
        await self.write(body)
        await self.put({"type": "http.response.body", "body": b"", "more_body": message.get("more_body", False)})

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Write the head of a response whose body follows by `write` and `end`. Raises as `put`."""
        self.started = True
        await self.put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Write a part of the response's body in pieces. Raises as `put`."""
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            await self.put({"type": "http.response.body", "body": piece, "more_body": True})
            if len(piece) == _PIECE_BYTES:
                await self.budgets.loop_time.pay(self.principal, _PIECE_BYTES / WRITTEN_PER_S)

    async def end(self) -> None:
        """The body is whole. Raises as `put`."""
        await self.put({"type": "http.response.body", "body": b"", "more_body": False})


def cut_connection(scope: Scope) -> None:
    """Close the connection of a request at once; what it has not taken yet is dropped, in the kernel too."""
    cut = scope.get(CUT)
    if cut is not None:
        cut()
