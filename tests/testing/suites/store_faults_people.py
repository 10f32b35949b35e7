"""Stores with one fault each in what runs do with people: steer, roll back, ask and park."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.protocol.messages import Answer, Question
from holdfast.storage import MemoryStore
from holdfast.storage.port import (
    Answered,
    Appended,
    Claim,
    Committed,
    DueQuestion,
    Lease,
    NotReady,
    Parked,
    RunCommit,
    Send,
    SendResult,
    Served,
    Steered,
)
from holdfast.storage.rows import SessionRow
from tests.testing.suites.store_faults import answered, changed, found_by, later


class Rows(MemoryStore):
    """No fault: a short form for those that have one."""

    def row(self, lease: Lease) -> SessionRow:
        found = self.backend.tables.get(lease.session)
        assert found is not None
        return found


@found_by("a_steering_message_is_given_to_the_run_it_is_aimed_at")
class SteersAgain(Rows):
    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        waiting = self.row(lease).waiting
        done = super().steer(lease, step=step, at=at)
        self.row(lease).waiting = waiting
        return done


@found_by("what_was_not_steered_waits_like_any_other")
class ForgetsWhatDidNotSteer(Rows):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        row = self.row(commit.lease)
        row.waiting = tuple(mail for mail in row.waiting if mail.message.policy != "steer")
        return super().commit_run(commit)


@found_by("a_stopping_run_is_not_steered")
class SteersWhatStops(Rows):
    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        row = self.row(lease)
        cause, row.cause = row.cause, None
        done = super().steer(lease, step=step, at=at)
        row.cause = cause
        return done


@found_by("steering_and_an_interrupt_go_in_one_order")
class LetsInterruptsPass(Rows):
    def steer(self, lease: Lease, *, step: int, at: float) -> asyncio.Future[Steered]:
        return later(lambda: MemoryStore.steer(self, lease, step=step, at=at))


@found_by("a_rescued_run_keeps_what_steered_it")
class ForgetsWhatSteered(Rows):
    async def rescue(self, *, at: float, served: Served | None = None) -> Sequence[Claim]:
        for row in self.backend.tables.orphans():
            row.taken = row.taken[: len(row.taken) - row.steered]
            row.steered = 0
        return await super().rescue(at=at, served=served)


@found_by("a_rollback_takes_the_run_back")
class KeepsWhatWasTakenBack(Rows):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        row = self.row(commit.lease)
        row.rolled_back = row.rolled_back and commit.status == "completed"
        return super().commit_run(commit)


@found_by("a_rollback_before_the_commit_wins_whatever_the_run_says")
class BelievesTheRun(Rows):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        row = self.row(commit.lease)
        row.rolled_back = row.rolled_back and commit.status != "completed"
        return super().commit_run(commit)


@found_by("a_rollback_of_nothing_is_a_message")
class TakesBackOnlyWhatIsOn(Rows):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        row = self.backend.tables.find(request.principal, request.key)
        if request.policy == "rollback" and (row is None or row.run_id is None):
            request = changed(request, policy="queue")
        return super().send(request)


@found_by("a_question_suspends_the_run_until_it_is_answered")
class ResumesAtTheFirstAnswer(Rows):
    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        done = super().answer(principal, key, answer)
        row = self.backend.tables.find(principal, key)
        if row is not None:
            row.run_state = "running"
        return done


@found_by("a_question_is_answered_once")
class TakesTheLastAnswer(Rows):
    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        done = super().answer(principal, key, answer)
        return done if done.exception() else answered(changed(done.result(), answer=answer))


@found_by("questions_have_a_deadline")
class ListsTheLatestDueFirst(Rows):
    async def due_questions(self, *, before: float, limit: int) -> Sequence[DueQuestion]:
        return (await super().due_questions(before=before, limit=1000))[::-1][:limit]


@found_by("a_stop_ends_the_questions")
class AsksOn(Rows):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        row = self.backend.tables.find(request.principal, request.key)
        questions = () if row is None else row.questions
        done = super().send(request)
        if row is not None:
            row.questions = questions
        return done


@found_by("a_run_may_end_with_a_question_open")
class AsksForTheDead(Rows):
    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        questions = self.row(commit.lease).questions
        done = super().commit_run(commit)
        self.row(commit.lease).questions = questions
        return done


@found_by("a_parked_run_keeps_its_slot_and_has_no_holder")
class ParksUnderTheOldFence(Rows):
    def park(
        self, lease: Lease, *, at: float, restarts: bool = False, handed_over: bool = False
    ) -> asyncio.Future[Parked]:
        done = super().park(lease, at=at, restarts=restarts, handed_over=handed_over)
        self.row(lease).fence = lease.fence
        return done


@found_by("a_run_that_is_parked_at_work_has_a_further_attempt")
class CountsNoAttempt(Rows):
    def park(
        self, lease: Lease, *, at: float, restarts: bool = False, handed_over: bool = False
    ) -> asyncio.Future[Parked]:
        return super().park(lease, at=at, handed_over=handed_over)


@found_by("the_last_answer_and_the_parking_meet_in_any_order")
class TellsNobody(Rows):
    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        done = super().answer(principal, key, answer)
        return done if done.exception() else answered(changed(done.result(), parked=False))


@found_by("a_stop_of_a_parked_run_is_answered_by_a_claim")
class GoesOnAllTheSame(Rows):
    def claim(
        self, session: int, *, run_id: str, at: float, served: Served | None = None
    ) -> asyncio.Future[Claim | NotReady]:
        done = super().claim(session, run_id=run_id, at=at, served=served)
        found = done.result()
        return answered(changed(found, interrupt=None)) if isinstance(found, Claim) else done


@found_by("a_suspended_run_whose_holder_is_gone_is_rescued")
class ForgetsQuestions(Rows):
    async def rescue(self, *, at: float, served: Served | None = None) -> Sequence[Claim]:
        return tuple(changed(claim, questions=()) for claim in await super().rescue(at=at, served=served))


@found_by("text_that_no_json_can_carry_is_written_out_in_questions")
class AsksInQuestionMarks(Rows):
    def suspend(self, lease: Lease, question: Question) -> asyncio.Future[Appended]:
        return super().suspend(lease, changed(question, text=question.text.encode("utf-8", "replace").decode()))


@found_by("an_approval_counts_for_the_call_that_was_shown_only")
class ApprovesWhateverIsAsked(Rows):
    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        row = self.backend.tables.find(principal, key)
        asked = () if row is None else row.questions
        hashes = {question.question_id: question.call_hash for question in asked}
        return super().answer(
            principal, key, changed(answer, call_hash=hashes.get(answer.question_id, answer.call_hash))
        )


@found_by("large_messages_that_wait_come_whole_and_have_a_bound")
class TakesAnySize(Rows):
    def send(self, request: Send) -> asyncio.Future[SendResult]:
        return super().send(changed(request, mailbox_size=10**9))
