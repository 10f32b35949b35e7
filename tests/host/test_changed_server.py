"""Sessions that outlive their agents: a host is started again with other agents than before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast import Host, Run
from holdfast.agents.demo import agent as demo
from holdfast.errors import SessionAgentMissing
from holdfast.host.agent_registry import DEMO
from holdfast.storage import MemoryStore

STORES = ("memory", "sqlite")


async def old(run: Run) -> AsyncIterator[str]:
    yield f"old: {run.text}"


async def new(run: Run) -> AsyncIterator[str]:
    yield f"new: {run.text}"


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryStore | str:
    return MemoryStore() if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


def test_a_session_whose_agent_is_gone_is_refused_before_anything_is_stored(store: MemoryStore | str) -> None:
    async def scenario() -> None:
        async with Host(old, store=store) as host:
            assert await host.session("main").ask("hi") == "old: hi"
        async with Host(new, store=store) as host:
            session = host.session("main")
            entries = await session.transcript()
            with pytest.raises(SessionAgentMissing) as refusal:
                await session.send("hello?")
            assert "'main' belongs to agent 'old'" in refusal.value.message
            assert "available: new" in refusal.value.hint
            with pytest.raises(SessionAgentMissing):
                await session.retry()
            view = await session.info()
            assert (view.state, view.waiting, view.agent) == ("idle", 0, "old")
            assert await session.transcript() == entries
            assert await session.ask("hello?", agent="new") == "new: hello?"
            assert await session.ask("again") == "new: again", "the session now belongs to the agent named"

    asyncio.run(scenario())


def test_the_default_agent_takes_over_the_sessions_of_the_demo(store: MemoryStore | str) -> None:
    async def scenario() -> None:
        async with Host(demo, store=store) as host:
            await host.session("main").ask("hi")
        async with Host(new, agents=[old], store=store) as host:
            assert await host.session("main").ask("hello?") == "new: hello?"
            assert (await host.session("main").info()).agent == "new"
        async with Host(demo, agents=[old], store=store) as host:
            with pytest.raises(SessionAgentMissing):
                await host.session("main").send("back?")

    asyncio.run(scenario())


def test_a_host_that_serves_the_demo_leaves_its_sessions_to_it(store: MemoryStore | str) -> None:
    async def scenario() -> None:
        async with Host(demo, store=store) as host:
            await host.session("main").ask("hi")
        async with Host(new, agents=[demo], store=store) as host:
            await host.session("main").ask("hi")
            assert (await host.session("main").info()).agent == DEMO

    asyncio.run(scenario())


def test_a_schedule_in_a_session_of_the_demo_fires_for_the_default_agent(store: MemoryStore | str) -> None:
    async def scenario() -> None:
        async with Host(demo, store=store) as host:
            await host.session("main").ask("hi")
            await host.schedule("main", "tick", every_s=3600.0, schedule_id="s")
        async with Host(new, store=store) as host:
            receipt = await host.find_schedule("s").run_now()
            assert (await host.session("main").wait(receipt.message_id)).text == "new: tick"

    asyncio.run(scenario())


def test_the_name_of_the_demo_is_that_of_its_agent() -> None:
    assert demo.name == DEMO
