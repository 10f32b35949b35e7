"""HTTP status of each error class, and conversion of errors to responses."""

from __future__ import annotations

import math

from holdfast import errors
from holdfast.errors import HoldfastError
from holdfast.protocol.http import ErrorBody, ErrorResponse
from holdfast.server.response import Headers, Response, encode

__all__ = ["STATUS", "error_response", "status_of"]

STATUS: dict[type[HoldfastError], int] = {
    HoldfastError: 500,
    errors.InvalidRequest: 422,
    errors.InvalidCursor: 400,
    errors.MalformedRequest: 400,
    errors.MalformedBody: 400,
    errors.MethodNotAllowed: 405,
    errors.UnsupportedMediaType: 415,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.IdempotencyMismatch: 422,
    errors.SessionDeleted: 410,
    errors.LimitExceeded: 429,
    errors.QuotaExceeded: 507,
    errors.HostBusy: 503,
    errors.BodyTooLarge: 413,
    errors.AccessDenied: 403,
    errors.Unauthenticated: 401,
    errors.Unavailable: 503,
    errors.WaitExpired: 202,
    errors.RunInterrupted: 409,
    errors.MessageWithdrawn: 409,
    errors.StorageError: 503,
    errors.StaleFence: 409,
    errors.ModelFailed: 502,
    errors.DeliveryFailed: 502,
}
"""HTTP status by error class. A class without an entry has the status of its nearest base class with an entry."""

_RETRIABLE = frozenset((429, 503, 507))


def status_of(kind: type[HoldfastError]) -> int:
    """Return the HTTP status of an error class."""
    return next(STATUS[base] for base in kind.__mro__ if base in STATUS)


def error_response(error: HoldfastError) -> Response:
    """Convert an error to an HTTP response, with a ``Retry-After`` header if a retry may succeed."""
    status = status_of(type(error))
    headers: Headers = ()
    if status in _RETRIABLE and error.retry_after_s is not None:
        headers = ((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()),)
    elif status == 401:
        headers = ((b"www-authenticate", b'Bearer realm="holdfast"'),)
    body = ErrorResponse(error=ErrorBody(code=error.code, message=error.message, hint=error.hint))
    return Response(status, encode(body), headers)
