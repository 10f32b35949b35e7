"""Recovery: resume or end the runs of hosts that have ended, at startup and, in a cluster, whenever one ends."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import StaleFence, StorageError, StoreCorrupt
from holdfast.host.run_history import RunHistory, read_run_history
from holdfast.host.run_reports import session_label
from holdfast.host.statistics import Recovery
from holdfast.host.store_retry import RETRY_S, retry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.run_parts import RunParts
    from holdfast.protocol.events import Stored
    from holdfast.storage.port import Appended, Claim

__all__ = ["RunRecovery"]

_log = logging.getLogger("holdfast.host")

READY_LIMIT = 100_000
"""Maximum number of waiting sessions queued at a time; the sessions that have waited longest are queued first."""
SHARED_READY_LIMIT = 1000
"""The same if other hosts use the store: they take their part, and `ClusterWatch` finds the rest."""
_NAMED = 5


@dataclass(slots=True)
class _Recovered:
    """Runs of hosts that have ended: what becomes of them.

    Parameters:
        starts: the runs to start, each with the events of its restart.
        ends: futures of the ends of the others.
        restarted, interrupted: id and session of each run to start, and of each run to end.
    """

    starts: list[tuple[RunHistory, Sequence[Stored]]] = field(default_factory=list)
    ends: list[asyncio.Future[None]] = field(default_factory=list)
    restarted: list[tuple[str, str]] = field(default_factory=list)
    interrupted: list[tuple[str, str]] = field(default_factory=list)


class RunRecovery:
    """Recovers runs and messages of hosts that have ended. Use it on the host's loop only."""

    __slots__ = ("_context", "_launcher", "_parts", "more_waiting", "pending")

    def __init__(self, parts: RunParts, launcher: RunLauncher) -> None:
        self._parts = parts
        self._context = parts.context
        self._launcher = launcher
        self.more_waiting = False
        """Whether the store may have sessions with waiting messages that were not queued because of `READY_LIMIT`."""
        self.pending: set[str] = set()
        """The runs that were taken over, until they are started or their end is submitted."""

    async def run(self) -> Recovery:
        """Recover the runs of an earlier host process, and queue every session that has waiting messages.

        Call this before the host accepts work.
        """
        context, queue = self._context, self._parts.queue
        claims = await retry(
            context, "rescue", lambda: context.store.rescue(at=context.now(), served=self._parts.served)
        )
        recovered = _Recovered()
        for claim in claims:
            await self._prepare(claim, recovered)
        served = self._parts.served
        limit = READY_LIMIT if served is None else SHARED_READY_LIMIT
        ready = await retry(context, "ready", lambda: context.store.ready(limit=limit))
        await self._start(recovered)
        self.more_waiting = len(ready) == READY_LIMIT
        ready = [session for session in ready if served is None or session.agent in served]
        for session in ready:  # including those due later: the clock may have been set since they were accepted
            queue.enqueue_when_due(session.session, session.principal, 0.0)
        return Recovery(
            restarted=tuple(run_id for run_id, _ in recovered.restarted),
            restarted_in=tuple(label for _, label in recovered.restarted),
            interrupted=tuple(run_id for run_id, _ in recovered.interrupted),
            interrupted_in=tuple(label for _, label in recovered.interrupted),
            waiting=len(ready),
            waiting_in=tuple(session_label(session.principal, session.key) for session in ready[:_NAMED]),
        )

    async def take_over(self) -> None:
        """Take over the runs of other hosts whose leases have ended. Raises `StorageError`."""
        context = self._context
        claims = await context.store.rescue(at=context.now(), served=self._parts.served)
        if claims:
            context.incidents.counts["runs_taken_over"] += len(claims)
            recovered = await self.recover(claims)
            _log.warning(
                "took over the runs of hosts that are gone: %d resumed, %d interrupted",
                len(recovered.restarted),
                len(recovered.interrupted),
            )

    async def recover(self, claims: Sequence[Claim]) -> _Recovered:
        """Start or end claimed runs that were begun before.

        A run whose history cannot be read or written now is left; `ClusterWatch` finds it again.
        """
        recovered = _Recovered()
        self.pending.update(claim.lease.run_id for claim in claims)
        try:
            for claim in claims:
                try:
                    await self._prepare(claim, recovered)
                except StorageError as error:
                    self._context.store_failed(claim.key, claim.lease.run_id, "recover", error)
            await self._start(recovered)
        finally:
            self.pending.difference_update(claim.lease.run_id for claim in claims)
        return recovered

    async def _prepare(self, claim: Claim, recovered: _Recovered) -> None:
        """Decide what becomes of a claimed run: it restarts, ends, or is left to a host with its files or a free slot.

        Raises `StorageError`.
        """
        context, queue = self._context, self._parts.queue
        run = claim.lease.run_id, session_label(claim.principal, claim.key)
        queue.admission.occupy(claim.principal)
        context.incidents.promises.kept["P11"] += 1
        try:
            history = await read_run_history(context, claim)
            obstacle = self._parts.restart_rules.obstacle(history)
            if obstacle is None and (self._parts.is_elsewhere(claim) or self._has_too_many()):
                await retry(
                    context, "park", lambda: context.store.park(claim.lease, at=context.now(), handed_over=True)
                )
                queue.release(claim.principal)
                return
            if obstacle is None:
                appended = await retry(context, "restart", functools.partial(self._restart, history))
                recovered.starts.append((history, appended.events))
                recovered.restarted.append(run)
                return
            if claim.questions and claim.interrupt is None:
                self._report_unanswered(claim, obstacle)
        except StoreCorrupt as error:
            history, obstacle = RunHistory(claim), error.message
        except StaleFence:  # another host has taken it over in the meantime
            queue.release(claim.principal)
            return
        except BaseException:
            queue.release(claim.principal)
            raise
        recovered.ends.append(self._end(history, obstacle))
        recovered.interrupted.append(run)

    def _has_too_many(self) -> bool:
        """Return whether other hosts may have room for a run that this host has counted as its own already."""
        context = self._context
        running = self._parts.queue.admission.statistics().running
        return context.store.cluster is not None and running > context.settings.max_runs

    async def _start(self, recovered: _Recovered) -> None:
        """Start all runs together, once the others have ended: whatever session they act on, its run is live or ended.

        Ends that take long are still retried when the runs start.
        """
        if recovered.ends:
            await asyncio.wait(recovered.ends, timeout=sum(RETRY_S))
        for history, written in recovered.starts:
            self._launcher.start(history.claim, published=written, history=history)

    async def enqueue_more(self) -> None:
        """Queue sessions with waiting messages that were left out at startup because of `READY_LIMIT`."""
        self.more_waiting = False
        try:
            ready = await self._context.store.ready(limit=READY_LIMIT)
        except StorageError as error:
            self._context.store_failed(None, None, "ready", error)
            return
        for session in ready:
            self._parts.queue.enqueue_when_due(session.session, session.principal, session.not_before)
        self.more_waiting = len(ready) == READY_LIMIT

    def _report_unanswered(self, claim: Claim, obstacle: str) -> None:
        self._context.report(
            "unanswered",
            f"run {claim.lease.run_id} was interrupted while it waited for an answer: {obstacle}; "
            "its question is closed. Runs of replayable agents resume",
            session=claim.key,
            run_id=claim.lease.run_id,
        )

    async def _restart(self, history: RunHistory) -> Appended:
        return await self._context.store.restart(
            history.claim.lease, at=self._context.now(), discard_from=history.journal().discard_from
        )

    def _end(self, history: RunHistory, obstacle: str) -> asyncio.Future[None]:
        rules = self._parts.restart_rules
        cause = rules.cause_of_end(history, obstacle)
        return self._launcher.finish_unstarted(
            history.claim, "interrupted", cause=cause, receipt=rules.receipt_of_end(history, cause), history=history
        )
