"""Interface of a wire protocol, and functions that the wire protocols share."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from holdfast.protocol.messages import Attachment
from holdfast.protocol.model import CallPart, ModelRequest, Part

__all__ = [
    "NAME",
    "WireFormat",
    "arguments_text",
    "attachment_of",
    "data_line",
    "event_lines",
    "first_objection",
    "text_of",
]

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Pattern of valid tool names."""


class WireFormat(Protocol):
    """Reader of one request in a wire protocol, and writer of the answer.

    Parameters:
        body: the request's JSON object.
        number: number of the request; used to create unique ids in the answer.
    """

    def __init__(self, body: dict[str, Any], number: int) -> None: ...

    def objection(self) -> str | None:
        """Return why the provider would refuse the request with status 400, or None if it would accept the request."""
        ...

    def request(self) -> ModelRequest:
        """Return the request as a `ModelRequest`."""
        ...

    def start(self) -> bytes:
        """Return the bytes to send before the first part."""
        ...

    def part(self, part: Part) -> bytes:
        """Return the bytes to send for a part; for an `EndPart`, all bytes that end the answer."""
        ...

    def broken(self, message: str) -> bytes:
        """Return the bytes that report an error in the middle of a stream."""
        ...

    @staticmethod
    def key_of(headers: Mapping[str, str]) -> str | None:
        """Return the API key in the request's headers, or None if it is missing."""
        ...

    @staticmethod
    def error(status: int, message: str) -> bytes:
        """Return the response body for an error status."""
        ...


def first_objection(body: dict[str, Any], objections: Callable[[dict[str, Any]], Iterator[str]]) -> str | None:
    """Return the first objection to a request, or None; an error while reading the request counts as an objection."""
    if body.get("stream") is not True:
        return "this server answers in streams only: send 'stream': true"
    try:
        return next(objections(body), None)
    except (AttributeError, KeyError, TypeError) as error:
        return f"a message does not have the form of the API: {error!r}"


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of blocks."""
    if isinstance(content, list):
        return "".join(block["text"] for block in content if block["type"] == "text")
    return content or ""


def attachment_of(media_type: str, data: str) -> Attachment:
    """Return the attachment for base64 data from a request."""
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error:
        content = data.encode()
    return Attachment(digest=hashlib.sha256(content).hexdigest(), media_type=media_type, size_bytes=len(content))


def arguments_text(part: CallPart) -> str:
    """Return the arguments of a call as JSON, or unchanged if they are text."""
    return part.arguments if isinstance(part.arguments, str) else msgspec.json.encode(part.arguments).decode()


def data_line(value: dict[str, Any]) -> bytes:
    """Return an SSE frame without an event name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def event_lines(kind: str, value: dict[str, Any]) -> bytes:
    """Return an SSE frame with ``kind`` as its event name and as the ``type`` of its data."""
    return f"event: {kind}\n".encode() + data_line({"type": kind, **value})
