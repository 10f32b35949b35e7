"""Manual edits of a transcript (retry, undo, compact, fork, import), and the transcript as clients see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.errors import (
    Draining,
    Interrupted,
    InvalidRequest,
    LimitExceeded,
    ModelFailed,
    NothingToUndo,
    NotSupported,
    SessionBusy,
)
from holdfast.protocol.messages import AgentState, Attachment, Entry, HistoryEdit, SessionExport
from holdfast.protocol.states import TERMINAL_RUN_STATES
from holdfast.protocol.transcript import last_agent_state, memory_bytes
from holdfast.runtime import Scope
from holdfast.storage.port import Edited, EditHistory

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.host.budgets import Charge
    from holdfast.host.context import HostContext
    from holdfast.host.session_directory import SessionDirectory

__all__ = [
    "LastRun",
    "charged",
    "check_import",
    "compact",
    "edit",
    "last_run",
    "read",
    "shown",
    "through",
    "with_states",
]


def shown(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries as clients see them, without agent state."""
    return [
        msgspec.structs.replace(entry, agent_state=None) if entry.agent_state is not None else entry
        for entry in entries
    ]


async def read(
    context: HostContext, principal: str, session: int, *, within_s: float | None = None
) -> tuple[Sequence[Entry], Charge]:
    """Read a whole transcript and charge its memory. The caller must release the charge.

    Transcripts of up to ``FREE_BYTES`` are not charged.

    Parameters:
        within_s: timeout for each wait for room, in seconds; None waits indefinitely.

    Raises:
        BudgetExceeded, HostBusy: if the transcript exceeds a principal's share, or if a wait for room times out.
    """

    def within(limit_bytes: int) -> Awaitable[Sequence[Entry] | int]:
        return context.store.transcript_within(session, limit_bytes=limit_bytes)

    return await context.budgets.read_history(principal, within, memory_bytes, within_s=within_s)


@asynccontextmanager
async def charged(context: HostContext, principal: str, session: int) -> AsyncIterator[tuple[Sequence[Entry], Charge]]:
    """Yield a transcript and its charge for an edit, and release the charge afterwards. Raises the errors of `read`."""
    entries, charge = await read(context, principal, session, within_s=context.settings.stream_stall_s)
    with charge:
        yield entries, charge


async def edit(
    context: HostContext,
    directory: SessionDirectory,
    principal: str,
    key: str,
    kind: HistoryEdit,
    entries: Sequence[Entry] = (),
    *,
    expected_n: int | None = None,
    agent: str = "",
) -> Edited:
    """Edit the transcript in the store, and publish the edit's events. Raises the errors of `Store.edit_history`."""
    done = context.store.edit_history(
        EditHistory(
            principal=principal,
            key=key,
            edit=kind,
            at=context.now(),
            entries=entries,
            expected_n=expected_n,
            agent=agent,
            session_limit=context.settings.principal_sessions,
            stored_limit=context.stored_limit,
        )
    )

    def edited(done: asyncio.Future[Edited]) -> None:
        directory.awaited.made(principal, key)  # even if the reply was lost: the session may exist
        error = done.exception()
        if isinstance(error, LimitExceeded):
            context.incidents.promises.kept["P9"] += 1
        elif error is None:
            directory.publish(done.result().session, done.result().events)

    done.add_done_callback(edited, context=context.variables)
    try:
        return await asyncio.shield(done)
    finally:
        del done  # breaks a reference cycle between its error and this frame, which would keep the entries in memory


class LastRun(NamedTuple):
    """The request of the most recent run."""

    run_id: str
    content: str
    attachments: tuple[Attachment, ...]


async def last_run(context: HostContext, principal: str, session: int) -> LastRun:
    """Return the request of the session's last run.

    Raises:
        SessionBusy: if a run is active.
        NothingToUndo: if the last run left no request in the transcript.
    """
    runs = await context.store.runs(session, limit=1)
    if runs and runs[0].state not in TERMINAL_RUN_STATES:
        raise SessionBusy("a run is already active", hint="retry after it has ended, or interrupt it")
    asked: list[Entry] = []
    if runs:
        async with charged(context, principal, session) as (entries, _):
            asked = [entry for entry in entries if entry.run_id == runs[0].run_id and entry.role == "user"]
    if not asked:
        raise NothingToUndo("the last run left no request in the transcript to retry")
    return LastRun(
        run_id=runs[0].run_id,
        content="\n".join(entry.content for entry in asked),
        attachments=tuple(attachment for entry in asked for attachment in entry.attachments),
    )


def through(entries: Sequence[Entry], through_n: int | None) -> list[Entry]:
    """Return the entries up to `through_n`, and the results of calls among these entries, even if they come later.

    Without `through_n`, all entries are returned. If the run of the last copied entry did not complete, the run's
    ``ended_by`` is set on that entry, even if only a part of the run was copied.
    """
    if through_n is None:
        return list(entries)
    calls = {entry.call_id for entry in entries if entry.role == "tool_call" and entry.n <= through_n}
    late = [
        entry for entry in entries if entry.n > through_n and entry.role == "tool_result" and entry.call_id in calls
    ]
    copied = [*(entry for entry in entries if entry.n <= through_n), *shown(late)]
    if copied:
        last = copied[-1]
        ended_by = next((e.ended_by for e in entries if e.run_id == last.run_id and e.ended_by is not None), None)
        copied[-1] = msgspec.structs.replace(last, ended_by=ended_by)
    return copied


async def with_states(context: HostContext, session: int, entries: Sequence[Entry], charge: Charge) -> list[Entry]:
    """Return the entries with their agent state, for a copy of the session. `charge` grows by the size of the state."""
    whole = []
    for entry in entries:
        if entry.agent_state is not None:
            body = await context.store.kept(session, entry.agent_state.n)
            charge.grow(len(body))
            kept = AgentState(by=entry.agent_state.by, body=body) if body else None
            entry = msgspec.structs.replace(entry, agent_state=kept)
        whole.append(entry)
    return whole


async def compact(
    context: HostContext, directory: SessionDirectory, principal: str, key: str, agent: Agent, row: int, keep: int
) -> None:
    """Compact a transcript; see `SessionAPI.compact`. A transcript that is already short stays unchanged."""
    if agent.model is None:
        raise NotSupported(
            f"agent {agent.name!r} has no model to summarize its transcript with",
            hint="give the agent a model, or keep its history short with undo and fork",
        )
    step_timeout_s = context.settings.step_timeout_s
    async with charged(context, principal, row) as (entries, _):
        cut = _cut(entries, keep)
        if cut == 0 or (cut == 1 and entries[0].role == "summary"):
            return
        try:
            async with Scope("compact", parent=context.scope, deadline_s=step_timeout_s) as scope:
                text = await scope.spawn(agent.summarise(entries[:cut]), name="compact")
        except Interrupted as stopped:
            if stopped.cause.kind == "deadline":
                raise ModelFailed(f"the model returned no summary within {step_timeout_s:g} s") from None
            raise Draining("this host is shutting down; the transcript is unchanged") from None
        summary = Entry(role="summary", content=text, agent_state=last_agent_state(entries[:cut]))
        kept = [summary, *entries[cut:]]
        await edit(context, directory, principal, key, "compact", kept, expected_n=entries[-1].n)


def _cut(entries: Sequence[Entry], keep: int) -> int:
    """Return the number of entries to summarize, which are the entries before the last `keep` user messages.

    User messages that arrived during a tool call are not counted, so that no call is separated from its result.
    """
    if keep == 0:
        return len(entries)
    places: list[int] = []
    open_calls: set[str | None] = set()
    for index, entry in enumerate(entries):
        if entry.role == "user" and not open_calls:
            places.append(index)
        elif entry.role == "tool_call":
            open_calls.add(entry.call_id)
        elif entry.role == "tool_result":
            open_calls.discard(entry.call_id)
    return places[-keep] if keep <= len(places) else 0


_UNCHANGED = "pass the result of export() unmodified"


def check_import(export: SessionExport) -> list[Entry]:
    """Validate an export and return its entries for storage. Raises `InvalidRequest` if the export is invalid."""
    if not isinstance(export, SessionExport):
        raise InvalidRequest("only a SessionExport can be imported", hint="pass the result of export()")
    open_calls: set[str] = set()
    seen: set[str] = set()
    try:
        entries = msgspec.convert(msgspec.to_builtins(export.entries), tuple[Entry, ...])
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"malformed entries: {error}", hint=_UNCHANGED) from None
    for number, entry in enumerate(entries, 1):
        if entry.role == "tool_call":
            if not entry.call_id or entry.call_id in seen:
                raise InvalidRequest(f"entry {number} is a call without a unique id", hint=_UNCHANGED)
            seen.add(entry.call_id)
            open_calls.add(entry.call_id)
        elif entry.role == "tool_result":
            if entry.call_id not in open_calls:
                raise InvalidRequest(f"entry {number} is a result without a preceding call", hint=_UNCHANGED)
            open_calls.discard(entry.call_id)
    if open_calls:
        raise InvalidRequest(f"{len(open_calls)} calls have no result", hint=_UNCHANGED)
    named = {attachment.digest for entry in entries for attachment in entry.attachments}
    if missing := named - export.attachments.keys():
        raise InvalidRequest(f"the export lacks the bytes of attachment {min(missing)[:80]!r}", hint=_UNCHANGED)
    return [msgspec.structs.replace(entry, n=0, agent_state=None) for entry in entries]  # agent state is never imported
