"""Causes of stops, and receipts that list what ended and what is left.

These are plain dataclasses, so that `holdfast.runtime` needs only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = [
    "LEASE_LOST",
    "NOT_ENDED",
    "Abandoned",
    "Cause",
    "CauseKind",
    "Outcome",
    "Proof",
    "StopCounts",
    "StopReceipt",
    "join_receipts",
]

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
Proof = Literal["observed", "lease"]

LEASE_LOST: Final = "the host could not renew its lease"
"""Reason with which a host stops its own runs and programs before another host may take them over."""
NOT_ENDED: Final = "the host that has it did not end it within"
"""Reason in a receipt if a host gave up the wait for the end of a run on another host; the seconds follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a scope was interrupted.

    Parameters:
        kind: kind of the cause.
        reason: free text for display; may be empty.
        origin: name of the interrupted scope; for kind ``parent``, the name of the interrupted ancestor.
        at: time of the interrupt, in seconds since the epoch.
        parent: cause of the parent scope, for kind ``parent``; otherwise None.
        message_id: id of the message that caused the interrupt; None if no message did.
    """

    kind: CauseKind
    reason: str = ""
    origin: str = ""
    at: float = 0.0
    parent: Cause | None = None
    message_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCounts:
    """Number of members of a scope that ended, by kind.

    Parameters:
        tasks: number of tasks.
        threads: number of threads.
        programs: number of programs that were started; 0 in receipts of older versions.
        processes: number of processes, the programs' descendants included.
    """

    tasks: int = 0
    threads: int = 0
    programs: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A task or thread that did not end and is quarantined."""

    kind: Literal["task", "thread"]
    name: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReceipt:
    """The result of a stop: which members have ended, which had to be forced, and which are left.

    Parameters:
        scope: name of the stopped scope.
        cause: why the scope was stopped; the first cause if there are several.
        outcome: ``gone`` if nothing is left; ``quarantined`` if tasks or threads are left, whose output is discarded;
            ``unknown`` if a process could not be attributed or proven dead.
        stopped: number of members that ended, including forced members.
        forced: names of the members that ended only after the grace period, except tasks that probably waited for one
            of these.
        force_reasons: why each member of `forced` had to be forced, in the same order, such as
            ``ignored SIGTERM for 5 s``; empty in receipts of older versions.
        abandoned: tasks and threads that are left, with their stacks.
        survivors: ids of processes that were still running when the stop timed out; normally empty.
        unattributed: process trees that could not be attributed or proven dead, each with a name and a reason, such as
            ``sh (it was being started)``. Processes that may belong to another scope share one entry without names.
        elapsed_s: time from the stop request to this receipt, in seconds.
        proof: ``observed`` if the host that had the members saw them end; ``lease`` if that host is gone, its lease has
            ended, and whatever is left of the run there has no effect on the session.
    """

    scope: str
    cause: Cause
    outcome: Outcome = "gone"
    stopped: StopCounts = field(default_factory=StopCounts)
    forced: tuple[str, ...] = ()
    force_reasons: tuple[str, ...] = ()
    abandoned: tuple[Abandoned, ...] = ()
    survivors: tuple[int, ...] = ()
    unattributed: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    proof: Proof = "observed"


def join_receipts(first: StopReceipt, *others: StopReceipt) -> StopReceipt:
    """Merge the receipts of several scopes into one.

    The result has the scope and cause of the first receipt, the worst outcome, the longest ``elapsed_s``, and the
    members of all receipts.
    """
    if not others:
        return first
    every = (first, *others)
    outcomes = {receipt.outcome for receipt in every}
    outcome: Outcome = "unknown" if "unknown" in outcomes else "quarantined" if "quarantined" in outcomes else "gone"
    return StopReceipt(
        scope=first.scope,
        cause=first.cause,
        outcome=outcome,
        stopped=StopCounts(
            tasks=sum(r.stopped.tasks for r in every),
            threads=sum(r.stopped.threads for r in every),
            programs=sum(r.stopped.programs for r in every),
            processes=sum(r.stopped.processes for r in every),
        ),
        forced=tuple(name for r in every for name in r.forced),
        force_reasons=tuple(reason for r in every for reason in r.force_reasons or ("",) * len(r.forced))
        if any(r.force_reasons for r in every)
        else (),
        abandoned=tuple(left for r in every for left in r.abandoned),
        survivors=tuple(pid for r in every for pid in r.survivors),
        unattributed=tuple(name for r in every for name in r.unattributed),
        elapsed_s=max(r.elapsed_s for r in every),
        proof="lease" if any(r.proof == "lease" for r in every) else "observed",
    )
