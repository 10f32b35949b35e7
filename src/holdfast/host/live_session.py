"""A session in this host's memory, with its run, readers and background work. Idle sessions are evicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from holdfast.host.budgets import FREE_BYTES
from holdfast.protocol.events import shown
from holdfast.runtime import Broadcast

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from holdfast.protocol.events import Stored
    from holdfast.protocol.run_phases import RunPhase
    from holdfast.protocol.stopping import Cause, StopReceipt
    from holdfast.runtime import Scope

__all__ = ["BackgroundOrigin", "LiveRun", "LiveSession", "SharedSession"]


class BackgroundOrigin(NamedTuple):
    """Where background work comes from.

    Parameters:
        started_seq: seq of the event with which the run started that began the work.
        noted: the record of the work in a store that other hosts use: its result is the epoch of this host under which
            others can find it, or 0 if it may not begin. None if no other host uses the store.
    """

    started_seq: int
    noted: asyncio.Task[int] | None


class LiveRun(Protocol):
    """Interface of a run in this host's memory, for the other parts of the host."""

    @property
    def run_id(self) -> str:
        """The run's id."""

    @property
    def attempt(self) -> int:
        """1, plus one for each restart of the run."""

    @property
    def actor(self) -> LiveSession:
        """The run's session."""

    @property
    def scope(self) -> Scope:
        """The scope that owns everything the run starts."""

    @property
    def status(self) -> Literal["completed", "failed", "interrupted"] | None:
        """The run's final status; None until it ends."""

    @property
    def phase(self) -> RunPhase:
        """The run's phase; `holdfast.protocol.run_phases` defines the phases."""

    @property
    def is_quiescent(self) -> bool:
        """Whether the run waits only for answers from people."""

    def stop(self, cause: Cause, *, grace_s: float | None = None) -> asyncio.Future[StopReceipt]:
        """Interrupt the run and return a future of the stop receipt, which resolves as `follow` describes."""

    def follow(self) -> asyncio.Future[StopReceipt]:
        """Return a future of the run's stop receipt, without stopping the run.

        The future resolves once the run's slot is free. It resolves earlier if the store keeps failing, or if an
        abandoned exclusive call still holds the slot.
        """

    def unload(self) -> bool:
        """Unload a quiescent run if a later claim can resume it. Return whether the run is being unloaded."""

    def unload_on_stop(self) -> None:
        """Make the next stop unload the run instead of ending it, if the run can resume at the host's next start."""

    def give_up(self) -> None:
        """Stop waiting for the store and write nothing more for the run, which is recovered at the next start."""

    def supersede(self) -> None:
        """End this run, because a newer claim holds the session."""


def _length(event: Stored) -> int:
    return len(event.body)


def _new_log(seq: int) -> Broadcast[Stored]:
    return Broadcast(seq + 1, weigh=_length, weight_limit=FREE_BYTES)


class LiveSession:
    """A session in memory. A host has at most one `LiveSession` for each session. Use it on the host's loop only.

    A live session has no tasks or queues of its own; it works only by callbacks.
    """

    __slots__ = (
        "_background",
        "_background_stops",
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
        "shown_seq",
    )

    def __init__(self, *, session: int, number: int, principal: str, key: str, seq: int) -> None:
        self.session = session
        self.number = number
        self.principal = principal
        self.key = key
        self.log = _new_log(seq)
        self.readers = 0
        self.shown_seq = 0
        """Number of the newest event that a reader has read from the store."""
        self.deleted = False
        self.deleted_seq = 0
        self.active: LiveRun | None = None
        self._background: dict[Scope, BackgroundOrigin] | None = None
        self._background_stops: tuple[Cause, dict[Scope, asyncio.Task[StopReceipt]]] | None = None
        self.idle_since = 0.0

    def publish(self, events: Sequence[Stored]) -> None:
        """Pass newly stored events to the session's readers."""
        if events and not self.log.closed:
            self.log.publish(shown(events), first_seq=events[0].seq)
            if events[-1].kind == "session.deleted":
                self.deleted = True
                self.deleted_seq = events[-1].seq

    @property
    def idle(self) -> bool:
        """Whether the session can be evicted from memory."""
        return self.active is None and not self._background and not self.readers

    @property
    def background(self) -> dict[Scope, BackgroundOrigin]:
        """Scopes of this session's background work, oldest first, each with its origin."""
        if self._background is None:
            self._background = {}
        return self._background

    def stop_background(
        self,
        start_task: Callable[[Coroutine[Any, Any, StopReceipt], str], asyncio.Task[StopReceipt]],
        cause: Cause,
        *,
        grace_s: float | None,
        before_seq: int | None = None,
    ) -> list[asyncio.Task[StopReceipt]]:
        """Stop the session's background work on this host; return a task for each piece of it.

        A stop may be carried out more than once for the same cause. Then the tasks of the earlier times are returned
        too, so that the receipts are complete.

        Parameters:
            start_task: `HostContext.start_task`.
            grace_s: grace period of the stop, in seconds; None uses the default.
            before_seq: seq of the session at the stop: work of runs that started later continues. None stops all.
        """
        before = self._background_stops
        stops = {} if before is None or before[0] != cause else before[1]
        for scope, origin in list(self.background.items()):
            if before_seq is not None and origin.started_seq >= before_seq:
                continue
            stops[scope] = start_task(scope.stop(cause=cause, grace_s=grace_s), "stop background")
        self._background_stops = (cause, stops)
        return list(stops.values())


class SharedSession(LiveSession):
    """A session in memory that other hosts write too.

    Events are published in the order of their numbers, except those of other hosts, which are read from the store.
    ``seen`` is the number up to which this host knows all events; what is published after a gap does not raise it.
    """

    __slots__ = ("_on_behind", "seen")

    def __init__(
        self,
        *,
        session: int,
        number: int,
        principal: str,
        key: str,
        seq: int,
        on_behind: Callable[[SharedSession], object],
    ) -> None:
        super().__init__(session=session, number=number, principal=principal, key=key, seq=seq)
        self.seen = seq
        self._on_behind = on_behind

    def truncate(self, seq: int) -> None:
        """End the readers, because the store has lost the events after `seq`, or some before and has others there.

        What this host has begun for the session is compared with all events of the log again.
        """
        before, self.log = self.log, _new_log(seq)
        self.seen = seq if self.active is None and not self._background else 0
        self.deleted = False
        self.deleted_seq = 0
        self.shown_seq = 0
        if before.closed:
            self.log.close()  # the host closes its streams
        before.close()

    def publish(self, events: Sequence[Stored]) -> None:
        """Pass newly stored events to the session's readers. After a gap, the events before are read from the store."""
        super().publish(events)
        if events and events[0].seq <= self.seen + 1:
            self.seen = max(self.seen, events[-1].seq)
        elif events:
            self._on_behind(self)
