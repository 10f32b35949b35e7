"""One session under every order of senders, interrupts and its holder."""

import asyncio

import pytest

from holdfast.errors import SessionBusy
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore
from holdfast.storage.port import Interrupt, NotReady, RunCommit, Send
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
            await store.interrupt(Interrupt(principal="p", key="k", cause=Cause(kind="user"), at=1.0))

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
