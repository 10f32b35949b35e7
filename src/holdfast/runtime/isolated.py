"""Runs one function in a Python process of its own, so that it can be killed whatever it does.

Invariants
- The function and its values are pickled before the program is started: what cannot be carried fails in the caller.
- The answer travels on a descriptor that no program started by the function inherits; what the function prints goes
  to standard error. An answer is taken whole or not at all.
- When the call ends, for whatever reason, its process tree is dead.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.errors import ProcessEnded
from holdfast.runtime.processes import PIPE

if TYPE_CHECKING:
    from holdfast.runtime.scope import Scope

__all__ = ["run_isolated"]

_LAST_WORDS_S = 1.0
_LENGTH = struct.Struct("!Q")

_BOOT = """\
import os, pickle, struct, sys, traceback
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
def answer(kind, value):
    try:
        data = pickle.dumps((kind, value))
        pickle.loads(data)
    except Exception as error:
        text = f"what it {kind} cannot be carried between processes: {type(error).__name__}: {error}"
        if kind == "raised":
            text = f"{text}\\n{''.join(traceback.format_exception(value))}"
        data = pickle.dumps(("failed", text))
    answers.write(struct.pack("!Q", len(data)) + data)
    answers.flush()
sys.path[:] = pickle.load(sys.stdin.buffer)
try:
    fn, values = pickle.load(sys.stdin.buffer)
    result = fn(*values)
except (SystemExit, KeyboardInterrupt):
    raise  # they end this process, and must not end the one that waits for it
except BaseException as error:
    answer("raised", error)
else:
    answer("returned", result)
"""


async def run_isolated(scope: Scope, fn: Callable[..., Any], values: tuple[Any, ...], name: str) -> Any:
    """Call ``fn(*values)`` in a fresh Python process that the scope owns, and return what it returns.

    Raises:
        BaseException: what the function raised; without its traceback.
        ProcessEnded: the process ended before it answered, or its answer cannot be carried.
        TypeError: the function or a value cannot be carried to another process.
        ScopeClosed, OSError: as `Scope.process`.
    """
    request = _request(fn, values, name)
    process = await scope.process([sys.executable, "-c", _BOOT], stdin=PIPE, stdout=PIPE, name=name)
    assert process.stdin is not None
    assert process.stdout is not None
    ended = scope._make_own_task(process.wait(), f"end of {name}")
    answered = scope._make_own_task(_exchange(process.stdin, process.stdout, request), f"answer of {name}")
    try:
        # Not until the end of the pipe: a process that the function forked may hold it for ever.
        await asyncio.wait((ended, answered), return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            await asyncio.wait((answered,), timeout=_LAST_WORDS_S)
        data = answered.result() if answered.done() else None
    finally:
        ended.cancel()
        answered.cancel()
        await asyncio.shield(scope._make_own_task(process.kill_tree(), f"kill {name}"))
    if data is None:
        raise ProcessEnded(f"{name!r} ended with exit code {process.returncode} before it answered")
    kind, value = pickle.loads(data)
    if kind == "raised":
        raise value
    if kind == "failed":
        raise ProcessEnded(f"{name!r} did not answer: {value}")
    return value


def _request(fn: Callable[..., Any], values: tuple[Any, ...], name: str) -> bytes:
    if getattr(fn, "__module__", None) == "__main__":
        raise TypeError(
            f"{name!r} is defined in the program itself; put it into a module, so that a process can import it"
        )
    try:
        return pickle.dumps(sys.path) + pickle.dumps((fn, values))
    except Exception as error:
        raise TypeError(f"{name!r} or its arguments cannot be carried to another process: {error}") from error


async def _exchange(requests: asyncio.StreamWriter, answers: asyncio.StreamReader, request: bytes) -> bytes | None:
    """Send the request and read the answer; None when there is none."""
    try:
        requests.write(request)
        await requests.drain()
        requests.close()
        (length,) = _LENGTH.unpack(await answers.readexactly(_LENGTH.size))
        return await answers.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
