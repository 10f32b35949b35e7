"""The host's side of a meter: start it, tell it what to watch, and start it again if it ends too early."""

from __future__ import annotations

import contextlib
import marshal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["MeterLink"]

Message = tuple[Any, ...]


class MeterHost(Protocol):
    """The methods of `ProcessHost` that a `MeterLink` needs."""

    def ask_zygote(self, kind: str, spec: Message, fds: Sequence[int]) -> bool:
        """Send a request to the zygote; return False if it has too many."""
        ...

    def watch(self, fd: int, watcher: Callable[[], object]) -> None:
        """Call ``watcher`` in the reading thread whenever ``fd`` is readable."""
        ...

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``."""
        ...


class MeterLink:
    """Connection of the host to a meter, which runs only while something is watched. Thread-safe.

    Invariants
    - The meter knows every watch: what could not be sent is sent with the next message or after the next report, and a
      meter that is started again gets everything anew.
    - No lock is held while a report is handled.

    Parameters:
        spec: which meter, and its limits; see `run_meter`.
        host: the host that starts the meter.
        on_report: callback for each report, called in the host's reading thread.
    """

    def __init__(self, spec: Message, host: MeterHost, on_report: Callable[[Message], object]) -> None:
        self._spec = spec
        self._host = host
        self._on_report = on_report
        self._lock = threading.Lock()
        self._watches: dict[int, Message] = {}
        self._unsent: list[Message] = []
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self.started = 0
        """Number of meters started so far."""

    def add(self, watch: int, message: Message) -> None:
        """Watch a program from now on; start the meter if necessary."""
        with self._lock:
            self._watches[watch] = message
            self._send(message)

    def remove(self, watch: int) -> None:
        """Watch a program no longer."""
        with self._lock:
            if self._watches.pop(watch, None) is not None and self._ours is not None:
                self._send(("unwatch", watch))

    def ask(self, message: Message) -> None:
        """Send another message, and start the meter if necessary. The message is lost if the meter ends meanwhile."""
        with self._lock:
            self._send(message)

    def close(self) -> None:
        """Forget all watches; the meter ends."""
        with self._lock:
            self._watches.clear()
            self._unsent.clear()
            if self._ours is not None:
                self._ours.shutdown(socket.SHUT_RDWR)  # the reading thread closes it

    def _send(self, message: Message) -> None:
        self._unsent.append(message)
        if self._ours is None:
            self._start()
        self._flush()

    def _start(self) -> None:
        """Request a meter from the zygote. It gets all watches, because an earlier meter may have ended."""
        others = [message for message in self._unsent if message[0] == "measure"]
        self._unsent = [*self._watches.values(), *others]
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.started += 1
        self._host.watch(self._ours.fileno(), self._hear)
        self._submit()

    def _submit(self) -> None:
        """Send the request to the zygote; if the zygote is busy, the next message tries again."""
        if self._theirs is None:
            return
        sent = True
        with contextlib.suppress(BrokenPipeError):  # the end of our socket will tell
            sent = self._host.ask_zygote("meter", self._spec, [self._theirs.fileno()])
        if sent:
            self._theirs.close()
            self._theirs = None

    def _flush(self) -> None:
        self._submit()
        while self._unsent and self._ours is not None:
            try:
                self._ours.send(marshal.dumps(self._unsent[0]))
            except BlockingIOError:
                return
            except OSError:  # it has ended; the end of the socket comes next
                return
            del self._unsent[0]

    def _hear(self) -> None:
        """Take a report in the host's reading thread."""
        ours = self._ours
        if ours is None:
            return
        try:
            data = ours.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if data:
            self._on_report(marshal.loads(data))
            with self._lock:
                self._flush()
            return
        with self._lock:  # against a concurrent send: afterwards the number may belong to another file
            self._host.unwatch(ours.fileno())
            ours.close()
            self._ours = None
            if self._theirs is not None:
                self._theirs.close()
                self._theirs = None
            if self._watches or self._unsent:
                self._start()
                self._flush()
