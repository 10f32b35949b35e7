"""The checker accepts every history that keeps the promises, however concurrent, and rejects any one change of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from holdfast.proof.checker.judgement import PROMISES, Report, judge
from holdfast.proof.history import (
    HostKilled,
    LogRead,
    Lost,
    Opened,
    ProcessesListed,
    ProcessSeen,
    ReaderReceived,
    Record,
    Refused,
    SendAttempted,
    SessionRead,
    SettlementRead,
    Stamp,
    StopAnswered,
    StopRequested,
    TranscriptRead,
    read_history,
    write_history,
)
from holdfast.protocol.events import MessageAccepted, MessageSettled, RunFinished, RunStarted, RunStopping, ToolFinished
from holdfast.protocol.stopping import Cause
from tests.proof.checker.history_model import LIMITS, World, good_day

A, B, C = ("ann", "a"), ("bob", "b"), ("ann", "c")
replace = msgspec.structs.replace


def complaints(report: Report) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(j.promise, v.what, v.evidence) for j in report.judgements for v in j.violations]


def world() -> World:
    made = World(failpoints=())
    made.start_host()
    return made


def assert_accepted(records: list[Record]) -> Report:
    report = judge(records)
    assert complaints(report) == []
    return report


# what is accepted ----------------------------------------------------------------------------------------------------


def test_a_good_day_keeps_every_promise_and_observes_each() -> None:
    report = assert_accepted(good_day())
    assert [j.promise for j in report.judgements] == [*(f"P{number}" for number in range(1, 15)), "P16"]
    assert all(j.verdict == "kept" and j.observations > 0 for j in report.judgements)
    assert report.passed


def test_a_history_judges_alike_after_it_was_written_and_read(tmp_path: Path) -> None:
    records = good_day()
    write_history(tmp_path / "history.jsonl", records)
    assert list(read_history(tmp_path / "history.jsonl")) == records
    assert judge(read_history(tmp_path / "history.jsonl")) == judge(records)


def test_the_order_of_records_in_the_file_does_not_matter() -> None:
    records = good_day()
    assert judge(reversed(records)) == judge(records)


def test_a_history_without_an_opening_is_no_history() -> None:
    with pytest.raises(ValueError, match="opened"):
        judge(good_day()[1:])


@pytest.mark.parametrize("outcome", ["request lost", "answer lost"])
def test_a_lost_send_may_or_may_not_have_been_accepted(outcome: str) -> None:
    made = world()
    made.send(A)
    made.send(A, outcome=outcome)
    made.kill()
    assert_accepted(made.settle())


@pytest.mark.parametrize("outcome", ["request lost", "answer lost"])
def test_a_lost_send_that_is_sent_again_counts_once(outcome: str) -> None:
    made = world()
    content = made.send(A, outcome=outcome)
    made.kill()
    made.send(A, again=content)
    made.send(A, again=content)
    assert_accepted(made.settle())


def test_concurrent_sends_may_be_numbered_in_either_order() -> None:
    made = world()
    made.send(A)
    made.send(A)
    records = made.settle()
    attempts = [r for r in records if isinstance(r, SendAttempted)]
    records[records.index(attempts[1])] = replace(attempts[1], at=attempts[0].at - 0.001)
    assert_accepted(records)


def test_a_full_mailbox_refuses() -> None:
    made = world()
    for _ in range(LIMITS.mailbox + 3):
        made.send(A)
    records = made.settle()
    assert any(isinstance(r, Refused) and r.code == "mailbox_full" for r in records)
    assert_accepted(records)


def test_a_named_thread_may_live_on_after_its_run() -> None:
    made = world()
    made.send(A)
    made.branch(A, "thread")
    made.branch(A, "task")
    made.interrupt(A, stuck=True)
    assert assert_accepted(made.settle()).of("P3").observations >= 2


def test_a_run_that_was_asked_to_stop_may_still_complete() -> None:
    made = world()
    made.send(A)
    made.branch(A, "task")
    made.interrupt(A)
    records = made.settle()
    told = [r for r in records if isinstance(r, Stamp) and r.what == "told"]
    log = next(r for r in records if isinstance(r, LogRead))
    changed = tuple(
        replace(e, status="completed")
        if isinstance(e, RunFinished)
        else replace(e, state="completed")
        if isinstance(e, MessageSettled)
        else e
        for e in log.events
    )
    kept: list[Record] = [r for r in records if r not in told and not isinstance(r, SettlementRead)]
    kept[kept.index(log)] = replace(log, events=changed)
    assert_accepted(kept)


def test_processes_have_time_to_die_after_the_kill_of_their_host() -> None:
    made = world()
    made.send(B, replayable=True)
    made.branch(B, "process")
    made.kill()
    records = made.settle()
    kill = next(r for r in records if isinstance(r, HostKilled))
    process = next(r for r in records if isinstance(r, Stamp) and r.member == "process")
    seen = ProcessSeen(pid=process.pid, principal="bob", session="b", run_id=process.run_id, host_pid=process.host_pid)
    records.append(ProcessesListed(at=kill.at + 0.2, began_at=kill.at + 0.1, alive=(seen,)))
    records.append(replace(process, at=kill.at + 0.1, what="tick"))
    assert_accepted(records)


def test_a_call_that_a_kill_cuts_may_take_long_and_stay_unanswered() -> None:
    made = world()
    made.send(A)
    content = made.send(A, outcome="request lost")
    made.kill()
    made.send(A, again=content)
    records = made.settle()
    lost = next(r for r in records if isinstance(r, Lost))
    attempt = next(r for r in records if isinstance(r, SendAttempted) and r.token == lost.token)
    kill = next(r for r in records if isinstance(r, HostKilled))
    records.remove(lost)
    assert_accepted(records)
    records.append(replace(lost, at=kill.at + LIMITS.answer_s + 20))
    assert attempt.at < kill.at
    assert_accepted(records)


def test_an_interrupt_that_was_recorded_before_a_kill_ends_the_run_by_the_rescue() -> None:
    made = world()
    made.send(B, replayable=True)
    made.branch(B, "task")
    session = made.session(B)
    assert session.run is not None
    made.note(
        StopRequested,
        token="s1",
        principal="bob",
        session="b",
        scope="run",
        reason="because",
    )
    session.run.stopping = Cause(kind="user", reason="because")
    made.log(session, RunStopping, run_id=session.run.run_id, cause=session.run.stopping)
    made.kill()
    made.note(Lost, token="s1", error="reset")
    assert_accepted(made.settle())


def test_a_remote_host_is_not_asked_for_what_cannot_be_seen() -> None:
    records = good_day()
    opened = next(r for r in records if isinstance(r, Opened))
    hidden = (Stamp, ProcessesListed)
    seen: list[Record] = [r for r in records if not isinstance(r, (*hidden, Opened))]
    seen.insert(0, replace(opened, mode="url", sees=("clients",)))
    report = judge(seen)
    unseen = {j.promise for j in report.judgements if j.verdict == "not observed"}
    assert "P1" in unseen
    assert report.of("P1").passed
    assert report.of("P5").verdict == "kept"


def test_a_promise_that_could_be_seen_and_was_not_fails() -> None:
    made = world()
    made.send(A)
    report = judge(made.settle())
    assert complaints(report) == []
    assert report.of("P1").verdict == "not observed"
    assert not report.of("P1").passed
    assert not report.passed


def test_each_promise_has_a_rule_that_says_what_counts() -> None:
    for promise in PROMISES:
        text = promise.rule.__doc__ or ""
        assert text.startswith(f"{promise.number}: ")
        assert "*Observation" in text
        assert "*Violations*" in text


# any good history, and any one change of it --------------------------------------------------------------------------

WHERES = st.sampled_from((A, B, C))
MEMBERS = st.sampled_from(("task", "thread", "process", "child"))
POLICIES = st.sampled_from(("queue", "queue", "collect", "interrupt", "reject"))
OUTCOMES = st.sampled_from(("acknowledged", "acknowledged", "answer lost", "request lost"))
STEPS = st.one_of(
    st.tuples(st.just("send"), WHERES, POLICIES, OUTCOMES, st.booleans()),
    st.tuples(st.just("again"), st.integers(0, 30)),
    st.tuples(st.just("withdraw"), WHERES),
    st.tuples(st.just("branch"), WHERES, MEMBERS),
    st.tuples(st.just("tick"), WHERES),
    st.tuples(st.just("call"), WHERES, st.booleans()),
    st.tuples(st.just("finish"), WHERES),
    st.tuples(st.just("interrupt"), WHERES, st.sampled_from(("run", "session")), st.booleans()),
    st.tuples(st.just("connect"), WHERES),
    st.tuples(st.just("advance"), WHERES, st.integers(0, 2)),
    st.tuples(st.just("leave"), WHERES),
    st.tuples(st.just("read"), WHERES),
    st.tuples(st.just("watch")),
    st.tuples(st.just("kill")),
    st.tuples(st.just("drain")),
)


def play(steps: list[tuple[Any, ...]]) -> list[Record]:
    made = world()
    sent: list[tuple[tuple[str, str], str, bool]] = []
    for name, *given_to in steps:
        match name, given_to:
            case "send", [where, policy, outcome, replayable]:
                content = made.send(where, policy=policy, outcome=outcome, replayable=replayable)
                if outcome != "acknowledged":
                    made.kill()  # only a broken host loses an answer
                if policy == "queue":
                    sent.append((where, content, replayable))
            case "again", [index]:
                if sent:
                    where, content, replayable = sent[index % len(sent)]
                    made.send(where, again=content, replayable=replayable)
            case "withdraw", [where]:
                made.withdraw(where)
            case "branch", [where, member]:
                made.branch(where, member)
            case "tick", [where]:
                made.tick(where)
            case "call", [where, result]:
                made.call(where, result=result)
            case "finish", [where]:
                made.finish(where)
            case "interrupt", [where, scope, stuck]:
                made.interrupt(where, scope=scope, stuck=stuck)
            case "connect", [where]:
                made.connect("/".join(where), where)
            case "advance", [where, skip]:
                if "/".join(where) in made.readers and made.readers["/".join(where)].on:
                    made.advance("/".join(where), skip=skip)
            case "leave", [where]:
                if "/".join(where) in made.readers and made.readers["/".join(where)].on:
                    made.close("/".join(where), "left")
            case "read", [where]:
                made.read(where)
            case "watch", []:
                made.watch()
            case "kill", []:
                made.kill()
            case "drain", []:
                made.drain()
    return made.settle()


def _log_edit(
    records: list[Record], kinds: tuple[type, ...], pick: Callable[[int], int], edit: Callable[..., tuple[Any, ...]]
) -> bool:
    """Edit one event of one log, chosen among those of the `kinds`."""
    places = [
        (at, place)
        for at, record in enumerate(records)
        if isinstance(record, LogRead)
        for place, event in enumerate(record.events)
        if isinstance(event, kinds)
    ]
    if not places:
        return False
    at, place = places[pick(len(places))]
    log = records[at]
    assert isinstance(log, LogRead)
    events = [*log.events[:place], *edit(log.events[place]), *log.events[place + 1 :]]
    records[at] = replace(log, events=tuple(replace(event, seq=i) for i, event in enumerate(events, 1)))
    return True


def drop_an_event(records: list[Record], pick: Callable[[int], int]) -> bool:
    return _log_edit(records, (MessageSettled, RunStarted, RunFinished), pick, lambda event: ())


def repeat_an_event(records: list[Record], pick: Callable[[int], int]) -> bool:
    kinds = (MessageAccepted, MessageSettled, RunStarted, RunFinished, ToolFinished)
    return _log_edit(records, kinds, pick, lambda event: (event, event))


def turn_an_end_around(records: list[Record], pick: Callable[[int], int]) -> bool:
    other = {"completed": "failed", "interrupted": "completed", "failed": "completed"}
    return _log_edit(records, (RunFinished,), pick, lambda event: (replace(event, status=other[event.status]),))


def move_a_message_to_another_run(records: list[Record], pick: Callable[[int], int]) -> bool:
    return _log_edit(records, (RunStarted,), pick, lambda event: (replace(event, messages=()),))


def lose_a_frame(records: list[Record], pick: Callable[[int], int]) -> bool:
    places = [i for i, r in enumerate(records) if isinstance(r, ReaderReceived) and len(r.frames) > 1]
    if not places:
        return False
    received = records[places[pick(len(places))]]
    assert isinstance(received, ReaderReceived)
    lost = pick(len(received.frames) - 1)
    frames = received.frames[:lost] + received.frames[lost + 1 :]
    records[records.index(received)] = replace(received, frames=frames)
    return True


def repeat_a_frame(records: list[Record], pick: Callable[[int], int]) -> bool:
    places = [i for i, r in enumerate(records) if isinstance(r, ReaderReceived)]
    if not places:
        return False
    received = records[places[pick(len(places))]]
    assert isinstance(received, ReaderReceived)
    again = pick(len(received.frames))
    frames = received.frames[: again + 1] + received.frames[again:]
    records[records.index(received)] = replace(received, frames=frames)
    return True


def work_on_after_the_receipt(records: list[Record], pick: Callable[[int], int]) -> bool:
    stops = [
        r for r in records if isinstance(r, StopAnswered) and r.receipt.outcome == "gone" and r.receipt.stopped.tasks
    ]
    if not stops:
        return False
    stop = stops[pick(len(stops))]
    before = [r for r in records if isinstance(r, Stamp) and r.at < stop.at and r.run_id == stop.receipt.scope]
    records.append(replace(before[0], at=stop.at + 0.002, what="tick", branch="left-over"))
    return True


def leave_a_process(records: list[Record], pick: Callable[[int], int]) -> bool:
    born = [r for r in records if isinstance(r, Stamp) and r.member == "process" and r.what == "branch"]
    if not born:
        return False
    stamp = born[pick(len(born))]
    last = max(i for i, r in enumerate(records) if isinstance(r, ProcessesListed))
    seen = ProcessSeen(
        pid=stamp.pid,
        principal=stamp.principal,
        session=stamp.session,
        run_id=stamp.run_id,
        host_pid=stamp.host_pid,
    )
    listing = records[last]
    assert isinstance(listing, ProcessesListed)
    records[last] = replace(listing, alive=(seen,))
    return True


def lie_about_a_settlement(records: list[Record], pick: Callable[[int], int]) -> bool:
    other = {"completed": "failed", "interrupted": "completed", "withdrawn": "completed", "failed": "completed"}
    reads = [i for i, r in enumerate(records) if isinstance(r, SettlementRead) and r.settlement.state in other]
    if not reads:
        return False
    place = reads[pick(len(reads))]
    read = records[place]
    assert isinstance(read, SettlementRead)
    records[place] = replace(read, settlement=replace(read.settlement, state=other[read.settlement.state]))
    return True


def tear_an_entry_out(records: list[Record], pick: Callable[[int], int]) -> bool:
    reads = [i for i, r in enumerate(records) if isinstance(r, TranscriptRead) and len(r.entries) > 1]
    if not reads:
        return False
    place = reads[pick(len(reads))]
    read = records[place]
    assert isinstance(read, TranscriptRead)
    torn = pick(len(read.entries) - 1)
    records[place] = replace(read, entries=read.entries[:torn] + read.entries[torn + 1 :])
    return True


def wedge_a_session(records: list[Record], pick: Callable[[int], int]) -> bool:
    reads = [i for i, r in enumerate(records) if isinstance(r, SessionRead) and r.final]
    if not reads or not any(isinstance(r, HostKilled) for r in records):
        return False
    place = reads[pick(len(reads))]
    read = records[place]
    assert isinstance(read, SessionRead)
    records[place] = replace(read, view=replace(read.view, state="running", run_id="r_wedged"))
    return True


MUTATIONS = (
    drop_an_event,
    repeat_an_event,
    turn_an_end_around,
    move_a_message_to_another_run,
    lose_a_frame,
    repeat_a_frame,
    work_on_after_the_receipt,
    leave_a_process,
    lie_about_a_settlement,
    tear_an_entry_out,
    wedge_a_session,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, max_size=40))
def test_any_history_of_a_host_that_keeps_its_promises_is_accepted(steps: list[tuple[object, ...]]) -> None:
    assert_accepted(play(steps))


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=5, max_size=40), data=st.data())
def test_any_one_change_of_a_good_history_is_rejected(
    mutate: Callable[[list[Record], Callable[[int], int]], bool],
    steps: list[tuple[object, ...]],
    data: st.DataObject,
) -> None:
    records = play([("send", A, "queue", "acknowledged", False), ("branch", A, "task"), ("tick", A), *steps])
    assume(mutate(records, lambda size: data.draw(st.integers(0, size - 1))))
    assert complaints(judge(records))
