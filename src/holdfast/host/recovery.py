"""Recovery at startup: resume or end the runs that a crash interrupted, then run queued messages."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from holdfast.errors import StorageError, StoreCorrupt, UnknownAgent
from holdfast.host.run_history import RunHistory, read_run_history
from holdfast.host.run_reports import session_label
from holdfast.host.statistics import Recovery
from holdfast.host.store_retry import RETRY_S, retry
from holdfast.protocol.stopping import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.run_parts import RunParts
    from holdfast.protocol.events import Stored
    from holdfast.storage.port import Appended, Claim

__all__ = ["StartupRecovery"]

READY_LIMIT = 100_000
"""Maximum number of waiting sessions queued at a time; the sessions that have waited longest are queued first."""
_NAMED = 5


class StartupRecovery:
    """Recovers the runs and messages of an earlier host process, before this host accepts work."""

    __slots__ = ("_context", "_launcher", "_parts", "more_waiting")

    def __init__(self, parts: RunParts, launcher: RunLauncher) -> None:
        self._parts = parts
        self._context = parts.context
        self._launcher = launcher
        self.more_waiting = False
        """Whether the store may have sessions with waiting messages that were not queued because of `READY_LIMIT`."""

    async def run(self) -> Recovery:
        """Resume or end every run of an earlier host process, and queue every session that has waiting messages."""
        context, queue = self._context, self._parts.queue
        restarted: list[tuple[str, str]] = []
        interrupted: list[tuple[str, str]] = []
        starts: list[tuple[RunHistory, Sequence[Stored]]] = []
        ends: list[asyncio.Future[None]] = []
        for claim in await retry(context, "rescue", lambda: context.store.rescue(at=context.now())):
            lease, label = claim.lease, session_label(claim.principal, claim.key)
            queue.admission.occupy(claim.principal)
            context.incidents.promises.kept["P11"] += 1
            try:
                history = await read_run_history(context, claim)
            except StoreCorrupt as error:
                ends.append(self._end(RunHistory(claim), error.message))
                interrupted.append((lease.run_id, label))
                continue
            obstacle = self._obstacle(history)
            if obstacle is None:
                appended = await retry(context, "restart", functools.partial(self._restart, history))
                starts.append((history, appended.events))
                restarted.append((lease.run_id, label))
            else:
                if claim.questions and claim.interrupt is None:
                    self._report_unanswered(claim, obstacle)
                ends.append(self._end(history, obstacle))
                interrupted.append((lease.run_id, label))
        ready = await retry(context, "ready", lambda: context.store.ready(limit=READY_LIMIT))
        if ends:
            await asyncio.wait(ends, timeout=sum(RETRY_S))  # later ones are still retried
        # Start all runs together, once the others have ended: whatever session they act on, its run is live or ended.
        for history, written in starts:
            self._launcher.start(history.claim, published=written, history=history)
        for session in ready:  # including those due later: the clock may have been set since they were accepted
            queue.enqueue_when_due(session.session, session.principal, 0.0)
        self.more_waiting = len(ready) == READY_LIMIT
        return Recovery(
            restarted=tuple(run_id for run_id, _ in restarted),
            restarted_in=tuple(label for _, label in restarted),
            interrupted=tuple(run_id for run_id, _ in interrupted),
            interrupted_in=tuple(label for _, label in interrupted),
            waiting=len(ready),
            waiting_in=tuple(session_label(session.principal, session.key) for session in ready[:_NAMED]),
        )

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

    def _obstacle(self, history: RunHistory) -> str | None:
        """Return the reason why the run cannot resume; return None if the run can resume."""
        claim, journal = history.claim, history.journal()
        if claim.interrupt is not None:
            return "it was being interrupted"
        try:
            agent = self._parts.agents.find(claim.agent)
        except UnknownAgent as error:
            return error.message
        if not agent.replayable:
            return "its agent is not declared replayable: @agent(replayable=True) or Agent(…, replayable=True)"
        if not history.was_started_by(agent):
            return "its agent " + (
                "no longer has a model" if agent.model is None else "has a model, but was a function"
            )
        if not journal.replayable:
            return (
                "a call that is not idempotent started and has no result: declare it with @tool(idempotent=True) or "
                "run.call(…, idempotent=True)"
            )
        limit = self._context.settings.restart_limit
        if journal.restarts_in_vain >= limit:
            self._context.report(
                "restart_loop",
                f"run {claim.lease.run_id} was given up after {limit} restarts; check what it does before each crash",
                session=claim.key,
                run_id=claim.lease.run_id,
            )
            return f"it was given up after {limit} restarts"
        return None

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
        cause = history.claim.interrupt or Cause(
            kind="crash",
            reason=f"the host stopped during the run; {obstacle}",
            origin=self._context.node_id,
            at=self._context.now(),
        )
        return self._launcher.finish_unstarted(history.claim, "interrupted", cause=cause, history=history)
