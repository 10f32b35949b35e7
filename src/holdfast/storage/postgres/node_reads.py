"""The reads of a PostgreSQL database, with those that only a store of several nodes needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from holdfast.storage.postgres.database import PostgresDatabase
from holdfast.storage.rows import CLOCKS_DIFFER_S
from holdfast.storage.sql.reads import SqlReads, ready_of
from holdfast.storage.values import NodeReply, NodeRequest, Ready, Served

__all__ = ["NodeReads"]


class NodeReads(SqlReads):
    """The reads that `holdfast.storage.postgres.cluster.PostgresCluster` offers, on one connection.

    Parameters:
        database: database that runs the statements.
    """

    def __init__(self, database: PostgresDatabase) -> None:
        super().__init__(database)
        self._nodes = database

    def keys_of(self, sessions: Sequence[int]) -> list[tuple[str, str]]:
        """See `Cluster.keys_of`."""
        return [(principal, key) for principal, key in self._nodes.query("keys_of", list(sessions))]

    def last_seqs(self, sessions: Sequence[int]) -> dict[int, int]:
        """See `Cluster.last_seqs`."""
        return dict(self._nodes.query("last_seqs", list(sessions)))

    def ready_for(self, agents: Served, pool: str | None, at: float, limit: int) -> tuple[Ready, ...]:
        """See `Cluster.ready`; `pool` is the ``workspace_pool`` of this node."""
        versions = [f"{name}@{version}" for name, version in agents.items()]
        parameters = (pool, at, at + CLOCKS_DIFFER_S, list(agents), versions, limit)
        return ready_of(self._nodes.query("ready_for", *parameters))

    def runs_without_agent(self, updated_before: float) -> dict[tuple[str, str], int]:
        """See `Cluster.runs_without_agent`."""
        return {(name, version): count for name, version, count in self._nodes.query("waiting_runs", updated_before)}

    def sessions_without_pool(self) -> dict[str, int]:
        """See `Cluster.sessions_without_pool`."""
        return dict(self._nodes.query("sessions_without_pool"))

    def has_parts_elsewhere(self, epoch: int, session: int) -> bool:
        """Return whether another node has the session's run or background work; `epoch` is that of this node."""
        return bool(self._nodes.query("living_parts_elsewhere", session, session, epoch))

    def requests(self, epoch: int) -> tuple[NodeRequest, ...]:
        """See `Cluster.requests`; `epoch` is the current one of this node."""
        return tuple(
            NodeRequest(request_id=request_id, session=session, kind=kind, body=bytes(body))
            for request_id, session, kind, body in self._nodes.query("open_requests", epoch)
        )

    def replies(self, request_ids: Sequence[int]) -> tuple[NodeReply, ...]:
        """See `Cluster.replies`."""
        gone = NodeReply(body=None, is_gone=True)  # dropped with its node
        found = {
            request_id: NodeReply(body=None if body is None else bytes(body), is_gone=not lives)
            for request_id, body, lives in self._nodes.query("replies", list(request_ids))
        }
        return tuple(found.get(request_id, gone) for request_id in request_ids)

    def background_of(self, principal: str) -> frozenset[str]:
        """See `Cluster.background_of`."""
        return frozenset(key for (key,) in self._nodes.query("background_of", principal))

    def find_stop(self, stop_id: str, principal: str, key: str) -> bytes | Literal["pending"] | None:
        """See `Cluster.find_stop`."""
        for (body,) in self._nodes.query("find_stop", stop_id, principal, key):
            return "pending" if body is None else bytes(body)
        return None

    def other_nodes(self, epoch: int) -> tuple[str, ...]:
        """See `Cluster.other_nodes`; `epoch` is the current one of this node."""
        return tuple(node_id for _, node_id, _, _ in self._nodes.query("other_nodes", epoch))

    def next_lease_end_s(self, epoch: int) -> float:
        """See `Cluster.next_lease_end_s`; `epoch` is the current one of this node."""
        ((seconds,),) = self._nodes.query("next_lease_end", epoch)
        return math.inf if seconds is None else float(seconds)
