"""Each way in which a run ends passes the phases of the table, and together they pass all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import HoldfastError, QuotaExceeded, StaleFence, StoreFull
from holdfast.host import run_execution
from holdfast.host.run_execution import RunExecution
from holdfast.protocol.run_phases import PHASE_TABLE, PhaseInput, RunPhase, next_phase
from holdfast.protocol.stopping import Cause
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, run_virtual

QUICK = Settings(grace_s=5.0, abandon_after_s=1.0)
ENOUGH = Cause(kind="user", reason="enough", at=0.0)
FENCE = StaleFence("another holder has the session")
QUOTA = QuotaExceeded("no bytes are left")
FULL = StoreFull("the disk is full")

Step = tuple[RunPhase, PhaseInput]
Story = Callable[["Scene"], Awaitable[object]]


@agent
async def quick(run: Run) -> str:
    """Answers."""
    return "done"


@agent
async def failing(run: Run) -> str:
    """Raises."""
    raise ValueError("no")


@agent(replayable=True)
async def talking(run: Run) -> None:
    """Writes to the log again and again."""
    while True:
        await run.emit("word ")
        await asyncio.sleep(0.5)


@agent(replayable=True)
async def asking(run: Run) -> str:
    """Asks a person, with unwritten output, and takes a second to stop."""

    async def ask() -> str:
        try:
            return (await run.ask_user("may I?")).text
        finally:
            await asyncio.sleep(1)

    async def speak() -> None:
        await asyncio.sleep(0.1)
        await run.emit("by the way ")

    return str(await run.parallel(ask, speak))


class RefusingStore:
    """A `MemoryStore` that refuses the writes named in `errors`."""

    def __init__(self) -> None:
        self.store = MemoryStore(yielding=True)
        self.errors: dict[str, HoldfastError] = {}
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store, name)

        def refuse(*_: Any, **__: Any) -> asyncio.Future[Any]:
            self.refused += 1
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            refused.set_exception(self.errors[name])
            return refused

        return refuse if name in self.errors else verb


class Scene:
    """A host with one run, and what a story does to it."""

    def __init__(self, host: Host, store: RefusingStore) -> None:
        self.host = host
        self.store = store
        self.errors = store.errors

    async def start(self, name: str) -> RunExecution:
        """Start the run of that agent."""
        session = self.host.session("s")
        receipt = await session.send("x", agent=name)
        return session._parts.launcher.live[receipt.run_id or ""]

    async def reach(self, run: RunExecution, phase: RunPhase) -> None:
        """Wait until the run is in that phase."""
        async with asyncio.timeout(60):
            while run.phase != phase:
                await asyncio.sleep(0.01)


async def completes(scene: Scene) -> None:
    await scene.start("quick")


async def fails(scene: Scene) -> None:
    await scene.start("failing")


async def is_interrupted(scene: Scene) -> None:
    await scene.start("talking")
    await scene.host.session("s").interrupt("enough")


async def loses_its_session(scene: Scene) -> None:
    await scene.start("talking")
    scene.errors["append_all"] = FENCE


async def loses_its_session_at_the_commit(scene: Scene) -> None:
    scene.errors["commit_run"] = FENCE
    await scene.start("quick")


async def is_superseded_while_its_commit_fails(scene: Scene) -> None:
    scene.errors["commit_run"] = FULL
    run = await scene.start("quick")
    await scene.reach(run, "committing")
    await asyncio.sleep(1)
    run.supersede()
    tries = scene.store.refused
    await scene.reach(run, "ended")
    assert scene.store.refused == tries > 1, "a lost run is written"


async def exceeds_its_quota(scene: Scene) -> None:
    await scene.start("talking")
    scene.errors["append_all"] = QUOTA


async def is_left_by_a_drain(scene: Scene) -> None:
    run = await scene.start("talking")
    report = await scene.host.drain(deadline_s=1)
    assert report.suspended == (run.run_id,)


async def is_given_up_at_work(scene: Scene) -> None:
    (await scene.start("talking")).give_up()


async def is_unloaded(scene: Scene) -> None:
    run = await scene.start("asking")
    await scene.reach(run, "unloaded")


async def loses_its_session_while_it_unloads(scene: Scene) -> None:
    run = await scene.start("asking")
    await scene.reach(run, "unloading")
    run.supersede()


async def exceeds_its_quota_while_it_unloads(scene: Scene) -> None:
    run = await scene.start("asking")
    await asyncio.sleep(0.05)  # the question is stored; the words that follow are not
    scene.errors["append_all"] = QUOTA
    await scene.reach(run, "unloading")


async def is_given_up_while_it_unloads(scene: Scene) -> None:
    run = await scene.start("asking")
    await scene.reach(run, "unloading")
    run.give_up()


async def is_interrupted_before_its_release(scene: Scene) -> None:
    scene.errors["park"] = FULL
    run = await scene.start("asking")
    await scene.reach(run, "releasing")
    await scene.host.session("s").interrupt("enough")


async def loses_its_session_at_its_release(scene: Scene) -> None:
    scene.errors["park"] = FENCE
    await scene.start("asking")


WRITTEN: list[Step] = [("running", "commit"), ("committing", "end")]
UNLOADING: list[Step] = [("running", "unload"), ("unloading", "release")]

WAYS: dict[Story, list[Step]] = {
    completes: WRITTEN,
    fails: WRITTEN,
    is_interrupted: WRITTEN,
    exceeds_its_quota: WRITTEN,
    loses_its_session: [("running", "lose"), ("lost", "end")],
    loses_its_session_at_the_commit: [("running", "commit"), ("committing", "lose"), ("lost", "end")],
    is_superseded_while_its_commit_fails: [("running", "commit"), ("committing", "lose"), ("lost", "end")],
    is_left_by_a_drain: [("running", "release"), ("releasing", "end")],
    is_given_up_at_work: [("running", "end")],
    is_unloaded: [*UNLOADING, ("releasing", "end")],
    loses_its_session_while_it_unloads: [("running", "unload"), ("unloading", "lose"), ("lost", "end")],
    exceeds_its_quota_while_it_unloads: [("running", "unload"), ("unloading", "commit"), ("committing", "end")],
    is_given_up_while_it_unloads: [("running", "unload"), ("unloading", "end")],
    is_interrupted_before_its_release: [*UNLOADING, ("releasing", "commit"), ("committing", "end")],
    loses_its_session_at_its_release: [*UNLOADING, ("releasing", "lose"), ("lost", "end")],
}


@pytest.mark.parametrize("story", WAYS, ids=lambda story: story.__name__)
def test_a_run_passes_the_phases_of_its_way_to_the_end(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Step] = []

    def recorded(phase: RunPhase, event: PhaseInput) -> RunPhase:
        steps.append((phase, event))
        return next_phase(phase, event)

    monkeypatch.setattr(run_execution, "next_phase", recorded)

    async def scenario() -> None:
        store = RefusingStore()
        agents = (quick, failing, talking, asking)
        async with Host(agents=agents, store=store, settings=QUICK, clock=VirtualClock()) as host:  # type: ignore[arg-type]
            await story(Scene(host, store))
            async with asyncio.timeout(60):
                while host.live:
                    await asyncio.sleep(0.01)
            store.errors.clear()
            assert steps == WAYS[story]
            assert host.admission.statistics().running == 0

    run_virtual(scenario())
    assert steps == WAYS[story]


def test_the_ways_to_the_end_use_every_row_of_the_table() -> None:
    assert {step for way in WAYS.values() for step in way} == set(PHASE_TABLE)
