"""Coming from MoFA: one interrupt for a runner, its background stream, parallel agents and the nodes of a graph.

All of it is one run. The interrupt wakes every waiter, even the sleep between two ticks, and latecomers still see it.
"""

import asyncio
import subprocess
from typing import TypedDict

from langgraph.graph import END, START, StateGraph

import holdfast
from holdfast.events import ChildStarted, TextDelta
from holdfast.integrations.langgraph import current_run, graph_agent


async def tick(run: holdfast.Run) -> str:
    return "tick"


async def sensor(run: holdfast.Run) -> None:
    await run.emit("sensor")
    while True:
        await run.interrupt.sleep(0.01)


async def think(run: holdfast.Run) -> None:
    await run.emit("think")
    await run.interrupt.wait()  # waits without a race between checking a flag and waiting


def crawl(run: holdfast.Run) -> None:
    _ = run.emit("crawl")
    run.interrupt.wait_blocking()  # a thread


async def build(run: holdfast.Run) -> None:
    program = await run.process(["sh", "-c", "trap '' TERM; (setsid sleep 600 &); sleep 600"])
    await run.emit("build")
    await program.wait()


class State(TypedDict):
    """The state of the graph."""

    text: str


async def left(state: State) -> None:
    await current_run().emit("left node")
    await asyncio.sleep(600)


def right(state: State) -> None:
    _ = current_run().emit("right node")
    subprocess.run(["sleep", "600"], check=False)  # a program in a thread, started without Holdfast's API


nodes = StateGraph(State)
nodes.add_node("left", left)
nodes.add_node("right", right)
for node in ("left", "right"):
    nodes.add_edge(START, node)
    nodes.add_edge(node, END)

everything = holdfast.parallel(
    holdfast.periodic(tick, every_s=600, initial_delay_s=0, beside=[sensor], name="runner"),
    holdfast.parallel(think, crawl, build, name="parallel agents"),
    graph_agent(nodes, name="graph", input="text", answer="text"),
    name="mofa",
)


async def main() -> None:
    async with holdfast.Host(everything, store="memory://") as host:
        session = host.session("alice")
        started = await session.send("go")
        at_work = []
        async for event in session.events(after=started.cursor):
            if isinstance(event, TextDelta):
                at_work.append(event.text)
            if len(at_work) == 7:
                break
        receipt = await session.interrupt("the user has left", grace_s=0.5)
        print(f"{', '.join(sorted(at_work))}: {receipt.outcome}")
        print(f"survivors: {list(receipt.survivors)}, abandoned: {list(receipt.abandoned)}")
        print(f"message: {(await session.wait(started.message_id)).state}")
        events = [event async for event in session.events(follow=started.message_id)]
        print("branches:", ", ".join(sorted({event.agent for event in events if isinstance(event, ChildStarted)})))
        print(f"left in the session: {len((await session.tree()).children)}")


if __name__ == "__main__":
    asyncio.run(main())
