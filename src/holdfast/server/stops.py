"""Stops in progress: each continues even if the request that started it ends, and keeps its result for a while."""

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
"""Results of each principal."""
_PRINCIPALS = 10_000
"""Principals whose results are kept: those with the newest ones."""

StopResult = StopReceipt | SessionStop


@dataclass(frozen=True, slots=True)
class StopTicket:
    """A stop that was asked for: its id, whose it is, and its result once there is one."""

    stop_id: str
    principal: str
    key: str
    result: asyncio.Future[StopResult]


class Stops:
    """The stops of a server. Of one loop; open from `__aenter__` to `__aexit__`, which waits for what is under way.

    Each principal's newest 1,000 results are kept, of the 10,000 principals that stopped something last.

    Parameters:
        budget: of stops under way.
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
        """Start a stop and wait for its result, but not longer than `wait_s` seconds.

        Raises:
            HoldfastError: what the stop raised within that time.
            BudgetExceeded, HostBusy: too many stops are under way.
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
        """A stop of that session. Raises `UnknownStop`."""
        ticket = self._open.get(stop_id)
        if ticket is None and principal in self._done:
            ticket = self._done[principal].get(stop_id)
        if ticket is None or (ticket.principal, ticket.key) != (principal, key):
            raise UnknownStop(f"there is no stop {stop_id[:40]!r}")
        return ticket

    async def _carry(self, ticket: StopTicket, stop: Callable[[], Awaitable[StopResult]], charge: Charge) -> None:
        result = ticket.result
        try:
            result.set_result(await stop())
        except Exception as error:
            result.set_exception(error)
            result.exception()  # told to whoever asks for the result, if anybody does
        finally:
            result.cancel()
            charge.release()
            del self._open[ticket.stop_id]
            self._keep(ticket)

    def _keep(self, ticket: StopTicket) -> None:
        done = self._done.pop(ticket.principal, None) or OrderedDict()
        done[ticket.stop_id] = ticket
        self._done[ticket.principal] = done  # principals whose stops ended last are at the end
        if len(done) > _KEPT:
            done.popitem(last=False)
        if len(self._done) > _PRINCIPALS:
            del self._done[next(iter(self._done))]
