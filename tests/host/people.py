"""Agents that wait for people, agents that take what is steered, and what their logs must say."""

from __future__ import annotations

import asyncio
import contextlib
import functools

from holdfast import Host, Run, agent
from holdfast.errors import HoldfastError, RunClosed, UnknownQuestion
from holdfast.host.session import Session
from holdfast.protocol.events import (
    Event,
    MessageAccepted,
    MessageSettled,
    MessageSteered,
    RunFinished,
    RunResumed,
    RunRolledBack,
    RunStarted,
    RunSuspended,
    decode_event,
)
from holdfast.protocol.messages import Entry, Question
from holdfast.settings import Settings
from holdfast.storage.port import Store
from holdfast.testing import VirtualClock

QUICK = Settings(
    grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0, question_ttl_s=3600.0
)
CALLED: list[str] = []
WOKEN: list[str] = []
"""Runs that went on while they were leaving the memory."""


async def effect(name: str) -> str:
    """Leaves a trace each time that it is really called."""
    await asyncio.sleep(0)
    CALLED.append(name)
    return f"did {name}"


async def asked(run: Run) -> str:
    """Does something, asks, does more, asks once more, and says what it heard."""
    await run.emit("before ")
    await run.call(effect, "first")
    try:
        one = await run.ask_user("shall I?")
        await run.call(effect, "second")
        two = await run.ask_user("sure?")
    except RunClosed:
        WOKEN.append(run.run_id)
        raise
    return f"{one.decision} {one.text}, {two.decision} {two.text}"


@agent(replayable=True)
async def patient(run: Run) -> str:
    """Leaves the memory while it waits."""
    return await asked(run)


@agent
async def present(run: Run) -> str:
    """Waits in memory."""
    return await asked(run)


@agent(replayable=True)
async def branching(run: Run) -> str:
    """Asks two people at once, while a third branch works."""

    async def ask(text: str) -> str:
        answer = await run.ask_user(text)
        try:
            return str(await run.call(effect, f"{text} {answer.decision}"))
        except RunClosed:
            WOKEN.append(run.run_id)
            raise

    async def work() -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        return str(await run.call(effect, "work", idempotent=True))

    return ", ".join(await run.parallel(functools.partial(ask, "a"), functools.partial(ask, "b"), work))


@agent(replayable=True)
async def child(run: Run) -> str:
    """Asks, and says something when it is stopped."""
    try:
        return (await run.ask_user("may I?")).text
    finally:
        with contextlib.suppress(RunClosed):
            await run.emit("last words")


@agent(replayable=True)
async def family(run: Run) -> str:
    """Has a child that asks."""
    return await run.delegate(child, "ask")


@agent
async def echo(run: Run) -> str:
    """Says what it was told."""
    return run.text


@agent
async def steerable(run: Run) -> str:
    """Takes what is steered to it, between its steps."""
    heard = [run.text]
    for _ in range(4):
        await run.step()
        heard += [message.content for message in await run.take_steering()]
        await asyncio.sleep(0)
    return " ".join(heard)


@agent
async def listening(run: Run) -> str:
    """Waits until something is steered to it."""
    heard = [run.text]
    while len(heard) == 1:
        await run.step()
        heard += [message.content for message in await run.take_steering()]
        await asyncio.sleep(0.01)
    return " ".join(heard)


@agent
async def stumbling(run: Run) -> str:
    """Takes what is steered to it, calls, and fails."""
    await run.step()
    await run.take_steering()
    await run.call(effect, "half")
    await run.step()
    await run.take_steering()
    raise ValueError("no")


@agent
async def stubborn(run: Run) -> None:
    """Calls, and never ends by itself."""
    await run.emit("half")
    await run.call(effect, "half")
    try:
        await asyncio.sleep(1e9)
    finally:
        await asyncio.sleep(0.01)


AGENTS = (patient, present, branching, family, echo, steerable, listening, stumbling, stubborn)


def hosted(store: Store, *, settings: Settings = QUICK) -> Host:
    """A host with these agents, on a virtual clock."""
    return Host(agents=AGENTS, store=store, settings=settings, clock=VirtualClock())


async def answer_all(session: Session, *, rounds: int = 50) -> None:
    """Answer whatever is asked, until the session has nothing left to do."""
    for _ in range(rounds):
        view = await session.info()
        if view.state in ("idle", "deleted") and not view.waiting:
            return
        for question in await session.questions():
            await say_yes(session, question)
        await asyncio.sleep(0.05)
    raise AssertionError("the session does not come to its end")


async def say_yes(session: Session, question: Question) -> None:
    """Answer a question that may be gone by now."""
    try:
        if question.kind == "question":
            await session.answer(question.question_id, "yes")
        else:
            await session.approve(question)
    except UnknownQuestion:
        pass


async def whole_log(host: Host, key: str) -> list[Event]:
    """All events of a session."""
    number = (await host.session(key).info()).number
    return [decode_event(event) for event in await host.store.read_events(number, after=0, limit=100_000)]


def check_story(events: list[Event], *, open_at_the_end: bool = False) -> None:
    """What holds for every log: one run at a time, every message settled once by the run that took it, every question
    asked once and answered at most once, nothing of a run after its end."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    on: str | None = None
    taken: dict[str, str] = {}
    accepted: list[str] = []
    settled: dict[str, str] = {}
    rolled_back: set[str] = set()
    questions: dict[str, str] = {}
    answered: set[str] = set()
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
            case MessageSteered(message_id=message_id, run_id=run_id):
                assert on == run_id, "steered into a run that is not on"
                assert message_id not in taken, "a message taken twice"
                taken[message_id] = run_id
            case RunSuspended(run_id=run_id, question=question):
                assert on == run_id
                assert question.question_id not in questions, "a question asked twice"
                questions[question.question_id] = run_id
            case RunResumed(run_id=run_id, answer=answer):
                assert on == run_id == questions[answer.question_id]
                assert answer.question_id not in answered, "a question answered twice"
                answered.add(answer.question_id)
            case RunRolledBack(run_id=run_id):
                assert on == run_id
                rolled_back.add(run_id)
            case RunFinished(run_id=run_id, status=status):
                assert on == run_id, "a run freed a slot that was not its own"
                assert status == "interrupted" or run_id not in rolled_back
                on = None
            case MessageSettled(message_id=message_id, run_id=settled_by, state=state):
                assert message_id not in settled, "a message settled twice"
                assert state == "withdrawn" or taken[message_id] == settled_by
                assert (state == "superseded") == (settled_by in rolled_back)
                settled[message_id] = state
            case _:
                run_of = getattr(event, "run_id", None)
                assert run_of is None or on is None or run_of.startswith(on), "a run spoke while another was on"
    if not open_at_the_end:
        assert set(accepted) == set(settled), "a message was lost"
        assert on is None


def check_entries(entries: list[Entry], events: list[Event]) -> None:
    """Each call has exactly one result, after it; the messages of every run that counts stand there exactly once."""
    open_calls: set[str | None] = set()
    for entry in entries:
        if entry.role == "tool_call":
            open_calls.add(entry.call_id)
        elif entry.role == "tool_result":
            open_calls.remove(entry.call_id)
    assert not open_calls, "a call without a result"
    states = {event.message_id: event.state for event in events if isinstance(event, MessageSettled)}
    counted = sorted(m for m, state in states.items() if state not in ("withdrawn", "superseded"))
    said = sorted(entry.message_id or "" for entry in entries if entry.role == "user")
    assert said == counted, "a message is missing in the transcript, or stands there twice"


async def check_session(host: Host, key: str) -> list[Event]:
    """The session is idle and its log and transcript are whole; a next run works. Gives the log before that run."""
    session = host.session(key)
    await answer_all(session)
    events = await whole_log(host, key)
    check_story(events)
    check_entries(await session.transcript(), events)
    try:
        assert await session.ask("next", agent="echo") == "next"
    except HoldfastError as error:
        raise AssertionError(f"the next run does not work: {error}") from error
    for _ in range(50):
        if not host.live and not host.admission.statistics().running:
            break
        await asyncio.sleep(0.1)  # a claim that failed is asked again, on its place
    assert not host.live
    assert host.admission.statistics().running == 0
    assert not WOKEN, "a run that leaves the memory went on"
    broken = {number: count for number, count in host.statistics().promises.items() if count.broken}
    assert not broken, broken
    return events
