"""Sessions under many schedules: every policy against runs that finish, fail and are stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import HoldfastError, Interrupted, MessageWithdrawn, RunFailed, RunInterrupted, SessionBusy
from holdfast.protocol.events import Event, MessageAccepted, MessageSettled, RunFinished, RunStarted, decode_event
from holdfast.protocol.messages import Policy, Receipt
from holdfast.protocol.session_api import answer
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, explore

POLICIES: tuple[Policy, ...] = ("queue", "collect", "interrupt", "reject")
QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0)


@agent
async def ten_awaits(run: Run) -> str:
    """Works in ten steps, as a set-up with enrichment does."""
    for _ in range(10):
        await asyncio.sleep(0)
    return run.text


@agent
async def fails(run: Run) -> None:
    """Fails half-way."""
    await run.emit("half")
    await asyncio.sleep(0)
    raise ValueError("no")


@agent
async def endless(run: Run) -> None:
    """Never ends by itself, and takes its time to clean up."""
    try:
        await asyncio.sleep(1e9)
    finally:
        await asyncio.sleep(0.01)


AGENTS = (ten_awaits, fails, endless)


def host() -> Host:
    """A host whose store yields around each verb, so that schedules differ there too."""
    return Host(agents=AGENTS, store=MemoryStore(yielding=True), settings=QUICK, clock=VirtualClock())


def check_log(events: list[Event]) -> None:
    """What holds for every log: no holes, one run at a time, each message settled once by the run that took it."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    on: str | None = None
    taken: dict[str, str] = {}
    accepted: list[str] = []
    settled: set[str] = set()
    for event in events:
        match event:
            case MessageAccepted(message_id=message_id):
                accepted.append(message_id)
            case RunStarted(run_id=run_id, messages=messages):
                assert on is None, "two runs of one session at a time"
                on = run_id
                for message_id in messages:
                    assert message_id not in taken, "a message taken twice"
                    taken[message_id] = run_id
            case RunFinished(run_id=run_id):
                assert on == run_id, "a run freed a slot that was not its own"
                on = None
            case MessageSettled(message_id=message_id, run_id=run_id, state=state):
                assert message_id not in settled, "a message settled twice"
                assert state == "withdrawn" or taken[message_id] == run_id
                settled.add(message_id)
            case _:
                pass
    assert set(accepted) == settled, "a message was lost"
    assert on is None


async def settle_all(host: Host, key: str) -> list[Event]:
    """Wait until the session has nothing left to do; its whole log."""
    session = host.session(key)
    while True:
        view = await session.info()
        if view.state == "idle" and not view.waiting:
            break
        await asyncio.sleep(0.05)
    stored = await host.store.read_events(view.number, after=0, limit=100_000)
    return [decode_event(event) for event in stored]


def test_simultaneous_sends_are_all_answered_in_order() -> None:
    async def scenario() -> None:
        async with host() as one:
            session = one.session("s")
            answers = [asyncio.ensure_future(session.ask(str(n))) for n in range(4)]
            assert [await answer for answer in answers] == ["0", "1", "2", "3"]
            events = await settle_all(one, "s")
            check_log(events)
            accepted = [e.message_id for e in events if isinstance(e, MessageAccepted)]
            assert [m for e in events if isinstance(e, RunStarted) for m in e.messages] == accepted

    explore(scenario, schedules=200, seed=1)
    explore(scenario, schedules=100, chooser="pct", seed=2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["ten_awaits", "fails", "endless"])
def test_each_policy_against_each_run_loses_and_doubles_nothing(policy: Policy, name: str) -> None:
    async def scenario() -> None:
        async with host() as one:
            session = one.session("s")
            await session.send("first", agent=name)
            sends: list[Awaitable[Receipt]] = [
                asyncio.ensure_future(session.send(str(n), policy=policy, agent="ten_awaits")) for n in range(3)
            ]
            await asyncio.sleep(0)
            await session.interrupt("enough")
            for send in sends:
                try:
                    receipt = await send
                except SessionBusy:
                    assert policy == "reject"
                else:
                    await session.wait(receipt.message_id)
            check_log(await settle_all(one, "s"))

    explore(scenario, schedules=40, seed=3)
    explore(scenario, schedules=20, chooser="pct", seed=4)


def test_a_random_mix_of_everything_keeps_the_log_whole() -> None:
    """Sends, interrupts, stops and withdrawals from several tasks at once."""

    def scenario(seed: int) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            chance = random.Random(seed)

            async def one_user(session_key: str) -> None:
                session = one.session(session_key)
                for number in range(3):
                    act = chance.choice(["send", "send", "send", "interrupt", "stop", "withdraw"])
                    try:
                        receipt = await session.send(
                            str(number), policy=chance.choice(POLICIES), agent=chance.choice(AGENTS).name
                        )
                        if act == "interrupt":
                            await session.interrupt("x", grace_s=0.005)
                        elif act == "stop":
                            await session.stop("x")
                        elif act == "withdraw":
                            await session.withdraw(receipt.message_id)
                    except (HoldfastError, Interrupted):
                        await asyncio.sleep(0)

            async with host() as one:
                async with asyncio.TaskGroup() as users:
                    for _ in range(3):
                        users.create_task(one_user("s"))
                    users.create_task(one_user("other"))
                for key in ("s", "other"):
                    await one.session(key).stop("the end")
                    check_log(await settle_all(one, key))
            assert not one.live
            counted = one.statistics().promises
            assert not {number: count for number, count in counted.items() if count.broken}

        return run

    for seed in range(40):
        explore(scenario(seed), schedules=5, seed=seed)  # type: ignore[arg-type]


def test_an_old_owners_end_never_frees_the_new_runs_slot() -> None:
    async def scenario() -> None:
        async with host() as one:
            session = one.session("s")
            first = await session.send("first", agent="endless")
            second = asyncio.ensure_future(session.send("second", policy="interrupt", agent="endless"))
            receipt = await second
            await session.wait(first.message_id)
            third = await session.send("third", agent="ten_awaits")
            assert third.disposition == "queued"
            await session.interrupt("go on")
            with pytest.raises(RunInterrupted):
                answer(await session.wait(receipt.message_id))
            assert (await session.wait(third.message_id)).state == "completed"
            check_log(await settle_all(one, "s"))

    explore(scenario, schedules=100, seed=5)


def test_of_simultaneous_sends_that_must_be_alone_exactly_one_is_accepted() -> None:
    async def scenario() -> None:
        async with host() as one:
            session = one.session("s")
            sends = [asyncio.ensure_future(session.send(str(n), policy="reject", agent="endless")) for n in range(4)]
            accepted = []
            for send in sends:
                try:
                    accepted.append(await send)
                except SessionBusy:
                    continue
            assert [receipt.disposition for receipt in accepted] == ["started"]
            await session.interrupt("enough")
            check_log(await settle_all(one, "s"))

    explore(scenario, schedules=100, seed=7)


def test_a_hundred_messages_through_ten_awaits_run_one_at_a_time_in_order() -> None:
    running = 0

    @agent
    async def guarded(run: Run) -> str:
        nonlocal running
        assert running == 0, "two runs on one transcript"
        running += 1
        try:
            for _ in range(10):
                await asyncio.sleep(0)
        finally:
            running -= 1
        return run.text

    async def scenario() -> None:
        nonlocal running
        running = 0
        async with Host(guarded, store=MemoryStore(yielding=True), settings=QUICK, clock=VirtualClock()) as one:
            session = one.session("s")
            answers = [asyncio.ensure_future(session.ask(str(n))) for n in range(100)]
            assert [await answer for answer in answers] == [str(n) for n in range(100)]
            entries = await session.transcript()
            events = await settle_all(one, "s")
            accepted = [e.content for e in events if isinstance(e, MessageAccepted)]
            assert sorted(accepted, key=int) == [str(n) for n in range(100)]
            assert [e.content for e in entries if e.role == "user"] == accepted

    explore(scenario, schedules=5, seed=6)


def test_failing_and_withdrawn_messages_raise_what_became_of_them() -> None:
    async def scenario() -> None:
        async with host() as one:
            session = one.session("s")
            with pytest.raises(RunFailed, match="no"):
                await session.ask("x", agent="fails")
            await session.send("x", agent="endless")
            waiting = asyncio.ensure_future(session.ask("y"))
            receipt = await session.send("z")
            await session.withdraw(receipt.message_id)
            assert (await session.message(receipt.message_id)).state == "withdrawn"
            stopped = await session.stop("all of it")
            assert [m.content for m in stopped.withdrawn] == ["y"]
            with pytest.raises(MessageWithdrawn):
                await waiting
            check_log(await settle_all(one, "s"))

    explore(scenario, schedules=100, seed=7)
