"""Routes for operators outside ``/v1``, on Starlette: health, readiness, metrics and the OpenAPI document."""

from __future__ import annotations

from starlette.requests import Request as PageRequest
from starlette.responses import PlainTextResponse
from starlette.responses import Response as PageResponse

from holdfast.protocol.http import Status
from holdfast.server import metrics
from holdfast.server.caller import Caller
from holdfast.server.context import ServerContext
from holdfast.server.response import Response, encode
from holdfast.server.router import Router

__all__ = ["ROUTER", "json_page"]

ROUTER = Router()


@ROUTER.route("GET", "/healthz", access="public", responses={200: Status})
async def check_health(server: ServerContext, request: PageRequest, caller: None) -> PageResponse:
    """Return 200, which shows that the process responds."""
    return json_page(Response(200, encode(Status(status="ok"))))


@ROUTER.route("GET", "/readyz", access="public", responses={200: Status, 503: Status})
async def check_readiness(server: ServerContext, request: PageRequest, caller: None) -> PageResponse:
    """Report whether the server accepts new messages: 200 if it does, 503 while it drains or its store fails."""
    if server.host.draining:
        return json_page(Response(503, encode(Status(status="draining")), ((b"retry-after", b"2"),)))
    if server.host.store.health().problem is not None:  # its text is for operators only
        return json_page(Response(503, encode(Status(status="store_unreachable")), ((b"retry-after", b"5"),)))
    return json_page(Response(200, encode(Status(status="ready", awaiting_pool=server.host.awaiting_pool))))


@ROUTER.route("GET", "/metrics", access="admin", responses={200: "text/plain"})
async def get_metrics(server: ServerContext, request: PageRequest, caller: Caller) -> PageResponse:
    """Return the host's metrics as Prometheus text. Admin only."""
    text = metrics.render(
        server.host.statistics(),
        streams=server.streams.open,
        answers=server.responses,
        budgets=server.host.budget_usage(),
    )
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


@ROUTER.route("GET", "/openapi.json", access="public", responses={200: "application/json"})
async def get_openapi(server: ServerContext, request: PageRequest, caller: None) -> PageResponse:
    """Return this OpenAPI document."""
    return PageResponse(server.openapi, media_type="application/json")


def json_page(response: Response) -> PageResponse:
    """Convert an API response to a Starlette response."""
    page_response = PageResponse(response.line(), status_code=response.status, media_type="application/json")
    for name, value in response.headers:
        page_response.headers[name.decode()] = value.decode()
    return page_response
