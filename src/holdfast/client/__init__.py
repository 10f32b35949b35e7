"""HTTP client, with the same interface to sessions and schedules as a host."""

from holdfast.client.client import Client
from holdfast.client.schedules import RemoteSchedule
from holdfast.client.session import RemoteSession

__all__ = ["Client", "RemoteSchedule", "RemoteSession"]
