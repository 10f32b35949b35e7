"""Transactions on the questions of a run: suspend, answer, unload (`park`), and the claim that resumes it.

Invariants:

- Once an interrupt of a run is recorded, the run asks no more questions and waits for no more answers.
- Parking a run removes its holder and increases its fence, so that the former holder can write nothing more.
- A question is asked once and answered once; repeating an answer returns the answer in the log.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import AlreadyAnswered, CallMismatch, InvalidRequest, UnknownQuestion
from holdfast.protocol.call_hash import hash_call
from holdfast.protocol.events import RunResumed, RunSuspended, Stored, decode_event, encode_json
from holdfast.protocol.messages import Answer, Question
from holdfast.protocol.states import next_run_state
from holdfast.storage.backend import Tables
from holdfast.storage.rows import HANDED_OVER, LEFT_TO_OTHERS, NOBODY, SessionRow
from holdfast.storage.transactions.grants import add_grant, check_grant
from holdfast.storage.transactions.session_log import EventLog, claim_of, existing_session, require_lease, stale_fence
from holdfast.storage.values import Answered, Appended, Claim, Lease, Parked

__all__ = ["answer", "park", "resume", "suspend"]

_DECISIONS = {"approval": ("approved", "denied", "expired"), "question": ("answered", "expired")}

_decode_question = msgspec.json.Decoder(Question).decode
_decode_answer = msgspec.json.Decoder(Answer).decode


def suspend(tables: Tables, lease: Lease, question: Question) -> Appended:
    """See `Store.suspend`."""
    row = require_lease(tables, lease)
    state = next_run_state(row.run_state, "suspend")
    if _known(row, question.question_id):
        return Appended(events=())
    question = _decode_question(encode_json(question))  # as it will be read: text that JSON can carry, no tuples
    if question.kind == "approval":
        question = msgspec.structs.replace(question, call_hash=hash_call(question))
    row.run_state = state
    row.questions = (*row.questions, question)
    row.updated_at = at = question.asked_at
    log = EventLog(row)
    log.add(RunSuspended(at=at, run_id=lease.run_id, question=question))
    tables.save(row)
    return Appended(events=log.write(tables, lease.run_id, at))


def _known(row: SessionRow, question_id: str) -> bool:
    return any(question.question_id == question_id for question in row.questions) or any(
        answered == question_id for answered, _ in row.answered
    )


def answer(tables: Tables, principal: str, key: str, given: Answer) -> Answered:
    """See `Store.answer`."""
    row = existing_session(tables, principal, key)
    given = _decode_answer(encode_json(given))
    question = next((open_ for open_ in row.questions if open_.question_id == given.question_id), None)
    if question is None:
        return _answered(row, _answer_in_log(tables, row, given))
    if given.decision not in _DECISIONS[question.kind]:
        raise InvalidRequest(
            f"question {given.question_id!r} does not accept the decision {given.decision}: it is "
            + ("an approval" if question.kind == "approval" else "a question"),
            hint="approve or deny it" if question.kind == "approval" else "answer it with text",
        )
    if given.decision != "expired" and question.due_at and given.at >= question.due_at:
        raise AlreadyAnswered(
            f"the deadline of question {given.question_id!r} has passed", hint="the question counts as expired"
        )
    if given.decision == "approved" and given.call_hash and given.call_hash != hash_call(question):
        raise CallMismatch(f"question {given.question_id!r} is for a different call than the approved one")
    check_grant(tables, row, question, given)
    left = tuple(other for other in row.questions if other is not question)
    if not left:
        row.run_state = next_run_state(row.run_state, "resume")
    row.questions = left
    row.updated_at = given.at
    assert row.run_id is not None
    log = EventLog(row)
    seq = log.add(RunResumed(at=given.at, run_id=row.run_id, answer=given, waiting=len(left)))
    row.answered = (*row.answered, (given.question_id, seq))
    tables.save(row)
    add_grant(tables, row, question, given)
    return _answered(row, given, log.write(tables, row.run_id, given.at))


def _answer_in_log(tables: Tables, row: SessionRow, given: Answer) -> Answer:
    """Return the answer in the log that `given` repeats.

    Raises:
        UnknownQuestion: if the question was not answered before.
        CallMismatch: if the earlier answer approved a different call.
        AlreadyAnswered: if the earlier answer has a different decision, text or scope.
    """
    seq = next((seq for question_id, seq in row.answered if question_id == given.question_id), None)
    if seq is None:
        raise UnknownQuestion(f"no open question {given.question_id!r} in session {row.key!r}")
    (stored,) = tables.events_between(row, seq, seq)
    event = decode_event(stored)
    assert isinstance(event, RunResumed)
    before = event.answer
    if given.call_hash and before.call_hash and given.call_hash != before.call_hash:
        raise CallMismatch(f"question {given.question_id!r} was for a different call than the one approved now")
    if (before.decision, before.text, before.scope) != (given.decision, given.text, given.scope):
        raise AlreadyAnswered(
            f"question {given.question_id!r} was {before.decision} already", hint="the run uses the earlier answer"
        )
    tables.counters.duplicates_prevented += 1
    return before


def _answered(row: SessionRow, answer: Answer, events: tuple[Stored, ...] = ()) -> Answered:
    assert row.run_id is not None
    return Answered(
        session=row.session,
        number=row.session,
        run_id=row.run_id,
        answer=answer,
        waiting=len(row.questions),
        parked=row.holder == NOBODY,
        events=events,
    )


def park(tables: Tables, lease: Lease, at: float, *, restarts: bool = False, handed_over: bool = False) -> Parked:
    """See `Store.park`."""
    row = tables.get(lease.session)
    if row is None or row.run_id != lease.run_id:
        raise stale_fence(tables, lease, row)
    if row.holder == NOBODY and row.fence == lease.fence + 1:
        tables.counters.duplicates_prevented += 1
        return Parked(ready=not row.questions)
    require_lease(tables, lease)
    row.fence += 1
    row.holder = NOBODY
    row.attempt += restarts
    if handed_over:
        row.resumed_as = LEFT_TO_OTHERS
    row.append_nth = row.append_seq = 0
    row.updated_at = at
    tables.save(row)
    return Parked(ready=not row.questions)


def resume(tables: Tables, row: SessionRow, run_id: str, at: float) -> Claim | None:
    """Claim the session's run if it is parked and has no open questions; otherwise return None.

    The row records `run_id`, so that a repeated claim is recognized.
    """
    if row.holder != NOBODY or row.questions:
        return None
    handed_over = row.resumed_as in (HANDED_OVER, LEFT_TO_OTHERS)
    row.fence += 1
    row.holder = tables.epoch
    row.resumed_as = run_id
    row.updated_at = at
    tables.save(row)
    return claim_of(tables, row, resumed=True, handed_over=handed_over)
