"""Budget charges of a request, and delivery of its response in chunks.

The memory of large bodies is charged to the principal, and the connection of a client that stops reading is cut. All
request bodies and all response bodies pass through this module; `tests/server/test_accounting.py` checks this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from holdfast.host.budgets import FREE_BYTES, Budgets, Charge
from holdfast.settings import Settings

__all__ = ["CUT", "PIECE_BYTES", "WAIT_S", "Receive", "ResponseDelivery", "Scope", "Send", "cut_connection"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CUT = "holdfast.cut"
"""Key in the ASGI scope of a request for the function that cuts the request's connection."""
WAIT_S = 5.0
"""Maximum time in seconds for which a request waits for budget for a large body or a list."""
WRITTEN_PER_S = 500_000_000
"""Bytes of large responses that the loop writes per second, so that a fast client does not monopolize the loop."""
STORED_PER_S = 40_000_000
"""Bytes of large messages that the loop and the store handle per second. A principal gets a quarter of this rate."""
TAKEN_PER_S = 80_000_000
"""Bytes of large bodies that a host accepts per second, because decoding and storing them delays other requests."""
PIECE_BYTES = 65_536
"""Maximum size in bytes of one write of a response body."""
_LEAST_RATE = 10_000
"""Minimum average rate in bytes per second at which a client must read a large response. A slower client is cut off
once it has used up its stall time."""


class ResponseDelivery:
    """Budget charges of one request, and delivery of its response. Use it only in the task that handles the request.

    Parameters:
        scope, send: arguments of the ASGI application.
        principal: principal to charge, which is `UNKNOWN` until the caller is authenticated.
        budgets: budgets of the host.
        settings: settings of the server, which contain its limits.
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
        """Hold a charge until the request ends, and return the charge."""
        if self._charges is None:
            self._charges = []
        self._charges.append(charge)
        return charge

    def release(self) -> None:
        """Release all charges of the request."""
        if self._charges is not None:
            for charge in self._charges:
                charge.release()
            self._charges = None

    async def charge_memory(self, amount: int, *, in_memory: bool = False) -> Charge:
        """Charge `amount` bytes of memory to the principal until the request ends. Raises as `Budget.wait_for`.

        An amount above the principal's share is reduced to the share.
        """
        memory = self.budgets.memory
        amount = min(amount, memory.share)
        return self.hold(await memory.wait_for(self.principal, amount, within_s=WAIT_S, in_memory=in_memory))

    async def take_turn(self) -> None:
        """Wait until the principal may read a whole list, and hold this permission until the request ends.

        Raises `BudgetExceeded` or `HostBusy` if the wait takes too long.
        """
        self.hold(await self.budgets.listings.wait_for(self.principal, 1, within_s=WAIT_S))

    async def take_write(self, amount: int) -> Charge:
        """Wait until the principal may store a large message, and return a charge for the write.

        The message's memory is charged during the wait. The caller must release the returned charge once the message is
        stored. Raises `BudgetExceeded` or `HostBusy` if the wait takes too long.

        Parameters:
            amount: size of the message in bytes.
        """
        memory, writes = self.budgets.memory, self.budgets.writes
        size = min(amount, memory.share)
        with await memory.wait_for(self.principal, size, within_s=WAIT_S, in_memory=True):
            await self.budgets.loop_time.turn(self.principal, amount / STORED_PER_S)
            return await writes.wait_for(self.principal, min(amount, writes.share), within_s=WAIT_S)

    def take_edit(self) -> None:
        """Charge one history edit to the principal until the request ends.

        Raises `BudgetExceeded` if the principal already has too many edits in progress.
        """
        self.hold(self.budgets.edits.charge(self.principal))

    async def work(self, encode: Callable[[], bytes]) -> bytes:
        """Call `encode` on the loop, charge its run time to the principal, and return its result.

        Before the result is returned, other tasks get a turn.
        """
        return await self.budgets.loop_time.run(self.principal, encode)

    async def put(self, message: MutableMapping[str, Any]) -> None:
        """Write one ASGI message of the response.

        Raises:
            TimeoutError: if the client read nothing for ``stream_stall_s``, or read more slowly than ``_LEAST_RATE``
                for too long. The connection has then already been cut.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send(message)
        except TimeoutError:
            cut_connection(self.scope)
            raise
        self.took(len(message.get("body", b"")), loop.time() - began)

    def took(self, count: int, seconds: float = 0.0) -> None:
        """Record a write of `count` bytes that took `seconds`, and compute the deadline of the next write.

        A client that reads slowly gets a shorter deadline, which grows again with the bytes that it reads.
        """
        self._patience_s = min(self.settings.stream_stall_s, self._patience_s - seconds + count / _LEAST_RATE)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Write one ASGI message of the response.

        A large body is written in chunks, and its memory is charged to the principal. Raises as `charge_memory` and
        `put`.
        """
        body = message.get("body", b"")
        if len(body) <= FREE_BYTES:
            await self.put(message)  # may wait for earlier responses that are still unread
            return
        await self.charge_memory(len(body), in_memory=True)
        await self.write(body)
        await self.put({"type": "http.response.body", "body": b"", "more_body": message.get("more_body", False)})

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Write the head of a response whose body is written with `write` and `end`. Raises as `put`."""
        self.started = True
        await self.put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Write a part of the response body in chunks. Raises as `put`."""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            await self.put({"type": "http.response.body", "body": piece, "more_body": True})
            if len(piece) == PIECE_BYTES:
                await self.budgets.loop_time.pay(self.principal, PIECE_BYTES / WRITTEN_PER_S)

    async def end(self) -> None:
        """Complete the response. Raises as `put`."""
        await self.put({"type": "http.response.body", "body": b"", "more_body": False})


def cut_connection(scope: Scope) -> None:
    """Close the connection of a request immediately, and drop all unsent data, including data in the kernel."""
    cut = scope.get(CUT)
    if cut is not None:
        cut()
