"""The adapter's side of ``holdfast check``: the adapter interface, the agent's tools, and the pipe to the judge.

An adapter is a class with the methods of `Adapter`, in a file that imports its framework and nothing from Holdfast.
This file runs the adapter in a separate process, with the Python of the framework's environment. The file needs only
the standard library, and is started as follows:

    python kit.py my_adapter.py:MyAdapter

The pipe carries one JSON object per line. A request is ``{"id": 1, "op": "submit", "args": ["s1", "reply hello"]}``.
The answer is ``{"id": 1, "value": "run-1"}``, ``{"id": 1, "error": "…"}`` or ``{"id": 1, "not_offered": "why"}``. Calls
run concurrently.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

__all__ = ["TOOLS", "Adapter", "NotOffered", "Setting", "Tasks", "main"]

_LIMIT_BYTES = 1 << 24


class NotOffered(Exception):
    """The framework lacks this feature. The message gives the reason."""


class Setting:
    """The environment of an adapter: model, folder and tools.

    Parameters:
        model_url: base URL of an OpenAI Chat Completions server, including ``/v1``. The server accepts any API key and
            any model name, and supports only streamed responses.
        folder: folder for the framework's stored data, which is kept when the process is restarted.
        tools: plain functions, some async and some sync. Pass all of them to the agent unchanged, in the framework's
            usual way.
        forced_tool: one more sync function. If the framework has a way to end a sync tool by force, pass this function
            to the agent in that way.
    """

    not_offered = NotOffered
    """Exception class to raise for a feature that the framework lacks."""

    def __init__(
        self, *, model_url: str, folder: str, tools: Sequence[Callable[..., Any]], forced_tool: Callable[..., Any]
    ) -> None:
        self.model_url = model_url
        self.folder = folder
        self.tools = tools
        self.forced_tool = forced_tool

    def tasks(self) -> Tasks:
        """Return a new `Tasks`, for a framework that has no function to submit work."""
        return Tasks()


class Adapter(Protocol):
    """The interface through which the judge uses a framework.

    All methods run on one event loop, and several calls may run concurrently. If the framework lacks a feature, the
    method raises `NotOffered` (``setting.not_offered``), which does not count as a broken promise. Do not implement in
    the adapter what the framework leaves to its users, because the results would then credit the framework with it.
    """

    packages: Sequence[str]
    """Names of the distributions whose versions the report shows, with the framework first."""

    async def start(self, setting: Setting) -> None:
        """Create the agent with the model at ``setting.model_url`` and the tools ``setting.tools``."""
        ...

    async def open(self, session: str, user: str) -> None:
        """Create the user's session unless it exists. The judge calls this method again after a restart."""
        ...

    async def submit(self, session: str, text: str) -> str:
        """Send a message to the session, and return the id of the work as soon as the framework accepts the message.

        Raises the framework's own error if the framework refuses the message.
        """
        ...

    async def result(self, work: str) -> str:
        """Wait for the work to end, and return the answer. Raises if the work failed, was refused or was cancelled."""
        ...

    async def cancel(self, session: str) -> None:
        """Cancel the session's work in the way that the framework documents.

        Return as soon as the framework's own call has returned.
        """
        ...

    async def transcript(self, session: str) -> list[list[str]]:
        """Return the session's stored messages as pairs of role (``user``, ``assistant``, ``tool``) and text."""
        ...

    async def force(self) -> str:
        """Return a short description of how the agent is given ``setting.forced_tool``.

        Raises `NotOffered` if the framework cannot end a sync tool by force.
        """
        ...

    async def live(self) -> list[str]:
        """Return the names of all live work, as the framework itself reports it."""
        ...

    async def inbox(self) -> str:
        """Return a short description of how an accepted message survives the end of the process.

        Raises `NotOffered` if an accepted message does not survive it.
        """
        ...

    async def close(self) -> None:
        """Shut the framework down cleanly."""
        ...


class Tasks:
    """Runs work in asyncio tasks, as users do with a framework that has neither a submit nor a cancel function."""

    def __init__(self) -> None:
        self._of: dict[str, asyncio.Task[str]] = {}
        self._sessions: dict[str, set[asyncio.Task[str]]] = {}
        self._number = 0

    def start(self, session: str, work: Any) -> str:
        """Start the coroutine `work`, which returns the answer, as work of the session. Return the work's id."""
        self._number += 1
        task = asyncio.get_running_loop().create_task(work)
        running = self._sessions.setdefault(session, set())
        running.add(task)
        task.add_done_callback(running.discard)
        self._of[f"work-{self._number}"] = task
        return f"work-{self._number}"

    async def result(self, work: str) -> str:
        """Wait for the work to end, and return its answer or raise its error. Call this once for each id."""
        try:
            return await asyncio.shield(self._of[work])
        except asyncio.CancelledError:
            if self._of[work].cancelled():
                raise RuntimeError("cancelled") from None
            raise
        finally:
            if self._of[work].done():
                del self._of[work]

    async def cancel(self, session: str) -> None:
        """Cancel the session's tasks and wait until they have ended."""
        for task in self._sessions.get(session, ()):
            task.cancel()
        await self.ended(session)

    async def ended(self, session: str) -> None:
        """Wait until all of the session's tasks have ended."""
        if running := self._sessions.get(session):
            await asyncio.wait(list(running))


# ── the tools ────────────────────────────────────────────────────────────────────────────────────────────────────────
# They are written as users would write them: without regard to cancellation.


def beat(file: str, seconds: float) -> str:
    """Append to the file about fifty times a second, for `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with open(file, "a") as out:
            out.write(".")
        time.sleep(0.02)
    return "beaten"


def pound(file: str, seconds: float) -> str:
    """Append to the file about fifty times a second, for `seconds`, like the tool `beat`."""
    return beat(file, seconds)


def block(file: str, seconds: float) -> str:
    """Create the file, then sleep for `seconds` in one call that cannot be interrupted."""
    Path(file).write_text("on")
    time.sleep(seconds)
    return "waited"


def nap(seconds: float) -> str:
    """Sleep for `seconds`, in a sync function."""
    time.sleep(seconds)
    return "rested"


async def idle(file: str, seconds: float) -> str:
    """Create the file, then sleep for `seconds`, in an async function."""
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY))
    await asyncio.sleep(seconds)
    return "idled"


async def program(file: str, seconds: float) -> str:
    """Run a program that starts a child in a separate process session, and wait for the program."""
    child = (
        "import os, sys, time\n"
        "os.fork() and os.wait()[0] and sys.exit()\n"
        "os.setsid()\n"
        f"open({file + '.new'!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({file + '.new'!r}, {file!r})\n"
        f"time.sleep({seconds})\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", child, stdin=subprocess.DEVNULL)
    return f"exit {await process.wait()}"


TOOLS: tuple[Callable[..., Any], ...] = (beat, block, nap, idle, program)
"""The tools that every agent gets unchanged."""


# ── the pipe ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load(target: str) -> type[Adapter]:
    """Return the adapter class at ``file.py:Class`` or ``module:Class``."""
    where, _, name = target.rpartition(":")
    module: ModuleType
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("conformance_adapter", where)
        if spec is None or spec.loader is None:
            raise ImportError(f"{where} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules["conformance_adapter"] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(where)
    found: type[Adapter] = getattr(module, name)
    methods = (method for method in vars(Adapter) if not method.startswith("_"))
    if missing := [method for method in methods if not callable(getattr(found, method, None))]:
        raise TypeError(f"the adapter {name} has no {', '.join(missing)}")
    return found


def _inventory() -> dict[str, int]:
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()) - 1,
        "threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")),
    }


def _versions(adapter: Adapter) -> list[str]:
    from importlib.metadata import version

    return [f"{name} {version(name)}" for name in adapter.packages]


async def _answer(adapter: Adapter, op: str, args: list[Any]) -> Any:
    if op == "inventory":
        return _inventory()
    if op == "versions":
        return _versions(adapter)
    if op == "start":
        return await adapter.start(Setting(model_url=args[0], folder=args[1], tools=TOOLS, forced_tool=pound))
    return await getattr(adapter, op)(*args)


def _checked(op: str, value: Any) -> Any:
    """Return the value of an adapter's method. Raises `TypeError` if the value is of the wrong type."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op} returned a value that JSON cannot express: {value!r}") from None
    match op, value:
        case (("submit" | "result" | "force" | "inbox"), str()):
            return value
        case "live", [*names] if all(isinstance(one, str) for one in names):
            return value
        case "transcript", [*entries] if all(_is_entry(one) for one in entries):
            return value
        case (("submit" | "result" | "force" | "inbox" | "live" | "transcript"), _):
            raise TypeError(f"{op} returned {value!r:.80}, which is not of the type that Adapter.{op} declares")
    return value


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and all(isinstance(one, str) for one in entry)


async def _serve(target: str, incoming: Any, outgoing: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LIMIT_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), incoming)
    adapter = _load(target)()
    calls: set[asyncio.Task[None]] = set()

    async def call(asked: dict[str, Any]) -> None:
        said: dict[str, Any] = {"id": asked["id"]}
        try:
            value = await _answer(adapter, asked["op"], asked["args"])
            line = json.dumps({**said, "value": _checked(asked["op"], value)})
        except NotOffered as error:
            line = json.dumps({**said, "not_offered": str(error)})
        except (Exception, asyncio.CancelledError) as error:
            line = json.dumps({**said, "error": f"{type(error).__name__}: {error}"})
        outgoing.write(line.encode() + b"\n")

    while line := await reader.readline():
        asked = json.loads(line)
        task = loop.create_task(call(asked))
        calls.add(task)
        task.add_done_callback(calls.discard)
        if asked["op"] == "close":
            await asyncio.wait({task})
            return


def main(target: str) -> None:
    """Serve the adapter at ``file.py:Class`` or ``module:Class`` on stdin and stdout until the judge closes it."""
    # Keep the output of the framework and of agents out of the pipe.
    outgoing = os.fdopen(os.dup(1), "wb", buffering=0)
    incoming = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    asyncio.run(_serve(target, incoming, outgoing))
    os._exit(0)  # threads that the probes left behind would delay the exit


if __name__ == "__main__":
    main(sys.argv[1])
