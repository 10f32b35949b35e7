"""The session actor, readers of its log, and the drain: a whole host around one session."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal, get_args

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import Draining, SessionBusy
from holdfast.host.actor import SessionActor
from holdfast.host.statistics import DrainReport
from holdfast.protocol.events import Event, Gap, MessageSettled, RunFinished, RunStarted, decode_event
from holdfast.protocol.messages import Policy
from holdfast.settings import Settings
from holdfast.storage import MemoryStore, verbs
from holdfast.storage.port import Send
from holdfast.testing import VirtualClock
from tests.explored.model import Model, fault
from tests.explored.of_mailboxes import plain
from tests.storage.audit import audit

QUICK = Settings(grace_s=1.0, kill_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_s=60.0)
ONE_AT_A_TIME = Settings(grace_s=1.0, kill_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_s=60.0, max_runs=1)
Ending = Literal["finishing", "failing", "crashed"]


@agent
async def finishing(run: Run) -> str:
    """Works in a few steps, of which each can be the last."""
    await run.emit("a")
    await asyncio.sleep(0)
    await run.steered()
    await asyncio.sleep(0)
    return run.text


@agent
async def failing(run: Run) -> None:
    """Fails half-way, after a while."""
    await asyncio.sleep(0)
    raise ValueError("no")


@agent
async def crashed(run: Run) -> None:
    """Was running when its holder died."""


def hosted(store: MemoryStore, settings: Settings = QUICK) -> Host:
    """A host on virtual time."""
    return Host(agents=[finishing, failing, crashed], store=store, settings=settings, clock=VirtualClock())


async def left_by_a_dead_holder(store: MemoryStore) -> None:
    """A run that its holder did not end."""
    at = VirtualClock().now()
    await store.open(node_id="dead", at=at)
    await store.send(
        Send(
            principal="local", key="s", agent="crashed", default_agent="crashed", message_id="m_0", content="first",
            policy="queue", at=at, run_id="r_0", quiet_s=0.0,
        )
    )  # fmt: skip
    await store.close()


async def each_policy(policy: Policy, ending: Ending) -> None:
    """A message of a policy (where they are joined, two) and an interrupt come, while a run finishes, fails or is found
    dead."""
    store = MemoryStore(yielding=True)
    if ending == "crashed":
        await left_by_a_dead_holder(store)
    async with hosted(store) as host:
        session = host.session("s")
        accepted = []
        if ending != "crashed":
            accepted.append((await session.send("first", agent=ending)).message_id)

        async def send(name: str) -> None:
            try:
                receipt = await session.send(name, policy=policy, agent="finishing")
            except SessionBusy:
                assert policy == "reject"
            else:
                accepted.append(receipt.message_id)

        async def interrupt() -> None:
            await session.interrupt("enough")

        async with asyncio.timeout(600):
            async with asyncio.TaskGroup() as group:
                for name in ("one", "two") if policy in ("collect", "interrupt") else ("one",):
                    group.create_task(send(name))
                group.create_task(interrupt())
            for message_id in accepted:
                settlement = await session.wait(message_id)
                assert settlement.state not in ("accepted", "taken")
                if settlement.state == "failed":
                    assert ending == "failing"
    await check(store, accepted)


async def check(store: MemoryStore, accepted: list[str]) -> None:
    """The store as it was left: no holes, one run at a time, each message settled once; nothing waits or runs."""
    store = plain(store)
    await store.open(node_id="after", at=1e10)
    logs = await audit(store)
    for view in await store.sessions(principal=None, limit=9):
        assert view.run_id is None, "a run was left on"
    for log in logs.values():
        on: str | None = None
        settled = []
        for event in map(decode_event, log):
            match event:
                case RunStarted(run_id=run_id):
                    assert on is None, "two runs of one session at a time"
                    on = run_id
                case RunFinished(run_id=run_id):
                    assert on == run_id, "a run freed a slot that was not its own"
                    on = None
                case MessageSettled(message_id=message_id):
                    settled.append(message_id)
                case _:
                    pass
        assert len(set(settled)) == len(settled), "a message was settled twice"
        assert set(accepted) <= set(settled), "a message was lost"


async def readers_follow() -> None:
    """One reader from the start and one from the middle read along while a run works and another message comes."""
    async with hosted(MemoryStore(yielding=True)) as host:
        session = host.session("s")
        first = await session.send("first", agent="finishing")

        async def read(after: str | None, follow: str) -> list[Event]:
            seen: list[Event] = []
            async for event in session.events(after=after, follow=follow):
                assert not isinstance(event, Gap)
                seen.append(event)
            return seen

        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            whole = group.create_task(read(None, first.message_id))
            second = await session.send("second", agent="finishing")
            rest = group.create_task(read(first.cursor, second.message_id))
        for start, task in ((1, whole), (first.seq, rest)):
            numbers = [event.seq for event in task.result()]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a hole, a repeat or another order"
            assert start <= numbers[0] <= start + 1
            assert isinstance(task.result()[-1], MessageSettled), "no terminal event"
        shared = {event.seq: event for event in whole.result()}
        assert all(shared.get(event.seq, event) == event for event in rest.result())


async def drained(deadline_s: float) -> None:
    """A host is drained while a run works, a message waits and another comes."""
    store = MemoryStore(yielding=True)
    accepted = []
    async with hosted(store, ONE_AT_A_TIME) as host:
        session = host.session("s")
        accepted.append((await session.send("first", agent="finishing")).message_id)

        async def send() -> None:
            try:
                accepted.append((await session.send("late", agent="failing")).message_id)
            except Draining:
                return

        async def drain() -> None:
            report = await host.drain(deadline_s=deadline_s)
            assert not report.orphans
            assert not host.statistics().running, "the drain is over, and a run is not"

        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            for work in (send, drain):
                group.create_task(work())
    store = plain(store)
    await store.open(node_id="after", at=1e10)
    await audit(store)
    for view in await store.sessions(principal=None, limit=9):
        assert view.run_id is None, "a run was left on"
        session_number, _ = await store.find_session(view.principal, view.key) or (0, None)
        for message_id in accepted:
            settlement = await store.settlement(session_number, message_id)
            assert settlement is not None, "an accepted message is lost"
            assert settlement.state != "taken"


@fault
def a_session_that_is_busy_starts_another_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verbs, "occupancy", lambda **_: "idle")


@fault
def what_waits_is_forgotten_when_a_run_ends(patch: pytest.MonkeyPatch) -> None:
    commit = verbs.commit_run

    def forgetful(tables: Any, request: Any) -> Any:
        row = tables.get(request.lease.session)
        row.waiting = row.waiting[:1]
        return commit(tables, request)

    patch.setattr(verbs, "commit_run", forgetful)


@fault
def readers_are_shown_events_in_the_order_of_the_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionActor, "publish", lambda self, events: self.log.publish(events))


@fault
def a_drain_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    async def draining(self: Host, deadline_s: float) -> DrainReport:
        self.draining = True
        return DrainReport()

    patch.setattr(Host, "_draining", draining)


MODELS = (
    *(
        Model(
            item="session actor",
            name=f"{policy} against a run, {ending}",
            promise="P4: one run at a time; P5: each message settled once; P11: a dead holder's run is ended",
            scenario=partial(each_policy, policy, ending),
            faults={
                ("queue", "finishing"): (a_session_that_is_busy_starts_another_run,),
                ("interrupt", "finishing"): (what_waits_is_forgotten_when_a_run_ends,),
            }.get((str(policy), str(ending)), ()),
        )
        for policy in get_args(Policy)
        for ending in get_args(Ending)
    ),
    Model(
        item="log",
        name="readers from the start and from the middle, of a whole host",
        promise="P7: each event once, in order, to the end",
        scenario=readers_follow,
        faults=(readers_are_shown_events_in_the_order_of_the_answers,),
        share=0.1,
    ),
    *(
        Model(
            item="drain",
            name=f"with {'no time' if not deadline_s else 'time for all'}",
            promise="P12: a drain ends each run and loses no message; what comes late is refused",
            scenario=partial(drained, deadline_s),
            faults=(a_drain_waits_for_nobody,),
        )
        for deadline_s in (0.0, 10.0)
    ),
)
