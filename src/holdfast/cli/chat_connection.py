"""Connection of ``holdfast chat`` to its server: whether it is lost, and the message that is on its way.

At most one message is on its way. While the connection is lost, the chat sends nothing else, so that nothing runs later
than the person expects; the message on its way is sent again until it is delivered or given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, ServerUnreachable

if TYPE_CHECKING:
    from holdfast.cli.chat_view import ChatView
    from holdfast.protocol.messages import Receipt

__all__ = ["PATIENCE_S", "ChatConnection"]

PATIENCE_S = 120.0
"""Time after which a lost connection, or a message that finds no server, is given up."""

_REMIND_AFTER_S = 2.0
_UNDELIVERED = "not delivered yet; still trying (Ctrl-C gives up)"
_FIRST_DELAY_S = 0.05
_MOST_DELAY_S = 1.0


class ChatConnection:
    """Connection of one conversation. Reports each loss and each return once.

    Parameters:
        screen: shows the reports.
    """

    def __init__(self, screen: ChatView) -> None:
        self._screen = screen
        self._loop = asyncio.get_running_loop()
        self._is_stream_cut = False
        self._loss: asyncio.Future[None] = self._loop.create_future()
        self._delivery: asyncio.Task[bool] | None = None
        self._deadline: asyncio.Timeout | None = None
        self._reminder: asyncio.TimerHandle | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the event stream is cut off, or the message on its way finds no server."""
        return self._loss.done()

    @property
    def is_delivering(self) -> bool:
        """Whether a message is on its way."""
        return self._delivery is not None and not self._delivery.done()

    def on_cut(self, error: HoldfastError) -> None:
        """Record that the event stream was cut off."""
        self._is_stream_cut = True
        self._lose(error)

    def on_back(self) -> None:
        """Record that the event stream receives data again."""
        self._is_stream_cut = False
        self._regain()

    def begin(self, delivery: asyncio.Task[bool]) -> None:
        """Take a message as on its way until it is delivered or given up.

        Parameters:
            delivery: calls `deliver`, and returns whether the server has responded.
        """
        self._delivery = delivery

    async def until_free(self) -> bool:
        """Wait until the next line can be sent. Return False if the connection is lost, or a message was given up."""
        if self._delivery is None or self._delivery.done():
            return not self.is_lost
        delivery = self._delivery
        while not (self.is_lost or delivery.done()):
            await asyncio.wait((delivery, self._loss), return_when=asyncio.FIRST_COMPLETED)
        return not self.is_lost and delivery.result()

    async def until_delivered(self, timeout_s: float | None = None) -> None:
        """Wait while a message is on its way; with a timeout, only while the server can be reached, too."""
        if self._delivery is not None:
            ends = (self._delivery,) if timeout_s is None else (self._delivery, self._loss)
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def deliver(self, send: Callable[[], Awaitable[Receipt]]) -> Receipt | None:
        """Send a message, and repeat it while the server cannot be reached. Return None if it was given up.

        Parameters:
            send: sends the message, each time with the same idempotency key.

        Raises:
            HoldfastError: if the server refuses the message.
        """
        try:
            async with asyncio.timeout(None) as self._deadline:
                receipt = await self._repeat(send, self._deadline)
        except TimeoutError:
            self._screen.line("gave up; the message may or may not have arrived")
            if not self._is_stream_cut:
                self._loss = self._loop.create_future()  # whether the server is back, the next message finds out
            return None
        finally:
            self._deadline = None
            self._forget_reminder()
        return receipt

    async def _repeat(self, send: Callable[[], Awaitable[Receipt]], deadline: asyncio.Timeout) -> Receipt:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                receipt = await send()
            except ServerUnreachable as error:
                self._lose(error)
                if deadline.when() is None:
                    deadline.reschedule(self._loop.time() + PATIENCE_S)
            except HoldfastError:
                self._reached()
                raise
            else:
                self._reached()
                return receipt
            await asyncio.sleep(delay_s)
            delay_s = min(_MOST_DELAY_S, 2 * delay_s)

    def give_up(self) -> None:
        """Give up the message on its way."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(self._loop.time())

    def _reached(self) -> None:
        """Record that the server has responded to a message."""
        if not self._is_stream_cut:
            self._regain()

    def _lose(self, error: HoldfastError) -> None:
        if not self.is_lost:
            self._loss.set_result(None)
            self._screen.cut(error)
            if self.is_delivering:
                self._reminder = self._loop.call_later(_REMIND_AFTER_S, self._screen.line, _UNDELIVERED)

    def _regain(self) -> None:
        if self.is_lost:
            self._loss = self._loop.create_future()
            self._forget_reminder()
            self._screen.back()

    def _forget_reminder(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None
