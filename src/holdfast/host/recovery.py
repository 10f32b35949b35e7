"""What a start does with the runs that a crash left: go on with those that can, end the others, then run what waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.agents.journal import Journal
from holdfast.errors import UnknownAgent
from holdfast.host.statistics import Incident, Recovery
from holdfast.protocol.events import Event, decode_event
from holdfast.protocol.stopping import Cause
from holdfast.protocol.transcript import RunTranscript

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.host.host import Host
    from holdfast.storage.port import Claim

__all__ = ["recover"]

READY_LIMIT = 100_000
"""Sessions with waiting messages that a start takes up; the longest waiting come first."""


async def recover(host: Host) -> Recovery:
    """Rescue every run that another epoch left behind, and line up every session that has messages waiting."""
    restarted: list[str] = []
    interrupted: list[str] = []
    for claim in await host.store.rescue(at=host.now()):
        host.dispatch.admission.occupy(claim.principal)
        host.incidents.kept["P11"] += 1
        stored = await host.store.run_events(claim.lease.session, claim.lease.run_id)
        events = [decode_event(event) for event in stored]
        journal = Journal(events)
        obstacle = _obstacle(host, claim, journal)
        if obstacle is None:
            appended = await host.store.restart(claim.lease, at=host.now())
            host.dispatch.start(claim, published=appended.events, journal=journal)
            restarted.append(claim.lease.run_id)
        else:
            await _end(host, claim, events, obstacle)
            interrupted.append(claim.lease.run_id)
    ready = await host.store.ready(limit=READY_LIMIT)
    for session in ready:
        host.dispatch.later(session.session, session.principal, session.not_before)
    return Recovery(restarted=tuple(restarted), interrupted=tuple(interrupted), waiting=len(ready))


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
    if claim.attempt > host.settings.restart_limit + 1:
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


async def _end(host: Host, claim: Claim, events: Sequence[Event], obstacle: str) -> None:
    transcript = RunTranscript(claim.lease.run_id, claim.messages)
    for event in events:
        transcript.feed(event)
    cause = claim.interrupt or Cause(
        kind="crash", reason=f"the host ended during the run, and {obstacle}", origin=host.node_id, at=host.now()
    )
    await host.dispatch.finish_unstarted(claim, "interrupted", cause=cause, transcript=transcript)
