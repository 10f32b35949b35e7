"""Routes outside ``/v1``, on Starlette: the status page and its form, probes, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as PageRequest
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.responses import Response as PageResponse

from holdfast.errors import BodyTooLarge, HoldfastError, InvalidRequest, OriginRefused
from holdfast.protocol.http import Status
from holdfast.server import metrics, page
from holdfast.server.caller import Caller
from holdfast.server.context import DELIVERY, ServerContext
from holdfast.server.response import Response, encode
from holdfast.server.router import Router
from holdfast.server.routes.questions import decide

__all__ = ["ROUTER", "json_page"]

ROUTER = Router()
_FORM_BYTES = 100_000
_FORM_S = 30.0


@ROUTER.route(
    "GET",
    "/",
    challenge='Basic realm="holdfast: any user name, an API key as the password"',
    responses={200: "text/html"},
)
async def show_page(server: ServerContext, request: PageRequest, caller: Caller) -> PageResponse:
    """Show the status page: active runs, queued messages, and the counter behind each promise."""
    return await _page(server, request, caller)


@ROUTER.route(
    "POST",
    "/",
    body="application/x-www-form-urlencoded",
    responses={200: "text/html", 303: "text/html"},
    errors=(OriginRefused,),
)
async def answer_on_page(server: ServerContext, request: PageRequest, caller: Caller) -> PageResponse:
    """Submit a form of the page: `session`, `question`, `decision` and `text`. Only the page itself may send it."""
    form = page.read_form(await _read_form(request))
    try:
        session = server.host.session(form.session, principal=caller.principal)
        await decide(server, caller, session, form.question, form.body)
    except HoldfastError as error:
        return await _page(server, request, caller, told=str(error))
    return RedirectResponse("/", status_code=303, headers=page.HEADERS)


async def _page(server: ServerContext, request: PageRequest, caller: Caller, *, told: str = "") -> PageResponse:
    await request.scope[DELIVERY].take_turn()
    html = await page.render(
        server.host,
        caller,
        address=str(request.base_url).rstrip("/"),
        keys_required=server.keys.required,
        approval_key_required=server.approval_key_required,
        told=told,
    )
    return HTMLResponse(html, headers=page.HEADERS)


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
                    raise BodyTooLarge(f"the form is larger than {_FORM_BYTES} bytes", hint="send long texts by API")
    except TimeoutError:
        raise InvalidRequest(f"the form did not arrive within {_FORM_S:g} s", hint="send it again") from None
    return body


@ROUTER.route("GET", "/healthz", access="public", responses={200: Status})
async def check_health(server: ServerContext, request: PageRequest, caller: None) -> PageResponse:
    """Report that the process responds."""
    return json_page(Response(200, encode(Status(status="ok"))))


@ROUTER.route("GET", "/readyz", access="public", responses={200: Status, 503: Status})
async def check_readiness(server: ServerContext, request: PageRequest, caller: None) -> PageResponse:
    """Report whether the server accepts new messages; 503 while it drains."""
    if server.host.draining:
        return json_page(Response(503, encode(Status(status="draining")), ((b"retry-after", b"2"),)))
    return json_page(Response(200, encode(Status(status="ready"))))


@ROUTER.route("GET", "/metrics", access="admin", responses={200: "text/plain"})
async def get_metrics(server: ServerContext, request: PageRequest, caller: Caller) -> PageResponse:
    """Return the host's metrics as Prometheus text. Admin only."""
    text = metrics.render(
        server.host.statistics(),
        streams=server.streams.open,
        answers=server.responses,
        budgets=server.host.budgets.usage(),
    )
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@ROUTER.route("GET", "/openapi.json", access="public", responses={200: "application/json"})
async def get_openapi(server: ServerContext, request: PageRequest, caller: None) -> PageResponse:
    """Return this OpenAPI document."""
    return PageResponse(server.openapi, media_type="application/json")


def json_page(response: Response) -> PageResponse:
    """Convert an API response to a Starlette response."""
    page_response = PageResponse(response.body, status_code=response.status, media_type="application/json")
    for name, value in response.headers:
        page_response.headers[name.decode()] = value.decode()
    return page_response
