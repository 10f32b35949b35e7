"""Checks of the conformance suite for human-in-the-loop features: steering, rollback, suspended and unloaded runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from holdfast.errors import (
    AlreadyAnswered,
    AlreadySettled,
    CallMismatch,
    IllegalTransition,
    InvalidRequest,
    MailboxFull,
    SessionDeleted,
    StaleFence,
    UnknownQuestion,
    UnknownSession,
)
from holdfast.protocol.call_hash import hash_call
from holdfast.protocol.events import (
    MessageSteered,
    RunFinished,
    RunResumed,
    RunRolledBack,
    RunStarted,
    TextDelta,
    decode_event,
    encode_event,
)
from holdfast.protocol.messages import Answer, Decision, Entry, Question, RunView
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Answered, Claim, InterruptRequest, NotReady, Parked, Ready, RunCommit, Steered
from holdfast.testing.suites.store_driver import Check, Driver, MakeStore, interrupt_of, opened, refused

__all__ = ["PEOPLE_CHECKS"]

_CHECKS: list[Check] = []
_ENDINGS: Final[Sequence[tuple[str, Literal["completed", "failed", "interrupted"]]]] = (
    ("a", "completed"),
    ("b", "failed"),
    ("c", "interrupted"),
)


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def _question(question_id: str = "q1", *, at: float = 30.0, due_at: float = 100.0) -> Question:
    return Question(question_id=question_id, kind="question", text="which one?", asked_at=at, due_at=due_at)


def _approval(question_id: str = "a1", *, at: float = 30.0, due_at: float = 100.0) -> Question:
    question = Question(
        question_id=question_id, kind="approval", tool="pay", arguments={"eur": 5}, asked_at=at, due_at=due_at
    )
    return msgspec.structs.replace(question, call_hash=hash_call(question))  # as the store adds it


def _answer(
    question_id: str = "q1", *, decision: Decision = "answered", text: str = "both", at: float = 40.0, by: str = "p"
) -> Answer:
    return Answer(question_id=question_id, decision=decision, text=text, by=by, at=at)


async def _run(on: Driver, claim: Claim) -> RunView:
    run = await on.store.run(claim.lease.session, claim.lease.run_id)
    assert run is not None
    return run


async def _parked(on: Driver, *, key: str = "k") -> Claim:
    """Unload a run that waits for the answer to ``q1``, and return the run's claim, which is stale afterwards."""
    claim = await on.start(key=key)
    await on.store.suspend(claim.lease, _question())
    assert await on.store.park(claim.lease, at=35.0) == Parked(ready=False)
    return claim


@_check
async def an_approval_counts_for_the_call_that_was_shown_only(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.store.suspend(claim.lease, msgspec.structs.replace(_approval(), call_hash="forged"))
        [question] = await on.store.questions(claim.lease.session)
        assert question == _approval()
        for_another = msgspec.structs.replace(_answer("a1", decision="approved", text=""), call_hash="0" * 32)
        await refused(on.store.answer("p", "k", for_another), CallMismatch)
        assert await on.store.questions(claim.lease.session) == (question,), "it is still open"
        given = msgspec.structs.replace(for_another, call_hash=question.call_hash)
        assert (await on.store.answer("p", "k", given)).answer == given
        await refused(on.store.answer("p", "k", for_another), CallMismatch)
        assert (await on.store.answer("p", "k", given)).answer == given, "the same again has no effect"
        await on.commit(claim)


@_check
async def a_steering_message_is_given_to_the_run_it_is_aimed_at(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start("0", message_id="m0")
        session, run_id = claim.lease.session, claim.lease.run_id
        assert await on.store.steer(claim.lease, step=1, at=11.0) == Steered(messages=())
        sent = await on.send("left", policy="steer", message_id="m1")
        assert (sent.disposition, sent.run_id, sent.claim) == ("steering", run_id, None)
        await on.send("waits", message_id="m2")
        await on.send("right", policy="steer", message_id="m3")
        steered = await on.store.steer(claim.lease, step=2, at=12.0)
        assert [(m.message_id, m.content) for m in steered.messages] == [("m1", "left"), ("m3", "right")]
        assert [decode_event(event) for event in steered.events] == [
            MessageSteered(seq=event.seq, at=12.0, message_id=message_id, run_id=run_id, step=2)
            for event, message_id in zip(steered.events, ("m1", "m3"), strict=True)
        ]
        again = await on.store.steer(claim.lease, step=2, at=13.0)
        assert again == Steered(messages=()), "nothing is given twice"
        settled = await on.store.settlement(session, "m1")
        assert settled is not None
        assert (settled.state, settled.run_id) == ("taken", run_id)
        assert [item.message.message_id for item in await on.store.mailbox(session)] == ["m2"]
        assert (await _run(on, claim)).messages == ("m0", "m1", "m3")
        await refused(on.store.withdraw("p", "k", "m1", at=13.0), AlreadySettled)
        done = await on.commit(claim, text="done", next_run_id="r_next")
        assert [(s.message_id, s.state) for s in done.settled] == [
            ("m0", "completed"),
            ("m1", "completed"),
            ("m3", "completed"),
        ]
        assert done.claim is not None
        assert [m.message_id for m in done.claim.messages] == ["m2"]
        started = decode_event(done.events[-1])
        assert isinstance(started, RunStarted)
        assert started.messages == ("m2",), "the next run begins with its own"
        await refused(on.store.steer(claim.lease, step=3, at=14.0), StaleFence)
        journal = [event.kind for event in await on.store.run_events(session, run_id)]
        assert journal.count("message.steered") == 2


@_check
async def large_messages_that_wait_come_whole_and_have_a_bound(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start("x" * 5000)
        await on.send("y" * 5000, message_id="m1", policy="steer", mailbox_size=1)
        await on.send("z" * 5000, message_id="m2", mailbox_size=10_000)
        await refused(on.send("a", mailbox_size=10_000), MailboxFull)
        await on.send("", message_id="m3", mailbox_size=10_000)
        steered = (await on.store.steer(claim.lease, step=1, at=12.0)).messages
        assert [message.content for message in steered] == ["y" * 5000]
        done = await on.commit(claim, next_run_id="r2")
        assert done.claim is not None
        assert [message.content for message in done.claim.messages] == ["z" * 5000]
        again = await on.store.claim(done.claim.lease.session, run_id="r2", at=13.0)
        assert isinstance(again, Claim)
        assert again.messages == done.claim.messages, "a claim that is repeated has them, too"
        await on.send("b" * 5000, message_id="m4")
        await on.send("b" * 5000, message_id="m5")
        await on.store.withdraw("p", "k", "m4", at=14.0)
        stopped = await on.store.delete_session("p", "k", at=15.0, cause=Cause(kind="user", reason="", at=15.0))
        assert [message.content for message in stopped.withdrawn] == ["", "b" * 5000]


@_check
async def what_was_not_steered_waits_like_any_other(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.send("1", message_id="m1", policy="steer")
        await on.send("2", message_id="m2", policy="steer")
        settled, _ = await on.store.withdraw("p", "k", "m2", at=12.0)
        assert settled.state == "withdrawn"
        await refused(on.send(policy="steer", mailbox_limit=1), MailboxFull)
        done = await on.commit(claim, next_run_id="r2")
        assert done.claim is not None
        assert [m.message_id for m in done.claim.messages] == ["m1"]
        await on.send("3", message_id="m3", policy="steer")
        assert (await on.store.steer(done.claim.lease, step=1, at=13.0)).messages[0].message_id == "m3"
        await on.commit(done.claim)
        assert (await on.send(policy="steer")).disposition == "started", "an idle session takes it like any other"
        assert (await on.send(key="full", policy="steer", room=False)).disposition == "queued"


@_check
async def a_stopping_run_is_not_steered(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.send("1", message_id="m1", policy="steer")
        await on.interrupt()
        await on.send("2", message_id="m2", policy="steer")
        assert await on.store.steer(claim.lease, step=2, at=16.0) == Steered(messages=())
        done = await on.commit(claim, "interrupted", next_run_id="r2")
        assert done.claim is not None
        assert [m.message_id for m in done.claim.messages] == ["m1"], "it waits like any other"


@_check
async def steering_and_an_interrupt_go_in_one_order(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for steer_first in (True, False):
            key = str(steer_first)
            claim = await on.start(key=key)
            await on.send("1", key=key, message_id="m1", policy="steer")
            if steer_first:
                steering = on.store.steer(claim.lease, step=2, at=16.0)
                stopping = on.store.interrupt(interrupt_of(key=key))
            else:
                stopping = on.store.interrupt(interrupt_of(key=key))
                steering = on.store.steer(claim.lease, step=2, at=16.0)
            await stopping
            assert [m.message_id for m in (await steering).messages] == (["m1"] if steer_first else [])
            done = await on.commit(claim, "interrupted", next_run_id=on.fresh("r"))
            assert ("m1" in [s.message_id for s in done.settled]) == steer_first
            assert (done.claim is None) == steer_first, "it is settled with the run, or taken by the next: never lost"


@_check
async def a_rescued_run_keeps_what_steered_it(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start(message_id="m0")
        await on.send("1", message_id="m1", policy="steer")
        await on.store.steer(claim.lease, step=2, at=12.0)
        await on.send("2", message_id="m2", policy="steer")
        again = await on.store.claim(claim.lease.session, run_id=claim.lease.run_id, at=13.0)
        assert isinstance(again, Claim)
        started = decode_event(again.events[0])
        assert isinstance(started, RunStarted)
        assert started.messages == ("m0",), "the event repeats its messages"
    async with opened(make_store, at=2.0) as on:
        (rescued,) = await on.store.rescue(at=20.0)
        assert [m.message_id for m in rescued.messages] == ["m0", "m1"]
        steered = await on.store.steer(rescued.lease, step=3, at=21.0)
        assert [m.message_id for m in steered.messages] == ["m2"]
        done = await on.commit(rescued)
        assert [s.message_id for s in done.settled] == ["m0", "m1", "m2"]


@_check
async def a_rollback_takes_the_run_back(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        first = await on.start("0", message_id="m0")
        session = first.lease.session
        await on.commit(first, entries=[Entry(role="user", content="0"), Entry(role="assistant", content="hi")])
        claim = await on.start("1", message_id="m1")
        await on.send("left", policy="steer", message_id="m2")
        await on.store.steer(claim.lease, step=2, at=12.0)
        await on.send("waits", message_id="m3")
        sent = await on.send("not that", policy="rollback", message_id="m4")
        assert (sent.disposition, sent.interrupt) == ("rolling_back", claim.lease.run_id)
        assert [event.kind for event in sent.events] == ["message.accepted", "run.stopping"]
        run = await _run(on, claim)
        assert run.state == "stopping"
        assert run.cause is not None
        assert (run.cause.kind, run.cause.message_id) == ("rollback", "m4")
        done = await on.commit(
            claim,
            "interrupted",
            text="partly",
            entries=[Entry(role="user", content="1"), Entry(role="assistant", content="part", partial=True)],
            events=[encode_event(TextDelta(run_id=claim.lease.run_id, text="."))],
            not_undone=("pay",),
            next_run_id="r_next",
        )
        assert [event.kind for event in done.events] == [
            "text.delta",
            "run.rolled_back",
            "run.finished",
            "message.settled",
            "message.settled",
            "run.started",
        ]
        rolled_back, finished = decode_event(done.events[1]), decode_event(done.events[2])
        assert isinstance(rolled_back, RunRolledBack)
        assert rolled_back.not_undone == ("pay",)
        assert isinstance(finished, RunFinished)
        assert finished.status == "interrupted"
        assert [(s.message_id, s.state) for s in done.settled] == [("m1", "superseded"), ("m2", "superseded")]
        assert await on.store.settlement(session, "m2") == done.settled[1]
        assert [entry.content for entry in await on.store.transcript(session)] == ["0", "hi"]
        assert done.claim is not None
        assert [m.message_id for m in done.claim.messages] == ["m3", "m4"], "all that waits, newest last"
        assert (await on.store.commit_run(_same(claim))).settled == done.settled
        after = await on.commit(done.claim, entries=[Entry(role="assistant", content="2")])
        assert {s.state for s in after.settled} == {"completed"}, "the next run is not taken back"
    async with opened(make_store, at=2.0) as on:
        settled = await on.store.settlement(session, "m1")
        assert settled is not None
        assert settled.state == "superseded"
        assert [entry.content for entry in await on.store.transcript(session)] == ["0", "hi", "2"]


def _same(claim: Claim) -> RunCommit:
    return RunCommit(lease=claim.lease, status="interrupted", at=21.0)


@_check
async def a_rollback_before_the_commit_wins_whatever_the_run_says(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for key, status in _ENDINGS:
            for earlier in (False, True):
                key += "i" if earlier else ""
                claim = await on.start(key=key)
                if earlier:
                    await on.interrupt(key=key)
                sent = await on.send("again", key=key, policy="rollback")
                assert sent.disposition == "rolling_back"
                done = await on.commit(
                    claim, status, error="E", entries=[Entry(role="assistant", content="x")], replaces_history=earlier
                )
                finished = next(e for e in map(decode_event, done.events) if isinstance(e, RunFinished))
                assert finished.status == "interrupted"
                assert finished.cause is not None
                assert finished.cause.kind == ("user" if earlier else "rollback"), "the first cause wins"
                assert {s.state for s in done.settled} == {"superseded"}
                assert await on.store.transcript(claim.lease.session) == ()
                assert (await _run(on, claim)).state == "interrupted"
        claim = await on.start(key="z")
        await on.interrupt(key="z")
        cause = Cause(kind="rollback", at=16.0)
        await on.store.interrupt(InterruptRequest(principal="p", key="z", cause=cause, at=16.0))
    async with opened(make_store, at=2.0) as on:
        (rescued,) = await on.store.rescue(at=30.0)
        done = await on.commit(rescued)
        assert {s.state for s in done.settled} == {"superseded"}, "it is durable, whatever ends the run"


@_check
async def a_rollback_of_nothing_is_a_message(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start("0", policy="rollback")
        done = await on.commit(claim, entries=[Entry(role="user", content="0")])
        assert done.settled[0].state == "completed"
        await on.send("1", room=False, message_id="m1")
        sent = await on.send("2", policy="rollback", message_id="m2")
        assert sent.claim is not None
        assert [m.message_id for m in sent.claim.messages] == ["m1", "m2"]
        assert len(await on.store.transcript(claim.lease.session)) == 1, "what was committed before stays"


@_check
async def a_question_suspends_the_run_until_it_is_answered(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        session, run_id = claim.lease.session, claim.lease.run_id
        asked = await on.store.suspend(claim.lease, _question())
        assert [event.kind for event in asked.events] == ["run.suspended"]
        assert (await on.store.suspend(claim.lease, _question())).events == (), "a known question is not asked again"
        await on.store.suspend(claim.lease, _approval(at=31.0))
        assert list(await on.store.questions(session)) == [_question(), _approval(at=31.0)]
        run = await _run(on, claim)
        assert (run.state, run.questions) == ("suspended", (_question(), _approval(at=31.0)))
        found = await on.store.find_session("p", "k")
        assert found is not None
        assert found[1].state == "suspended"
        assert (await on.say(claim, "others continue", nth=1)).events
        assert (await on.send("waits")).disposition == "queued"
        first = await on.store.answer("p", "k", _answer())
        assert (first.run_id, first.answer, first.waiting, first.parked) == (run_id, _answer(), 1, False)
        resumed = decode_event(first.events[0])
        assert resumed == RunResumed(seq=first.events[0].seq, at=40.0, run_id=run_id, answer=_answer(), waiting=1)
        assert (await _run(on, claim)).state == "suspended"
        assert (await on.store.suspend(claim.lease, _question())).events == (), "also when it was answered"
        last = await on.store.answer("p", "k", _answer("a1", decision="approved", text=""))
        assert last.waiting == 0
        assert (await _run(on, claim)).state == "running"
        assert await on.store.questions(session) == ()
        assert await on.store.questions(999_999) == ()
        await on.commit(claim)
        kinds = [event.kind for event in await on.store.run_events(session, run_id)]
        assert kinds.count("run.suspended") == kinds.count("run.resumed") == 2


@_check
async def a_question_is_answered_once(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.store.suspend(claim.lease, _question())
        await on.store.suspend(claim.lease, _approval())
        await refused(on.store.answer("p", "missing", _answer()), UnknownSession)
        await refused(on.store.answer("q", "k", _answer()), UnknownSession)
        await refused(on.store.answer("p", "k", _answer("q9")), UnknownQuestion)
        await refused(on.store.answer("p", "k", _answer(decision="approved")), InvalidRequest)
        await refused(on.store.answer("p", "k", _answer("a1")), InvalidRequest)
        await refused(on.store.answer("p", "k", _answer(at=100.0)), AlreadyAnswered)
        before = await on.kinds(claim.lease.session)
        answers = await asyncio.gather(
            on.store.answer("p", "k", _answer(by="p")),
            on.store.answer("p", "k", _answer(by="q", at=41.0)),
            on.store.answer("p", "k", _answer(text="none")),
            return_exceptions=True,
        )
        first, second, third = answers
        assert isinstance(first, Answered)
        assert isinstance(second, Answered)
        assert isinstance(third, AlreadyAnswered)
        assert second.answer == first.answer == _answer(by="p")
        assert (second.events, second.waiting) == ((), 1)
        assert await on.kinds(claim.lease.session) == [*before, "run.resumed"]
        denied = await on.store.answer("p", "k", _answer("a1", decision="denied", text="too much"))
        await refused(on.store.answer("p", "k", _answer("a1", decision="approved", text="too much")), AlreadyAnswered)
        await on.commit(claim)
        await refused(on.store.answer("p", "k", denied.answer), UnknownQuestion)
        cause = Cause(kind="stop")
        await on.store.delete_session("p", "k", at=50.0, cause=cause)
        await refused(on.store.answer("p", "k", denied.answer), SessionDeleted)


@_check
async def questions_have_a_deadline(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claims = {}
        for n, key in enumerate(("a", "b", "c")):
            claims[key] = await on.start(key=key)
            await on.store.suspend(claims[key].lease, _question(due_at=100.0 - n))
        await on.store.suspend(claims["a"].lease, _approval(due_at=98.5))
        await on.store.suspend(claims["a"].lease, _question("never", due_at=0.0))

        async def due(*, before: float = 200.0, limit: int = 10) -> list[tuple[str, str]]:
            found = await on.store.due_questions(before=before, limit=limit)
            assert all(item.principal == "p" for item in found)
            return [(item.key, item.question.question_id) for item in found]

        assert await due() == [("c", "q1"), ("a", "a1"), ("b", "q1"), ("a", "q1")]
        assert await due(limit=2) == [("c", "q1"), ("a", "a1")]
        assert await due(before=98.0) == []
        assert await due(before=99.0) == [("c", "q1"), ("a", "a1")]
        expired = _answer(decision="expired", text="", by="", at=101.0)
        assert (await on.store.answer("p", "a", expired)).waiting == 2
        await refused(on.store.answer("p", "a", _answer()), AlreadyAnswered)
        assert await due() == [("c", "q1"), ("a", "a1"), ("b", "q1")]
        await on.interrupt(key="b")
        await on.commit(claims["c"], "interrupted")
        assert await due() == [("a", "a1")], "the questions of a stopping run do not wait"


@_check
async def a_stop_ends_the_questions(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.store.suspend(claim.lease, _question())
        sent = await on.send("no", policy="interrupt")
        assert sent.disposition == "interrupting"
        assert await on.store.questions(claim.lease.session) == ()
        await refused(on.store.answer("p", "k", _answer()), UnknownQuestion)
        await refused(on.store.suspend(claim.lease, _approval()), IllegalTransition)
        done = await on.commit(claim, "interrupted", next_run_id="r2")
        assert done.claim is not None
        assert done.settled[0].state == "interrupted"
        await refused(on.store.suspend(claim.lease, _approval()), StaleFence)


@_check
async def a_run_may_end_with_a_question_open(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for key, status in _ENDINGS:
            claim = await on.start(key=key)
            await on.store.suspend(claim.lease, _question())
            done = await on.commit(claim, status)
            assert done.settled[0].state == status
            assert await on.store.questions(claim.lease.session) == ()
            assert await on.store.due_questions(before=999.0, limit=9) == ()
            assert (await on.start(key=key)).questions == ()


@_check
async def a_parked_run_keeps_its_slot_and_has_no_holder(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        old = await _parked(on)
        session = old.lease.session
        assert await on.store.park(old.lease, at=36.0) == Parked(ready=False), "repeated: the same answer"
        await refused(on.say(old, "late"), StaleFence)
        await refused(on.commit(old), StaleFence)
        await refused(on.store.suspend(old.lease, _approval()), StaleFence)
        await refused(on.store.steer(old.lease, step=2, at=36.0), StaleFence)
        assert (await on.send("waits")).disposition == "queued"
        busy = await on.store.claim(session, run_id="r_new", at=37.0)
        assert isinstance(busy, NotReady)
        assert busy.busy
        assert await on.store.ready(limit=9) == ()
        assert [d.question for d in await on.store.due_questions(before=101.0, limit=9)] == [_question()]
    async with opened(make_store, at=2.0) as on:
        assert await on.store.rescue(at=50.0) == (), "it has no holder to lose"
        assert list(await on.store.questions(session)) == [_question()]
        assert (await _run(on, old)).state == "suspended"
        answered = await on.store.answer("p", "k", _answer())
        assert (answered.parked, answered.waiting) == (True, 0)
        ready = Ready(session=session, principal="p", key="k", agent="demo", not_before=0.0)
        assert list(await on.store.ready(limit=9)) == [ready]
        claim = await on.store.claim(session, run_id="r_new", at=51.0)
        assert isinstance(claim, Claim)
        assert (claim.lease.run_id, claim.resumed, claim.events) == (old.lease.run_id, True, ())
        assert (claim.attempt, claim.interrupt, claim.questions) == (1, None, ())
        assert claim.messages == old.messages
        assert claim.started_seq == old.started_seq
        assert await on.store.claim(session, run_id="r_new", at=52.0) == claim, "repeated: the same claim"
        assert isinstance(await on.store.claim(session, run_id="r_other", at=52.0), NotReady)
        assert await on.store.ready(limit=9) == ()
        assert (await on.say(claim, "more", nth=1)).events
        done = await on.commit(claim, next_run_id="r_next")
        assert done.claim is not None
        await refused(on.commit(old), StaleFence)


@_check
async def the_last_answer_and_the_parking_meet_in_any_order(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for n in range(4):
            key = f"k{n}"
            claim = await on.start(key=key)
            await on.store.suspend(claim.lease, _question())
            if n % 2:
                answering = on.store.answer("p", key, _answer())
                parking = on.store.park(claim.lease, at=40.0)
            else:
                parking = on.store.park(claim.lease, at=40.0)
                answering = on.store.answer("p", key, _answer())
            answered, parked = await answering, await parking
            assert answered.waiting == 0
            assert answered.parked != parked.ready, "exactly one of the two learns that the run may continue"
            assert [r.key for r in await on.store.ready(limit=9)] == [key]
            resumed = await on.store.claim(claim.lease.session, run_id="r_new", at=41.0)
            assert isinstance(resumed, Claim)
            assert resumed.resumed
            await on.commit(resumed)


@_check
async def a_stop_of_a_parked_run_is_answered_by_a_claim(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for key in ("interrupt", "rollback", "stop", "delete"):
            old = await _parked(on, key=key)
            cause = Cause(kind="stop", reason="enough", at=50.0)
            stop = interrupt_of(key=key, at=50.0)
            match key:
                case "interrupt":
                    assert (await on.store.interrupt(stop)).run_id == old.lease.run_id
                case "rollback":
                    sent = await on.send("again", key=key, policy="rollback")
                    assert sent.interrupt == old.lease.run_id
                case "stop":
                    assert (await on.store.stop_session(stop)).run_id == old.lease.run_id
                case _:
                    await on.store.delete_session("p", key, at=50.0, cause=cause)
            assert key in [r.key for r in await on.store.ready(limit=9)]
            claim = await on.store.claim(old.lease.session, run_id="r_new", at=51.0)
            assert isinstance(claim, Claim)
            assert claim.lease.run_id == old.lease.run_id
            assert claim.interrupt is not None
            assert claim.questions == ()
            done = await on.commit(claim, "interrupted", entries=[Entry(role="user", content="x")])
            assert [s.state for s in done.settled] == ["superseded" if key == "rollback" else "interrupted"]
            if key == "delete":
                assert await on.store.prune(events_before=0.0, tombstones_before=99.0, idempotency_before=0.0) == 1


@_check
async def a_suspended_run_whose_holder_is_gone_is_rescued(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.store.suspend(claim.lease, _question())
        await on.store.suspend(claim.lease, _approval())
        await on.store.answer("p", "k", _answer("a1", decision="approved", text=""))
    async with opened(make_store, at=2.0) as on:
        (rescued,) = await on.store.rescue(at=50.0)
        assert rescued.questions == (_question(),)
        assert (rescued.attempt, rescued.resumed) == (2, False)
        again = await on.store.restart(rescued.lease, at=51.0, discard_from=7)
        assert again.events[0].body.count(b'"discard_from":7') == 1
        assert (await _run(on, rescued)).state == "suspended"
        assert (await on.store.suspend(rescued.lease, _approval())).events == (), "its answer is in the journal"
        assert await on.store.park(rescued.lease, at=52.0) == Parked(ready=False)
        assert (await on.store.answer("p", "k", _answer())).parked
        resumed = await on.store.claim(rescued.lease.session, run_id="r_new", at=53.0)
        assert isinstance(resumed, Claim)
        assert resumed.attempt == 2
    async with opened(make_store, at=3.0) as on:
        (rescued,) = await on.store.rescue(at=60.0)
        assert (rescued.attempt, rescued.resumed) == (3, False), "what was resumed has a holder to lose"
        repeated = await on.store.claim(rescued.lease.session, run_id=rescued.lease.run_id, at=61.0)
        assert isinstance(repeated, Claim)
        assert (repeated.lease, repeated.resumed) == (rescued.lease, False)


@_check
async def text_that_no_json_can_carry_is_written_out_in_questions(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        odd = Question(question_id="q\ud800", kind="approval", text="\ud800", arguments=("\udfff", 1), asked_at=1.0)
        await on.store.suspend(claim.lease, odd)
        (asked,) = await on.store.questions(claim.lease.session)
        assert (asked.text, asked.arguments) == ("\\ud800", ["\\udfff", 1])
        given = await on.store.answer("p", "k", _answer(asked.question_id, decision="denied", text="\ud800"))
        assert given.answer.text == "\\ud800"


PEOPLE_CHECKS: Sequence[Check] = tuple(_CHECKS)
