"""ASGI application that checks every request, and dispatches it to the API or to the pages and probes.

Requests below ``/v1`` are dispatched without a framework, so that the overhead of a send is a few microseconds. Other
requests are handled by a small Starlette application. The allow-lists for ``Host`` and ``Origin``, the credential and
the request rate are checked before a handler is called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as PageRequest
from starlette.responses import Response as PageResponse
from starlette.routing import Route as PageRoute

from holdfast.errors import (
    Draining,
    Forbidden,
    HoldfastError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    OriginRefused,
    Unauthenticated,
)
from holdfast.host import Host
from holdfast.host.budgets import UNKNOWN
from holdfast.logs import log_failure
from holdfast.server.auth import KeyRing, OriginGate, refuse_repeated
from holdfast.server.caller import Caller
from holdfast.server.context import CREDENTIAL_USE, DELIVERY, ServerContext
from holdfast.server.credentials import CredentialUse
from holdfast.server.delivery import Receive, ResponseDelivery, Scope, Send, cut_connection
from holdfast.server.errors import error_response, status_of
from holdfast.server.openapi import document
from holdfast.server.request import Request
from holdfast.server.response import Headers, Response, encode, send_refusal, send_response
from holdfast.server.router import Route, RouteTree, unknown_route
from holdfast.server.routes import API_ROUTES, PAGE_ROUTES, ROUTES
from holdfast.server.routes.probes import json_page
from holdfast.server.streams import LAST_FRAME_S

__all__ = ["App"]

_log = logging.getLogger("holdfast.server")

_REPEAT_HINT = "use another key; check whether the request took effect before you repeat it"


class App:
    """ASGI application of a started host. Open it with ``async with`` on the host's event loop.

    Parameters:
        host: host to serve, already started.
        keys: API keys of the host, already loaded.
    """

    def __init__(self, host: Host, keys: KeyRing) -> None:
        self.host = host
        self.keys = keys
        self.context = ServerContext(host, keys, openapi=encode(document(ROUTES)) + b"\n")
        self._gate = OriginGate(host.settings)
        self._routes = RouteTree(API_ROUTES)
        self._page_routes = RouteTree(PAGE_ROUTES)
        self._pages = self._make_pages()

    async def __aenter__(self) -> App:
        await self.context.stops.__aenter__()
        self.host.on_streams_close.append(self.context.close_waits)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.host.on_streams_close.remove(self.context.close_waits)
        await self.context.stops.__aexit__(*error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise RuntimeError("only HTTP is supported; open the host first and run the server with lifespan off")

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(scope, receive, send)
        except asyncio.CancelledError:
            use: CredentialUse | None = scope.get(CREDENTIAL_USE)
            if use is not None and use.ended is not None:
                use.absorb()
                await self._end_early(
                    scope, send, Unauthenticated(f"{use.ended} while the request was in progress", hint=_REPEAT_HINT)
                )
            elif self.host.draining and (task := asyncio.current_task()) is not None:
                task.uncancel()
                await self._end_early(scope, send, Draining("the server is shutting down; this request timed out"))
            else:
                raise
        finally:
            use = scope.get(CREDENTIAL_USE)
            if use is not None:
                use.release()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        extra: Headers = ()
        request: Request | None = None
        try:
            if len(headers) < len(scope["headers"]):
                refuse_repeated(scope["headers"])
            if headers.get(b"upgrade", b"").lower() == b"websocket":
                raise InvalidRequest(
                    "WebSocket is not supported",
                    hint="read events as Server-Sent Events: GET /v1/sessions/{key}/events without Upgrade",
                )
            origin = self._gate.check(headers)
            if origin is not None:
                extra = ((b"access-control-allow-origin", origin), (b"vary", b"origin"))
                if scope["method"] == "OPTIONS":
                    await _preflight(send, extra)
                    return
            raw: bytes = scope["raw_path"]
            if not raw.startswith(b"/v1/"):
                await self._respond_with_page(scope, receive, send)
                return
            methods, path = self._routes.find(raw)
            route = methods.get(scope["method"])
            if route is None:
                response = _not_allowed(scope["method"], methods)
            else:
                request = self._admit(route, scope, receive, send, headers, path, extra)
                try:
                    load_body = route.load_body
                    if load_body is None:
                        result: Response | None = await route.handler(self.context, request)
                    else:
                        result = await route.handler(self.context, request, await load_body(request))
                    if result is not None:
                        await request.respond(result)
                finally:
                    request.release()
                self.context.responses[200 if result is None else result.status] += 1
                return
        except HoldfastError as error:
            if request is not None and request.started:
                cut_connection(scope)  # mid-response, this is the only signal left
                return
            response = error_response(error)
            error.__traceback__ = None  # its frames reference the body, and some reference the error
        except Exception as error:
            if request is not None and request.started:
                if isinstance(error, TimeoutError):
                    return  # the client stopped reading; its connection is already cut
                raise
            log_failure(_log, f"{scope['method']} {scope['path']} failed", error)
            response = error_response(InternalError())
        self.context.responses[response.status] += 1
        try:
            async with asyncio.timeout(self.host.settings.stream_stall_s):
                if response.status == 413:
                    await send_refusal(receive, send, response, extra=extra)
                else:
                    await send_response(send, response, extra=extra)
        except TimeoutError:
            cut_connection(scope)

    async def _end_early(self, scope: Scope, send: Send, error: HoldfastError) -> None:
        """Respond to a cancelled request with `error`; if the response has already started, cut the connection."""
        self.context.responses[status_of(type(error))] += 1
        try:
            async with asyncio.timeout(LAST_FRAME_S):
                await send_response(send, error_response(error))
        except (RuntimeError, TimeoutError):  # the response has started, or the client has stalled
            cut_connection(scope)

    def _admit(
        self,
        route: Route,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: Mapping[bytes, bytes],
        path: Mapping[str, str],
        extra: Headers,
    ) -> Request:
        """Check the credential, role, rate and query of a request, and return the `Request`."""
        caller = self._authorize(route, scope, headers)
        request = Request(
            scope,
            receive,
            send,
            headers=headers,
            caller=caller,
            settings=self.host.settings,
            path=path,
            use=scope[CREDENTIAL_USE],
            agents=self.context.agents_of(caller),
            budgets=self.host.budgets,
            extra=extra,
        )
        request.check_query(route.query_names)
        return request

    def _authorize(self, route: Route, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller of a request to a route that requires a credential.

        Raises as `ServerContext.authenticate`, and `Forbidden` if the route requires role admin.
        """
        caller = self.context.authenticate(scope, headers)
        if route.access == "admin" and caller.role != "admin":
            raise Forbidden(
                "this operation requires an admin key", hint="create one with 'holdfast keys create --role admin'"
            )
        return caller

    # ── Pages and probes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _make_pages(self) -> Starlette:
        return Starlette(
            routes=[
                PageRoute(route.path, partial(self._enter, route), methods=[route.method]) for route in PAGE_ROUTES
            ],
            exception_handlers={HTTPException: self._refused, HoldfastError: self._failed},
        )

    async def _respond_with_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = ResponseDelivery(
            scope, send, principal=UNKNOWN, budgets=self.host.budgets, settings=self.host.settings
        )
        scope[DELIVERY] = delivery
        try:
            await self._pages(scope, receive, delivery.send)
        except TimeoutError:
            pass  # the client stopped reading; its connection is already cut
        finally:
            delivery.release()

    async def _enter(self, route: Route, request: PageRequest) -> PageResponse:
        """Call the handler of a route outside ``/v1``.

        Unexpected errors are handled here, because Starlette would respond to them and also raise them.
        """
        try:
            if route.method == "POST" and "origin" not in request.headers:  # before its key is used for another site
                raise OriginRefused(
                    "only the server's own pages may submit this form", hint="in programs, use the routes below /v1"
                )
            caller = None
            if route.access != "public":
                try:
                    caller = self._authorize(route, request.scope, dict(request.scope["headers"]))
                except Unauthenticated as error:
                    response = json_page(error_response(error))
                    response.headers["www-authenticate"] = route.challenge
                    return response
            page_response: PageResponse = await route.handler(self.context, request, caller)
        except (HoldfastError, HTTPException):
            raise
        except Exception as error:
            log_failure(_log, f"{request.method} {request.url.path} failed", error)
            return json_page(error_response(InternalError()))
        return page_response

    async def _refused(self, request: PageRequest, error: Exception) -> PageResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            there, _ = self._page_routes.find(request.scope["raw_path"])
            return json_page(_not_allowed(request.method, there))
        return json_page(error_response(unknown_route(request.url.path)))

    async def _failed(self, request: PageRequest, error: Exception) -> PageResponse:
        assert isinstance(error, HoldfastError)
        return json_page(error_response(error))


def _not_allowed(method: str, methods: Iterable[str]) -> Response:
    allowed = ", ".join(methods)
    response = error_response(MethodNotAllowed(f"{method} is not allowed on this route", hint=f"use {allowed}"))
    return response._replace(headers=((b"allow", allowed.encode()),))


async def _preflight(send: Send, extra: Headers) -> None:
    headers = [
        *extra,
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
        (b"access-control-allow-headers", b"authorization, content-type, last-event-id, x-holdfast-user"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
