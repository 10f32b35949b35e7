"""Sessions at both ends of a stream: items become messages, and a session's log becomes an observable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast import clock, ids
from holdfast.errors import AlreadySettled, EventsMissed, MailboxFull, WaitsForItself
from holdfast.integrations.reactive.subscription import Flow
from holdfast.protocol.events import Event, Gap
from holdfast.protocol.messages import check_seconds
from holdfast.protocol.session_api import SessionAPI, answer

if TYPE_CHECKING:
    from holdfast.integrations.reactive.outlet import Outlet
    from holdfast.integrations.reactive.subscription import Home, Work
    from holdfast.integrations.reactive.work import ItemText
    from holdfast.protocol.messages import Policy, Receipt
    from holdfast.protocol.stopping import Cause
    from holdfast.runtime import Scope

__all__ = ["EventFlow", "SessionSender", "Sessions"]

Sessions = Callable[[Any], SessionAPI] | SessionAPI
"""A function that returns the session of an item, or one session for all items."""

_FIRST_AGAIN_S = 0.02
_LAST_AGAIN_S = 1.0
"""Delays before a retry on a full mailbox: the first one, and the maximum."""

_SHARED = ("steer", "collect")
"""Policies under which a run may also have other senders' messages."""


class SessionSender:
    """Sends items as messages; the parameters are those of `ReactiveBridge.ask`."""

    def __init__(
        self,
        session_of: Sessions,
        text: ItemText,
        policy: Policy,
        idempotency_key: Callable[[Any], str] | None,
        agent: str | None,
        full_s: float,
    ) -> None:
        check_seconds(full_s=full_s)
        self._session_of = session_of if callable(session_of) else None
        self._session = None if callable(session_of) else session_of
        self._text = text
        self._policy: Policy = policy
        self._key_of = idempotency_key
        self._agent = agent
        self._full_s = full_s

    def sending(self) -> Work:
        """Return the async function that sends one item and returns the receipt."""
        order = _Order()

        async def send(_: Scope, __: int, item: Any) -> Receipt:
            return await self._send(order, self._letter(item))

        return send

    def asking(self) -> Work:
        """Return the async function that sends one item and returns the session's answer."""
        order = _Order()

        async def ask(scope: Scope, _: int, item: Any) -> str:
            letter = self._letter(item)
            try:
                receipt = await self._send(order, letter)
                return answer(await letter.session.wait(receipt.message_id))
            except WaitsForItself:
                await self._take_back(letter, scope)
                raise
            except asyncio.CancelledError:
                if scope.interrupt.triggered:
                    await self._take_back(letter, scope)
                raise

        return ask

    def _letter(self, item: Any) -> _Letter:
        session = self._session_of(item) if self._session_of is not None else self._session
        assert session is not None
        # Our own key allows finding out later whether an interrupted send was accepted.
        return _Letter(session, item, ids.message_id() if self._key_of is None else self._key_of(item))

    async def _send(self, order: _Order, letter: _Letter) -> Receipt:
        """Send a letter after the earlier letters to the same session. Raises the errors of ``session.send``."""
        async with order.turn(letter.session.key):
            pause_s = _FIRST_AGAIN_S
            give_up_at = clock.system_clock.monotonic() + self._full_s
            while True:
                try:
                    return await self._once(letter)
                except MailboxFull:
                    if clock.system_clock.monotonic() + pause_s > give_up_at:
                        raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_AGAIN_S)

    async def _once(self, letter: _Letter) -> Receipt:
        text = self._text(letter.item)
        letter.may_be_there = True
        try:
            letter.receipt = await letter.session.send(
                text, policy=self._policy, idempotency_key=letter.key, agent=self._agent
            )
        except MailboxFull:
            letter.may_be_there = False
            raise
        return letter.receipt

    async def _take_back(self, letter: _Letter, scope: Scope) -> None:
        """Revoke a message whose answer the stream no longer awaits, within the grace period of the stop."""
        if not letter.may_be_there:
            return
        session = letter.session
        try:
            receipt = letter.receipt or await self._once(letter)
        except MailboxFull:  # then it was not accepted before either
            return
        try:
            await session.withdraw(receipt.message_id)
        except AlreadySettled:
            settlement = await session.message(receipt.message_id)
            if settlement.state == "taken" and self._policy not in _SHARED:
                cause = scope.interrupt.cause
                reason = "its stream was cut off" if cause is None else cause.reason
                await session.interrupt(reason, run_id=settlement.run_id)


@dataclass(slots=True)
class _Letter:
    """An item on its way to a session.

    Parameters:
        session, item, key: the target session, the item and the idempotency key.
        may_be_there: whether a send was started and the session did not reject the message.
        receipt: the receipt of the message; None until the send has returned.
    """

    session: SessionAPI
    item: Any
    key: str
    may_be_there: bool = False
    receipt: Receipt | None = None


class _Order:
    """Orders the sends to each session: one after the other, in order of arrival."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[str, tuple[asyncio.Lock, list[None]]] = {}

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncGenerator[None]:
        """Wait until the earlier messages to this session are sent; later ones wait while the block runs."""
        lock, users = self._lines.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._lines[key]


class EventFlow(Flow):
    """A subscription to a session's log.

    Parameters:
        home, name, outlet: parameters of `Flow`.
        read: function that starts to read the log and returns an iterator of events.
        strict: whether a gap ends the stream with an error.
    """

    def __init__(
        self, home: Home, name: str, outlet: Outlet, read: Callable[[], AsyncIterator[Event | Gap]], strict: bool
    ) -> None:
        super().__init__(home, name, outlet)
        self._read = read
        self._strict = strict
        self._drained = False

    def drain(self) -> None:
        """Stop reading, and complete. Thread-safe."""
        self._drained = True
        scope = self.scope
        if scope is not None:
            scope.interrupt.trigger("drained", kind="stop")

    def cut_off(self, cause: Cause | None) -> Exception | None:
        """Return the observer's error for an interrupted stream, or None if the stream was drained."""
        return None if self._drained else super().cut_off(cause)

    async def _drive(self, scope: Scope) -> Exception | None:
        if self._drained:
            return None
        events = self._read()
        async with aclosing(events) if isinstance(events, AsyncGenerator) else nullcontext():
            async for event in events:
                if self._strict and isinstance(event, Gap):
                    return EventsMissed(f"the events {event.after + 1} to {event.until} were missed ({event.reason})")
                await self.outlet.give((event,))
                if self.outlet.fault is not None:
                    self._disposed = True
                    break
        return None
