"""`interrupt()` in a graph is a question of the run: durable, answered once, over restarts and crashes too."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Send, interrupt

from holdfast import Host, Run
from holdfast.agents import Agent
from holdfast.errors import UnknownQuestion
from holdfast.integrations.langgraph import current_run, graph_agent
from holdfast.protocol.events import (
    Event,
    RunRestarted,
    RunResumed,
    RunSuspended,
    StepFinished,
    ToolFinished,
    ToolStarted,
    encode_event,
)
from holdfast.protocol.messages import Answer, Question
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.storage.port import Send as Sending
from holdfast.testing import VirtualClock, explore
from tests.integrations.langgraph import graphs
from tests.integrations.langgraph.graphs import asked, hosted, log, run, said


class Asked(TypedDict):
    text: str
    answers: Annotated[list[str], operator.add]


class One(TypedDict):
    name: str


def three_at_once() -> StateGraph[Any, Any, Any, Any]:
    """Three nodes beside each other; two ask, one of them twice."""

    def fan_out(state: Asked) -> list[Send]:
        return [Send("ask", {"name": name}) for name in ("a", "b", "quiet")]

    async def ask(state: One) -> dict[str, list[str]]:
        if state["name"] == "quiet":
            return {"answers": ["quiet"]}
        answers = [interrupt(f"{state['name']} {n}?") for n in range(1 + (state["name"] == "b"))]
        return {"answers": [f"{state['name']}={answer}" for answer in answers]}

    builder = StateGraph(Asked)
    builder.add_node("ask", ask)
    builder.add_conditional_edges(START, fan_out, ["ask"])
    return builder


def joined(output: dict[str, Any]) -> str:
    return " ".join(sorted(output["answers"]))


def test_several_questions_are_asked_at_once_and_each_gets_its_own_answer() -> None:
    async def test() -> None:
        async with hosted(graph_agent(three_at_once(), name="g", input="text", answer=joined)) as host:
            session = host.session("s")
            receipt = await session.send("hi")
            questions = await asked(session, 2)
            assert sorted(question.text for question in questions) == ["a 0?", "b 0?"]
            for question in reversed(questions):
                await session.answer(question.question_id, question.text[0].upper())
            (second,) = await asked(session)
            assert second.text == "b 1?"
            await session.answer(second.question_id, "again")
            assert (await session.wait(receipt.message_id)).text == "a=A b=B b=again quiet"

    run(test())


def test_what_a_node_called_before_it_asked_is_not_called_again() -> None:
    called: list[str] = []

    async def node(state: MessagesState) -> dict[str, Any]:
        booked = await current_run().call(called.append, "booked")
        child = await current_run().delegate(child_of, "child")
        answer = interrupt("ok?")
        await current_run().call(called.append, "paid")
        return {"messages": [AIMessage(f"{answer} {booked} {child}")]}

    async def child_of(run: Any) -> str:
        called.append("child")
        return "grown"

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")

    async def test(*, beside: bool) -> None:
        called.clear()

        async def busy(run: Run) -> str:
            """Keeps the run in memory while the graph asks."""
            if not beside:
                return await run.delegate(agent, "x")
            done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def graph() -> None:
                done.set_result(await run.delegate(agent, "x"))

            handle = run.spawn(graph)
            while not done.done():
                await asyncio.sleep(0.005)
            await handle
            return done.result()

        agent = graph_agent(builder, name="g")
        async with hosted(Agent(name="busy", work=busy, replayable=not beside)) as host:
            session = host.session("s")
            receipt = await session.send("hi")
            (question,) = await asked(session)
            await session.answer(question.question_id, "yes")
            assert (await session.wait(receipt.message_id)).text == "yes None grown"
            assert called == ["booked", "child", "paid"]

    run(test(beside=True))
    run(test(beside=False))


def test_a_question_outlives_the_host_with_all_that_was_said_before_it(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'h.db'}"

    def graph() -> Agent:
        call = {"name": "multiply", "args": {"a": 1, "b": 2}, "id": "c1", "type": "tool_call"}
        chat = graphs.scripted(AIMessage("I look.", tool_calls=[call]))

        async def model(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await chat.ainvoke("x")]}

        def person(state: MessagesState) -> dict[str, Any]:
            return {"messages": [AIMessage(f"You said {interrupt('and you?')}.")]}

        builder = StateGraph(MessagesState)
        builder.add_node("model", model)
        builder.add_node("tools", ToolNode([graphs.multiply]))
        builder.add_node("person", person)
        builder.add_edge(START, "model")
        builder.add_edge("model", "tools")
        builder.add_edge("tools", "person")
        return graph_agent(builder, name="g")

    async def test() -> None:
        async with hosted(graph(), store=store) as host:
            receipt = await host.session("s").send("hi")
            (question,) = await asked(host.session("s"))
        async with hosted(graph(), store=store) as host:
            session = host.session("s")
            assert [one.question_id for one in await session.questions()] == [question.question_id]
            await session.answer(question.question_id, "no")
            assert (await session.wait(receipt.message_id)).text == "I look.\n\nYou said no."
            assert [role for role, _ in await said(session)] == [
                "user",
                "assistant",
                "tool_call",
                "tool_result",
                "assistant",
            ]

    run(test())


PROGRAM = """
import asyncio, sys
from holdfast import Host, Run
from holdfast.integrations.langgraph import graph_agent
from tests.integrations.langgraph.test_questions import booking, joined

async def main():
    store, folder = sys.argv[1:]
    async with Host(graph_agent(booking(folder), name="g", input="text", answer=joined), store=store) as host:
        await host.session("s").send("hi", idempotency_key="only")
        print("up", flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


def booking(folder: str) -> StateGraph[Any, Any, Any, Any]:
    """Two nodes that leave a mark each, and questions between them."""

    def mark(name: str) -> None:
        with Path(folder, name).open("a") as file:
            file.write("x")

    def node(name: str) -> Any:
        def work(state: Asked) -> dict[str, list[str]]:
            mark(name)
            return {"answers": [name]}

        return work

    def person(state: Asked) -> dict[str, list[str]]:
        return {"answers": [interrupt("go on?")]}

    builder = StateGraph(Asked)
    builder.add_node("book", node("book"))
    builder.add_node("person", person)
    builder.add_node("pay", node("pay"))
    builder.add_edge(START, "book")
    builder.add_edge("book", "person")
    builder.add_edge("person", "pay")
    return builder


def test_after_a_kill_the_graph_goes_on_behind_its_question_and_repeats_no_node(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'h.db'}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "LANGSMITH_TRACING": "false"}
    command = [sys.executable, "-c", PROGRAM, store, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        asyncio.run(asyncio.wait_for(until_asked(store), 60))
        program.send_signal(signal.SIGKILL)

    async def test() -> None:
        agent = graph_agent(booking(str(tmp_path)), name="g", input="text", answer=joined)
        async with hosted(agent, store=store) as host:
            session = host.session("s")
            (question,) = await asked(session)
            await session.answer(question.question_id, "yes")
            (view,) = await session.runs()
            assert (await session.wait(view.messages[0])).text == "book pay yes"

    run(test())
    assert {name: (tmp_path / name).read_text() for name in ("book", "pay")} == {"book": "x", "pay": "x"}


async def until_asked(store: str) -> None:
    """Wait until a question stands in the file, which another process writes."""
    while True:
        with contextlib.closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as file:
            if file.execute("SELECT 1 FROM session WHERE question_due IS NOT NULL").fetchall():
                return
        await asyncio.sleep(0.02)


async def crashed(agent: str, run_id: str, written: Sequence[Event]) -> MemoryStore:
    """A store whose host ended in the middle of a run that had written these events."""
    store = MemoryStore()
    at = time.time()
    await store.open(node_id="n_gone", at=at)
    sent = await store.send(
        Sending(
            principal="local",
            key="s",
            agent=agent,
            default_agent=agent,
            message_id="m_first",
            content="hi",
            policy="queue",
            at=at,
            run_id=run_id,
        )
    )
    assert sent.claim is not None
    for event in written:
        match event:
            case RunSuspended(question=question):
                await store.suspend(sent.claim.lease, question)
            case RunResumed(answer=answer):
                await store.answer("local", "s", answer)
            case RunRestarted(discard_from=discard_from):
                await store.restart(sent.claim.lease, at=at, discard_from=discard_from)
            case _:
                await store.append(sent.claim.lease, [encode_event(event)])
    await store.close()
    return store


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_crash_at_any_event_repeats_no_node_that_may_have_begun(tmp_path: Path, idempotent: bool) -> None:
    builder = booking(str(tmp_path))
    agent = graph_agent(builder, name="g", input="text", answer=joined, idempotent=idempotent)

    def marks() -> dict[str, int]:
        found = {name: len((tmp_path / name).read_text()) for name in ("book", "pay") if (tmp_path / name).exists()}
        for name in found:
            (tmp_path / name).unlink()
        return found

    async def test() -> None:
        async with hosted(agent) as host:
            session = host.session("s")
            sent = await session.send("hi")
            (question,) = await asked(session)
            await session.answer(question.question_id, "yes")
            await session.wait(sent.message_id)
            events = [e for e in await log(session) if not e.kind.startswith(("message.", "run.started", "run.fin"))]
        assert sent.run_id is not None
        assert marks() == {"book": 1, "pay": 1}
        ended: set[str] = set()
        for cut in range(len(events) + 1):
            written = events[:cut]
            place = f"behind event {cut}, {written[-1] if written else 'none'}"
            guards = {e.call_id for e in written if isinstance(e, ToolStarted) and e.name == "g"}
            closed = guards & {e.call_id for e in written if isinstance(e, ToolFinished)}
            store = await crashed("g", sent.run_id, written)
            async with hosted(agent, store=store) as host:
                session = host.session("s")
                while (settled := await session.message("m_first")).state == "taken":
                    for question in await session.questions():
                        await session.answer(question.question_id, "yes")
                    await asyncio.sleep(0.001)
                ended.add(settled.state)
                begun = sum(isinstance(e, StepFinished) for e in written) if idempotent else len(guards)
                assert marks() == (
                    {}
                    if guards != closed and not idempotent
                    else {"book": 1, "pay": 1}
                    if begun == 0
                    else {"pay": 1}
                    if begun == 1
                    else {}
                ), place
                expected = "interrupted" if guards != closed and not idempotent else "completed"
                assert settled.state == expected, place
                assert settled.text == ("book pay yes" if expected == "completed" else settled.text), place
        assert ended == ({"completed"} if idempotent else {"completed", "interrupted"})

    run(test())


@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_a_review_of_calls_is_an_approval_of_each(decision: str) -> None:
    asked_for: list[Any] = []

    def old(state: MessagesState) -> dict[str, Any]:
        request = {"action_request": {"action": "pay", "args": {"to": "Ann"}}, "config": {}, "description": "Pay Ann?"}
        asked_for.append(interrupt([request]))
        return {}

    def new(state: MessagesState) -> dict[str, Any]:
        actions = [{"name": name, "args": {"n": n}} for n, name in enumerate(("mail", "call"))]
        asked_for.append(interrupt({"action_requests": actions, "review_configs": []}))
        return {"messages": [AIMessage("done")]}

    builder = StateGraph(MessagesState)
    builder.add_node("old", old)
    builder.add_node("new", new)
    builder.add_edge(START, "old")
    builder.add_edge("old", "new")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g")) as host:
            session = host.session("s")
            receipt = await session.send("hi")
            tools = []
            for count in (1, 2):
                for question in await asked(session, count):
                    tools.append((question.kind, question.tool, question.arguments))
                    if decision == "approve":
                        await session.approve(question)
                    else:
                        await session.deny(question.question_id, reason="too much")
            assert (await session.wait(receipt.message_id)).text == "done"
            assert tools == [
                ("approval", "pay", {"to": "Ann"}),
                ("approval", "mail", {"n": 0}),
                ("approval", "call", {"n": 1}),
            ]
            if decision == "approve":
                assert asked_for == [[{"type": "accept", "args": None}], {"decisions": [{"type": "approve"}] * 2}]
            else:
                no = {"type": "reject", "message": "too much"}
                assert asked_for == [[{"type": "response", "args": "too much"}], {"decisions": [no, no]}]

    run(test())


def test_questions_and_answers_can_be_mapped() -> None:
    def ask(value: Any) -> Question:
        return Question(question_id="", kind="approval", text=value["q"], tool="order", arguments=value["items"])

    def resume(answer: Answer, value: Any) -> Any:
        return {"ok": answer.decision == "approved", "note": answer.text, "of": len(value["items"])}

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(str(interrupt({"q": "Order?", "items": ["tea"]})))]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g", ask=ask, resume=resume)) as host:
            session = host.session("s")
            receipt = await session.send("hi")
            (question,) = await asked(session)
            assert (question.tool, question.arguments, question.text) == ("order", ["tea"], "Order?")
            await session.approve(question, note="fine")
            assert (await session.wait(receipt.message_id)).text == "{'ok': True, 'note': 'fine', 'of': 1}"

    run(test())


@pytest.mark.parametrize("decision", ["approve", "deny"])
def test_a_breakpoint_of_the_graph_asks_for_leave_to_go_on(decision: str) -> None:
    compiled = graphs.router().compile(interrupt_before=["story"])

    async def test() -> None:
        async with hosted(graph_agent(compiled, name="router", input="request", answer="output")) as host:
            session = host.session("s")
            receipt = await session.send("a story")
            (question,) = await asked(session)
            assert (question.kind, question.text) == ("approval", "router stopped before story. Continue?")
            if decision == "approve":
                await session.approve(question)
                assert (await session.wait(receipt.message_id)).text == "a story for: a story"
            else:
                await session.deny(question.question_id, reason="no stories")
                settled = await session.wait(receipt.message_id)
                assert settled.state == "interrupted"
                assert settled.cause is not None
                assert settled.cause.reason == "a person stopped the graph: no stories"

    run(test())


def test_a_question_that_nobody_answers_gives_the_node_none() -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"you said {interrupt('well?')!r}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")

    async def test() -> None:
        settings = Settings(question_ttl_s=0.01)
        async with hosted(graph_agent(builder, name="g"), settings=settings) as host:
            assert await host.session("s").ask("hi") == "you said None"

    run(test())


def test_an_interrupt_while_people_are_asked_ends_the_run_and_the_next_one_works() -> None:
    async def scenario(turns: int) -> None:
        agent = graph_agent(asking(), name="asking")
        settings = Settings(grace_s=1, abandon_after_s=1)
        async with Host(agent, store=MemoryStore(yielding=True), clock=VirtualClock(), settings=settings) as host:
            session = host.session("s")
            receipt = await session.send("one")
            (question,) = await asked(session)
            answering = asyncio.ensure_future(session.answer(question.question_id, "yes"))
            for _ in range(turns):
                await asyncio.sleep(0)
            await session.interrupt("enough")
            await asyncio.wait([answering])
            if (error := answering.exception()) is not None:
                assert isinstance(error, UnknownQuestion), error
            ended.add((await session.wait(receipt.message_id)).state)
            receipt = await session.send("two")
            (question,) = await asked(session)
            await session.answer(question.question_id, "yes")
            assert (await session.wait(receipt.message_id)).text == "two: yes"

    ended: set[str] = set()
    for turns in range(0, 60, 10):
        explore(functools.partial(scenario, turns), schedules=4, seed=turns)
    assert ended == {"interrupted", "completed"}


def asking() -> StateGraph[Any, Any, Any, Any]:
    """One async node that asks a person."""

    async def node(state: MessagesState) -> dict[str, Any]:
        text = str(state["messages"][-1].content)
        return {"messages": [AIMessage(f"{text}: {interrupt('well?')}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder


@pytest.mark.parametrize("crash", [False, True])
def test_calls_inside_of_parallel_subgraphs_are_made_once(crash: bool) -> None:
    called: list[str] = []

    async def inner_node(state: One) -> dict[str, Any]:
        run = current_run()
        await run.call(called.append, state["name"], idempotent=True)
        await run.call(called.append, f"{state['name']} again", idempotent=True)
        return {"answers": [f"{state['name']}={interrupt(state['name'])}" if state["name"] != "c" else "c"]}

    class Inner(One):
        answers: Annotated[list[str], operator.add]

    inner = StateGraph(Inner)
    inner.add_node("inner", inner_node)
    inner.add_edge(START, "inner")
    builder = StateGraph(Asked)
    builder.add_node("sub", inner.compile())
    builder.add_conditional_edges(START, lambda state: [Send("sub", {"name": name}) for name in "abc"], ["sub"])
    agent = graph_agent(builder, name="g", input="text", answer=joined, idempotent=True)

    async def test() -> None:
        async with hosted(agent) as host:
            session = host.session("s")
            sent = await session.send("hi")
            questions = await asked(session, 2)
            events = [e for e in await log(session) if not e.kind.startswith(("message.", "run."))]
            if not crash:
                for question in questions:
                    await session.answer(question.question_id, question.text.upper())
                assert (await session.wait(sent.message_id)).text == "a=A b=B c"
        assert sent.run_id is not None
        if crash:  # before the state was written down: the nodes begin anew
            cut = next(n for n, event in enumerate(events) if isinstance(event, StepFinished))
            async with hosted(agent, store=await crashed("g", sent.run_id, events[:cut])) as host:
                await asked(host.session("s"), 2)
        assert sorted(called) == sorted([f"{name}{more}" for name in "abc" for more in ("", " again")])

    run(test())
