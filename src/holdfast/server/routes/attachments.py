"""Routes of attachments: upload bytes, and download them in a form that no browser executes."""

from __future__ import annotations

from contextlib import aclosing
from urllib.parse import quote

from holdfast import errors
from holdfast.host import Session
from holdfast.protocol.messages import Attachment
from holdfast.server.context import ServerContext
from holdfast.server.large_responses import read_parts
from holdfast.server.parameters import RawBody, TextQuery
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.server.router import Router

__all__ = ["ROUTER"]

ROUTER = Router()
_NAME = TextQuery("name", "Display name of the file, without folders.")


@ROUTER.route(
    "POST",
    "/v1/attachments",
    body=RawBody("*/*", limit=lambda settings: settings.attachment_limit_bytes),
    query=(_NAME,),
    responses={201: Attachment},
    errors=(errors.BodyTooLarge, errors.LimitExceeded),
)
async def upload_attachment(server: ServerContext, request: Request, body: bytes | bytearray) -> Response:
    """Store the body unchanged, with its `content-type`, so that messages can refer to it as an attachment.

    Identical bytes are stored once. The size limit is `attachment_limit_bytes` instead of the usual `body_limit_bytes`.
    """
    name = _NAME.parse(request) or ""
    media_type = request.headers.get(b"content-type", b"").decode("latin-1").strip() or "application/octet-stream"
    kept = await _owner(server, request).attach(body, media_type=media_type, name=name)
    return Response(201, encode(kept))


@ROUTER.route("GET", "/v1/attachments/{digest}", responses={200: "*/*"}, errors=(errors.UnknownAttachment,))
async def get_attachment(server: ServerContext, request: Request) -> None:
    """Download an attachment with its stored type and name. Browsers save it instead of showing it."""
    owner = _owner(server, request)
    attachment = await owner.attachment_about(request.path["digest"])
    headers = [
        (b"content-type", attachment.media_type.encode("latin-1", "replace")),
        (b"content-length", str(attachment.size_bytes).encode()),
        (b"content-disposition", _disposition(attachment.name)),
        (b"content-security-policy", b"sandbox; default-src 'none'"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"private, no-store"),
        *request.extra,
    ]
    parts = read_parts(request, owner, attachment)
    async with aclosing(parts):
        first = await anext(parts, b"")  # raise refusals before the head is written
        await request.begin(200, headers)
        await request.write(first)
        async for part in parts:
            await request.write(part)
    await request.end()


def _disposition(name: str) -> bytes:
    return b"attachment" + (f"; filename*=UTF-8''{quote(name, safe='')}".encode() if name else b"")


def _owner(server: ServerContext, request: Request) -> Session:
    """Return a session that gives access to the caller's attachments.

    Any session of the principal does so, because attachments belong to the principal.
    """
    return server.host.session("attachments", principal=request.caller.principal)
