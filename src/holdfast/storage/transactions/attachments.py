"""Transactions on attachments: their bytes are stored once per principal, and sessions refer to them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.errors import LimitExceeded, UnknownAttachment
from holdfast.protocol.events import plain
from holdfast.protocol.messages import Attachment
from holdfast.storage.backend import Tables
from holdfast.storage.transactions.session_log import check_quota

__all__ = ["add_attachment", "stored_attachments"]


def add_attachment(
    tables: Tables,
    principal: str,
    attachment: Attachment,
    body: bytes | bytearray,
    at: float,
    limit_bytes: int,
    stored_limit: int,
) -> Attachment:
    """See `Store.add_attachment`."""
    found = tables.attachment(principal, attachment.digest)
    if found is not None:
        tables.touch_attachment(principal, attachment.digest, at)
        return found
    used = tables.attached_bytes(principal)
    if used + len(body) > limit_bytes:
        raise LimitExceeded(
            f"attachments of {principal!r} take {used} bytes; {len(body)} more would exceed the limit of {limit_bytes}",
            hint="delete sessions whose attachments you do not need",
        )
    check_quota(tables, principal, len(body), stored_limit)
    attachment = msgspec.structs.replace(
        attachment, name=plain(attachment.name), media_type=plain(attachment.media_type), size_bytes=len(body)
    )
    tables.add_attachment(principal, attachment, body, at)
    return attachment


def stored_attachments(tables: Tables, principal: str, wanted: Sequence[Attachment]) -> tuple[Attachment, ...]:
    """Return the stored attachments of the principal that have the same digests as `wanted`.

    Raises `UnknownAttachment` if the principal has no attachment with one of the digests.
    """
    kept = []
    for attachment in wanted:
        found = tables.attachment(principal, attachment.digest)
        if found is None:
            raise UnknownAttachment(f"no such attachment: {attachment.digest!r}")
        kept.append(found)
    return tuple(kept)
