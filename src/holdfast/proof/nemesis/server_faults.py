"""Faults that can only be injected from inside the server.

`expose` is called before the server's own `main`. It moves the server to the nemesis's disk, replaces the wall clock,
attaches to all failpoints, and listens on a Unix socket. Each line received on the socket is a `Levers` value with the
new positions of all levers. Each answer is a `ServerCounts` value with the number of effects of each lever so far.

Invariants
- This module makes no decisions for the server: it shifts the clock, waits, raises storage errors, or repeats hints.
- With all levers at zero, a server behaves as it would without this module.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from holdfast import failpoints
from holdfast.clock import SystemClock
from holdfast.errors import StorageError
from holdfast.host import Host

__all__ = ["CLOCK_VARIABLE", "DISK_VARIABLE", "LEVERS_VARIABLE", "Levers", "ServerCounts", "expose", "socket_path"]

LEVERS_VARIABLE = "HOLDFAST_NEMESIS_LEVERS"
"""Environment variable with the path of the socket on which the server listens for levers."""
CLOCK_VARIABLE = "HOLDFAST_NEMESIS_CLOCK"
"""Environment variable with the offset of the wall clock at the start, in seconds."""
DISK_VARIABLE = "HOLDFAST_NEMESIS_DISK"
"""Environment variable with the pid of the process whose mounts the server must see."""

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNS = 0x00020000
_SAME_COMMIT_S = 0.0005
"""Time within which all verbs of one commit pass the same failpoint."""
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_SPARED = frozenset(("open", "add_key", "revoke_key"))
"""Verbs that the levers do not affect, because they belong to no session; a failed start is a separate fault."""


class Levers(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of the levers.

    Parameters:
        clock_s: offset of the wall clock, in seconds.
        slow_s: extra time that each commit takes, in seconds.
        late_s: delay of each answer of the store after the commit, in seconds.
        lose_every: n means that every n-th answer of the store is lost; 0 means that no answer is lost.
        read_only: whether every write is refused in the way in which SQLite refuses writes to a read-only file.
        hints: number of times to report to the host again, now, that every session in memory is ready, and to publish
            again the newest stored events of each session.
    """

    clock_s: float = 0.0
    slow_s: float = 0.0
    late_s: float = 0.0
    lose_every: int = 0
    read_only: bool = False
    hints: int = 0


class ServerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of effects of each lever, by name."""

    effects: dict[str, int]


_decode = msgspec.json.Decoder(Levers).decode
_encode = msgspec.json.Encoder().encode


class _Victim:
    """The levers of this process. One thread sets them; they take effect in all threads."""

    def __init__(self, clock_s: float) -> None:
        self._levers = Levers(clock_s=clock_s)
        self._effects: Counter[str] = Counter()
        self._answers = 0
        self._slowed_at = 0.0
        self._time = time.time
        self.host: Host | None = None

    def now(self) -> float:
        """Return the wall clock as the server sees it."""
        return self._time() + self._levers.clock_s

    def passed(self, name: str) -> None:
        """Apply the levers to a write that reaches a failpoint, in the writer's thread."""
        _, verb, point = name.split(".")
        levers = self._levers
        if verb in _SPARED:
            return
        if point == "before_write" and levers.read_only:
            self._effects["read_only"] += 1
            raise _read_only()
        if point == "before_commit" and levers.slow_s and time.monotonic() > self._slowed_at + _SAME_COMMIT_S:
            self._effects["slow"] += 1
            time.sleep(levers.slow_s)
            self._slowed_at = time.monotonic()
        if point == "after_commit":
            self._answer_passes(levers)

    def _answer_passes(self, levers: Levers) -> None:
        if levers.late_s:
            self._effects["late"] += 1
            time.sleep(levers.late_s)
        if levers.lose_every:
            self._answers += 1
            if self._answers % levers.lose_every == 0:
                self._effects["lost"] += 1
                raise StorageError("the store's answer was lost", hint="send again with the same idempotency key")

    def listen(self, listener: socket.socket) -> None:
        """Accept and serve one connection after another, forever."""
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb", buffering=0) as lines:
                for line in lines:
                    self._pull(_decode(line))
                    lines.write(_encode(ServerCounts(effects=dict(self._effects))) + b"\n")

    def _pull(self, levers: Levers) -> None:
        before, self._levers = self._levers, levers
        if levers.clock_s != before.clock_s:
            self._effects["clock"] += 1
        if levers.hints and self.host is not None:
            done = threading.Event()
            self.host.loop.call_soon_threadsafe(self._hint, self.host, levers.hints, done)
            done.wait(10.0)

    def _hint(self, host: Host, times: int, done: threading.Event) -> None:
        """Repeat the hints `times` times. This must be called on the host's event loop."""
        for _ in range(times):
            for actor in list(host.actors.values()):
                host.queue.enqueue_when_due(actor.session, actor.principal, 0.0)
                self._effects["hint"] += 1
                host.start_task(self._tell_again(host, actor), "tell again")
        done.set()

    async def _tell_again(self, host: Host, actor: Any) -> None:
        """Publish a session's newest stored events a second time."""
        try:
            events = await host.store.read_events(actor.session, after=max(0, actor.log.next_seq - 4), limit=8)
        except StorageError:
            return  # another lever is pulled
        actor.publish(events)
        self._effects["told again"] += bool(events)


def _read_only() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("attempt to write a readonly database")
    error.sqlite_errorcode = sqlite3.SQLITE_READONLY
    return error


def _join_disk(pid: int) -> None:
    """Enter the namespaces of the process that keeps the disk. This process must have a single thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    for kind, name in ((_CLONE_NEWUSER, "user"), (_CLONE_NEWNS, "mnt")):
        descriptor = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, kind) != 0:
                raise OSError(ctypes.get_errno(), f"setns {name}")
        finally:
            os.close(descriptor)
    os.chdir(folder)


@contextmanager
def socket_path(path: str) -> Iterator[str]:
    """Yield a path of the same file that is short enough for a Unix socket; it is valid until the block exits."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def expose() -> None:
    """Let the nemesis set the levers of this process.

    Raises:
        KeyError: if the process was not started by a nemesis.
        OSError: if the disk or the socket cannot be used.
    """
    if disk := os.environ.pop(DISK_VARIABLE, ""):
        _join_disk(int(disk))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    victim = _Victim(float(os.environ.pop(CLOCK_VARIABLE, "0")))
    SystemClock.now = staticmethod(victim.now)
    start = Host.start

    async def started(host: Host) -> None:
        victim.host = host
        await start(host)

    setattr(Host, "start", started)  # noqa: B010 - a method is replaced on purpose
    _attending.enter_context(failpoints.attend(victim.passed))
    path = os.environ.pop(LEVERS_VARIABLE)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(path):
        os.unlink(path)
    with socket_path(path) as short:
        listener.bind(short)
    listener.listen()
    threading.Thread(target=victim.listen, args=(listener,), name="nemesis levers", daemon=True).start()


_attending = ExitStack()
"""State that lasts as long as the process."""
