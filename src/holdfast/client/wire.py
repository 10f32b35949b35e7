"""Decode server responses into values and exceptions."""

from __future__ import annotations

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
            f"unexpected response from the server: {error}", hint="check that client and server have the same version"
        ) from error


def described(digest: str, response: httpx2.Response) -> Attachment:
    """Return the attachment with this digest, described by the headers and length of its download response."""
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
            hint="check that it is a Holdfast server",
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
        raise InvalidKey(f"{name!r} is not encodable as UTF-8") from None


def refuse_unauthorized(closed: bytes) -> None:
    """Raise `Unauthenticated` if the last frame of a stream reports that the credential is no longer valid."""
    if msgspec.json.decode(closed, type=_Closed).reason == "unauthorized":
        raise Unauthenticated(
            "the server ended the stream: its key or token is no longer valid",
            hint="it was revoked or has expired; resume with another one, after the last cursor",
        )


@contextmanager
def connecting() -> Iterator[None]:
    """Convert the error of a connection that is lost while it is being opened to a `ConnectError`.

    On uvloop, the HTTP client reads the peer address of the closed socket, which raises an ``AttributeError``.
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
        error: error of the HTTP client.
        lost_reply: whether the request may have taken effect, because the connection was lost after it was sent.
    """
    if lost_reply:
        return ServerUnreachable(
            f"the connection to {url} was lost before the response ({type(error).__name__})",
            hint="it may have taken effect; check the session before you repeat it",
        )
    detail = str(error) or type(error).__name__
    return ServerUnreachable(f"{url} does not answer ({detail})")
