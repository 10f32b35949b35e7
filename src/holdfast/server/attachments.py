"""Operations on attachments: upload bytes, and download them in a form that no browser executes."""

from __future__ import annotations

from contextlib import aclosing
from urllib.parse import quote

from holdfast import errors
from holdfast.host import Session
from holdfast.protocol.messages import Attachment
from holdfast.server.exchange import Answer, Exchange, encode
from holdfast.server.exports import read_parts
from holdfast.server.native import Native
from holdfast.server.operations import Query, Table

__all__ = ["TABLE"]

TABLE = Table()


@TABLE.enter(
    "POST",
    "/v1/attachments",
    body="*/*",
    query=(Query("name", "string", "Display name of the file, without folders."),),
    answers={201: Attachment},
    errors=(errors.BodyTooLarge, errors.LimitExceeded),
)
async def upload_attachment(native: Native, exchange: Exchange) -> Answer:
    """Store the body unchanged, with its `content-type`, for messages to reference.

    Identical bytes are stored once. The limit is `attachment_limit_bytes`, not that of other bodies.
    """
    name = exchange.query("name") or ""
    media_type = exchange.headers.get(b"content-type", b"").decode("latin-1").strip() or "application/octet-stream"
    body = await exchange.raw_body(limit_bytes=exchange.settings.attachment_limit_bytes)
    kept = await _owner(native, exchange).attach(body, media_type=media_type, name=name)
    return Answer(201, encode(kept))


@TABLE.enter("GET", "/v1/attachments/{digest}", answers={200: "*/*"}, errors=(errors.UnknownAttachment,))
async def get_attachment(native: Native, exchange: Exchange) -> None:
    """Download an attachment with its stored type and name. Browsers save it instead of showing it."""
    owner = _owner(native, exchange)
    attachment = await owner.attachment_about(exchange.path["digest"])
    headers = [
        (b"content-type", attachment.media_type.encode("latin-1", "replace")),
        (b"content-length", str(attachment.size_bytes).encode()),
        (b"content-disposition", _disposition(attachment.name)),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"private, no-store"),
        *exchange.extra,
    ]
    parts = read_parts(exchange, owner, attachment)
    async with aclosing(parts):
        first = await anext(parts, b"")  # raise refusals before the head is written
        await exchange.begin(200, headers)
        await exchange.write(first)
        async for part in parts:
            await exchange.write(part)
    await exchange.end()


def _disposition(name: str) -> bytes:
    return b"attachment" + (f"; filename*=UTF-8''{quote(name, safe='')}".encode() if name else b"")


def _owner(native: Native, exchange: Exchange) -> Session:
    """Return a session that gives access to the caller's attachments; they belong to the principal, so any will do."""
    return native.host.session("attachments", principal=exchange.caller.principal)
