"""Routes of messages: send one, read its state, and withdraw it."""

from __future__ import annotations

from holdfast import errors
from holdfast.host.budgets import SMALL_MESSAGE_CHARACTERS
from holdfast.protocol.http import SendBody, SendOutcome
from holdfast.protocol.messages import Receipt, Settlement
from holdfast.server.context import ServerContext
from holdfast.server.parameters import JsonBody, NumberQuery
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router

__all__ = ["ROUTER"]

ROUTER = Router()
WAIT = NumberQuery("wait", "Wait up to this many seconds for the result.", limit=lambda settings: settings.wait_limit_s)


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/messages",
    body=JsonBody(SendBody),
    query=(WAIT,),
    responses={202: Receipt, 200: SendOutcome},
    errors=(
        errors.SessionBusy,
        errors.MailboxFull,
        errors.IdempotencyMismatch,
        errors.SessionDeleted,
        errors.UnknownAgent,
        errors.SessionAgentMissing,
        errors.UnknownPolicy,
        errors.UnknownAttachment,
        errors.InvalidKey,
        errors.Draining,
    ),
)
async def send_message(server: ServerContext, request: Request, body: SendBody) -> Response:
    """Send a message to the session.

    The response is 202 with a receipt once the message is durable. With `?wait=`, the response is 200 with the outcome
    if the message is settled within that time.
    """
    wait_s = WAIT.parse(request)
    large = len(body.content) > SMALL_MESSAGE_CHARACTERS
    writing = await request.take_write(len(body.content.encode())) if large else None
    try:
        receipt, settling = await server.session(request).send_expecting(body.content, body.options())
    finally:
        if writing is not None:
            writing.release()
    settled = await server.waits.wait(request, settling, wait_s)
    if settled is None:
        return Response(202, encode(receipt))
    outcome = SendOutcome(
        status=settled.state,
        text=settled.text,
        cause=settled.cause,
        error=settled.error,
        message_id=settled.message_id,
        run_id=settled.run_id,
        receipt=receipt,
    )
    return Response(200, encode(outcome))


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/messages/{message_id}",
    query=(WAIT,),
    responses={200: Settlement},
    errors=(errors.UnknownSession, errors.UnknownMessage, errors.SessionDeleted),
)
async def get_message(server: ServerContext, request: Request) -> Response:
    """Return the state of a message; `state` is `accepted` or `taken` until the message is settled."""
    wait_s = WAIT.parse(request)
    session = server.session(request)
    message_id = request.path["message_id"]
    settled = await server.waits.wait(request, await session.expect(message_id), wait_s) if wait_s else None
    return Response(200, encode(settled or await session.message(message_id)))


@ROUTER.route(
    "DELETE",
    "/v1/sessions/{key}/messages/{message_id}",
    responses={200: Settlement},
    errors=(errors.UnknownSession, errors.UnknownMessage, errors.AlreadySettled, errors.SessionDeleted),
)
async def withdraw_message(server: ServerContext, request: Request) -> Response:
    """Withdraw a queued message."""
    return Response(200, encode(await server.session(request).withdraw(request.path["message_id"])))
