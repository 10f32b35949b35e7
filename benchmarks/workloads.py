"""In-process workloads for `benchmarks.cost`: each request is answered with the CPU time of one operation.

``python benchmarks/workloads.py`` reads names from standard input, a line each, and answers with microseconds. It runs
under another checkout's Python too, so it uses only names that every version of Holdfast has had.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from holdfast import Agent, Host, agent, parallel, tool
from holdfast.protocol.messages import Usage
from holdfast.protocol.model import AssistantMessage, CallPart, EndPart, TextPart
from holdfast.runtime import Scope

COUNT = 400
STOPS = 20
RUNS = 60
STEPS = 20
Workload = Callable[[], Coroutine[Any, Any, float]]


async def _noop() -> None: ...


async def _noop_of(item: int) -> None: ...


@tool
async def nothing() -> str:
    """Answer at once."""
    return "ok"


@agent
async def child(run: Any) -> str:
    return "ok"


SHAPE = parallel(*[child] * 50, name="shape")


async def _timed(work: Callable[[], Awaitable[object]], operations: int) -> float:
    gc.collect()
    began = time.process_time()
    await work()
    return (time.process_time() - began) / operations * 1e6


def _inside(work: Callable[..., Awaitable[object]], operations: int) -> Workload:
    """The CPU time of what an agent does, measured in its run."""

    async def measured() -> float:
        found = 0.0

        @agent(name="measured")
        async def measures(run: Any) -> None:
            nonlocal found
            found = await _timed(lambda: work(run), operations)

        async with Host(measures, store="memory://") as host:
            await host.session("s").ask("x")
        return found

    return measured


async def _tasks() -> None:
    async with Scope("bench", parent=None) as scope:
        for _ in range(COUNT):
            await scope.spawn(_noop())


async def _scopes() -> None:
    async with Scope("bench", parent=None) as scope:
        for _ in range(COUNT):
            async with scope.child("step"):
                pass


async def _stops() -> None:
    for _ in range(STOPS):
        scope = Scope("bench", parent=None, grace_s=1.0).open()
        for _ in range(100):
            scope.spawn(asyncio.sleep(1000))
        await asyncio.sleep(0)
        await scope.stop()


async def _runs(store: str) -> float:
    async with Host(child, store=store) as host:
        session = host.session("s")
        for _ in range(10):
            await session.ask("x")

        async def runs() -> None:
            for _ in range(RUNS):
                await session.ask("x")

        return await _timed(runs, RUNS)


async def _durable_runs() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return await _runs(f"sqlite:///{Path(folder) / 'cost.db'}")


async def _emits(run: Any) -> None:
    for _ in range(COUNT):
        await run.emit("x")


async def _calls(run: Any) -> None:
    for number in range(COUNT):
        await run.call(_noop_of, number)


async def _children(run: Any) -> None:
    for _ in range(50):
        await run.delegate(child, "go")


class _Asks:
    """A model that asks for one call in each of `STEPS` steps."""

    name = "asks"
    context_tokens = None

    @contextlib.asynccontextmanager
    async def stream(self, request: Any, *, attachment: object = None) -> AsyncIterator[AsyncIterator[Any]]:
        """One answer."""
        yield self._parts(sum(isinstance(message, AssistantMessage) for message in request.messages))

    async def _parts(self, answered: int) -> AsyncIterator[Any]:
        yield CallPart(name="nothing", arguments={}) if answered < STEPS else TextPart(text="done")
        yield EndPart(usage=Usage(input_tokens=1))


async def _steps() -> float:
    looping = Agent(name="looping", model=_Asks(), tools=[nothing])
    async with Host(looping, store="memory://") as host:
        return await _timed(lambda: host.session("s").ask("x"), STEPS)


WORKLOADS: dict[str, Workload] = {
    "task of a scope": lambda: _timed(_tasks, COUNT),
    "nested scope": lambda: _timed(_scopes, COUNT),
    "stop of a scope, per task": lambda: _timed(_stops, 100 * STOPS),
    "run in memory": lambda: _runs("memory://"),
    "durable run in process": _durable_runs,
    "emit": _inside(_emits, COUNT),
    "call of a function": _inside(_calls, COUNT),
    "step of a model with a tool call": _steps,
    "item of run.map": _inside(lambda run: run.map(_noop_of, range(1000), concurrency=100), 1000),
    "branch of run.parallel": _inside(lambda run: run.parallel(*[_noop] * 500), 500),
    "child run": _inside(_children, 50),
    "branch of holdfast.parallel": _inside(lambda run: run.delegate(SHAPE, "go"), 50),
}

if __name__ == "__main__":
    for line in sys.stdin:
        print(asyncio.run(WORKLOADS[line.strip()]()), flush=True)
