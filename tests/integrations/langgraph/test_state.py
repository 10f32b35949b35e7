"""A graph's state is what the committed transcript says: after an interrupt, a failure, an undo, a restart, a crowd."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import pytest
from langchain_core.messages import AIMessage, BaseMessage, RemoveMessage, ToolMessage
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from holdfast import Host
from holdfast.agents import Agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.host.session import Session
from holdfast.host.transcript_edits import through
from holdfast.integrations.langgraph import current_run, graph_agent
from holdfast.integrations.langgraph.messages import messages_of
from holdfast.protocol.events import TextDelta, ToolStarted
from holdfast.protocol.messages import AgentState, Message
from holdfast.protocol.transcript import RunTranscript
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, explore
from tests.integrations.langgraph import graphs
from tests.integrations.langgraph.graphs import Counted, hosted, run


def telling(seen: list[list[str]], before: Callable[[str], Any] | None = None) -> Agent:
    """Keeps what messages it saw; answers with their number and how often it completed."""

    async def node(state: Counted) -> dict[str, Any]:
        text = str(state["messages"][-1].content)
        seen.append([f"{message.type}: {message.content}" for message in state["messages"]])
        if before is not None:
            await before(text)
        count = state.get("count", 0) + 1
        return {"messages": [AIMessage(f"{count} of {len(state['messages'])}")], "count": count}

    builder = StateGraph(Counted)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return graph_agent(builder, name="telling")


async def hang_on_wait(text: str) -> None:
    if text == "wait":
        await current_run().emit("half a wor")
        await asyncio.sleep(1000)
    if text == "fail":
        raise ValueError("no")


async def running(session: Session) -> None:
    """Wait until the run has said half a word."""
    while not any(isinstance(event, TextDelta) and "half" in event.text for event in await graphs.log(session)):
        await asyncio.sleep(0.005)


def test_an_undone_run_is_gone_from_the_state() -> None:
    async def test() -> None:
        seen: list[list[str]] = []
        async with hosted(telling(seen)) as host:
            session = host.session("s")
            assert [await session.ask(text) for text in ("a", "b")] == ["1 of 1", "2 of 3"]
            await session.undo()
            assert await session.ask("c") == "2 of 3"
            assert seen[-1] == ["human: a", "ai: 1 of 1", "human: c"]
            await session.undo()
            await session.undo()
            assert await session.ask("d") == "1 of 1"

    run(test())


def test_a_retried_run_counts_once() -> None:
    async def test() -> None:
        seen: list[list[str]] = []
        async with hosted(telling(seen)) as host:
            session = host.session("s")
            await session.ask("a")
            await session.ask("b")
            again = await session.retry()
            assert (await session.wait(again.message_id)).text == "2 of 3"
            assert seen[1] == seen[2] == ["human: a", "ai: 1 of 1", "human: b"]

    run(test())


async def as_a_model_reads(session: Session) -> list[str]:
    """The transcript as the graph's next run gets it."""
    return [f"{message.type}: {message.content}" for message in messages_of(await session.transcript())]


@pytest.mark.parametrize("ending", ["interrupt", "fail"])
def test_of_a_run_that_did_not_complete_the_next_sees_what_the_transcript_says(ending: str) -> None:
    async def test() -> None:
        seen: list[list[str]] = []
        async with hosted(telling(seen, hang_on_wait)) as host:
            session = host.session("s")
            await session.ask("a")
            if ending == "interrupt":
                sent = await session.send("wait")
                await running(session)
                await session.interrupt("enough")
                await session.wait(sent.message_id)
            else:
                failed = await session.send("fail")
                await session.wait(failed.message_id)
            before = await as_a_model_reads(session)
            assert before[2] == ("human: wait" if ending == "interrupt" else "human: fail")
            if ending == "interrupt":
                assert before[3].startswith("ai: half a wor\n\n[interrupted by the user before this was finished")
            else:
                assert before[3].startswith("ai: [failed with an error before this was answered")
            assert (await session.ask("b")).startswith("2 of ")
            assert seen[-1] == [*before, "human: b"] if ending == "interrupt" else seen[-1][-1].endswith("b")

    run(test())


def test_a_rolled_back_run_leaves_no_trace_in_the_state() -> None:
    async def test() -> None:
        seen: list[list[str]] = []
        async with hosted(telling(seen, hang_on_wait)) as host:
            session = host.session("s")
            await session.ask("a")
            await session.send("wait")
            await running(session)
            sent = await session.send("b", policy="rollback")
            assert (await session.wait(sent.message_id)).text == "2 of 3"
            assert seen[-1] == ["human: a", "ai: 1 of 1", "human: b"]

    run(test())


def test_an_open_call_of_an_interrupted_run_has_its_result_in_the_next_state() -> None:
    seen: list[BaseMessage] = []
    call = {"name": "look", "args": {"at": "it"}, "id": "call_1", "type": "tool_call"}

    async def model(state: MessagesState) -> dict[str, Any]:
        seen[:] = state["messages"]
        if state["messages"][-1].content == "wait":
            return {"messages": [AIMessage("I look.", tool_calls=[call])]}
        return {"messages": [AIMessage("done")]}

    async def tools(state: MessagesState) -> dict[str, Any]:
        if getattr(state["messages"][-1], "tool_calls", None):
            await current_run().emit(" ")
            await asyncio.sleep(1000)
        return {}

    builder = StateGraph(MessagesState)
    builder.add_node("model", model)
    builder.add_node("tools", tools)
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g")) as host:
            session = host.session("s")
            sent = await session.send("wait")
            while "tool.started" not in {e.kind for e in await graphs.log(session) if getattr(e, "name", "") == "look"}:
                await asyncio.sleep(0.005)
            await session.interrupt()
            await session.wait(sent.message_id)
            assert await session.ask("go on") == "done"
            _, asked, result, *_ = seen
            assert isinstance(asked, AIMessage)
            assert isinstance(result, ToolMessage)
            assert [one["name"] for one in asked.tool_calls] == ["look"]
            assert (result.tool_call_id, result.status) == (asked.tool_calls[0]["id"], "error")

    run(test())


def test_the_library_loses_nineteen_of_twenty_answers_and_a_session_none() -> None:
    async def library() -> list[str]:
        graph = graphs.counting().compile(checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "t"}}
        await asyncio.gather(*(graph.ainvoke({"messages": [("user", str(n))]}, config) for n in range(20)))
        return [str(message.content) for message in (await graph.aget_state(config)).values["messages"]]

    async def test() -> None:
        assert len(await library()) < 40  # what is put right here
        async with hosted(graph_agent(graphs.counting(), name="counting")) as host:
            session = host.session("s")
            answers = await asyncio.gather(*(session.ask(str(n)) for n in range(20)))
            assert answers == [f"{n + 1} of {2 * n + 1}" for n in range(20)]
            assert await session.ask("end") == "21 of 41"
            assert len(await session.transcript()) == 42

    run(test())


def test_the_state_is_there_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        for n in range(3):
            async with hosted(
                graph_agent(graphs.counting(), name="counting"), store=f"sqlite:///{tmp_path / 'h.db'}"
            ) as host:
                assert await host.session("s").ask("hi") == f"{n + 1} of {2 * n + 1}"

    run(test())


def test_a_branch_has_the_state_and_an_import_what_was_said() -> None:
    async def test() -> None:
        async with hosted(graph_agent(graphs.counting(), name="counting")) as host:
            session = host.session("s")
            await session.ask("a")
            await session.fork("branch")
            assert await host.session("branch").ask("b") == "2 of 3"
            assert await session.ask("b") == "2 of 3"
            export = await session.export()
            assert not any(entry.agent_state is not None for entry in [*export.entries, *await session.transcript()])
            await host.session("imported").import_history(export)
            assert await host.session("imported").ask("c") == "1 of 5"  # a count is said nowhere

    run(test())


def test_what_is_cut_off_in_the_middle_of_a_run_has_no_state_of_its_end() -> None:
    async def test() -> None:
        async with hosted(graph_agent(graphs.counting(), name="counting")) as host:
            session = host.session("s")
            await session.ask("a")
            await session.ask("b")
            await session.fork("cut", through_n=3)
            assert await host.session("cut").ask("c") == "2 of 4"

    run(test())


def test_what_another_agent_said_is_in_the_state() -> None:
    async def test() -> None:
        seen: list[list[str]] = []
        model = Agent(name="model", model=ScriptedModel("from the model"))
        async with hosted(telling(seen), model) as host:
            session = host.session("s")
            await session.ask("a")
            await session.ask("b", agent="model")
            assert await session.ask("c", agent="telling") == "2 of 5"
            assert seen[-1] == ["human: a", "ai: 1 of 1", "human: b", "ai: from the model", "human: c"]

    run(test())


def test_what_was_summed_up_is_in_the_state_as_its_summary_and_the_rest_of_the_state_stays() -> None:
    async def test() -> None:
        seen: list[list[str]] = []
        model = Agent(name="model", model=ScriptedModel("from the model"))
        async with hosted(telling(seen), model) as host:
            session = host.session("s")
            await session.ask("a")
            await session.ask("b")
            await session.ask("c", agent="model")
            await session.compact(keep=1)
            assert await session.ask("d", agent="telling") == "3 of 3"
            assert [line.partition(":")[0] for line in seen[-1]] == ["human", "ai", "human"]
            assert "from the model" in seen[-1][0]  # in the summary
            assert await session.ask("e") == "4 of 5"

    run(test())


def test_what_an_import_says_was_kept_is_not_taken() -> None:
    async def test() -> None:
        async with hosted(graph_agent(graphs.counting(), name="counting")) as host:
            session = host.session("s")
            await session.ask("a")
            number = (await session.info()).number
            kept = (await host.store.transcript(number))[-1].agent_state
            assert kept is not None
            whole = AgentState(by=kept.by, body=await host.store.kept(number, kept.n))
            export = await session.export()
            for key, stolen in (("its number", kept), ("its body", whole)):
                forged = [msgspec.structs.replace(entry, agent_state=stolen) for entry in export.entries]
                await host.session(key).import_history(msgspec.structs.replace(export, entries=tuple(forged)))
                assert await host.session(key).ask("b") == "1 of 3"

    run(test())


@pytest.mark.parametrize("packed", ["", "!!!!", "AAAA", "eJx", "AA=="])
def test_a_state_that_cannot_be_read_begins_anew_with_what_was_said(packed: str) -> None:
    class Broken(MemoryStore):
        async def kept(self, session: int, n: int) -> str:
            assert (await super().kept(session, n)).startswith("langgraph 1 counting\n")
            return f"langgraph 1 counting\n{packed}"

    async def test() -> None:
        async with hosted(graph_agent(graphs.counting(), name="counting"), store=Broken()) as host:
            assert await host.session("s").ask("a") == "1 of 1"
            assert await host.session("s").ask("b") == "1 of 3"

    run(test())


def test_only_a_completed_run_keeps_something_and_a_late_result_none_of_it() -> None:
    mine = AgentState(by="me", body="mine")
    for status in ("completed", "failed", "interrupted"):
        transcript = RunTranscript("r", [Message(message_id="m", seq=1, content="hi")])
        transcript.feed(ToolStarted(run_id="r", call_id="r.1", name="look"))
        transcript.say("meanwhile")
        transcript.agent_state = mine
        entries = transcript.entries(status=status)
        assert [entry.agent_state for entry in entries] == [None, None, None, mine if status == "completed" else None]
    numbered = [msgspec.structs.replace(entry, n=n, agent_state=mine) for n, entry in enumerate(entries, 1)]
    assert [(entry.n, entry.agent_state) for entry in through(numbered, 2)] == [(1, mine), (2, mine), (4, None)]


class Logged(TypedDict):
    text: str
    lines: Annotated[list[str], DeltaChannel(lambda state, writes: state + [w for ws in writes for w in ws], list)]


def test_a_channel_of_deltas_is_whole_in_the_next_run() -> None:
    def node(state: Logged) -> dict[str, Any]:
        return {"lines": [state["text"]]}

    builder = StateGraph(Logged)
    builder.add_node("node", node)
    builder.add_edge(START, "node")

    async def test() -> None:
        agent = graph_agent(builder, name="g", input="text", answer=lambda output: ",".join(output["lines"]))
        async with hosted(agent) as host:
            session = host.session("s")
            assert [await session.ask(text) for text in "abc"] == ["a", "a,b", "a,b,c"]

    run(test())


def test_a_subgraph_that_remembers_does_so_from_run_to_run() -> None:
    inner = graphs.counting().compile(checkpointer=True)

    async def node(state: MessagesState) -> dict[str, Any]:
        output = await inner.ainvoke({"messages": [state["messages"][-1]]})
        return {"messages": [AIMessage(f"inside {output['messages'][-1].content}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g")) as host:
            session = host.session("s")
            assert [(await session.ask("a")).rpartition("inside ")[2] for _ in range(3)] == [
                "1 of 1",
                "2 of 3",
                "3 of 5",
            ]

    run(test())


def test_a_graph_may_take_messages_out_of_its_state() -> None:
    async def node(state: MessagesState) -> dict[str, Any]:
        old = [RemoveMessage(id=message.id) for message in state["messages"][:-1] if message.id]
        return {"messages": [*old, AIMessage(f"{len(state['messages'])}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g")) as host:
            session = host.session("s")
            assert [await session.ask("a") for _ in range(3)] == ["1", "3", "3"]
            assert len(await session.transcript()) == 6

    run(test())


def test_at_whatever_await_a_run_is_interrupted_the_next_one_sees_what_the_transcript_says() -> None:
    ends: set[str] = set()

    async def scenario(turns: int) -> None:
        seen: list[list[str]] = []
        chat = graphs.scripted("one two three", "four five six", "seven")

        async def node(state: Counted) -> dict[str, Any]:
            seen.append([f"{message.type}: {message.content}" for message in state["messages"]])
            return {"messages": [await chat.ainvoke(state["messages"])], "count": state.get("count", 0) + 1}

        builder = StateGraph(Counted)
        builder.add_node("node", node)
        builder.add_edge(START, "node")
        agent = graph_agent(builder, name="g")
        settings = Settings(grace_s=1, abandon_after_s=1)
        async with Host(agent, store=MemoryStore(yielding=True), clock=VirtualClock(), settings=settings) as host:
            session = host.session("s")
            await session.ask("a")
            sent = await session.send("b")
            for _ in range(turns):
                await asyncio.sleep(0)
            await session.interrupt()
            ends.add((await session.wait(sent.message_id)).state)
            expected = await as_a_model_reads(session)
            await session.ask("c")
            assert seen[-1] == [*expected, "human: c"]

    for turns in range(0, 60, 6):
        explore(functools.partial(scenario, turns), schedules=5, seed=turns)
    assert ends == {"interrupted", "completed"}
