"""Routes of schedules, which send messages at set times."""

from __future__ import annotations

from holdfast import errors
from holdfast.host.scheduler import Schedule
from holdfast.protocol.http import NothingBody, PauseBody, ScheduleBody, ScheduleList
from holdfast.protocol.messages import Receipt
from holdfast.protocol.schedules import ScheduleView
from holdfast.server.context import ServerContext
from holdfast.server.parameters import JsonBody, TextQuery
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router
from holdfast.server.routes.list_parameters import ALL, LIMIT, listed_principal

__all__ = ["ROUTER"]

ROUTER = Router()
_SESSION = TextQuery("session", "Return only schedules of this session.")


def _schedule(server: ServerContext, request: Request) -> Schedule:
    """Return the caller's schedule whose id is in the request's path."""
    return server.host.find_schedule(request.path["schedule_id"], principal=request.caller.principal)


@ROUTER.route(
    "POST",
    "/v1/schedules",
    body=JsonBody(ScheduleBody),
    responses={201: ScheduleView},
    errors=(
        errors.InvalidSchedule,
        errors.InvalidKey,
        errors.UnknownAgent,
        errors.UnknownPolicy,
        errors.LimitExceeded,
        errors.Draining,
    ),
)
async def put_schedule(server: ServerContext, request: Request, body: ScheduleBody) -> Response:
    """Create or replace a schedule, which sends a message to a session at set times.

    Sending an identical schedule with the same `schedule_id` changes nothing.
    """
    schedule = await server.session_named(request, body.session).put_schedule(body.schedule_id, body.spec())
    return Response(201, encode(await schedule.info()))


@ROUTER.route(
    "GET",
    "/v1/schedules",
    query=(_SESSION, LIMIT, ALL),
    responses={200: ScheduleList},
)
async def list_schedules(server: ServerContext, request: Request) -> Response:
    """List your schedules, in order of creation."""
    await request.take_turn()
    limit = LIMIT.parse(request)
    principal, session = listed_principal(request), _SESSION.parse(request)
    if principal is None and session is not None:
        raise errors.InvalidRequest("the parameters session and all are mutually exclusive", hint="omit one of them")
    found = await server.host.schedules(principal=principal, session=session, limit=limit)
    return Response(200, encode(ScheduleList(schedules=found)))


@ROUTER.route(
    "GET",
    "/v1/schedules/{schedule_id}",
    responses={200: ScheduleView},
    errors=(errors.UnknownSchedule, errors.InvalidKey),
)
async def get_schedule(server: ServerContext, request: Request) -> Response:
    """Return the schedule's current state, such as its next due time and the outcome of its ticks."""
    return Response(200, encode(await _schedule(server, request).info()))


@ROUTER.route(
    "PATCH",
    "/v1/schedules/{schedule_id}",
    body=JsonBody(PauseBody),
    responses={200: ScheduleView},
    errors=(errors.UnknownSchedule, errors.ScheduleBroken, errors.InvalidKey),
)
async def pause_schedule(server: ServerContext, request: Request, body: PauseBody) -> Response:
    """Pause a schedule, or resume it; a resumed schedule continues with its next tick."""
    schedule = _schedule(server, request)
    return Response(200, encode(await (schedule.pause() if body.paused else schedule.resume())))


@ROUTER.route(
    "POST",
    "/v1/schedules/{schedule_id}/run",
    body=JsonBody(NothingBody, optional=True),
    responses={202: Receipt},
    errors=(
        errors.UnknownSchedule,
        errors.ScheduleBroken,
        errors.ScheduleFinished,
        errors.ScheduleChanged,
        errors.SessionBusy,
        errors.MailboxFull,
        errors.SessionDeleted,
        errors.UnknownAgent,
        errors.InvalidKey,
        errors.Draining,
    ),
)
async def run_schedule(server: ServerContext, request: Request, body: NothingBody) -> Response:
    """Send the schedule's message now; the times of its ticks do not change."""
    schedule = _schedule(server, request)
    view = await schedule.info()
    await server.session_named(request, view.session).check_agent(view.agent)
    return Response(202, encode(await schedule.run_now()))


@ROUTER.route(
    "DELETE",
    "/v1/schedules/{schedule_id}",
    responses={200: ScheduleView},
    errors=(errors.UnknownSchedule, errors.InvalidKey),
)
async def delete_schedule(server: ServerContext, request: Request) -> Response:
    """Delete a schedule and return its last state. Messages already sent are not withdrawn."""
    return Response(200, encode(await _schedule(server, request).delete()))
