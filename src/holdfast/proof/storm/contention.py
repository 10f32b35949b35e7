"""Contention for a host's run slots: all are in use, and one principal requests far more than the others."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from holdfast.clock import system_clock
from holdfast.proof.history import Share, SharesCounted
from holdfast.proof.storm.agent import PLAIN
from holdfast.proof.storm.load import Load
from holdfast.proof.storm.session import StormSession

__all__ = ["contend"]

_TRIES = 4


async def contend(load: Load, *, places: int, greedy: int, polite: int, span_s: float) -> None:
    """Count the runs that each principal gets while all principals have waiting sessions.

    The count begins when all principals' messages have been accepted, and ends when one principal has no waiting
    session left. If all runs of a principal have started before the count begins, as can happen on a busy machine, the
    test is repeated, and the slots are occupied for twice as long.

    Parameters:
        load: the load to which the contending sessions are added.
        places: maximum number of concurrent runs of the host.
        greedy, polite: number of runs that the first principal requests, and that each other principal requests.
        span_s: time for which the slots are occupied before the contention, in seconds.
    """
    for number in range(_TRIES):
        starts, accepted_at = await _starts(load, f"{number}", places, greedy, polite, span_s * 2**number)
        if all(max(times) > accepted_at for times in starts.values()):
            break
    first_done = min(max(times) for times in starts.values())
    shares = []
    for principal, times in starts.items():
        counted = sorted(at for at in times if accepted_at <= at <= first_done)
        waits = [later - earlier for earlier, later in pairwise([accepted_at, *counted])]
        shares.append(
            Share(
                consumer=principal,
                got=len(counted),
                backlogged=max(times) > accepted_at,
                longest_wait_s=max(waits, default=0.0),
            )
        )
    load.recorder.note(SharesCounted, resource="runs", given=sum(share.got for share in shares), shares=tuple(shares))


async def _starts(
    load: Load, name: str, places: int, greedy: int, polite: int, span_s: float
) -> tuple[dict[str, list[float]], float]:
    """Return the start times of each principal's runs, and the time at which all messages had been accepted."""
    principals = load.access.principals
    holders = [
        StormSession(principals[number % len(principals)], f"{load.prefix}-hold-{name}-{number}", PLAIN, load.chance)
        for number in range(places)
    ]
    contenders = [
        StormSession(principal, f"{load.prefix}-share-{name}-{place}-{number}", PLAIN, load.chance)
        for place, principal in enumerate(principals)
        for number in range(polite if place else greedy)
    ]
    load.others += [*holders, *contenders]
    await asyncio.gather(*(load.nap(session, span_s) for session in holders))
    await asyncio.gather(*(load.nap(session, span_s / 40) for session in contenders))
    accepted_at = system_clock.now()
    starts: dict[str, list[float]] = {principal: [] for principal in principals}
    for session in contenders:
        handle = load.access.session(session.principal, session.key)
        for message in session.sent:
            await handle.wait(message.message_id or "", timeout_s=load.limits.answer_s)
        starts[session.principal] += [run.started_at for run in await handle.runs()]
    return starts, accepted_at
