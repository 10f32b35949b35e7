"""Stops in progress. A stop continues even if its request ends, and the result is kept for later requests.

If other servers use the store, a stop that takes longer than its request is recorded there, so that a later request may
reach any of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast import ids
from holdfast.errors import HoldfastError, UnknownStop
from holdfast.host.budgets import Budget, Charge
from holdfast.protocol.messages import SessionStop
from holdfast.protocol.stopping import StopReceipt
from holdfast.storage.port import Cluster

__all__ = ["StopTicket", "Stops"]

_KEPT = 1000
"""Maximum number of results kept per principal."""
_PRINCIPALS = 10_000
"""Maximum number of principals whose results are kept. The principals with the newest results are kept."""

_FAILED = b""
"""What is recorded of a stop that failed."""
_SHARE_S = 1.0
"""Time that a response waits until other servers know its stop."""

StopResult = StopReceipt | SessionStop

_decode_receipt = msgspec.json.Decoder(StopReceipt).decode
_decode_stop = msgspec.json.Decoder(SessionStop).decode


@dataclass(slots=True)
class StopTicket:
    """A requested stop, with its id, its principal, its session key and a future for its result.

    ``shared`` means that the stop is recorded for other servers.
    """

    stop_id: str
    principal: str
    key: str
    result: asyncio.Future[StopResult]
    shared: bool = False


class Stops:
    """The stops of a server. Open it with ``async with``, and use it from one event loop only.

    On exit, it waits for stops in progress. It keeps the newest 1,000 results of each principal, for the 10,000
    principals with the most recent stops.

    Parameters:
        budget: budget that limits the number of stops in progress.
        cluster: the servers that share the store; None if only this server uses it.
    """

    __slots__ = ("_budget", "_cluster", "_done", "_group", "_open")

    def __init__(self, budget: Budget, cluster: Cluster | None) -> None:
        self._budget = budget
        self._cluster = cluster
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
        """Start a stop, wait up to `wait_s` seconds for its result, and return its ticket.

        Parameters:
            principal: principal of the session.
            key: key of the session.
            stop: function that stops the work, called without arguments.
            wait_s: maximum time to wait for the result, in seconds.

        Raises:
            HoldfastError: if the stop fails within `wait_s` seconds.
            BudgetExceeded, HostBusy: if too many stops are in progress.
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
            await self.share(ticket)
        return ticket

    async def share(self, ticket: StopTicket) -> None:
        """Record a stop for the other servers, if any. If that fails or takes long, only this server knows it."""
        if self._cluster is not None and not ticket.shared:
            ticket.shared = True
            saving = self._group.create_task(self._save(self._cluster, ticket), name=f"share a stop of {ticket.key}")
            await asyncio.wait((saving,), timeout=_SHARE_S)

    async def find(self, principal: str, key: str, stop_id: str) -> StopTicket:
        """Return a stop of the principal's session `key`, of this server or another one.

        Raises:
            UnknownStop: if the session has no such stop, or if the server that carried it out is gone.
            StorageError: if the store does not answer.
        """
        ticket = self._open.get(stop_id)
        if ticket is None and principal in self._done:
            ticket = self._done[principal].get(stop_id)
        if ticket is None and self._cluster is not None:
            found = await self._cluster.find_stop(stop_id, principal, key)
            if found is not None and found != _FAILED:
                ticket = _ticket_of(stop_id, principal, key, found)
        if ticket is None or (ticket.principal, ticket.key) != (principal, key):
            raise UnknownStop(f"unknown stop {stop_id[:40]!r}")
        return ticket

    async def _save(self, cluster: Cluster, ticket: StopTicket) -> None:
        """Record a stop as it is now, without the contents of withdrawn messages.

        One that failed is unknown to other servers, so that it is requested again.
        """
        result = ticket.result
        body = None
        if result.done():
            failed = result.cancelled() or result.exception() is not None
            body = _FAILED if failed else msgspec.json.encode(_without_content(result.result()))
        with suppress(HoldfastError):
            await cluster.save_stop(ticket.stop_id, ticket.principal, ticket.key, body)

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
            if self._cluster is not None and ticket.shared:
                await self._save(self._cluster, ticket)

    def _keep(self, ticket: StopTicket) -> None:
        done = self._done.pop(ticket.principal, None) or OrderedDict()
        done[ticket.stop_id] = ticket
        self._done[ticket.principal] = done  # principals with the most recent stops come last
        if len(done) > _KEPT:
            done.popitem(last=False)
        if len(self._done) > _PRINCIPALS:
            del self._done[next(iter(self._done))]


def _without_content(result: StopResult) -> StopResult:
    if not isinstance(result, SessionStop):
        return result
    withdrawn = tuple(msgspec.structs.replace(message, content="") for message in result.withdrawn)
    return msgspec.structs.replace(result, withdrawn=withdrawn)


def _ticket_of(stop_id: str, principal: str, key: str, found: bytes | Literal["pending"]) -> StopTicket:
    """Return the ticket of a stop that another server carries out, or has carried out."""
    result: asyncio.Future[StopResult] = asyncio.get_running_loop().create_future()
    if found != "pending":
        is_session_stop = "receipt" in msgspec.json.decode(found)
        result.set_result(_decode_stop(found) if is_session_stop else _decode_receipt(found))
    return StopTicket(stop_id, principal, key, result)
