"""Stops under way: each goes on whatever becomes of the request that asked for it, and keeps its result for a while."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from holdfast import ids
from holdfast.errors import LimitExceeded, UnknownStop
from holdfast.protocol.messages import SessionStop
from holdfast.protocol.stopping import StopReceipt

__all__ = ["StopTicket", "Stops"]

_KEPT = 1000
_UNDER_WAY = 10_000

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

    At most 10,000 are under way, and the newest 1,000 results are kept.
    """

    __slots__ = ("_done", "_group", "_open")

    def __init__(self) -> None:
        self._open: dict[str, StopTicket] = {}
        self._done: OrderedDict[str, StopTicket] = OrderedDict()
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
            LimitExceeded: too many stops are under way.
        """
        if len(self._open) >= _UNDER_WAY:
            raise LimitExceeded(f"{_UNDER_WAY} stops are under way", hint="wait for some of them")
        result: asyncio.Future[StopResult] = asyncio.get_running_loop().create_future()
        ticket = StopTicket(ids.stop_id(), principal, key, result)
        self._open[ticket.stop_id] = ticket
        self._group.create_task(self._carry(ticket, stop), name=f"stop of {key}")
        try:
            async with asyncio.timeout(wait_s):
                await asyncio.shield(result)
        except TimeoutError:
            pass
        return ticket

    def find(self, principal: str, key: str, stop_id: str) -> StopTicket:
        """A stop of that session. Raises `UnknownStop`."""
        ticket = self._open.get(stop_id) or self._done.get(stop_id)
        if ticket is None or (ticket.principal, ticket.key) != (principal, key):
            raise UnknownStop(f"there is no stop {stop_id[:40]!r}")
        return ticket

    async def _carry(self, ticket: StopTicket, stop: Callable[[], Awaitable[StopResult]]) -> None:
        result = ticket.result
        try:
            result.set_result(await stop())
        except Exception as error:
            result.set_exception(error)
            result.exception()  # told to whoever asks for the result, if anybody does
        finally:
            result.cancel()
            del self._open[ticket.stop_id]
            self._done[ticket.stop_id] = ticket
            if len(self._done) > _KEPT:
                self._done.popitem(last=False)
