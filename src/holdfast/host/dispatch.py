"""Start runs for claims and queue sessions that wait for a slot.

All on the host's loop, in callbacks of the store's futures: no await separates a durable decision from its action.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from holdfast import ids
from holdfast.errors import HoldfastError, LimitExceeded, ScheduleChanged, StaleFence, StorageError
from holdfast.host.active import ActiveRun
from holdfast.host.admission import Admission
from holdfast.host.parked import ParkedRuns
from holdfast.host.past import Past
from holdfast.host.patience import RETRY_S, retry_after_s
from holdfast.logs import one_line
from holdfast.protocol.events import Stored, format_cursor
from holdfast.protocol.messages import Receipt
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Claim, Committed, Fire, Fired, NotReady, RunCommit, Send, SendResult

if TYPE_CHECKING:
    from holdfast.host.host import Host
    from holdfast.protocol.messages import SessionView

__all__ = ["Dispatch", "receipt_of"]

LOOK_EVERY_S = 60.0
"""Longest wait before a session that is due later is checked again: the clock may be set in the meantime."""


def receipt_of(key: str, result: SendResult) -> Receipt:
    """Return the receipt for the sender of an accepted message."""
    return Receipt(
        session=key,
        seq=result.seq,
        message_id=result.message_id,
        disposition=result.disposition,
        cursor=format_cursor(result.seq - 1, result.number),
        run_id=result.run_id,
    )


class Dispatch:
    """Starts and follows runs. Made by the `Host`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.parked = ParkedRuns(host)
        self.admission = Admission(max_runs=host.settings.max_runs, principal_runs=host.settings.principal_runs)
        self._due: list[tuple[float, int, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._unused: asyncio.Future[None] | None = None

    # ── decisions of the store ───────────────────────────────────────────────────────────────────────────────────

    def sent(self, request: Send, done: asyncio.Future[SendResult]) -> None:
        """Handle a completed send: publish its events, and start or stop runs as decided."""
        host = self._host
        principal, reserved = request.principal, request.run_id is not None
        error = done.exception()
        if isinstance(error, StorageError):
            host.start_task(self._look_after(request), "look after a send")
            return
        if error is not None:
            if reserved:
                self.release(principal)
            if isinstance(error, LimitExceeded):
                host.incidents.kept["P9"] += 1
            return
        result = done.result()
        host.awaited.made(principal, request.key)
        host.incidents.counts[f"sends_{result.disposition}"] += 1
        if result.claim is None:
            actor = host.actors.get(result.session)
            if actor is not None:
                actor.publish(result.events)
            if reserved:
                self.release(principal)
        if result.claim is not None:
            self.start(result.claim, published=result.events)
        elif result.interrupt is not None:
            self._stop(result.session, result.interrupt, request)
        elif result.disposition == "steering":
            run = host.live.get(result.run_id or "")
            if run is not None:
                run.surroundings.steering = True
        elif result.run_id is None and result.disposition != "duplicate":
            self.later(result.session, principal, result.not_before)

    def fired(self, request: Fire, done: asyncio.Future[Fired]) -> None:
        """Handle a completed check of a schedule; its message is treated like any other."""
        sent: asyncio.Future[SendResult] = self._host.loop.create_future()
        error = done.exception()
        result = None if error is not None else done.result().sent
        if result is not None:
            sent.set_result(result)
        else:
            sent.set_exception(error or ScheduleChanged("nothing was sent"))
        self.sent(request.send, sent)

    def _stop(self, session: int, run_id: str, request: Send) -> None:
        """Stop the run whose interrupt by this message is recorded."""
        rollback = request.policy == "rollback"
        cause = Cause(
            kind="rollback" if rollback else "message",
            reason="replaced by a newer message" if rollback else "a newer message arrived",
            origin=request.key,
            at=request.at,
            message_id=request.message_id,
        )
        run = self._host.live.get(run_id)
        if run is not None:
            run.request_stop(cause)
        else:
            self.parked.stop(session, request.principal, run_id, cause)

    async def _look_after(self, request: Send) -> None:
        """Handle a failed send that the store may have made anyway: carry out its decision, and return its slot."""
        host = self._host
        found: tuple[int, SessionView] | None = None
        for delay_s in RETRY_S:
            try:
                found = await host.store.find_session(request.principal, request.key)
                break
            except StorageError:
                if host.draining:
                    break
                await asyncio.sleep(delay_s)
        number, view = found or (0, None)
        if found is not None:
            host.awaited.made(request.principal, request.key)
        if view is not None and view.run_id is not None and view.run_id == request.run_id:
            self._claim(request.principal, number, view.run_id, tries=1)
            return
        if request.run_id is not None:
            self.release(request.principal)
        if view is None:
            return
        run = host.live.get(view.run_id or "")
        if view.run_id is not None and view.state == "stopping":
            self._stop(number, view.run_id, request)
        elif run is not None:
            run.surroundings.steering = True  # perhaps
        elif view.run_id is None and view.waiting:
            self.later(number, request.principal, 0.0)

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────

    def start(
        self,
        claim: Claim,
        *,
        published: Sequence[Stored] = (),
        past: Past | None = None,
        steering: bool = False,
    ) -> None:
        """Start a claimed run; its slot is reserved.

        Parameters:
            published: events of the same transaction that precede the claim's own.
            past: history of earlier attempts.
            steering: whether a message may have been steered to the run before it was known to be active.
        """
        host = self._host
        events = published or claim.events
        actor = host.actor(
            session=claim.lease.session,
            number=claim.number,
            principal=claim.principal,
            key=claim.key,
            seq=events[0].seq - 1 if events else claim.started_seq,
        )
        actor.publish(events)
        host.incidents.kept["P4"] += 1
        if actor.active is not None:
            host.incidents.broken["P4"] += 1
            actor.active.supersede()
        try:
            agent = host.find_agent(claim.agent)
        except HoldfastError as error:
            self.finish_unstarted(claim, "failed", error=error, past=past)
            return
        run = ActiveRun(host, actor, claim, agent, past, steering=steering or past is not None)
        actor.active = run
        host.live[run.run_id] = run
        host.incidents.counts["runs_started"] += 1
        run.start()
        if claim.interrupt is not None:
            run.request_stop(claim.interrupt)
        host.run_started(run)

    def finish_unstarted(
        self,
        claim: Claim,
        status: Literal["failed", "interrupted"],
        *,
        cause: Cause | None = None,
        error: HoldfastError | None = None,
        past: Past | None = None,
    ) -> asyncio.Future[None]:
        """End a claimed run without starting its agent: unknown here, or abandoned by a crash. Its slot is reserved.
        The future resolves when the run has ended, or when a drain leaves it to the next start.
        """
        host = self._host
        past = past or Past(claim)
        transcript = past.transcript()
        not_undone = past.journal().begun_names
        entries = transcript.entries(status=status, cause=cause)
        host.transcript_made(entries)
        ended: asyncio.Future[None] = host.loop.create_future()

        def commit(tries: int) -> None:
            done = host.store.commit_run(
                RunCommit(
                    lease=claim.lease,
                    status=status,
                    at=host.now(),
                    text=transcript.text,
                    cause=cause,
                    error=None if error is None else one_line(error),
                    entries=entries,
                    next_run_id=self.next_run_id(),
                    not_undone=not_undone,
                )
            )
            done.add_done_callback(functools.partial(committed, tries), context=host.context)

        def committed(tries: int, done: asyncio.Future[Committed]) -> None:
            problem = done.exception()
            if problem is not None and not isinstance(problem, StaleFence):
                host.store_failed(claim.key, claim.lease.run_id, "commit", problem)
                if not host.draining:
                    delay_s = retry_after_s(tries)
                    host.loop.call_later(delay_s, commit, tries + 1, context=host.context)
                    return
            if problem is None:
                host.committed(claim, status, done.result())
                self._pass_on(claim, done.result())
            else:
                self.release(claim.principal)
            if not ended.done():
                ended.set_result(None)

        commit(0)
        return ended

    def next_run_id(self) -> str | None:
        """Return an id for a run that may follow on the same slot; None if others wait for it or the host drains."""
        return None if self._host.draining or self.admission.waiting else ids.run_id()

    def ended(self, run: ActiveRun, claim: Claim, committed: Committed | None) -> None:
        """Pass on the slot of a run that ended here."""
        if run.actor.active is run:
            run.actor.active = None
            run.actor.idle_since = self._host.loop.time()
        self._host.live.pop(run.run_id, None)
        self._host.run_ended(run)
        if committed is None:
            self.release(claim.principal)
        else:
            self._pass_on(claim, committed)

    def _pass_on(self, claim: Claim, committed: Committed) -> None:
        if committed.claim is not None:
            self.start(committed.claim)
            return
        if committed.waiting:
            self.later(claim.lease.session, claim.principal, committed.not_before)
        self.release(claim.principal)

    # ── waiting sessions, and those due later ────────────────────────────────────────────────────────────────────

    def later(self, session: int, principal: str, not_before: float) -> None:
        """Queue a session that has waiting messages, now or when they are due.

        This uses the loop's clock, which cannot be set; the store has the final say on what is due.
        """
        wait_s = not_before - self._host.now()
        if wait_s > 0:
            heapq.heappush(self._due, (self._host.loop.time() + min(wait_s, LOOK_EVERY_S), session, principal))
            self._arm()
        else:
            self.admission.line_up(principal, session)
            self._admit()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due and not self._host.draining:
            self._timer = self._host.loop.call_at(self._due[0][0], self._wake, context=self._host.context)

    def _wake(self) -> None:
        self._timer = None
        now = self._host.loop.time()
        while self._due and self._due[0][0] <= now:
            _, session, principal = heapq.heappop(self._due)
            self.admission.line_up(principal, session)
        self._admit()
        self._arm()

    def release(self, principal: str) -> None:
        """Return a slot. Queued sessions get it before anyone else can ask for it."""
        self.admission.release(principal)
        self._admit()
        if self._unused is not None and not self._unused.done() and not self.admission.statistics().running:
            self._unused.set_result(None)

    async def unused(self) -> None:
        """Wait until no slot is taken: every pending claim has its run, and every run has ended."""
        while self.admission.statistics().running:
            if self._unused is None or self._unused.done():
                self._unused = self._host.loop.create_future()
            await asyncio.shield(self._unused)

    def _admit(self) -> None:
        host = self._host
        while not host.draining and (admitted := self.admission.admit()) is not None:
            principal, session = admitted
            host.incidents.kept["P13"] += 1
            self._claim(principal, session, ids.run_id())

    def _claim(self, principal: str, session: int, run_id: str, tries: int = 0) -> None:
        """Claim and start the session's next run; its slot is reserved."""
        done = self._host.store.claim(session, run_id=run_id, at=self._host.now())
        claimed = functools.partial(self._claimed, principal, session, run_id, tries)
        done.add_done_callback(claimed, context=self._host.context)

    def _claimed(
        self, principal: str, session: int, run_id: str, tries: int, done: asyncio.Future[Claim | NotReady]
    ) -> None:
        host = self._host
        error = done.exception()
        if error is not None:
            host.store_failed(None, run_id, "claim", error)
            if isinstance(error, StorageError) and not host.draining:
                # The claim may have been made anyway: a repeat with the same id returns the same run.
                again = functools.partial(self._claim, principal, session, run_id, tries + 1)
                host.loop.call_later(retry_after_s(tries), again, context=host.context)
            else:
                self.release(principal)
            return
        match done.result():
            case Claim() as claim if claim.resumed:
                self.parked.take_up(claim)
            case Claim() as claim:
                self.start(claim, steering=tries > 0)
            case NotReady(waiting=waiting, not_before=not_before, busy=busy):
                if waiting and not busy and not_before:
                    self.later(session, principal, not_before)
                self.release(principal)

    def close(self) -> None:
        """Start no more runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
