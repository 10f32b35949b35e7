"""A storm's session and messages, as seen by their senders."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from holdfast.proof.storm.access import HostAccess
from holdfast.proof.storm.readers import StormReader
from holdfast.protocol.messages import Policy

__all__ = ["StormMessage", "StormSession"]


@dataclass
class StormMessage:
    """A message, with the facts that its sender knows."""

    key: str
    content: str
    policy: Policy
    agent: str | None
    may_fail: bool
    message_id: str | None = None


@dataclass
class StormSession:
    """A session of the storm, with the facts that its clients know.

    While ``access`` is set, messages and stops go this way instead of that of the load.
    """

    principal: str
    key: str
    agent: str | None
    chance: random.Random
    number: int = 0
    run_id: str | None = None
    sent: deque[StormMessage] = field(default_factory=lambda: deque(maxlen=30))
    readers: list[StormReader] = field(default_factory=list)
    exists: bool = False
    access: HostAccess | None = None
