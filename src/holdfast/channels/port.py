"""The port to chat networks: what a channel brings in from people, and what it delivers to them.

A channel keeps nothing of its own: what came in is durable once `Receive` has returned, and what goes out is kept by
whoever calls `Channel.deliver` until that returns. So both ways are at least once, and ids tell the repeats:

- A message that was not acknowledged to the network comes in again, under the same ``incoming_id``.
- A delivery that may not have arrived is made again, under the same ``delivery_id``, with ``attempt`` above 1. A
  network that knows such ids shows it once; with any other the channel marks it as a possible repeat.

A conformance suite (`holdfast.testing.CHANNEL_CHECKS`) tries all of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias, runtime_checkable

from holdfast.protocol.messages import Value

__all__ = ["Channel", "Delivery", "Incoming", "Receive"]


class Incoming(Value, frozen=True, kw_only=True):
    """What somebody wrote.

    Parameters:
        address: where it was written and where answers go: a room, a chat, a mailbox. A session belongs to one.
        incoming_id: the network's own id; the same each time the network brings this message.
        content: the text.
        sender: who wrote it, in the network's words.
    """

    address: str
    incoming_id: str
    content: str
    sender: str = ""


class Delivery(Value, frozen=True, kw_only=True):
    """One attempt to deliver a message.

    Parameters:
        delivery_id: the message's id, the same in every attempt.
        address: where it goes.
        content: the text.
        attempt: 1, and more where an earlier attempt may have arrived.
    """

    delivery_id: str
    address: str
    content: str
    attempt: int = 1


Receive: TypeAlias = Callable[[Incoming], Awaitable[None]]
"""Takes what came in; when it returns that is durable. It may wait while there is no room. Where it raises, the message
was not taken."""


@runtime_checkable
class Channel(Protocol):
    """A connection to one chat network, for one account there."""

    @property
    def name(self) -> str:
        """For people and in ids, such as ``matrix``."""
        ...

    def open(self, receive: Receive) -> AbstractAsyncContextManager[None]:
        """Be connected within the block; leaving it ends every task and connection of the channel.

        Parameters:
            receive: called for everything that people write, never for what `deliver` sent; for one address in order,
                and one after the other. The network gets its acknowledgement after it has returned, not before; what
                it raised for comes again later.

        Raises:
            ConfigurationError: the network refuses this account.
        """
        ...

    async def deliver(self, delivery: Delivery) -> None:
        """Make one attempt, within the block of `open`; when it returns the network has the message.

        It is never repeated here: the caller does that, and knows by when it has to stop. A cancel ends it at once.

        Raises:
            DeliveryFailed: ``retry_after_s`` says whether to try again.
        """
        ...
