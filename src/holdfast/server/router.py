"""Routes of the server: each handler is registered with the full description of its operation.

A route is declared once, beside its handler: method, path, access, body, query parameters, responses, errors; the
handler's docstring is its description. Dispatch, the OpenAPI document, the reference and the tests read these routes.
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
"""Who may call a route: anyone, a caller with a valid credential, or one with role admin."""

BEARER = 'Bearer realm="holdfast"'
"""The challenge to a caller without a valid API key."""

Handler = Callable[..., Awaitable[Any]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path.

    Parameters:
        method, path: HTTP method and path, such as ``GET`` and ``/v1/sessions/{key}``.
        handler: below ``/v1``, it is called with the `ServerContext`, the `Request` and the decoded body, if any, and
            returns a `Response`, or None if it wrote the response itself. Outside ``/v1``, it is called with the
            `ServerContext`, a Starlette request and the caller (None if the route is public), and returns a Starlette
            response.
        name: the operation's id.
        doc: description; the first line is the summary.
        access: who may call it.
        challenge: the ``WWW-Authenticate`` field for a caller without a valid credential.
        body: the request body, or its media type if the handler reads it itself; None: no body.
        load_body: reads and decodes the body of a request; None: no body is passed to the handler.
        query, query_names: the query parameters.
        responses: for each success status, the type of the JSON body or the media type.
        errors: possible errors, in addition to those of every route.
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
        """Return a decorator that registers a handler; the parameters are those of `Route`."""

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
    """Routes, indexed by the segments of their paths."""

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
        """Return the routes at a path by method, and the values of its placeholders.

        Raises:
            UnknownRoute: no route has this path.
            InvalidRequest: a placeholder's value is not UTF-8.
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
    """A node of the tree: its children, and its routes by method."""

    __slots__ = ("any_child", "any_name", "children", "methods")

    def __init__(self) -> None:
        self.children: dict[bytes, _Node] = {}
        self.any_child: _Node | None = None
        self.any_name = ""
        self.methods: dict[str, Route] = {}


def unknown_route(path: str) -> UnknownRoute:
    """Return the error for a path without a route."""
    return UnknownRoute(f"no such route: {path[:200]}", hint=hint_of_route(path))


def _decode_segment(segment: bytes) -> str:
    """Return a path segment as text. Raises `InvalidRequest` if it is not UTF-8."""
    try:
        return (unquote_to_bytes(segment) if b"%" in segment else segment).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the path is not UTF-8", hint="percent-encode its segments as UTF-8") from None
