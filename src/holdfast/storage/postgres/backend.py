# ruff: noqa: D102 - `Backend` documents its methods
"""The backend in a PostgreSQL database, which any number of nodes may use at the same time.

- One thread of a node performs all its writes as group commits (`holdfast.storage.sql.writer`).
- A session's row is written only if its fence, its run and its next seq are those that were read. A write that lost
  such a race is done again from fresh rows. So under READ COMMITTED too, readiness and fences never rest on an old
  snapshot.
- Reads use separate threads and connections. A read sees all data committed before it starts.
- A node has a lease, and an epoch for each opening of the store. When the lease is over, `Store.rescue` at any other
  node ends the epoch: from then on, no transaction of it succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.errors import MissingExtra, StorageError, StoreLocked
from holdfast.storage.backend import Counters, Reads, Tables
from holdfast.storage.postgres.address import PostgresAddress
from holdfast.storage.postgres.cluster import PostgresCluster
from holdfast.storage.postgres.node_lease import NodeLease
from holdfast.storage.postgres.notifications import NotificationSignals
from holdfast.storage.postgres.read_connection import PostgresReadConnection
from holdfast.storage.postgres.schema import SCHEMA_VERSION
from holdfast.storage.postgres.write_connection import PostgresWriteConnection
from holdfast.storage.sql.readers import Readers
from holdfast.storage.sql.writer import Writer
from holdfast.storage.values import StoreHealth

if TYPE_CHECKING:
    from holdfast.storage.postgres.nats_signals import NatsSignals

__all__ = ["LEASE_S", "PostgresBackend"]

_T = TypeVar("_T")

LEASE_S: Final = 10.0
"""Default duration of a node's lease."""
_READERS: Final = 3


class PostgresBackend:
    """A `holdfast.storage.backend.Backend` in a PostgreSQL database.

    Parameters:
        url: ``postgresql://user:password@host:5432/database``; see `PostgresAddress.parse`.
        lease_s: duration of the node's lease, after which other nodes may take over its runs.
        direct: URL for signals, which bypasses a pgbouncer; empty: `url`.
        workspace_pool: see `Cluster.workspace_pool`.
        nats: URLs of NATS servers to exchange signals over; empty: over PostgreSQL (see `NatsSignals`).
    """

    engine = "postgresql"

    def __init__(
        self,
        url: str,
        *,
        lease_s: float = LEASE_S,
        direct: str = "",
        workspace_pool: str | None = None,
        nats: str = "",
    ) -> None:
        self.address = PostgresAddress.parse(url)
        self.counters = Counters()
        self.lease_s = lease_s
        self.lease: NodeLease | None = None
        self._signals: NotificationSignals | NatsSignals
        if nats:
            self._signals = _nats_signals(nats)
        else:
            self._signals = NotificationSignals(PostgresAddress.parse(direct) if direct else self.address)
        self.cluster = PostgresCluster(
            self._signals,
            workspace_pool=workspace_pool,
            read=self.read,
            write=self.write,
            lease=lambda: self.lease,
        )
        self._connection: PostgresWriteConnection | None = None
        self._writer: Writer | None = None
        self._readers: Readers | None = None
        self._server_version = ""
        self.cluster_id = ""
        """Id of the nodes that share the database, once it is open."""

    @property
    def path(self) -> str:
        return self.address.shown

    @property
    def version(self) -> str:
        return f"{SCHEMA_VERSION} (PostgreSQL {self._server_version})"

    async def open(self, *, node_id: str, at: float) -> None:
        if self._writer is not None:
            raise StoreLocked("this store object is already open", hint="open another store object")
        lease = NodeLease(self.address, lease_s=self.lease_s)
        connection = PostgresWriteConnection(
            self.address,
            node_id=node_id,
            at=at,
            lease_s=self.lease_s,
            workspace_pool=self.cluster.workspace_pool,
            on_epoch=lease.follow,
            signals=self._signals,
        )
        writer = Writer(connection, name="holdfast-writer")
        try:
            tables = await writer.open()
        except BaseException:
            await writer.close()
            raise
        self._server_version = connection.server_version
        self.cluster_id = connection.cluster_id
        self.counters = tables.counters
        lease.start()
        self._signals.start(self.cluster_id, connection.cluster_key)
        self.lease = lease
        self._connection = connection
        self._writer = writer
        self._readers = Readers(*(PostgresReadConnection(self.address) for _ in range(_READERS)))

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        readers, self._readers = self._readers, None
        lease, self.lease = self.lease, None
        if writer is None or readers is None or lease is None:
            return
        try:
            await readers.close()
        finally:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(None, lease.close)
            finally:
                await writer.close()
                self._signals.send("ready", {})  # the lease has ended: what this node left may be taken over
                await loop.run_in_executor(None, self._signals.close)

    def health(self) -> StoreHealth:
        lease, connection = self.lease, self._connection
        if lease is None or connection is None:
            return StoreHealth(problem="the store is not open")
        problem = lease.problem or connection.problem
        return StoreHealth(lease_s=self.lease_s, lease_ends_at=lease.ends_at, problem=problem)

    def write(self, verb: str, action: Callable[[Tables], _T]) -> asyncio.Future[_T]:
        writer = self._writer
        return _not_open() if writer is None else writer.submit(verb, action)

    def read(self, query: Callable[[Reads], _T]) -> asyncio.Future[_T]:
        readers = self._readers
        return _not_open() if readers is None else readers.submit(query)


def _nats_signals(servers: str) -> NatsSignals:
    try:
        from holdfast.storage.postgres.nats_signals import NatsSignals
    except ImportError as error:
        raise MissingExtra("signals over NATS", extra="nats") from error
    return NatsSignals(servers)


def _not_open() -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(StorageError("the store is not open"))
    return future
