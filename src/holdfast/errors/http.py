"""HTTP errors: requests rejected before their handler runs, credentials, and unreachable servers."""

from __future__ import annotations

from holdfast.errors.base import AccessDenied, InvalidRequest, LimitExceeded, NotFound, Unavailable

__all__ = [
    "ApprovalKeyRequired",
    "BodyTooLarge",
    "Forbidden",
    "HostRefused",
    "MalformedBody",
    "MalformedRequest",
    "MethodNotAllowed",
    "OriginRefused",
    "ServerUnreachable",
    "Unauthenticated",
    "UnknownKey",
    "UnknownRoute",
    "UnknownStop",
    "UnsupportedMediaType",
]


class MalformedRequest(InvalidRequest):
    """The data received is not a valid HTTP request, or exceeds a limit; the connection is closed."""

    code = "malformed_request"
    default_hint = "send HTTP/1.1 with a smaller request head"


class MalformedBody(InvalidRequest):
    """The body is not valid JSON, or is nested too deeply."""

    code = "malformed_body"
    default_hint = "send one JSON object in UTF-8"


class MethodNotAllowed(InvalidRequest):
    """The route exists, but not for this method."""

    code = "method_not_allowed"


class UnsupportedMediaType(InvalidRequest):
    """A write needs a JSON body."""

    code = "unsupported_media_type"
    default_hint = "send 'content-type: application/json'"


class UnknownStop(NotFound):
    """No such stop in this session, or it has expired."""

    code = "unknown_stop"
    default_hint = "list the session's runs: each stopped run contains the receipt of its stop"


class UnknownKey(NotFound):
    """No valid API key with that id."""

    code = "unknown_key"
    default_hint = "list the ids of all keys with 'holdfast keys list'"


class UnknownRoute(NotFound):
    """No such route."""

    code = "unknown_route"
    default_hint = "GET /openapi.json lists every route"


class BodyTooLarge(LimitExceeded):
    """The request body is too large for this host."""

    code = "body_too_large"


class Unauthenticated(AccessDenied):
    """The request has no valid API key or token."""

    code = "unauthenticated"
    default_hint = "send 'Authorization: Bearer <key>'; create one with 'holdfast keys create'"


class Forbidden(AccessDenied):
    """The key is valid, but its role does not allow this."""

    code = "forbidden"


class ApprovalKeyRequired(AccessDenied):
    """An agent of this server may be able to use any stored credential, so a person must type the approval key."""

    code = "approval_key_required"
    default_hint = "type the approval key that 'holdfast serve' shows in its terminal, or answer in that terminal"


class HostRefused(AccessDenied):
    """The request names a host that this server does not serve."""

    code = "host_refused"
    default_hint = "use the address that the server listens on, or add the name to HOLDFAST_ALLOWED_HOSTS"


class OriginRefused(AccessDenied):
    """This server refuses requests from web pages of this origin."""

    code = "origin_refused"
    default_hint = "add the page's origin to HOLDFAST_ALLOWED_ORIGINS"


class ServerUnreachable(Unavailable):
    """The server does not answer."""

    code = "server_unreachable"
    default_hint = "start the server, or pass the URL of a running one, such as Client('http://127.0.0.1:8420')"
