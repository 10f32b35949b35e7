"""The route of a session's events, as Server-Sent Events."""

from __future__ import annotations

from holdfast import errors
from holdfast.server.context import ServerContext
from holdfast.server.parameters import TextQuery
from holdfast.server.request import Request
from holdfast.server.router import Router

__all__ = ["ROUTER"]

ROUTER = Router()
_AFTER = TextQuery("after", "Return only events after this cursor (`0`: all). `Last-Event-ID` takes precedence.")
_FOLLOW = TextQuery("follow", "End the stream after the event that settles this message (an id).")


@ROUTER.route(
    "GET",
    "/v1/sessions/{key}/events",
    query=(_AFTER, _FOLLOW),
    responses={200: "text/event-stream"},
    errors=(errors.UnknownSession, errors.UnknownMessage, errors.InvalidCursor, errors.SessionDeleted),
)
async def stream_events(server: ServerContext, request: Request) -> None:
    """Stream the session's events as Server-Sent Events: all events or those after a cursor, then new ones.

    Without a cursor, or after `0`, the stream of a session that does not exist yet waits for its first message.

    A frame is `id: <cursor>`, `event: <kind>`, `data: <the event as JSON>`. A `gap` frame reports missed events; a
    `closed` frame is the last frame if the server shuts down or the credential becomes invalid.
    """
    last_id = request.headers.get(b"last-event-id")
    after = last_id.decode("latin-1") if last_id else _AFTER.parse(request)
    await server.streams.serve_sse(request, server.session(request), after=after, follow=_FOLLOW.parse(request))
