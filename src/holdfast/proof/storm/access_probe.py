"""Principals that try to reach each other's sessions, and owners that reach their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from holdfast.errors import Draining, HoldfastError, RateLimited, ServerUnreachable, StorageError
from holdfast.proof.history import AccessTried, SessionsListed
from holdfast.proof.storm.access import HostAccess
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.session import StormSession
from holdfast.protocol.events import Event, Gap, format_cursor
from holdfast.protocol.session_api import SessionAPI

__all__ = ["pry"]


async def pry(access: HostAccess, recorder: StormRecorder, session: StormSession, principal: str) -> None:
    """Try a random operation on the session as `principal`, and record the answer and sometimes a list of sessions.

    If the answer is `Draining` or `RateLimited`, nothing is recorded.

    Raises:
        ServerUnreachable, StorageError: if no host answered.
    """
    handle = access.session(principal, session.key)
    # Without a cursor, a stranger would wait for a session of its own.
    after = None if principal == session.principal else format_cursor(0, session.number)
    verbs: dict[str, Callable[[], Awaitable[object]]] = {
        "info": handle.info,
        "transcript": handle.transcript,
        "mailbox": handle.mailbox,
        "runs": handle.runs,
        "tree": handle.tree,
        "events": lambda: _first_event(handle, after),
    }
    if principal != session.principal:
        verbs["interrupt"] = lambda: handle.interrupt(f"{principal} pries")
        verbs["stop"] = lambda: handle.stop(f"{principal} pries")
        verbs["delete"] = handle.delete
        if session.sent:
            verbs["withdraw"] = lambda: handle.withdraw(session.sent[-1].message_id or "")
            verbs["message"] = lambda: handle.message(session.sent[-1].message_id or "")
    verb = session.chance.choice(sorted(verbs))
    try:
        await verbs[verb]()
    except (ServerUnreachable, StorageError):
        raise
    except (Draining, RateLimited):
        return
    except HoldfastError as error:
        answer = error.code
    else:
        answer = "ok"
    recorder.note(
        AccessTried, principal=principal, owner=session.principal, session=session.key, verb=verb, answer=answer
    )
    if session.chance.random() < 0.2:
        seen = await access.sessions(principal)
        recorder.note(SessionsListed, principal=principal, seen=tuple((view.principal, view.key) for view in seen))


async def _first_event(handle: SessionAPI, after: str | None) -> Event | Gap:
    async with aclosing(handle.events(after=after)) as events:  # type: ignore[type-var]
        return await anext(events)
