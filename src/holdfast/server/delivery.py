"""Budget charges of a request, and delivery of its response: charged, in pieces, to clients that keep reading.

Every request body and every response body passes through here (`tests/server/test_accounting.py` checks it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.host.budgets import FREE_BYTES, Budgets, Charge
from holdfast.settings import Settings

__all__ = ["CUT", "WAIT_S", "Receive", "ResponseDelivery", "Scope", "Send", "cut_connection"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CUT = "holdfast.cut"
"""Key of the ASGI scope under which the server's protocol stores the function that cuts the connection."""
WAIT_S = 5.0
"""Seconds that a large body or a list waits for budget."""
WRITTEN_PER_S = 500_000_000
"""Bytes of large responses that a loop writes per second. A fast client would otherwise monopolize the loop."""
STORED_PER_S = 40_000_000
"""Bytes of large messages that the loop and the store handle per second. A principal gets a quarter of that."""
TAKEN_PER_S = 80_000_000
"""Bytes of large bodies that a host accepts per second. Decoding and storing them delays other requests."""
_PIECE_BYTES = 65_536
_LEAST_RATE = 10_000
"""Minimum long-run rate in bytes per second for reading a large response; a slower client uses up its stall time."""


class ResponseDelivery:
    """Budget charges of one request, and delivery of its response. Use it only in the task that handles the request.

    Parameters:
        scope, send: from ASGI.
        principal: the principal to charge; `UNKNOWN` until a key is checked.
        budgets: the host's budgets.
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
        """Hold a charge until the request ends."""
        if self._charges is None:
            self._charges = []
        self._charges.append(charge)
        return charge

    def release(self) -> None:
        """Release the request's charges."""
        if self._charges is not None:
            for charge in self._charges:
                charge.release()
            self._charges = None

    async def charge_memory(self, amount: int, *, in_memory: bool = False) -> Charge:
        """Charge memory and hold it until the request ends. See `Budget.wait_for`."""
        memory = self.budgets.memory
        amount = min(amount, memory.share)
        return self.hold(await memory.wait_for(self.principal, amount, within_s=WAIT_S, in_memory=in_memory))

    async def take_turn(self) -> None:
        """Wait for the principal's turn to read a whole list, and keep the turn until the request ends.

        Raises `BudgetExceeded`, `HostBusy`.
        """
        self.hold(await self.budgets.listings.wait_for(self.principal, 1, within_s=WAIT_S))

    async def take_write(self, amount: int) -> Charge:
        """Wait for the principal's turn to store a large message, and charge it. During the wait, charge its memory.

        Release the charge once the message is stored. Raises `BudgetExceeded`, `HostBusy`.
        """
        memory, writes = self.budgets.memory, self.budgets.writes
        size = min(amount, memory.share)
        with await memory.wait_for(self.principal, size, within_s=WAIT_S, in_memory=True):
            await self.budgets.loop_time.turn(self.principal, amount / STORED_PER_S)
            return await writes.wait_for(self.principal, min(amount, writes.share), within_s=WAIT_S)

    def take_edit(self) -> None:
        """Hold one of the principal's history edits until the request ends. Raises `BudgetExceeded`."""
        self.hold(self.budgets.edits.charge(self.principal))

    async def work(self, encode: Callable[[], bytes]) -> bytes:
        """Encode a piece on the loop, charge the time to the principal, and yield to other principals."""
        return await self.budgets.loop_time.run(self.principal, encode)

    async def put(self, message: MutableMapping[str, Any]) -> None:
        """Write one ASGI message of the response.

        Raises:
            TimeoutError: the client read nothing for ``stream_stall_s``, or less than ``_LEAST_RATE`` for too long;
                the connection is cut.
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
        """Write one ASGI message of the response; charge a large body and write it in pieces. Raises as `put`."""
        body = message.get("body", b"")
        if len(body) <= FREE_BYTES:
            await self.put(message)  # may wait for earlier responses that are still unread
            return
        await self.charge_memory(len(body), in_memory=True)
        await self.write(body)
        await self.put({"type": "http.response.body", "body": b"", "more_body": message.get("more_body", False)})

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Write the head of a response; `write` and `end` write its body. Raises as `put`."""
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
        """Complete the response's body. Raises as `put`."""
        await self.put({"type": "http.response.body", "body": b"", "more_body": False})


def cut_connection(scope: Scope) -> None:
    """Close a request's connection at once, and drop data that the client has not read, also in the kernel."""
    cut = scope.get(CUT)
    if cut is not None:
        cut()
