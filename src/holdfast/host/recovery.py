"""Recovery at startup: resume the runs that a crash left where possible, end the others, then run queued messages."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from holdfast.errors import StorageError, StoreCorrupt, UnknownAgent
from holdfast.host.past import Past, read_past
from holdfast.host.patience import RETRY_S, patiently
from holdfast.host.statistics import Incident, Recovery
from holdfast.protocol.stopping import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.host.host import Host
    from holdfast.protocol.events import Stored
    from holdfast.storage.port import Appended, Claim

__all__ = ["recover", "take_up_more"]

READY_LIMIT = 100_000
"""Maximum number of waiting sessions queued at a time; the longest waiting come first."""


async def recover(host: Host) -> Recovery:
    """Rescue every run of an earlier epoch, and queue every session that has waiting messages."""
    restarted: list[str] = []
    interrupted: list[str] = []
    starts: list[tuple[Past, Sequence[Stored]]] = []
    ends: list[asyncio.Future[None]] = []
    for claim in await patiently(host, "rescue", lambda: host.store.rescue(at=host.now())):
        lease = claim.lease
        host.dispatch.admission.occupy(claim.principal)
        host.incidents.kept["P11"] += 1
        try:
            past = await read_past(host, claim)
        except StoreCorrupt as error:
            ends.append(_end(host, Past(claim), error.message))
            interrupted.append(lease.run_id)
            continue
        obstacle = _obstacle(host, past)
        if obstacle is None:
            appended = await patiently(host, "restart", functools.partial(_restart, host, past))
            starts.append((past, appended.events))
            restarted.append(lease.run_id)
        else:
            if claim.questions and claim.interrupt is None:
                _report_unanswered(host, claim, obstacle)
            ends.append(_end(host, past, obstacle))
            interrupted.append(lease.run_id)
    ready = await patiently(host, "ready", lambda: host.store.ready(limit=READY_LIMIT))
    if ends:
        await asyncio.wait(ends, timeout=sum(RETRY_S))  # later ones are still retried
    # Start all runs together, after the others: what they do to another session meets its run, or its end.
    for past, written in starts:
        host.dispatch.start(past.claim, published=written, past=past)
    for session in ready:  # including those that are due later: the clock may have been set since they were accepted
        host.dispatch.later(session.session, session.principal, 0.0)
    host.upkeep.more_wait = len(ready) == READY_LIMIT
    return Recovery(restarted=tuple(restarted), interrupted=tuple(interrupted), waiting=len(ready))


async def take_up_more(host: Host) -> None:
    """Queue more of the sessions that were found waiting at startup."""
    try:
        ready = await host.store.ready(limit=READY_LIMIT)
    except StorageError as error:
        host.store_failed(None, None, "ready", error)
        return
    for session in ready:
        host.dispatch.later(session.session, session.principal, session.not_before)
    host.upkeep.more_wait = len(ready) == READY_LIMIT


def _obstacle(host: Host, past: Past) -> str | None:
    """Return why the run does not resume, or None if it does."""
    claim, journal = past.claim, past.journal()
    if claim.interrupt is not None:
        return "it was being interrupted"
    try:
        agent = host.find_agent(claim.agent)
    except UnknownAgent as error:
        return error.message
    if not agent.replayable:
        return "its agent is not declared replayable"
    if not past.was_begun_by(agent):
        return "its agent " + ("no longer has a model" if agent.model is None else "has a model, but was a function")
    if not journal.replayable:
        return "a call that is not idempotent started and has no result"
    if journal.restarts_in_vain >= host.settings.restart_limit:
        host.incidents.report(
            Incident(
                at=host.now(),
                kind="restart_loop",
                text=f"run {claim.lease.run_id} was given up after {host.settings.restart_limit} restarts; "
                "check what it does before each crash",
                session=claim.key,
                run_id=claim.lease.run_id,
            )
        )
        return f"it was given up after {host.settings.restart_limit} restarts"
    return None


def _report_unanswered(host: Host, claim: Claim, obstacle: str) -> None:
    host.incidents.report(
        Incident(
            at=host.now(),
            kind="unanswered",
            text=f"run {claim.lease.run_id} was interrupted while it waited for an answer: {obstacle}; "
            "its question is closed. Runs of replayable agents resume",
            session=claim.key,
            run_id=claim.lease.run_id,
        )
    )


async def _restart(host: Host, past: Past) -> Appended:
    return await host.store.restart(past.claim.lease, at=host.now(), discard_from=past.journal().discard_from)


def _end(host: Host, past: Past, obstacle: str) -> asyncio.Future[None]:
    cause = past.claim.interrupt or Cause(
        kind="crash", reason=f"the host stopped during the run; {obstacle}", origin=host.node_id, at=host.now()
    )
    return host.dispatch.finish_unstarted(past.claim, "interrupted", cause=cause, past=past)
