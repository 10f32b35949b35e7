"""One session under every order of senders, interrupts and its holder."""

import asyncio

import pytest

from holdfast.errors import IllegalTransition, SessionBusy, UnknownQuestion
from holdfast.protocol.messages import Answer, Entry, Question
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore
from holdfast.storage.port import Claim, InterruptRequest, NotReady, RunCommit, Send
from holdfast.testing import ScheduleFailure, explore
from tests.storage.audit import audit, recover


def message(name, policy):
    return Send(
        principal="p", key="k", agent=None, default_agent="demo", message_id=f"m_{name}", content=name, policy=policy,
        at=1.0, run_id=f"r_{name}", quiet_s=0.0,
    )  # fmt: skip


async def hold(store, claim, name):
    """Run what was claimed and what follows, as a host does."""
    step = 0
    while claim is not None:
        await store.append(claim.lease, [("text.delta", b'{"kind":"text.delta","run_id":"r","text":"t"}')])
        step += 1
        done = await store.commit_run(
            RunCommit(lease=claim.lease, status="completed", at=2.0, next_run_id=f"r_{name}_{step}")
        )
        claim = done.claim


async def race():
    store = MemoryStore(yielding=True)
    await store.open(node_id="n", at=1.0)

    async def sender(name, policy):
        try:
            result = await store.send(message(name, policy))
        except SessionBusy:
            return
        if result.claim is not None:
            await hold(store, result.claim, name)

    async def interrupter():
        found = await store.find_session("p", "k")
        if found is not None:
            await store.interrupt(InterruptRequest(principal="p", key="k", cause=Cause(kind="user"), at=1.0))

    async def claimer():
        found = await store.find_session("p", "k")
        if found is not None:
            claim = await store.claim(found[0], run_id="r_claimed", at=1.0)
            if not isinstance(claim, NotReady):
                await hold(store, claim, "claimed")

    await asyncio.gather(
        sender("a", "queue"), sender("b", "interrupt"), sender("c", "reject"), sender("d", "collect"), interrupter(),
        claimer(),
    )  # fmt: skip
    await audit(store)
    await recover(store, at=3.0)
    await audit(store)
    await store.close()


def test_no_order_breaks_a_session():
    explore(race, schedules=150, seed=1)
    explore(race, schedules=50, chooser="pct", seed=2)


async def race_of_people():
    """A run that is steered, asks and is parked, against who answers, interrupts, takes back and claims."""
    store = MemoryStore(yielding=True)
    await store.open(node_id="n", at=1.0)
    first = await store.send(message("first", "queue"))
    begun = first.claim
    assert begun is not None
    session, run_id = first.session, first.run_id
    asked = Question(question_id="q", kind="question", asked_at=1.0, due_at=9.0)
    holding = []

    async def commit(claim):
        assert run_id not in holding, "two hold it"
        holding.append(run_id)
        entries = [Entry(role="assistant", content="x", run_id=run_id)]
        done = await store.commit_run(RunCommit(lease=claim.lease, status="completed", at=2.0, entries=entries))
        holding.remove(run_id)
        taken_back = "run.rolled_back" in [event.kind for event in done.events]
        assert taken_back == ({settled.state for settled in done.settled} == {"superseded"})
        shown = await store.transcript(session)
        assert [entry.run_id for entry in shown] == ([] if taken_back else [run_id])

    async def resume(name):
        claim = await store.claim(session, run_id=f"r_{name}_resumed", at=2.0)
        if isinstance(claim, Claim):
            await (commit(claim) if claim.lease.run_id == run_id else hold(store, claim, name))

    async def runner():
        steered = await store.steer(begun.lease, step=1, at=2.0)
        try:
            await store.suspend(begun.lease, asked)
        except IllegalTransition:
            assert (await store.steer(begun.lease, step=2, at=2.0)).messages == ()
            await commit(begun)
            return
        assert len(steered.messages) <= 1
        if (await store.park(begun.lease, at=2.0)).ready:
            await resume("runner")

    async def answerer():
        try:
            answered = await store.answer("p", "k", Answer(question_id="q", decision="answered", at=3.0))
        except UnknownQuestion:
            return
        if answered.parked:
            await resume("answerer")

    async def sender(policy):
        sent = await store.send(message(policy, policy))
        if sent.interrupt is not None:
            await resume(policy)
        elif sent.claim is not None:
            await hold(store, sent.claim, policy)

    await asyncio.gather(runner(), answerer(), sender("steer"), sender("rollback"))
    await audit(store)
    await recover(store, at=3.0)
    await audit(store)
    await store.close()


def test_no_order_of_people_breaks_a_run():
    explore(race_of_people, schedules=150, seed=1)
    explore(race_of_people, schedules=50, chooser="pct", seed=2)


async def reject_in_two_steps():
    """The reported fault: look, then act, with an await between."""
    store = MemoryStore(yielding=True)
    await store.open(node_id="n", at=1.0)
    started = []

    async def sender(name):
        found = await store.find_session("p", "k")
        if found is None or found[1].run_id is None:
            await store.send(message(name, "queue"))
            started.append(name)

    await asyncio.gather(*(sender(str(n)) for n in range(3)))
    await store.close()
    assert len(started) == 1, "two were told that theirs runs"


async def reject_in_one_step():
    store = MemoryStore(yielding=True)
    await store.open(node_id="n", at=1.0)
    answers = await asyncio.gather(*(store.send(message(str(n), "reject")) for n in range(3)), return_exceptions=True)
    await store.close()
    assert sum(isinstance(answer, SessionBusy) for answer in answers) == 2


def test_reject_is_atomic_with_the_claim_and_the_explorer_can_tell():
    with pytest.raises(ScheduleFailure):
        explore(reject_in_two_steps, schedules=50, seed=1)
    explore(reject_in_one_step, schedules=50, seed=1)
