"""A store that fails for a while: nothing is lost or doubled, no place leaks, and the host stays in control."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import HoldfastError, StorageError
from holdfast.protocol.events import TextDelta
from holdfast.settings import Settings
from holdfast.storage.port import Served
from holdfast.testing import VirtualClock, run_virtual
from tests.host.test_recovery import crashed
from tests.host.test_sessions_explored import check_log, settle_all
from tests.host.unreliable import Fate, Unreliable, failing_at_random

QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0, max_runs=3)


@agent
async def talker(run: Run) -> str:
    """Says something, makes a call, and answers."""
    await run.emit("a ")
    await asyncio.sleep(0.03)
    await run.call(effect)
    await run.emit("b ")
    await asyncio.sleep(0.03)
    return run.text


async def effect() -> str:
    """Does nothing."""
    return "x"


@agent
async def endless(run: Run) -> None:
    """Never ends by itself."""
    await run.emit("begun ")
    await asyncio.sleep(1e9)


def hosted(store: Unreliable) -> Host:
    """A host on a virtual clock."""
    return Host(agents=(talker, endless), store=store, settings=QUICK, clock=VirtualClock())  # type: ignore[arg-type]


def places(host: Host) -> int:
    """Places for runs that are taken."""
    return host.admission.statistics().running


def texts(events: Sequence[object]) -> dict[str, list[str]]:
    """What each run said."""
    said: dict[str, list[str]] = {}
    for event in events:
        if isinstance(event, TextDelta):
            said.setdefault(event.run_id, []).append(event.text)
    return said


@pytest.mark.parametrize("fate", ["refused", "lost"])
def test_runs_end_once_and_nothing_is_doubled_while_writes_fail_at_random(fate: Fate) -> None:
    seeds = iter(range(10_000))

    async def scenario() -> None:
        dice = random.Random(next(seeds))
        store = Unreliable(failing_at_random(dice.random, chance=0.4, fate=fate, times=25))
        host = hosted(store)
        async with host:
            session = host.session("s")
            keys = [f"k{number}" for number in range(6)]

            async def send(key: str) -> str:
                while True:
                    try:
                        return (await session.send(key, idempotency_key=key)).message_id
                    except StorageError:
                        await asyncio.sleep(0.01)

            ids = [await send(key) for key in keys]
            assert len(set(ids)) == len(keys)
            for message_id in ids:
                settlement = await session.wait(message_id, timeout_s=600)
                assert settlement.state == "completed"
            events = await settle_all(host, "s")
            check_log(events)
            for said in texts(events).values():
                assert said[:2] == ["a ", "b "], "text was lost or doubled"
                assert len(said) == 3, "text was lost or doubled"
            assert places(host) == 0
            assert len(host.settlements) == 0

    for _ in range(20):
        run_virtual(scenario())


def test_a_run_that_waits_for_a_failing_store_does_not_hammer_it() -> None:
    async def scenario() -> None:
        broken = True
        store = Unreliable(lambda verb: "refused" if broken and verb == "append_all" else "done")
        async with hosted(store) as host:
            session = host.session("s")
            receipt = await session.send("x")
            await asyncio.sleep(60)
            assert 0 < store.failed < 60, f"{store.failed} writes in a minute"
            broken = False
            assert (await session.wait(receipt.message_id, timeout_s=60)).state == "completed"

    run_virtual(scenario())


def test_a_drain_ends_by_its_deadline_and_names_what_could_not_be_stored() -> None:
    async def scenario() -> None:
        broken = False
        store = Unreliable(lambda verb: "refused" if broken and verb in ("append_all", "commit_run") else "done")
        loop = asyncio.get_running_loop()
        async with hosted(store) as host:
            receipt = await host.session("s").send("x", agent="endless")
            await asyncio.sleep(0.1)
            broken = True
            began = loop.time()
            report = await host.drain(deadline_s=5)
            assert loop.time() - began < 60
            assert receipt.run_id is not None
            assert any(receipt.run_id in orphan for orphan in report.orphans)
            assert places(host) == 0
        failed = store.failed
        await asyncio.sleep(1000)
        assert store.failed == failed, "the closed host went on writing"
        broken = False
        async with hosted(Unreliable(lambda verb: "done", store.store)) as host:
            assert host.recovered.interrupted == (receipt.run_id,)
            check_log(await settle_all(host, "s"))

    run_virtual(scenario())


def test_a_run_that_a_send_has_just_claimed_is_part_of_the_drain() -> None:
    async def scenario() -> None:
        async with hosted(Unreliable(lambda verb: "done")) as host:
            sending = asyncio.ensure_future(host.session("s").send("x"))
            await asyncio.sleep(0)
            report = await host.drain(deadline_s=30)
            receipt = await sending
            assert (await host.session("s").message(receipt.message_id)).state == "completed"
            assert report.finished == 1
            assert places(host) == 0

    for _ in range(1):
        run_virtual(scenario())


def test_a_drain_without_a_deadline_leaves_no_run_that_a_send_has_just_claimed() -> None:
    async def scenario() -> None:
        async with hosted(Unreliable(lambda verb: "done")) as host:
            sending = [asyncio.ensure_future(host.session(str(n)).send("x", agent="endless")) for n in range(3)]
            await asyncio.sleep(0)
            await host.drain(deadline_s=0)
            for each in sending:
                receipt = await each
                settlement = await host.session(receipt.session).message(receipt.message_id)
                assert settlement.state == "interrupted"
            assert places(host) == 0
            assert not host.live

    run_virtual(scenario())


def test_a_start_that_fails_leaves_nothing_open() -> None:
    async def scenario() -> None:
        class Damaged(Unreliable):
            async def rescue(self, *, at: float, served: Served | None = None) -> None:
                raise StorageError("the file is damaged")

        store = Damaged(lambda verb: "done")
        host = hosted(store)
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        with pytest.raises(StorageError):
            await host.start()
        assert loop.get_task_factory() is factory
        again = hosted(Unreliable(lambda verb: "done", store.store))
        async with again:
            assert await again.session("s").ask("x") == "a b x"

    run_virtual(scenario())


def test_a_recovery_goes_on_when_a_write_of_it_fails() -> None:
    async def scenario() -> None:
        store, claim = await crashed("talker", waiting=1)
        left = 2

        def fate(verb: str) -> Fate:
            nonlocal left
            if verb in ("restart", "commit_run") and left:
                left -= 1
                return "refused"
            return "done"

        async with hosted(Unreliable(fate, store)) as host:
            session = host.session("s")
            assert host.recovered.interrupted == (claim.lease.run_id,)
            assert (await session.wait("m_1", timeout_s=60)).state == "interrupted"
            assert (await session.wait("m_w0", timeout_s=60)).state == "completed"
            assert places(host) == 0

    run_virtual(scenario())


def test_a_refused_or_failing_send_gives_its_place_back() -> None:
    async def scenario() -> None:
        fate: Fate = "refused"
        store = Unreliable(lambda verb: fate if verb == "send" else "done")
        async with hosted(store) as host:
            for number in range(10):
                with pytest.raises(StorageError):
                    await host.session(str(number)).send("x")
            fate = "done"
            for number in range(10):
                with pytest.raises(HoldfastError):
                    await host.session(str(number)).send("x", policy="shout")  # type: ignore[arg-type]
            assert places(host) == 0
            assert await host.session("s").ask("x") == "a b x"

    run_virtual(scenario())


def test_a_send_whose_answer_was_lost_does_not_wedge_its_session() -> None:
    async def scenario() -> None:
        lost = ["send"]
        store = Unreliable(lambda verb: "lost" if lost and verb == lost[0] and lost.pop() else "done")
        async with hosted(store) as host:
            session = host.session("s")
            with pytest.raises(StorageError):
                await session.send("x", idempotency_key="k")
            assert await session.ask("x", idempotency_key="k", timeout_s=60) == "a b x"
            assert await session.ask("y", timeout_s=60) == "a b y"
            check_log(await settle_all(host, "s"))
            assert places(host) == 0

    run_virtual(scenario())


@pytest.mark.parametrize("fate", ["refused", "lost"])
def test_stops_while_writes_fail_at_random_settle_every_message_once(fate: Fate) -> None:
    seeds = iter(range(10_000))

    async def scenario() -> None:
        dice = random.Random(next(seeds))
        store = Unreliable(failing_at_random(dice.random, chance=0.3, fate=fate, times=25))
        async with hosted(store) as host:
            session = host.session("s")
            accepted: list[str] = []

            async def act(number: int) -> None:
                await asyncio.sleep(dice.random() * 0.2)
                name = ("talker", "endless")[number % 2]
                policy = dice.choice(("queue", "interrupt", "collect"))
                try:
                    match number % 3:
                        case 0 | 1:
                            receipt = await session.send("x", policy=policy, agent=name)  # type: ignore[arg-type]
                            accepted.append(receipt.message_id)
                        case _:
                            await dice.choice((session.interrupt, session.stop))("enough")
                except HoldfastError:
                    pass

            await asyncio.gather(*(act(number) for number in range(12)))
            while True:
                try:
                    await session.stop("all")
                except HoldfastError:
                    await asyncio.sleep(0.1)
                else:
                    break
            for message_id in accepted:
                await session.wait(message_id, timeout_s=600)
            check_log(await settle_all(host, "s"))
            await asyncio.sleep(10)  # a claim that failed is tried again, and finds nothing
            assert places(host) == 0
            assert not host.live

    for _ in range(40):
        run_virtual(scenario(), max_steps=100_000)


@pytest.mark.parametrize("verb", ["stop", "delete"])
def test_a_stop_or_deletion_that_is_not_stored_says_so_though_the_run_is_stopped(verb: str) -> None:
    async def scenario() -> None:
        store = Unreliable(lambda name: "refused" if name in ("stop_session", "delete_session") else "done")
        async with hosted(store) as host:
            session = host.session("s")
            first = await session.send("x", agent="endless")
            second = await session.send("y", agent="talker")
            with pytest.raises(StorageError):
                await getattr(session, verb)()
            assert (await session.wait(first.message_id, timeout_s=60)).state == "interrupted"
            assert (await session.wait(second.message_id, timeout_s=60)).state in ("completed", "interrupted")
            await session.info()

    run_virtual(scenario())
