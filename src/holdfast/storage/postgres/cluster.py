# ruff: noqa: D102 - `holdfast.storage.cluster.Cluster` documents the methods
"""The other nodes of a PostgreSQL database, as one node hears of them and reads about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast

from holdfast.storage.backend import Reads, Tables
from holdfast.storage.cluster import Signals
from holdfast.storage.postgres.node_lease import NodeLease
from holdfast.storage.postgres.node_reads import NodeReads
from holdfast.storage.sql.tables import SqlTables
from holdfast.storage.values import Lease, NodeReply, NodeRequest, Ready, RequestKind, Served

__all__ = ["PostgresCluster"]

_T = TypeVar("_T")

_STOPS: Final = 1000
"""Maximum number of recorded stops of a principal."""


class PostgresCluster:
    """The `holdfast.storage.cluster.Cluster` of a PostgreSQL database.

    Parameters:
        signals: the signals of this node.
        workspace_pool: see `Cluster.workspace_pool`.
        read: `Backend.read` of this node.
        write: `Backend.write` of this node.
        lease: callable that returns the lease of this node; None if the store is not open.
    """

    def __init__(
        self,
        signals: Signals,
        *,
        workspace_pool: str | None,
        read: Callable[[Callable[[Reads], Any]], asyncio.Future[Any]],
        write: Callable[[str, Callable[[Tables], Any]], asyncio.Future[Any]],
        lease: Callable[[], NodeLease | None],
    ) -> None:
        self.signals = signals
        self.workspace_pool = workspace_pool
        self._read_backend = read
        self._write = write
        self._lease = lease

    async def keys_of(self, sessions: Sequence[int]) -> Sequence[tuple[str, str]]:
        return await self._read(lambda reads: reads.keys_of(sessions))

    async def last_seqs(self, sessions: Sequence[int]) -> Mapping[int, int]:
        return await self._read(lambda reads: reads.last_seqs(sessions))

    async def ready(self, *, agents: Served, at: float, limit: int) -> Sequence[Ready]:
        return await self._read(lambda reads: reads.ready_for(agents, self.workspace_pool, at, limit))

    async def other_nodes(self) -> Sequence[str]:
        epoch = self.epoch
        return await self._read(lambda reads: reads.other_nodes(epoch))

    async def runs_without_agent(self, *, updated_before: float) -> Mapping[tuple[str, str], int]:
        return await self._read(lambda reads: reads.runs_without_agent(updated_before))

    async def sessions_without_pool(self) -> Mapping[str, int]:
        return await self._read(lambda reads: reads.sessions_without_pool())

    def note_background(self, session: int, run_id: str) -> asyncio.Future[int]:
        def note(tables: Tables) -> int:
            row = tables.get(session)
            if row is None or row.deleted_at is not None or row.run_id != run_id or row.cause is not None:
                return 0
            tables.save(row)  # a stop elsewhere comes before this, and is seen here, or after it, and asks for it
            _only_write(tables, "mark_background", session)
            return tables.epoch

        return self._write("background", note)

    def drop_background(self, session: int) -> asyncio.Future[None]:
        return self._write("background", lambda tables: _only_write(tables, "unmark_background", session))

    async def background_of(self, principal: str) -> frozenset[str]:
        return await self._read(lambda reads: reads.background_of(principal))

    async def ask(self, session: int, kind: RequestKind, body: bytes) -> Sequence[int]:
        epoch = self.epoch
        if not await self._read(lambda reads: reads.has_parts_elsewhere(epoch, session)):
            return ()
        asked: asyncio.Future[Sequence[int]] = self._write("ask", lambda tables: tables.ask_others(session, kind, body))
        return await asked

    async def requests(self) -> Sequence[NodeRequest]:
        epoch = self.epoch
        return await self._read(lambda reads: reads.requests(epoch))

    def reply(self, request: NodeRequest, body: bytes) -> asyncio.Future[None]:
        def signal(done: asyncio.Future[None]) -> None:
            if done.exception() is None:
                self.signals.send("changed", {request.session: 0})

        replied: asyncio.Future[None] = self._write(
            "reply", lambda tables: _only_write(tables, "reply_to_request", body, request.request_id)
        )
        replied.add_done_callback(signal)
        return replied

    async def replies(self, request_ids: Sequence[int]) -> Sequence[NodeReply]:
        return await self._read(lambda reads: reads.replies(request_ids))

    def drop_requests(self, request_ids: Sequence[int]) -> asyncio.Future[None]:
        return self._write("drop requests", lambda tables: _only_write(tables, "drop_requests", list(request_ids)))

    def save_stop(self, stop_id: str, principal: str, key: str, body: bytes | None) -> asyncio.Future[None]:
        def save(tables: Tables) -> None:
            _only_write(tables, "save_stop", stop_id, principal, key, body)
            _only_write(tables, "drop_more_stops", principal, principal, _STOPS)

        return self._write("save stop", save)

    def sweep(self) -> asyncio.Future[None]:
        def sweep(tables: Tables) -> None:
            for name in ("drop_old_stops", "drop_old_requests", "drop_old_background"):
                _only_write(tables, name)

        return self._write("sweep", sweep)

    async def find_stop(self, stop_id: str, principal: str, key: str) -> bytes | Literal["pending"] | None:
        return await self._read(lambda reads: reads.find_stop(stop_id, principal, key))

    async def next_lease_end_s(self) -> float:
        epoch = self.epoch
        return await self._read(lambda reads: reads.next_lease_end_s(epoch))

    def watch_lease(self, on_renewed: Callable[[float], object]) -> None:
        lease = self._lease()
        if lease is not None:
            lease.watch(on_renewed)

    def held(self) -> asyncio.Future[Sequence[Lease]]:
        return self._write("held", lambda tables: tuple(Lease(*columns) for columns in _of_nodes(tables, "held_runs")))

    @property
    def epoch(self) -> int:
        lease = self._lease()
        return 0 if lease is None else lease.epoch

    async def _read(self, query: Callable[[NodeReads], _T]) -> _T:
        found: _T = await self._read_backend(lambda reads: query(cast("NodeReads", reads)))
        return found


def _of_nodes(tables: Tables, name: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Return the rows of a statement about the nodes, after all earlier writes."""
    shared = cast("SqlTables", tables)
    shared.flush()
    return shared.of_nodes(name, *parameters)


def _only_write(tables: Tables, name: str, *parameters: object) -> None:
    _of_nodes(tables, name, *parameters)
