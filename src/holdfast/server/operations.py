"""Table of the HTTP operations: each handler is registered with its path, parameters and responses.

The dispatch, the OpenAPI document and the tests read this one table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from holdfast.errors import HoldfastError

__all__ = ["Operation", "Query", "Table"]

Handler = Callable[..., Awaitable[Any]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter: its name, JSON type, description, and bounds."""

    name: str
    type: str
    doc: str
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Parameters:
        method, path: such as ``GET`` and ``/v1/sessions/{key}``.
        handler: the handler; it returns None if it wrote the response itself.
        name: the operation's id.
        doc: description; the first line is the summary.
        body: the type of the JSON body, the media type of another one, or None.
        optional_body: the body may be omitted.
        query, query_names: its query parameters.
        answers: for each status of success, the type of the JSON body or the media type.
        errors: its errors, besides those of every operation.
        public: it requires no key.
        admin: it requires an admin key.
    """

    method: str
    path: str
    handler: Handler
    name: str
    doc: str
    body: type | str | None
    optional_body: bool
    query: tuple[Query, ...]
    query_names: tuple[str, ...]
    answers: Mapping[int, Any]
    errors: tuple[type[HoldfastError], ...]
    public: bool
    admin: bool


class Table:
    """The operations, in order of registration."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def enter(
        self,
        method: str,
        path: str,
        *,
        answers: Mapping[int, Any],
        body: type | str | None = None,
        optional_body: bool = False,
        query: tuple[Query, ...] = (),
        errors: tuple[type[HoldfastError], ...] = (),
        public: bool = False,
        admin: bool = False,
    ) -> Callable[[F], F]:
        """Return a decorator that registers a handler; the handler's docstring documents the operation."""

        def mark(handler: F) -> F:
            self.operations.append(
                Operation(
                    method=method,
                    path=path,
                    handler=handler,
                    name=handler.__name__,
                    doc="\n".join(line.strip() for line in (handler.__doc__ or "").strip().splitlines()),
                    body=body,
                    optional_body=optional_body,
                    query=query,
                    query_names=tuple(one.name for one in query),
                    answers=answers,
                    errors=errors,
                    public=public,
                    admin=admin,
                )
            )
            return handler

        return mark
