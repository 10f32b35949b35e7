"""Check runs against the host's promises, count the results, and report incidents to the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.storage.port import InterruptRequest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from holdfast.errors import HoldfastError
    from holdfast.host.context import HostContext
    from holdfast.host.live_session import LiveRun
    from holdfast.host.run_reports import RunReports
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.settlements import Settlements
    from holdfast.host.tree import TaskTree
    from holdfast.protocol.events import Stored
    from holdfast.protocol.messages import Entry, Settlement
    from holdfast.protocol.stopping import Cause, StopReceipt
    from holdfast.runtime import Scope
    from holdfast.storage.port import Claim, Committed, InterruptResult

__all__ = ["RunAccounting"]

RECORDED: frozenset[str] = frozenset(("user", "stop", "message", "rollback", "shutdown", "lease_lost"))
"""Kinds of interrupt that `RunAccounting` does not record: they are already recorded, or should not be recorded."""


class RunAccounting:
    """Counts, records and publishes changes of runs, without making decisions about runs."""

    __slots__ = ("_context", "_directory", "_reports", "_settlements", "_tree")

    def __init__(
        self,
        context: HostContext,
        directory: SessionDirectory,
        settlements: Settlements,
        tree: TaskTree,
        reports: RunReports,
    ) -> None:
        self._context = context
        self._directory = directory
        self._settlements = settlements
        self._tree = tree
        self._reports = reports

    def committed(
        self, claim: Claim, status: str, committed: Committed, steered: Sequence[str] = (), *, sure: bool = True
    ) -> None:
        """Count and publish a committed run, and wake the tasks that wait for its messages.

        Parameters:
            status: the status that was committed; a run that was rolled back is counted as ``interrupted``.
            steered: ids of the messages that the run took after its claim.
            sure: whether `steered` is known to be complete.
        """
        incidents = self._context.incidents
        counts, kept, broken = incidents.counts, incidents.promises.kept, incidents.promises.broken
        settled = [settlement.message_id for settlement in committed.settled]
        if committed.settled and committed.settled[0].state == "superseded":
            counts["rolled_back"] += 1
            status = "interrupted"
        counts[f"runs_{status}"] += 1
        kept["P5"] += len(settled)
        expected = [message.message_id for message in claim.messages]
        expected += steered
        if settled != expected and (sure or settled[: len(expected)] != expected):
            broken["P5"] += 1
        if committed.waiting > self._context.settings.mailbox_limit:
            broken["P9"] += 1
        kept["P10"] += 1
        self._directory.publish(claim.lease.session, committed.events)
        self._settlements.settle(committed.settled)
        self._reports.ended(claim, status, committed)

    def raised(self, run: LiveRun, error: BaseException) -> None:
        """Note an error that a run raised."""
        self._reports.raised(run.run_id, error)

    def withdrawn(self, session: int, settled: Sequence[Settlement], events: Sequence[Stored]) -> None:
        """Publish the withdrawal of messages, and wake the tasks that wait for these messages."""
        self._directory.publish(session, events)
        self._context.incidents.promises.kept["P5"] += len(settled)
        self._settlements.settle(settled)

    def interrupted(self, run: LiveRun, cause: Cause) -> None:
        """Count the interrupt of a run, and record the interrupt in the store unless `RECORDED` excludes it."""
        context, incidents = self._context, self._context.incidents
        incidents.counts[f"interrupts_{cause.kind}"] += 1
        if cause.kind == "parent" and not context.scope.interrupt.triggered:
            incidents.promises.broken["P2"] += 1
        else:
            incidents.promises.kept["P2"] += 1
        if cause.kind in RECORDED and cause.origin != run.run_id:
            return
        actor, run_id = run.actor, run.run_id

        def recorded(done: asyncio.Future[InterruptResult]) -> None:
            error = done.exception()
            if error is None:
                actor.publish(done.result().events)
            else:
                context.store_failed(actor.key, run_id, "interrupt", error)

        done = context.store.interrupt(
            InterruptRequest(principal=actor.principal, key=actor.key, cause=cause, at=context.now(), run_id=run_id)
        )
        done.add_done_callback(recorded, context=context.variables)

    def stopped(self, run: LiveRun, receipt: StopReceipt) -> None:
        """Count a stopped run, and report its abandoned members and surviving processes."""
        incidents = self._context.incidents
        incidents.counts[f"stops_{receipt.outcome}"] += 1
        incidents.promises.kept["P3"] += 1
        stopped = receipt.stopped
        incidents.promises.kept["P1"] += stopped.tasks + stopped.threads + stopped.processes
        incidents.promises.broken["P3"] += len(receipt.survivors)
        if receipt.outcome == "gone" and receipt.abandoned:
            incidents.promises.broken["P1"] += 1
        self._tree.note_abandoned(run.actor, run.scope)
        key, run_id = run.actor.key, run.run_id
        for left in receipt.abandoned:
            incidents.counts["abandoned"] += 1
            text = (
                f"{left.kind} {left.name!r} did not stop and is quarantined; give it timeouts, or run it in a process"
            )
            self._context.report("quarantined", text, session=key, run_id=run_id, stack=left.stack)
        if receipt.survivors:
            pids = ", ".join(map(str, receipt.survivors))
            text = f"processes {pids} may still be running; check them with ps"
            self._context.report("survivors", text, session=key, run_id=run_id)

    def scope_closed(self, scope: Scope) -> None:
        """Check that the closed scope of a run has no members left."""
        incidents = self._context.incidents
        (incidents.promises.broken if scope.has_members else incidents.promises.kept)["P8"] += 1

    def transcript_made(self, entries: Sequence[Entry]) -> None:
        """Check that each tool call among a run's new entries has exactly one result."""
        calls = [entry.call_id for entry in entries if entry.role == "tool_call"]
        results = {entry.call_id for entry in entries if entry.role == "tool_result"}
        valid = len(calls) == len(results) and results.issuperset(calls)
        (self._context.incidents.promises.kept if valid else self._context.incidents.promises.broken)["P6"] += 1

    def lease_lost(self, run: LiveRun, error: HoldfastError) -> None:
        """Report that a run lost its session to another holder."""
        if self._context.store.cluster is None:  # else it is what happens to a host that was stalled
            self._context.incidents.promises.broken["P11"] += 1
        self._context.incidents.counts["runs_lost"] += 1
        self._context.report("lease_lost", error.message, session=run.actor.key, run_id=run.run_id)
