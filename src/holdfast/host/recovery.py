"""What a start does with the runs that a crash left: go on with those that can, end the others, then run what waits."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, TypeVar

import msgspec

from holdfast.agents.journal import Journal
from holdfast.errors import StaleFence, StorageError, UnknownAgent
from holdfast.host.active import RETRY_S
from holdfast.host.statistics import Incident, Recovery
from holdfast.protocol.events import Event, decode_event
from holdfast.protocol.stopping import Cause
from holdfast.protocol.transcript import RunTranscript

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from holdfast.host.host import Host
    from holdfast.protocol.events import Stored
    from holdfast.storage.port import Appended, Claim, Lease

__all__ = ["recover", "take_up_more"]

T = TypeVar("T")

READY_LIMIT = 100_000
"""Sessions with waiting messages that are taken up at a time; the longest waiting come first."""


async def recover(host: Host) -> Recovery:
    """Rescue every run that another epoch left behind, and line up every session that has messages waiting."""
    restarted: list[str] = []
    interrupted: list[str] = []
    starts: list[tuple[Claim, Sequence[Stored], Journal]] = []
    ends: list[asyncio.Future[None]] = []
    for claim in await _patiently(host, "rescue", lambda: host.store.rescue(at=host.now())):
        lease = claim.lease
        host.dispatch.admission.occupy(claim.principal)
        host.incidents.kept["P11"] += 1
        stored = await _patiently(host, "read", functools.partial(host.store.run_events, lease.session, lease.run_id))
        try:
            events = [decode_event(event) for event in stored]
        except msgspec.MsgspecError as error:
            ends.append(_end(host, claim, (), f"its log cannot be read: {error}"))
            interrupted.append(lease.run_id)
            continue
        journal = Journal(events)
        obstacle = _obstacle(host, claim, journal)
        if obstacle is None:
            appended = await _patiently(host, "restart", functools.partial(_restart, host, lease))
            starts.append((claim, appended.events, journal))
            restarted.append(lease.run_id)
        else:
            ends.append(_end(host, claim, events, obstacle))
            interrupted.append(lease.run_id)
    ready = await _patiently(host, "ready", lambda: host.store.ready(limit=READY_LIMIT))
    if ends:
        await asyncio.wait(ends, timeout=sum(RETRY_S))  # what the store cannot take by then is tried on
    # All at once, and after the others: whatever these runs do to another session meets its run, or its end.
    for claim, written, journal in starts:
        host.dispatch.start(claim, published=written, journal=journal)
    for session in ready:
        host.dispatch.later(session.session, session.principal, session.not_before)
    host.upkeep.more_wait = len(ready) == READY_LIMIT
    return Recovery(restarted=tuple(restarted), interrupted=tuple(interrupted), waiting=len(ready))


async def take_up_more(host: Host) -> None:
    """Line up further sessions of those that a start found waiting."""
    try:
        ready = await host.store.ready(limit=READY_LIMIT)
    except StorageError as error:
        host.store_failed(None, None, "ready", error)
        return
    for session in ready:
        host.dispatch.later(session.session, session.principal, session.not_before)
    host.upkeep.more_wait = len(ready) == READY_LIMIT


def _obstacle(host: Host, claim: Claim, journal: Journal) -> str | None:
    """Why the run cannot go on, or None if it can."""
    if claim.interrupt is not None:
        return "it was being interrupted"
    try:
        agent = host.find_agent(claim.agent)
    except UnknownAgent as error:
        return error.message
    if not agent.replayable:
        return "its agent is not declared replayable"
    if not journal.replayable:
        return "a call was started that has no result and is not idempotent"
    if journal.restarts_in_vain >= host.settings.restart_limit:
        host.incidents.report(
            Incident(
                at=host.now(),
                kind="restart_loop",
                text=f"run {claim.lease.run_id} was given up after {host.settings.restart_limit} restarts: "
                "look at what it does before each crash",
                session=claim.key,
                run_id=claim.lease.run_id,
            )
        )
        return f"it was given up after {host.settings.restart_limit} restarts"
    return None


async def _restart(host: Host, lease: Lease) -> Appended:
    return await host.store.restart(lease, at=host.now())


async def _patiently(host: Host, what: str, verb: Callable[[], Awaitable[T]]) -> T:
    """What the store answers; an error is borne for some seconds."""
    for delay_s in RETRY_S:
        try:
            return await verb()
        except StaleFence:
            raise
        except StorageError as error:
            host.store_failed(None, None, what, error)
            await asyncio.sleep(delay_s)
    return await verb()


def _end(host: Host, claim: Claim, events: Sequence[Event], obstacle: str) -> asyncio.Future[None]:
    transcript = RunTranscript(claim.lease.run_id, claim.messages)
    for event in events:
        transcript.feed(event)
    cause = claim.interrupt or Cause(
        kind="crash", reason=f"the host ended during the run, and {obstacle}", origin=host.node_id, at=host.now()
    )
    return host.dispatch.finish_unstarted(claim, "interrupted", cause=cause, transcript=transcript)
