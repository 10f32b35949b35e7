"""A graph's state is read once: the newest one, by the run that needs it; no reader of the log gets it."""

from __future__ import annotations

import itertools
import operator
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph

from holdfast.agents import Agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.host import LogReader
from holdfast.host.session import Session
from holdfast.integrations.langgraph import graph_agent
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.events import Event, StepFinished, Stored, decode_event, encode_event
from holdfast.storage import MemoryStore
from holdfast.storage.port import Send
from holdfast.storage.sqlite.database import SqliteDatabase
from tests.integrations.langgraph import graphs
from tests.integrations.langgraph.graphs import hosted, run

VERSION_3 = Path(__file__).parents[2] / "storage" / "fixtures" / "version_3.sql"
KB = 1000


class Noted(TypedDict):
    text: str
    notes: Annotated[list[str], operator.add]


def noting(name: str = "noting") -> Agent:
    """Keeps a kilobyte more with each run, none of which it says; answers with how many it has."""

    def node(state: Noted) -> dict[str, Any]:
        return {"notes": [secrets.token_hex(KB)]}

    builder = StateGraph(Noted)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return graph_agent(builder, name=name, input="text", answer=lambda output: f"{len(output['notes'])} notes")


def counting() -> Agent:
    return graph_agent(graphs.counting(), name="counting", idempotent=True)


class Reading(MemoryStore):
    """Notes the states that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[str] = []

    async def kept(self, session: int, n: int) -> str:
        self.states.append(await super().kept(session, n))
        return self.states[-1]

    def read(self) -> list[str]:
        """What was read since it was last asked."""
        states, self.states = self.states, []
        return states


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes each statement on SQLite gave out, and how many rows ``kept`` did."""
    read: Counter[str] = Counter()
    query = SqliteDatabase.query

    def counted(database: SqliteDatabase, name: str, *parameters: object) -> list[tuple[Any, ...]]:
        rows = query(database, name, *parameters)
        read[name] += sum(len(value) for row in rows for value in row if isinstance(value, (str, bytes)))
        read["states"] += len(rows) if name == "kept" else 0
        return rows

    monkeypatch.setattr(SqliteDatabase, "query", counted)
    return read


def test_a_run_reads_one_state_however_many_there_are(tmp_path: Path, bytes_read: Counter[str]) -> None:
    async def test() -> None:
        rest: list[int] = []
        async with hosted(noting(), store=f"sqlite:///{tmp_path / 'h.db'}") as host:
            session = host.session("s")
            assert await session.ask("0") == "1 notes"
            for n in range(1, 25):
                state = await host.store.kept(1, (await host.store.transcript(1))[-1].n)
                bytes_read.clear()
                assert await session.ask(str(n)) == f"{n + 1} notes"
                assert (bytes_read["states"], bytes_read["kept"]) == (1, len(state))
                rest.append(bytes_read.total() - bytes_read["kept"] - 1)
            assert len(state) > KB
        growth = [after - before for before, after in itertools.pairwise(rest)]
        assert max(growth) < KB, "besides, a run reads what was said, without the states"

    run(test())


def test_each_graph_of_a_session_reads_its_own_state_only() -> None:
    async def test() -> None:
        store = Reading()
        async with hosted(noting("a"), noting("b"), Agent(name="m", model=ScriptedModel("hm")), store=store) as host:
            session = host.session("s")
            for n in range(1, 4):
                for name in ("a", "b", "b", "m"):
                    answer = await session.ask(f"{name}{n}", agent=name)
                    assert [state.partition("\n")[0] for state in store.read()] == (
                        [] if name == "m" or answer == "1 notes" else [f"langgraph 1 {name}"]
                    )
            assert answer == "hm"
            assert await session.ask("a4", agent="a") == "4 notes"
            assert await session.ask("b7", agent="b") == "7 notes"

    run(test())


def test_summing_up_moves_no_state_and_loses_none() -> None:
    async def test() -> None:
        store = Reading()
        brief = Agent(name="brief", model=ScriptedModel("in short"), limits=AgentLimits(context_tokens=40))
        async with hosted(counting(), brief, store=store) as host:
            session = host.session("s")
            assert [await session.ask(text * 20) for text in "abc"] == ["1 of 1", "2 of 3", "3 of 5"]
            store.read()
            await session.ask("d", agent="brief")
            assert next(entry.role for entry in await session.transcript()) == "summary"
            await session.compact(keep=0)
            assert store.read() == []
            assert (await session.ask("e", agent="counting")).startswith("4 of ")
            assert len(store.read()) == 1
            await session.undo()
            await session.undo()  # the compaction
            await session.undo()  # the run that summed up
            assert (await session.ask("f")) == "4 of 7"

    run(test())


def test_a_branch_of_a_branch_has_the_state_of_its_place() -> None:
    async def test() -> None:
        async with hosted(counting()) as host:
            session = host.session("s")
            for text in "abc":
                await session.ask(text)
            await session.fork("whole")
            await host.session("whole").fork("cut", through_n=4)
            assert await host.session("cut").ask("d") == "3 of 5"
            assert await host.session("whole").ask("d") == "4 of 7"

    run(test())


@asynccontextmanager
async def opened(session: Session) -> AsyncIterator[LogReader]:
    log = await session.open_log(keepalive_s=5)
    assert isinstance(log, LogReader)
    try:
        yield log
    finally:
        await log.aclose()


async def taken(log: LogReader, upto: int) -> list[Stored]:
    """What a reader gets, up to that event."""
    events: list[Stored] = []
    async for batch in log:
        assert isinstance(batch, Sequence)
        events += batch
        if log.cursor >= upto:
            break
    return events


def test_no_reader_of_the_log_gets_the_state_and_recovery_does() -> None:
    async def test() -> None:
        async with hosted(noting()) as host:
            session = host.session("s")
            await session.ask("first")
            async with opened(session) as live:
                await taken(live, (await session.info()).seq)
                sent = await session.send("second")
                await session.wait(sent.message_id)
                seq = (await session.info()).seq
                shown = await taken(live, seq)
            async with opened(session) as late:
                stored = await taken(late, seq)
            assert stored[-len(shown) :] == shown, "the same, live and from the store"
            assert [event.seq for event in stored] == list(range(1, seq + 1))
            steps = [event for event in stored if event.kind == "step.finished"]
            assert len(steps) == 2
            assert all(len(step.body) < KB and b'"state"' not in step.body for step in steps)
            async for event in session.events(follow=sent.message_id):
                assert not isinstance(event, StepFinished) or event.state is None
            assert sent.run_id is not None
            (step,) = [
                event
                for event in map(decode_event, await host.store.run_events(1, sent.run_id))
                if isinstance(event, StepFinished)
            ]
            assert step.state["graph"] == await host.store.kept(1, (await host.store.transcript(1))[-1].n)

    run(test())


def test_after_a_crash_at_any_event_the_next_run_has_the_state_that_the_transcript_says() -> None:
    async def past() -> MemoryStore:
        store = MemoryStore()
        async with hosted(counting(), store=store) as host:
            assert await host.session("s").ask("a") == "1 of 1"
        return store

    async def crashed(run_id: str, events: Sequence[Event]) -> MemoryStore:
        """A store whose host ended in the middle of the second run, which had written these events."""
        store, at = await past(), time.time()
        await store.open(node_id="n_gone", at=at)
        second = Send(
            principal="local", key="s", agent=None, default_agent="counting", message_id="m_second", content="b",
            policy="queue", at=at, run_id=run_id,
        )  # fmt: skip
        sent = await store.send(second)
        assert sent.claim is not None
        await store.append(sent.claim.lease, [encode_event(event) for event in events])
        await store.close()
        return store

    async def test() -> None:
        async with hosted(counting(), store=await past()) as host:
            session = host.session("s")
            sent = await session.send("b")
            await session.wait(sent.message_id)
            assert sent.run_id is not None
            log = [decode_event(event) for event in await host.store.run_events(1, sent.run_id)]
        events = [event for event in log if not event.kind.startswith(("message.", "run."))]
        assert any(isinstance(event, StepFinished) and event.state["ended"] for event in events)
        for cut in range(len(events) + 1):
            async with hosted(counting(), store=await crashed(sent.run_id, events[:cut])) as host:
                session = host.session("s")
                assert (await session.wait("m_second")).text == "2 of 3", f"behind event {cut}"
                assert await session.ask("c") == "3 of 5", f"behind event {cut}"
                await session.undo()
                await session.undo()
                assert await session.ask("b") == "2 of 3", f"behind event {cut}"

    run(test())


def test_a_file_that_kept_states_in_the_transcript_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(VERSION_3.read_text("utf-8"))

    async def test() -> None:
        for attempt in range(2):
            async with hosted(counting(), store=f"sqlite:///{path}") as host:
                session = host.session("plain")
                assert await session.ask("d") == f"{attempt + 3} of {2 * attempt + 5}"
        async with hosted(counting(), store=f"sqlite:///{path}") as host:
            session = host.session("plain")
            for _ in range(3):
                await session.undo()
            assert await session.ask("b") == "2 of 3"
            for key in ("summed up", "branch"):
                assert await host.session(key).ask("e", agent="counting") == "4 of 5", "a, b are in the summary"
            session = host.session("summed up")
            await session.fork("before", through_n=10)
            assert await host.session("before").ask("e", agent="counting") == "3 of 2", "what the summary kept"

    run(test())
