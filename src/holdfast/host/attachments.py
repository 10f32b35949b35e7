"""Attachments of messages: validation, size limits, and look-up by hash."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import TYPE_CHECKING

from holdfast.errors import InvalidRequest, LimitExceeded, UnknownAttachment
from holdfast.protocol.messages import Attachment

if TYPE_CHECKING:
    from holdfast.host.context import HostContext

__all__ = ["about", "fetch", "fetch_part", "keep"]

_TOKEN = r"[A-Za-z0-9!#$&^_.+-]{1,100}"
_MEDIA_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}(;[ -~]{{1,200}})?")
_NAME_LENGTH = 255
_HASHED_TOGETHER = 1_000_000


async def keep(
    context: HostContext, principal: str, body: bytes | bytearray | memoryview, *, media_type: str, name: str
) -> Attachment:
    """Store an attachment; see `SessionAPI.attach`. A bytearray is not copied: do not change it during the call."""
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise InvalidRequest("an attachment must be bytes", hint="read the file with read_bytes()")
    for text in (media_type, name):
        if not isinstance(text, str):
            raise InvalidRequest("an attachment's media type and name must be text (str)")
    if not _MEDIA_TYPE.fullmatch(media_type):
        raise InvalidRequest(f"{media_type[:100]!r} is not a media type", hint="use a type such as image/png")
    if len(name) > _NAME_LENGTH or "/" in name or "\\" in name or not name.isprintable():
        raise InvalidRequest(f"{name[:100]!r} is not a file name", hint="use up to 255 characters, without folders")
    settings = context.settings
    size = memoryview(body).nbytes
    if size > settings.attachment_limit_bytes:
        context.incidents.promises.kept["P9"] += 1
        raise LimitExceeded(
            f"the attachment is {size:,} bytes; the limit is {settings.attachment_limit_bytes:,}",
            hint="make it smaller, or raise the setting attachment_limit_bytes",
        )
    if isinstance(body, memoryview):
        body = bytes(body)
    attachment = Attachment(digest=await _digest(body), media_type=media_type, name=name, size_bytes=size)
    done = context.store.add_attachment(
        principal,
        attachment,
        body,
        at=context.now(),
        limit_bytes=settings.principal_attachments_bytes,
        stored_limit=context.stored_limit,
    )
    try:
        return await asyncio.shield(done)
    except LimitExceeded:
        context.incidents.promises.kept["P14"] += 1
        raise
    finally:
        del done  # breaks a reference cycle between its error and this frame, which would keep the bytes in memory


async def about(context: HostContext, principal: str, digest: str) -> Attachment:
    """Return an attachment's metadata, without reading its bytes. Raises `UnknownAttachment`."""
    found = await context.store.attachment_about(principal, digest)
    if found is None:
        raise UnknownAttachment(f"no such attachment: {digest[:80]!r}")
    return found


async def fetch(context: HostContext, principal: str, digest: str) -> tuple[Attachment, bytes]:
    """Return an attachment and its bytes; see `SessionAPI.attachment`."""
    found = await context.store.attachment(principal, digest)
    if found is None:
        raise UnknownAttachment(f"no such attachment: {digest[:80]!r}")
    return found


async def fetch_part(context: HostContext, principal: str, digest: str, *, start: int, size: int) -> bytes:
    """Return at most `size` bytes of an attachment, starting at `start`. Raises `UnknownAttachment`."""
    found = await context.store.attachment_part(principal, digest, start=start, size=size)
    if found is None:
        raise UnknownAttachment(f"no such attachment: {digest[:80]!r}")
    return found


async def _digest(body: bytes | bytearray) -> str:
    """Return the SHA-256 of `body`, computed in chunks so that a large attachment does not block the loop."""
    hashed = hashlib.sha256()
    for start in range(0, len(body), _HASHED_TOGETHER):
        if start:
            await asyncio.sleep(0)
        hashed.update(memoryview(body)[start : start + _HASHED_TOGETHER])
    return hashed.hexdigest()
