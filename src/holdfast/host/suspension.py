"""Resume unloaded runs when their questions are answered, and end unloaded runs when they are interrupted.

Invariants
- An unloaded run must be claimed before it can resume. For every such claim, this module resumes or ends the run,
  whichever part of the host requested the claim.
- From the claim until the run is live or has ended, `_resuming` contains the run. An interrupt in that time is recorded
  there and ends the run. An earlier interrupt claims the run itself and thereby ends it. A later interrupt reaches the
  live run.
- A claim is handled in its callback, before any later result of the store. If the store returns a claim twice, the
  second callback therefore finds that the run is live or being resumed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from holdfast.errors import HoldfastError, NotSupported, StaleFence, StorageError, StoreCorrupt
from holdfast.host.run_history import RunHistory, read_run_history
from holdfast.host.store_retry import retry, retry_until_drain
from holdfast.protocol.events import RunResumed, decode_event
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.storage.port import Answered, Claim, NotReady

if TYPE_CHECKING:
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.run_parts import RunParts
    from holdfast.storage.port import Appended

__all__ = ["Suspension"]


class _Resuming:
    """State of an unloaded run from its claim until the run is live or has ended."""

    __slots__ = ("cause", "ended")

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self.cause: Cause | None = None
        self.ended = ended


class Suspension:
    """Resumes and ends unloaded runs. Use it on the host's loop only."""

    __slots__ = ("_context", "_launcher", "_parts", "_resuming")

    def __init__(self, parts: RunParts, launcher: RunLauncher) -> None:
        self._parts = parts
        self._context = parts.context
        self._launcher = launcher
        self._resuming: dict[str, _Resuming] = {}

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def on_answered(self, principal: str, key: str, question_id: str, done: asyncio.Future[Answered]) -> None:
        """Handle a recorded answer: pass it to a live run, or queue an unloaded run that has no open questions left."""
        context, error = self._context, done.exception()
        if error is not None:
            if isinstance(error, StorageError) and not context.lifecycle.draining:
                context.start_task(self._look_after(principal, key, question_id), "look after an answer")
            return
        result = done.result()
        self._parts.directory.publish(result.session, result.events)
        if result.events:
            context.incidents.counts["questions_expired"] += result.answer.decision == "expired"
            context.incidents.counts["resumed"] += not result.waiting
        run = self._launcher.live.get(result.run_id)
        if run is not None:
            run.take_answer(result.answer)
        elif result.parked and not result.waiting:
            self._parts.queue.enqueue_when_due(result.session, principal, 0.0)

    async def _look_after(self, principal: str, key: str, question_id: str) -> None:
        """Handle an answer that the store failed to confirm: if the answer is durable, pass it to the run."""
        context, live = self._context, self._launcher.live
        try:
            found = await retry(context, "read", lambda: context.store.find_session(principal, key))
            if found is None or found[1].run_id is None:
                return
            session, run_id = found[0], found[1].run_id
            stored = await retry(context, "read", lambda: context.store.run_events(session, run_id))
            run = live.get(run_id)
            if run is None:
                self._parts.queue.enqueue_when_due(session, principal, 0.0)
                return
            for event in (decode_event(row) for row in stored if row.kind == "run.resumed"):
                if isinstance(event, RunResumed) and event.answer.question_id == question_id:
                    run.take_answer(event.answer)
            await self._parts.directory.catch_up(run.actor)
        except StorageError:
            pass  # the answer was reported as failed, and its sender retries it

    # ── resuming ─────────────────────────────────────────────────────────────────────────────────────────────────

    def resume(self, claim: Claim) -> None:
        """Resume or end an unloaded run that was claimed and for which a slot is reserved.

        A resume and an interrupt may claim the run at the same time and get the same claim. The claim that arrives
        second is ignored, and its slot is released.
        """
        if claim.lease.run_id in self._resuming or claim.lease.run_id in self._launcher.live:
            self._parts.queue.release(claim.principal)
            return
        resuming = self._resuming[claim.lease.run_id] = _Resuming(self._context.loop.create_future())
        resuming.cause = claim.interrupt
        self._context.start_task(self._resume(claim, resuming), "resume")

    def is_resuming(self, run_id: str) -> bool:
        """Return whether the run was claimed, and is neither live nor ended yet."""
        return run_id in self._resuming

    async def _resume(self, claim: Claim, resuming: _Resuming) -> None:
        context, run_id = self._context, claim.lease.run_id
        history = RunHistory(claim)
        obstacle: HoldfastError | None = None
        receipt: StopReceipt | None = None
        parked = False

        async def prepare() -> None:
            nonlocal history, receipt, parked
            history = await read_run_history(context, claim)
            # A repeated claim lacks the mark `handed_over`; a run that waited for answers is replayable.
            if claim.handed_over or not history.journal().replayable:
                lost = self._parts.restart_rules.obstacle(history)
                if lost is not None:
                    resuming.cause = self._parts.restart_rules.cause_of_end(history, lost)
                    receipt = self._parts.restart_rules.receipt_of_end(history, resuming.cause)
            else:
                self._check(history)
            if resuming.cause is not None:
                return
            if self._parts.is_elsewhere(claim):
                await context.store.park(claim.lease, at=context.now(), handed_over=True)
                parked = True
            else:
                await self._restart(history)

        try:
            await retry_until_drain(context, prepare)
        except StorageError as error:
            if not isinstance(error, (StaleFence, StoreCorrupt)):  # the next start finds the run and resumes it
                self._parts.queue.release(claim.principal)
                self._done(run_id, resuming)
                return
            obstacle = error
        except HoldfastError as error:
            obstacle = error
        # No await from here on: an interrupt reaches the live run, or was noted above.
        if parked:
            self._parts.queue.release(claim.principal)
            if resuming.cause is not None:  # it was interrupted after it was parked again
                self._parts.queue.enqueue_when_due(claim.lease.session, claim.principal, 0.0)
        elif obstacle is None and resuming.cause is None:
            self._launcher.start(claim, history=history)
        else:
            status: Literal["failed", "interrupted"] = "failed" if resuming.cause is None else "interrupted"
            await self._launcher.finish_unstarted(
                claim, status, cause=resuming.cause, error=obstacle, receipt=receipt, history=history
            )
        self._done(run_id, resuming)

    def _done(self, run_id: str, resuming: _Resuming) -> None:
        del self._resuming[run_id]
        resuming.ended.set_result(None)

    def _check(self, history: RunHistory) -> None:
        """Raise `UnknownAgent` or `NotSupported` if this host cannot resume the run."""
        agent = self._parts.agents.find(history.claim.agent)
        if not agent.replayable:
            raise NotSupported(
                f"the run waited for an answer, and its agent {agent.name!r} is no longer declared replayable",
                hint="send the request again",
            )
        if not history.was_started_by(agent):
            raise NotSupported(
                f"the run waited for an answer, and its agent {agent.name!r} "
                + ("no longer has a model" if agent.model is None else "has a model now, but was a function then"),
                hint="send the request again",
            )

    async def _restart(self, history: RunHistory) -> None:
        """If the run will repeat output, record the restart, so that readers drop the earlier output."""
        context, claim = self._context, history.claim
        if not (history.repeats_output or claim.handed_over):
            return
        discard_from = history.journal().discard_from

        def publish(done: asyncio.Future[Appended]) -> None:
            if done.exception() is None:
                self._parts.directory.publish(claim.lease.session, done.result().events)

        def restart() -> asyncio.Future[Appended]:
            done = context.store.restart(claim.lease, at=context.now(), discard_from=discard_from)
            done.add_done_callback(publish, context=context.variables)
            return done

        await retry(context, "restart", restart)

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self, session: int, principal: str, run_id: str, cause: Cause) -> asyncio.Task[StopReceipt | None]:
        """End a run that is not live, after the store has recorded its interrupt.

        Return a task whose result is the stop receipt, or None if the run is not unloaded: another host has it, or this
        host is taking it over. The task finishes once the run has ended and its slot is free, or once this is known.
        """
        resuming = self._resuming.get(run_id)
        if resuming is not None and resuming.cause is None:
            resuming.cause = cause
        claiming = self._claim(session, principal, run_id) if resuming is None else None
        return self._context.start_task(self._stop(session, principal, run_id, cause, claiming), "stop an unloaded run")

    def _claim(self, session: int, principal: str, run_id: str) -> asyncio.Future[Claim | NotReady]:
        def claimed(done: asyncio.Future[Claim | NotReady]) -> None:
            if done.exception() is None and isinstance(claim := done.result(), Claim) and claim.resumed:
                self._parts.queue.admission.occupy(principal)
                self.resume(claim)  # any other claim is a run of this host that was never unloaded

        done = self._context.store.claim(session, run_id=run_id, at=self._context.now())
        done.add_done_callback(claimed, context=self._context.variables)
        return done

    async def _stop(
        self,
        session: int,
        principal: str,
        run_id: str,
        cause: Cause,
        claiming: asyncio.Future[Claim | NotReady] | None,
    ) -> StopReceipt | None:
        if claiming is not None:
            tries = iter((claiming,))  # the first was made by the caller

            async def claimed() -> None:
                await (next(tries, None) or self._claim(session, principal, run_id))

            def report(error: StorageError) -> None:
                self._context.store_failed(None, run_id, "claim", error)

            await retry_until_drain(self._context, claimed, report)  # the interrupt is recorded: it outlives a drain
        resuming = self._resuming.get(run_id)
        if resuming is not None:
            await asyncio.shield(resuming.ended)
        elif run_id in self._launcher.live:
            return await self._launcher.live[run_id].stop(cause)
        elif self._context.store.cluster is not None:
            return None
        return StopReceipt(scope=run_id, cause=cause)
