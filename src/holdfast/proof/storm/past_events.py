"""The events that a session has had so far, read from the start of its log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from holdfast.protocol.events import Event, Gap

if TYPE_CHECKING:
    from holdfast.protocol.session_api import SessionAPI

__all__ = ["past_events"]


async def past_events(session: SessionAPI) -> AsyncIterator[Event]:
    """Yield a session's events up to the newest one at the time of the call. Raises the errors of its reads."""
    newest = (await session.info()).seq
    if not newest:
        return
    async for event in session.events():
        if not isinstance(event, Gap):
            yield event
            if event.seq >= newest:
                return
