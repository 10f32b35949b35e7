"""Routes for the questions and approvals for which suspended runs wait: list them, and answer them."""

from __future__ import annotations

from holdfast import errors
from holdfast.host import Answerer, Session
from holdfast.protocol.call_hash import hash_of
from holdfast.protocol.http import Choice, DecisionBody, QuestionList
from holdfast.protocol.messages import Answer, Decision
from holdfast.server.caller import Caller
from holdfast.server.context import ServerContext
from holdfast.server.large_responses import respond_with_list
from holdfast.server.parameters import JsonBody
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router

__all__ = ["ROUTER", "decide"]

ROUTER = Router()

_DECISIONS: dict[Choice, Decision] = {"approve": "approved", "deny": "denied", "answer": "answered"}


async def decide(
    server: ServerContext, caller: Caller, session: Session, question_id: str, body: DecisionBody
) -> Answer:
    """Submit a decision to the session on behalf of the credential's owner.

    Raises:
        ApprovalKeyRequired: if an approval requires a key typed by a person, and the key is missing or wrong.
        RateLimited: if the credential's owner has tried too many wrong keys.
        InvalidRequest: if an approval has no `call_hash`.
        CallMismatch, UnknownQuestion, AlreadyAnswered: as `SessionAPI.approve`.
    """
    approval_key = ""
    if body.decision == "approve":
        hash_of(question_id, body.call_hash)
        if server.needs_approval_key(caller):
            approval_key = server.check_approval_key(caller, body.approval_key, session.principal)
    who = Answerer(caller.owner or caller.principal, caller.credential, approval_key)
    decision = _DECISIONS[body.decision]
    return await session.decide(
        question_id, decision, body.text, call_hash=body.call_hash, scope=body.scope, answerer=who
    )


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/approvals",
    responses={200: QuestionList},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def list_questions(server: ServerContext, request: Request) -> Response | None:
    """List the open questions of the session's suspended run, including approvals of calls, oldest first."""
    await request.take_turn()
    return await respond_with_list(request, "questions", await server.session(request).questions())


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/approvals/{question_id}",
    body=JsonBody(DecisionBody),
    responses={200: Answer},
    errors=(
        errors.UnknownSession,
        errors.UnknownQuestion,
        errors.AlreadyAnswered,
        errors.CallMismatch,
        errors.LimitExceeded,
        errors.ApprovalKeyRequired,
        errors.SessionDeleted,
    ),
)
async def answer_question(server: ServerContext, request: Request, body: DecisionBody) -> Response:
    """Approve or deny a call, or answer a question; the run continues once all its questions are answered.

    To approve a call, send the `call_hash` of the call that was displayed. The access that the call asks for holds for
    this call, or for the session or the principal if `scope` names one of them; the answer then names the grant. If
    agents run programs, an approval also requires an approval key typed by a person; if they only use files, an
    approval with the local token requires it. Repeating the same decision has no effect.
    """
    question_id = request.path["question_id"]
    return Response(200, encode(await decide(server, request.caller, server.session(request), question_id, body)))
