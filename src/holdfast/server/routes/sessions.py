"""Routes of sessions: list them, read one and its parts, and delete it."""

from __future__ import annotations

import math

from holdfast import errors
from holdfast.protocol.http import Mailbox, SessionList, StopPending, Transcript
from holdfast.protocol.messages import SessionStop, SessionView, TreeNode
from holdfast.server.context import ServerContext
from holdfast.server.large_responses import respond_with_list, respond_with_transcript
from holdfast.server.parameters import IntegerQuery, TextQuery
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router
from holdfast.server.routes.list_parameters import ALL, LIMIT, LIST_LIMIT, listed_principal
from holdfast.server.routes.stops import run_stop

__all__ = ["ROUTER"]

ROUTER = Router()
_AFTER = IntegerQuery("after", "Return only entries with a greater `n`.", least=0, most=2**53, default=0)
_PAGE_LIMIT = IntegerQuery(
    "limit",
    f"Maximum number of entries (default and at most {LIST_LIMIT}).",
    least=1,
    most=LIST_LIMIT,
    default=LIST_LIMIT,
)


_BEFORE = TextQuery("before", "Return the next page: pass `next` of the previous page.")


@ROUTER.route("GET", "/v1/sessions", query=(LIMIT, _BEFORE, ALL), responses={200: SessionList})
async def list_sessions(server: ServerContext, request: Request) -> Response:
    """List your sessions, most recently changed first."""
    await request.take_turn()
    limit, before = LIMIT.parse(request), _position(_BEFORE.parse(request))
    found = await server.host.sessions(principal=listed_principal(request), limit=limit, before=before)
    following = f"{found[-1].updated_at!r}-{found[-1].number}" if len(found) == limit else None
    return Response(200, encode(SessionList(sessions=found, next=following)))


def _position(before: str | None) -> tuple[float, int] | None:
    """Return the position in the list that `before` encodes. Raises `InvalidRequest` if it is malformed."""
    if before is None:
        return None
    changed_at, _, number = before.rpartition("-")
    try:
        position = float(changed_at), int(number)
    except ValueError:
        position = math.nan, 0
    if not (math.isfinite(position[0]) and 0 < position[1] < 2**63):
        raise errors.InvalidRequest("invalid ?before=", hint="pass the value of `next` from the previous page")
    return position


@ROUTER.route(
    "GET", "/v1/sessions/{key}", responses={200: SessionView}, errors=(errors.UnknownSession, errors.SessionDeleted)
)
async def get_session(server: ServerContext, request: Request) -> Response:
    """Return the session's current state."""
    return Response(200, encode(await server.session(request).info()))


@ROUTER.route(
    "DELETE",
    "/v1/sessions/{key}",
    responses={200: SessionStop, 202: StopPending},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def delete_session(server: ServerContext, request: Request) -> Response:
    """Stop and delete the session; for a while afterwards, requests with its key are answered with 410."""
    return await run_stop(server, request, server.session(request).delete)


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/transcript",
    query=(_AFTER, _PAGE_LIMIT),
    responses={200: Transcript},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def get_transcript(server: ServerContext, request: Request) -> Response | None:
    """Return the entries that the model sees, in order: at most `limit` entries, starting after entry `after`."""
    after, limit = _AFTER.parse(request), _PAGE_LIMIT.parse(request)
    return await respond_with_transcript(request, server.session(request), after=after, limit=limit)


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/mailbox",
    responses={200: Mailbox},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def get_mailbox(server: ServerContext, request: Request) -> Response | None:
    """List the queued messages, in queue order."""
    await request.take_turn()
    return await respond_with_list(request, "items", await server.session(request).mailbox())


@ROUTER.route(
    "GET", "/v1/sessions/{key}/tree", responses={200: TreeNode}, errors=(errors.UnknownSession, errors.SessionDeleted)
)
async def get_session_tree(server: ServerContext, request: Request) -> Response:
    """Return the tree of the session's live tasks, threads and processes."""
    await request.take_turn()
    return Response(200, encode(await server.session(request).tree()))
