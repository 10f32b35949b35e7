"""The lease of a node: a thread renews it, on a connection of its own.

The lease is compared only in the database, by the database's clock. A node knows no more than when it last renewed its
lease successfully: the lease lasts at least until ``lease_s`` after the renewal was *sent*, by the node's own monotonic
clock. So `NodeLease.ends_at` is never later than the end that the others see, unless the node's clock is slower than
the database's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

import psycopg

from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, format_error
from holdfast.storage.postgres import errors
from holdfast.storage.postgres.address import PostgresAddress
from holdfast.storage.postgres.connection import connect
from holdfast.storage.postgres.database import statement

__all__ = ["NodeLease"]

_RENEWALS: Final = 4
"""Renewals in the time of a lease, so that some may fail."""
_RETRIES: Final = 20
"""Attempts in the time of a lease while renewals fail."""


class NodeLease:
    """The lease of one node.

    Parameters:
        address: the database.
        lease_s: duration of the lease.
    """

    def __init__(self, address: PostgresAddress, *, lease_s: float) -> None:
        self._address = address
        self._lease_s = lease_s
        self._connection: psycopg.Connection[Any] | None = None
        self._orders: SimpleQueue[int | None] = SimpleQueue()
        """Epochs to renew from now on; None ends the thread."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ends_at = 0.0
        self._on_renewed: Callable[[float], object] = lambda _: None
        self.epoch = 0
        """The current epoch of the node."""
        self.problem: str | None = None
        """Why the last renewal failed, for display; None if it did not."""

    @property
    def ends_at(self) -> float:
        """Monotonic time until which the lease lasts at least; in the past if it has ended."""
        return self._ends_at

    def follow(self, epoch: int, sent_at: float) -> None:
        """Renew the lease of this epoch from now on. Callable from any thread.

        Parameters:
            sent_at: monotonic time before the epoch was registered, which began its lease.
        """
        with self._lock:
            self.epoch = epoch
            self._set_end(sent_at + self._lease_s)
        self._orders.put(epoch)

    def watch(self, on_renewed: Callable[[float], object]) -> None:
        """See `Cluster.watch_lease`. The callback holds a lock of this object, so it must not call its methods."""
        with self._lock:
            self._on_renewed = on_renewed
            on_renewed(self._ends_at)

    def _set_end(self, ends_at: float) -> None:
        self._ends_at = ends_at
        self._on_renewed(ends_at)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="holdfast-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. It blocks until a renewal that is under way has ended."""
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        epoch: int | None = 0
        wait_s: float | None = None
        while True:
            with suppress(Empty):
                epoch = self._orders.get(timeout=wait_s)
            if epoch is None:
                break
            wait_s = self._lease_s / (_RENEWALS if self._renew(epoch) else _RETRIES)
        self._drop()

    def _renew(self, epoch: int) -> bool:
        sent_at = system_clock.monotonic()
        try:
            if self._connection is None:
                self._connection = connect(self._address)
            renewed = self._connection.execute(statement("heartbeat"), (self._lease_s, epoch)).fetchall()
        except (psycopg.Error, HoldfastError) as error:
            self.problem = format_error(errors.translate(error, self._address.shown))
            self._drop()
            return False
        self.problem = None
        with self._lock:
            if epoch == self.epoch:  # else the writer has begun another one
                # Not renewed: another node has ended the epoch. The next transaction begins another one.
                self._set_end(max(self._ends_at, sent_at + self._lease_s) if renewed else sent_at)
        return True

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
