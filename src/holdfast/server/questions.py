"""The operations on what suspended runs ask of people: approvals of calls, and questions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast import errors
from holdfast.host import Session
from holdfast.protocol import messages
from holdfast.protocol.messages import Question
from holdfast.server.exchange import Answer, Exchange, encode
from holdfast.server.native import Body, Native
from holdfast.server.operations import Table

__all__ = ["TABLE", "Choice", "decide"]

TABLE = Table()

Choice = Literal["approve", "deny", "answer"]


class DecisionBody(Body, frozen=True, kw_only=True):
    """Whether a call may be made, or the answer to a question. ``text``: the answer, or a reason for the model."""

    decision: Choice
    text: Annotated[str, Meta(max_length=100_000)] = ""


class QuestionList(msgspec.Struct, frozen=True, kw_only=True):
    """What the suspended run waits for, oldest first."""

    questions: list[Question]


_decision_body = msgspec.json.Decoder(DecisionBody)


async def decide(session: Session, question_id: str, decision: Choice, text: str) -> messages.Answer:
    """Give the answer to the session. Raises as `SessionLike.answer` does."""
    match decision:
        case "approve":
            return await session.approve(question_id, note=text)
        case "deny":
            return await session.deny(question_id, reason=text)
        case "answer":
            return await session.answer(question_id, text)


@TABLE.enter("GET", "/v1/sessions/{key}/approvals", answers={200: QuestionList}, errors=(errors.UnknownSession,))
async def list_questions(native: Native, exchange: Exchange) -> Answer:
    """What the session's suspended run asks: approvals of calls and questions, oldest first."""
    return Answer(200, encode(QuestionList(questions=await native.session(exchange).questions())))


@TABLE.enter(
    "POST",
    "/v1/sessions/{key}/approvals/{question_id}",
    body=DecisionBody,
    answers={200: messages.Answer},
    errors=(errors.UnknownSession, errors.UnknownQuestion, errors.AlreadyAnswered, errors.SessionDeleted),
)
async def answer_question(native: Native, exchange: Exchange) -> Answer:
    """Approve or deny a call, or answer a question; the run goes on once nothing of it is open any more.

    The same decision may be sent again without effect.
    """
    body = await exchange.body(_decision_body)
    session = native.session(exchange)
    return Answer(200, encode(await decide(session, exchange.path["question_id"], body.decision, body.text)))
