"""Run one function in a separate Python process, which can be killed at any time.

Invariants
- The function and its arguments are pickled before a process is used, so an unpicklable argument raises an error in the
  caller.
- The process (`holdfast.runtime.workers.main`) is a member of the call's scope for the duration of the call. If an idle
  process of the same owner is available, it is reused. If a reused process exits before it has started the function,
  another process runs the function. If a process exits after it has started the function, the call fails, so that a
  function is never called twice.
- If the call is interrupted, `Interrupted` is raised in the function. If the function has not ended when the grace
  period is over, the process tree of the call is killed.
- After the call, its process is idle and clean, or the whole process tree is dead.

The process gets the function and its arguments, the name of the interrupt and, if the interrupt is triggered, its
cause. The process also gets the host's ``sys.path``, and the context variables that hold plain data and are globals of
a module that the host has imported.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import contextvars
import functools
import inspect
import logging
import marshal
import os
import pickle
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from holdfast.clock import system_clock
from holdfast.errors import Interrupted, ProcessEnded
from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt.interrupt import current_interrupt
from holdfast.runtime.scope.process_handle import ProcessHandle
from holdfast.runtime.workers.main import ANSWER, ANSWER_LIMIT_BYTES, BEGUN, CALL, HEADER, Head, frame

if TYPE_CHECKING:
    from holdfast.runtime.process_host import ProcessHost
    from holdfast.runtime.scope.state import ScopeState
    from holdfast.runtime.workers.pool import Worker, WorkerPool

__all__ = ["Output", "run_isolated"]

Answer = tuple[str, bytes, list[str]]
"""Outcome, pickled value, and names of the threads and other resources that the call left behind."""

Output = Callable[[str], Awaitable[object] | None]
"""Callback that is called with each chunk of the text that an isolated function prints."""

_log = logging.getLogger("holdfast.runtime")

_LAST_WORDS_S = 1.0
_CHUNK_BYTES = 1 << 16
_PIPE_CHUNKS = 16  # capacity of a pipe
_VARIABLES_LIMIT = 1_000


async def run_isolated(
    scope: ScopeState,
    processes: ProcessHost,
    fn: Callable[..., Any],
    values: tuple[Any, ...],
    name: str,
    output: Output | None = None,
) -> Any:
    """Call ``fn(*values)`` in a Python process that the scope owns during the call, and return its result.

    Parameters:
        scope: state of the scope that owns the process; only idle processes of the same `owner` are reused.
        processes: host that starts the process.
        fn, values: function and its arguments, which are pickled.
        name: display name.
        output: callback for the output that the function prints; see `Scope.spawn`.

    Raises:
        BaseException: the function or `output` raised this error; an error of the function has no traceback.
        ProcessEnded: the process exited before it answered, or its answer cannot be pickled or is too large.
        TypeError: the function or an argument cannot be pickled, or the function is defined in ``__main__``.
        ScopeClosed, OSError: the process failed to start; see `Scope.process`.
    """
    head = Head(interrupt=name, streamed=output is not None, variables=_plain_variables())
    request = frame(CALL, marshal.dumps((dict(head), _packed(fn, values, name))))
    workers = processes.workers
    answer = None
    while answer is None:
        lease = await _Lease.begin(scope, workers, name)
        try:
            answer = await lease.exchange(request, output)
            returncode = await lease.last_word() if answer is None else None
        except BaseException:
            await lease.end(grace_s=scope.times.own[0] if scope.stopping is None else scope.grace_left_s)
            raise
        if answer is None:
            await lease.end()
            if lease.fresh or lease.worker.baseline is not None:
                how = "closed its connection" if returncode is None else f"exited with code {returncode}"
                raise ProcessEnded(f"{name!r} {how} before it answered")
    what, data, left = answer
    if left:
        _log.info("discarding the process of %r, which left behind: %s", name, ", ".join(left))
    if left or not lease.keep():
        await lease.end()
    value = pickle.loads(data)
    match what:
        case "raised":
            raise value
        case "interrupted":
            raise Interrupted(value)
        case "failed":
            raise ProcessEnded(f"{name!r} returned no answer: {value}")
    return value


def _packed(fn: Callable[..., Any], values: tuple[Any, ...], name: str) -> bytes:
    function = fn
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__module__", None) == "__main__":
        raise TypeError(f"{name!r} is defined in the main program; move it to a module that another process can import")
    try:
        return pickle.dumps((fn, values))
    except Exception as error:
        raise TypeError(f"{name!r} or its arguments cannot be pickled: {error}") from error


class _Lent(ProcessHandle):
    """Scope member for a worker during a call."""

    __slots__ = ("worker",)

    def __init__(self, scope: ScopeState, name: str) -> None:
        super().__init__(scope, name)
        self.worker: Worker | None = None

    def ask(self) -> None:
        """Send the cause to the process, then stop it like any other program."""
        if self.worker is not None:
            self.worker.send_cause(self.owner.interrupt.cause)
        super().ask()

    def overdue(self, grace: str) -> str:
        """Return in words why the member had to be forced."""
        return f"did not end within {grace} of its interrupt"


class _Lease:
    """A worker on loan for one call. Use it on the loop of the scope only."""

    def __init__(self, scope: ScopeState, workers: WorkerPool, member: _Lent, worker: Worker, fresh: bool) -> None:
        self.scope = scope
        self.workers = workers
        self.member = member
        self.worker = worker
        self.fresh = fresh

    @classmethod
    async def begin(cls, scope: ScopeState, workers: WorkerPool, name: str) -> _Lease:
        """Take an idle worker or start one, as a member of the scope."""
        member = _Lent(scope, name)
        scope.enter(member)
        worker = workers.acquire(scope.owner)
        if worker is not None:
            member.worker, member.process = worker, worker.process
            member.attend()
            return cls(scope, workers, member, worker, fresh=False)
        try:
            worker = await workers.start(scope.owner, name, member.on_cut)
        except BaseException:
            if not member.cut:
                scope.discard(member, None)
            raise
        member.worker = worker
        try:
            await member.take(worker.process)
        except BaseException:
            workers.discard(worker)
            raise
        return cls(scope, workers, member, worker, fresh=True)

    async def exchange(self, request: bytes, output: Output | None) -> Answer | None:
        """Send the call and return the process's answer, or None if the process ended without an answer.

        If ``output`` raises an error, this method raises the same error.
        """
        if output is None:
            return await self._converse(request)
        outlet = _Outlet(self.scope, self.worker, output)
        try:
            answer = await self._converse(request)
            if answer is not None:
                await outlet.finish()
        finally:
            outlet.close()
        if outlet.error is not None:
            raise outlet.error
        return answer

    async def _converse(self, request: bytes) -> Answer | None:
        loop = asyncio.get_running_loop()
        buffer = bytearray()
        try:
            await loop.sock_sendall(self.worker.control, request)
            while data := await loop.sock_recv(self.worker.control, _CHUNK_BYTES):
                buffer += data
                while (received := _first_frame(buffer)) is not None:
                    kind, payload = received
                    if kind == BEGUN:
                        self.worker.baseline = marshal.loads(payload)
                    elif kind == ANSWER:
                        what, answer, left = marshal.loads(payload)
                        return what, answer, left
        except (ConnectionError, ValueError, EOFError, TypeError):
            return None  # the process has exited or violated the protocol
        return None

    async def last_word(self) -> int | None:
        """Return the exit code if the process exits within a short time, else None."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                return await self.worker.process.wait()
        return None

    def keep(self) -> bool:
        """Give the process back to the pool if it is fit for more calls; return False if it is not."""
        if self.scope.interrupt.triggered or not self.workers.release(self.worker):
            return False
        self.member.release()
        return True

    async def end(self, grace_s: float = 0.0) -> None:
        """Kill the process tree; if ``grace_s`` is above 0, first ask the process to stop and wait for that time."""
        if grace_s > 0:
            own = current_interrupt()
            cause = None if own is None else own.cause
            self.worker.send_cause(
                cause or Cause(kind="stop", reason="the call was cancelled", origin="", at=system_clock.now())
            )
        killing = self.worker.process.kill_tree(term_first_s=grace_s)
        try:
            await asyncio.shield(self.scope.make_own_task(killing, f"kill {self.member.name}"))
        finally:
            self.workers.discard(self.worker)


def _first_frame(buffer: bytearray) -> tuple[int, bytes] | None:
    """Remove and return the first frame; return None if it is not complete. Raises ValueError if it is too long."""
    if len(buffer) < HEADER.size:
        return None
    kind, length = HEADER.unpack_from(buffer)
    if length > ANSWER_LIMIT_BYTES * 2:
        raise ValueError("frame too long")
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return kind, payload


class _Outlet:
    """Passes the function's output to the callback, in order; reads more only after the callback has returned."""

    def __init__(self, scope: ScopeState, worker: Worker, output: Output) -> None:
        self.error: BaseException | None = None
        self._scope = scope
        self._worker = worker
        self._output = output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._loop = asyncio.get_running_loop()
        self._giving: asyncio.Task[None] | None = None
        self._loop.add_reader(worker.output, self._ready)

    def _ready(self) -> None:
        data = self._read()
        if data is None:
            return
        self._loop.remove_reader(self._worker.output)
        if data:
            self._giving = self._scope.make_own_task(self._pass_on(data), f"output of {self._worker.process.name}")

    def _read(self) -> bytes | None:
        try:
            return os.read(self._worker.output, _CHUNK_BYTES)
        except BlockingIOError:
            return None

    async def _pass_on(self, data: bytes) -> None:
        await self._give(data)
        self._giving = None
        if self.error is None:
            self._loop.add_reader(self._worker.output, self._ready)

    async def _give(self, data: bytes, *, last: bool = False) -> None:
        try:
            text = self._decoder.decode(data, last)
            taken = self._output(text) if text else None
            if inspect.isawaitable(taken):
                await taken
        except Exception as error:
            self.error = error
            self._worker.hang_up()  # stops the wait for an answer

    async def finish(self) -> None:
        """Pass the output that was printed before the answer to the callback."""
        if self._giving is not None:
            await self._giving
        self._loop.remove_reader(self._worker.output)
        for _ in range(_PIPE_CHUNKS):
            data = None if self.error is not None else self._read()
            if not data:
                break
            await self._give(data)
        if self.error is None:
            await self._give(b"", last=True)

    def close(self) -> None:
        """Stop reading output and calling the callback."""
        self._loop.remove_reader(self._worker.output)
        if self._giving is not None:
            self._giving.cancel()


_homes: dict[contextvars.ContextVar[Any], tuple[str, str] | None] = {}


def _plain_variables() -> list[tuple[str, str, Any]]:
    """Return module, name and value of this context's variables that can be sent to another process."""
    found = []
    for variable, value in contextvars.copy_context().items():
        if variable not in _homes:
            _find_homes(variable)
        home = _homes.get(variable)
        if home is None:
            continue
        try:
            marshal.dumps(value)
        except ValueError:
            continue
        found.append((*home, value))
    return found


def _find_homes(variable: contextvars.ContextVar[Any]) -> None:
    if len(_homes) >= _VARIABLES_LIMIT:
        _homes.clear()
    _homes[variable] = None
    for module_name, module in sys.modules.copy().items():
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is contextvars.ContextVar:
                _homes[value] = (module_name, name)
