"""The stop of a scope, as the scope's state uses it; `holdfast.runtime.scope.stop` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from holdfast.protocol.stopping import StopReceipt
    from holdfast.runtime.processes.tree import TreeResult
    from holdfast.runtime.scope.handle import Handle

__all__ = ["RunningStop", "StopPhase"]

StopPhase = Literal["grace", "force", "last", "ended"]


class RunningStop(Protocol):
    """The stop of a scope, as its state uses it. Call all methods on the scope's loop."""

    phase: StopPhase
    receipt: StopReceipt | None
    asked_at_ticks: float

    @property
    def grace_left_s(self) -> float:
        """Remaining grace period, in seconds."""
        ...

    def begin(self, grace_s: float, abandon_after_s: float) -> None:
        """Set the deadlines and ask every member to stop."""
        ...

    def shorten(self, grace_s: float, abandon_after_s: float) -> None:
        """Shorten the remaining grace period and the time after it to these times; never lengthen them."""
        ...

    def member_ended(self, member: Handle[Any], /) -> None:
        """Record that a member has ended."""
        ...

    def take_over(self, receipt: StopReceipt) -> None:
        """Take over the receipt of a child scope that has ended."""
        ...

    def report_unproven(self, result: TreeResult) -> None:
        """Record a process tree that could not be proven dead."""
        ...

    def finish_if_empty(self) -> None:
        """End the stop if the scope is empty and its processes are known to be gone."""
        ...

    def give_up(self) -> None:
        """Abandon all members except tasks; abandon the tasks soon after."""
        ...

    def give_up_tasks(self) -> None:
        """Abandon all remaining members, tasks included, and end the stop."""
        ...
