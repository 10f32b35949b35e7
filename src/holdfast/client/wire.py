"""Decode server responses into values and exceptions."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import quote, unquote

import httpx2
import msgspec

from holdfast.errors import HoldfastError, InvalidKey, MissingExtra, ServerUnreachable, Unauthenticated
from holdfast.protocol.http import ErrorResponse
from holdfast.protocol.messages import Attachment

__all__ = ["connecting", "decode", "described", "error_of", "refuse_unauthorized", "segment", "unreachable"]

T = TypeVar("T")

_BLOCKED = "its event loop may be blocked by an agent; the server's log names the line that blocks"


class _Closed(msgspec.Struct):
    reason: str = ""


def _by_code(kind: type[HoldfastError]) -> dict[str, type[HoldfastError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= _by_code(child)
    return found


_ERRORS = _by_code(HoldfastError)


def decode(response: httpx2.Response, kind: type[T]) -> T:
    """Decode the body of a response as `kind`. Raises `HoldfastError` if the body is not a valid `kind`."""
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        raise HoldfastError(
            f"unexpected response from the server: {error}",
            hint="check that the URL is that of a Holdfast server, and that client and server have the same version",
        ) from error


def described(digest: str, response: httpx2.Response) -> Attachment:
    """Return the metadata of the attachment with this digest, taken from its download response."""
    _, _, name = response.headers.get("content-disposition", "").partition("filename*=UTF-8''")
    return Attachment(
        digest=digest,
        media_type=response.headers.get("content-type", ""),
        name=unquote(name),
        size_bytes=len(response.content),
    )


def error_of(response: httpx2.Response) -> HoldfastError:
    """Convert an error response to an exception of the class that has the same error code."""
    try:
        body = msgspec.json.decode(response.content, type=ErrorResponse).error
    except msgspec.DecodeError:
        return HoldfastError(
            f"the server answered {response.status_code} without a Holdfast error",
            hint="check that the URL is that of a Holdfast server",
        )
    kind = _ERRORS.get(body.code, HoldfastError)
    error = kind.__new__(kind)
    if kind is MissingExtra:  # its constructor composes the message
        HoldfastError.__init__(error, body.message, hint=body.hint)
    else:
        kind.__init__(error, body.message, hint=body.hint)
    retry_after = response.headers.get("retry-after", "")
    if retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error


def segment(name: str) -> str:
    """Encode a key or id as a URL path segment. Raises `InvalidKey` if the name cannot be encoded as UTF-8.

    The names "." and ".." are percent-encoded too, because HTTP clients would resolve them as relative paths.
    """
    try:
        return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidKey(f"cannot encode {name!r} as UTF-8") from None


def refuse_unauthorized(closed: bytes) -> None:
    """Raise `Unauthenticated` if the last frame of a stream reports that the credential is no longer valid."""
    if msgspec.json.decode(closed, type=_Closed).reason == "unauthorized":
        raise Unauthenticated(
            "the server ended the stream because the key or token is no longer valid",
            hint="the key or token was revoked or has expired; use a valid one, and resume after the last cursor",
        )


@contextmanager
def connecting() -> Iterator[None]:
    """Raise `ConnectError` if a connection is lost while it is being opened.

    On uvloop, the HTTP client then raises an ``AttributeError``, because it reads the closed socket's peer address.
    """
    try:
        yield
    except AttributeError as error:
        if "getpeername" not in str(error):
            raise
        raise httpx2.ConnectError("the connection was lost while connecting") from error


def unreachable(url: str, error: Exception, *, lost_reply: bool = False) -> ServerUnreachable:
    """Return the exception for a request without a response.

    Parameters:
        url: URL of the server.
        error: error that the HTTP client raised.
        lost_reply: whether to warn that the request may have taken effect.
    """
    if lost_reply:
        why = f": {_reason(error)}" if isinstance(error, httpx2.TimeoutException) else ""
        return ServerUnreachable(
            f"the connection to {url} was lost before the response{why}",
            hint="the request may have taken effect; check the session before you repeat the request",
        )
    blocked = isinstance(error, httpx2.ReadTimeout)
    return ServerUnreachable(f"{url} does not answer: {_reason(error)}", hint=_BLOCKED if blocked else None)


def _reason(error: Exception) -> str:
    """Return why a request has no response, in words that do not depend on the HTTP client."""
    for cause in _causes(error):
        match cause:
            case ConnectionRefusedError():
                return "nothing listens there"
            case socket.gaierror():
                return "unknown host name"
            case ssl.SSLError():
                return f"TLS failed: {cause}"
    match error:
        case httpx2.ConnectTimeout():
            return f"no connection{_within(error, 'connect')}"
        case httpx2.TimeoutException():
            return f"no answer{_within(error, 'read')}"
        case httpx2.ConnectError():
            return "no connection"
        case httpx2.NetworkError() | httpx2.RemoteProtocolError():
            return "the connection broke off"
        case _:
            return str(error) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and everything that caused it."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                yield from _causes(one)
        error = error.__cause__ or error.__context__


def _within(error: httpx2.TimeoutException, kind: str) -> str:
    try:
        limits = error.request.extensions.get("timeout", {})
    except RuntimeError:  # it has no request
        return ""
    return f" within {limits[kind]:g} s" if limits.get(kind) is not None else ""
