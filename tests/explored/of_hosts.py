"""Readers of a session's log, and the drain: a whole host around one session."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import Draining
from holdfast.host.context import Lifecycle
from holdfast.host.drain import Drain
from holdfast.host.live_session import LiveSession
from holdfast.host.statistics import DrainReport
from holdfast.protocol.events import Event, Gap, MessageSettled
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock
from tests.explored.model import Model, fault
from tests.explored.of_mailboxes import plain
from tests.storage.audit import audit

QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0)
ONE_AT_A_TIME = Settings(
    grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0, max_runs=1
)


@agent
async def finishing(run: Run) -> str:
    """Works in a few steps, of which each can be the last."""
    await run.emit("a")
    await asyncio.sleep(0)
    await run.take_steering()
    await asyncio.sleep(0)
    return run.text


@agent
async def failing(run: Run) -> None:
    """Fails half-way, after a while."""
    await asyncio.sleep(0)
    raise ValueError("no")


def hosted(store: MemoryStore, settings: Settings = QUICK) -> Host:
    """A host on virtual time."""
    return Host(agents=[finishing, failing], store=store, settings=settings, clock=VirtualClock())


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
            with pytest.raises(Draining):
                await session.send("too late")

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
def readers_are_shown_events_in_the_order_of_the_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveSession, "publish", lambda self, events: self.log.publish(events))


@fault
def a_drain_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    async def run(self: Drain, deadline_s: float) -> DrainReport:
        self._context.lifecycle.draining = True
        return DrainReport()

    patch.setattr(Drain, "run", run)


@fault
def a_draining_host_takes_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lifecycle, "draining", property(lambda self: False, lambda self, on: None))


@fault
def a_claim_on_its_way_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    async def until_unused(self: Drain, deadline_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._launcher.live:
                    await asyncio.sleep(0.01)

    patch.setattr(Drain, "_until_unused", until_unused)


@fault
def runs_are_given_up_at_the_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drain, "_cut_short", lambda self, run: run.give_up())


MODELS = (
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
            faults=(a_drain_waits_for_nobody, a_draining_host_takes_messages, *faults),
        )
        for deadline_s, faults in (
            (0.0, (runs_are_given_up_at_the_deadline,)),
            (10.0, (a_claim_on_its_way_is_not_waited_for,)),
        )
    ),
)
