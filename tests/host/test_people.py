"""Runs that wait for people: asked and answered once, parked and resumed, ended at any moment, never lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from holdfast import Agent, Host
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import (
    AlreadyAnswered,
    HoldfastError,
    InvalidRequest,
    RunInterrupted,
    SessionDeleted,
    StorageError,
    UnknownQuestion,
)
from holdfast.host.session import Session
from holdfast.protocol.events import RunFinished, RunRestarted, RunResumed, RunStarted, RunSuspended, TextDelta
from holdfast.protocol.messages import Question
from holdfast.protocol.model import CallPart
from holdfast.protocol.session_api import answer
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, explore, run_virtual
from tests.agents.modelled import careful
from tests.host.people import (
    CALLED,
    QUICK,
    answer_all,
    check_entries,
    check_session,
    check_story,
    echo,
    hosted,
    patient,
    present,
    say_yes,
    whole_log,
)
from tests.host.unreliable import Unreliable

Scenario = Callable[[], Coroutine[Any, Any, None]]


async def first_question(session: Session) -> Question:
    """What the session asks next."""
    while not (questions := await session.questions()):
        await asyncio.sleep(0.01)
    return questions[0]


async def parked(host: Host) -> None:
    """Wait until no run is in memory."""
    while host.live:
        await asyncio.sleep(0.01)


def test_a_question_is_found_however_many_sessions_are_newer() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            asked = []
            for principal in ("alice", "bob"):
                session = host.session("s", principal=principal)
                await session.send("hello", agent="patient")
                asked.append((principal, await first_question(session)))
            for n in range(300):
                await host.session(f"newer {n}", principal="carol").ask("hi", agent="echo")
            found = await host.open_questions()
            assert [(one.principal, one.key, one.question) for one in found] == [
                (principal, "s", question) for principal, question in asked
            ]
            await answer_all(host.session("s", principal="alice"))
            assert [one.principal for one in await host.open_questions()] == ["bob"]
            assert len(await host.open_questions(limit=1)) == 1

    run_virtual(scenario())


@pytest.mark.parametrize("name", ["patient", "present"])
def test_a_run_that_asks_waits_for_the_answer_and_goes_on_under_its_id(name: str) -> None:
    async def scenario() -> None:
        CALLED.clear()
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            receipt = await session.send("x", agent=name)
            question = await first_question(session)
            assert (question.kind, question.text) == ("question", "shall I?")
            assert question.due_at == pytest.approx(question.asked_at + QUICK.question_ttl_s)
            await asyncio.sleep(1)
            assert (await session.info()).state == "suspended"
            assert [q.text for q in (await session.run(receipt.run_id or "")).questions] == ["shall I?"]
            assert bool(host.live) is (name == "present")
            assert host.admission.statistics().running == len(host.live)
            given = await session.answer(question.question_id, "go")
            assert (given.decision, given.text, given.by) == ("answered", "go", "local")
            again = await first_question(session)
            assert again.text == "sure?"
            await session.answer(again.question_id, "yes")
            settlement = await session.wait(receipt.message_id)
            assert settlement.run_id == receipt.run_id
            assert settlement.text.endswith("answered go, answered yes")
            assert CALLED == ["first", "second"]
            events = await check_session(host, "s")
            kinds = [type(e) for e in events]
            assert kinds.count(RunSuspended) == kinds.count(RunResumed) == 2
            assert kinds.count(RunStarted) == 1
            assert [e.content for e in await session.transcript() if e.role == "assistant"][:1]
            counts = host.incidents.counts
            assert (counts["suspended"], counts["resumed"]) == (2, 2)

    run_virtual(scenario())


def test_what_a_resumed_run_says_once_more_is_dropped_by_readers_and_stands_once_in_the_transcript() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            receipt = await session.send("x", agent="patient")
            await answer_all(session)
            events = await whole_log(host, "s")
            shown = ""
            for event in events:
                if isinstance(event, RunRestarted):
                    shown = ""
                elif isinstance(event, TextDelta):
                    shown += event.text
            settlement = await session.wait(receipt.message_id)
            assert shown == settlement.text == "before answered yes, answered yes"
            texts = [e.content for e in await session.transcript() if e.role == "assistant"]
            assert "".join(texts) == settlement.text

    run_virtual(scenario())


def test_an_answer_that_is_repeated_is_the_first_one_and_another_is_refused() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            await session.send("x", agent="present")
            question = await first_question(session)
            with pytest.raises(InvalidRequest):
                await session.approve(question)
            first = await session.answer(question.question_id, "go")
            assert await session.answer(question.question_id, "go") == first
            with pytest.raises(AlreadyAnswered):
                await session.answer(question.question_id, "stop")
            with pytest.raises(UnknownQuestion):
                await session.answer("nothing", "go")
            with pytest.raises(HoldfastError):
                await host.session("s", principal="mallory").answer(question.question_id, "go")
            await check_session(host, "s")
            with pytest.raises(UnknownQuestion):
                await session.answer(question.question_id, "go")

    run_virtual(scenario())


@pytest.mark.parametrize("name", ["patient", "present"])
def test_a_question_that_nobody_answers_expires_and_the_run_hears_it(name: str) -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            receipt = await session.send("x", agent=name)
            first = await first_question(session)
            await asyncio.sleep(QUICK.question_ttl_s + 1)
            second = await first_question(session)
            assert second.text == "sure?"
            with pytest.raises(AlreadyAnswered):
                await session.answer(first.question_id, "too late")
            await session.answer(second.question_id, "yes")
            assert answer(await session.wait(receipt.message_id)).endswith("expired , answered yes")
            assert host.incidents.counts["questions_expired"] == 1
            await check_session(host, "s")

    run_virtual(scenario())


def test_the_time_of_a_run_stands_still_while_it_waits_for_people_only() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore(), settings=Settings(run_timeout_s=10.0)) as host:
            session = host.session("s")
            receipt = await session.send("x", agent="present")
            for _ in range(2):
                question = await first_question(session)
                await asyncio.sleep(1000)
                await say_yes(session, question)
            assert (await session.wait(receipt.message_id)).state == "completed"

    run_virtual(scenario())


EFFECTS = {
    "patient": ["first", "second"],
    "present": ["first", "second"],
    "branching": ["a answered", "b answered", "work"],
}


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("name", ["patient", "present", "branching"])
def test_an_answer_that_comes_at_any_moment_is_never_lost(name: str, tasks: Any) -> None:
    """Two people answer as soon as something is asked, also in the instant in which the run leaves the memory."""

    async def scenario() -> None:
        CALLED.clear()
        async with hosted(MemoryStore(yielding=True)) as host:
            session = host.session("s")
            receipt = await session.send("x", agent=name)
            done = asyncio.Event()

            async def person() -> None:
                while not done.is_set():
                    for question in await session.questions():
                        await say_yes(session, question)
                    await asyncio.sleep(0)

            people = [asyncio.ensure_future(person()) for _ in range(2)]
            settlement = await session.wait(receipt.message_id, timeout_s=100)
            done.set()
            await asyncio.gather(*people)
            assert settlement.state == "completed"
            assert sorted(CALLED) == EFFECTS[name]
            await check_session(host, "s")

    explore(scenario, schedules=90, seed=1, tasks=tasks)
    explore(scenario, schedules=60, chooser="pct", seed=2, tasks=tasks)


ENDS = ("interrupt", "stop", "delete", "message", "rollback", "drain")


@pytest.mark.parametrize("seeds", [5, pytest.param(14, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("name", ["patient", "present", "branching"])
def test_a_run_that_waits_is_ended_at_any_moment_against_its_answer(name: str, how: str, seeds: int) -> None:
    def scenario_at(seed: int) -> Scenario:
        async def scenario() -> None:
            dice = random.Random(seed)
            store = MemoryStore(yielding=True)
            async with hosted(store) as host:
                session = host.session("s")
                receipt = await session.send("x", agent=name)
                question = await first_question(session)
                if dice.random() < 0.3:
                    await asyncio.sleep(1)

                async def person() -> None:
                    await asyncio.sleep(dice.choice((0, 0.001)))
                    try:
                        await say_yes(session, question)
                    except HoldfastError:
                        assert how == "delete"

                answering = asyncio.ensure_future(person())
                for _ in range(dice.randrange(4)):
                    await asyncio.sleep(0)
                match how:
                    case "interrupt":
                        stopped = await session.interrupt("now")
                        assert stopped.outcome == "gone"
                        assert stopped.cause.reason == "now"
                        assert (await session.wait(receipt.message_id)).state == "interrupted"
                    case "stop":
                        await session.stop("now")
                        assert (await session.wait(receipt.message_id)).state == "interrupted"
                    case "delete":
                        await session.delete()
                    case "message" | "rollback":
                        policy: Any = "interrupt" if how == "message" else how
                        newer = await session.send("new", policy=policy, agent="echo")
                        assert (await session.wait(newer.message_id)).text == "new"
                        state = "interrupted" if how == "message" else "superseded"
                        assert (await session.wait(receipt.message_id)).state == state
                    case _:
                        report = await host.drain()
                        assert report.elapsed_s < 5, "a drain waited for people"
                        assert not report.orphans
                await answering
                if how == "delete":
                    with pytest.raises(SessionDeleted):
                        await session.info()
                    while (found := await store.find_session("local", "s")) is not None and found[1].run_id is not None:
                        await asyncio.sleep(0.01)
                elif how != "drain":
                    events = await check_session(host, "s")
                    assert len([e for e in events if isinstance(e, RunFinished)]) == (2 if "new" in str(events) else 1)
            if how == "drain":
                async with hosted(store) as host:
                    session = host.session("s")
                    await answer_all(session)
                    settlement = await session.wait(receipt.message_id)
                    if name == "present":
                        assert settlement.state in ("interrupted", "completed")
                    else:
                        assert settlement.state == "completed"
                    check_story(await whole_log(host, "s"))
                    check_entries(await session.transcript(), await whole_log(host, "s"))

        return scenario

    for seed in range(seeds):
        explore(scenario_at(seed), schedules=6, seed=seed)
        explore(scenario_at(seed), schedules=4, chooser="pct", seed=seed)


@pytest.mark.parametrize("how", ["interrupt", "stop", "message", "rollback"])
def test_a_parked_run_is_ended_from_the_log(how: str) -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            receipt = await session.send("x", agent="patient")
            question = await first_question(session)
            await parked(host)
            match how:
                case "interrupt":
                    stopped = await session.interrupt("enough")
                    assert (stopped.outcome, stopped.cause.reason) == ("gone", "enough")
                case "stop":
                    await session.stop("enough")
                case _:
                    newer = await session.send("new", policy="rollback" if how == "rollback" else "interrupt")
                    assert newer.disposition == ("rolling_back" if how == "rollback" else "interrupting")
            settlement = await session.wait(receipt.message_id)
            assert settlement.state == ("superseded" if how == "rollback" else "interrupted")
            assert settlement.cause is not None
            assert settlement.cause.kind == {"interrupt": "user", "message": "message"}.get(how, how)
            entries = [e for e in await session.transcript() if e.run_id == receipt.run_id]
            if how == "rollback":
                assert not entries
            else:
                assert [(e.role, e.content) for e in entries[:2]] == [("user", "x"), ("assistant", "before ")]
                assert [e.role for e in entries[2:]] == ["tool_call", "tool_result"]
            with pytest.raises(UnknownQuestion):
                await session.answer(question.question_id, "too late")
            await check_session(host, "s")

    run_virtual(scenario())


def test_a_parked_run_with_a_child_says_nothing_while_it_leaves_and_goes_on_with_the_child() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore()) as host:
            session = host.session("s")
            receipt = await session.send("x", agent="family")
            question = await first_question(session)
            await parked(host)
            assert not [e for e in await whole_log(host, "s") if isinstance(e, TextDelta)]
            await session.answer(question.question_id, "yes")
            assert (await session.wait(receipt.message_id)).text == "last wordsyes"
            await check_session(host, "s")

    run_virtual(scenario())


def test_places_of_parked_runs_are_free_for_others() -> None:
    async def scenario() -> None:
        async with hosted(MemoryStore(), settings=Settings(max_runs=1, principal_runs=1)) as host:
            waiting = [host.session(f"s{n}") for n in range(5)]
            receipts = [await session.send("x", agent="patient") for session in waiting]
            for session in waiting:
                await first_question(session)
            await parked(host)
            assert await host.session("other").ask("hello", agent="echo") == "hello"
            for session in waiting:
                await say_yes(session, (await session.questions())[0])
            for session in waiting:
                await say_yes(session, await first_question(session))
            for session, receipt in zip(waiting, receipts, strict=True):
                assert (await session.wait(receipt.message_id)).state == "completed"

    run_virtual(scenario())


def test_a_message_that_steers_a_parked_run_is_taken_when_it_comes_back() -> None:
    from holdfast import Run, agent
    from holdfast.testing import VirtualClock

    @agent(replayable=True)
    async def asks_and_listens(run: Run) -> str:
        await run.step()
        heard = [m.content for m in await run.take_steering()]
        await run.ask_user("well?")
        await run.step()
        heard += [m.content for m in await run.take_steering()]
        return " ".join(heard)

    async def scenario() -> None:
        async with Host(asks_and_listens, store=MemoryStore(), settings=QUICK, clock=VirtualClock()) as host:
            session = host.session("s")
            receipt = await session.send("x")
            question = await first_question(session)
            await parked(host)
            steered = await session.send("left", policy="steer")
            assert (steered.disposition, steered.run_id) == ("steering", receipt.run_id)
            assert not host.live
            await session.answer(question.question_id, "go")
            assert answer(await session.wait(receipt.message_id)) == "left"
            assert (await session.wait(steered.message_id)).run_id == receipt.run_id
            check_story(await whole_log(host, "s"))
            check_entries(await session.transcript(), await whole_log(host, "s"))

    run_virtual(scenario())


@pytest.mark.parametrize("seeds", [8, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fate", ["refused", "lost"])
@pytest.mark.parametrize("name", ["patient", "present", "branching"])
def test_asking_parking_and_answering_bear_a_store_that_fails(name: str, fate: Any, seeds: int) -> None:
    def scenario_at(seed: int) -> Scenario:
        async def scenario() -> None:
            dice = random.Random(seed)
            left = 4

            def decide(verb: str) -> Any:
                nonlocal left
                if (
                    left
                    and verb in ("suspend", "park", "answer", "claim", "append_all", "restart")
                    and dice.random() < 0.4
                ):
                    left -= 1
                    return fate
                return "done"

            async with hosted(Unreliable(decide)) as host:  # type: ignore[arg-type]
                session = host.session("s")
                receipt = await session.send("x", agent=name)
                while (await session.message(receipt.message_id)).state == "taken":
                    for question in await session.questions():
                        try:
                            await say_yes(session, question)
                        except HoldfastError:
                            await asyncio.sleep(0.01)
                    await asyncio.sleep(0.02)
                assert (await session.wait(receipt.message_id)).state == "completed"
                left = 0
                await check_session(host, "s")

        return scenario

    for seed in range(seeds):
        explore(scenario_at(seed), schedules=3, seed=seed)


def test_a_suspended_plain_function_is_interrupted_by_a_drain_at_once_and_a_replayable_one_stays() -> None:
    async def scenario() -> None:
        store = MemoryStore()
        async with hosted(store) as host:
            receipts = {}
            for name in ("patient", "present"):
                receipts[name] = await host.session(name).send("x", agent=name)
                await first_question(host.session(name))
            report = await host.drain()
            assert report.interrupted == (receipts["present"].run_id,)
            assert report.elapsed_s < 1
        async with hosted(store) as host:
            settlement = await host.session("present").wait(receipts["present"].message_id)
            assert settlement.cause is not None
            assert (settlement.state, settlement.cause.kind) == ("interrupted", "shutdown")
            session = host.session("patient")
            assert (await session.info()).state == "suspended"
            assert not host.live
            await answer_all(session)
            assert (await session.wait(receipts["patient"].message_id)).state == "completed"
            with pytest.raises(RunInterrupted):
                answer(settlement)

    run_virtual(scenario())


MODELLED = Agent(
    name="patient", model=ScriptedModel([CallPart(name="careful", arguments={"text": "x"})]), tools=[careful]
)


@pytest.mark.parametrize("modelled_first", [True, False])
def test_a_parked_run_whose_agent_became_another_kind_of_agent_fails_and_keeps_what_it_did(
    modelled_first: bool,
) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        first, second = (MODELLED, patient) if modelled_first else (patient, MODELLED)
        async with Host(agents=[first], store=store, settings=QUICK, clock=VirtualClock()) as host:
            receipt = await host.session("s").send("x")
            question = await first_question(host.session("s"))
        async with Host(agents=[second, echo], store=store, settings=QUICK, clock=VirtualClock()) as host:
            session = host.session("s")
            await say_yes(session, question)
            settlement = await session.wait(receipt.message_id)
            assert settlement.state == "failed"
            assert settlement.error is not None
            assert ("no longer has a model" if modelled_first else "has a model now") in settlement.error
            assert [e.name for e in await session.transcript() if e.role == "tool_call"] == [
                "careful" if modelled_first else "effect"
            ]
            await check_session(host, "s")

    run_virtual(scenario())


@pytest.mark.parametrize("change", ["gone", "not replayable"])
def test_a_parked_run_whose_agent_cannot_go_on_any_more_fails_and_says_why(change: str) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        async with hosted(store) as host:
            receipt = await host.session("s").send("x", agent="patient")
            question = await first_question(host.session("s"))
        agents = [echo, replace(present, name="patient")] if change == "not replayable" else [echo]
        async with Host(agents=agents, store=store, settings=QUICK, clock=VirtualClock()) as host:
            session = host.session("s")
            await session.answer(question.question_id, "go")
            settlement = await session.wait(receipt.message_id)
            assert settlement.state == "failed"
            assert settlement.error is not None
            assert (
                "unknown agent 'patient'" if change == "gone" else "no longer declared replayable"
            ) in settlement.error
            assert settlement.text == "before "
            await check_session(host, "s")

    run_virtual(scenario())


@pytest.mark.parametrize("lasts_s", [3.0, 60.0])
def test_a_run_that_comes_back_while_the_store_cannot_be_read_goes_on_when_it_can(lasts_s: float) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        async with hosted(store) as host:
            session = host.session("s")
            receipt = await session.send("x", agent="patient")
            question = await first_question(session)
            await parked(host)
            read, store.run_events = store.run_events, broken  # type: ignore[method-assign]
            await session.answer(question.question_id, "go")
            await asyncio.sleep(lasts_s)
            assert (await session.message(receipt.message_id)).state == "taken"
            store.run_events = read  # type: ignore[method-assign]
            await say_yes(session, await first_question(session))
            while (await session.message(receipt.message_id)).state == "taken":
                for asked in await session.questions():
                    await say_yes(session, asked)
                await asyncio.sleep(0.1)
            assert (await session.wait(receipt.message_id)).state == "completed"
            await check_session(host, "s")

    async def broken(session: int, run_id: str) -> Any:
        raise StorageError("the disk is away")

    run_virtual(scenario())
