# ruff: noqa: D102 - `holdfast.storage.cluster.Signals` documents the methods
"""Signals between nodes as notifications of PostgreSQL, on one connection of a node with a thread of its own.

- A notification is a statement of its own, after the commit that it tells about: inside the transaction, it would make
  commits wait for each other.
- Hints that wait are merged. Hints of kind ``changed`` wait for up to `PACE_S`, so that a stream costs few of them.
- While the connection is lost, hints are dropped: the other nodes poll.
- A pgbouncer in transaction mode breaks LISTEN: the address bypasses it (the setting ``store_direct``), or has
  ``signals=off``; then no connection is opened at all, and the nodes poll.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import psycopg

from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, format_error
from holdfast.storage.cluster import OnSignals, SignalKind
from holdfast.storage.postgres import errors
from holdfast.storage.postgres.address import PostgresAddress
from holdfast.storage.postgres.connection import connect
from holdfast.storage.postgres.database import statement

__all__ = ["PACE_S", "NotificationSignals"]

CHANNEL: Final = "holdfast"
PACE_S: Final = 0.01
_KINDS: Final[tuple[SignalKind, ...]] = ("interrupt", "request", "ready", "changed")
_URGENT: Final = ("interrupt", "request", "ready")
_TOGETHER: Final = 350
"""Maximum number of sessions in one notification, which may have 8000 bytes; a number has up to 19 digits."""
_LIMIT: Final = 10_000
"""Maximum number of sessions that wait to be sent; more are left to the polls of the other nodes."""
_RECONNECT_S: Final = 0.5
_OFF: Final = "signals are off"

_Hints = dict[SignalKind, dict[int, None]]


class NotificationSignals:
    """The `holdfast.storage.cluster.Signals` of a PostgreSQL database.

    Parameters:
        address: the database.
    """

    def __init__(self, address: PostgresAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._waiting: _Hints = {}
        self._heard: _Hints = {}
        self._closing = False
        self._listener: tuple[asyncio.AbstractEventLoop, OnSignals] | None = None
        self._wakeup: socket.socket
        self._wake_end: socket.socket
        self._thread: threading.Thread | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._sent_at = 0.0
        self.sent = 0
        self.received = 0
        self.problem: str | None = _OFF

    # ── for the node ─────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, kind: SignalKind, sessions: Iterable[int]) -> None:
        with self._lock:
            if self.problem is not None or self._closing:
                return
            was_urgent = self._is_urgent()
            is_first = not self._waiting
            waiting = self._waiting.setdefault(kind, {})
            if len(waiting) < _LIMIT:
                waiting.update(dict.fromkeys(sessions))
            wakes = is_first or (self._is_urgent() and not was_urgent)
        if wakes:
            self._wake()

    def listen(self, on_signals: OnSignals) -> None:
        self._listener = (asyncio.get_running_loop(), on_signals)

    def start(self) -> None:
        """Start to exchange signals."""
        if self._address.signals:
            self._closing = False
            self.problem = "not connected yet"
            self._wakeup, self._wake_end = socket.socketpair()
            self._thread = threading.Thread(target=self._run, name="holdfast-signals", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Send what waits, and end. It blocks until the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._lock:
            self._closing = True
        self._wake()
        thread.join()
        self.problem = _OFF
        self._wakeup.close()
        self._wake_end.close()

    def _is_urgent(self) -> bool:
        return any(kind in self._waiting for kind in _URGENT)

    def _wake(self) -> None:
        with suppress(OSError):  # it is full or closed: the thread wakes up anyway
            self._wake_end.send(b"\0", socket.MSG_DONTWAIT)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closing:
            try:
                self._serve()
            except (psycopg.Error, HoldfastError, OSError) as error:
                with self._lock:
                    self.problem = format_error(errors.translate(error, self._address.shown))
                    self._waiting.clear()
            finally:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
            if not self._closing:
                poll = select.poll()
                poll.register(self._wakeup.fileno(), select.POLLIN)
                poll.poll(_RECONNECT_S * 1000)

    def _serve(self) -> None:
        """Exchange signals on a new connection until the store is closed or the connection is lost."""
        connection = self._connection = connect(self._address)
        connection.add_notify_handler(lambda notify: self._hear(notify.payload, notify.pid))
        connection.execute(statement("listen"))
        self.problem = None
        poll = select.poll()  # not select(), which has a limit on descriptors
        for source in (connection, self._wakeup):
            poll.register(source.fileno(), select.POLLIN)
        while True:
            hints = self._take()
            if hints:
                payloads = [payload for kind, sessions in hints.items() for payload in _payloads(kind, sessions)]
                connection.execute(statement("notify"), (payloads,))
                self.sent += len(payloads)
                self._sent_at = system_clock.monotonic()
            if self._closing:
                return
            self._deliver()
            with self._lock:
                wait_s = self._sent_at + PACE_S - system_clock.monotonic() if self._waiting else None
            readable = [fd for fd, _ in poll.poll(None if wait_s is None else max(0.0, wait_s) * 1000)]
            if self._wakeup.fileno() in readable:
                self._wakeup.recv(4096)
            if connection.fileno() in readable:
                connection.pgconn.consume_input()
                while (notify := connection.pgconn.notifies()) is not None:
                    self._hear(notify.extra.decode("ascii", "replace"), notify.be_pid)

    def _take(self) -> _Hints:
        """Take what is to be sent now."""
        with self._lock:
            paced = self._sent_at + PACE_S > system_clock.monotonic()
            if paced and not self._is_urgent() and not self._closing:
                return {}
            hints, self._waiting = self._waiting, {}
            return {kind: hints[kind] for kind in _KINDS if kind in hints}

    def _hear(self, payload: str, pid: int) -> None:
        """Note a notification, unless it is this node's own or none of ours."""
        connection = self._connection
        if connection is None or pid == connection.info.backend_pid:
            return
        kind, _, numbers = payload.partition(" ")
        for known in _KINDS:
            if kind == known:
                self.received += 1
                with suppress(ValueError):
                    sessions = [int(number) for number in numbers.split()]
                    with self._lock:
                        self._heard.setdefault(known, {}).update(dict.fromkeys(sessions))

    def _deliver(self) -> None:
        """Pass what was heard to the loop. What is heard before the loop takes it is merged."""
        listener = self._listener
        with self._lock:
            if not self._heard or listener is None:
                return
        loop, on_signals = listener
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._pass_on, on_signals)

    def _pass_on(self, on_signals: OnSignals) -> None:
        with self._lock:
            heard, self._heard = self._heard, {}
        if heard:
            on_signals({kind: tuple(sessions) for kind, sessions in heard.items()})


def _payloads(kind: SignalKind, sessions: Mapping[int, None]) -> list[str]:
    numbers = [str(session) for session in sessions]
    parts = range(0, max(1, len(numbers)), _TOGETHER)
    return [" ".join((kind, *numbers[start : start + _TOGETHER])) for start in parts]
