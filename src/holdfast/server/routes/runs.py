"""Routes of a session's runs."""

from __future__ import annotations

from holdfast import errors
from holdfast.protocol.http import RunList
from holdfast.protocol.messages import RunView
from holdfast.server.context import ServerContext
from holdfast.server.large_responses import respond_with_list
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router

__all__ = ["ROUTER"]

ROUTER = Router()


@ROUTER.route(
    "GET", "/v1/sessions/{key}/runs", responses={200: RunList}, errors=(errors.UnknownSession, errors.SessionDeleted)
)
async def list_runs(server: ServerContext, request: Request) -> Response | None:
    """List the session's newest runs, newest first."""
    await request.take_turn()
    return await respond_with_list(request, "runs", await server.session(request).runs())


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/runs/{run_id}",
    responses={200: RunView},
    errors=(errors.UnknownSession, errors.UnknownRun, errors.SessionDeleted),
)
async def get_run(server: ServerContext, request: Request) -> Response:
    """Return a run with its answer, cause, error and stop receipt."""
    return Response(200, encode(await server.session(request).run(request.path["run_id"])))
