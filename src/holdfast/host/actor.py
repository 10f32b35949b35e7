"""A session live in this host: its run, its readers and its background work. Evicted when idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.host.budgets import FREE_BYTES
from holdfast.protocol.events import shown
from holdfast.runtime import Broadcast

if TYPE_CHECKING:
    from holdfast.host.active import ActiveRun
    from holdfast.protocol.events import Stored
    from holdfast.runtime import Scope

__all__ = ["SessionActor"]


def _length(event: Stored) -> int:
    return len(event.body)


class SessionActor:
    """One live session, at most one per session and host; used on the host's loop only.

    It has no task, queue or event of its own: it works by callbacks.
    """

    __slots__ = (
        "_background",
        "active",
        "deleted",
        "deleted_seq",
        "idle_since",
        "key",
        "log",
        "number",
        "principal",
        "readers",
        "session",
    )

    def __init__(self, *, session: int, number: int, principal: str, key: str, seq: int) -> None:
        self.session = session
        self.number = number
        self.principal = principal
        self.key = key
        self.log: Broadcast[Stored] = Broadcast(seq + 1, weigh=_length, weight_limit=FREE_BYTES)
        self.readers = 0
        self.deleted = False
        self.deleted_seq = 0
        self.active: ActiveRun | None = None
        self._background: dict[Scope, None] | None = None
        self.idle_since = 0.0

    def publish(self, events: Sequence[Stored]) -> None:
        """Show newly stored events to readers."""
        if events and not self.log.closed:
            self.log.publish(shown(events), first_seq=events[0].seq)
            if events[-1].kind == "session.deleted":
                self.deleted = True
                self.deleted_seq = events[-1].seq

    @property
    def idle(self) -> bool:
        """Whether nothing keeps it in memory."""
        return self.active is None and not self._background and not self.readers

    @property
    def background(self) -> dict[Scope, None]:
        """Scopes of this session's background work, oldest first."""
        if self._background is None:
            self._background = {}
        return self._background
