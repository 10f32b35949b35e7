"""Chat networks: the port that channels implement."""

from holdfast.channels.port import Channel, Delivery, Incoming, Receive

__all__ = ["Channel", "Delivery", "Incoming", "Receive"]
