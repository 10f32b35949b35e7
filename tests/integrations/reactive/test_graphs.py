"""A bridge whose items are runs of a LangGraph graph, with nodes that wait, sit in threads and hold programs."""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any, TypedDict

import pytest
import reactivex
from langgraph.graph import END, START, StateGraph
from reactivex import Subject

from holdfast import Host, Run
from holdfast.integrations.langgraph import graph_agent
from holdfast.integrations.reactive import Outcome, ReactiveBridge
from holdfast.runtime.processes import procfs
from tests.agents.test_run import talk
from tests.integrations.reactive.watching import Watcher, gone, soon


class Word(TypedDict):
    text: str


class Nodes:
    """The nodes of the graph, and what they have at work."""

    def __init__(self) -> None:
        self.waiting = 0
        self.programs: list[subprocess.Popen[bytes]] = []

    def of(self, state: Word) -> str:
        return state["text"] if state["text"] in ("wait", "program") else "shout"

    async def wait(self, state: Word) -> Word:
        self.waiting += 1
        try:
            await asyncio.sleep(1000)
        finally:
            self.waiting -= 1
        return state

    def program(self, state: Word) -> Word:
        child = subprocess.Popen(["sleep", "1000"])
        self.programs.append(child)
        child.wait()
        return state

    def shout(self, state: Word) -> Word:
        if state["text"] == "bad":
            raise ValueError("no such word")
        return {"text": state["text"].upper()}

    def agent(self) -> Any:
        graph = StateGraph(Word)
        names = ("wait", "program", "shout")
        for name in names:
            graph.add_node(name, getattr(self, name))
            graph.add_edge(name, END)
        graph.add_conditional_edges(START, self.of, list(names))
        return graph_agent(graph, name="words", input="text", answer="text")

    def at_work(self) -> bool:
        return self.waiting == 1 and len(self.programs) == 1

    def nothing_left(self) -> bool:
        stats = [procfs.read_stat(program.pid) for program in self.programs]
        return self.waiting == 0 and all(stat is None or stat.dead for stat in stats)


def test_graphs_answer_in_order_and_one_that_fails_disturbs_no_other() -> None:
    words = Nodes().agent()

    async def parent(run: Run) -> str:
        async with ReactiveBridge(run, concurrency=2, ordered=True) as bridge:
            items = reactivex.of("a", "bad", "b")
            outcomes: list[Outcome] = await bridge.collect(items.pipe(bridge.each(words, outcomes=True)))
        return " ".join(one.value if one.settled == "done" else one.settled for one in outcomes)

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("go") == "A failed B"

    talk(parent, scenario=scenario)


@pytest.mark.parametrize("end", ["dispose", "interrupt", "aclose"])
def test_graphs_at_work_are_gone_when_their_stream_ends(end: str) -> None:
    """However it ends, their threads and programs go with it, and the session's next run works."""
    nodes = Nodes()
    words = nodes.agent()
    watcher = Watcher()
    bridges: list[ReactiveBridge] = []
    begun: asyncio.Future[None]

    async def parent(run: Run) -> str:
        if run.text == "again":
            return "works"
        async with ReactiveBridge(run, concurrency=3) as bridge:
            bridges.append(bridge)
            source: Subject[str] = Subject()
            subscription = source.pipe(bridge.each(words)).subscribe(watcher)
            for word in ("a", "wait", "program"):
                source.on_next(word)
            await soon(lambda: watcher.values == ["A"] and nodes.at_work())
            if end == "interrupt":
                begun.set_result(None)
                await asyncio.sleep(1000)
            elif end == "aclose":
                assert (await bridge.aclose("enough")).outcome == "gone"
            else:
                watcher.disposed = True
                subscription.dispose()
                await soon(lambda: bridge.streams == 0)
        return "left"

    async def scenario(host: Host) -> None:
        nonlocal begun
        begun = asyncio.get_running_loop().create_future()
        session = host.session("s")
        receipt = await session.send("go")
        if end == "interrupt":
            await begun
            assert (await session.interrupt("enough")).outcome == "gone"
        else:
            assert (await session.wait(receipt.message_id)).text == "left"
        assert nodes.nothing_left()
        gone(bridges[0])
        assert watcher.values == ["A"]
        assert watcher.breaches == []
        assert (await session.tree()).children == ()
        assert await session.ask("again") == "works"

    talk(parent, scenario=scenario)
