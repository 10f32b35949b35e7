"""The operations on attachments: bytes in, and the same bytes out, never to be run by a browser."""

from __future__ import annotations

from urllib.parse import quote

from holdfast import errors
from holdfast.host import Session
from holdfast.protocol.messages import Attachment
from holdfast.server.exchange import Answer, Exchange, encode
from holdfast.server.native import Native
from holdfast.server.operations import Query, Table

__all__ = ["TABLE"]

TABLE = Table()
_WRITE_BYTES = 262_144


@TABLE.enter(
    "POST",
    "/v1/attachments",
    body="*/*",
    query=(Query("name", "string", "A file name for people, without folders."),),
    answers={201: Attachment},
    errors=(errors.BodyTooLarge, errors.LimitExceeded),
)
async def upload_attachment(native: Native, exchange: Exchange) -> Answer:
    """Keep the body, as it is, for messages to name; its `content-type` is stored with it.

    The same bytes are stored once. The limit is `attachment_limit_bytes`, not that of other bodies.
    """
    name = exchange.query("name") or ""
    media_type = exchange.headers.get(b"content-type", b"").decode("latin-1").strip()
    with native.large.one(exchange.caller.principal):
        body = await exchange.raw_body(limit_bytes=exchange.settings.attachment_limit_bytes)
        owner = _owner(native, exchange)
        kept = await owner.attach(body, media_type=media_type or "application/octet-stream", name=name)
    return Answer(201, encode(kept))


@TABLE.enter("GET", "/v1/attachments/{digest}", answers={200: "*/*"}, errors=(errors.UnknownAttachment,))
async def get_attachment(native: Native, exchange: Exchange) -> None:
    """The bytes of an attachment, with the type and name that they were stored with. Browsers save it, not show it."""
    with native.large.one(exchange.caller.principal):
        attachment, body = await _owner(native, exchange).attachment(exchange.path["digest"])
        await _give(exchange, attachment, body)


async def _give(exchange: Exchange, attachment: Attachment, body: bytes) -> None:
    headers = [
        (b"content-type", attachment.media_type.encode("latin-1", "replace")),
        (b"content-length", str(len(body)).encode()),
        (b"content-disposition", _disposition(attachment.name)),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"private, no-store"),
        *exchange.extra,
    ]
    exchange.started = True
    await exchange.put({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        for start in range(0, len(body), _WRITE_BYTES):
            piece = body[start : start + _WRITE_BYTES]
            await exchange.put({"type": "http.response.body", "body": piece, "more_body": True})
        await exchange.put({"type": "http.response.body", "body": b"", "more_body": False})
    except OSError:
        pass  # the reader took nothing for too long; the server cuts a response that is not whole


def _disposition(name: str) -> bytes:
    return b"attachment" + (f"; filename*=UTF-8''{quote(name, safe='')}".encode() if name else b"")


def _owner(native: Native, exchange: Exchange) -> Session:
    """Attachments belong to the principal; the session through which they are reached does not matter."""
    return native.host.session("attachments", principal=exchange.caller.principal)
