"""The port through which runs and the session queue call the parts of the host above them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from holdfast.host.live_session import LiveRun, LiveSession
    from holdfast.protocol.stopping import Cause, StopReceipt
    from holdfast.storage.port import Claim, Committed

__all__ = ["RunObserver"]


class RunObserver(Protocol):
    """Interface to the parts above the runs, implemented by `HostParts`.

    All methods are called on the host's loop, and none waits.
    """

    def on_slot(self, principal: str, session: int) -> None:
        """Claim the next run of a queued session that got a slot."""

    def on_started(self, run: LiveRun) -> None:
        """Handle a run that started."""

    def on_quiescent(self, run: LiveRun) -> None:
        """Handle a run that waits only for people."""

    def on_ended(self, run: LiveRun, claim: Claim, committed: Committed | None) -> None:
        """Handle a run that has ended or was unloaded. If the run was committed, `committed` is the store's result."""

    def on_question(self, due_at: float) -> None:
        """Handle a new question, which expires at `due_at`."""

    def stop_unloaded(self, session: int, principal: str, run_id: str, cause: Cause) -> asyncio.Task[StopReceipt]:
        """End a run that is not in memory. The store has already recorded its interrupt."""

    def start_background(
        self, actor: LiveSession, work: Callable[[], Awaitable[Any]], *, name: str, claim: Claim
    ) -> None:
        """Start background work of a session, for the run of `claim`. Raises `Draining`, `LimitExceeded`."""
