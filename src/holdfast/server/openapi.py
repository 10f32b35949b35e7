"""Generator of the OpenAPI document from the routes and their types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from types import UnionType
from typing import Any, get_args

import msgspec

from holdfast import errors
from holdfast.protocol.http import ErrorResponse
from holdfast.server.errors import status_of
from holdfast.server.parameters import JsonBody, Query, RawBody
from holdfast.server.router import Route

__all__ = ["document"]

_REF = "#/components/schemas/{name}"
_ANYWHERE: tuple[type[errors.HoldfastError], ...] = (errors.HostRefused, errors.OriginRefused)
_WITH_KEY: tuple[type[errors.HoldfastError], ...] = (errors.Unauthenticated, errors.RateLimited, errors.StorageError)
_WITH_BODY: tuple[type[errors.HoldfastError], ...] = (
    errors.MalformedBody,
    errors.UnsupportedMediaType,
    errors.BodyTooLarge,
    errors.InvalidRequest,
)
_KEY = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"^[^/\x00-\x1f\x7f]+$"}
_PLACEHOLDERS = {
    "key": "Session key: 1 to 200 printable characters without slashes.",
    "message_id": "Message id from a receipt.",
    "run_id": "Run id from a receipt or event.",
    "question_id": "Question id from `GET …/approvals` or the event `run.suspended`.",
    "digest": "SHA-256 of the attachment's bytes, in hexadecimal.",
    "stop_id": "Id of a stop that took longer than its wait.",
    "key_id": "API key id.",
    "grant_id": "Grant id from `GET /v1/grants` or an answer.",
    "schedule_id": "Schedule id: 1 to 200 printable characters without slashes.",
}


@cache
def _version() -> str:
    from holdfast.version import __version__

    return __version__


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document that describes `routes`."""
    named: list[Any] = [ErrorResponse]
    for route in routes:
        body = route.body.type if isinstance(route.body, JsonBody) else None
        for kind in (body, *route.responses.values()):
            named += _members(kind)
    schemas, components = msgspec.json.schema_components(named, ref_template=_REF)
    by_type = dict(zip(named, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": _version(),
            "description": "Sessions, messages, runs, events and stops of a Holdfast host.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key. Not required on loopback while the server has no keys.",
                }
            },
        },
        "security": [{"bearer": []}, {}],
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))  # converts defaults to plain JSON types
    return plain


def _members(kind: Any) -> list[Any]:
    """Return the member types of a body's type; an empty list for a media type or None."""
    if kind is None or isinstance(kind, str):
        return []
    return list(get_args(kind)) if isinstance(kind, UnionType) else [kind]


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    summary, _, description = route.doc.partition("\n")
    result: dict[str, Any] = {"operationId": route.name, "summary": summary}
    if description.strip():
        result["description"] = description.strip()
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PLACEHOLDERS[name],
            "schema": _KEY if name == "key" else {"type": "string"},
        }
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.doc, "schema": _query_schema(query)}
        for query in route.query
    ]
    if parameters:
        result["parameters"] = parameters
    if route.body is not None:
        result["requestBody"] = _request_body(route.body, schemas)
    if route.access == "public":
        result["security"] = []
    result["responses"] = {str(status): _answer(kind, schemas) for status, kind in sorted(route.responses.items())}
    for status, refusals in sorted(_refusals(route).items()):
        codes = ", ".join(f"`{code}`" for code in sorted(refusals))
        result["responses"][str(status)] = {
            "description": f"Refused: {codes}.",
            "content": {"application/json": {"schema": schemas[ErrorResponse]}},
        }
    return result


def _request_body(body: JsonBody[Any] | RawBody | str, schemas: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(body, JsonBody):
        content = {"application/json": {"schema": schemas[body.type]}}
        return {"required": not body.optional, "content": content}
    media_type = body if isinstance(body, str) else body.media_type
    return {"required": True, "content": {media_type: {}}}


def _query_schema(query: Query) -> dict[str, Any]:
    bounds = {"minimum": query.least, "maximum": query.most}
    return {"type": query.type, **{name: bound for name, bound in bounds.items() if bound is not None}}


def _answer(kind: Any, schemas: dict[Any, Any]) -> dict[str, Any]:
    if kind == "text/event-stream":
        return {"description": "An event stream.", "content": {kind: {}}}
    if kind == "*/*":
        return {"description": "The stored bytes, with their stored type.", "content": {kind: {}}}
    if isinstance(kind, str):
        return {"description": "A stream or text.", "content": {kind: {"schema": {"type": "string"}}}}
    members = _members(kind)
    shown = [schemas[member] for member in members]
    schema = shown[0] if len(shown) == 1 else {"anyOf": shown}
    description = " ".join((member.__doc__ or "").strip().partition("\n")[0] for member in members)
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusals(route: Route) -> dict[int, set[str]]:
    kinds = [*route.errors, *_ANYWHERE]
    if route.access != "public":
        kinds += _WITH_KEY
    if route.access == "admin" or route.query:
        kinds.append(errors.Forbidden)
        if route.path.startswith("/v1/"):  # pages ignore unknown query parameters
            kinds.append(errors.InvalidRequest)
    if route.body is not None:
        kinds += _WITH_BODY
        if not isinstance(route.body, JsonBody):
            kinds = [kind for kind in kinds if kind not in (errors.MalformedBody, errors.UnsupportedMediaType)]
    if "{key}" in route.path:
        kinds.append(errors.InvalidKey)
    found: dict[int, set[str]] = {}
    for kind in kinds:
        if status_of(kind) not in route.responses:
            found.setdefault(status_of(kind), set()).add(kind.code)
    return found
