"""Routes of a session's history: retry, undo, compact, fork, export and import."""

from __future__ import annotations

from holdfast import errors
from holdfast.protocol.http import CompactBody, ForkBody, NothingBody, Transcript
from holdfast.protocol.messages import Receipt, SessionExport, SessionView
from holdfast.server.context import ServerContext
from holdfast.server.large_responses import respond_with_export, respond_with_list, respond_with_transcript
from holdfast.server.parameters import JsonBody
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router
from holdfast.storage.port import ALL_ENTRIES

__all__ = ["ROUTER"]

ROUTER = Router()


_GONE = (errors.UnknownSession, errors.SessionDeleted)


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/retry",
    body=JsonBody(NothingBody, optional=True),
    responses={202: Receipt},
    errors=(
        *_GONE,
        errors.SessionBusy,
        errors.NothingToUndo,
        errors.HistoryChanged,
        errors.UnknownAgent,
        errors.SessionAgentMissing,
        errors.Draining,
    ),
)
async def retry_run(server: ServerContext, request: Request, body: NothingBody) -> Response:
    """Remove the last run's entries from the transcript and resend its messages, in one transaction."""
    return Response(202, encode(await server.session(request).retry()))


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/undo",
    body=JsonBody(NothingBody, optional=True),
    responses={200: Transcript},
    errors=(*_GONE, errors.SessionBusy, errors.NothingToUndo),
)
async def undo_run(server: ServerContext, request: Request, body: NothingBody) -> Response | None:
    """Remove the entries of the last run or edit from the transcript, and return them."""
    request.take_edit()
    return await respond_with_list(request, "entries", await server.session(request).undo())


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/compact",
    body=JsonBody(CompactBody, optional=True),
    responses={200: Transcript},
    errors=(*_GONE, errors.SessionBusy, errors.HistoryChanged, errors.NotSupported, errors.ModelFailed),
)
async def compact_history(server: ServerContext, request: Request, body: CompactBody) -> Response | None:
    """Summarize all but the newest messages with the agent's model, and return the whole new transcript."""
    request.take_edit()
    session = server.session(request)
    await session.compact_history(body.keep)
    return await respond_with_transcript(request, session, after=0, limit=ALL_ENTRIES)


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/fork",
    body=JsonBody(ForkBody),
    responses={201: SessionView},
    errors=(*_GONE, errors.SessionBusy, errors.LimitExceeded),
)
async def fork_session(server: ServerContext, request: Request, body: ForkBody) -> Response:
    """Create a session with a copy of this transcript, or of its entries up to `through_n` and their calls' results."""
    request.take_edit()
    return Response(201, encode(await server.session(request).fork(body.key, through_n=body.through_n)))


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/export",
    responses={200: SessionExport},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def export_session(server: ServerContext, request: Request) -> None:
    """Export the transcript and the bytes of its attachments, for import on this server or another."""
    await respond_with_export(request, server.session(request), at=server.host.now())


@ROUTER.route(
    "POST",
    "/v1/sessions/{key}/import",
    body=JsonBody(SessionExport, limit=lambda settings: settings.import_limit_bytes),
    responses={201: SessionView},
    errors=(errors.SessionDeleted, errors.SessionBusy, errors.LimitExceeded),
)
async def import_session(server: ServerContext, request: Request, export: SessionExport) -> Response:
    """Import an exported history into this session, which must not have a history yet."""
    return Response(201, encode(await server.session(request).import_history(export)))
