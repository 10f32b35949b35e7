"""Interface of a store that several nodes use at the same time: what a node hears of the others, and reads about them.

Only a store that nodes can share has a `Cluster` (`Store.cluster`). Correctness rests on the store's transactions
alone: a signal is a hint to look at the store earlier than the next poll. Any signal may be lost, late or repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from holdfast.storage.values import Lease, NodeReply, NodeRequest, Ready, RequestKind, Served

if TYPE_CHECKING:
    from holdfast.protocol.events import Stored

__all__ = [
    "WAITED_LONG_S",
    "Cluster",
    "CommittedEvents",
    "OnEvents",
    "OnSignals",
    "SessionEvents",
    "SignalKind",
    "Signals",
]

WAITED_LONG_S: Final = 60.0
"""Time after which a run that no node continues is reported."""

SignalKind = Literal["ready", "interrupt", "request", "changed", "created"]
"""``ready``: sessions may be claimed. ``interrupt``: another node has changed sessions whose holder is to look at them
at once, for example to stop their runs. ``request``: a node asks others to do something. ``changed``: sessions have new
events, or a request was answered. ``created``: sessions are new."""

OnSignals = Callable[[Mapping[SignalKind, Mapping[int, int]]], object]
"""A callback that is called on the node's loop with the numbers of the sessions that other nodes named, by kind. Each
session comes with the seq of its newest event, or 0 if the signal does not tell it."""


class CommittedEvents(NamedTuple):
    """Events of a session that a commit has stored.

    Parameters:
        session: number of the session.
        last_seq: seq of the last event.
        pack: the events in the plain form of `holdfast.storage.event_packs`.
    """

    session: int
    last_seq: int
    pack: bytes


class SessionEvents(NamedTuple):
    """Consecutive events of a session, which the store has."""

    session: int
    events: Sequence[Stored]


OnEvents = Callable[[Sequence[SessionEvents]], object]
"""A callback that is called on the node's loop with events of other nodes' commits."""


class Signals(Protocol):
    """Hints between the nodes of a store. They name sessions by their numbers, and events by theirs.

    Some carriers also pass on the events of commits themselves, encrypted.
    """

    @property
    def sent(self) -> int:
        """Number of messages sent to the other nodes, each with many hints."""
        ...

    @property
    def received(self) -> int:
        """Number of messages received from other nodes."""
        ...

    @property
    def problem(self) -> str | None:
        """Why signals are not exchanged at the moment, for display; None if they are."""
        ...

    @property
    def has_tried(self) -> bool:
        """Whether a connection was tried since the store was opened, so that `problem` is known."""
        ...

    def send(self, kind: SignalKind, sessions: Mapping[int, int]) -> None:
        """Send hints to the other nodes soon. Thread-safe; it neither waits nor fails.

        Parameters:
            sessions: as for `OnSignals`.
        """
        ...

    def publish(self, commits: Iterable[CommittedEvents]) -> None:
        """Send the events of a commit to the nodes that follow their sessions, if the carrier can do so.

        Thread-safe; it neither waits nor fails. The hints of the commit are sent afterwards.
        """
        ...

    def follow(self, session: int) -> None:
        """Ask the other nodes for the events of their commits to a session, for the next half minute.

        Thread-safe; it neither waits nor fails, and does nothing if the carrier cannot send events.
        """
        ...

    def listen(self, on_signals: OnSignals, on_events: OnEvents) -> None:
        """Pass the hints and events of other nodes to the callbacks, on the current loop, until the store is closed."""
        ...


class Cluster(Protocol):
    """The nodes that share a store. The store itself sends the signals of its commits."""

    @property
    def signals(self) -> Signals:
        """The signals of this node."""
        ...

    @property
    def epoch(self) -> int:
        """Current epoch of this node. There is a new one after another node has ended the one before."""
        ...

    @property
    def workspace_pool(self) -> str | None:
        """Name of the pool of nodes that share this node's workspaces; None if it declares no pool."""
        ...

    async def keys_of(self, sessions: Sequence[int]) -> Sequence[tuple[str, str]]:
        """Return principal and key of each of these sessions, except those that were purged."""
        ...

    async def last_seqs(self, sessions: Sequence[int]) -> Mapping[int, int]:
        """Return the seq of the newest event of each of these sessions; a session that was purged is left out."""
        ...

    async def ready(self, *, agents: Served, at: float, limit: int) -> Sequence[Ready]:
        """Return sessions that this node may claim at the time `at`, if it has these agents.

        At most `limit` of them wait for a run, and as many have a parked run. Principals take turns: first the session
        of each principal that has waited longest, and so on.
        """
        ...

    async def other_nodes(self) -> Sequence[str]:
        """Return the ids of the other nodes that have a lease."""
        ...

    async def runs_without_agent(self, *, updated_before: float) -> Mapping[tuple[str, str], int]:
        """Return how many runs wait for a node that has their agent, by the agent's name and version.

        Runs of sessions that have changed since `updated_before` are left out: a node may just be about to claim them.
        """
        ...

    async def sessions_without_pool(self) -> Mapping[str, int]:
        """Return how many sessions wait for a node of each ``workspace_pool`` that no node with a lease declares."""
        ...

    def note_background(self, session: int, run_id: str) -> asyncio.Future[int]:
        """Record that this node has background work of the session, so that other nodes can ask for its stop.

        The result is the epoch under which it is recorded. It is 0, and the work must not begin, if the run that begins
        it has ended or was interrupted, or if the session was deleted: the work could be missed by an earlier stop.
        """
        ...

    def drop_background(self, session: int) -> asyncio.Future[None]:
        """Record that this node has no background work of the session any more."""
        ...

    async def background_of(self, principal: str) -> frozenset[str]:
        """Return the keys of the principal's sessions that have background work at any node."""
        ...

    async def ask(self, session: int, kind: RequestKind, body: bytes) -> Sequence[int]:
        """Ask the other living nodes that have the run or background work of the session; return the requests' ids.

        Parameters:
            kind, body: what to do, for the handler of the other node.
        """
        ...

    async def requests(self) -> Sequence[NodeRequest]:
        """Return the requests to this node that have no reply yet."""
        ...

    def reply(self, request: NodeRequest, body: bytes) -> asyncio.Future[None]:
        """Record the reply to a request."""
        ...

    async def replies(self, request_ids: Sequence[int]) -> Sequence[NodeReply]:
        """Return what became of these requests of this node, in order."""
        ...

    def drop_requests(self, request_ids: Sequence[int]) -> asyncio.Future[None]:
        """Drop requests of this node, answered or not."""
        ...

    def save_stop(self, stop_id: str, principal: str, key: str, body: bytes | None) -> asyncio.Future[None]:
        """Record a stop of the principal's session, with its result once there is one.

        The newest 1,000 of a principal are kept, for an hour.
        """
        ...

    def sweep(self) -> asyncio.Future[None]:
        """Drop requests and stops of more than an hour ago, and background work of hosts that are long gone."""
        ...

    async def find_stop(self, stop_id: str, principal: str, key: str) -> bytes | Literal["pending"] | None:
        """Return the result of a recorded stop; None if it is unknown, or if the node that carried it out is gone."""
        ...

    async def next_lease_end_s(self) -> float:
        """Return the seconds until the first lease of another node ends; at most 0 if one has, infinite without any."""
        ...

    def watch_lease(self, on_renewed: Callable[[float], object]) -> None:
        """Call `on_renewed` with the monotonic time at which this node's lease ends: now, and whenever that changes.

        Parameters:
            on_renewed: callback. Later calls are made in threads of the store, one at a time. It must not block.
        """
        ...

    def held(self) -> asyncio.Future[Sequence[Lease]]:
        """Return the leases of all runs that this node holds in the store, after all writes submitted earlier."""
        ...
