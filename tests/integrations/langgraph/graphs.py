"""Graphs as LangGraph's own documentation teaches to write them, and what hosts them in tests."""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import re
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt

from holdfast import Host
from holdfast.agents import Agent
from holdfast.host.session import Session
from holdfast.protocol.events import Event, decode_event
from holdfast.protocol.messages import Question
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.storage.port import Store

QUICK = Settings(grace_s=0.5, abandon_after_s=0.5)
PATIENT = Settings(grace_s=10, abandon_after_s=10)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test on a loop of its own, for a minute at most."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def hosted(*agents: Agent, store: Store | str | None = None, settings: Settings = QUICK) -> AsyncIterator[Host]:
    """A host with these agents."""
    async with Host(agents=agents, store=store or MemoryStore(), settings=settings) as host:
        yield host


async def asked(session: Session, count: int = 1) -> list[Question]:
    """The session's open questions, once there are so many."""
    while True:
        questions = await session.questions()
        if len(questions) >= count:
            return questions
        await asyncio.sleep(0.005)


async def log(session: Session) -> list[Event]:
    """The session's whole log."""
    store = session._context.store
    found = await store.find_session(session.principal, session.key)
    assert found is not None
    return [decode_event(row) for row in await store.read_events(found[0], after=0, limit=100_000)]


async def said(session: Session) -> list[tuple[str, str]]:
    """The transcript: who, and what."""
    return [(entry.role, entry.content) for entry in await session.transcript()]


class ScriptedChat(BaseChatModel):
    """Streams one answer after the other, word by word and its calls in two pieces."""

    answers: Any

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **settings: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=next(self.answers))])

    async def _astream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **settings: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        for piece in self._pieces():
            await asyncio.sleep(0)
            if run_manager:
                await run_manager.on_llm_new_token(str(piece.message.content), chunk=piece)
            yield piece

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **settings: Any
    ) -> Iterator[ChatGenerationChunk]:
        for piece in self._pieces():
            if run_manager:
                run_manager.on_llm_new_token(str(piece.message.content), chunk=piece)
            yield piece

    def _pieces(self) -> list[ChatGenerationChunk]:
        answer = next(self.answers)
        pieces = [AIMessageChunk(content=word, id=answer.id) for word in re.split(r"(\s)", answer.text) if word]
        for index, call in enumerate(answer.tool_calls):
            whole = json.dumps(call["args"])
            for name, part in ((call["name"], whole[:4]), (None, whole[4:])):
                chunk = tool_call_chunk(name=name, args=part, id=call["id"] if name else None, index=index)
                pieces.append(AIMessageChunk(content="", id=answer.id, tool_call_chunks=[chunk]))
        return [ChatGenerationChunk(message=piece) for piece in pieces]


def scripted(*answers: AIMessage | str) -> ScriptedChat:
    """A model that streams these answers, one for each request."""
    numbers = itertools.count()
    made = [answer if isinstance(answer, AIMessage) else AIMessage(answer) for answer in answers]
    return ScriptedChat(answers=(m.model_copy(update={"id": f"{id(made)}-{next(numbers)}"}) for m in made))


# ── a conversation that remembers ────────────────────────────────────────────────────────────────────────────────────


class Counted(MessagesState):
    count: int


def counting() -> StateGraph[Any, Any, Any, Any]:
    """Says how many messages it has, and how often it was asked: what its two channels hold."""

    async def answer(state: Counted) -> dict[str, Any]:
        count = state.get("count", 0) + 1
        return {"messages": [AIMessage(f"{count} of {len(state['messages'])}")], "count": count}

    builder = StateGraph(Counted)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder


# ── router ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Routed(TypedDict):
    request: str
    kind: str
    output: str


def router() -> StateGraph[Any, Any, Any, Any]:
    """One node decides which of three others does the work."""

    def decide(state: Routed) -> dict[str, str]:
        return {"kind": next((kind for kind in ("story", "joke") if kind in state["request"]), "poem")}

    def write(kind: str) -> Any:
        def node(state: Routed) -> dict[str, str]:
            return {"output": f"a {kind} for: {state['request']}"}

        return node

    def route(state: Routed) -> Literal["story", "joke", "poem"]:
        return state["kind"]  # type: ignore[return-value]

    builder = StateGraph(Routed)
    builder.add_node("decide", decide)
    for kind in ("story", "joke", "poem"):
        builder.add_node(kind, write(kind))
        builder.add_edge(kind, END)
    builder.add_edge(START, "decide")
    builder.add_conditional_edges("decide", route)
    return builder


# ── map-reduce ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Topic(TypedDict):
    topic: str
    subjects: list[str]
    jokes: Annotated[list[str], operator.add]
    best: str


class Subject(TypedDict):
    subject: str


def map_reduce() -> StateGraph[Any, Any, Any, Any]:
    """Makes a list, sends each item to a node of its own, and picks one of what comes back."""

    def subjects(state: Topic) -> dict[str, list[str]]:
        return {"subjects": [f"{state['topic']} {n}" for n in range(5)]}

    def fan_out(state: Topic) -> list[Send]:
        return [Send("joke", {"subject": subject}) for subject in state["subjects"]]

    async def joke(state: Subject) -> dict[str, list[str]]:
        return {"jokes": [f"why {state['subject']}?"]}

    def pick(state: Topic) -> dict[str, str]:
        return {"best": f"{max(state['jokes'])} ({len(state['jokes'])})"}

    builder = StateGraph(Topic)
    builder.add_node("subjects", subjects)
    builder.add_node("joke", joke)
    builder.add_node("pick", pick)
    builder.add_edge(START, "subjects")
    builder.add_conditional_edges("subjects", fan_out, ["joke"])
    builder.add_edge("joke", "pick")
    builder.add_edge("pick", END)
    return builder


# ── human in the loop ────────────────────────────────────────────────────────────────────────────────────────────────


class Draft(TypedDict):
    text: str
    approved: bool
    outcome: str


def review() -> StateGraph[Any, Any, Any, Any]:
    """A person edits a draft, and where it goes on depends on what a person says next."""

    def edit(state: Draft) -> dict[str, str]:
        return {"text": interrupt(f"Edit this: {state['text']}")}

    def decide(state: Draft) -> Command[Literal["publish", "drop"]]:
        answer = interrupt({"question": "Publish it?", "text": state["text"]})
        return Command(goto="publish" if answer == "yes" else "drop", update={"approved": answer == "yes"})

    def publish(state: Draft) -> dict[str, str]:
        return {"outcome": f"published: {state['text']}"}

    def drop(state: Draft) -> dict[str, str]:
        return {"outcome": "dropped"}

    builder = StateGraph(Draft)
    for name, node in (("edit", edit), ("decide", decide), ("publish", publish), ("drop", drop)):
        builder.add_node(name, node)
    builder.add_edge(START, "edit")
    builder.add_edge("edit", "decide")
    return builder


# ── subgraphs ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Inner(TypedDict):
    foo: str
    bar: str


class Outer(TypedDict):
    foo: str


def subgraphs() -> StateGraph[Any, Any, Any, Any]:
    """A graph that shares a key with the one it is a node of, and that asks a person inside."""

    def first(state: Inner) -> dict[str, str]:
        return {"bar": "bar"}

    def second(state: Inner) -> dict[str, str]:
        return {"foo": f"{state['foo']} {state['bar']} {interrupt('inside?')}"}

    inner = StateGraph(Inner)
    inner.add_node("first", first)
    inner.add_node("second", second)
    inner.add_edge(START, "first")
    inner.add_edge("first", "second")

    def greet(state: Outer) -> dict[str, str]:
        return {"foo": f"hi {state['foo']}"}

    outer = StateGraph(Outer)
    outer.add_node("greet", greet)
    outer.add_node("inner", inner.compile())
    outer.add_edge(START, "greet")
    outer.add_edge("greet", "inner")
    return outer


# ── a model with tools ───────────────────────────────────────────────────────────────────────────────────────────────


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def calling() -> StateGraph[Any, Any, Any, Any]:
    """The loop of a model and its tools."""
    call = {"name": "multiply", "args": {"a": 6, "b": 7}, "id": "call_1", "type": "tool_call"}
    chat = scripted(AIMessage("Let me see.", tool_calls=[call]), "It is 42.", "You are welcome.")

    async def model(state: MessagesState) -> dict[str, list[BaseMessage]]:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", model)
    builder.add_node("tools", ToolNode([multiply]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    return builder


# ── the functional API ───────────────────────────────────────────────────────────────────────────────────────────────


def essay() -> Any:
    """A workflow with tasks, a person's review, and what it gave before."""

    @task
    def write(topic: str) -> str:
        return f"an essay about {topic}"

    @task
    async def polish(text: str) -> str:
        return text.capitalize()

    @entrypoint(checkpointer=InMemorySaver())
    async def workflow(topic: str, *, previous: str | None = None) -> entrypoint.final[str, str]:
        text = await polish(await write(topic))
        verdict = interrupt(f"Good? {text}")
        whole = f"{text}: {verdict}" + (f" (before: {previous})" if previous else "")
        return entrypoint.final(value=whole, save=topic)

    return workflow
