"""What is wrong with a graph, its input, its answer or its state is said clearly, and disturbs nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, TypedDict

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

from holdfast.errors import ConfigurationError, RunFailed
from holdfast.integrations.langgraph import graph_agent
from tests.integrations.langgraph import graphs
from tests.integrations.langgraph.graphs import asked, hosted, run


class Text(TypedDict):
    text: str


def graph_of(node: Any, state: Any = Text) -> StateGraph[Any, Any, Any, Any]:
    builder = StateGraph(state)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder


async def failure(agent: Any, text: str = "hi") -> str:
    """What a message to this agent fails with; the next session is served as ever."""
    other = graph_agent(graphs.counting(), name="other")
    async with hosted(agent, other) as host:
        with pytest.raises(RunFailed) as caught:
            await host.session("s", agent=agent.name).ask(text)
        assert await host.session("t", agent="other").ask("hi") == "1 of 1"
    return caught.value.message


@pytest.mark.parametrize("thing", [None, 7, "graph", lambda state: state, MessagesState])
def test_what_is_no_graph_is_refused(thing: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a graph") as caught:
        graph_agent(thing)
    assert "StateGraph" in caught.value.hint


def test_a_graph_without_an_entry_is_refused() -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("node", lambda state: state)
    with pytest.raises(ConfigurationError, match="does not compile"):
        graph_agent(builder)


def test_a_graph_without_messages_has_to_say_what_its_input_is() -> None:
    with pytest.raises(ConfigurationError, match="no messages") as caught:
        graph_agent(graphs.router())
    assert "input=" in caught.value.hint


def test_a_checkpointer_of_its_own_is_refused() -> None:
    class Elsewhere(BaseCheckpointSaver[str]):
        pass

    with pytest.raises(ConfigurationError, match="two places") as caught:
        graph_agent(graphs.counting().compile(checkpointer=Elsewhere()))
    assert "without a checkpointer" in caught.value.hint


@pytest.mark.parametrize("limit", [0, -1, "many"])
def test_a_recursion_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="recursion_limit"):
        graph_agent(graphs.counting(), config={"recursion_limit": limit})


def test_a_graph_without_an_end_fails_at_its_limit_and_says_what_to_do() -> None:
    builder = graph_of(lambda state: {"text": state["text"] + "."})
    builder.add_edge("node", "node")

    async def test() -> None:
        agent = graph_agent(builder, name="endless", input="text", config={"recursion_limit": 20})
        error = await failure(agent)
        assert "'endless' did not end: Recursion limit of 20 reached" in error
        assert "END" in error

    run(test())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda run: None, "got no input"),
        (lambda run: {"unknown": 1}, "has no field 'unknown'"),
        (lambda run: "text", "rejected its input: Expected dict, got text"),
        (lambda run: {"text": 1}, "AttributeError"),
    ],
)
def test_input_that_does_not_fit_fails_the_run_and_says_so(given: Any, said: str) -> None:
    def node(state: Text) -> Text:
        return {"text": state["text"].upper()}

    async def test() -> None:
        assert said in await failure(graph_agent(graph_of(node), name="g", input=given))

    run(test())


def test_a_node_that_exits_ends_its_run_and_not_the_host() -> None:
    def node(state: Any) -> Any:
        sys.exit(3)

    async def main() -> None:
        assert "called sys.exit(3)" in await failure(graph_agent(graph_of(node), input="text"))

    run(main())


def test_an_update_that_does_not_fit_fails_the_run_and_says_so() -> None:
    async def test() -> None:
        error = await failure(graph_agent(graph_of(lambda state: "text"), name="g", input="text"))
        assert "rejected its input" in error

    run(test())


@pytest.mark.parametrize("field", ["input", "answer"])
def test_a_field_that_is_not_there_is_refused(field: str) -> None:
    names: Any = {"input": "text", "answer": "text", field: "txet"}
    with pytest.raises(ConfigurationError, match="no field 'txet'") as caught:
        graph_agent(graph_of(lambda state: {}), **names)
    assert "its fields are text" in caught.value.hint


@pytest.mark.parametrize("answer", [lambda output: output["missing"], lambda output: 7])
def test_an_answer_that_cannot_be_made_fails_the_run_and_says_so(answer: Any) -> None:
    async def test() -> None:
        error = await failure(graph_agent(graph_of(lambda state: {}), name="g", input="text", answer=answer))
        assert "answer" in error

    run(test())


def test_state_that_cannot_be_saved_fails_the_run_and_says_so() -> None:
    class Thing(TypedDict):
        text: str
        thing: Any

    async def test() -> None:
        agent = graph_agent(graph_of(lambda state: {"thing": lambda: 1}, Thing), name="g", input="text", answer="text")
        assert "does not serialize" in await failure(agent)

    run(test())


def test_too_much_state_fails_the_run_and_says_so() -> None:
    async def test() -> None:
        big = "".join(map(chr, range(32, 2000)))
        agent = graph_agent(
            graph_of(lambda state: {"text": big}), name="g", input="text", answer="text", state_limit_bytes=1000
        )
        assert "the limit is 1,000" in await failure(agent)

    run(test())


def test_a_question_function_that_gives_none_fails_the_run() -> None:
    async def test() -> None:
        agent = graph_agent(graph_of(lambda state: {"text": interrupt("?")}), name="g", input="text", ask=lambda v: 7)  # type: ignore[arg-type,return-value]
        assert "ask()" in await failure(agent)

    run(test())


def test_a_run_that_waits_for_a_graph_of_another_form_fails_and_says_so() -> None:
    def agent() -> Any:
        return graph_agent(graph_of(lambda state: {"text": interrupt("?")}), name="g", input="text", answer="text")

    async def test() -> None:
        from holdfast.integrations.langgraph import state as langgraph_state

        async with hosted(agent()) as host:
            session = host.session("s")
            receipt = await session.send("hi")
            (question,) = await asked(session)
            form, langgraph_state.FORM = langgraph_state.FORM, "langgraph 0"
            try:
                await session.answer(question.question_id, "yes")
                settled = await session.wait(receipt.message_id)
            finally:
                langgraph_state.FORM = form
            assert settled.state == "failed"
            assert settled.error is not None
            assert "is unreadable" in settled.error

    run(test())


def test_without_langgraph_the_extra_is_named() -> None:
    program = """
import sys
sys.modules["langgraph"] = None
from holdfast.integrations.langgraph import graph_agent
try:
    graph_agent(object())
except Exception as error:
    print(type(error).__name__, error.code, error.hint)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "MissingExtra missing_extra install them: pip install 'holdfast-agents[langgraph]'"


def test_naming_the_adapter_imports_nothing_heavy() -> None:
    program = "import sys, holdfast.integrations.langgraph; print({'langgraph', 'langchain_core'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"
