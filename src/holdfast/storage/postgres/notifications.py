"""Signals between nodes as notifications of PostgreSQL, on one connection of a node with a thread of its own.

- A notification is a statement of its own, after the commit that it tells about: inside the transaction, it would make
  commits wait for each other.
- A pgbouncer in transaction mode breaks LISTEN: the address bypasses it (the setting ``store_direct``), or has
  ``signals=off``; then no connection is opened at all, and the nodes poll.
"""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack, suppress
from typing import Any, Final

import psycopg

from holdfast.errors import HoldfastError, format_error
from holdfast.storage.postgres import errors
from holdfast.storage.postgres.address import PostgresAddress
from holdfast.storage.postgres.connection import connect
from holdfast.storage.postgres.database import statement
from holdfast.storage.postgres.signal_queue import SignalQueue

__all__ = ["NotificationSignals"]

_RECONNECT_S: Final = 0.5


class NotificationSignals(SignalQueue):
    """The `holdfast.storage.cluster.Signals` of a PostgreSQL database.

    Parameters:
        address: the database.
    """

    def __init__(self, address: PostgresAddress) -> None:
        super().__init__()
        self._address = address
        self._sockets = ExitStack()
        self._wakeup: socket.socket
        self._wake_end: socket.socket
        self._connection: psycopg.Connection[Any] | None = None

    def start(self, cluster_id: str, cluster_key: bytes) -> None:
        """Start to exchange signals; id and key of the store are not needed."""
        if self._address.signals:
            self._wakeup, self._wake_end = map(self._sockets.enter_context, socket.socketpair())
            self.start_thread()

    def close(self) -> None:
        """See `SignalQueue.close`."""
        super().close()
        self._sockets.close()

    def wake(self) -> None:
        """See `SignalQueue.wake`."""
        with suppress(OSError):  # it is full or closed: the thread wakes up anyway
            self._wake_end.send(b"\0", socket.MSG_DONTWAIT)

    def run(self) -> None:
        """See `SignalQueue.run`."""
        while not self.is_closing:
            try:
                self._serve()
            except (psycopg.Error, HoldfastError, OSError) as error:
                self.lost(format_error(errors.translate(error, self._address.shown)))
            finally:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            if not self.is_closing:
                poll = select.poll()
                poll.register(self._wakeup.fileno(), select.POLLIN)
                if poll.poll(_RECONNECT_S * 1000):
                    self._wakeup.recv(4096)  # else the next pauses would end at once

    def _serve(self) -> None:
        """Exchange signals on a new connection until the store is closed or the connection is lost."""
        connection = self._connection = connect(self._address)
        connection.add_notify_handler(lambda notify: self._note(notify.payload, notify.pid))
        connection.execute(statement("listen"))
        self.works()
        poll = select.poll()  # not select(), which has a limit on descriptors
        for source in (connection, self._wakeup):
            poll.register(source.fileno(), select.POLLIN)
        while True:
            messages = self.take()
            if messages:
                connection.execute(statement("notify"), (messages,))
                self.on_sent(len(messages))
            if self.is_closing:
                return
            self.deliver()
            wait_s = self.wait_s()
            readable = [fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)]
            if self._wakeup.fileno() in readable:
                self._wakeup.recv(4096)
            if connection.fileno() in readable:
                connection.pgconn.consume_input()
                while (notify := connection.pgconn.notifies()) is not None:
                    self._note(notify.extra.decode("ascii", "replace"), notify.be_pid)

    def _note(self, message: str, pid: int) -> None:
        """Note a notification, unless it is this node's own."""
        connection = self._connection
        if connection is not None and pid != connection.info.backend_pid:
            self.hear(message)
