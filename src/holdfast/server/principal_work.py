"""Find and stop a principal's work on a host: its active sessions and its schedules."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from holdfast.errors import SessionDeleted
from holdfast.logs import log_failure

if TYPE_CHECKING:
    from holdfast.host import Host, Session
    from holdfast.protocol.messages import SessionView

__all__ = ["Ended", "find_work", "stop_principal"]

_log = logging.getLogger("holdfast.server")
_PAGE = 1000
_REASON = "the key was revoked"


class Ended(NamedTuple):
    """Work of a principal: keys of sessions that were found or stopped, and ids of schedules found or paused."""

    sessions: tuple[str, ...]
    schedules: tuple[str, ...]


async def find_work(host: Host, principal: str) -> Ended:
    """Return a principal's active schedules and its sessions that have a run, queued messages or background work."""
    schedules = [view.schedule_id for view in await host.schedules(principal=principal, limit=_PAGE) if view.next_at]
    return Ended(tuple(await _sessions(host, principal)), tuple(schedules))


async def stop_principal(host: Host, principal: str) -> Ended:
    """Pause a principal's schedules, stop its sessions, and return the paused schedules and the stopped sessions.

    If a session fails to stop, the failure is logged, and the session is omitted from the result. The other sessions
    are still stopped.
    """
    found = await find_work(host, principal)
    for schedule_id in found.schedules:
        await host.find_schedule(schedule_id, principal=principal).pause()
    # Search again: a schedule may have fired meanwhile. From here on, only the principal's other callers start work.
    sessions = await _sessions(host, principal)
    async with asyncio.TaskGroup() as group:
        stops = {key: group.create_task(_stop(host.session(key, principal=principal))) for key in sessions}
    return Ended(tuple(key for key, stop in stops.items() if stop.result()), found.schedules)


async def _stop(session: Session) -> bool:
    try:
        await session.stop(_REASON)
    except SessionDeleted:
        pass
    except Exception as error:
        log_failure(
            _log,
            "stopping a session after a key revocation failed",
            error,
            principal=session.principal,
            session=session.key,
        )
        return False
    return True


async def _sessions(host: Host, principal: str) -> list[str]:
    in_background = {actor.key for actor in host.actors.values() if actor.principal == principal and actor.background}
    if host.store.cluster is not None:
        in_background |= await host.store.cluster.background_of(principal)

    def has_work(view: SessionView) -> bool:
        return view.state != "deleted" and (view.run_id is not None or view.waiting > 0 or view.key in in_background)

    found: dict[str, None] = {}
    before: tuple[float, int] | None = None
    while page := await host.store.sessions(principal=principal, limit=_PAGE, before=before):
        found |= {view.key: None for view in page if has_work(view)}
        if len(page) < _PAGE:
            break
        before = page[-1].updated_at, page[-1].number
    return list(found)
