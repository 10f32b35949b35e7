"""The mailbox and the log in the store: senders, holders, readers and those who take back, one verb at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.errors import HoldfastError
from holdfast.protocol.events import Stored, decode_event
from holdfast.protocol.messages import Policy, Question
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore, transactions
from holdfast.storage.event_packs import pack_events
from holdfast.storage.memory.tables import MemoryTables
from holdfast.storage.port import Claim, InterruptRequest, Lease, RunCommit, Send
from holdfast.storage.transactions import session_log
from tests.explored.model import Model, fault
from tests.explored.session_faults import (
    a_run_that_is_stopped_is_steered,
    a_session_that_is_busy_starts_another_run,
    patch_stop_run,
    what_did_not_steer_ends_with_its_run,
    what_steers_is_given_and_waits_on,
)
from tests.explored.story import Story
from tests.storage.audit import audit, recover


async def opened() -> MemoryStore:
    """A store that yields around each verb."""
    store = MemoryStore(yielding=True)
    await store.open(node_id="n", at=1.0)
    return store


def message(name: str, *, policy: Policy = "queue", room: bool = True, **more: Any) -> Send:
    """A message to the one session."""
    run_id = f"r_{name}" if room else None
    return Send(
        principal="p", key="k", agent=None, default_agent="demo", message_id=f"m_{name}", content=name, policy=policy,
        at=1.0, run_id=run_id, quiet_s=0.0, **more,
    )  # fmt: skip


async def end(store: MemoryStore, lease: Lease) -> None:
    """Commit a run and those that follow it, as a host does."""
    claim: Claim | None = None
    while True:
        done = await store.commit_run(
            RunCommit(lease=lease, status="completed", at=2.0, next_run_id=f"{lease.run_id}_")
        )
        claim = done.claim
        if claim is None:
            return
        lease = claim.lease


def plain(store: MemoryStore) -> MemoryStore:
    """The same store for looking at when all is over: it does not yield, so it adds no schedules."""
    looked_at = MemoryStore()
    looked_at.backend.tables = store.backend.tables
    return looked_at


async def over(store: MemoryStore) -> None:
    """What must hold now, and after a crash."""
    await store.close()
    looked_at = plain(store)
    await looked_at.open(node_id="n", at=2.5)
    await audit(looked_at)
    await recover(looked_at, at=3.0)
    for log in (await audit(looked_at)).values():
        Story(interrupts=1).tell(map(decode_event, log))


async def senders_and_holders() -> None:
    """Two send the same message, one another; one takes one back; two holders claim what waits."""
    store = await opened()
    session = (await store.send(message("first", room=False))).session
    holding: list[str] = []

    async def hold(run_id: str) -> None:
        claim = await store.claim(session, run_id=run_id, at=1.0)
        if isinstance(claim, Claim):
            assert not holding, "two hold the session"
            holding.append(run_id)
            await store.append(claim.lease, [("text.delta", b'{"kind":"text.delta","run_id":"r","text":"t"}')])
            holding.remove(run_id)
            await end(store, claim.lease)

    async def send_the_same(name: str) -> str:
        return (await store.send(message(name, room=False, idempotency_key="i", body_hash=b"x"))).message_id

    async def take_back() -> None:
        try:
            await store.withdraw("p", "k", "m_first", at=1.0)
        except HoldfastError:
            return

    async with asyncio.TaskGroup() as group:
        same = [group.create_task(send_the_same(name)) for name in ("a", "b")]
        for work in (hold("r1"), hold("r2"), take_back()):
            group.create_task(work)
    assert same[0].result() == same[1].result(), "the same key was accepted twice"
    await over(store)


async def steered_asked_and_interrupted() -> None:
    """A run takes what steers it, asks, and ends; somebody steers, somebody interrupts."""
    store = await opened()
    begun = (await store.send(message("first"))).claim
    assert begun is not None

    async def run() -> None:
        try:
            await store.steer(begun.lease, step=1, at=2.0)
            await store.suspend(begun.lease, Question(question_id="q", kind="question", asked_at=1.0, due_at=9.0))
            parked = await store.park(begun.lease, at=2.0)
        except HoldfastError:
            await end(store, begun.lease)
            return
        if parked.ready:
            claim = await store.claim(begun.lease.session, run_id="r_again", at=2.0)
            if isinstance(claim, Claim):
                await end(store, claim.lease)

    async def steer() -> None:
        claim = (await store.send(message("steering", policy="steer"))).claim
        if claim is not None:
            await end(store, claim.lease)

    async def interrupt() -> None:
        await store.interrupt(InterruptRequest(principal="p", key="k", cause=Cause(kind="user"), at=1.0))

    async with asyncio.TaskGroup() as group:
        for work in (run, steer, interrupt):
            group.create_task(work())
    await over(store)


async def log_of_two_writers() -> None:
    """A holder appends, senders append, and a reader pages along behind its cursor; the log has no holes."""
    store = await opened()
    first = await store.send(message("first"))
    assert first.claim is not None
    lease = first.claim.lease
    seen: list[int] = []
    writing = 2

    async def append() -> None:
        nonlocal writing
        for text in (b"a", b"b"):
            body = b'{"kind":"text.delta","run_id":"r_first","text":"%s"}' % text
            await store.append(lease, [("text.delta", body)] * 2)
        writing -= 1

    async def send() -> None:
        nonlocal writing
        await store.send(message("more"))
        writing -= 1

    async def read() -> None:
        while True:
            last_look = not writing
            page = await store.read_events(first.session, after=seen[-1] if seen else 0, limit=2)
            seen.extend(event.seq for event in page)
            assert seen == list(range(1, len(seen) + 1)), "a hole, a repeat or another order"
            if not page:
                if last_look:
                    return
                await asyncio.sleep(0.01)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for work in (append, send, read):
            group.create_task(work())
    found = await store.find_session("p", "k")
    assert found is not None
    assert seen[-1] == found[1].seq, "the reader missed the end"
    await end(store, lease)
    await over(store)


@fault
def a_claim_does_not_look_who_holds(patch: pytest.MonkeyPatch) -> None:
    claim = transactions.claim

    def careless(tables: Any, session: int, run_id: str, at: float, served: Any) -> Any:
        tables.get(session).run_id = None
        return claim(tables, session, run_id, at, served)

    patch.setattr(transactions, "claim", careless)


@fault
def an_idempotency_key_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTables, "by_idempotency_key", lambda *_: None)


@fault
def numbers_are_taken_before_events_are_stored(patch: pytest.MonkeyPatch) -> None:
    async def append(self: MemoryStore, lease: Lease, events: Any, *, nth: int = 0) -> None:
        def number(tables: Any) -> int:
            row = tables.get(lease.session)
            first: int = row.next_seq
            row.next_seq += len(events)
            tables.save(row)
            return first

        def store(tables: Any) -> None:
            stored = [Stored(first + at, *event) for at, event in enumerate(events)]
            row = tables.get(lease.session)
            tables.add_events(row, lease.run_id, 1.0, stored[0].seq, stored[-1].seq, pack_events(stored))

        first = await self.backend.write("append", number)
        await self.backend.write("append", store)

    patch.setattr(MemoryStore, "append", append)


@fault
def what_was_taken_back_waits_on(patch: pytest.MonkeyPatch) -> None:
    withdraw = transactions.withdraw

    def twice(tables: Any, principal: str, key: str, message_id: str, at: float) -> Any:
        row = tables.find(principal, key)
        waiting = row.waiting
        withdrawn = withdraw(tables, principal, key, message_id, at)
        row.waiting = waiting
        return withdrawn

    patch.setattr(transactions, "withdraw", twice)


@fault
def questions_outlive_a_stop(patch: pytest.MonkeyPatch) -> None:
    stop_run = session_log.stop_run

    def asks_on(row: Any, log: Any, cause: Cause, at: float, grace_s: float | None = None) -> bool:
        questions = row.questions
        stopped = stop_run(row, log, cause, at, grace_s)
        row.questions = questions
        return stopped

    patch_stop_run(patch, asks_on)


MODELS = (
    Model(
        item="mailbox",
        name="senders, holders and one who takes back",
        promise="P4: one holder; P5: accepted once, settled once; P11: a crash loses nothing",
        scenario=senders_and_holders,
        faults=(
            a_claim_does_not_look_who_holds,
            an_idempotency_key_is_not_looked_at,
            what_was_taken_back_waits_on,
        ),
    ),
    Model(
        item="mailbox",
        name="a run that is steered, asks and is interrupted",
        promise="P5: what steers is taken or waits; P10: one table of states",
        scenario=steered_asked_and_interrupted,
        faults=(
            a_session_that_is_busy_starts_another_run,
            what_steers_is_given_and_waits_on,
            what_did_not_steer_ends_with_its_run,
            a_run_that_is_stopped_is_steered,
            questions_outlive_a_stop,
        ),
    ),
    Model(
        item="log",
        name="a holder and senders write, a reader follows",
        promise="P7: one counter, no holes, the end is seen",
        scenario=log_of_two_writers,
        faults=(numbers_are_taken_before_events_are_stored,),
    ),
)
