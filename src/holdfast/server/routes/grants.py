"""Routes of grants: access beyond their wall that people gave to the calls of a session or a principal."""

from __future__ import annotations

from holdfast import errors
from holdfast.protocol.http import GrantList
from holdfast.protocol.messages import Grant
from holdfast.server.context import ServerContext
from holdfast.server.parameters import TextQuery
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router

__all__ = ["ROUTER"]

ROUTER = Router()
_SESSION = TextQuery("session", "Return only grants that hold in this session.")


@ROUTER.route(
    "GET",
    "/v1/grants",
    query=(_SESSION,),
    responses={200: GrantList},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def list_grants(server: ServerContext, request: Request) -> Response:
    """List your grants, oldest first: what people allowed calls beyond their wall, and who allowed it."""
    await request.take_turn()
    key = _SESSION.parse(request)
    if key is None:
        found = await server.host.grants(principal=request.caller.principal)
    else:
        found = await server.session_named(request, key).grants()
    return Response(200, encode(GrantList(grants=found)))


@ROUTER.route(
    "DELETE",
    "/v1/grants/{grant_id}",
    responses={200: Grant},
    errors=(errors.UnknownGrant,),
)
async def revoke_grant(server: ServerContext, request: Request) -> Response:
    """Revoke a grant, and end the programs that run with its access. Later calls must ask again."""
    revoked = await server.host.revoke_grant(request.path["grant_id"], principal=request.caller.principal)
    return Response(200, encode(revoked))
