"""The lifespans of toolsets: entered before any run, left after the last, each in one task, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host
from holdfast.agents.agent import Agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.agents.tool import Tool, Toolset, ToolsetContext
from holdfast.errors import ConfigurationError
from holdfast.runtime import current_interrupt, current_scope
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, explore, run_virtual


class Watched(Toolset):
    """Notes when it is entered and left, and by whom."""

    def __init__(self, name: str, notes: list[str], *, fails: str = "", slow_s: float = 0.0) -> None:
        self.name = name
        self.notes = notes
        self.fails = fails
        self.slow_s = slow_s
        self.home: ToolsetContext | None = None
        self.cleaned = False

    def tools(self) -> Sequence[Tool]:
        """None."""
        return ()

    @contextlib.asynccontextmanager
    async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
        """Holds a task group, which must be left where it was entered."""
        self.home = home
        try:
            async with asyncio.TaskGroup() as group:
                endless = group.create_task(asyncio.sleep(1e9))
                await asyncio.sleep(self.slow_s if self.fails != "leave" else 0)
                if self.fails == "enter":
                    raise ValueError("no")
                self.notes.append(f"enter {self.name}")
                yield
                self.notes.append(f"leave {self.name}")
                endless.cancel()
                if self.fails == "leave":
                    await asyncio.sleep(self.slow_s)
                    raise ValueError("no")
        finally:
            self.cleaned = True


def with_tools(*found: Toolset, name: str = "agent") -> Agent:
    """An agent with these toolsets."""
    return Agent(name=name, model=ScriptedModel("hello"), tools=found)


def hosted(*agents: Agent, store: Any = None) -> Host:
    """A host with these agents."""
    return Host(agents=agents, store=store or MemoryStore(yielding=True), clock=VirtualClock())


def test_toolsets_are_entered_once_in_order_and_left_in_reverse_after_the_drain() -> None:
    async def scenario() -> None:
        notes: list[str] = []
        a, b = Watched("a", notes), Watched("b", notes)
        nested = with_tools(b, name="nested")
        async with hosted(Agent(name="top", model=ScriptedModel("x"), tools=(a, nested)), with_tools(a)) as host:
            assert notes == ["enter a", "enter b"]
            assert a.home is not None
            assert a.home.data_dir is None
            await a.home.tell("alice", "s", "something happened")
            session = host.session("s", principal="alice")
            while (await session.info()).state != "idle":
                await asyncio.sleep(0.01)
            assert [e.content for e in await session.transcript()] == ["something happened", "x"]
        assert notes == ["enter a", "enter b", "leave b", "leave a"]
        assert a.cleaned
        assert b.cleaned
        assert not host.incidents.newest

    explore(scenario, schedules=30, seed=1)


@pytest.mark.parametrize("slow_s", [0.0, 1e6])
def test_a_toolset_that_does_not_start_fails_the_start_by_name_and_leaves_nothing_open(slow_s: float) -> None:
    async def scenario() -> None:
        notes: list[str] = []
        good, bad = Watched("good", notes), Watched("bad", notes, fails="enter", slow_s=slow_s)
        store = MemoryStore(yielding=True)
        host = hosted(with_tools(good, bad), store=store)
        with pytest.raises(ConfigurationError, match="toolset Watched did not start"):
            await host.start()
        assert notes == ["enter good", "leave good"]
        assert good.cleaned
        assert bad.cleaned
        async with hosted(with_tools(), store=store) as again:
            assert await again.session("s").ask("x") == "hello"

    explore(scenario, schedules=20, seed=2)


def test_a_start_that_is_cancelled_in_a_toolset_leaves_nothing_open() -> None:
    async def scenario() -> None:
        slow = Watched("slow", [], slow_s=30.0)
        store = MemoryStore(yielding=True)
        starting = asyncio.ensure_future(hosted(with_tools(slow), store=store).start())
        await asyncio.sleep(1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert slow.cleaned
        async with hosted(with_tools(), store=store) as again:
            assert await again.session("s").ask("x") == "hello"

    explore(scenario, schedules=20, seed=3)


@pytest.mark.parametrize("slow_s", [0.0, 1e6])
def test_a_toolset_that_does_not_end_well_is_an_incident_and_holds_nobody_up(slow_s: float) -> None:
    async def scenario() -> None:
        notes: list[str] = []
        good, bad = Watched("good", notes), Watched("bad", notes, fails="leave", slow_s=slow_s)
        async with hosted(with_tools(good, bad)) as host:
            pass
        assert good.cleaned
        (incident,) = [one for one in host.incidents.newest if one.kind == "toolset"]
        assert "Watched failed to shut down" in incident.text

    run_virtual(scenario())


def test_a_lifespan_belongs_to_no_run_even_where_a_run_starts_the_host() -> None:
    found: list[object] = []

    class Looks(Toolset):
        def tools(self) -> Sequence[Tool]:
            return ()

        @contextlib.asynccontextmanager
        async def lifespan(self, home: ToolsetContext) -> AsyncIterator[None]:
            scope = current_scope()
            assert scope is not None
            found.append((scope.name, scope.parent, current_interrupt() is scope.interrupt))
            yield

    async def scenario() -> None:
        from holdfast.runtime import Scope

        async with Scope("a run"), hosted(with_tools(Looks())):
            pass
        assert found == [("toolset Looks", None, True)]

    run_virtual(scenario())


def test_state_of_toolsets_lies_beside_the_file_of_the_store(tmp_path: Path) -> None:
    async def main() -> None:
        toolset = Watched("a", [])
        path = tmp_path / "holdfast.db"
        async with Host(with_tools(toolset), store=f"sqlite:///{path}", settings=Settings()):
            assert toolset.home is not None
            assert not (tmp_path / "holdfast.db.d").exists()
            folder = toolset.home.data_dir
            assert folder == tmp_path / "holdfast.db.d"
            assert folder.is_dir()
            assert folder == toolset.home.data_dir

    asyncio.run(asyncio.wait_for(main(), 60))
