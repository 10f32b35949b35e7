"""The process in which isolated functions run: it serves one call after another and reports what each left behind.

`holdfast.runtime.workers.pool` starts the process, under its own reaper. Invariants
- The process serves one call at a time, in the main thread and in a fresh context. It exits after an idle timeout, when
  its connection ends, and after a call that was interrupted.
- Changes that a call makes to modules persist for the next call. Anything else that a call leaves behind (threads,
  processes, descriptors, signal handlers, the directory, the environment, limits) is named in the answer, and the host
  sends the process no more calls.
- An answer is sent whole or not at all, and to the host only: not into another file that has taken over the descriptor,
  and not by a copy of this process that the function forked.
- The first SIGTERM during a call triggers the call's interrupt and raises `Interrupted` in the function. A SIGTERM
  between two calls ends the process.

A frame consists of a kind, a length and that many bytes. ``CALL`` contains a marshalled ``(head, pickled function and
values)``. ``CAUSE`` contains a pickled `Cause` and precedes a SIGTERM. ``BEGUN`` contains a marshalled ``(threads,
descriptors, bytes of memory)`` from before the function was called. ``ANSWER`` contains a marshalled ``(outcome,
pickled value, names of what the call left behind)``.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import io
import marshal
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final, NoReturn, TypedDict

from holdfast.errors import Interrupted
from holdfast.logs import install_hooks
from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt.interrupt import Interrupt
from holdfast.runtime.processes import procfs
from holdfast.undumpable import make_undumpable

__all__ = ["ANSWER", "ANSWER_LIMIT_BYTES", "BEGUN", "CALL", "CAUSE", "HEADER", "Head", "IsolatedCall", "frame", "main"]

HEADER: Final = struct.Struct("!BQ")
CALL, CAUSE, BEGUN, ANSWER = range(1, 5)
ANSWER_LIMIT_BYTES = 1 << 26
"""Maximum size of an answer in bytes; a larger answer is an error, because the host must hold the answer in memory."""

_ENDING_S = 0.02
_ENDING_PAUSE_S = 0.001
_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class Head(TypedDict):
    """Header of a call.

    Parameters:
        interrupt: name of the call's interrupt.
        streamed: whether the host reads the printed output; if False, the output goes to the host's standard error.
        variables: module, name and value of each context variable to set.
    """

    interrupt: str
    streamed: bool
    variables: list[tuple[str, str, Any]]


def frame(kind: int, payload: bytes) -> bytes:
    """Return an encoded frame."""
    return HEADER.pack(kind, len(payload)) + payload


class IsolatedCall:
    """Handle of the running call for an isolated function; can be pickled.

    Parameters:
        call_id: id of the call, the same in every attempt; can serve as the idempotency key for external services.
    """

    __slots__ = ("call_id",)

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id

    def output(self, text: str) -> None:
        """Stream a chunk of the call's output; block while the pipe to the host is full. Callable from any thread.

        Raises:
            RuntimeError: the method was called outside the process of an isolated call.
        """
        if _worker_main is None:
            raise RuntimeError("output() is available only in the process of an isolated call")
        _worker_main.say(text)


class _Snapshot:
    """Snapshot of the state of this process that a call might change."""

    def __init__(self) -> None:
        self.threads = len(os.listdir("/proc/self/task"))
        self.descriptors = _descriptors()
        self.settings: dict[str, object] = {
            "working directory": os.getcwd(),
            "environment": dict(os.environb),
            "umask": _umask(),
            "signal handlers": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
            "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "timers": [signal.getitimer(timer)[1] or signal.getitimer(timer)[0] > 0 for timer in _TIMERS],
            "limits": [resource.getrlimit(limit) for limit in _LIMITS],
            "sys.path": list(sys.path),
            "sys.stdout or sys.stderr": (sys.stdin, sys.stdout, sys.stderr),
        }

    def leftovers(self) -> list[str]:
        """Return readable names of what was added or changed since this snapshot."""
        deadline = time.monotonic() + _ENDING_S
        while True:
            now = _Snapshot()
            children = procfs.children(os.getpid())
            if now.threads <= self.threads and now.descriptors == self.descriptors and not children:
                break
            if time.monotonic() >= deadline:  # a joined thread takes a moment to disappear
                break
            gc.collect()  # garbage that only awaits collection does not count
            time.sleep(_ENDING_PAUSE_S)
        found = [f"process {name}" for name in procfs.names(children)]
        if now.threads > self.threads:
            found += [f"thread {one.name}" for one in threading.enumerate() if one is not threading.main_thread()]
            found = found or [f"{now.threads - self.threads} threads"]
        for number in sorted(now.descriptors.keys() | self.descriptors.keys()):
            if now.descriptors.get(number) != self.descriptors.get(number):
                found.append(f"descriptor {number} ({now.descriptors.get(number, 'closed')})")
        return found + [name for name, value in now.settings.items() if value != self.settings[name]]


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed the directory
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _umask() -> int:
    now = os.umask(0o77)
    os.umask(now)
    return now


def _memory_bytes() -> int:
    pages = (procfs.read_text("/proc/self/statm") or b"0 0").split()[1]
    return int(pages) * resource.getpagesize()


class _WorkerMain:
    """The loop of a worker process, which serves isolated calls.

    Parameters:
        idle_s: idle timeout after which the process exits, in seconds.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._me = os.getpid()
        self._control = socket.socket(fileno=os.dup(0))
        self._control.setblocking(True)
        self._output = os.dup(1)
        self._errors = os.dup(2)
        self._inodes = {fd: os.fstat(fd).st_ino for fd in (self._control.fileno(), self._output)}
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._interrupt: Interrupt | None = None
        self._raises = False
        self._before: _Snapshot | None = None
        self._saying = threading.Lock()

    def run(self) -> NoReturn:
        """Serve calls until the process exits."""
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)  # a separate process has its own streams
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
        signal.signal(signal.SIGTERM, self._asked)
        while True:
            kind, payload = self._receive()
            if kind == CALL:
                self._serve(*marshal.loads(payload))

    def say(self, text: str) -> None:
        """Write text to the stream on which the host reads what the function prints."""
        data = text.encode("utf-8", "backslashreplace")
        with self._saying:
            sys.stdout.flush()
            self._check(self._output)
            target = self._output if self._streamed else self._errors
            while data:
                data = data[os.write(target, data) :]

    def _serve(self, head: Head, work: bytes) -> None:
        self._streamed = head["streamed"]
        for standard in (1, 2):
            os.dup2(self._output if self._streamed else self._errors, standard)
        self._before = None
        self._interrupt = interrupt = Interrupt(name=head["interrupt"])
        context = contextvars.Context()
        context.run(interrupt.make_current)
        what, value = context.run(self._perform, work, head["variables"])
        self._raises = False
        if os.getpid() != self._me:
            os._exit(0)  # a copy of this process, forked by the function, got here; it must not answer
        self._answer(what, value)
        if interrupt.triggered:
            os._exit(0)
        self._interrupt = None

    def _perform(self, work: bytes, variables: Sequence[tuple[str, str, Any]]) -> tuple[str, object]:
        try:
            self._raises = True
            fn, values = pickle.loads(work)
            for module, name, value in variables:
                variable = getattr(sys.modules.get(module), name, None)
                if isinstance(variable, contextvars.ContextVar):
                    variable.set(value)
            self._before = _Snapshot()
            counts = (self._before.threads, len(self._before.descriptors), _memory_bytes())
            self._send(BEGUN, marshal.dumps(counts))
            result = fn(*values)
            self._raises = False
        except (SystemExit, KeyboardInterrupt):
            raise  # they end this process, but must not end the process that waits for it
        except Interrupted as interrupted:
            return "interrupted", interrupted.cause
        except BaseException as error:
            error.add_note("In its own process:\n" + "".join(traceback.format_exception(error)))
            return "raised", error
        return "returned", result

    def _answer(self, what: str, value: object) -> None:
        try:
            data = pickle.dumps(value)
            if len(data) > ANSWER_LIMIT_BYTES:
                raise ValueError(f"its {len(data):,} bytes exceed the limit of {ANSWER_LIMIT_BYTES:,}")
            pickle.loads(data)
        except Exception as error:
            text = f"failed to pickle what it {what}: {type(error).__name__}: {error}"
            if isinstance(value, BaseException):
                text = f"{text}\n{''.join(traceback.format_exception(value))}"
            what, data = "failed", pickle.dumps(text)
        del value
        left = []
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError) as error:
                left.append(f"a broken stream ({error})")
        self._send(ANSWER, marshal.dumps((what, data, left + (self._before.leftovers() if self._before else []))))

    # -- the interrupt

    def _asked(self, signum: int, _: FrameType | None) -> None:
        interrupt = self._interrupt
        if interrupt is None or os.getpid() != self._me:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            return
        cause = self._cause()
        if interrupt.trigger(cause=cause) and self._raises:
            raise Interrupted(cause)

    def _cause(self) -> Cause:
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError, struct.error):
            data = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
            kind, length = HEADER.unpack_from(data)
            if kind == CAUSE:
                cause = pickle.loads(data[HEADER.size : HEADER.size + length])
                assert isinstance(cause, Cause)
                return cause
        return Cause(kind="stop", reason="its process was sent SIGTERM", origin="")

    # -- the connection

    def _receive(self) -> tuple[int, bytes]:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(self._idle_s * 1000):
            os._exit(0)
        kind, length = HEADER.unpack(self._read(HEADER.size))
        return kind, self._read(length)

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            data = self._control.recv(min(1 << 20, size - len(parts)))
            if not data:
                os._exit(0)
            parts += data
        return bytes(parts)

    def _send(self, kind: int, payload: bytes) -> None:
        self._check(self._control.fileno())
        try:
            self._control.sendall(frame(kind, payload))
        except OSError:  # the host is gone, or the call closed the socket: nothing can be reported
            os._exit(1)

    def _check(self, fd: int) -> None:
        """Exit if the descriptor number now belongs to another file."""
        try:
            same = os.fstat(fd).st_ino == self._inodes[fd]
        except OSError:
            same = False
        if not same:
            os._exit(1)


_worker_main: _WorkerMain | None = None


def main(idle_s: float) -> NoReturn:
    """Run as a worker: the connection is descriptor 0, printed output goes to descriptor 1."""
    global _worker_main
    make_undumpable()
    install_hooks()
    _worker_main = _WorkerMain(idle_s)
    _worker_main.run()
