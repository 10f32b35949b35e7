"""Stops in progress: each continues even if the request that started it ends, and its result is kept for a while."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast import ids
from holdfast.errors import UnknownStop
from holdfast.host.budgets import Budget, Charge
from holdfast.protocol.messages import SessionStop
from holdfast.protocol.stopping import StopReceipt

__all__ = ["StopTicket", "Stops"]

_KEPT = 1000
"""Maximum number of results kept per principal."""
_PRINCIPALS = 10_000
"""Maximum number of principals whose results are kept: those with the newest results."""

StopResult = StopReceipt | SessionStop


@dataclass(frozen=True, slots=True)
class StopTicket:
    """A requested stop: its id, its owner, and its result once available."""

    stop_id: str
    principal: str
    key: str
    result: asyncio.Future[StopResult]


class Stops:
    """The stops of a server. Use it from one loop, inside ``async with``; the exit waits for stops in progress.

    Keeps each principal's newest 1,000 results, for the 10,000 principals with the most recent stops.

    Parameters:
        budget: budget of stops in progress.
    """

    __slots__ = ("_budget", "_done", "_group", "_open")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._open: dict[str, StopTicket] = {}
        self._done: dict[str, OrderedDict[str, StopTicket]] = {}
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Stops:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._group.__aexit__(None, None, None)

    async def run(
        self, principal: str, key: str, stop: Callable[[], Awaitable[StopResult]], *, wait_s: float
    ) -> StopTicket:
        """Start a stop, and wait up to `wait_s` seconds for its result.

        Raises:
            HoldfastError: the error of the stop, if it failed within that time.
            BudgetExceeded, HostBusy: too many stops are in progress.
        """
        charge = self._budget.charge(principal)
        result: asyncio.Future[StopResult] = asyncio.get_running_loop().create_future()
        ticket = StopTicket(ids.stop_id(), principal, key, result)
        self._open[ticket.stop_id] = ticket
        self._group.create_task(self._carry(ticket, stop, charge), name=f"stop of {key}")
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(result)
        except TimeoutError:
            pass
        return ticket

    def find(self, principal: str, key: str, stop_id: str) -> StopTicket:
        """Return a stop of that session. Raises `UnknownStop`."""
        ticket = self._open.get(stop_id)
        if ticket is None and principal in self._done:
            ticket = self._done[principal].get(stop_id)
        if ticket is None or (ticket.principal, ticket.key) != (principal, key):
            raise UnknownStop(f"unknown stop {stop_id[:40]!r}")
        return ticket

    async def _carry(self, ticket: StopTicket, stop: Callable[[], Awaitable[StopResult]], charge: Charge) -> None:
        result = ticket.result
        try:
            result.set_result(await stop())
        except Exception as error:
            result.set_exception(error)
            result.exception()  # mark it retrieved: the result may never be requested
        finally:
            result.cancel()
            charge.release()
            del self._open[ticket.stop_id]
            self._keep(ticket)

    def _keep(self, ticket: StopTicket) -> None:
        done = self._done.pop(ticket.principal, None) or OrderedDict()
        done[ticket.stop_id] = ticket
        self._done[ticket.principal] = done  # principals with the most recent stops come last
        if len(done) > _KEPT:
            done.popitem(last=False)
        if len(self._done) > _PRINCIPALS:
            del self._done[next(iter(self._done))]
