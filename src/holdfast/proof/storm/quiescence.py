"""Wait until a storm's session is quiescent, for as long as the session makes progress.

Invariants
- The session gets no new messages, so it makes progress at most once per message, and the wait is bounded.
- A session is stuck only if the same run was active, and the same number of messages waited, for all of `STANDSTILL_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.clock import system_clock
from holdfast.errors import ServerUnreachable, StorageError, Unavailable
from holdfast.protocol.messages import SessionView

__all__ = ["STANDSTILL_S", "quiescent"]

STANDSTILL_S = 20.0
"""Time without progress, in seconds, after which a session is stuck. Even on a busy machine, a run takes far less."""
_POLL_S = 0.05


async def quiescent(key: str, look: Callable[[], Awaitable[SessionView]]) -> str | None:
    """Wait until a session is quiescent, and return None; if the session gets stuck, return a description.

    Parameters:
        key: the session's key.
        look: called repeatedly to read the session; may raise `ServerUnreachable`, `StorageError` or `Unavailable`.

    Raises:
        HoldfastError: if `look` raises any other error, such as `NotFound`.
    """
    view: SessionView | None = None
    deadline = system_clock.monotonic() + STANDSTILL_S
    while True:
        before = view
        with suppress(ServerUnreachable, StorageError, Unavailable):
            view = await look()
        if view is not None:
            if view.run_id is None and not view.waiting:
                return None
            if before is None or (view.run_id, view.waiting) != (before.run_id, before.waiting):
                deadline = system_clock.monotonic() + STANDSTILL_S
        if system_clock.monotonic() > deadline:
            return f"session {key} does not come to rest: for {STANDSTILL_S:g} s it has been {view}"
        await asyncio.sleep(_POLL_S)
