"""Port to chat networks. A channel receives messages from people and delivers messages to them.

A channel stores no messages. A received message is durable once `Receive` has returned, and the caller of
`Channel.deliver` keeps an outgoing message until the call returns. Messages are therefore delivered at least once in
both directions, and duplicates can be recognized by their ids:

- A message that was not acknowledged to the network is received again with the same ``incoming_id``.
- A delivery that may have failed is repeated with the same ``delivery_id`` and an ``attempt`` above 1. If the network
  supports such ids, people see the message once; otherwise the channel marks the message as a possible duplicate.

A conformance suite (`holdfast.testing.CHANNEL_CHECKS`) tests these rules.
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
        address: room, chat or mailbox in which the message was written, and to which answers are sent. A session
            belongs to one address.
        incoming_id: the network's id of the message, which is the same whenever the network delivers the message again.
        content: text of the message.
        sender: name of the author on the network.
    """

    address: str
    incoming_id: str
    content: str
    sender: str = ""


class Delivery(Value, frozen=True, kw_only=True):
    """One attempt to deliver a message.

    Parameters:
        delivery_id: id of the message, the same in every attempt.
        address: room, chat or mailbox to which the message is sent.
        content: text of the message.
        attempt: number of the attempt; more than 1 if an earlier attempt may have delivered the message.
    """

    delivery_id: str
    address: str
    content: str
    attempt: int = 1


Receive: TypeAlias = Callable[[Incoming], Awaitable[None]]
"""Callback that accepts a received message. The message is durable once the call returns. The call may take a while if
the host is short of capacity. If the call raises, the message was not accepted."""


@runtime_checkable
class Channel(Protocol):
    """A connection to one chat network under one account."""

    @property
    def name(self) -> str:
        """Name of the channel, such as ``matrix``, which is shown to people and used in ids."""
        ...

    def open(self, receive: Receive) -> AbstractAsyncContextManager[None]:
        """Return a context manager that keeps the channel connected to the network.

        On exit, the context manager ends every task and connection of the channel.

        Parameters:
            receive: called with every message that people write, but not with messages sent by `deliver`. For each
                address, messages are passed in order and one at a time. A message is acknowledged to the network only
                after `receive` has returned; if `receive` raises, the network delivers the message again later.

        Raises:
            ConfigurationError: if the network refuses the account.
        """
        ...

    async def deliver(self, delivery: Delivery) -> None:
        """Attempt one delivery. When the call returns, the network has accepted the message.

        Call this only while the channel is open. The channel does not retry; the caller does, and decides when to stop.
        Cancelling the call ends the attempt at once.

        Raises:
            DeliveryFailed: if the message was not delivered or may not have been delivered. Retry only if the error's
                ``retry_after_s`` is set.
        """
        ...
