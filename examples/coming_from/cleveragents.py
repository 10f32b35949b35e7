"""Coming from CleverAgents: a reactive pipeline into a graph, in which every task has an owner.

Items arrive from the threads of two schedulers; an operator runs a LangGraph graph for each, up to 20 at a time. Then a
second pipeline is disposed halfway, and the bridge is closed while items still arrive: nothing is left.
"""

import asyncio
from typing import TypedDict

import reactivex
from langgraph.graph import END, START, StateGraph
from reactivex import operators
from reactivex.scheduler import NewThreadScheduler, ThreadPoolScheduler

import holdfast
from holdfast.integrations.langgraph import graph_agent
from holdfast.integrations.reactive import ReactiveBridge


class Note(TypedDict):
    """The graph's state."""

    text: str


async def clean(state: Note) -> Note:
    await asyncio.sleep(0)
    return {"text": state["text"].strip()}


def shout(state: Note) -> Note:  # a sync node gets a thread
    return {"text": state["text"].upper()}


graph = StateGraph(Note)
graph.add_node("clean", clean)
graph.add_node("shout", shout)
graph.add_edge(START, "clean")
graph.add_edge("clean", "shout")
graph.add_edge("shout", END)
notes = graph_agent(graph, name="notes", input="text", answer="text")


def source(count: int, scheduler: reactivex.abc.SchedulerBase) -> reactivex.Observable[str]:
    return reactivex.range(0, count).pipe(
        operators.subscribe_on(scheduler), operators.map(lambda number: f"  note {number} ")
    )


async def pipeline(run: holdfast.Run) -> str:
    pool, fresh = ThreadPoolScheduler(4), NewThreadScheduler()
    try:
        async with ReactiveBridge(run, concurrency=20) as bridge:
            both = reactivex.merge(source(40, pool), source(40, fresh))
            found = await bridge.collect(both.pipe(bridge.each(notes)))
            await run.emit(f"{len(found)} results, the last one in order: {sorted(found)[-1]}\n")

            # The rest is not needed: disposing interrupts the work in progress.
            first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            def seen(result: str) -> None:
                if not first.done():
                    first.set_result(result)

            subscription = source(1000, pool).pipe(bridge.each(notes)).subscribe(seen)
            await first
            subscription.dispose()

            # Items that arrive while the bridge closes are ended or refused.
            source(1000, fresh).pipe(bridge.each(notes)).subscribe(lambda _: None, lambda error: None)
            receipt = await bridge.aclose("the user left")
        counts = bridge.statistics()
        accounted = counts.received == counts.done + counts.failed + counts.interrupted
        return f"closed: {receipt.outcome}; streams left: {bridge.streams}; every task accounted for: {accounted}"
    finally:
        pool.executor.shutdown()


async def main() -> None:
    async with holdfast.Host(pipeline, store="memory://") as host:
        session = host.session("alice")
        print(await session.ask("go"))
        print(f"left in the session: {len((await session.tree()).children)}")


if __name__ == "__main__":
    asyncio.run(main())
