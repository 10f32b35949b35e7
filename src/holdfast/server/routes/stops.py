"""Routes that stop work: interrupt a run, stop or delete a session, and read the result of a slow stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import quote

from holdfast import errors
from holdfast.protocol.http import InterruptBody, StopBody, StopPending
from holdfast.protocol.messages import SessionStop
from holdfast.protocol.stopping import StopReceipt
from holdfast.server.context import ServerContext
from holdfast.server.parameters import JsonBody
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router
from holdfast.server.routes.messages import WAIT
from holdfast.server.stop_tickets import StopResult, StopTicket

__all__ = ["ROUTER", "run_stop"]

ROUTER = Router()


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/interrupt",
    body=JsonBody(InterruptBody, optional=True),
    query=(WAIT,),
    responses={200: StopReceipt, 202: StopPending},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def interrupt_session(server: ServerContext, request: Request, body: InterruptBody) -> Response:
    """Interrupt the active run, or only the run `run_id` if it is given; queued messages run next.

    The response is 200 with the receipt, or 202 with a stop id if the stop takes longer than the wait.
    """
    session = server.session(request)
    return await run_stop(
        server,
        request,
        lambda: session.interrupt(body.reason, run_id=body.run_id, grace_s=body.grace_s),
        wait_s=WAIT.parse(request),
    )


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/stop",
    body=JsonBody(StopBody, optional=True),
    query=(WAIT,),
    responses={200: SessionStop, 202: StopPending},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def stop_session(server: ServerContext, request: Request, body: StopBody) -> Response:
    """Stop the session's run and background work, and withdraw its queued messages."""
    session = server.session(request)
    return await run_stop(
        server, request, lambda: session.stop(body.reason, grace_s=body.grace_s), wait_s=WAIT.parse(request)
    )


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/stops/{stop_id}",
    responses={200: StopReceipt | SessionStop, 202: StopPending},
    errors=(errors.UnknownStop, errors.UnknownSession, errors.SessionDeleted),
)
async def get_stop(server: ServerContext, request: Request) -> Response:
    """Return the result of an interrupt, stop or deletion that took longer than its wait."""
    path = request.path
    return _ticket_response(await server.stops.find(request.caller.principal, path["key"], path["stop_id"]))


async def run_stop(
    server: ServerContext, request: Request, stop: Callable[[], Awaitable[StopResult]], *, wait_s: float | None = None
) -> Response:
    """Start a stop of the session in the request's path, and return the response.

    Parameters:
        server: state shared by the handlers.
        request: request for the stop.
        stop: function that stops the work, called without arguments.
        wait_s: maximum time in seconds to wait for the result, after which the response contains a stop id; if None,
            the setting ``stop_wait_s`` applies.
    """
    ticket = await server.stops.run(
        request.caller.principal,
        request.path["key"],
        stop,
        wait_s=server.settings.stop_wait_s if wait_s is None else wait_s,
    )
    return _ticket_response(ticket)


def _ticket_response(ticket: StopTicket) -> Response:
    if ticket.result.done():
        return Response(200, encode(ticket.result.result()))
    location = f"/v1/sessions/{quote(ticket.key, safe='')}/stops/{ticket.stop_id}"
    return Response(
        202,
        encode(StopPending(session=ticket.key, stop_id=ticket.stop_id)),
        ((b"location", location.encode("ascii")),),
    )
