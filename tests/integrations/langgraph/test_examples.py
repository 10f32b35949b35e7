"""LangGraph's published examples, in our words: they run as agents unchanged, as they do by themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config, get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from holdfast import Run
from holdfast.errors import RunClosed
from holdfast.integrations.langgraph import current_run, graph_agent
from holdfast.protocol.events import ReasoningDelta, TextDelta, ToolFinished, ToolOutput, ToolStarted
from holdfast.protocol.messages import Usage
from tests.integrations.langgraph import graphs
from tests.integrations.langgraph.graphs import asked, hosted, log, run, said


@pytest.mark.parametrize("request_", ["a story", "a joke", "anything"])
def test_a_router_answers_as_it_does_by_itself(request_: str) -> None:
    async def test() -> None:
        alone = await graphs.router().compile().ainvoke({"request": request_})
        async with hosted(graph_agent(graphs.router(), name="router", input="request", answer="output")) as host:
            assert await host.session("s").ask(request_) == alone["output"]

    run(test())


def test_a_map_reduce_joins_what_every_send_gave() -> None:
    async def test() -> None:
        alone = await graphs.map_reduce().compile().ainvoke({"topic": "cats"})
        async with hosted(graph_agent(graphs.map_reduce(), name="jokes", input="topic", answer="best")) as host:
            session = host.session("s")
            assert await session.ask("cats") == alone["best"] == "why cats 4? (5)"
            names = [event.name for event in await log(session) if isinstance(event, ToolStarted)]
            assert names == ["jokes", "subjects", *["joke"] * 5, "pick"]

    run(test())


@pytest.mark.parametrize(("verdict", "outcome"), [("yes", "published: better"), ("no", "dropped")])
def test_a_person_edits_and_decides(verdict: str, outcome: str) -> None:
    async def test() -> None:
        async with hosted(graph_agent(graphs.review(), name="review", input="text", answer="outcome")) as host:
            session = host.session("s")
            receipt = await session.send("draft")
            (first,) = await asked(session)
            assert first.text == "Edit this: draft"
            await session.answer(first.question_id, "better")
            (second,) = await asked(session)
            assert second.text == '{"question":"Publish it?","text":"better"}'
            await session.answer(second.question_id, verdict)
            assert (await session.wait(receipt.message_id)).text == outcome

    run(test())


def test_a_subgraph_asks_from_the_inside_and_goes_on_there() -> None:
    async def test() -> None:
        agent = graph_agent(graphs.subgraphs(), name="outer", input="foo", answer="foo")
        async with hosted(agent) as host:
            session = host.session("s")
            receipt = await session.send("Ann")
            (question,) = await asked(session)
            assert question.text == "inside?"
            await session.answer(question.question_id, "yes")
            assert (await session.wait(receipt.message_id)).text == "hi Ann bar yes"

    run(test())


def test_a_models_words_and_calls_are_those_of_the_run() -> None:
    async def test() -> None:
        async with hosted(graph_agent(graphs.calling(), name="model")) as host:
            session = host.session("s")
            assert await session.ask("6 times 7?") == "Let me see.\n\nIt is 42."
            assert await said(session) == [
                ("user", "6 times 7?"),
                ("assistant", "Let me see."),
                ("tool_call", '{"a":6,"b":7}'),
                ("tool_result", "42"),
                ("assistant", "It is 42."),
            ]
            pieces = [event.text for event in await log(session) if isinstance(event, TextDelta)]
            assert pieces == ["Let", " ", "me", " ", "see.", "\n\nIt", " ", "is", " ", "42."]
            assert await session.ask("thank you") == "You are welcome."

    run(test())


def test_an_entrypoint_runs_its_tasks_asks_and_knows_what_it_saved() -> None:
    async def test() -> None:
        async with hosted(graph_agent(graphs.essay(), name="essay")) as host:
            session = host.session("s")
            for topic, before in (("cats", ""), ("dogs", " (before: cats)")):
                receipt = await session.send(topic)
                (question,) = await asked(session)
                assert question.text == f"Good? An essay about {topic}"
                await session.answer(question.question_id, "fine")
                assert (await session.wait(receipt.message_id)).text == f"An essay about {topic}: fine{before}"

    run(test())


def test_a_graph_remembers_all_its_channels_from_run_to_run() -> None:
    async def test() -> None:
        compiled = graphs.counting().compile(checkpointer=InMemorySaver())
        async with hosted(graph_agent(compiled, name="counting")) as host:
            answers = [await host.session("s").ask("hi") for _ in range(3)]
            assert answers == ["1 of 1", "2 of 3", "3 of 5"]
            assert await host.session("other").ask("hi") == "1 of 1"

    run(test())


def test_a_node_finds_its_run_and_its_session() -> None:
    found: list[Any] = []

    def plain_node(state: MessagesState) -> dict[str, Any]:
        config = get_config()["configurable"]
        current_run().emit("from a thread. ")
        found.append((config["thread_id"], config["principal"], config["run_id"], config["run"] is current_run()))
        return {}

    async def node(state: MessagesState) -> dict[str, Any]:
        get_stream_writer()({"progress": 1})
        get_stream_writer()("half")
        found.append(await current_run().call(len, "four"))
        return {"messages": [AIMessage(f"run {current_run().run_id == found[0][2]}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("plain", plain_node)
    builder.add_node("node", node)
    builder.add_edge(START, "plain")
    builder.add_edge("plain", "node")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g")) as host:
            session = host.session("s", principal="ann")
            assert await session.ask("hi") == "from a thread. \n\nrun True"
            run_id = (await session.runs())[0].run_id
            assert found == [("s", "ann", run_id, True), 4]
            events = await log(session)
            assert [event.text for event in events if isinstance(event, ToolOutput)] == ['{"progress":1}', "half"]
            assert [entry.role for entry in await session.transcript()] == ["user", "assistant"]
        with pytest.raises(RunClosed):
            current_run()

    run(test())


def test_reasoning_and_usage_are_told_and_one_message_is_said_after_the_other() -> None:
    thinking = AIMessage(
        [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "thought"}],
        usage_metadata={"input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
    )

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [thinking]}

    async def talk(state: MessagesState) -> dict[str, Any]:
        model = graphs.scripted("one two three")
        async for _ in model.astream("x"):
            await asyncio.sleep(0)
        return {}

    builder = StateGraph(MessagesState)
    builder.add_node("think", think)
    builder.add_node("talk", talk)
    builder.add_node("more", talk)
    builder.add_edge(START, "talk")
    builder.add_edge(START, "more")
    builder.add_edge("talk", "think")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g", speakers=["talk", "think"])) as host:
            session = host.session("s")
            await session.ask("hi")
            assert (await session.runs())[0].usage == Usage(input_tokens=3, output_tokens=4)
            assert [e.text for e in await log(session) if isinstance(e, ReasoningDelta)] == ["hm"]
        async with hosted(graph_agent(builder, name="g")) as host:
            assert await host.session("s").ask("hi") == "one two three\n\none two three\n\nthought"

    run(test())


def test_a_graph_is_a_child_of_another_agent_and_keeps_nothing() -> None:
    counting = graph_agent(graphs.counting(), name="counting")

    async def both(run: Run) -> str:
        return f"{await run.delegate(counting, 'a')}, {await run.delegate(counting, 'b')}"

    async def test() -> None:
        async with hosted(counting) as host:
            assert await host.session("s").ask("hi") == "1 of 1"
        from holdfast.agents import agent

        async with hosted(agent(both)) as host:
            assert await host.session("s").ask("hi") == "1 of 1, 1 of 1"

    run(test())


def test_a_node_that_goes_on_by_command_and_one_that_fails_are_told() -> None:
    def first(state: MessagesState) -> Command[Any]:
        return Command(goto="last", update={"messages": [AIMessage("on to the last")]})

    def last(state: MessagesState) -> dict[str, Any]:
        raise ValueError("no luck")

    builder = StateGraph(MessagesState)
    builder.add_node("first", first)
    builder.add_node("last", last)
    builder.add_edge(START, "first")

    async def test() -> None:
        async with hosted(graph_agent(builder, name="g")) as host:
            session = host.session("s")
            receipt = await session.send("hi")
            settled = await session.wait(receipt.message_id)
            assert (settled.state, settled.error) == ("failed", "ValueError: no luck")
            ended = [event for event in await log(session) if isinstance(event, ToolFinished)]
            assert [(event.status, event.error) for event in ended] == [
                ("ok", None),
                ("error", "ValueError: no luck"),
                ("error", "ValueError: no luck"),
            ]

    run(test())
