"""Port to chat networks: messages that a channel receives from people, and messages that it delivers to them.

A channel stores nothing itself: a received message is durable once `Receive` has returned, and the caller of
`Channel.deliver` keeps an outgoing message until the call returns. Both directions are therefore at-least-once, and ids
identify repeats:

- A message that was not acknowledged to the network arrives again with the same ``incoming_id``.
- A delivery that may not have arrived is repeated with the same ``delivery_id`` and an ``attempt`` above 1. A network
  that supports such ids shows it once; otherwise the channel marks it as a possible repeat.

A conformance suite (`holdfast.testing.CHANNEL_CHECKS`) tests all of this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias, runtime_checkable

from holdfast.protocol.messages import Value

__all__ = ["Channel", "Delivery", "Incoming", "Receive"]


class Incoming(Value, frozen=True, kw_only=True):
    """A message from a person on the network.

    Parameters:
        address: where it was written and where answers are sent: a room, chat or mailbox. A session belongs to one
            address.
        incoming_id: the network's id of the message; the same each time the network delivers it.
        content: the text.
        sender: its author, as the network names them.
    """

    address: str
    incoming_id: str
    content: str
    sender: str = ""


class Delivery(Value, frozen=True, kw_only=True):
    """One attempt to deliver a message.

    Parameters:
        delivery_id: the message's id, the same in every attempt.
        address: destination.
        content: the text.
        attempt: 1, or more if an earlier attempt may have arrived.
    """

    delivery_id: str
    address: str
    content: str
    attempt: int = 1


Receive: TypeAlias = Callable[[Incoming], Awaitable[None]]
"""Accepts a received message, which is durable once it returns. It may wait for capacity. If it raises, the message was
not accepted."""


@runtime_checkable
class Channel(Protocol):
    """A connection to one chat network, with one account."""

    @property
    def name(self) -> str:
        """Name for people and in ids, such as ``matrix``."""
        ...

    def open(self, receive: Receive) -> AbstractAsyncContextManager[None]:
        """Stay connected within the block; leaving it ends every task and connection of the channel.

        Parameters:
            receive: called for every message that people write, never for those that `deliver` sent; in order for each
                address, one message at a time. A message is acknowledged to the network only after `receive` has
                returned; if it raises, the message arrives again later.

        Raises:
            ConfigurationError: the network refuses this account.
        """
        ...

    async def deliver(self, delivery: Delivery) -> None:
        """Attempt one delivery, within the block of `open`; once this returns, the network has the message.

        A channel does not retry; its caller does, and decides when to stop. Cancellation ends the attempt at once.

        Raises:
            DeliveryFailed: not delivered, or unknown whether; a retry helps only if ``retry_after_s`` is set.
        """
        ...
