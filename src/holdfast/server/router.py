"""Routes of the server, and the decorator that registers a handler as a route.

Each route is declared once, by a decorator on its handler, with its method, path, access, body, query parameters,
responses and errors. The handler's docstring is the description of the route. Requests are dispatched according to
these declarations; the OpenAPI document and the API reference are generated from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import unquote_to_bytes

from holdfast.errors import HoldfastError, InvalidRequest, UnknownRoute
from holdfast.old_names import hint_of_route
from holdfast.server.parameters import JsonBody, Query, RawBody
from holdfast.server.request import Request

__all__ = ["Access", "Route", "RouteTree", "Router", "unknown_route"]

Access = Literal["public", "key", "admin"]
"""Callers that may use a route: anyone, callers with a valid credential, or callers with role admin."""

BEARER = 'Bearer realm="holdfast"'
"""Default ``WWW-Authenticate`` challenge for a caller without a valid credential."""

Handler = Callable[..., Awaitable[Any]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route, which handles one HTTP method of one path.

    Parameters:
        method: HTTP method, such as ``GET``.
        path: path with placeholders, such as ``/v1/sessions/{key}``.
        handler: function that handles a request. Below ``/v1``, the handler is called with the `ServerContext`, the
            `Request` and, if `load_body` is set, the decoded body. It returns a `Response`, or None if it has written
            the response itself. Outside ``/v1``, the handler is called with the `ServerContext`, a Starlette request
            and the caller (None if the route is public), and returns a Starlette response.
        name: id of the operation.
        doc: description of the operation, whose first line is the summary.
        access: callers that may use the route.
        challenge: value of the ``WWW-Authenticate`` header for a caller without a valid credential.
        body: declaration of the request body, or its media type if the handler reads the body itself; None means that
            the request has no body.
        load_body: function that reads and decodes the body of a request; if None, the handler is called without a body.
        query: declarations of the query parameters.
        query_names: names of the query parameters.
        responses: type of the JSON body, or media type of another body, by success status.
        errors: errors that the route may return, in addition to the errors that every route may return.
    """

    method: str
    path: str
    handler: Handler
    name: str
    doc: str
    access: Access
    challenge: str
    body: JsonBody[Any] | RawBody | str | None
    load_body: Callable[[Request], Awaitable[Any]] | None
    query: tuple[Query, ...]
    query_names: tuple[str, ...]
    responses: Mapping[int, Any]
    errors: tuple[type[HoldfastError], ...]


class Router:
    """The routes of one resource, in order of registration."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def route(
        self,
        method: str,
        path: str,
        *,
        responses: Mapping[int, Any],
        access: Access = "key",
        challenge: str = BEARER,
        body: JsonBody[Any] | RawBody | str | None = None,
        query: tuple[Query, ...] = (),
        errors: tuple[type[HoldfastError], ...] = (),
    ) -> Callable[[F], F]:
        """Return a decorator that registers a handler as a route. See `Route` for the parameters."""

        def register(handler: F) -> F:
            self.routes.append(
                Route(
                    method=method,
                    path=path,
                    handler=handler,
                    name=handler.__name__,
                    doc="\n".join(line.strip() for line in (handler.__doc__ or "").strip().splitlines()),
                    access=access,
                    challenge=challenge,
                    body=body,
                    load_body=None if body is None or isinstance(body, str) else body.load,
                    query=query,
                    query_names=tuple(one.name for one in query),
                    responses=responses,
                    errors=errors,
                )
            )
            return handler

        return register


class RouteTree:
    """Tree that finds the routes of a path by its segments."""

    __slots__ = ("_root",)

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for part in route.path.split("/")[1:]:
                if part.startswith("{"):
                    node.any_child = node.any_child or _Node()
                    node.any_name = part[1:-1]
                    node = node.any_child
                else:
                    node = node.children.setdefault(part.encode(), _Node())
            node.methods[route.method] = route

    def find(self, raw_path: bytes) -> tuple[Mapping[str, Route], dict[str, str]]:
        """Return the routes of a path by method, and the decoded values of the path's placeholders by name.

        Raises:
            UnknownRoute: if no route has this path.
            InvalidRequest: if the value of a placeholder is not UTF-8.
        """
        node = self._root
        values: dict[str, str] = {}
        for part in raw_path.split(b"/")[1:]:
            child = node.children.get(part)
            if child is None:
                child = node.any_child
                if child is None or not part:
                    raise unknown_route(raw_path.decode("latin-1"))
                values[node.any_name] = _decode_segment(part)
            node = child
        if not node.methods:
            raise unknown_route(raw_path.decode("latin-1"))
        return node.methods, values


class _Node:
    """A node of a `RouteTree`, with child nodes by path segment and routes by method."""

    __slots__ = ("any_child", "any_name", "children", "methods")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.any_child: _Node | None = None
        self.any_name = ""
        self.methods: dict[str, Route] = {}


def unknown_route(path: str) -> UnknownRoute:
    """Return the error for a path that matches no route."""
    return UnknownRoute(f"no such route: {path[:200]}", hint=hint_of_route(path))


def _decode_segment(segment: bytes) -> str:
    """Decode a percent-encoded path segment. Raises `InvalidRequest` if the decoded bytes are not UTF-8."""
    try:
        return (unquote_to_bytes(segment) if b"%" in segment else segment).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the path is not UTF-8", hint="percent-encode its segments as UTF-8") from None
