"""For each promise: histories that break it, each in another way, and that the checker must reject for that reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import pytest

from holdfast.proof.checker.judgement import judge
from holdfast.proof.history import (
    AccessTried,
    BombThrown,
    Drained,
    DrainRequested,
    HoldingRead,
    HostExited,
    HostileAct,
    HostileActed,
    HostKilled,
    HostReady,
    LogRead,
    Lost,
    Opened,
    PeopleSettled,
    ProcessesListed,
    ProcessSeen,
    ReaderClosed,
    ReaderConnected,
    ReaderGap,
    ReaderReceived,
    Record,
    Refused,
    SendAcknowledged,
    SendAttempted,
    SessionRead,
    SessionsListed,
    SettlementRead,
    Share,
    SharesCounted,
    Stamp,
    StatisticsRead,
    StopAnswered,
    StopRequested,
    StreamRevoked,
    TranscriptRead,
    WithdrawAnswered,
)
from holdfast.proof.storm.bounds import HOSTILE
from holdfast.proof.storm.hostile import ACTS
from holdfast.protocol.events import (
    Event,
    MessageAccepted,
    MessageSettled,
    RunFinished,
    RunRestarted,
    RunStarted,
    RunStopping,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import Entry, RunView
from holdfast.protocol.stopping import Cause
from tests.proof.checker.history_model import LIMITS, World, good_day

A, B, C = ("ann", "a"), ("bob", "b"), ("ann", "c")
replace = msgspec.structs.replace


class Tale:
    """The good day, to be told otherwise."""

    def __init__(self) -> None:
        self.records: list[Record] = good_day()

    def all(self, kind: type, where: tuple[str, str] | None = None, **match: object) -> list[Any]:
        found = []
        for record in self.records:
            if not isinstance(record, kind):
                continue
            if where is not None and (getattr(record, "principal", None), getattr(record, "session", None)) != where:
                continue
            if all(
                value(getattr(record, name)) if callable(value) else getattr(record, name) == value
                for name, value in match.items()
            ):
                found.append(record)
        assert found, f"the good day has no {kind.__name__} with {match}"
        return found

    def first(self, kind: type, where: tuple[str, str] | None = None, **match: object) -> Any:
        return self.all(kind, where, **match)[0]

    def last(self, kind: type, where: tuple[str, str] | None = None, **match: object) -> Any:
        return self.all(kind, where, **match)[-1]

    def drop(self, *records: Record) -> None:
        gone = {id(record) for record in records}
        self.records = [record for record in self.records if id(record) not in gone]

    def change(self, record: Record, **fields: object) -> None:
        place = next(i for i, known in enumerate(self.records) if known is record)
        self.records[place] = replace(record, **fields)

    def add(self, record: Record) -> None:
        self.records.append(record)

    def log(self, where: tuple[str, str]) -> list[Event]:
        return list(self.first(LogRead, where).events)

    def set_log(self, where: tuple[str, str], events: Sequence[Event], *, renumber: bool = True) -> None:
        numbered = [replace(event, seq=i) for i, event in enumerate(events, 1)] if renumber else list(events)
        self.change(self.first(LogRead, where), events=tuple(numbered))

    def event(self, where: tuple[str, str], kind: type, place: int = 0, **match: object) -> Any:
        found = [
            event
            for event in self.log(where)
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in match.items())
        ]
        return found[place]

    def change_event(self, where: tuple[str, str], event: Event, **fields: object) -> None:
        self.set_log(
            where, [replace(e, **fields) if e.seq == event.seq else e for e in self.log(where)], renumber=False
        )

    def drop_event(self, where: tuple[str, str], *events: Event) -> None:
        seqs = {event.seq for event in events}
        self.set_log(where, [event for event in self.log(where) if event.seq not in seqs])

    def insert_event(self, where: tuple[str, str], after: Event, *events: Event) -> None:
        log = self.log(where)
        place = next(i for i, event in enumerate(log) if event.seq == after.seq) + 1
        self.set_log(where, [*log[:place], *events, *log[place:]])

    def entries(self, where: tuple[str, str]) -> list[Entry]:
        return list(self.last(TranscriptRead, where).entries)

    def set_entries(self, where: tuple[str, str], entries: Sequence[Entry], *, renumber: bool = True) -> None:
        read = self.last(TranscriptRead, where)
        numbered = [replace(entry, n=i) for i, entry in enumerate(entries, 1)] if renumber else list(entries)
        self.change(read, entries=tuple(numbered))

    def interrupted(self, member: str) -> list[Stamp]:
        """The stamps of one branch of that kind that the first stop of session a told."""
        stop = self.first(StopAnswered)
        run_id = self.last(Stamp, A, what="told", at=lambda at: at < stop.at).run_id
        branch = self.first(Stamp, A, what="branch", run_id=run_id, member=member)
        return self.all(Stamp, A, run_id=run_id, branch=branch.branch)

    def end(self) -> float:
        return max(record.at for record in self.records)

    def seen(self, stamp: Stamp) -> ProcessSeen:
        return ProcessSeen(
            pid=stamp.pid,
            principal=stamp.principal,
            session=stamp.session,
            run_id=stamp.run_id,
            host_pid=stamp.host_pid,
        )


Case = tuple[str, str, Callable[[Tale], None]]
CASES: list[Case] = []


def breaks(promise: str, why: str) -> Callable[[Callable[[Tale], None]], Callable[[Tale], None]]:
    """The decorated edit of the good day breaks `promise`, and the checker says `why`."""

    def note(edit: Callable[[Tale], None]) -> Callable[[Tale], None]:
        CASES.append((promise, why, edit))
        return edit

    return note


# P1 ------------------------------------------------------------------------------------------------------------------


def _never_told(tale: Tale, member: str) -> None:
    tale.drop(*[stamp for stamp in tale.interrupted(member) if stamp.what in ("told", "end")])


@breaks("P1", "did not see the interrupt")
def a_task_is_not_told(tale: Tale) -> None:
    _never_told(tale, "task")


@breaks("P1", "did not see the interrupt")
def a_thread_is_not_told(tale: Tale) -> None:
    _never_told(tale, "thread")


@breaks("P1", "did not see the interrupt")
def a_child_is_not_told(tale: Tale) -> None:
    _never_told(tale, "child")


@breaks("P1", "did not see the interrupt")
def a_late_waiter_is_not_told(tale: Tale) -> None:
    told = tale.interrupted("task")[-1]
    tale.add(replace(told, at=told.at + 0.0001, what="branch", branch="late"))


@breaks("P1", "only long after")
def a_branch_is_told_after_the_end(tale: Tale) -> None:
    stamps = tale.interrupted("thread")
    told = next(stamp for stamp in stamps if stamp.what == "told")
    tale.drop(*[stamp for stamp in stamps if stamp.what == "end"])
    tale.change(told, at=tale.end() + 1)


@breaks("P1", "lives on")
def a_process_is_not_reached(tale: Tale) -> None:
    process = tale.interrupted("process")[0]
    listing = tale.last(ProcessesListed)
    tale.change(listing, alive=(tale.seen(process),))


@breaks("P1", "different first causes")
def siblings_are_told_different_causes(tale: Tale) -> None:
    told = next(stamp for stamp in tale.interrupted("child") if stamp.what == "told")
    tale.change(told, cause="another reason")


# P2 ------------------------------------------------------------------------------------------------------------------


@breaks("P2", "no stop was requested")
def a_run_is_stopped_without_a_request(tale: Tale) -> None:
    run = tale.event(B, RunStarted, 0)
    tale.insert_event(B, run, RunStopping(run_id=run.run_id, cause=Cause(kind="user")))


@breaks("P2", "stop of another session")
def a_run_is_stopped_by_the_stop_of_another_session(tale: Tale) -> None:
    stopping = tale.event(A, RunStopping, 0)
    tale.change_event(C, tale.event(C, RunStopping, 0), cause=stopping.cause)
    own = tale.event(C, RunStopping, 1)
    tale.change_event(C, own, cause=stopping.cause)


@breaks("P2", "saw a stop of another session")
def a_thread_sees_the_stop_of_another_session(tale: Tale) -> None:
    stop = tale.first(StopRequested, A)
    tick = next(
        stamp for stamp in tale.all(Stamp, B, what="tick", member="thread") if stamp.at > 0 and stamp.branch != "main"
    )
    tale.add(replace(tick, at=stop.at + 0.001, what="told", cause=stop.reason))


@breaks("P2", "saw an interrupt, but no stop was requested")
def a_recycled_thread_sees_an_old_interrupt(tale: Tale) -> None:
    tick = tale.first(Stamp, B, what="tick", member="thread")
    tale.add(replace(tick, at=tick.at + 0.001, what="told", cause=None))


@breaks("P2", "ambient context")
def a_helper_thread_carries_another_sessions_context(tale: Tale) -> None:
    tale.change(tale.first(Stamp, B, what="tick", branch="main"), seen_session="ann/a")


@breaks("P2", "message of another session")
def a_message_stops_the_run_of_another_session(tale: Tale) -> None:
    foreign = tale.event(C, MessageAccepted, 0)
    stopping = next(e for e in tale.log(A) if isinstance(e, RunStopping) and e.cause.kind == "message")
    tale.change_event(A, stopping, cause=Cause(kind="message", message_id=foreign.message_id))


@breaks("P2", "not killed or drained")
def a_run_ends_by_a_shutdown_that_was_none(tale: Tale) -> None:
    first = tale.event(A, RunFinished, 0)
    tale.drop(*tale.all(HostKilled), *tale.all(DrainRequested), *tale.all(HostExited))
    tale.change_event(A, first, cause=Cause(kind="shutdown"))


@breaks("P2", "nothing in this storm makes")
def a_deadline_that_nobody_set_ends_a_run(tale: Tale) -> None:
    tale.change_event(A, tale.event(A, RunFinished, 0), cause=Cause(kind="deadline"))


# P3 ------------------------------------------------------------------------------------------------------------------


@breaks("P3", "continues after the receipt")
def a_task_goes_on_after_the_receipt(tale: Tale) -> None:
    stamp = tale.interrupted("task")[0]
    tale.add(replace(stamp, at=tale.first(StopAnswered).at + 0.02, what="tick"))


@breaks("P3", "a process of a stopped run continues")
def a_process_writes_after_the_receipt(tale: Tale) -> None:
    stamp = tale.interrupted("process")[0]
    tale.add(replace(stamp, at=tale.first(StopAnswered).at + 0.02, what="tick"))


@breaks("P3", "alive after the receipt")
def a_process_is_listed_after_the_receipt(tale: Tale) -> None:
    process = tale.interrupted("process")[0]
    answer = tale.first(StopAnswered)
    listing = tale.first(ProcessesListed, began_at=lambda at: at > answer.at)
    tale.change(listing, alive=(*listing.alive, tale.seen(process)))


@breaks("P3", "contradicts itself")
def a_receipt_says_gone_and_names_survivors(tale: Tale) -> None:
    answer = tale.first(StopAnswered)
    tale.change(answer, receipt=replace_receipt(answer.receipt, survivors=(77,)))


@breaks("P3", "continues after the receipt")
def the_receipt_does_not_name_the_stuck_thread(tale: Tale) -> None:
    for answer in tale.all(StopAnswered, receipt=lambda receipt: bool(receipt.abandoned)):
        tale.change(answer, receipt=replace_receipt(answer.receipt, abandoned=(), outcome="gone"))
    end = next(e for e in tale.log(A) if isinstance(e, RunFinished) and e.receipt and e.receipt.abandoned)
    assert end.cause is not None
    tale.change_event(A, end, receipt=replace_receipt(end.receipt, abandoned=(), outcome="gone"))
    stuck = tale.first(StopAnswered, receipt=lambda receipt: receipt.cause.reason == end.cause.reason)
    run = tale.last(Stamp, A, run_id=end.run_id)
    tale.add(replace(run, at=stuck.at + 1, what="tick"))


@breaks("P3", "ended run still writes")
def a_quarantined_run_writes_to_the_log(tale: Tale) -> None:
    end = tale.event(A, RunFinished, 0)
    tale.insert_event(A, end, TextDelta(run_id=end.run_id, text="late"))


@breaks("P3", "no terminal event")
def a_stop_is_answered_and_the_run_goes_on(tale: Tale) -> None:
    tale.drop_event(A, tale.event(A, RunFinished, 0))


def replace_receipt(receipt: Any, **fields: object) -> Any:
    return dataclasses.replace(receipt, **fields)


# P4 ------------------------------------------------------------------------------------------------------------------


@breaks("P4", "started while another one held the slot")
def two_runs_hold_the_slot(tale: Tale) -> None:
    end = tale.event(A, RunFinished, 0)
    following = tale.event(A, RunStarted, 1)
    log = [event for event in tale.log(A) if event.seq != end.seq]
    place = next(i for i, event in enumerate(log) if event.seq == following.seq)
    tale.set_log(A, [*log[: place + 1], end, *log[place + 1 :]])


@breaks("P4", "two agents of one session")
def two_agents_run_at_the_same_time(tale: Tale) -> None:
    starts = tale.all(Stamp, A, what="start")
    finish = tale.first(Stamp, A, what="finish", run_id=starts[0].run_id)
    tale.change(starts[1], at=finish.at - 0.005)


@breaks("P4", "at work after its successor")
def an_old_run_works_beside_the_new_one(tale: Tale) -> None:
    starts = tale.all(Stamp, A, what="start")
    branch = tale.first(Stamp, A, what="branch", run_id=starts[0].run_id, member="task")
    tale.add(replace(branch, at=starts[1].at + 0.001, what="tick"))


@breaks("P4", "executed twice")
def one_attempt_is_executed_twice(tale: Tale) -> None:
    start = tale.first(Stamp, A, what="start")
    tale.add(replace(start, at=start.at + 0.001))


@breaks("P4", "two hosts")
def an_attempt_is_executed_by_two_hosts(tale: Tale) -> None:
    start = tale.first(Stamp, A, what="start")
    tale.add(replace(start, at=start.at + 0.001, what="tick", host_pid=4242))


@breaks("P4", "its host lived on")
def a_run_is_attempted_again_without_a_crash(tale: Tale) -> None:
    start = tale.last(Stamp, C, what="start")
    tale.add(replace(start, at=start.at + 0.001, attempt=2))


@breaks("P4", "without a claim")
def an_agent_runs_without_a_claim(tale: Tale) -> None:
    start = tale.first(Stamp, B, what="start")
    tale.add(replace(start, at=start.at - 0.001, run_id="r_unknown"))


@breaks("P4", "wrote while another one held")
def an_old_owner_writes_into_the_new_run(tale: Tale) -> None:
    following = tale.event(A, RunStarted, 1)
    tale.insert_event(A, following, TextDelta(run_id=tale.event(A, RunStarted, 0).run_id, text="old"))


@breaks("P4", "wrote at the same time")
def two_attempts_write_into_one_run(tale: Tale) -> None:
    started = tale.event(A, RunStarted, 0)
    word = TextDelta(run_id=started.run_id, text="m1-emit:0 ")
    tale.insert_event(A, started, word, word)


@breaks("P4", "mixes the entries")
def two_runs_mix_their_entries(tale: Tale) -> None:
    entries = tale.entries(A)
    other = next(entry for entry in entries if entry.run_id != entries[0].run_id)
    tale.set_entries(A, [entries[0], other, *entries[1:]])


# P5 ------------------------------------------------------------------------------------------------------------------


@breaks("P5", "is not in the log")
def an_acknowledged_message_vanishes(tale: Tale) -> None:
    accepted = tale.event(A, MessageAccepted, 1)
    tale.drop_event(A, accepted, *[e for e in tale.log(A) if getattr(e, "message_id", "") == accepted.message_id])


@breaks("P5", "never settled")
def a_message_is_never_settled(tale: Tale) -> None:
    tale.drop_event(A, tale.event(A, MessageSettled, 0))


@breaks("P5", "settled twice")
def a_message_is_settled_twice(tale: Tale) -> None:
    settled = tale.event(A, MessageSettled, 0)
    tale.insert_event(A, settled, settled)


@breaks("P5", "taken by two runs")
def a_message_is_taken_twice(tale: Tale) -> None:
    first, second = tale.event(A, RunStarted, 0), tale.event(A, RunStarted, 1)
    tale.change_event(A, second, messages=(*first.messages, *second.messages))


@breaks("P5", "did not take it")
def a_message_is_settled_by_a_stranger(tale: Tale) -> None:
    tale.change_event(
        A, tale.event(A, MessageSettled, 0, state="interrupted"), run_id=tale.event(A, RunStarted, 1).run_id
    )


@breaks("P5", "out of order")
def messages_are_taken_out_of_order(tale: Tale) -> None:
    batch = next(e for e in tale.log(A) if isinstance(e, RunStarted) and len(e.messages) > 1)
    tale.change_event(A, batch, messages=tuple(reversed(batch.messages)))


@breaks("P5", "got two messages")
def one_key_makes_two_messages(tale: Tale) -> None:
    duplicate = tale.first(SendAcknowledged, disposition="duplicate")
    again = tale.first(SendAttempted, token=duplicate.token)
    first = tale.first(SendAttempted, idempotency_key=again.idempotency_key)
    tale.drop(tale.first(Lost, token=first.token))
    tale.add(
        SendAcknowledged(
            at=first.at + 0.001, token=first.token, message_id="m_1", seq=1, disposition="queued", cursor=0
        )
    )


@breaks("P5", "accepted as two messages")
def a_key_runs_twice(tale: Tale) -> None:
    accepted = tale.event(A, MessageAccepted, 0)
    started = tale.event(A, RunStarted, 0)
    tale.insert_event(A, started, replace(accepted, message_id="m_twin"))


@breaks("P5", "refused message was accepted")
def a_refused_message_runs(tale: Tale) -> None:
    refused = tale.first(Refused, code="busy")
    attempt = tale.first(SendAttempted, token=refused.token)
    tale.insert_event(
        A, tale.log(A)[-1], MessageAccepted(message_id="m_no", content=attempt.content, policy=attempt.policy)
    )


@breaks("P5", "first attempt of a key was called a duplicate")
def a_new_message_is_called_a_duplicate(tale: Tale) -> None:
    tale.change(tale.first(SendAcknowledged), disposition="duplicate")


@breaks("P5", "a settlement contradicts the log")
def a_settlement_lies(tale: Tale) -> None:
    read = tale.last(SettlementRead, A, settlement=lambda s: s.state == "completed")
    tale.change(read, settlement=replace(read.settlement, state="failed"))


@breaks("P5", "settled otherwise than its run")
def a_message_of_a_failed_run_is_called_completed(tale: Tale) -> None:
    tale.change_event(A, tale.event(A, MessageSettled, 0, state="failed"), state="completed")


@breaks("P5", "never sent")
def a_message_comes_from_nowhere(tale: Tale) -> None:
    tale.change_event(A, tale.event(A, MessageAccepted, 0), content="never sent")


@breaks("P5", "sent later stands earlier")
def a_later_message_gets_the_earlier_place(tale: Tale) -> None:
    first, second = tale.all(SendAcknowledged, disposition="queued")[:2]
    tale.change(first, seq=second.seq)
    tale.change(second, seq=first.seq)


@breaks("P5", "withdrawn message was taken")
def a_withdrawn_message_runs(tale: Tale) -> None:
    withdrawn = tale.event(A, MessageSettled, 0, state="withdrawn")
    second = tale.event(A, RunStarted, 1)
    tale.change_event(A, second, messages=(*second.messages, withdrawn.message_id))


@breaks("P5", "not settled as withdrawn")
def a_withdrawal_is_answered_and_not_done(tale: Tale) -> None:
    token = tale.first(WithdrawAnswered).token
    accepted = next(iter(tale.all(SendAcknowledged, disposition="started")))
    request = next(record for record in tale.records if getattr(record, "token", "") == token)
    tale.change(request, message_id=accepted.message_id)


# P6 ------------------------------------------------------------------------------------------------------------------


@breaks("P6", "has no result")
def an_interrupted_call_has_no_result(tale: Tale) -> None:
    entries = tale.entries(A)
    result = next(entry for entry in reversed(entries) if entry.role == "tool_result")
    tale.set_entries(A, [entry for entry in entries if entry is not result])


@breaks("P6", "two results")
def a_call_has_two_results(tale: Tale) -> None:
    entries = tale.entries(A)
    place = next(i for i, entry in enumerate(entries) if entry.role == "tool_result")
    tale.set_entries(A, [*entries[: place + 1], entries[place], *entries[place + 1 :]])


@breaks("P6", "before its call")
def a_result_stands_before_its_call(tale: Tale) -> None:
    entries = tale.entries(A)
    place = next(i for i, entry in enumerate(entries) if entry.role == "tool_call")
    entries[place], entries[place + 1] = entries[place + 1], entries[place]
    tale.set_entries(A, entries)


@breaks("P6", "in place")
def the_transcript_has_a_hole(tale: Tale) -> None:
    entries = tale.entries(A)
    tale.set_entries(A, [entries[0], *entries[2:]], renumber=False)


@breaks("P6", "two tool calls have one id")
def two_calls_share_an_id(tale: Tale) -> None:
    entries = tale.entries(A)
    place = next(i for i, entry in enumerate(entries) if entry.role == "tool_call")
    tale.set_entries(A, [*entries[: place + 1], entries[place], *entries[place + 1 :]])


@breaks("P6", "lost or changed")
def an_entry_changes_afterwards(tale: Tale) -> None:
    entries = tale.entries(A)
    tale.set_entries(A, [replace(entries[0], content="otherwise"), *entries[1:]])


@breaks("P6", "visible in part")
def half_a_run_is_visible(tale: Tale) -> None:
    early = tale.first(TranscriptRead, A, entries=lambda entries: len(entries) > 1)
    tale.change(early, entries=early.entries[:-1])


@breaks("P6", "nothing asked it to")
def the_run_after_an_interrupt_fails(tale: Tale) -> None:
    attempt = tale.first(SendAttempted, A, may_fail=True)
    tale.change(attempt, may_fail=False)


@breaks("P6", "left no answer")
def the_answer_of_a_completed_run_is_missing(tale: Tale) -> None:
    run = tale.event(A, RunFinished, status="completed")
    tale.set_entries(A, [e for e in tale.entries(A) if not (e.role == "assistant" and e.run_id == run.run_id)])


@breaks("P6", "0 times in the transcript")
def a_completed_message_is_missing(tale: Tale) -> None:
    run = tale.event(A, RunFinished, status="completed")
    tale.set_entries(A, [e for e in tale.entries(A) if not (e.role == "user" and e.run_id == run.run_id)])


# P7 ------------------------------------------------------------------------------------------------------------------


def _frames(tale: Tale, connection: int = 1) -> ReaderReceived:
    found: ReaderReceived = tale.first(
        ReaderReceived, reader="ra", connection=connection, frames=lambda frames: len(frames) > 3
    )
    return found


@breaks("P7", "is missing")
def a_reader_misses_an_event(tale: Tale) -> None:
    received = _frames(tale)
    tale.change(received, frames=(*received.frames[:1], *received.frames[2:]))


@breaks("P7", "repeated or out of order")
def a_reader_gets_an_event_twice(tale: Tale) -> None:
    received = _frames(tale)
    tale.change(received, frames=(*received.frames[:2], *received.frames[1:]))


@breaks("P7", "is missing: 2")
def a_reader_gets_events_out_of_order(tale: Tale) -> None:
    received = _frames(tale)
    first, second, *rest = received.frames
    tale.change(received, frames=(second, first, *rest))


@breaks("P7", "another event than the log")
def a_reader_gets_a_different_event(tale: Tale) -> None:
    received = _frames(tale)
    (seq, _), *rest = received.frames
    tale.change(received, frames=((seq, "0" * 16), *rest))


@breaks("P7", "is missing")
def a_resumed_reader_loses_events(tale: Tale) -> None:
    gap = tale.first(ReaderGap)
    tale.drop(gap)


@breaks("P7", "repeated or out of order")
def a_resumed_reader_gets_old_events_again(tale: Tale) -> None:
    connected = tale.first(ReaderConnected, reader="ra", connection=2)
    received = tale.first(ReaderReceived, reader="ra", connection=1)
    tale.add(ReaderReceived(at=connected.at + 0.0001, reader="ra", connection=2, frames=received.frames[-1:]))


@breaks("P7", "the log does not have")
def a_reader_sees_an_event_that_never_became_durable(tale: Tale) -> None:
    tale.set_log(B, tale.log(B)[:3])


@breaks("P7", "no terminal event")
def a_run_has_no_terminal_event(tale: Tale) -> None:
    tale.drop_event(B, tale.event(B, RunFinished, 0))


@breaks("P7", "the log has number")
def the_log_has_a_hole(tale: Tale) -> None:
    log = tale.log(B)
    tale.set_log(B, [*log[:2], *log[3:]], renumber=False)


@breaks("P7", "did not get events")
def a_reader_stalls(tale: Tale) -> None:
    tale.change(tale.last(ReaderClosed, reader="ra"), why="stalled")


@breaks("P7", "covers events that the reader had")
def a_gap_goes_backwards(tale: Tale) -> None:
    gap = tale.first(ReaderGap)
    tale.change(gap, after=gap.after - 1)


@breaks("P7", "called pruned")
def a_gap_hides_events_that_exist(tale: Tale) -> None:
    tale.change(tale.first(ReaderGap), reason="pruned")


@breaks("P7", "does not stand before")
def a_receipts_cursor_skips_its_own_message(tale: Tale) -> None:
    acknowledged = tale.first(SendAcknowledged)
    tale.change(acknowledged, cursor=acknowledged.seq)


# P8 ------------------------------------------------------------------------------------------------------------------


def _quiet(tale: Tale, **fields: object) -> None:
    tale.change(tale.last(StatisticsRead, moment="quiet"), **fields)


@breaks("P8", "is alive")
def a_process_survives_its_completed_run(tale: Tale) -> None:
    run = tale.event(C, RunFinished, status="completed")
    process = replace(tale.first(Stamp, C, what="branch", member="process"), run_id=run.run_id, host_pid=1003)
    tale.change(tale.last(ProcessesListed), alive=(tale.seen(process),))


@breaks("P8", "still runs")
def a_task_survives_its_completed_run(tale: Tale) -> None:
    run = tale.event(C, RunFinished, status="completed")
    stamp = tale.last(Stamp, C, run_id=run.run_id)
    tale.add(replace(stamp, at=tale.end() + 1, what="tick", branch="helper"))


@breaks("P8", "still works")
def a_process_writes_after_its_run(tale: Tale) -> None:
    run = tale.event(C, RunFinished, status="completed")
    stamp = tale.last(Stamp, C, run_id=run.run_id)
    tale.add(replace(stamp, at=tale.end() + 1, what="tick", branch="p", member="process", pid=4711))


@breaks("P8", "process outlives its host")
def a_process_outlives_the_kill_of_its_host(tale: Tale) -> None:
    stamp = tale.first(Stamp, B, what="branch", member="process")
    tale.change(tale.last(ProcessesListed), alive=(tale.seen(stamp),))


@breaks("P8", "code outlives its host")
def a_process_stamps_long_after_the_kill(tale: Tale) -> None:
    stamp = tale.first(Stamp, B, what="branch", member="process")
    tale.add(replace(stamp, at=tale.end() + 1, what="tick"))


@breaks("P8", "counts runs")
def a_quiet_host_counts_a_run(tale: Tale) -> None:
    _quiet(tale, running=1)


@breaks("P8", "not empty")
def a_quiet_hosts_tree_has_leaves(tale: Tale) -> None:
    _quiet(tale, in_tree=2)


@breaks("P8", "more threads")
def threads_pile_up(tale: Tale) -> None:
    _quiet(tale, threads=5)


@breaks("P8", "more descriptors")
def descriptors_pile_up(tale: Tale) -> None:
    _quiet(tale, descriptors=10)


@breaks("P8", "more tasks")
def tasks_pile_up(tale: Tale) -> None:
    _quiet(tale, tasks=4)


# P9 ------------------------------------------------------------------------------------------------------------------


@breaks("P9", "its bound is 5 s")
def a_send_takes_too_long(tale: Tale) -> None:
    attempt = tale.first(SendAttempted)
    tale.change(attempt, at=attempt.at - LIMITS.answer_s - 1)


@breaks("P9", "its bound is 10 s")
def a_stop_takes_too_long(tale: Tale) -> None:
    request = tale.first(StopRequested)
    tale.change(request, at=request.at - LIMITS.stop_s - 1)


@breaks("P9", "never answered")
def a_call_is_never_answered(tale: Tale) -> None:
    token = tale.last(SendAttempted, C).token
    tale.drop(tale.first(SendAcknowledged, token=token))


@breaks("P9", "by its own receipt")
def a_receipt_confesses_a_long_stop(tale: Tale) -> None:
    answer = tale.first(StopAnswered)
    tale.change(answer, receipt=replace_receipt(answer.receipt, elapsed_s=60.0))


@breaks("P9", "no answer from a living host")
def a_living_host_does_not_answer(tale: Tale) -> None:
    made = World()
    made.start_host()
    made.send(A)
    made.send(A, outcome="request lost")
    made.now += LIMITS.answer_s
    tale.records = made.settle()


@breaks("P9", "messages waited")
def a_mailbox_overflows(tale: Tale) -> None:
    accepted = tale.event(A, MessageAccepted, 0)
    many = [replace(accepted, message_id=f"m_{i}", content=f"c_{i}") for i in range(LIMITS.mailbox + 1)]
    tale.insert_event(A, tale.event(A, RunStarted, 0), *many)


@breaks("P9", "refused as full")
def an_empty_mailbox_is_called_full(tale: Tale) -> None:
    tale.change(tale.first(Refused, code="busy"), code="mailbox_full")


@breaks("P9", "times in vain")
def a_run_is_restarted_for_ever(tale: Tale) -> None:
    restart = tale.event(B, RunRestarted, 0)
    tale.insert_event(B, restart, *[restart] * LIMITS.attempts)


# P10 -----------------------------------------------------------------------------------------------------------------


@breaks("P10", "illegal: a run that is running cannot stopped")
def a_run_is_interrupted_by_request_without_stopping(tale: Tale) -> None:
    tale.drop_event(A, tale.event(A, RunStopping, 0))


@breaks("P10", "acts after its terminal state")
def a_run_speaks_after_its_end(tale: Tale) -> None:
    end = tale.event(A, RunFinished, 0)
    tale.insert_event(A, end, TextDelta(run_id=end.run_id, text="late"))


@breaks("P10", "cannot interrupt")
def an_ended_run_is_stopped(tale: Tale) -> None:
    end = tale.event(A, RunFinished, 0)
    tale.insert_event(A, end, RunStopping(run_id=end.run_id, cause=Cause(kind="user")))


@breaks("P10", "instead of interrupted")
def a_stopping_run_fails(tale: Tale) -> None:
    tale.change_event(A, tale.event(A, RunFinished, 0), status="failed")


@breaks("P10", "not run.started")
def a_run_begins_in_the_middle(tale: Tale) -> None:
    tale.drop_event(A, tale.event(A, RunStarted, 0))


@breaks("P10", "illegal: a message that is accepted cannot")
def a_message_is_settled_before_it_is_taken(tale: Tale) -> None:
    started = tale.event(A, RunStarted, 1)
    tale.change_event(A, started, messages=())


def _read_again(tale: Tale, state: str) -> None:
    first = tale.first(SettlementRead, A, settlement=lambda s: s.state == "interrupted").settlement
    again = tale.last(SettlementRead, A, settlement=lambda s: s.message_id == first.message_id)
    tale.change(again, settlement=replace(again.settlement, state=state))


@breaks("P10", "went back")
def a_settled_message_is_open_again(tale: Tale) -> None:
    _read_again(tale, "taken")


@breaks("P10", "another end later")
def a_settled_message_gets_another_end(tale: Tale) -> None:
    _read_again(tale, "completed")


@breaks("P10", "does not fit its run")
def an_idle_session_names_a_run(tale: Tale) -> None:
    read = tale.last(SessionRead)
    tale.change(read, view=replace(read.view, run_id="r_1"))


@breaks("P10", "finished twice")
def a_call_finishes_twice(tale: Tale) -> None:
    finished = tale.event(A, ToolFinished, 0)
    tale.insert_event(A, finished, finished)


@breaks("P10", "had not started")
def a_call_finishes_without_a_start(tale: Tale) -> None:
    tale.drop_event(A, tale.event(A, ToolStarted, 0))


@breaks("P10", "reached a client")
def a_state_error_reaches_a_client(tale: Tale) -> None:
    tale.change(tale.first(Refused), code="illegal_transition")


# P11 -----------------------------------------------------------------------------------------------------------------


@breaks("P11", "no host became ready")
def no_host_comes_back_after_the_kill(tale: Tale) -> None:
    tale.drop(*tale.all(HostReady, incarnation=lambda n: n > 1))


@breaks("P11", "to become ready")
def a_host_needs_too_long_to_come_back(tale: Tale) -> None:
    ready = tale.first(HostReady, incarnation=2)
    tale.change(ready, at=ready.at + LIMITS.ready_s + 1)


@breaks("P11", "acknowledged before a kill and is gone")
def a_kill_loses_a_message(tale: Tale) -> None:
    accepted = tale.event(C, MessageAccepted, 0)
    tale.drop_event(C, accepted)


@breaks("P11", "seen before a kill and is gone")
def a_kill_loses_an_event_that_was_seen(tale: Tale) -> None:
    tale.set_log(A, tale.log(A)[:4])


@breaks("P11", "not at rest")
def a_kill_wedges_a_session(tale: Tale) -> None:
    read = tale.last(SessionRead)
    tale.change(read, view=replace(read.view, state="running", run_id="r_1"))


@breaks("P11", "not at rest")
def a_message_waits_for_ever_after_a_kill(tale: Tale) -> None:
    read = tale.last(SessionRead)
    tale.change(read, view=replace(read.view, waiting=1))


@breaks("P11", "still on")
def a_run_stays_running_after_a_kill(tale: Tale) -> None:
    read = tale.last(SessionRead, runs=lambda runs: bool(runs))
    tale.change(read, runs=(*read.runs, RunView(run_id="r_1", agent="storm", state="running")))


@breaks("P11", "never ended")
def a_cut_run_never_ends(tale: Tale) -> None:
    tale.drop_event(B, tale.event(B, RunFinished, 0))


@breaks("P11", "ended by itself without a restart")
def a_dead_run_completes(tale: Tale) -> None:
    tale.drop_event(B, *[event for event in tale.log(B) if isinstance(event, RunRestarted)])
    tale.drop(*tale.all(Stamp, B, attempt=lambda attempt: attempt > 1))


@breaks("P11", "cannot be replayed")
def a_plain_run_is_restarted(tale: Tale) -> None:
    tale.change(tale.first(SendAttempted, B), replayable=False)


@breaks("P11", "although its stop was recorded")
def a_stopped_run_is_restarted(tale: Tale) -> None:
    restart = tale.event(B, RunRestarted, 0)
    before = tale.log(B)[restart.seq - 2]
    tale.insert_event(B, before, RunStopping(run_id=restart.run_id, cause=Cause(kind="user")))


@breaks("P11", "took place again")
def a_recorded_call_is_executed_again(tale: Tale) -> None:
    effect = tale.first(Stamp, B, what="effect")
    restarted = tale.first(Stamp, B, what="start", attempt=2)
    tale.add(replace(effect, at=restarted.at + 0.001, attempt=2, host_pid=restarted.host_pid))


@breaks("P11", "not idempotent took place twice")
def a_side_effect_happens_twice(tale: Tale) -> None:
    effect = tale.first(Stamp, A, what="effect")
    tale.add(replace(effect, at=effect.at + 0.001))


# P12 -----------------------------------------------------------------------------------------------------------------


@breaks("P12", "not answered")
def a_drain_never_answers(tale: Tale) -> None:
    tale.drop(tale.first(Drained))


@breaks("P12", "its deadline was 3 s")
def a_drain_misses_its_deadline(tale: Tale) -> None:
    tale.change(tale.first(Drained), elapsed_s=9.0)


@breaks("P12", "exit code 1")
def a_drained_host_leaves_with_an_error(tale: Tale) -> None:
    tale.change(tale.first(HostExited), code=1)


@breaks("P12", "accepted after the drain")
def a_drained_host_takes_a_message(tale: Tale) -> None:
    drained = tale.first(Drained)
    attempt, answer = tale.last(SendAttempted, C), tale.last(SendAcknowledged)
    assert attempt.token == answer.token
    tale.change(attempt, at=drained.at + 0.001)
    tale.change(answer, at=drained.at + 0.002)


@breaks("P12", "no notice of the drain")
def a_reader_hangs_at_the_drain(tale: Tale) -> None:
    drained = tale.first(Drained)
    tale.change(tale.last(ReaderClosed, at=lambda at: at < drained.at), why="lost")


@breaks("P12", "did not name")
def work_goes_on_after_the_drain(tale: Tale) -> None:
    drained = tale.first(Drained)
    stamp = tale.last(Stamp, A, at=lambda at: at < drained.at)
    tale.add(replace(stamp, at=drained.at + 0.001, what="tick", branch="unnamed-thread"))


@breaks("P12", "process is left after a drain")
def a_process_is_left_after_the_drain(tale: Tale) -> None:
    drained = tale.first(Drained)
    stamp = tale.last(Stamp, C, what="branch", member="process", at=lambda at: at < drained.at)
    listing = tale.first(ProcessesListed, began_at=lambda at: at > drained.at)
    tale.change(listing, alive=(tale.seen(stamp),))


@breaks("P12", "calls a run interrupted that was not")
def a_drain_reports_an_end_that_was_none(tale: Tale) -> None:
    drained = tale.first(Drained)
    run_id = drained.interrupted[0]
    where = next(w for w in (A, B, C) if any(getattr(e, "run_id", "") == run_id for e in tale.log(w)))
    tale.drop_event(where, tale.event(where, RunFinished, run_id=run_id))


@breaks("P12", "calls a run parked")
def a_parked_run_is_forgotten(tale: Tale) -> None:
    drained = tale.first(Drained)
    tale.change(drained, parked=(tale.event(C, RunFinished, status="completed").run_id,))


@breaks("P12", "calls a run parked that the log does not have")
def a_parked_run_is_in_no_log(tale: Tale) -> None:
    tale.change(tale.first(Drained), parked=("r_of_nobody",))
    tale.add(PeopleSettled(at=tale.end(), checked=1, runs=("r_of_a_schedule",)))


# P13 -----------------------------------------------------------------------------------------------------------------


def _shares(tale: Tale, *got: int, given: int | None = None, **fields: object) -> None:
    shares = tuple(Share(consumer=f"c{i}", got=n, **fields) for i, n in enumerate(got))  # type: ignore[arg-type]
    total = sum(got) if given is None else given
    tale.add(SharesCounted(at=tale.end(), resource="runs", given=total, shares=shares))


@breaks("P13", "got nothing")
def one_consumer_starves(tale: Tale) -> None:
    _shares(tale, 99, 0, 0)


@breaks("P13", "even would be")
def one_consumer_gets_crumbs(tale: Tale) -> None:
    _shares(tale, 50, 50, 2)


@breaks("P13", "took 90")
def one_consumer_takes_almost_all(tale: Tale) -> None:
    _shares(tale, 90, 3, 3, 3, 3, 3)


@breaks("P13", "do not add up")
def things_are_lost_between_consumers(tale: Tale) -> None:
    _shares(tale, 10, 10, given=25)


@breaks("P13", "do not add up")
def things_are_given_twice(tale: Tale) -> None:
    _shares(tale, 10, 10, given=15)


@breaks("P13", "for its turn")
def one_consumer_waits_too_long(tale: Tale) -> None:
    _shares(tale, 10, 10, longest_wait_s=LIMITS.answer_s + 1)


def _bombed(tale: Tale, *records: Record) -> None:
    """A hostile principal threw these bombs, or nothing that was seen."""
    _besieged(tale, *records)
    opened = tale.first(Opened)
    tale.change(opened, sees=(*opened.sees, "bombs"))


def _bomb(*, peak: int = 120, reported: bool = True) -> BombThrown:
    return BombThrown(at=9.0, name="fork bombs", run_id="r_bomb", quota=100, overshoot=25, peak=peak, reported=reported)


def _waited(tale: Tale, principal: str, ended: str) -> Stamp:
    stamp = tale.first(Stamp, A, what="tick")
    changed: Stamp = replace(stamp, what="program", principal=principal, ended=ended)
    return changed


@breaks("P13", "used 201, its quota is 100 and the stated overshoot 25")
def a_bomb_grows_beyond_its_quota(tale: Tale) -> None:
    _bombed(tale, _bomb(peak=201))


@breaks("P13", "was above its quota, and its result does not name it")
def a_bomb_ends_and_nobody_is_told_why(tale: Tale) -> None:
    _bombed(tale, _bomb(reported=False))


@breaks("P13", "outlived its run")
def a_process_of_a_bomb_is_left(tale: Tale) -> None:
    left = ProcessSeen(pid=7, principal=HOSTILE, session="bomber", run_id="r_bomb", host_pid=1001)
    _bombed(tale, _bomb(), ProcessesListed(at=9.3, began_at=9.2, alive=(left,)))


@breaks("P13", "ended a program of a principal that threw no bomb")
def a_bystander_is_ended_for_a_bomb(tale: Tale) -> None:
    _bombed(tale, _bomb(), _waited(tale, "ann", "user ann's programs had 101 processes and threads"))


@breaks("P13", "no bomb was thrown")
def a_hostile_principal_throws_no_bomb(tale: Tale) -> None:
    _bombed(tale)


# P14 -----------------------------------------------------------------------------------------------------------------


@breaks("P14", "reached a session of another")
def a_stranger_reads_a_session(tale: Tale) -> None:
    tale.change(tale.first(AccessTried, answer="unknown_session", verb="info"), answer="ok")


@breaks("P14", "reached a session of another")
def a_stranger_learns_that_a_session_exists(tale: Tale) -> None:
    tale.change(tale.first(AccessTried, answer="unknown_session", verb="interrupt"), answer="busy")


@breaks("P14", "refused its own")
def an_owner_is_locked_out(tale: Tale) -> None:
    tale.change(tale.first(AccessTried, answer="ok"), answer="unknown_session")


@breaks("P14", "names another principal's")
def a_list_shows_foreign_sessions(tale: Tale) -> None:
    listed = tale.first(SessionsListed, principal="ann")
    tale.change(listed, seen=(*listed.seen, B))


@breaks("P14", "another principal stands in this log")
def a_message_lands_at_another_principal(tale: Tale) -> None:
    tale.change_event(B, tale.event(B, MessageAccepted, 0), content=tale.event(A, MessageAccepted, 0).content)


@breaks("P14", "another principal stopped this run")
def another_principal_stops_a_run(tale: Tale) -> None:
    stop = tale.first(StopRequested, A)
    run = tale.event(B, RunStarted, 0)
    tale.insert_event(B, run, RunStopping(run_id=run.run_id, cause=Cause(kind="user", reason=stop.reason)))


@breaks("P14", "its cap is 4")
def a_principal_exceeds_its_cap(tale: Tale) -> None:
    read = tale.first(StatisticsRead, running_of=lambda running: bool(running))
    tale.change(read, running_of=(("ann", LIMITS.principal_runs + 1),))


@breaks("P14", "reached the workspace of another principal")
def a_program_reads_the_workspace_of_another_principal(tale: Tale) -> None:
    tale.change(tale.first(Stamp, what="probe"), reached=("the workspace of mallory/k",))


# P16 -----------------------------------------------------------------------------------------------------------------


@breaks("P16", "left its wall: it reached the workspace of bob/b")
def a_program_reads_another_workspace(tale: Tale) -> None:
    tale.change(tale.first(Stamp, what="probe"), reached=("the workspace of bob/b",))


# a hostile principal ------------------------------------------------------------------------------------------------


def _holding(
    moment: Literal["before", "beside", "after"], *, memory: int = 60_000_000, descriptors: int = 90
) -> Record:
    return HoldingRead(at=3.0, incarnation=1, moment=moment, memory=memory, descriptors=descriptors)


AFTERWARDS = _holding("after")


def _besieged(tale: Tale, *records: Record, afterwards: Record = AFTERWARDS) -> None:
    tale.change(tale.first(Opened), hostile=HOSTILE)
    acts = tuple(HostileAct(name=name, did=3, felt=2, refused=1) for name in ACTS)
    for record in (_holding("before"), *records, afterwards):
        tale.add(record)
    tale.add(HostileActed(at=tale.records[-1].at + 1.0, acts=acts))


@breaks("P9", "holds 250,000,000 bytes more than before")
def a_hostile_principal_fills_the_memory(tale: Tale) -> None:
    _besieged(tale, afterwards=_holding("after", memory=310_000_000))


@breaks("P9", "memory was not read after")
def the_memory_after_a_hostile_principal_is_not_read(tale: Tale) -> None:
    _besieged(tale, afterwards=HoldingRead(at=9.0, incarnation=2, moment="after", memory=60_000_000, descriptors=90))


@breaks("P9", "holds 1001 descriptors")
def a_hostile_principal_takes_the_descriptors(tale: Tale) -> None:
    _besieged(tale, _holding("beside", descriptors=1001))


@breaks("P14", "kept another one out")
def a_hostile_principal_keeps_a_sender_out(tale: Tale) -> None:
    _besieged(tale)
    answer = tale.first(SendAcknowledged)
    tale.drop(answer)
    tale.add(Refused(at=answer.at, token=answer.token, code="host_busy"))


@breaks("P14", "kept another one out")
def a_hostile_principal_keeps_a_stop_out(tale: Tale) -> None:
    _besieged(tale)
    answer = tale.first(StopAnswered)
    tale.drop(answer)
    tale.add(Refused(at=answer.at, token=answer.token, code="rate_limited"))


@breaks("P14", "got bytes 2.5 s after its key was revoked")
def a_revoked_stream_goes_on(tale: Tale) -> None:
    _besieged(tale, StreamRevoked(at=9.0, key_id="k_1", late_s=2.5, ended=True))


@breaks("P14", "was not ended")
def a_revoked_stream_stays_open(tale: Tale) -> None:
    _besieged(tale, StreamRevoked(at=9.0, key_id="k_1", late_s=0.1, ended=False))


@breaks("P5", "")
def an_accepted_message_of_a_hostile_principal_is_lost(tale: Tale) -> None:
    tale.change(tale.first(Opened), hostile="ann")
    tale.drop_event(A, tale.event(A, MessageSettled, 0))


@pytest.mark.parametrize(("promise", "why", "edit"), CASES, ids=[f"{p}-{e.__name__}" for p, _, e in CASES])
def test_a_history_that_breaks_a_promise_is_rejected(promise: str, why: str, edit: Callable[[Tale], None]) -> None:
    tale = Tale()
    edit(tale)
    report = judge(tale.records)
    judgement = report.of(promise)
    assert judgement.verdict == "broken"
    assert any(why in violation.what for violation in judgement.violations), [v.what for v in judgement.violations]
    assert all(violation.evidence for violation in judgement.violations)
    assert not report.passed


def test_each_promise_has_at_least_five_histories_that_break_it() -> None:
    names = [edit.__name__ for _, _, edit in CASES]
    assert len(set(names)) == len(names)
    for number in range(1, 15):
        assert sum(1 for promise, _, _ in CASES if promise == f"P{number}") >= 5


def test_a_drain_may_park_a_run_of_the_load_whose_logs_are_not_recorded() -> None:
    tale = Tale()
    tale.change(tale.first(Drained), parked=("r_of_a_schedule",))
    assert not judge(tale.records).passed
    tale.add(PeopleSettled(at=tale.end(), checked=1, runs=("r_of_a_schedule",)))
    assert judge(tale.records).passed


def test_a_hostile_principal_within_all_bounds_keeps_the_report_good() -> None:
    tale = Tale()
    _besieged(
        tale,
        _holding("beside", memory=400_000_000, descriptors=900),
        StreamRevoked(at=9.0, key_id="k_1", late_s=0.9, ended=True),
    )
    report = judge(tale.records)
    assert report.passed
    assert [act.name for act in report.hostile] == list(ACTS)


def test_bombs_that_are_ended_in_time_keep_the_report_good() -> None:
    tale = Tale()
    early = ProcessSeen(pid=7, principal=HOSTILE, session="bomber", run_id="r_bomb", host_pid=1001)
    _bombed(
        tale,
        _bomb(peak=200),
        _bomb(peak=90, reported=False),
        ProcessesListed(at=8.95, began_at=8.9, alive=(early,)),
        _waited(tale, "ann", ""),
    )
    report = judge(tale.records)
    assert report.passed
    assert report.bombs
    assert report.of("P13").observations == judge(Tale().records).of("P13").observations + 3
    tale.add(_waited(tale, HOSTILE, f"user {HOSTILE}'s programs had 101 processes and threads"))
    assert judge(tale.records).of("P13").verdict == "kept"


@pytest.mark.parametrize("missed", ["did", "felt"])
def test_an_act_of_a_hostile_principal_that_was_not_felt_fails_the_report(missed: str) -> None:
    tale = Tale()
    _besieged(tale)
    done = tale.first(HostileActed)
    tale.change(done, acts=(replace(done.acts[0], did=3 * (missed == "felt"), felt=0), *done.acts[1:]))
    report = judge(tale.records)
    assert all(judgement.passed for judgement in report.judgements)
    assert not report.passed


def test_a_hostile_principal_that_did_nothing_at_all_fails_the_report() -> None:
    tale = Tale()
    tale.change(tale.first(Opened), hostile=HOSTILE)
    assert not judge(tale.records).passed


def test_a_failpoint_that_was_not_hit_fails_the_report() -> None:
    world = World(failpoints=("store.send.before", "store.claim.before"))
    world.start_host()
    world.send(A)
    world.kill("store.send.before")
    report = judge(world.settle())
    assert report.failpoints == {"store.send.before": True, "store.claim.before": False}
    assert not report.passed
