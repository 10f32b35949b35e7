"""Responses with transcripts, lists and exports, which are written piece by piece.

The memory of the data is charged to the principal while the data is in memory.
"""

from __future__ import annotations

import binascii
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from holdfast.errors import HistoryChanged
from holdfast.host import Session
from holdfast.host.budgets import PAGE_BYTES
from holdfast.protocol.messages import Attachment, Entry
from holdfast.server.request import Request
from holdfast.server.response import Response, encode
from holdfast.storage.port import ALL_ENTRIES

__all__ = ["read_parts", "respond_with_export", "respond_with_list", "respond_with_transcript"]

_BASE64_BYTES = 49_152
"""Bytes encoded at a time; a multiple of three, so that the encoded pieces can be joined."""
_PART_BYTES = 40 * _BASE64_BYTES
"""Bytes of an attachment read at a time."""
_SMALL_BYTES = PAGE_BYTES // 2
"""A page that is shorter than this as JSON was not cut off by its size limit."""


async def respond_with_transcript(request: Request, session: Session, *, after: int, limit: int) -> Response | None:
    """Respond with the transcript as ``{"entries": […]}``.

    A small transcript is returned as one response. A larger one is written page by page, and the function returns None.

    Raises:
        UnknownSession, BudgetExceeded, HostBusy: as `Session.transcript_page`.
        HistoryChanged: if the last entry sent has been removed from the transcript before the next page is read.
        TimeoutError: as `Request.put`.
    """
    first, charge = await session.transcript_page(after=after, limit=limit)
    with charge:  # until it is written: waiting for memory again would hold uncharged data
        body = await request.work(lambda: b",".join([encode(entry) for entry in first]))
        if len(body) < _SMALL_BYTES:
            return Response(200, b'{"entries":[%b]}' % body)
        await request.begin_json()
        await request.write(b'{"entries":[')
        await request.write(body)
        del body
    async with aclosing(_pages(request, session, given=first[-1].n, limit=limit - len(first))) as pages:
        async for page in pages:
            for entry in page:
                await request.write(b"," + await request.work(partial(encode, entry)))
    await request.write(b"]}\n")
    await request.end()
    return None


async def respond_with_list(request: Request, name: str, items: Sequence[msgspec.Struct]) -> Response | None:
    """Respond with a list as ``{name: […]}``.

    A small list is returned as one response. For a larger list, memory is charged to the principal, the items are
    written one by one, and the function returns None.

    Raises:
        BudgetExceeded, HostBusy: if the memory for a larger list was not available in time.
        TimeoutError: as `Request.put`.
    """
    begun: list[bytes] = []
    size = 0
    for item in items:
        begun.append(await request.work(partial(encode, item)) if size else encode(item))
        size += len(begun[-1])
        if size > _SMALL_BYTES:
            break
    body = b'{"%b":[%b' % (name.encode(), b",".join(begun))
    rest = items[len(begun) :]
    if not rest and size <= _SMALL_BYTES:
        return Response(200, body + b"]}")
    await request.charge_memory(2 * max(size, size * len(items) // len(begun)), in_memory=True)
    await request.begin_json()
    await request.write(body)
    for item in rest:
        await request.write(b"," + await request.work(partial(encode, item)))
    await request.write(b"]}\n")
    await request.end()
    return None


async def respond_with_export(request: Request, session: Session, *, at: float) -> None:
    """Respond with a `SessionExport`, page by page and attachment by attachment.

    Raises as `respond_with_transcript`.
    """
    view = await session.info()
    digests: set[str] = set()
    await request.begin_json()
    head = b'{"format":1,"key":%b,"agent":%b,"exported_at":%b,"entries":['
    await request.write(head % (encode(view.key), encode(view.agent), encode(at)))
    separator = b""
    async with aclosing(_pages(request, session, given=0, limit=ALL_ENTRIES)) as pages:
        async for page in pages:
            for entry in page:
                await request.write(separator + await request.work(partial(encode, entry)))
                separator = b","
                digests.update(attachment.digest for attachment in entry.attachments)
    await request.write(b'],"attachments":{')
    separator = b""
    for digest in sorted(digests):
        await request.write(b'%b"%b":"' % (separator, digest.encode()))
        await _write_base64(request, session, digest)
        separator = b'",'
    await request.write(b'"}}\n' if digests else b"}}\n")
    await request.end()


async def _pages(request: Request, session: Session, *, given: int, limit: int) -> AsyncGenerator[list[Entry]]:
    """Yield the pages after the entry number `given`, with at most `limit` entries in total.

    The memory of a page is charged until the next page is requested. After a page is read, the entry before that page
    must still exist; otherwise the transcript has changed, and `HistoryChanged` is raised.
    """
    while limit > 0:
        page, charge = await session.transcript_page(after=given, limit=limit)
        with charge:
            if given and not await session.has_entry(given):
                raise HistoryChanged("the transcript changed while it was being read")
            if not page:
                return
            yield page
            limit -= len(page)
            given = page[-1].n


async def read_parts(request: Request, session: Session, attachment: Attachment) -> AsyncGenerator[bytes]:
    """Yield the bytes of an attachment in parts of `_PART_BYTES`, with only one part in memory at a time.

    Raises:
        BudgetExceeded, HostBusy: if the memory for a part was not available in time.
        UnknownAttachment: if the attachment no longer exists.
    """
    size = attachment.size_bytes
    if not size:
        return
    with await request.charge_memory(min(size, _PART_BYTES)):
        for start in range(0, size, _PART_BYTES):
            with await request.budgets.take_read(request.principal):
                part = await session.attachment_part(attachment.digest, start=start, size=_PART_BYTES)
            yield part
            del part


async def _write_base64(request: Request, session: Session, digest: str) -> None:
    async with aclosing(read_parts(request, session, await session.attachment_about(digest))) as parts:
        async for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _BASE64_BYTES):
                piece = view[start : start + _BASE64_BYTES]
                await request.write(await request.work(partial(binascii.b2a_base64, piece, newline=False)))
