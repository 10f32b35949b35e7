"""Routes of the web pages and their forms, on Starlette."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from starlette.requests import Request as PageRequest
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.responses import Response as PageResponse

from holdfast.errors import (
    BodyTooLarge,
    HoldfastError,
    InvalidRequest,
    OriginRefused,
    SessionDeleted,
    UnknownSession,
    UnknownStop,
)
from holdfast.host import Session
from holdfast.server import page
from holdfast.server.caller import Caller
from holdfast.server.context import DELIVERY, ServerContext
from holdfast.server.page_form import TEXT_CHARACTERS, PageForm, read_form
from holdfast.server.page_parts import HEADERS, session_path
from holdfast.server.parameters import FlagQuery, TextQuery
from holdfast.server.router import Router
from holdfast.server.routes.questions import decide
from holdfast.server.session_page import render_session
from holdfast.server.stop_tickets import StopResult

__all__ = ["ROUTER"]

ROUTER = Router()
_FORM_BYTES = 100_000
_FORM_S = 30.0
_CHALLENGE = 'Basic realm="holdfast: any user name, an API key as the password"'
_SESSION_QUERY = (
    TextQuery("user", "Principal of the session (admin only)."),
    TextQuery("stop", "Id of a stop whose result the page shows."),
    FlagQuery("write", "`true` shows the field for a message also while a run is active."),
)


@ROUTER.route(
    "GET",
    "/",
    challenge=_CHALLENGE,
    responses={200: "text/html"},
)
async def show_page(server: ServerContext, request: PageRequest, caller: Caller) -> PageResponse:
    """Show the status page: active runs, open questions, queued messages and schedules; for admins, also statistics."""
    await request.scope[DELIVERY].take_turn()
    return await _page(server, request, caller)


@ROUTER.route(
    "GET",
    "/sessions/{key}",
    challenge=_CHALLENGE,
    query=_SESSION_QUERY,
    responses={200: "text/html"},
    errors=(UnknownSession, SessionDeleted),
)
async def show_session_page(server: ServerContext, request: PageRequest, caller: Caller) -> PageResponse:
    """Show the page of a session: state, newest entries of the transcript and task tree; for its owner, with forms."""
    key = request.path_params["key"]
    user = request.query_params.get("user", caller.principal)
    if user != caller.principal and caller.role != "admin":
        raise UnknownSession(f"no such session: {key!r}")
    session = server.host.session(key, principal=user)
    await request.scope[DELIVERY].take_turn()
    return await _session_page(server, request, caller, session)


@ROUTER.route(
    "POST",
    "/",
    body="application/x-www-form-urlencoded",
    responses={200: "text/html", 303: "text/html"},
    errors=(OriginRefused,),
)
async def submit_form(server: ServerContext, request: PageRequest, caller: Caller) -> PageResponse:
    """Submit a form of a page: answer a question, send a message, interrupt a run, stop a session or revoke a grant.

    The fields are `action` (`decide` by default, `send`, `interrupt`, `stop` or `revoke`) and `session`; to decide,
    `question`, `decision`, `text`, `call_hash`, `scope` and `approval_key`; to send, `text` and `idempotency_key`; to
    interrupt, `run_id`; to revoke, `grant` without a session. A form acts only on the caller's own sessions and grants.
    Requests without an allowed `Origin` header are refused.
    """
    form = read_form(await _read_form(request))
    try:
        if form.action == "revoke":
            await server.host.revoke_grant(form.grant, principal=caller.principal)
            return RedirectResponse("/", status_code=303, headers=HEADERS)
        session = server.host.session(form.session, principal=caller.principal, agents=server.agents_of(caller))
        location = await _carry_out(server, caller, session, form)
    except HoldfastError as error:
        await request.scope[DELIVERY].take_turn()
        if form.action not in ("decide", "revoke"):
            with suppress(HoldfastError):  # such as an unknown session, which has no page
                session = server.host.session(form.session, principal=caller.principal)
                draft = form.text if form.action == "send" else ""
                return await _session_page(server, request, caller, session, error=str(error), draft=draft)
        return await _page(server, request, caller, told=str(error))
    return RedirectResponse(location, status_code=303, headers=HEADERS)


async def _carry_out(server: ServerContext, caller: Caller, session: Session, form: PageForm) -> str:
    """Do what a form asks for, and return the path of the page that shows the result."""
    if form.decision is not None:
        await decide(server, caller, session, form.question, form.decision)
        return "/"
    if form.action == "send":
        if not form.text.strip():
            raise InvalidRequest("the message is empty")
        if len(form.text) > TEXT_CHARACTERS:
            raise InvalidRequest(
                f"the message has {len(form.text):,} characters; a page sends at most {TEXT_CHARACTERS:,}",
                hint="send it with 'holdfast send' or the API",
            )
        await session.send(form.text, idempotency_key=form.idempotency_key)
        return session_path(session.key)
    stop: Callable[[], Awaitable[StopResult]] = session.stop
    if form.action == "interrupt":
        stop = partial(session.interrupt, run_id=form.run_id)
    ticket = await server.stops.run(caller.principal, session.key, stop, wait_s=server.settings.stop_wait_s)
    await server.stops.share(ticket)  # any server may render the page
    return session_path(session.key, stop=ticket.stop_id)


async def _page(server: ServerContext, request: PageRequest, caller: Caller, *, told: str = "") -> PageResponse:
    html = await page.render(
        server.host,
        caller,
        address=str(request.base_url).rstrip("/"),
        keys_required=server.keys.required,
        approval_key_required=server.needs_approval_key(caller),
        told=told,
    )
    return HTMLResponse(html, headers=HEADERS)


async def _session_page(
    server: ServerContext,
    request: PageRequest,
    caller: Caller,
    session: Session,
    *,
    error: str = "",
    draft: str = "",
) -> PageResponse:
    ticket = None
    if stop_id := request.query_params.get("stop"):
        with suppress(UnknownStop):  # of a server that has been restarted since
            ticket = await server.stops.find(caller.principal, session.key, stop_id)
    html = await render_session(
        server.host,
        session,
        caller,
        approval_key_required=server.needs_approval_key(caller),
        writes=request.query_params.get("write") == "true",
        ticket=ticket if session.principal == caller.principal else None,
        error=error,
        draft=draft,
    )
    return HTMLResponse(html, headers=HEADERS)


async def _read_form(request: PageRequest) -> bytes:
    """Read the body of a submitted form.

    Raises `BodyTooLarge` if the body exceeds the limit, and `InvalidRequest` if it does not arrive in time.
    """
    body = b""
    try:
        async with asyncio.timeout(_FORM_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _FORM_BYTES:
                    raise BodyTooLarge(f"the form is larger than {_FORM_BYTES} bytes", hint="use the API for long text")
    except TimeoutError:
        raise InvalidRequest(f"the form did not arrive within {_FORM_S:g} s", hint="send it again") from None
    return body
