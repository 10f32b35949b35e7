# ruff: noqa: D102 - `DatabaseConnection` documents its methods
"""The connection of a node that writes: it registers the node, and runs its transactions.

- Each transaction begins with an update of the node's row in ``writer``, which numbers the transactions. The update
  fails if another node has ended this node's epoch, so an ended node writes nothing more, in whatever session.
- If the connection is lost while a commit is under way, a new connection reads that number, and waits for a transaction
  that is still in progress. So the outcome is known, and actions are not repeated in doubt. Only if the database does
  not answer in time, the writes fail in doubt.
- A transaction that lost a race, or whose connection was lost before the commit, is done again, from fresh rows.
- Nothing is kept in the session of a connection, so a pgbouncer in transaction mode may stand in front.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import psycopg

from holdfast import failpoints
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, StoreFull, StoreReadOnly, StoreUnreachable, format_error
from holdfast.storage.cluster import Signals
from holdfast.storage.postgres import errors
from holdfast.storage.postgres.address import PostgresAddress
from holdfast.storage.postgres.connection import connect
from holdfast.storage.postgres.database import PostgresDatabase, statement
from holdfast.storage.postgres.schema import check_server, prepare_schema
from holdfast.storage.postgres.shared_use import SharedUse
from holdfast.storage.sql.tables import SqlTables
from holdfast.storage.sql.writer import FailureStep

__all__ = ["PostgresWriteConnection"]

_STATEMENT_TIMEOUT_S: Final = 20
_LOCK_TIMEOUT_S: Final = 5
_IDLE_TIMEOUT_S: Final = 5
"""Time after which the database ends a transaction whose node was stopped between two round trips. Shorter than a
lease, so that such a transaction does not keep others from writing to the same sessions."""
_RESOLVE_S: Final = 5.0
"""Time for which the outcome of a commit without a reply is looked for before its writes fail."""
_RECONNECT_EVERY_S: Final = 0.1
_ATTEMPTS_OF_BATCH: Final = 3
_ATTEMPTS_OF_ONE: Final = 40
_ATTEMPTS_OF_LOST: Final = 2
_PAUSE_AFTER: Final = 5
"""Number of lost races of one write after which it pauses before the next attempt."""
_PAUSE_S: Final = 0.01
_SUMS_AGE_S: Final = 1.0
"""Age at which cached sums of principals are read again, because other nodes change them."""
_HOPELESS: Final = ("25006", "42501", "53100", "53200", "53300", "42P01", "42703")
"""SQLSTATEs with which each write of a batch would fail: read-only, not allowed, disk full, out of memory, out of
connections, tables missing."""
_POINTS: Final = ("before_write", "between_writes", "before_commit", "commit_sent", "after_commit")
_FAILPOINTS: Final = {point: failpoints.register(f"postgres.{point}") for point in _POINTS}


class PostgresWriteConnection:
    """Connection of the writer thread (see `holdfast.storage.sql.writer.DatabaseConnection`).

    Parameters:
        address: the database.
        node_id: id of the node that opens it.
        at: current time, in seconds since the epoch.
        lease_s: duration of the node's lease.
        workspace_pool: pool that the node declares; see `Cluster.workspace_pool`.
        on_epoch: called with each new epoch of the node, and with the monotonic time before it was registered. There is
            a new one whenever another node has ended the one before.
        signals: where each commit is signalled to the other nodes.
    """

    def __init__(
        self,
        address: PostgresAddress,
        *,
        node_id: str,
        at: float,
        lease_s: float,
        workspace_pool: str | None,
        on_epoch: Callable[[int, float], object],
        signals: Signals,
    ) -> None:
        self._address = address
        self._node_id = node_id
        self._at = at
        self._lease_s = lease_s
        self._workspace_pool = workspace_pool
        limits = (_STATEMENT_TIMEOUT_S, _LOCK_TIMEOUT_S, min(_IDLE_TIMEOUT_S, lease_s / 2))
        self._limits = tuple(f"{int(seconds * 1000)}ms" for seconds in limits)
        self._on_epoch = on_epoch
        self._signals = signals
        self._opened = ExitStack()
        self._connection: psycopg.Connection[Any] | None = None
        self._pipeline: psycopg.Pipeline | None = None
        self._database: PostgresDatabase
        self._sharing: SharedUse
        self._tables: SqlTables
        self._epoch = 0
        self._batch = 0
        """Number of the last transaction that is known to be committed."""
        self._ended = False
        """Whether another node has ended the current epoch."""
        self._sums_read_at = 0.0
        self.server_version = ""
        self.cluster_id = ""
        """Id of the nodes that share the database."""
        self.cluster_key = b""
        """Secret that only these nodes know."""
        self.problem: str | None = None
        """Why the last transaction could not be written, whatever it was, for display; None if it could."""

    def open(self) -> SqlTables:
        connection = connect(self._address)
        try:
            self.server_version = check_server(connection, self._address.shown)
            prepare_schema(connection, self._address.shown)
            ((self.cluster_id, self.cluster_key),) = connection.execute(statement("cluster")).fetchall()
            self._database = PostgresDatabase(connection)
            self._sharing = SharedUse(self._database)
            self._tables = SqlTables(
                self._database,
                epoch=0,
                sharing=self._sharing,
                workspace_pool=self._workspace_pool,
                between=lambda: failpoints.hit(_FAILPOINTS["between_writes"]),
            )
            self._register(connection)
        except BaseException:
            connection.close()
            raise
        self._use(connection)
        return self._tables

    # ── connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _register(self, connection: psycopg.Connection[Any]) -> None:
        """Begin a new epoch of this node.

        Parameters:
            connection: connection outside of a transaction.
        """
        sent_at = system_clock.monotonic()
        with connection.transaction():
            registered = connection.execute(
                statement("register_node"), (self._node_id, self._at, self._lease_s, self._workspace_pool)
            )
            ((epoch,),) = registered.fetchall()
            connection.execute(statement("register_writer"), (epoch,))
        self._batch = 0
        self._ended = False
        self._epoch = self._tables.epoch = self._database.epoch = epoch
        self._on_epoch(epoch, sent_at)

    def _use(self, connection: psycopg.Connection[Any]) -> None:
        """Enter pipeline mode, and let the tables use this connection."""
        self._opened.callback(connection.close)
        self._pipeline = self._opened.enter_context(connection.pipeline())
        self._connection = self._database.connection = connection

    def _drop(self) -> None:
        """Close the connection, which may be broken."""
        self._connection = self._pipeline = None
        with suppress(Exception):
            self._opened.close()

    def _reconnect(self) -> int | None:
        """Open a new connection; return the number of the last transaction, or None if the epoch was ended."""
        connection = connect(self._address)
        try:
            with connection.transaction():
                # A transaction that is still in progress ends first.
                found = connection.execute(statement("last_batch"), (self._epoch,)).fetchall()
        except BaseException:
            connection.close()
            raise
        self._use(connection)
        batch, ended = found[0] if found else (None, True)
        self._ended = ended
        return None if batch is None else int(batch)

    def _resolve(self, lost: psycopg.Error) -> None:
        """Find out whether the transaction was committed whose commit had no reply.

        Raises:
            TransactionLost: if it was not.
            StoreUnreachable: if the database does not answer in time.
        """
        self._drop()
        give_up_at = system_clock.monotonic() + _RESOLVE_S
        while True:
            try:
                batch = self._reconnect()
                break
            except psycopg.Error as error:
                if system_clock.monotonic() >= give_up_at:
                    raise StoreUnreachable(
                        f"the connection to {self._address.shown} was lost during a commit: the change may be stored",
                        hint="repeat the request with the same idempotency key",
                    ) from error
            time.sleep(_RECONNECT_EVERY_S)  # noqa: TID251 - the writer thread has nothing else to do
        if batch != self._batch + 1:
            raise errors.TransactionLost from lost

    # ── transactions ─────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, verbs: Sequence[str]) -> None:
        if self._connection is None:
            batch = self._reconnect()
            if batch is not None and batch < self._batch:  # the database went back to an older state
                self._ended = True
            elif batch is not None:  # one more than known if its commit had no reply
                self._batch = batch
        connection = self._connection
        assert connection is not None
        if self._ended:
            self._register(connection)
        self._sharing.begin()
        now = system_clock.monotonic()
        if now - self._sums_read_at > _SUMS_AGE_S:
            self._sums_read_at = now
            self._tables.forget_sums()
        connection.execute("BEGIN")
        connection.execute(statement("begin_batch"), (self._batch + 1, self._epoch, self._batch, *self._limits))

    def commit(self) -> None:
        connection, pipeline = self._connection, self._pipeline
        assert connection is not None
        assert pipeline is not None
        try:
            connection.execute("COMMIT")
            failpoints.hit(_FAILPOINTS["commit_sent"])
            pipeline.sync()
        except psycopg.Error as error:
            if not errors.is_lost(error):
                raise
            self._resolve(error)
        self._batch += 1
        self.problem = None
        self._signals.publish(self._sharing.commits)
        for kind, sessions in self._sharing.hints.items():
            self._signals.send(kind, sessions)

    def roll_back(self) -> None:
        connection, pipeline = self._connection, self._pipeline
        if connection is None or pipeline is None:
            return
        try:
            with suppress(psycopg.Error):  # of the statements behind the one that failed
                pipeline.sync()
            # It also forgets all prepared statements: psycopg counts those too that an aborted pipeline left out.
            connection.rollback()
        except psycopg.Error:
            self._drop()

    def after_failure(self, error: Exception, attempt: int, writes: int) -> FailureStep:
        if isinstance(error, HoldfastError):
            return "fail"
        if errors.is_ended(error):
            self._ended = True
            return "retry" if attempt <= _ATTEMPTS_OF_BATCH else "fail"
        if errors.is_lost(error):
            return "retry" if attempt < _ATTEMPTS_OF_LOST else "fail"
        if errors.is_conflict(error):
            if writes > 1:
                return "retry" if attempt < _ATTEMPTS_OF_BATCH else "split"
            if attempt > _PAUSE_AFTER:
                time.sleep(_PAUSE_S)  # noqa: TID251 - the writer thread has nothing else to do
            return "retry" if attempt < _ATTEMPTS_OF_ONE else "fail"
        return "fail" if isinstance(error, psycopg.Error) and error.sqlstate in _HOPELESS else "split"

    def translate(self, error: Exception) -> Exception:
        translated = errors.translate(error, self._address.shown)
        if isinstance(translated, StoreFull | StoreReadOnly | StoreUnreachable):
            self.problem = format_error(translated)
        return translated

    def passing(self, point: str, verbs: Sequence[str]) -> None:
        if failpoints.armed() is not None:
            failpoints.hit(_FAILPOINTS[point])

    def close(self) -> None:
        if self._connection is not None and self._pipeline is not None:
            with suppress(psycopg.Error):
                self._connection.execute(statement("leave"), (self._epoch,))
                self._pipeline.sync()
        self._drop()
