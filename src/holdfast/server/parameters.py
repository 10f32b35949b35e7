"""Declarations of a route's inputs: its JSON or raw body and its query parameters.

The bounds of an input are declared once. They are enforced for every request and, except size limits and the maximum of
a `NumberQuery`, listed in the OpenAPI document. A handler receives the decoded body as an argument, and reads a query
parameter with a call such as ``LIMIT.parse(request)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable
from typing import ClassVar, Generic, TypeVar

import msgspec

from holdfast.errors import InvalidRequest
from holdfast.server.request import Request
from holdfast.settings import Settings

__all__ = ["FlagQuery", "IntegerQuery", "JsonBody", "NumberQuery", "Query", "RawBody", "TextQuery"]

T = TypeVar("T")
SizeLimit = Callable[[Settings], int]

_NUMBER = re.compile(r"([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
_INTEGER = re.compile(r"[0-9]{1,18}")


class JsonBody(Generic[T]):
    """A JSON body that is decoded to a given type.

    Parameters:
        type: type to which the body is decoded.
        optional: whether the body may be omitted; an omitted body is decoded as an empty object.
        limit: function that is called with the settings and returns the size limit in bytes; if None, the setting
            ``body_limit_bytes`` is the limit.
    """

    __slots__ = ("_decoder", "_limit", "optional", "type")

    def __init__(self, type: type[T], *, optional: bool = False, limit: SizeLimit | None = None) -> None:
        self.type = type
        self.optional = optional
        self._decoder = msgspec.json.Decoder(type)
        self._limit = limit

    def load(self, request: Request) -> Awaitable[T]:
        """Read and decode the body of `request`. Raises as `Request.read_json`."""
        limit = None if self._limit is None else self._limit(request.settings)
        return request.read_json(self._decoder, optional=self.optional, limit_bytes=limit)


class RawBody:
    """A body of any media type, which the handler receives as bytes.

    Parameters:
        media_type: media type listed in the OpenAPI document.
        limit: function that is called with the settings and returns the size limit in bytes.
    """

    __slots__ = ("_limit", "media_type")

    def __init__(self, media_type: str, *, limit: SizeLimit) -> None:
        self.media_type = media_type
        self._limit = limit

    def load(self, request: Request) -> Awaitable[bytes | bytearray]:
        """Read the body of `request`. Raises as `Request.read_bytes`."""
        return request.read_bytes(limit_bytes=self._limit(request.settings))


class Query:
    """A query parameter.

    Parameters:
        name: name of the query parameter.
        doc: description in the OpenAPI document.
        least: minimum value listed in the OpenAPI document; if None, the document lists no minimum.
        most: maximum value listed in the OpenAPI document; if None, the document lists no maximum.
    """

    __slots__ = ("doc", "least", "most", "name")

    type: ClassVar[str]
    """JSON type of the query parameter."""

    def __init__(self, name: str, doc: str, *, least: int | None = None, most: int | None = None) -> None:
        self.name = name
        self.doc = doc
        self.least = least
        self.most = most


class TextQuery(Query):
    """A query parameter whose value is text."""

    __slots__ = ()
    type = "string"

    def parse(self, request: Request) -> str | None:
        """Return the parameter's text; None if the parameter is missing or empty."""
        return request.query(self.name)


class FlagQuery(Query):
    """A query parameter whose value is ``true`` or ``false``. A missing parameter counts as ``false``."""

    __slots__ = ()
    type = "boolean"

    def parse(self, request: Request) -> bool:
        """Return whether the parameter is ``true``. Raises `InvalidRequest` if its value is invalid."""
        text = request.query(self.name)
        if text not in (None, "true", "false"):
            raise InvalidRequest(f"{self.name} has invalid value {text[:40]!r}", hint="use true or false")
        return text == "true"


class IntegerQuery(Query):
    """A query parameter whose value is an integer within bounds.

    Parameters:
        name, doc: as for `Query`.
        least: minimum value.
        most: maximum value.
        default: value to use if the parameter is missing.
    """

    __slots__ = ("_default", "_least", "_most")
    type = "integer"

    def __init__(self, name: str, doc: str, *, least: int, most: int, default: int) -> None:
        super().__init__(name, doc, least=least, most=most)
        self._least = least
        self._most = most
        self._default = default

    def parse(self, request: Request) -> int:
        """Return the integer. Raises `InvalidRequest` if the value is not an integer or is out of bounds."""
        text = request.query(self.name)
        if text is None:
            return self._default
        value = int(text) if _INTEGER.fullmatch(text) else -1
        if not self._least <= value <= self._most:
            raise InvalidRequest(
                f"{self.name} has invalid value {text[:40]!r}",
                hint=f"use an integer from {self._least} to {self._most}",
            )
        return value


class NumberQuery(Query):
    """A query parameter whose value is a number from 0 to a limit that depends on the settings.

    Parameters:
        name, doc: as for `Query`.
        limit: function that is called with the settings and returns the maximum value.
    """

    __slots__ = ("_limit",)
    type = "number"

    def __init__(self, name: str, doc: str, *, limit: Callable[[Settings], float]) -> None:
        super().__init__(name, doc, least=0)
        self._limit = limit

    def parse(self, request: Request) -> float | None:
        """Return the number; None if the parameter is missing.

        Raises `InvalidRequest` if the value is not a number or is out of bounds.
        """
        text = request.query(self.name)
        if text is None:
            return None
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
        most = self._limit(request.settings)
        if not 0 <= value <= most:
            raise InvalidRequest(
                f"{self.name} has invalid value {text[:40]!r}", hint=f"use a number from 0 to {most:g}"
            )
        return value
