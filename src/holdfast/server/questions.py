"""Operations on the open requests of suspended runs to people: approvals of calls, and questions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast import errors
from holdfast.host import Answerer, Session
from holdfast.protocol import messages
from holdfast.protocol.call_hash import hash_of
from holdfast.protocol.messages import Question
from holdfast.server.exchange import Answer, Caller, Exchange, encode
from holdfast.server.exports import give_list
from holdfast.server.native import Body, Native
from holdfast.server.operations import Table

__all__ = ["TABLE", "Choice", "DecisionBody", "decide"]

TABLE = Table()

Choice = Literal["approve", "deny", "answer"]
_DECISIONS: dict[Choice, messages.Decision] = {"approve": "approved", "deny": "denied", "answer": "answered"}


class DecisionBody(Body, frozen=True, kw_only=True):
    """A decision on a call, or the answer to a question.

    ``text``: the answer, or a reason for the model. For an approval, ``call_hash``: the hash from the question, and
    ``approval_key``: the key typed by a person, where the server requires it.
    """

    decision: Choice
    text: Annotated[str, Meta(max_length=100_000)] = ""
    call_hash: Annotated[str, Meta(max_length=200)] = ""
    approval_key: Annotated[str, Meta(max_length=200)] = ""


class QuestionList(msgspec.Struct, frozen=True, kw_only=True):
    """Open questions of the suspended run, oldest first."""

    questions: list[Question]


_decision_body = msgspec.json.Decoder(DecisionBody)


async def decide(
    native: Native, caller: Caller, session: Session, question_id: str, body: DecisionBody
) -> messages.Answer:
    """Submit the answer to the session, in the name of the credential's owner.

    Raises:
        ApprovalKeyRequired: an approval requires a key typed by a person, and it is missing or wrong.
        RateLimited: this credential has tried too many wrong keys.
        InvalidRequest: an approval without a `call_hash`.
        CallMismatch, UnknownQuestion, AlreadyAnswered: as `SessionLike.approve`.
    """
    approval_key = ""
    if body.decision == "approve":
        hash_of(question_id, body.call_hash)
        if native.approval_key_required:
            approval_key = native.approver(caller, body.approval_key, session.principal)
    who = Answerer(caller.owner or caller.principal, caller.credential, approval_key)
    decision = _DECISIONS[body.decision]
    return await session.decide(question_id, decision, body.text, call_hash=body.call_hash, answerer=who)


@TABLE.enter(
    "GET",
    "/v1/sessions/{key}/approvals",
    answers={200: QuestionList},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def list_questions(native: Native, exchange: Exchange) -> Answer | None:
    """List the open questions of the session's suspended run, approvals of calls included, oldest first."""
    await exchange.take_turn()
    return await give_list(exchange, "questions", await native.session(exchange).questions())


@TABLE.enter(
    "POST",
    "/v1/sessions/{key}/approvals/{question_id}",
    body=DecisionBody,
    answers={200: messages.Answer},
    errors=(
        errors.UnknownSession,
        errors.UnknownQuestion,
        errors.AlreadyAnswered,
        errors.CallMismatch,
        errors.ApprovalKeyRequired,
        errors.SessionDeleted,
    ),
)
async def answer_question(native: Native, exchange: Exchange) -> Answer:
    """Approve or deny a call, or answer a question; the run continues once all its questions are answered.

    An approval names the displayed call by its `call_hash`. Where agents run programs unsandboxed, it also requires
    an approval key typed by a person. Repeating the same decision has no effect.
    """
    body = await exchange.body(_decision_body)
    question_id = exchange.path["question_id"]
    return Answer(200, encode(await decide(native, exchange.caller, native.session(exchange), question_id, body)))
