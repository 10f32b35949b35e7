"""Steer and rollback at every moment of a run: nothing is lost, nothing counts twice, the next run works."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast.errors import HoldfastError, RunInterrupted
from holdfast.protocol.events import MessageSteered, RunFinished, RunRolledBack
from holdfast.protocol.session_api import answer
from holdfast.storage import MemoryStore
from holdfast.storage.port import Store
from holdfast.testing import explore, run_virtual
from tests.host.people import CALLED, check_entries, check_session, check_story, hosted, whole_log
from tests.host.unreliable import Unreliable

Scenario = Callable[[], Coroutine[Any, Any, None]]


def test_what_is_steered_is_given_to_the_run_before_its_next_step_and_settled_with_it() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            first = await session.send("a", agent="steerable")
            steered = [await session.send(text, policy="steer") for text in ("b", "c")]
            assert [receipt.disposition for receipt in steered] == ["steering", "steering"]
            assert all(receipt.run_id == first.run_id for receipt in steered)
            for receipt in (first, *steered):
                settlement = await session.wait(receipt.message_id)
                assert (settlement.state, settlement.text, settlement.run_id) == ("completed", "a b c", first.run_id)
            assert [(e.role, e.content) for e in await session.transcript()] == [
                ("user", "a"),
                ("user", "b"),
                ("user", "c"),
                ("assistant", "a b c"),
            ]
            await check_session(host, "s")
            assert host.incidents.counts["steered"] == 2

    run_virtual(scenario())


@pytest.mark.parametrize("seeds", [6, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("name", ["steerable", "stumbling", "stubborn", "echo"])
def test_a_steered_message_is_settled_once_whatever_becomes_of_the_run(name: str, tasks: Any, seeds: int) -> None:
    seen: set[str] = set()

    def scenario_at(seed: int) -> Scenario:
        async def scenario() -> None:
            dice = random.Random(seed)
            async with hosted(MemoryStore(yielding=True)) as host:
                session = host.session("s")
                await session.send("a", agent=name)

                async def steer(text: str) -> None:
                    receipt = await session.send(text, policy="steer", agent="echo")
                    settlement = await session.wait(receipt.message_id)
                    assert settlement.state in ("completed", "failed", "interrupted")
                    seen.add(f"{receipt.disposition} {'with it' if settlement.run_id == receipt.run_id else 'later'}")

                async with asyncio.TaskGroup() as users:
                    for text in ("b", "c", "d"):
                        users.create_task(steer(text))
                    await asyncio.sleep(dice.choice((0, 0.001, 0.02)))
                    if name == "stubborn" or dice.random() < 0.5:
                        await session.interrupt("enough", grace_s=0.005)
                await check_session(host, "s")

        return scenario

    for seed in range(seeds):
        explore(scenario_at(seed), schedules=8, seed=seed, tasks=tasks)
        explore(scenario_at(seed), schedules=4, chooser="pct", seed=seed, tasks=tasks)
    expected = {"steerable": "steering with it", "stumbling": "steering with it"}.get(name, "steering later")
    assert expected in seen


def test_what_an_interrupted_run_was_steered_stands_in_the_transcript() -> None:
    """Also where the interrupt comes between the store's answer and the run that asked for it."""

    def scenario_at(moment: int) -> Scenario:
        async def scenario() -> None:
            async with hosted(MemoryStore(yielding=True)) as host:
                session = host.session("s")
                await session.send("a", agent="listening")
                sending = asyncio.ensure_future(session.send("b", policy="steer", agent="echo"))
                for _ in range(moment):
                    await asyncio.sleep(0)
                await session.interrupt("enough")
                await session.wait((await sending).message_id)
                await check_session(host, "s")

        return scenario

    for moment in range(1, 8, 2):
        explore(scenario_at(moment), schedules=60, seed=moment)
        explore(scenario_at(moment), schedules=30, chooser="pct", seed=moment)


@pytest.mark.parametrize("fate", ["refused", "lost"])
def test_steering_bears_a_store_that_fails(fate: Any) -> None:
    async def scenario() -> None:
        left = {"steer": 2}

        def decide(verb: str) -> Any:
            if left.get(verb):
                left[verb] -= 1
                return fate
            return "done"

        async with hosted(Unreliable(decide)) as host:  # type: ignore[arg-type]
            session = host.session("s")
            first = await session.send("a", agent="listening")
            await session.send("b", policy="steer")
            assert answer(await session.wait(first.message_id)) == "a b"
            await check_session(host, "s")
        assert not left["steer"]

    explore(scenario, schedules=30, seed=1)


@pytest.mark.parametrize("seeds", [6, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("name", ["steerable", "stumbling", "stubborn", "echo", "patient", "present", "branching"])
def test_a_rollback_at_any_moment_takes_the_run_back_or_runs_after_it(name: str, tasks: Any, seeds: int) -> None:
    seen: set[str] = set()

    def scenario_at(seed: int) -> Scenario:
        async def scenario() -> None:
            dice = random.Random(seed)
            async with hosted(MemoryStore(yielding=True)) as host:
                session = host.session("s")
                old = await session.send("old", agent=name)
                queued = asyncio.ensure_future(session.send("waits", agent="echo"))
                await asyncio.sleep(dice.uniform(0, 0.01) if dice.random() < 0.8 else 0)
                receipt = await session.send("new", policy="rollback", agent="echo")
                taken = await session.wait(receipt.message_id)
                assert taken.state == "completed"
                if receipt.disposition == "rolling_back":
                    assert taken.text.endswith("new"), "the newest comes last"
                    assert (await session.wait((await queued).message_id)).state in ("completed", "superseded")
                await queued
                try:
                    answer(await session.wait(old.message_id))
                except RunInterrupted as error:
                    assert "rolled back" in error.message
                    seen.add("rolled back")
                    rolled = {e.run_id: e for e in await whole_log(host, "s") if isinstance(e, RunRolledBack)}
                    assert rolled
                    entries = await session.transcript()
                    assert not [entry for entry in entries if entry.run_id in rolled]
                except HoldfastError:
                    seen.add("failed before")
                else:
                    seen.add("completed before")
                await check_session(host, "s")

        return scenario

    for seed in range(seeds):
        explore(scenario_at(seed), schedules=6, seed=seed, tasks=tasks)
        explore(scenario_at(seed), schedules=4, chooser="pct", seed=seed, tasks=tasks)
    assert "rolled back" in seen


def test_a_rollback_names_the_calls_whose_effects_stay_and_drops_the_entries() -> None:
    async def scenario() -> None:
        CALLED.clear()
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            assert await session.ask("kept", agent="echo") == "kept"
            old = await session.send("old", agent="stubborn")
            await asyncio.sleep(0.1)
            new = await session.send("new", policy="rollback", agent="echo")
            assert (new.disposition, new.run_id) == ("rolling_back", old.run_id)
            superseded = await session.wait(old.message_id)
            assert (superseded.state, superseded.run_id) == ("superseded", old.run_id)
            with pytest.raises(RunInterrupted, match="rolled back: a newer message replaced this one"):
                answer(superseded)
            assert (await session.wait(new.message_id)).text == "new"
            events = await whole_log(host, "s")
            assert [e.not_undone for e in events if isinstance(e, RunRolledBack)] == [("effect",)]
            (ended,) = [e for e in events if isinstance(e, RunFinished) and e.run_id == old.run_id]
            assert ended.status == "interrupted"
            assert ended.cause is not None
            assert ended.cause.kind == "rollback"
            assert CALLED == ["half"]
            assert [e.content for e in await session.transcript()] == ["kept", "kept", "new", "new"]
            run = await session.run(old.run_id or "")
            assert (run.state, run.cause and run.cause.kind) == ("interrupted", "rollback")
            await check_session(host, "s")
            assert host.incidents.counts["rolled_back"] == 1

    run_virtual(scenario())


def test_steering_and_rollback_on_an_idle_session_act_as_queue() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            session = host.session("s", agent="echo")
            for policy in ("steer", "rollback"):
                receipt = await session.send(policy, policy=policy)
                assert receipt.disposition == "started"
                assert (await session.wait(receipt.message_id)).text == policy
            await check_session(host, "s")

    run_virtual(scenario())


@pytest.mark.parametrize("seeds", [15, pytest.param(40, marks=pytest.mark.nightly)])
def test_a_random_mix_with_steering_and_rollbacks_keeps_the_log_whole(seeds: int) -> None:
    names = ("steerable", "stumbling", "stubborn", "echo", "patient", "branching")
    policies = ("queue", "steer", "steer", "rollback", "interrupt", "collect")

    def scenario_at(seed: int) -> Scenario:
        async def scenario() -> None:
            dice = random.Random(seed)

            async def one_user() -> None:
                session = host.session("s")
                for number in range(3):
                    act = dice.choice(("send", "send", "interrupt", "stop", "withdraw", "answer"))
                    try:
                        receipt = await session.send(
                            str(number),
                            policy=dice.choice(policies),  # type: ignore[arg-type]
                            agent=dice.choice(names),
                        )
                        if act == "interrupt":
                            await session.interrupt("x", grace_s=0.005)
                        elif act == "stop":
                            await session.stop("x")
                        elif act == "withdraw":
                            await session.withdraw(receipt.message_id)
                        elif act == "answer":
                            for question in await session.questions():
                                await session.answer(question.question_id, "yes")
                    except HoldfastError:
                        await asyncio.sleep(0)

            async with hosted(MemoryStore(yielding=True)) as host:
                async with asyncio.TaskGroup() as users:
                    for _ in range(3):
                        users.create_task(one_user())
                await host.session("s").stop("the end")
                await check_session(host, "s")

        return scenario

    for seed in range(seeds):
        explore(scenario_at(seed), schedules=5, seed=seed)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_steered_message_is_given_again_at_its_step_after_a_crash(kind: str, tmp_path: Any) -> None:
    """The host ends without a word after the step; the next one replays it."""
    from holdfast import Host, Run, agent
    from holdfast.settings import Settings
    from holdfast.storage import SqliteStore
    from holdfast.testing import VirtualClock

    @agent(name="replayed", replayable=True)
    async def replayed(run: Run) -> str:
        heard = [run.text]
        await run.step()
        while not (taken := await run.take_steering()):
            await asyncio.sleep(0.01)
        heard += [message.content for message in taken]
        await run.call(asyncio.sleep, 0, idempotent=True, name="nap")
        if run.attempt == 1:
            await asyncio.sleep(1e6)
        return " ".join(heard)

    async def main(clock: Any) -> None:
        memory = MemoryStore()

        def store() -> Store:
            return memory if kind == "memory" else SqliteStore(str(tmp_path / "s.db"))

        settings = Settings(drain_timeout_s=0.01, grace_s=0.5, abandon_after_s=0.1, run_timeout_s=60)
        async with Host(replayed, store=store(), settings=settings, **clock()) as host:
            session = host.session("s")
            first = await session.send("a")
            second = await session.send("b", policy="steer")
            while not any(isinstance(e, MessageSteered) for e in await whole_log(host, "s")):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        async with Host(replayed, store=store(), settings=settings, **clock()) as host:
            session = host.session("s")
            assert answer(await session.wait(first.message_id)) == "a b"
            assert answer(await session.wait(second.message_id)) == "a b"
            events = await whole_log(host, "s")
            assert len([e for e in events if isinstance(e, MessageSteered)]) == 1
            check_story(events)
            check_entries(await session.transcript(), events)
            assert [e.content for e in await session.transcript() if e.role == "user"] == ["a", "b"]

    if kind == "memory":
        run_virtual(main(lambda: {"clock": VirtualClock()}))
    else:
        asyncio.run(asyncio.wait_for(main(dict), 60))
