"""Routes of API keys: list, create and revoke them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import errors
from holdfast.protocol.http import KeyBody, KeyCreated, KeyList, KeyRevoked, KeyView
from holdfast.server.auth import LOCAL
from holdfast.server.context import ServerContext
from holdfast.server.parameters import FlagQuery, JsonBody
from holdfast.server.principal_work import Ended, find_work, stop_principal
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router

if TYPE_CHECKING:
    from holdfast.storage.port import KeyRecord, Store

__all__ = ["ROUTER", "key_created", "key_view"]

ROUTER = Router()
_LOCAL_SESSIONS = 1000
"""Maximum number of `local`'s sessions that are counted for the answer to a first key."""
_STOP = FlagQuery("stop", "`true` also stops its principal's work, even if the key is already revoked.")


@ROUTER.route("GET", "/v1/keys", access="admin", responses={200: KeyList})
async def list_keys(server: ServerContext, request: Request) -> Response:
    """List all API keys, including revoked ones, without their secrets."""
    records = await server.keys.records()
    return Response(200, encode(KeyList(keys=[key_view(record) for record in records])))


@ROUTER.route("POST", "/v1/keys", access="admin", body=JsonBody(KeyBody), responses={201: KeyCreated})
async def create_key(server: ServerContext, request: Request, body: KeyBody) -> Response:
    """Create an API key. Once a key other than an approval key exists, every request requires a key or a signed token.

    The secret appears only in this response.
    """
    if server.needs_approval_key(request.caller) and (body.role == "approver" or not server.programs):
        # Otherwise an agent with a key could create one for itself that approves.
        server.check_approval_key(request.caller, body.approval_key, body.principal)
    request.use.release()  # a request without a key that creates the first one still gets its answer
    first = not server.keys.ever
    record, secret = await server.keys.create(
        principal=body.principal, role=body.role, label=body.label, agents=body.agents
    )
    first = first and server.keys.ever
    return Response(201, encode(await key_created(server.host.store, record, secret, first=first)))


@ROUTER.route(
    "DELETE",
    "/v1/keys/{key_id}",
    access="admin",
    query=(_STOP,),
    responses={200: KeyRevoked},
    errors=(errors.UnknownKey,),
)
async def revoke_key(server: ServerContext, request: Request) -> Response:
    """Revoke an API key immediately, and end the streams and requests that use it.

    Runs, background work and schedules of the key's principal continue and are listed. With `?stop=true`, the runs and
    the background work are stopped, and the schedules are paused.
    """
    stop = _STOP.parse(request)
    request.use.release()  # a caller that revokes its own key still gets the answer
    record = await server.keys.revoke(request.path["key_id"], again=stop)
    ended = await stop_principal(server.host, record.principal) if stop else Ended((), ())
    left = await find_work(server.host, record.principal)
    view = KeyRevoked(
        keys=[key_view(one) for one in await server.keys.records()],
        principal=record.principal,
        stopped=list(ended.sessions),
        paused=list(ended.schedules),
        running=list(left.sessions),
        active=list(left.schedules),
    )
    return Response(200, encode(view))


async def key_created(store: Store, record: KeyRecord, secret: str, *, first: bool) -> KeyCreated:
    """Return the answer to a request that created a key; `first` is whether requests needed no key before."""
    count = await _count_local(store) if first else 0
    return KeyCreated(key=key_view(record), secret=secret, first=first, local_sessions=count)


async def _count_local(store: Store) -> int:
    """Return the number of sessions of the principal `local` that are not deleted, or the limit if it has more."""
    count = 0
    before: tuple[float, int] | None = None
    while count < _LOCAL_SESSIONS:
        page = await store.sessions(principal=LOCAL.principal, limit=_LOCAL_SESSIONS, before=before)
        count += sum(view.state != "deleted" for view in page)
        if len(page) < _LOCAL_SESSIONS:
            return count
        before = page[-1].updated_at, page[-1].number
    return _LOCAL_SESSIONS


def key_view(record: KeyRecord) -> KeyView:
    """Return a key's record without its hash."""
    return KeyView(
        key_id=record.key_id,
        principal=record.principal,
        role=record.role,
        label=record.label,
        created_at=record.created_at,
        revoked_at=record.revoked_at,
        agents=None if record.agents is None else list(record.agents),
    )
