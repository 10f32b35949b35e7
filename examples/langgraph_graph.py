"""Host a LangGraph graph. It routes, asks a person, waits across a restart, and keeps its state in the session."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import holdfast
from holdfast.events import RunSuspended
from holdfast.integrations.langgraph import current_run, graph_agent


class Orders(MessagesState):
    """The graph's state in a session."""

    ordered: list[str]


def route(state: Orders) -> Command[Literal["order", "report"]]:
    wants_report = "what" in state["messages"][-1].content
    return Command(goto="report" if wants_report else "order")


async def order(state: Orders) -> dict[str, Any]:
    thing = state["messages"][-1].content
    price = await current_run().call(look_up, thing)  # called once, although the node restarts after the answer
    if interrupt(f"{thing} costs {price}. Order it?") != "yes":
        return {"messages": [AIMessage("Not ordered.")]}
    return {"messages": [AIMessage(f"Ordered {thing}.")], "ordered": [*state.get("ordered", []), thing]}


def report(state: Orders) -> dict[str, Any]:
    return {"messages": [AIMessage(f"You have ordered: {', '.join(state.get('ordered', [])) or 'nothing'}")]}


def look_up(thing: str) -> int:
    print(f"(looking up {thing})")
    return 10 * len(thing)


builder = StateGraph(Orders)
builder.add_node("route", route)
builder.add_node("order", order)
builder.add_node("report", report)
builder.add_edge(START, "route")
agent = graph_agent(builder, name="orders")


async def main() -> None:
    with TemporaryDirectory() as folder:
        store = f"sqlite:///{Path(folder, 'holdfast.db')}"
        async with holdfast.Host(agent, store=store) as host:
            session = host.session("alice")
            receipt = await session.send("a teapot")
            async for event in session.events(after=receipt.cursor):
                if isinstance(event, RunSuspended):
                    break

        # The host is gone, but the question is still open.
        async with holdfast.Host(agent, store=store) as host:
            session = host.session("alice")
            (question,) = await session.questions()
            print(f"asked: {question.text}")
            await session.answer(question.question_id, "yes")
            print((await session.wait(receipt.message_id)).text)
            print(await session.ask("what do I have?"))
            await session.undo()
            await session.undo()
            print(await session.ask("what do I have now?"))


if __name__ == "__main__":
    asyncio.run(main())
