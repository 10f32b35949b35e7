"""Hostile tools of the built-in agent, stopped at random instants: the receipt is true, and the next run works.

What lives is looked up in ``/proc`` and on the tools' own lists; no report is believed. `SEED` and the number of the
round name a schedule; what the machine makes of it differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent, Host, Session, Settings
from holdfast.agents.scripted import ScriptedModel
from holdfast.agents.tool import Tool, tool
from holdfast.protocol.events import Event, Gap, TextDelta, ToolOutput
from holdfast.protocol.model import CallPart, ModelRequest, UserMessage, conversation
from holdfast.protocol.stopping import StopReceipt
from holdfast.runtime.process_host import process_host
from holdfast.runtime.processes import procfs
from tests.runtime.processes_zoo import living
from tests.zoo.hostile import STAGES, VISITED, ZOO, Fate, Stage

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="process trees are proven dead only on Linux")

SEED = 3
AT_ONCE = 4
GRACES_S = (0.0, 0.02, 0.05)
ABANDON_AFTER_S: dict[Fate, float] = {"gone": 10.0, "quarantined": 0.2}
"""What can be ended is ended sooner, on a busy machine too; what cannot takes all this time."""


def as_tools() -> list[Tool]:
    return [tool(isolation=where, timeout_s=60)(fn) for fn, (where, _) in ZOO.items()]


def script(request: ModelRequest) -> Any:
    """Call what the newest message names; say ``fine`` to everything else."""
    last = request.messages[-1]
    newest = last.content.splitlines()[-1] if isinstance(last, UserMessage) else ""  # those without answer stand above
    if newest.startswith("call "):
        _, name, folder, token = newest.split(" ")
        return [CallPart(name=name, arguments={"folder": folder, "token": token})]
    return "fine"


@contextlib.asynccontextmanager
async def hosted(fate: Fate, store: str = "memory://") -> AsyncIterator[Host]:
    settings = Settings(
        grace_s=0.05,
        abandon_after_s=ABANDON_AFTER_S[fate],
        drain_timeout_s=0.5,
        principal_abandoned=1000,
        principal_stored_bytes=1_000_000_000,
    )

    def answer(request: ModelRequest) -> Any:
        model.requests.clear()  # else it keeps them all
        return script(request)

    model = ScriptedModel(answer)
    agent = Agent(name="keeper", model=model, tools=as_tools())
    async with asyncio.timeout(1200):
        async with Host(agent, store=store, settings=settings) as host:
            yield host


def of_nobody() -> list[int]:
    """Pids below this process that live and are neither the zygote nor an idle worker with its reaper."""
    processes = process_host()
    workers = list(processes.workers._idle)
    expected = {worker.process.pid for worker in workers} | {
        getattr(worker.process.tree, "reaper", 0) for worker in workers
    }
    expected |= {link.pid for link in processes._links.values()}
    return [pid for pid in procfs.living(procfs.descendants(os.getpid())) if pid not in expected]


def truth(stage: Stage, token: str, receipt: StopReceipt, fate: Fate) -> None:
    """Hold a receipt against what can be seen from outside."""
    assert living(token) == [], procfs.names(living(token))
    assert receipt.survivors == ()
    assert receipt.unattributed == ()
    named = [one.name for one in receipt.abandoned]
    if receipt.outcome == "gone":
        assert named == []
        assert stage.living == []
    else:
        assert receipt.outcome == "quarantined" == fate, receipt
        assert set(stage.living) <= set(named), (stage.living, named)  # one may have ended just after it was given up
    if fate == "gone":
        assert receipt.outcome == "gone", receipt


async def one_round(session: Session, name: str, fate: Fate, chance: random.Random, folder: Path, token: str) -> None:
    stage = STAGES[token] = Stage()
    try:
        sent = await session.send(f"call {name} {folder} {token}")
        if chance.random() < 0.7:
            with contextlib.suppress(TimeoutError):  # it may end before it is at its worst
                async with asyncio.timeout(5):
                    while not (folder / token).exists():
                        await asyncio.sleep(0.002)
        await asyncio.sleep(chance.uniform(0.0, 0.03))
        grace_s = chance.choice(GRACES_S)
        if chance.random() < 0.2:
            receipt = (await session.stop("enough", grace_s=grace_s)).receipt
        else:
            receipt = await session.interrupt("enough", grace_s=grace_s)
        truth(stage, token, receipt, fate)
        written = folder / f"{token}.written"
        size = written.stat().st_size if written.exists() else 0
        assert (await session.wait(sent.message_id)).state in ("interrupted", "completed", "withdrawn")
        assert await session.ask("and now?") == "fine"
        stage.release()
        async with asyncio.timeout(60):
            while stage.living:
                await asyncio.sleep(0.002)
        assert "taken" not in stage.late
        events = await log(session)
        assert not [event for event in events if isinstance(event, ToolOutput | TextDelta) and "late" in event.text]
        conversation(await session.transcript())
        assert "late" not in str(await session.transcript())
        assert (written.stat().st_size if written.exists() else 0) == size
        assert VISITED.get() == ""
    finally:
        stage.release()
        del STAGES[token]
        stage.close()


async def log(session: Session) -> list[Event | Gap]:
    """All events of a session that is at rest."""
    last = (await session.info()).seq
    found: list[Event | Gap] = []
    async for event in session.events():
        found.append(event)
        if not isinstance(event, Gap) and event.seq >= last:
            break
    return found


async def rounds(count: int, fn: Callable[..., Any], folder: Path, seed: int) -> None:
    _, fate = ZOO[fn]
    chance = random.Random(f"{seed} {fn.__name__}")
    others = set(of_nobody())  # of an earlier test that failed
    async with hosted(fate) as host:
        sessions = [host.session(f"s{number}") for number in range(AT_ONCE)]
        for batch in range(0, count, AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for number, session in enumerate(sessions[: count - batch]):
                    own = random.Random(chance.random())
                    token = f"zoo-{os.getpid()}-{fn.__name__}-{batch + number}"
                    group.create_task(one_round(session, fn.__name__, fate, own, folder, token))
            with contextlib.suppress(TimeoutError):  # a reaper tells that its tree is gone, then ends itself
                async with asyncio.timeout(30):
                    while not others.issuperset(of_nobody()):
                        await asyncio.sleep(0.002)
            left = [pid for pid in of_nobody() if pid not in others]
            assert left == [], procfs.names(left)


@pytest.mark.parametrize("fn", ZOO, ids=lambda fn: fn.__name__)
def test_a_stopped_tool_is_gone_or_named_and_the_next_run_works(fn: Callable[..., Any], tmp_path: Path) -> None:
    asyncio.run(rounds(20, fn, tmp_path, SEED))


@pytest.mark.nightly
@pytest.mark.parametrize("fn", ZOO, ids=lambda fn: fn.__name__)
def test_a_tool_that_is_stopped_two_hundred_times_is_gone_or_named(fn: Callable[..., Any], tmp_path: Path) -> None:
    asyncio.run(rounds(200, fn, tmp_path, SEED + 1))
