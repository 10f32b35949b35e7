"""Suspended runs out of memory: resume them when they are answered, end them when they are interrupted.

Invariants
- Only a claim takes up a run again. Every claim that the store returns is resumed or ended here, for any claimant.
- From the claim until the run is live or has ended, it is in `_taken_up`: an interrupt in that time is recorded there
  and ends it. Before that, the interrupt's own claim ends the run; after it, the live run gets the interrupt.
- A claim is reported in its callback, before any later result of the store. A claim that is returned twice is therefore
  known to belong to a run that is being resumed or is live.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from holdfast.errors import HoldfastError, NotSupported, StaleFence, StorageError, StoreCorrupt
from holdfast.host.past import Past, read_past
from holdfast.host.patience import patiently, retry_after_s
from holdfast.protocol.events import RunResumed, decode_event
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.storage.port import Answered, Claim, NotReady

if TYPE_CHECKING:
    from holdfast.host.active import ActiveRun
    from holdfast.host.host import Host
    from holdfast.storage.port import Appended

__all__ = ["ParkedRuns"]


class _TakenUp:
    """A run between its claim and its start or end."""

    __slots__ = ("cause", "ended")

    def __init__(self, ended: asyncio.Future[None]) -> None:
        self.cause: Cause | None = None
        self.ended = ended


class ParkedRuns:
    """Resumes and ends unloaded runs. Made by `Dispatch`; on the host's loop only."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._taken_up: dict[str, _TakenUp] = {}

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def answered(self, principal: str, key: str, question_id: str, done: asyncio.Future[Answered]) -> None:
        """Handle an answered question: pass it to the live run, or queue the session once no question is open."""
        host, error = self._host, done.exception()
        if error is not None:
            if isinstance(error, StorageError) and not host.draining:
                host.start_task(self._look_after(principal, key, question_id), "look after an answer")
            return
        result = done.result()
        actor = host.actors.get(result.session)
        if actor is not None:
            actor.publish(result.events)
        if result.events:
            host.incidents.counts["questions_expired"] += result.answer.decision == "expired"
            host.incidents.counts["resumed"] += not result.waiting
        run = host.live.get(result.run_id)
        if run is not None:
            run.surroundings.take_answer(result.answer)
        elif result.parked and not result.waiting:
            host.dispatch.later(result.session, principal, 0.0)

    async def _look_after(self, principal: str, key: str, question_id: str) -> None:
        """Handle a failed answer that the store may have anyway: pass it to the run."""
        host = self._host
        try:
            found = await patiently(host, "read", lambda: host.store.find_session(principal, key))
            if found is None or found[1].run_id is None:
                return
            session, run_id = found[0], found[1].run_id
            stored = await patiently(host, "read", lambda: host.store.run_events(session, run_id))
            run = host.live.get(run_id)
            if run is None:
                host.dispatch.later(session, principal, 0.0)
                return
            for event in (decode_event(row) for row in stored if row.kind == "run.resumed"):
                if isinstance(event, RunResumed) and event.answer.question_id == question_id:
                    run.surroundings.take_answer(event.answer)
            await host.catch_up(run.actor)
        except StorageError:
            pass  # the answer was reported as failed, and its sender retries it

    def left(self, run: ActiveRun, *, ready: bool) -> None:
        """Handle an unloaded run; queue its session if `ready`: all its questions are answered."""
        if ready:
            self._host.dispatch.later(run.actor.session, run.actor.principal, 0.0)

    # ── resuming ─────────────────────────────────────────────────────────────────────────────────────────────────

    def take_up(self, claim: Claim) -> None:
        """Resume or end a claimed unloaded run. Its slot is reserved.

        A resume and an interrupt may claim it at the same time and get the same claim: the first counts.
        """
        if claim.lease.run_id in self._taken_up or claim.lease.run_id in self._host.live:
            self._host.dispatch.release(claim.principal)
            return
        taken = self._taken_up[claim.lease.run_id] = _TakenUp(self._host.loop.create_future())
        taken.cause = claim.interrupt
        self._host.start_task(self._bring_on(claim, taken), "take up")

    async def _bring_on(self, claim: Claim, taken: _TakenUp) -> None:
        host, run_id = self._host, claim.lease.run_id
        past = Past(claim)
        obstacle: HoldfastError | None = None
        tries = 0
        while True:
            try:
                past = await read_past(host, claim)
                self._check(past)
                if taken.cause is None:
                    await self._restart(past)
                break
            except StorageError as error:
                if isinstance(error, (StaleFence, StoreCorrupt)):
                    obstacle = error
                    break
                if host.draining:  # the next start finds the run and resumes it
                    host.dispatch.release(claim.principal)
                    self._done(run_id, taken)
                    return
                await asyncio.sleep(retry_after_s(tries))
                tries += 1
            except HoldfastError as error:
                obstacle = error
                break
        # No await from here on: an interrupt reaches the live run, or was noted above.
        if obstacle is None and taken.cause is None:
            host.dispatch.start(claim, past=past)
        else:
            status: Literal["failed", "interrupted"] = "failed" if taken.cause is None else "interrupted"
            await host.dispatch.finish_unstarted(claim, status, cause=taken.cause, error=obstacle, past=past)
        self._done(run_id, taken)

    def _done(self, run_id: str, taken: _TakenUp) -> None:
        del self._taken_up[run_id]
        taken.ended.set_result(None)

    def _check(self, past: Past) -> None:
        """Raise `UnknownAgent` or `NotSupported` if this host is unable to resume the run."""
        agent = self._host.find_agent(past.claim.agent)
        if not agent.replayable:
            raise NotSupported(
                f"the run waited for an answer, and its agent {agent.name!r} is no longer declared replayable",
                hint="send the request again",
            )
        if not past.was_begun_by(agent):
            raise NotSupported(
                f"the run waited for an answer, and its agent {agent.name!r} "
                + ("no longer has a model" if agent.model is None else "has a model now, but was a function then"),
                hint="send the request again",
            )

    async def _restart(self, past: Past) -> None:
        """Have readers drop the output that the run repeats."""
        host, claim = self._host, past.claim
        if not past.says_again:
            return
        discard_from = past.journal().discard_from

        def shown(done: asyncio.Future[Appended]) -> None:
            actor = host.actors.get(claim.lease.session)
            if done.exception() is None and actor is not None:
                actor.publish(done.result().events)

        def restart() -> asyncio.Future[Appended]:
            done = host.store.restart(claim.lease, at=host.now(), discard_from=discard_from)
            done.add_done_callback(shown, context=host.context)
            return done

        await patiently(host, "restart", restart)

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stop(self, session: int, principal: str, run_id: str, cause: Cause) -> asyncio.Task[StopReceipt]:
        """End a run that is not live and whose interrupt is recorded. The task returns once its slot is free."""
        taken = self._taken_up.get(run_id)
        if taken is not None and taken.cause is None:
            taken.cause = cause
        claiming = self._claim(session, principal, run_id) if taken is None else None
        return self._host.start_task(self._stop(session, principal, run_id, cause, claiming), "stop parked")

    def _claim(self, session: int, principal: str, run_id: str) -> asyncio.Future[Claim | NotReady]:
        host = self._host

        def claimed(done: asyncio.Future[Claim | NotReady]) -> None:
            if done.exception() is None and isinstance(claim := done.result(), Claim) and claim.resumed:
                host.dispatch.admission.occupy(principal)
                self.take_up(claim)  # any other claim is a run of this host that was never unloaded

        done = host.store.claim(session, run_id=run_id, at=host.now())
        done.add_done_callback(claimed, context=host.context)
        return done

    async def _stop(
        self,
        session: int,
        principal: str,
        run_id: str,
        cause: Cause,
        claiming: asyncio.Future[Claim | NotReady] | None,
    ) -> StopReceipt:
        host = self._host
        tries = 0
        while claiming is not None:
            try:
                await claiming
                claiming = None
            except StorageError as error:
                host.store_failed(None, run_id, "claim", error)
                if host.draining:
                    raise  # the interrupt is recorded: the next start ends the run
                await asyncio.sleep(retry_after_s(tries))
                tries += 1
                claiming = self._claim(session, principal, run_id)
        taken = self._taken_up.get(run_id)
        if taken is not None:
            await asyncio.shield(taken.ended)
        elif run_id in host.live:
            return await host.live[run_id].stop(cause)
        return StopReceipt(scope=run_id, cause=cause)
