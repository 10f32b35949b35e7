"""What hosting adds to a LangGraph run: ten nodes that do nothing, in a library's loop and as an agent.

Run it: ``python -m benchmarks.bench_langgraph``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypedDict

import uvloop
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from benchmarks.rows import Row, print_rows, ratio_row
from holdfast import Host
from holdfast.integrations.langgraph import graph_agent

__all__ = ["rows"]

NODES = 10
ROUNDS = 40
RUNS = 20


class State(TypedDict):
    text: str


async def _noop(state: State) -> dict[str, str]:
    return {"text": state["text"]}


def _graph() -> StateGraph[Any, Any, Any, Any]:
    builder = StateGraph(State)
    before = START
    for n in range(NODES):
        builder.add_node(f"node {n}", _noop)
        builder.add_edge(before, f"node {n}")
        before = f"node {n}"
    return builder


async def _measured(works: dict[str, Callable[[], Awaitable[object]]]) -> dict[str, float]:
    """Processor seconds of one run, the best of many rounds; in turns, so that all have the same weather."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            began = time.process_time()
            for _ in range(RUNS):
                await work()
            best[name] = min(best[name], (time.process_time() - began) / RUNS)
    return best


async def _costs(loop: str) -> list[Row]:
    threads = itertools.count()
    remembering = _graph().compile(checkpointer=InMemorySaver())
    bare = _graph().compile()

    async def alone() -> None:
        await bare.ainvoke({"text": "hi"})

    async def remembered() -> None:
        await remembering.ainvoke({"text": "hi"}, {"configurable": {"thread_id": str(next(threads))}})

    async def streamed() -> None:
        async for _ in remembering.astream(
            {"text": "hi"},
            {"configurable": {"thread_id": str(next(threads))}},
            stream_mode=["values", "tasks", "messages", "custom"],
            subgraphs=True,
        ):
            pass

    async with Host(graph_agent(_graph(), name="ten", input="text", answer="text"), store="memory://") as host:

        async def hosted() -> None:
            await host.session(str(next(threads))).ask("hi")

        best = await _measured({"alone": alone, "remembered": remembered, "streamed": streamed, "hosted": hosted})
    what = f"a graph of {NODES} no-op nodes"
    same = "with a thread in memory, and streams of values, tasks, messages and custom, as the host reads them"
    return [
        Row(name=f"{what}, ainvoke without a thread, {loop}", value=best["alone"] * 1e3, unit="ms"),
        Row(name=f"{what}, ainvoke on a thread, {loop}", value=best["remembered"] * 1e3, unit="ms"),
        Row(name=f"{what}, streamed on a thread, {loop}", value=best["streamed"] * 1e3, unit="ms", note=same),
        Row(name=f"{what}, hosted, {loop}", value=best["hosted"] * 1e3, unit="ms"),
        ratio_row(f"hosted against streamed, {loop}", best["hosted"] / best["streamed"], at_most=1.15),
        ratio_row(f"hosted against ainvoke on a thread, {loop}", best["hosted"] / best["remembered"], at_most=1.2),
        Row(name=f"hosted against ainvoke without a thread, {loop}", value=best["hosted"] / best["alone"], unit="x"),
    ]


def rows() -> list[Row]:
    """All rows, on both loops."""
    found: list[Row] = []
    for loop, runner in (("asyncio", asyncio.run), ("uvloop", uvloop.run)):
        found += runner(_costs(loop))
    return found


if __name__ == "__main__":
    print_rows(rows())
