"""Why something stops, and what is proven gone: causes and receipts.

Plain dataclasses, so that `holdfast.runtime` needs nothing outside the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Abandoned", "Cause", "CauseKind", "Outcome", "StopReceipt", "Tally", "join_receipts"]

CauseKind = Literal[
    "user",
    "stop",
    "message",
    "rollback",
    "parent",
    "deadline",
    "budget",
    "disconnect",
    "shutdown",
    "lease_lost",
    "crash",
]

Outcome = Literal["gone", "quarantined", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a scope was interrupted.

    Parameters:
        kind: the class of the cause.
        reason: free text for people; may be empty.
        origin: the name of the scope that was interrupted; for kind ``parent``, of the one above that was.
        at: when, in seconds since the epoch.
        parent: for kind ``parent``, the cause that the parent scope had.
        message_id: the message that caused it, where one did.
    """

    kind: CauseKind
    reason: str = ""
    origin: str = ""
    at: float = 0.0
    parent: Cause | None = None
    message_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many of each kind of member ended."""

    tasks: int = 0
    threads: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A task or thread that did not end: it is quarantined, and this names it."""

    kind: Literal["task", "thread"]
    name: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReceipt:
    """The answer to a stop: what is proven gone, what had to be forced, what is left.

    Parameters:
        scope: the name of the stopped scope.
        cause: why it was stopped (the first cause wins).
        outcome: ``gone`` when nothing is left; ``quarantined`` when tasks or threads are left whose output no
            longer counts; ``unknown`` when a process could not be attributed or proven dead.
        stopped: members that ended, forced ones included.
        forced: names of the members that ended only after the grace was over.
        abandoned: tasks and threads that are left, with their stacks.
        survivors: pids that still ran when the time of the stop was over (expected to be empty).
        unattributed: where nobody could tell what became of a tree, a name and why, as ``sh (it was being started)``.
            A process that may be another scope's is not named: that there is one is said, once.
        elapsed_s: from the call of stop to this receipt, in seconds.
    """

    scope: str
    cause: Cause
    outcome: Outcome = "gone"
    stopped: Tally = field(default_factory=Tally)
    forced: tuple[str, ...] = ()
    abandoned: tuple[Abandoned, ...] = ()
    survivors: tuple[int, ...] = ()
    unattributed: tuple[str, ...] = ()
    elapsed_s: float = 0.0


def join_receipts(first: StopReceipt, *others: StopReceipt) -> StopReceipt:
    """One receipt for a stop of several scopes: names and cause of the first, the worst outcome, everything summed."""
    if not others:
        return first
    every = (first, *others)
    outcomes = {receipt.outcome for receipt in every}
    outcome: Outcome = "unknown" if "unknown" in outcomes else "quarantined" if "quarantined" in outcomes else "gone"
    return StopReceipt(
        scope=first.scope,
        cause=first.cause,
        outcome=outcome,
        stopped=Tally(
            tasks=sum(r.stopped.tasks for r in every),
            threads=sum(r.stopped.threads for r in every),
            processes=sum(r.stopped.processes for r in every),
        ),
        forced=tuple(name for r in every for name in r.forced),
        abandoned=tuple(left for r in every for left in r.abandoned),
        survivors=tuple(pid for r in every for pid in r.survivors),
        unattributed=tuple(name for r in every for name in r.unattributed),
        elapsed_s=max(r.elapsed_s for r in every),
    )
