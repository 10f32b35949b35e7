"""The events that a session has had so far, read from the start of its log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from holdfast.protocol.events import Event, Gap

if TYPE_CHECKING:
    from holdfast.protocol.session_api import SessionAPI

__all__ = ["past_events"]


async def past_events(session: SessionAPI, newest: int | None = None) -> AsyncGenerator[Event, None]:
    """Yield a session's events. Raises the errors of its reads.

    Parameters:
        newest: seq of the last event to yield; None means the newest event at the time of the call.
    """
    if newest is None:
        newest = (await session.info()).seq
    if not newest:
        return
    async with aclosing(session.events()) as events:  # type: ignore[type-var]
        async for event in events:
            if not isinstance(event, Gap):
                yield event
                if event.seq >= newest:
                    return
