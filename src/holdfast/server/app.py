"""The ASGI application: check every request, then dispatch it to the native API or to the pages and probes.

The native API is dispatched by hand from its table, which keeps a send at a few microseconds; everything else is a
small Starlette application. No request reaches a handler before its allow-lists, key and rate are checked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from holdfast.errors import (
    BodyTooLarge,
    Draining,
    Forbidden,
    HoldfastError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    OriginRefused,
    Unauthenticated,
    UnknownRoute,
)
from holdfast.host import Host
from holdfast.host.budgets import UNKNOWN, Rate
from holdfast.logs import log_failure
from holdfast.server import attachments, histories, metrics, native, page, questions, schedules
from holdfast.server.auth import Gate, KeyRing, refuse_repeated
from holdfast.server.connections import CONNECTION
from holdfast.server.credentials import CredentialUse
from holdfast.server.delivery import Delivery
from holdfast.server.exchange import (
    Answer,
    Caller,
    Exchange,
    Receive,
    Scope,
    Send,
    cut_connection,
    decode_segment,
    encode,
    error_answer,
    send_answer,
    send_refusal,
)
from holdfast.server.native import Native
from holdfast.server.openapi import document
from holdfast.server.operations import Operation, Table
from holdfast.server.questions import decide
from holdfast.server.sse import LAST_FRAME_S

__all__ = ["App", "operations"]

_log = logging.getLogger("holdfast.server")

Headers = tuple[tuple[bytes, bytes], ...]
_FORM_BYTES = 100_000
_FORM_S = 30.0
_DELIVERY = "holdfast.delivery"
_ADMIN_NEEDED = "this operation requires an admin key"
_ADMIN_HINT = "create one with 'holdfast keys create --role admin'"
_USE = "holdfast.use"
_TAKEN = "use another key; check whether the request took effect before you repeat it"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Status of the server: ok, ready or draining."""

    status: str


SHELL = Table()
"""Operations outside ``/v1``, routed by Starlette."""
TABLES = (native.TABLE, questions.TABLE, histories.TABLE, attachments.TABLE, schedules.TABLE)
"""Tables of the operations below ``/v1``."""


class _Node:
    """A node of the route tree: its children, and its operations by method."""

    __slots__ = ("any_child", "any_name", "children", "methods")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.any_child: _Node | None = None
        self.any_name = ""
        self.methods: dict[str, Operation] = {}


def _tree() -> _Node:
    root = _Node()
    for operation in (operation for table in TABLES for operation in table.operations):
        node = root
        for part in operation.path.split("/")[1:]:
            if part.startswith("{"):
                node.any_child = node.any_child or _Node()
                node.any_name = part[1:-1]
                node = node.any_child
            else:
                node = node.children.setdefault(part.encode(), _Node())
        node.methods[operation.method] = operation
    return root


def operations() -> list[Operation]:
    """Return every operation of the server."""
    return [*SHELL.operations, *(operation for table in TABLES for operation in table.operations)]


class App:
    """The ASGI application of a started host. Open it with ``async with`` on the host's loop.

    Parameters:
        host: started, with its store open.
        keys: the API keys, loaded.
    """

    def __init__(self, host: Host, keys: KeyRing) -> None:
        self.host = host
        self.keys = keys
        self.native = Native(host, keys)
        self.answers: Counter[int] = Counter()
        self._gate = Gate(host.settings)
        self._rate = Rate("requests", host.settings.principal_rate_per_s)
        self._root = _tree()
        self._openapi = encode(document(operations()))
        self._shell = self._make_shell()

    async def __aenter__(self) -> App:
        await self.native.stops.__aenter__()
        self.host.on_streams_close.append(self.native.close_waits)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.host.on_streams_close.remove(self.native.close_waits)
        await self.native.stops.__aexit__(*error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise RuntimeError("only HTTP is supported; open the host first and run the server with lifespan off")

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            use: CredentialUse | None = scope.get(_USE)
            if use is not None and use.ended is not None:
                use.absorb()
                await self._end_early(
                    scope, send, Unauthenticated(f"{use.ended} while the request was in progress", hint=_TAKEN)
                )
            elif self.host.draining and (task := asyncio.current_task()) is not None:
                task.uncancel()
                await self._end_early(scope, send, Draining("the server is shutting down; this request timed out"))
            else:
                raise
        finally:
            use = scope.get(_USE)
            if use is not None:
                use.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        extra: Headers = ()
        exchange: Exchange | None = None
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
                scope["holdfast.headers"] = headers
                delivery = Delivery(
                    scope, send, principal=UNKNOWN, budgets=self.host.budgets, settings=self.host.settings
                )
                scope[_DELIVERY] = delivery
                try:
                    await self._shell(scope, receive, delivery.send)
                except TimeoutError:
                    pass  # the client stopped reading; its connection is already cut
                finally:
                    delivery.release()
                return
            methods, path = self._find(raw)
            operation = methods.get(scope["method"])
            if operation is None:
                answer = _not_allowed(scope["method"], methods)
            else:
                exchange = self._admit(operation, scope, receive, send, headers, path, extra)
                try:
                    result = await operation.handler(self.native, exchange)
                    if result is not None:
                        await exchange.answer(result)
                finally:
                    exchange.release()
                self.answers[200 if result is None else result.status] += 1
                return
        except HoldfastError as error:
            if exchange is not None and exchange.started:
                cut_connection(scope)  # mid-response, this is the only signal left
                return
            answer = error_answer(error)
            error.__traceback__ = None  # its frames reference the body, and some reference the error
        except Exception as error:
            if exchange is not None and exchange.started:
                if isinstance(error, TimeoutError):
                    return  # the client stopped reading; its connection is already cut
                raise
            log_failure(_log, f"{scope['method']} {scope['path']} failed", error)
            answer = error_answer(InternalError())
        self.answers[answer.status] += 1
        try:
            async with asyncio.timeout(self.host.settings.stream_stall_s):
                if answer.status == 413:
                    await send_refusal(receive, send, answer, extra=extra)
                else:
                    await send_answer(send, answer, extra=extra)
        except TimeoutError:
            cut_connection(scope)

    async def _end_early(self, scope: Scope, send: Send, error: HoldfastError) -> None:
        """Answer a cancelled request with the reason, or cut the connection if its response has started."""
        self.answers[error.status] += 1
        try:
            async with asyncio.timeout(LAST_FRAME_S):
                await send_answer(send, error_answer(error))
        except (RuntimeError, TimeoutError):  # the response has started, or the client has stalled
            cut_connection(scope)

    def _find(self, raw_path: bytes) -> tuple[Mapping[str, Operation], dict[str, str]]:
        """Return the operations at a path and the values of its placeholders. Raises `UnknownRoute`."""
        node = self._root
        path: dict[str, str] = {}
        for part in raw_path.split(b"/")[1:]:
            following = node.children.get(part)
            if following is None:
                following = node.any_child
                if following is None or not part:
                    raise UnknownRoute(f"no such route: {raw_path.decode('latin-1')[:200]}")
                path[node.any_name] = decode_segment(part)
            node = following
        if not node.methods:
            raise UnknownRoute(f"no such route: {raw_path.decode('latin-1')[:200]}")
        return node.methods, path

    def _admit(
        self,
        operation: Operation,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: Mapping[bytes, bytes],
        path: Mapping[str, str],
        extra: Headers,
    ) -> Exchange:
        """Check a request's key, rate, role and query, and return its exchange."""
        caller = self._caller(scope, headers)
        if operation.admin and caller.role != "admin":
            raise Forbidden(_ADMIN_NEEDED, hint=_ADMIN_HINT)
        exchange = Exchange(
            scope,
            receive,
            send,
            headers=headers,
            caller=caller,
            settings=self.host.settings,
            path=path,
            use=scope[_USE],
            agents=self.native.agents_of(caller),
            budgets=self.host.budgets,
            extra=extra,
        )
        exchange.known_query(*operation.query_names)
        return exchange

    def _caller(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Identify the caller, and register the request under its credential."""
        caller = self.keys.caller(headers)
        connection = scope.get(CONNECTION)
        if connection is not None:
            connection.own(caller.principal)
        delivery: Delivery | None = scope.get(_DELIVERY)
        if delivery is not None:
            delivery.principal = caller.principal
        scope[_USE] = self.keys.in_use.hold(caller.credential, caller.expires_at)
        self._rate.take(caller.principal)
        return caller

    # ── Pages and probes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _make_shell(self) -> Starlette:
        return Starlette(
            routes=[
                Route(operation.path, partial(self._enter, operation), methods=[operation.method])
                for operation in SHELL.operations
            ],
            exception_handlers={HTTPException: self._refused, HoldfastError: self._failed},
        )

    async def _enter(self, operation: Operation, request: Request) -> Response:
        """Run a handler. Handle unexpected errors here, because Starlette would both respond and raise."""
        try:
            response: Response = await operation.handler(self, request)
        except (HoldfastError, HTTPException):
            raise
        except Exception as error:
            log_failure(_log, f"{request.method} {request.url.path} failed", error)
            return _json(error_answer(InternalError()))
        return response

    @SHELL.enter("GET", "/", answers={200: "text/html"})
    async def show_page(self, request: Request) -> Response:
        """Show the status page: active runs, queued messages, and the counter behind each promise."""
        try:
            caller = self._caller(request.scope, request.scope["holdfast.headers"])
        except Unauthenticated as error:
            response = _json(error_answer(error))
            response.headers["www-authenticate"] = 'Basic realm="holdfast: any user name, an API key as the password"'
            return response
        return await self._page(request, caller)

    @SHELL.enter(
        "POST",
        "/",
        body="application/x-www-form-urlencoded",
        answers={200: "text/html", 303: "text/html"},
        errors=(OriginRefused,),
    )
    async def answer_on_page(self, request: Request) -> Response:
        """Submit a form of the page: `session`, `question`, `decision` and `text`. Only the page itself may send it."""
        headers = request.scope["holdfast.headers"]
        if b"origin" not in headers:
            raise OriginRefused("only the page itself may submit its form", hint="in programs, use …/approvals/{id}")
        caller = self._caller(request.scope, headers)
        given = page.read_form(await _small_body(request))
        try:
            session = self.host.session(given.session, principal=caller.principal)
            await decide(self.native, caller, session, given.question, given.body)
        except HoldfastError as error:
            return await self._page(request, caller, told=str(error))
        return RedirectResponse("/", status_code=303, headers=page.HEADERS)

    async def _page(self, request: Request, caller: Caller, *, told: str = "") -> Response:
        await request.scope[_DELIVERY].take_turn()
        address = str(request.base_url).rstrip("/")
        html = await page.render(
            self.host,
            caller,
            address=address,
            keys_required=self.keys.required,
            approval_key_required=self.native.approval_key_required,
            told=told,
        )
        return HTMLResponse(html, headers=page.HEADERS)

    @SHELL.enter("GET", "/healthz", answers={200: Status}, public=True)
    async def check_health(self, request: Request) -> Response:
        """Report that the process responds."""
        return _json(Answer(200, encode(Status(status="ok"))))

    @SHELL.enter("GET", "/readyz", answers={200: Status, 503: Status}, public=True)
    async def check_readiness(self, request: Request) -> Response:
        """Report whether the server accepts new messages; 503 while it drains."""
        if self.host.draining:
            return _json(Answer(503, encode(Status(status="draining")), ((b"retry-after", b"2"),)))
        return _json(Answer(200, encode(Status(status="ready"))))

    @SHELL.enter("GET", "/metrics", answers={200: "text/plain"})
    async def get_metrics(self, request: Request) -> Response:
        """Return the host's metrics as Prometheus text. Admin only."""
        if self._caller(request.scope, request.scope["holdfast.headers"]).role != "admin":
            raise Forbidden(_ADMIN_NEEDED, hint=_ADMIN_HINT)
        budgets = self.host.budgets.usage()
        text = metrics.render(
            self.host.statistics(), streams=self.native.streams.open, answers=self.answers, budgets=budgets
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @SHELL.enter("GET", "/openapi.json", answers={200: "application/json"}, public=True)
    async def get_openapi(self, request: Request) -> Response:
        """Return this OpenAPI document."""
        return Response(self._openapi, media_type="application/json")

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            there = [one.method for one in SHELL.operations if one.path == request.url.path]
            return _json(_not_allowed(request.method, there))
        return _json(error_answer(UnknownRoute(f"no such route: {request.url.path[:200]}")))

    async def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HoldfastError)
        return _json(error_answer(error))


async def _small_body(request: Request) -> bytes:
    """Return the body of a form. Raises `BodyTooLarge`, and `InvalidRequest` on timeout."""
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


def _json(answer: Answer) -> Response:
    response = Response(answer.body, status_code=answer.status, media_type="application/json")
    for name, value in answer.headers:
        response.headers[name.decode()] = value.decode()
    return response


def _not_allowed(method: str, methods: Iterable[str]) -> Answer:
    allowed = ", ".join(methods)
    answer = error_answer(MethodNotAllowed(f"{method} is not allowed on this route", hint=f"use {allowed}"))
    return answer._replace(headers=((b"allow", allowed.encode()),))


async def _preflight(send: Send, extra: Headers) -> None:
    headers = [
        *extra,
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE"),
        (b"access-control-allow-headers", b"authorization, content-type, last-event-id, x-holdfast-user"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
