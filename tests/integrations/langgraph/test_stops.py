"""A stop ends a graph's nodes: tasks at once, threads when they listen, programs always; what comes later is void."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any, TypedDict

import psutil
import pytest
from langchain_core.messages import AIMessage
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from holdfast.errors import RunClosed, ScopeClosed
from holdfast.host.session import Session
from holdfast.integrations.langgraph import current_run, graph_agent
from holdfast.integrations.langgraph.state import RunSaver
from holdfast.protocol.events import ToolFinished
from holdfast.protocol.stopping import StopReceipt
from holdfast.runtime import check_interrupt, current_interrupt
from tests.integrations.langgraph.graphs import PATIENT, hosted, log, run, said

SLEEPER = (sys.executable, "-S", "-c", "import time; time.sleep(1000)")


def one_node(node: Any, *, inside: bool = False) -> StateGraph[Any, Any, Any, Any]:
    """A graph of one node, in a subgraph perhaps."""
    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return one_node(builder.compile()) if inside else builder


async def interrupted(session: Session, begun: threading.Event) -> StopReceipt:
    """Interrupt the run once its node has begun."""
    while not begun.is_set():
        await asyncio.sleep(0.002)
    receipt = await session.interrupt("enough")
    assert isinstance(receipt, StopReceipt)
    return receipt


@pytest.mark.parametrize("inside", [False, True])
def test_a_plain_node_that_listens_is_gone_with_its_thread(inside: bool) -> None:
    begun = threading.Event()
    ended = threading.Event()

    def node(state: MessagesState) -> dict[str, Any]:
        if state["messages"][-1].content != "wait":
            return {"messages": [AIMessage("fine")]}
        begun.set()
        try:
            while True:
                check_interrupt()
                time.sleep(0.002)
        finally:
            ended.set()

    async def test() -> None:
        async with hosted(graph_agent(one_node(node, inside=inside), name="g"), settings=PATIENT) as host:
            session = host.session("s")
            sent = await session.send("wait")
            receipt = await interrupted(session, begun)
            assert (receipt.outcome, receipt.abandoned) == ("gone", ())
            assert ended.is_set()
            assert (await session.wait(sent.message_id)).state == "interrupted"
            assert await session.ask("and now?") == "fine"

    run(test())


def test_a_plain_node_that_does_not_listen_is_named_and_what_it_returns_is_void() -> None:
    begun, go_on, returned = threading.Event(), threading.Event(), threading.Event()
    late: list[BaseException] = []

    def node(state: MessagesState) -> dict[str, Any]:
        if state["messages"][-1].content != "wait":
            return {"messages": [AIMessage(f"{len(state['messages'])} messages")]}
        mine = current_run()
        begun.set()
        go_on.wait(60)
        try:
            mine.emit("too late")
        except RunClosed as error:
            late.append(error)
        returned.set()
        return {"messages": [AIMessage("too late")]}

    async def test() -> None:
        async with hosted(graph_agent(one_node(node), name="g")) as host:
            session = host.session("s")
            await session.send("wait")
            receipt = await interrupted(session, begun)
            assert receipt.outcome == "quarantined"
            assert [left.kind for left in receipt.abandoned] == ["thread"]
            answer = await session.ask("and now?")
            go_on.set()
            while not returned.is_set():
                await asyncio.sleep(0.002)
            assert answer == "3 messages", "the request, the note that it was interrupted, and the question"
            assert await session.ask("again") == "5 messages"
            assert len(late) == 1
            assert "too late" not in str(await said(session))

    run(test())


def test_nothing_is_saved_after_the_end_of_a_run() -> None:
    begun, go_on = threading.Event(), threading.Event()
    saving: list[BaseException] = []
    inner = one_node(lambda state: {"messages": [AIMessage(f"{len(state['messages'])}")]}).compile(checkpointer=True)

    def node(state: MessagesState) -> dict[str, Any]:
        if state["messages"][-1].content == "wait":
            begun.set()
            go_on.wait(60)
        try:
            output = inner.invoke({"messages": [state["messages"][-1]]}, durability="sync")
        except BaseException as error:
            saving.append(error)
            raise
        return {"messages": [AIMessage(f"inside {output['messages'][-1].content}")]}

    async def test() -> None:
        async with hosted(graph_agent(one_node(node), name="g")) as host:
            session = host.session("s")
            assert (await session.ask("a")).endswith("inside 1")
            await session.send("wait")
            receipt = await interrupted(session, begun)
            assert receipt.outcome == "quarantined"
            go_on.set()
            while not saving:
                await asyncio.sleep(0.002)
            assert isinstance(saving[0], ScopeClosed)  # it cannot even begin
            assert (await session.ask("b")).endswith("inside 3")

    run(test())


def test_a_saver_that_is_closed_takes_nothing_more() -> None:
    saver = RunSaver("t")
    graph = one_node(lambda state: {"messages": [AIMessage("x")]}).compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke({"messages": [("user", "a")]}, config)
    saved = saver.rows(inside=True)
    listed = graph.copy(
        {"checkpointer": saver.with_allowlist([("tests", "State")])}
    )  # as LangGraph does if it is strict
    saver.close()
    for one in (graph, listed):
        with pytest.raises(RunClosed):
            one.invoke({"messages": [("user", "b")]}, config)
    assert saver.rows(inside=True) == saved


@pytest.mark.parametrize("shape", ["async", "thread", "inside"])
def test_the_programs_of_a_node_die_with_it(shape: str) -> None:
    begun = threading.Event()
    pids: list[int] = []
    programs: list[asyncio.subprocess.Process] = []

    async def node(state: MessagesState) -> dict[str, Any]:
        program = await asyncio.create_subprocess_exec(*SLEEPER, start_new_session=True)
        programs.append(program)
        pids.append(program.pid)
        begun.set()
        await program.wait()
        return {}

    def plain(state: MessagesState) -> dict[str, Any]:
        with subprocess.Popen(SLEEPER, start_new_session=True) as program:
            pids.append(program.pid)
            begun.set()
            program.wait()
        return {}

    async def test() -> None:
        builder = one_node(node if shape == "async" else plain, inside=shape == "inside")
        async with hosted(graph_agent(builder, name="g"), settings=PATIENT) as host:
            session = host.session("s")
            await session.send("wait")
            receipt = await interrupted(session, begun)
            assert (receipt.outcome, receipt.survivors) == ("gone", ()), receipt
            assert [(pid, state) for pid in pids if (state := state_of(pid)) not in ("gone", "zombie")] == []
        for program in programs:
            await program.wait()  # so that asyncio, too, has seen its end before the loop is closed

    run(test())


def state_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


class Named(TypedDict):
    name: str


def test_every_parallel_node_is_stopped_and_told() -> None:
    begun: list[str] = []
    stopped: list[str] = []
    all_begun = threading.Event()

    async def node(state: Named) -> dict[str, Any]:
        begun.append(state["name"])
        if len(begun) == 4:
            all_begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.append(state["name"])
        return {}

    def plain(state: Named) -> dict[str, Any]:
        begun.append(state["name"])
        if len(begun) == 4:
            all_begun.set()
        interrupt = current_interrupt()
        assert interrupt is not None
        try:
            interrupt.sleep_blocking(1000)
        finally:
            stopped.append(state["name"])
        return {}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_node("plain", plain)
    builder.add_conditional_edges(
        START,
        lambda state: [Send(kind, {"name": f"{kind} {n}"}) for kind in ("node", "plain") for n in range(2)],
        ["node", "plain"],
    )

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g"), settings=PATIENT) as host:
            session = host.session("s")
            await session.send("go")
            receipt = await interrupted(session, all_begun)
            assert receipt.outcome == "gone", receipt
            assert sorted(stopped) == sorted(begun) == ["node 0", "node 1", "plain 0", "plain 1"]
            ended = [event.status for event in await log(session) if isinstance(event, ToolFinished)]
            assert ended == ["interrupted"] * 5

    run(test())


def test_tasks_of_an_entrypoint_are_stopped() -> None:
    begun = threading.Event()

    @task
    def plain(n: int) -> int:
        begun.set()
        interrupt = current_interrupt()
        assert interrupt is not None
        interrupt.sleep_blocking(1000)
        return n

    @entrypoint()
    async def workflow(text: str) -> str:
        return str(await plain(1))

    async def test() -> None:
        async with hosted(graph_agent(workflow, name="workflow"), settings=PATIENT) as host:
            session = host.session("s")
            await session.send("go")
            assert (await interrupted(session, begun)).outcome == "gone"

    run(test())


def test_one_sessions_stop_leaves_the_other_sessions_nodes_alone() -> None:
    begun = {name: threading.Event() for name in ("a", "b")}
    a_is_stopped = threading.Event()

    def node(state: MessagesState) -> dict[str, Any]:
        name = str(state["messages"][-1].content)
        interrupt = current_interrupt()
        assert interrupt is not None
        begun[name].set()
        while not a_is_stopped.is_set():
            interrupt.check()
            time.sleep(0.002)
        return {"messages": [AIMessage(f"{name} is done")]}

    async def test() -> None:
        async with hosted(graph_agent(one_node(node), name="g")) as host:
            sent = {name: await host.session(name).send(name) for name in begun}
            while not begun["b"].is_set():
                await asyncio.sleep(0.002)
            await interrupted(host.session("a"), begun["a"])
            a_is_stopped.set()
            assert (await host.session("b").wait(sent["b"].message_id)).text == "b is done"

    run(test())
