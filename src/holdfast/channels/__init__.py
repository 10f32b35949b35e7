"""Channels to chat networks: the interface that each channel implements."""

from holdfast.channels.port import Channel, Delivery, Incoming, Receive

__all__ = ["Channel", "Delivery", "Incoming", "Receive"]
