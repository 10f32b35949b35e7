"""Conformance suite for the store port: run it on your own store.

With pytest::

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_my_store_conforms(check, tmp_path):
        run_store_check(check, lambda: MyStore(tmp_path))

A check is called with a function that returns a store object. All objects that the function returns must share the same
data; if the data lives in the object itself, the function may return the same object each time. A check may open the
store several times, and raises `AssertionError` if the store breaks the rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Literal

from holdfast.errors import (
    AlreadySettled,
    IdempotencyMismatch,
    InvalidRequest,
    LimitExceeded,
    MailboxFull,
    SessionBusy,
    StaleFence,
    StorageError,
    UnknownMessage,
    UnknownPolicy,
    UnknownSession,
)
from holdfast.protocol.events import RunFinished, TextDelta, decode_event, encode_event
from holdfast.protocol.messages import Entry, Settlement, Usage
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.storage.port import Appended, Claim, Lease, NotReady, RunCommit, SendResult
from holdfast.testing.suites.check_runner import run_check
from holdfast.testing.suites.store_agents import AGENT_CHECKS
from holdfast.testing.suites.store_driver import Check, MakeStore, interrupt_of, opened, refused
from holdfast.testing.suites.store_grants import GRANT_CHECKS
from holdfast.testing.suites.store_history import HISTORY_CHECKS
from holdfast.testing.suites.store_housekeeping import HOUSEKEEPING_CHECKS
from holdfast.testing.suites.store_packs import PACK_CHECKS
from holdfast.testing.suites.store_people import PEOPLE_CHECKS
from holdfast.testing.suites.store_schedules import SCHEDULE_CHECKS

__all__ = ["STORE_CHECKS", "run_store_check"]

_CHECKS: list[Check] = []


def run_store_check(check: Check, make_store: MakeStore) -> None:
    """Run one check on a new event loop, for at most 30 seconds.

    Raises:
        AssertionError: if the store breaks a rule of the port; notes on the error name the rule and the last method
            that was called.
        TimeoutError: if the check takes longer.
    """
    run_check(check, make_store, port="holdfast/storage/port.py")


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


@_check
async def a_message_on_an_idle_session_starts_a_run(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        result = await on.send("hello\0wörld", key="odd key/\0", run_id="r1", message_id="m1", at=5.0)
        claim = result.claim
        assert claim is not None
        assert (result.disposition, result.seq, result.run_id) == ("started", 1, "r1")
        assert claim.lease.run_id == "r1"
        assert claim.lease.session == result.session
        assert (claim.attempt, claim.agent, claim.principal, claim.key) == (1, "demo", "p", "odd key/\0")
        assert [message.content for message in claim.messages] == ["hello\0wörld"]
        assert claim.started_seq == 2
        assert claim.number == result.number
        assert claim.interrupt is None
        assert [event.kind for event in result.events] == ["message.accepted", "run.started"]
        assert list(claim.events) == list(result.events[1:])
        assert await on.log(result.session) == list(result.events)
        found = await on.store.find_session("p", "odd key/\0")
        assert found is not None
        assert found[0] == result.session
        view = found[1]
        assert (view.state, view.seq, view.waiting, view.run_id, view.number) == ("running", 2, 0, "r1", result.number)
        run = await on.store.run(result.session, "r1")
        assert run is not None
        assert (run.state, run.messages, run.started_at) == ("running", ("m1",), 5.0)
        assert await on.store.settlement(result.session, "m1") == Settlement(
            message_id="m1", state="taken", run_id="r1"
        )


@_check
async def a_commit_writes_everything_and_frees_the_slot(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start(message_id="m1")
        session, run_id = claim.lease.session, claim.lease.run_id
        await on.say(claim, "he", "llo")
        done = await on.commit(
            claim,
            text="hello",
            at=30.0,
            usage=Usage(steps=1),
            events=[encode_event(TextDelta(run_id=run_id, text="!"))],
            entries=[Entry(role="user", content="hi", message_id="m1"), Entry(role="assistant", content="hello")],
        )
        assert [event.kind for event in done.events] == ["text.delta", "run.finished", "message.settled"]
        assert [s.state for s in done.settled] == ["completed"]
        assert done.settled[0].text == "hello"
        assert done.claim is None
        assert done.waiting == 0
        finished = decode_event(done.events[1])
        assert isinstance(finished, RunFinished)
        assert finished.text == "hello"
        assert finished.usage.steps == 1
        assert (await on.log(session))[-3:] == list(done.events)
        assert await on.store.settlement(session, "m1") == done.settled[0]
        run = await on.store.run(session, run_id)
        assert run is not None
        assert (run.state, run.ended_at, run.text) == ("completed", 30.0, "hello")
        assert await on.store.runs(session) == (run,)
        entries = await on.store.transcript(session)
        assert [(entry.n, entry.role) for entry in entries] == [(1, "user"), (2, "assistant")]
        assert entries[0].message_id == "m1"
        assert await on.store.transcript(session, after=1) == entries[1:]
        assert await on.store.transcript(session, limit=1) == entries[:1]
        found = await on.store.find_session("p", "k")
        assert found is not None
        assert found[1].state == "idle"
        assert found[1].run_id is None
        again = await on.start("next")
        assert again.lease.fence > claim.lease.fence
        assert (await on.log(session))[-1].kind == "run.started"


@_check
async def one_run_at_a_time_takes_the_mailbox_in_order(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start("0")
        session = claim.lease.session
        results = await asyncio.gather(*(on.send(str(n)) for n in range(1, 6)))
        assert [r.disposition for r in results] == ["queued"] * 5
        assert all(r.run_id == claim.lease.run_id and r.claim is None for r in results)
        items = await on.store.mailbox(session)
        assert [item.message.content for item in items] == ["1", "2", "3", "4", "5"]
        assert {item.target_run_id for item in items} == {claim.lease.run_id}
        assert isinstance(await on.store.claim(session, run_id="r_other", at=11.0), NotReady)
        order: list[str] = []
        for n in range(5):
            done = await on.commit(claim, next_run_id=f"r_next_{n}")
            assert done.claim is not None, "what waits runs next"
            assert done.events[-1] == done.claim.events[0]
            assert done.events[-1].kind == "run.started"
            assert done.waiting == 4 - n
            claim = done.claim
            order.extend(message.content for message in claim.messages)
        assert order == ["1", "2", "3", "4", "5"]
        done = await on.commit(claim, next_run_id="r_last")
        assert done.claim is None
        assert done.waiting == 0
        assert [run.run_id for run in await on.store.runs(session, limit=2)] == ["r_next_4", "r_next_3"]
        await on.log(session)


@_check
async def without_room_a_message_waits_and_is_ready(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        second = await on.send(key="b", room=False, at=12.0)
        first = await on.send(key="a", room=False, at=11.0, agent="other")
        assert (first.disposition, first.run_id, first.claim) == ("queued", None, None)
        ready = await on.store.ready(limit=10)
        assert [(r.session, r.key, r.agent) for r in ready] == [
            (first.session, "a", "other"),
            (second.session, "b", "demo"),
        ]
        assert len(await on.store.ready(limit=1)) == 1
        queued = await on.send(key="a", at=13.0)
        assert queued.disposition == "queued", "messages that wait are not overtaken"
        claim = await on.store.claim(first.session, run_id="r1", at=14.0)
        assert isinstance(claim, Claim)
        assert [m.seq for m in claim.messages] == [first.seq]
        assert [r.session for r in await on.store.ready(limit=10)] == [second.session]
        done = await on.commit(claim)
        assert done.claim is None
        assert done.waiting == 1
        assert {r.session for r in await on.store.ready(limit=10)} == {first.session, second.session}
        await refused(on.store.claim(999_999, run_id="r", at=1.0), UnknownSession)


@_check
async def a_repeated_claim_is_the_same_claim(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        sent = await on.send(room=False)
        claim = await on.store.claim(sent.session, run_id="r1", at=11.0)
        assert isinstance(claim, Claim)
        assert await on.store.claim(sent.session, run_id="r1", at=12.0) == claim
        busy = await on.store.claim(sent.session, run_id="r2", at=12.0)
        assert isinstance(busy, NotReady)
        assert busy.busy
        await on.commit(claim)
        await on.send(room=False)
        late = await on.store.claim(sent.session, run_id="r1", at=13.0)
        assert isinstance(late, NotReady)
        assert not late.busy
        assert late.waiting == 1, "a run id is never used twice"
        assert (await on.kinds(sent.session)).count("run.started") == 1


@_check
async def an_idempotency_key_is_accepted_once(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        first = await on.send(idempotency_key="i\0", body_hash=b"h1", message_id="m1")
        assert first.claim is not None
        again = await on.send(idempotency_key="i\0", body_hash=b"h1", mailbox_limit=0)
        assert (again.disposition, again.message_id, again.seq) == ("duplicate", "m1", first.seq)
        assert again.run_id == first.run_id
        assert again.claim is None
        assert again.events == ()
        await refused(on.send(idempotency_key="i\0", body_hash=b"h2"), IdempotencyMismatch)
        other = await on.send(key="other", idempotency_key="i\0", body_hash=b"h2")
        assert other.disposition == "started", "keys count per session"
        await on.send(principal="q", room=False)
        theirs = await on.send(principal="q", idempotency_key="i\0", body_hash=b"h1", room=False)
        assert theirs.disposition == "queued", "and per principal, in a session that was there before too"
        await on.commit(first.claim)
        again = await on.send(idempotency_key="i\0", body_hash=b"h1")
        assert (again.disposition, again.message_id) == ("duplicate", "m1")
        both = await asyncio.gather(*(on.send(idempotency_key="j", body_hash=b"h") for _ in range(5)))
        assert sorted(r.disposition for r in both) == ["duplicate"] * 4 + ["started"]
        assert (await on.store.info()).duplicates_prevented == 6
    async with opened(make_store, at=2.0) as on:
        again = await on.send(idempotency_key="i\0", body_hash=b"h1")
        assert (again.disposition, again.message_id) == ("duplicate", "m1"), "also after a restart"


@_check
async def a_refusal_writes_nothing(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await refused(on.send(policy="nonsense"), UnknownPolicy)
        await refused(on.send(session_limit=0), LimitExceeded)
        assert await on.store.find_session("p", "k") is None
        assert await on.store.sessions(principal=None, limit=10) == ()
        claim = await on.start()
        session = claim.lease.session
        for n in range(2):
            await on.send(str(n), mailbox_limit=2)
        before = await on.log(session)
        for policy in ("queue", "collect", "interrupt"):
            await refused(on.send(policy=policy, mailbox_limit=2, agent="other"), MailboxFull)
        await refused(on.send(policy="reject"), SessionBusy)
        await refused(on.send(key="more", session_limit=1), LimitExceeded)
        assert await on.log(session) == before
        assert len(await on.store.mailbox(session)) == 2
        found = await on.store.find_session("p", "k")
        assert found is not None
        assert found[1].agent == "demo"
        assert found[1].waiting == 2


@_check
async def a_used_message_id_is_refused_alone(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start(message_id="m1")
        bad = on.send(message_id="m1")
        good = on.send("fine", key="other", message_id="m1")
        await refused(bad, StorageError)
        assert (await good).disposition == "started"
        assert len(await on.log(claim.lease.session)) == 2


@_check
async def reject_is_decided_with_the_claim(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        answers = await asyncio.gather(*(on.send(policy="reject") for _ in range(20)), return_exceptions=True)
        started = [a for a in answers if isinstance(a, SendResult)]
        assert len(started) == 1
        assert started[0].disposition == "started"
        assert sum(isinstance(a, SessionBusy) for a in answers) == 19
        assert len(await on.log(started[0].session)) == 2


@_check
async def collect_joins_what_comes_close_together(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        first = await on.send("a", policy="collect", at=10.0, quiet_s=2.0, max_wait_s=5.0)
        assert (first.disposition, first.not_before) == ("collecting", 12.0)
        second = await on.send("b", policy="collect", at=11.5, quiet_s=2.0, max_wait_s=5.0)
        assert second.not_before == 13.5
        third = await on.send("c", policy="collect", at=13.4, quiet_s=2.0, max_wait_s=5.0)
        assert third.not_before == 15.0, "no later than max_wait_s after the first"
        await on.send("d", policy="queue", at=13.5)
        await on.send("e", policy="collect", at=13.6, quiet_s=9.0, max_wait_s=9.0)
        session = first.session
        early = await on.store.claim(session, run_id="r1", at=14.0)
        assert isinstance(early, NotReady)
        assert (early.waiting, early.not_before) == (5, 15.0)
        assert [r.not_before for r in await on.store.ready(limit=1)] == [15.0]
        claim = await on.store.claim(session, run_id="r1", at=15.0)
        assert isinstance(claim, Claim)
        assert [m.content for m in claim.messages] == ["a", "b", "c"]
        done = await on.commit(claim, at=16.0, next_run_id="r2")
        assert len(done.settled) == 3
        assert done.claim is not None
        assert [m.content for m in done.claim.messages] == ["d"]
        done = await on.commit(done.claim, at=17.0, next_run_id="r3")
        assert done.claim is None
        assert (done.waiting, done.not_before) == (1, 22.6)


@_check
async def interrupt_policy_stops_the_run_and_then_takes_everything(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start("0")
        await on.send("1")
        await on.send("2", policy="collect", quiet_s=1000.0, max_wait_s=1000.0)
        sent = await on.send("3", policy="interrupt", message_id="m3", at=11.0)
        assert (sent.disposition, sent.interrupt, sent.run_id) == (
            "interrupting",
            claim.lease.run_id,
            claim.lease.run_id,
        )
        assert [event.kind for event in sent.events] == ["message.accepted", "run.stopping"]
        again = await on.send("4", policy="interrupt")
        assert again.disposition == "interrupting"
        assert [event.kind for event in again.events] == ["message.accepted"], "an interrupt is recorded once"
        run = await on.store.run(claim.lease.session, claim.lease.run_id)
        assert run is not None
        assert run.state == "stopping"
        assert run.cause is not None
        assert (run.cause.kind, run.cause.message_id) == ("message", "m3")
        done = await on.commit(claim, "interrupted", text="half", next_run_id="r2")
        assert done.settled[0].state == "interrupted"
        assert done.settled[0].cause == run.cause
        assert done.claim is not None
        assert [m.content for m in done.claim.messages] == ["1", "2", "3", "4"]
        assert done.claim.interrupt is None
        done = await on.commit(done.claim)
        assert len(done.settled) == 4
        waits = await on.send("5", policy="collect", quiet_s=1000.0, max_wait_s=1000.0)
        swept = await on.send("6", policy="interrupt")
        assert swept.disposition == "started"
        assert swept.claim is not None
        assert [m.content for m in swept.claim.messages] == ["5", "6"]
        assert waits.session == swept.session
        assert await on.store.mailbox(waits.session) == ()
        assert await on.store.ready(limit=10) == ()


@_check
async def an_interrupt_is_durable_and_aimed_at_one_run(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await refused(on.interrupt(), UnknownSession)
        claim = await on.start()
        hit = await on.interrupt(run_id=claim.lease.run_id)
        assert hit.run_id == claim.lease.run_id
        assert [e.kind for e in hit.events] == ["run.stopping"]
        again = await on.interrupt(reason="really", at=16.0)
        assert again.run_id == claim.lease.run_id
        assert again.events == ()
        run = await on.store.run(claim.lease.session, claim.lease.run_id)
        assert run is not None
        assert run.cause is not None
        assert run.cause.reason == "enough", "the first cause wins"
        await on.commit(claim, "interrupted")
        next_claim = await on.start("next")
        late = await on.interrupt(run_id=claim.lease.run_id)
        assert late.run_id is None
        assert late.events == (), "a run that has ended cannot be hit any more"
        await on.commit(next_claim)
        assert (await on.interrupt()).run_id is None
        assert (await on.kinds(claim.lease.session)).count("run.stopping") == 1


@_check
async def how_a_run_ends_follows_the_state_table(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        expected: list[tuple[bool, Literal["completed", "failed", "interrupted"], str]] = [
            (False, "completed", "completed"),
            (False, "failed", "failed"),
            (False, "interrupted", "interrupted"),
            (True, "completed", "completed"),
            (True, "failed", "interrupted"),
            (True, "interrupted", "interrupted"),
        ]
        for stopping, status, state in expected:
            claim = await on.start()
            if stopping:
                await on.interrupt()
            receipt = StopReceipt(scope="run", cause=Cause(kind="user"))
            done = await on.commit(claim, status, error="ValueError: no", receipt=receipt)
            assert [s.state for s in done.settled] == [state], (stopping, status)
            run = await on.store.run(claim.lease.session, claim.lease.run_id)
            assert run is not None
            assert (run.state, run.error, run.receipt) == (state, "ValueError: no", receipt)
            finished = decode_event(done.events[0])
            assert isinstance(finished, RunFinished)
            assert finished.status == state
            if stopping and state == "interrupted":
                assert finished.cause is not None
                assert finished.cause.reason == "enough"


@_check
async def a_repeated_append_or_commit_has_no_second_effect(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.send("waits")
        first = await on.say(claim, "a", "b", nth=1)
        assert await on.say(claim, "a", "b", nth=1) == first
        await on.send("between")
        assert await on.say(claim, "a", "b", nth=1) == first
        second = await on.say(claim, "c", nth=2)
        assert second.events[0].seq == first.events[-1].seq + 2
        await refused(on.say(claim, "e", nth=4), InvalidRequest)
        assert (await on.say(claim)).events == ()
        await refused(on.store.append(claim.lease, [("text.delta", b'{\n"x":1}')]), InvalidRequest)
        done = await on.commit(claim, text="x", next_run_id="r2")
        log = await on.log(claim.lease.session)
        assert await on.commit(claim, text="x", next_run_id="r3") == done
        await on.say(done.claim or claim, "d")
        assert (await on.commit(claim, text="x")).events == done.events
        assert (await on.log(claim.lease.session))[:-1] == log
        assert done.claim is not None
        await on.commit(done.claim)
        later = await on.commit(claim, text="x")
        assert later.claim is None
        assert later.settled == done.settled
        assert len(await on.store.runs(claim.lease.session)) == 2


@_check
async def a_stale_lease_writes_nothing(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.commit(claim)
        await on.start("next")
        log = await on.log(claim.lease.session)
        lease = claim.lease
        for stale in (lease, Lease(lease.session, "r_unknown", 1), Lease(999, "r", 1)):
            events = [encode_event(TextDelta(run_id="r", text="late"))]
            await refused(on.store.append(stale, events), StaleFence)
            await refused(on.store.restart(stale, at=20.0), StaleFence)
            if stale is not lease:
                commit = RunCommit(lease=stale, status="completed", at=20.0, entries=[Entry(role="user", content="x")])
                await refused(on.store.commit_run(commit), StaleFence)
        wrong_fence = Lease(lease.session, lease.run_id, lease.fence + 7)
        await refused(on.store.commit_run(RunCommit(lease=wrong_fence, status="completed", at=20.0)), StaleFence)
        assert await on.log(lease.session) == log
        assert await on.store.transcript(lease.session) == ()
        assert (await on.store.info()).stale_writes_refused == 9


@_check
async def a_rescue_takes_over_and_fences_the_old_holder(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start("first", at=11.0)
        younger = await on.start("second", key="b", at=12.0)
        ended = await on.start("third", key="c", at=10.0)
        await on.commit(ended)
        await on.say(claim, "half")
        await on.interrupt()
        assert await on.store.rescue(at=13.0) == (), "a node does not rescue from itself"
    async with opened(make_store, at=2.0) as on:
        rescued = await on.store.rescue(at=14.0)
        assert [c.lease.run_id for c in rescued] == [claim.lease.run_id, younger.lease.run_id]
        mine = rescued[0]
        assert mine.lease.fence > claim.lease.fence
        assert mine.attempt == 2
        assert (mine.messages, mine.started_seq, mine.key) == (claim.messages, claim.started_seq, "k")
        assert mine.interrupt is not None
        assert mine.interrupt.reason == "enough"
        assert rescued[1].interrupt is None
        assert mine.events == ()
        assert await on.store.rescue(at=14.0) == (), "nothing is rescued twice"
        await refused(on.say(claim, "late"), StaleFence)
        await refused(on.commit(claim), StaleFence)
        again = await on.store.restart(rescued[1].lease, at=15.0)
        assert [e.kind for e in again.events] == ["run.restarted"]
        assert (await on.say(rescued[1], "again", nth=1)).events[0].kind == "text.delta"
        run = await on.store.run(younger.lease.session, younger.lease.run_id)
        assert run is not None
        assert run.attempt == 2
        done = await on.commit(mine, "interrupted", cause=Cause(kind="crash"))
        assert done.settled[0].cause == Cause(kind="crash")
        journal = await on.store.run_events(claim.lease.session, claim.lease.run_id)
        assert [e.kind for e in journal] == [
            "run.started",
            "text.delta",
            "run.stopping",
            "run.finished",
            "message.settled",
        ]
        assert await on.store.run_events(claim.lease.session, "r_unknown") == ()


@_check
async def a_message_that_waits_can_be_withdrawn(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start(message_id="m0")
        sent = await on.send("1", message_id="m1")
        await on.send("2", message_id="m2")
        settled, events = await on.store.withdraw("p", "k", "m1", at=12.0)
        assert settled == Settlement(message_id="m1", state="withdrawn")
        assert [e.kind for e in events] == ["message.settled"]
        assert await on.store.withdraw("p", "k", "m1", at=12.0) == (settled, ())
        assert await on.store.settlement(sent.session, "m1") == settled
        await refused(on.store.withdraw("p", "k", "m0", at=12.0), AlreadySettled)
        await refused(on.store.withdraw("p", "k", "m9", at=12.0), UnknownMessage)
        await refused(on.store.withdraw("p", "missing", "m1", at=12.0), UnknownSession)
        assert await on.store.settlement(sent.session, "m9") is None
        done = await on.commit(claim, next_run_id="r2")
        assert done.claim is not None
        assert [m.message_id for m in done.claim.messages] == ["m2"]
        await refused(on.store.withdraw("p", "k", "m0", at=12.0), AlreadySettled)


@_check
async def a_stop_ends_the_run_and_withdraws_what_waits(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        await on.send("1", message_id="m1")
        await on.send("2", message_id="m2", policy="collect")
        missed = await on.store.stop_session(interrupt_of(run_id="r_other"))
        assert missed.run_id is None
        assert missed.withdrawn == ()
        assert missed.events == ()
        stopped = await on.store.stop_session(interrupt_of())
        assert stopped.run_id == claim.lease.run_id
        assert [m.message_id for m in stopped.withdrawn] == ["m1", "m2"]
        assert [e.kind for e in stopped.events] == ["run.stopping", "message.settled", "message.settled"]
        again = await on.store.stop_session(interrupt_of())
        assert again.run_id == claim.lease.run_id
        assert again.withdrawn == ()
        assert again.events == ()
        assert await on.store.mailbox(claim.lease.session) == ()
        done = await on.commit(claim, "interrupted", next_run_id="r2")
        assert done.claim is None
        assert (await on.send("a new activation")).disposition == "started"


def _note_first_seq(seqs: list[int], done: asyncio.Future[Appended]) -> None:
    seqs.append(done.result().events[0].seq)


@_check
async def concurrent_appends_are_whole_and_in_order(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claims = [await on.start(key=f"k{n}") for n in range(3)]
        resolved: dict[int, list[int]] = {claim.lease.session: [] for claim in claims}
        writes = []
        for n in range(50):
            for claim in claims:
                future = on.say(claim, *(f"{n}.{i}" for i in range(n % 4 + 1)))
                future.add_done_callback(partial(_note_first_seq, resolved[claim.lease.session]))
                writes.append((claim, n, future))
        answers = [(claim, n, await future) for claim, n, future in writes]
        await asyncio.sleep(0)  # callbacks of a future that was done when they were added run in the next turn
        for claim in claims:
            log = await on.log(claim.lease.session)
            of_this = [(n, answer) for other, n, answer in answers if other is claim]
            assert [event for _, answer in of_this for event in answer.events] == log[2:], "in the order of the calls"
            assert all(len(answer.events) == n % 4 + 1 for n, answer in of_this)
            seqs = resolved[claim.lease.session]
            assert seqs == sorted(seqs)
            assert len(seqs) == 50, "answers come in the order of the log"


@_check
async def text_that_no_json_can_carry_is_written_out(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start("half a \ud83d pair", message_id="m1")
        assert claim.messages[0].content == "half a \\ud83d pair"
        await on.say(claim, "\udc00")
        entries = [Entry(role="assistant", content="\ud800")]
        cause = Cause(kind="user", reason="\udfff")
        done = await on.commit(claim, "failed", text="\ud800", error="E: \udfff", entries=entries, cause=cause)
        assert (done.settled[0].text, done.settled[0].error) == ("\\ud800", "E: \\udfff")
        assert [entry.content for entry in await on.store.transcript(claim.lease.session)] == ["\\ud800"]
        settled = await on.store.settlement(claim.lease.session, "m1")
        assert settled is not None
        assert settled.error == done.settled[0].error
        await on.log(claim.lease.session)


STORE_CHECKS: Sequence[Check] = (
    *_CHECKS,
    *AGENT_CHECKS,
    *HOUSEKEEPING_CHECKS,
    *PACK_CHECKS,
    *PEOPLE_CHECKS,
    *GRANT_CHECKS,
    *HISTORY_CHECKS,
    *SCHEDULE_CHECKS,
)
