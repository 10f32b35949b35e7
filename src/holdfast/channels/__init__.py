"""Chat networks: the port that a channel fits into."""

from holdfast.channels.port import Channel, Delivery, Incoming, Receive

__all__ = ["Channel", "Delivery", "Incoming", "Receive"]
