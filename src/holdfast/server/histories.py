"""Operations on a session's history: retry, undo, compact, branch, export and import."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from holdfast import errors
from holdfast.protocol.messages import Receipt, SessionExport, SessionView
from holdfast.server.exchange import Answer, Exchange, encode
from holdfast.server.exports import give_export, give_list, give_transcript
from holdfast.server.native import Body, Name, Native, Transcript
from holdfast.server.operations import Table
from holdfast.storage.port import ALL_ENTRIES

__all__ = ["TABLE"]

TABLE = Table()


class NothingBody(Body, frozen=True, kw_only=True):
    """An empty object; the body may be omitted."""


class CompactBody(Body, frozen=True, kw_only=True):
    """Number of a person's newest messages to keep, with everything that followed them."""

    keep: Annotated[int, Meta(ge=0, le=1000)] = 4


class BranchBody(Body, frozen=True, kw_only=True):
    """Key of the new session, and the last entry to copy (default: all)."""

    key: Name
    through_n: Annotated[int, Meta(ge=0)] | None = None


_nothing_body = msgspec.json.Decoder(NothingBody)
_compact_body = msgspec.json.Decoder(CompactBody)
_branch_body = msgspec.json.Decoder(BranchBody)
_export = msgspec.json.Decoder(SessionExport)
_GONE = (errors.UnknownSession, errors.SessionDeleted)


@TABLE.enter(
    "POST",
    "/v1/sessions/{key}/retry",
    body=NothingBody,
    optional_body=True,
    answers={202: Receipt},
    errors=(
        *_GONE,
        errors.SessionBusy,
        errors.NothingToUndo,
        errors.HistoryChanged,
        errors.UnknownAgent,
        errors.Draining,
    ),
)
async def retry_run(native: Native, exchange: Exchange) -> Answer:
    """Remove the last run's entries from the transcript and resend its messages, in one transaction."""
    await exchange.body(_nothing_body, optional=True)
    return Answer(202, encode(await native.session(exchange).retry()))


@TABLE.enter(
    "POST",
    "/v1/sessions/{key}/undo",
    body=NothingBody,
    optional_body=True,
    answers={200: Transcript},
    errors=(*_GONE, errors.SessionBusy, errors.NothingToUndo),
)
async def undo_run(native: Native, exchange: Exchange) -> Answer | None:
    """Remove the entries of the last run or edit from the transcript, and return them."""
    await exchange.body(_nothing_body, optional=True)
    exchange.take_edit()
    return await give_list(exchange, "entries", await native.session(exchange).undo())


@TABLE.enter(
    "POST",
    "/v1/sessions/{key}/compact",
    body=CompactBody,
    optional_body=True,
    answers={200: Transcript},
    errors=(*_GONE, errors.SessionBusy, errors.HistoryChanged, errors.NotSupported, errors.ModelFailed),
)
async def compact_history(native: Native, exchange: Exchange) -> Answer | None:
    """Summarize all but the newest messages with the agent's model, and return the whole new transcript."""
    body = await exchange.body(_compact_body, optional=True)
    exchange.take_edit()
    session = native.session(exchange)
    await session.compact_history(body.keep)
    return await give_transcript(exchange, session, after=0, limit=ALL_ENTRIES)


@TABLE.enter(
    "POST",
    "/v1/sessions/{key}/branch",
    body=BranchBody,
    answers={201: SessionView},
    errors=(*_GONE, errors.SessionBusy, errors.LimitExceeded),
)
async def branch_session(native: Native, exchange: Exchange) -> Answer:
    """Create a session with a copy of this transcript, up to an entry and the results that it needs."""
    body = await exchange.body(_branch_body)
    exchange.take_edit()
    return Answer(201, encode(await native.session(exchange).branch(body.key, through_n=body.through_n)))


@TABLE.enter(
    "GET",
    "/v1/sessions/{key}/export",
    answers={200: SessionExport},
    errors=(errors.UnknownSession, errors.SessionDeleted),
)
async def export_session(native: Native, exchange: Exchange) -> None:
    """Export the transcript and the bytes of its attachments, for an import here or elsewhere."""
    await give_export(exchange, native.session(exchange), at=native.host.now())


@TABLE.enter(
    "POST",
    "/v1/sessions/{key}/import",
    body=SessionExport,
    answers={201: SessionView},
    errors=(errors.SessionDeleted, errors.SessionBusy, errors.LimitExceeded),
)
async def import_session(native: Native, exchange: Exchange) -> Answer:
    """Start this session with the history of an export. The session must not have a history yet."""
    export = await exchange.body(_export, limit_bytes=exchange.settings.import_limit_bytes)
    return Answer(201, encode(await native.session(exchange).import_history(export)))
