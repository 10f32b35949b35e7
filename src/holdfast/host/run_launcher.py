"""Start claimed runs, end claimed runs that cannot start, and pass on the slots of runs that have ended.

All code here runs on the host's loop, in callbacks of the store's futures, so that no await separates a durable
decision from the resulting action.

A claim is good only as long as the lease of the epoch in which it was made: after that, another host may have taken the
run over, and ended it. So a run does not start if the reply of its claim comes later. If the run is still this host's
own, `ClusterWatch` finds it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

from holdfast.clock import system_clock
from holdfast.errors import HoldfastError, StaleFence
from holdfast.host.run_execution import RunExecution
from holdfast.host.run_history import RunHistory
from holdfast.host.store_retry import retry_delay_s
from holdfast.logs import one_line
from holdfast.storage.port import Claim, Committed, RunCommit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from holdfast.host.live_session import LiveRun
    from holdfast.host.run_parts import RunParts
    from holdfast.protocol.events import Stored
    from holdfast.protocol.stopping import Cause, StopReceipt

__all__ = ["RunLauncher"]


class RunLauncher:
    """Starts claimed runs, and holds the runs that are in this host's memory."""

    __slots__ = ("_context", "_parts", "ending", "live", "on_restarted")

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._context = parts.context
        self.live: dict[str, RunExecution] = {}
        self.ending: set[str] = set()
        """The runs that end without having started here, until their end is stored."""
        self.on_restarted: Callable[[RunExecution], object] | None = None
        """Called with each run that this host starts anew after another start; None if only this host uses the
        store."""

    def start(
        self,
        claim: Claim,
        *,
        published: Sequence[Stored] = (),
        history: RunHistory | None = None,
        steering: bool = False,
    ) -> None:
        """Start a claimed run, for which a slot is reserved; release the slot if the lease of the claim has ended.

        Parameters:
            published: events to publish: all events of the transaction that claimed the run, or the events of its
                restart; if empty, the claim's events are published.
            history: the history of earlier attempts; None for a first attempt.
            steering: whether messages may have been steered to the run before this host knew that the run was active.
        """
        context, parts, incidents = self._context, self._parts, self._context.incidents
        events = published or claim.events
        actor = parts.directory.load(
            session=claim.lease.session,
            number=claim.number,
            principal=claim.principal,
            key=claim.key,
            seq=events[0].seq - 1 if events else claim.started_seq,
        )
        actor.publish(events)
        if self._is_late(claim):
            incidents.counts["claims_late"] += 1
            parts.queue.release(claim.principal)
            return
        incidents.promises.kept["P4"] += 1
        if actor.active is not None:
            if context.store.cluster is None:  # else another host may have ended it, unnoticed here until now
                incidents.promises.broken["P4"] += 1
            actor.active.supersede()
        try:
            agent = parts.agents.find(claim.agent)
        except HoldfastError as error:
            self.finish_unstarted(claim, "failed", error=error, history=history)
            return
        run = RunExecution(parts, actor, claim, agent, history, steering=steering or history is not None)
        actor.active = run
        self.live[run.run_id] = run
        incidents.counts["runs_started"] += 1
        run.start()
        if claim.interrupt is not None:
            run.request_stop(claim.interrupt)
        parts.observer.on_started(run)
        if history is not None and self.on_restarted is not None:
            self.on_restarted(run)

    def _is_late(self, claim: Claim) -> bool:
        store = self._context.store
        if store.cluster is None:
            return False
        return claim.epoch != store.cluster.epoch or store.health().lease_ends_at <= system_clock.monotonic()

    def finish_unstarted(
        self,
        claim: Claim,
        status: Literal["failed", "interrupted"],
        *,
        cause: Cause | None = None,
        error: HoldfastError | None = None,
        receipt: StopReceipt | None = None,
        history: RunHistory | None = None,
    ) -> asyncio.Future[None]:
        """End a claimed run without starting its agent. A slot is reserved for the run.

        Call this if the run cannot resume, or if this host does not have the run's agent. The future resolves once the
        run has ended, or once a commit fails while the host drains; the next start then recovers the run.
        """
        context, parts = self._context, self._parts
        history = history or RunHistory(claim)
        transcript = history.transcript()
        not_undone = history.journal().begun_names
        entries = transcript.entries(status=status, cause=cause)
        parts.accounting.transcript_made(entries)
        ended: asyncio.Future[None] = context.loop.create_future()
        self.ending.add(claim.lease.run_id)

        def commit(tries: int) -> None:
            done = context.store.commit_run(
                RunCommit(
                    lease=claim.lease,
                    status=status,
                    at=context.now(),
                    text=transcript.text,
                    cause=cause,
                    error=None if error is None else one_line(error),
                    receipt=receipt,
                    entries=entries,
                    next_run_id=parts.queue.next_run_id(),
                    not_undone=not_undone,
                    served=parts.served,
                )
            )
            done.add_done_callback(functools.partial(committed, tries), context=context.variables)

        def committed(tries: int, done: asyncio.Future[Committed]) -> None:
            problem = done.exception()
            if problem is not None and not isinstance(problem, StaleFence):
                context.store_failed(claim.key, claim.lease.run_id, "commit", problem)
                if not context.lifecycle.draining:
                    context.loop.call_later(retry_delay_s(tries), commit, tries + 1, context=context.variables)
                    return
            self.ending.discard(claim.lease.run_id)
            if problem is None:
                parts.accounting.committed(claim, status, done.result())
                self._pass_on(claim, done.result())
            else:
                parts.queue.release(claim.principal)
            if not ended.done():
                ended.set_result(None)

        commit(0)
        return ended

    def on_ended(self, run: LiveRun, claim: Claim, committed: Committed | None) -> None:
        """Remove an ended run from memory, and pass on the run's slot."""
        if run.actor.active is run:
            run.actor.active = None
            run.actor.idle_since = self._context.loop.time()
        if self.live.get(run.run_id) is run:  # else this host has taken over the same run since
            del self.live[run.run_id]
        if committed is None:
            self._parts.queue.release(claim.principal)
        else:
            self._pass_on(claim, committed)

    def _pass_on(self, claim: Claim, committed: Committed) -> None:
        if committed.claim is not None:
            self.start(committed.claim)
            return
        queue = self._parts.queue
        if committed.waiting:
            queue.enqueue_when_due(claim.lease.session, claim.principal, committed.not_before)
        queue.release(claim.principal)
