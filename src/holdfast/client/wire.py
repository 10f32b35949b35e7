"""Decode server responses into values and exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import quote, unquote

import httpx2
import msgspec

from holdfast.errors import HoldfastError, InvalidKey, MissingExtra, ServerUnreachable, Unauthenticated
from holdfast.protocol.messages import Attachment

__all__ = ["connecting", "decode", "described", "error_of", "refuse_unauthorized", "segment", "unreachable"]

T = TypeVar("T")


class _ErrorBody(msgspec.Struct):
    code: str
    message: str = ""
    hint: str = ""


class _Closed(msgspec.Struct):
    reason: str = ""


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorBody


def _by_code(kind: type[HoldfastError]) -> dict[str, type[HoldfastError]]:
    found = {kind.code: kind}
    for child in kind.__subclasses__():
        found |= _by_code(child)
    return found


_ERRORS = _by_code(HoldfastError)


def decode(response: httpx2.Response, kind: type[T]) -> T:
    """The body of an answer. Raises `HoldfastError` if it is not what this version of the API answers."""
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        raise HoldfastError(
            f"the server's answer cannot be read: {error}", hint="are the client and the server of the same version?"
        ) from error


def described(digest: str, response: httpx2.Response) -> Attachment:
    """What the headers of an attachment's bytes say of it."""
    _, _, name = response.headers.get("content-disposition", "").partition("filename*=UTF-8''")
    return Attachment(
        digest=digest,
        media_type=response.headers.get("content-type", ""),
        name=unquote(name),
        size_bytes=len(response.content),
    )


def error_of(response: httpx2.Response) -> HoldfastError:
    """The error in an answer, of the class with its code."""
    try:
        body = msgspec.json.decode(response.content, type=_ErrorAnswer).error
    except msgspec.DecodeError:
        return HoldfastError(
            f"the server answered {response.status_code} and no error of ours", hint="is that a Holdfast server?"
        )
    kind = _ERRORS.get(body.code, HoldfastError)
    error = kind.__new__(kind)
    if kind is MissingExtra:  # it words its message by itself
        HoldfastError.__init__(error, body.message, hint=body.hint)
    else:
        kind.__init__(error, body.message, hint=body.hint)
    retry_after = response.headers.get("retry-after", "")
    if retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error


def segment(name: str) -> str:
    """A key or id as one part of an address. Raises `InvalidKey` if it is no text that UTF-8 can carry.

    A client takes "." and ".." in an address for steps on its path, so their dots are encoded, too.
    """
    try:
        return name.replace(".", "%2E") if name in (".", "..") else quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidKey(f"{name!r} cannot be in an address") from None


def refuse_unauthorized(closed: bytes) -> None:
    """Raise `Unauthenticated` if the last frame of a stream says that the credential is not valid any more."""
    if msgspec.json.decode(closed, type=_Closed).reason == "unauthorized":
        raise Unauthenticated(
            "the server ended the stream: its key or token is not valid any more",
            hint="it was revoked or has expired; go on with another one, after the last cursor",
        )


@contextmanager
def connecting() -> Iterator[None]:
    """Make what a server that dies in the instant of connecting provokes in the HTTP client a `ConnectError`.

    On uvloop the socket is gone by the time it is asked for its peer, and that is an ``AttributeError``.
    """
    try:
        yield
    except AttributeError as error:
        if "getpeername" not in str(error):
            raise
        raise httpx2.ConnectError("the connection was cut as it was made") from error


def unreachable(url: str, error: Exception, *, lost_reply: bool = False) -> ServerUnreachable:
    """No answer, in words."""
    if lost_reply:
        return ServerUnreachable(
            f"the connection to {url} was cut before the answer ({type(error).__name__})",
            hint="it may have taken effect: look at the session before you repeat it",
        )
    detail = str(error) or type(error).__name__
    return ServerUnreachable(f"{url} does not answer ({detail})")
