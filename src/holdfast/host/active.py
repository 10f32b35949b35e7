"""One run on this host, from its claim to its commit.

Invariants
- All output of the run goes to the log through one buffer, in order, with one append in flight; the commit takes the
  rest. Output after the scope has closed is dropped.
- The end of the scope, on its own or by a stop, is the only way to the commit; the commit is the only way to free the
  slot.
- A failed write is retried unchanged until the store accepts it. The slot stays held and later writes wait behind it.
  If a write is refused because another holder has the session, the run ends here and writes nothing more.
- Only an expired drain gives up a write (`abandon`): the store keeps the run, and the next start ends it.
- A run that is unloaded to wait for people (`leave`) produces no output and does no work after that: once its scope has
  closed, the store has everything that a later claim needs. An interrupt before the store has released the run ends it
  here.
- Once the quota of stored bytes and the extra allowance for active runs are used up, only the failed end of the run is
  stored.
- An ordinary run needs no task of its own: callbacks only, all on the host's loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.agents.context import RunContext
from holdfast.agents.journal import Branch, Journal
from holdfast.agents.perform import perform
from holdfast.errors import (
    HoldfastError,
    IllegalTransition,
    Interrupted,
    QuotaExceeded,
    RunClosed,
    ScopeClosed,
    StaleFence,
)
from holdfast.host.patience import RETRY_S, retry_after_s
from holdfast.host.surroundings import RunSurroundings
from holdfast.logs import log_failure, one_line
from holdfast.protocol.events import Event, encode_event
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.runtime import Scope
from holdfast.storage.port import ALL_BYTES, Appended, Claim, Committed, Lease, Parked, RunCommit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from holdfast.agents.agent import Agent
    from holdfast.host.actor import SessionActor
    from holdfast.host.host import Host
    from holdfast.host.past import Past
    from holdfast.runtime import Handle, Registration

__all__ = ["ActiveRun"]

_log = logging.getLogger("holdfast.agents")

_LOGGED = 10
"""Maximum number of errors that are logged when several parts of a run raise together."""
FIRST_FLUSH_S = 0.0005
FIRST_FLUSH_TICKS = 4
"""Delay of a run's first flush, in seconds, then in loop iterations: a short run's output goes with its commit, even
when iterations take long."""
FLUSH_EVERY_S = 0.02
"""A run with steady output is flushed at least this often."""
BEAT_S = 0.005
"""Flushes follow a beat shared by all runs, so that their output reaches the store together."""
SILENT_S = 0.1
"""Idle time after which the next event is flushed immediately."""
BEHIND_AT = 1024
"""Number of buffered events from which the run waits for the log."""
BEHIND_BYTES = 262_144
"""Bytes of buffered events from which the run waits for the log."""
BATCH_LIMIT = 4096


class ActiveRun:
    """One run on this host, and the run's `Recorder`. See the module."""

    __slots__ = (
        "_agent",
        "_batch",
        "_buffer",
        "_buffered_bytes",
        "_claim",
        "_commit_fields",
        "_committing",
        "_cut_by",
        "_ended",
        "_exceeded",
        "_finished_first",
        "_flush_timer",
        "_handle",
        "_host",
        "_inflight",
        "_journal",
        "_last_flush",
        "_may_park",
        "_nth",
        "_receipt",
        "_receipts",
        "_retries",
        "_stored",
        "_taken",
        "_trigger",
        "_waiting",
        "actor",
        "leaving",
        "lost",
        "parked",
        "run",
        "scope",
        "status",
        "surroundings",
    )

    def __init__(
        self, host: Host, actor: SessionActor, claim: Claim, agent: Agent, past: Past | None, *, steering: bool
    ) -> None:
        self._host = host
        self._claim = claim
        self._agent = agent
        self._journal = journal = Journal() if past is None else past.journal()
        self.actor = actor
        self.lost = False
        self.parked = False
        self.status: Literal["completed", "failed", "interrupted"] | None = None
        """How the run ended; None until then."""
        self.leaving = False
        self._may_park = False
        self._cut_by: Cause | None = None
        self._buffer: list[tuple[str, bytes]] = []
        self._buffered_bytes = 0
        self._exceeded: QuotaExceeded | None = None
        self._batch: list[tuple[str, bytes]] = []  # passed to the store, not yet confirmed
        self._nth = 0
        self._inflight: asyncio.Future[Appended] | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        self._last_flush = 0.0
        self._taken = 0
        self._stored = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._receipts: list[asyncio.Future[StopReceipt]] = []
        self._receipt: StopReceipt | None = None
        self._committing = False
        self._ended = False
        self._commit_fields: dict[str, Any] = {}
        self._finished_first = False
        self._retries = 0
        settings = host.settings
        self.scope = Scope(
            claim.lease.run_id,
            parent=host.scope,
            deadline_s=settings.run_s,
            threads=host.threads(claim.principal),
            owner=claim.principal,
            sharer=claim.lease.run_id,
        )
        self.surroundings = RunSurroundings(host, self, steering=steering)
        self.run = RunContext(
            run_id=claim.lease.run_id,
            root_id=claim.lease.run_id,
            agent=agent,
            principal=claim.principal,
            session_key=claim.key,
            session_id=host.session_id(claim.number),
            messages=claim.messages,
            attempt=claim.attempt,
            scope=self.scope,
            recorder=self,
            journal=journal,
            host=self.surroundings,
            limits=host.run_limits,
            call_path=Branch(claim.lease.run_id),
            perform=perform,
        )
        self._handle: Handle[None] | None = None
        self._trigger: Registration | None = None

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._claim.lease.run_id

    @property
    def ended(self) -> bool:
        """Whether the run has ended on this host."""
        return self._ended

    @property
    def started_seq(self) -> int:
        """The seq of its ``run.started``; its output comes after this."""
        return self._claim.started_seq

    @property
    def lease(self) -> Lease:
        """The lease that allows writing for the run."""
        return self._claim.lease

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the agent, in the host's context so that it inherits nothing from a caller."""
        try:
            self.scope.open()
            self._handle = self.scope.spawn(perform(self.run), name=self._agent.name)
        except (Interrupted, ScopeClosed) as refusal:  # the host is shutting down
            cause = refusal.cause if isinstance(refusal, Interrupted) else Cause(kind="shutdown", at=self._host.now())
            self._commit("interrupted", cause=cause)
            return
        self._trigger = self.scope.interrupt.on_trigger(self._on_trigger)
        self.scope.close_when_done(self._closed)

    def stop(
        self, cause: Cause, *, grace_s: float | None = None, kill_after_s: float | None = None
    ) -> asyncio.Future[StopReceipt]:
        """Interrupt the run; the future resolves to the receipt once the slot is free."""
        future = self.follow()
        self.request_stop(cause, grace_s=grace_s, kill_after_s=kill_after_s)
        if self._committing and self._retries >= len(RETRY_S):
            self._answer()
        return future

    def request_stop(self, cause: Cause, *, grace_s: float | None = None, kill_after_s: float | None = None) -> None:
        """Request a stop without waiting. A run that is committing or never started ends as it is."""
        if self.leaving and self._cut_by is None:
            self._cut_by = cause
        if not self._committing:
            self.scope.request_stop(cause, grace_s=grace_s, kill_after_s=kill_after_s)

    def follow(self) -> asyncio.Future[StopReceipt]:
        """Return a future of the stop receipt, whatever stops the run; it resolves once the slot is free."""
        future: asyncio.Future[StopReceipt] = self._host.loop.create_future()
        self._receipts.append(future)
        return future

    def leave(self) -> bool:
        """Unload a run that waits only for people, if a later claim can resume it. Return whether it unloads."""
        if self.leaving:
            return True
        if self._committing or self.scope.interrupt.triggered:
            return False
        if not (self._agent.replayable and self._journal.replayable):
            return False
        self.leaving = True
        self.run.close()
        reason = "the run is unloaded until its question is answered"
        self.scope.request_stop(Cause(kind="shutdown", reason=reason, origin=self.run_id, at=self._host.now()))
        return True

    def park(self) -> None:
        """Let the coming stop leave the run unended if the next start can resume it; ``parked`` reports it."""
        self._may_park = self._agent.replayable and not self._committing and not self.scope.interrupt.triggered

    def abandon(self) -> None:
        """Stop waiting for the store: write nothing more of the run; the next start ends it."""
        if not self._ended:
            self._end(self._receipt)

    def _on_trigger(self, cause: Cause) -> None:
        self._finished_first = self._handle is not None and self._handle.done()
        if self.scope.ended_by == "interrupt" and not self._finished_first and not self.leaving:
            self._host.run_triggered(self, cause)

    def _closed(self) -> None:
        """Handle the closed scope: nothing of the run is left, or what is left is discarded."""
        if self._ended:
            return
        assert self._handle is not None
        scope = self.scope
        cause = scope.interrupt.cause
        self._receipt = receipt = scope.receipt
        error = self._handle.exception()
        self._log_failures(error)
        self._host.scope_closed(scope)
        if self.surroundings.resting:
            self.surroundings.end_rest()
        if receipt is not None:
            self._host.receipt_made(self, receipt)
        if self.lost:
            self._end(receipt)
        elif self._exceeded is not None:
            self._commit("failed", receipt=receipt, error=self._exceeded)
        elif self.leaving:
            self._go_on()
        elif scope.ended_by == "failure":
            self._commit("failed", error=scope.errors[0])
        elif error is None and (receipt is None or scope.ended_by == "members" or self._finished_first):
            # Without a receipt, nothing was stopped: the interrupt came after the scope had closed on its own.
            self._commit("completed", receipt=receipt)
        elif cause is None or scope.ended_by == "members":  # the agent raised its own cancellation
            self._commit("failed", error=error)
        elif self._may_park and self._journal.replayable:
            self.parked = True
            self.run.close()
            self._go_on()
        else:
            errors: Sequence[BaseException] = scope.errors or ([error] if isinstance(error, Exception) else [])
            self._commit("interrupted", cause=cause, receipt=receipt, error=errors[0] if errors else None)

    def _log_failures(self, error: BaseException | None) -> None:
        """Log each error of the agent and its parts once, except those caused by an interrupt."""
        if self.lost or self.leaving or (error is None and not self.scope.errors):
            return
        interrupted = self.scope.interrupt.triggered and self.scope.ended_by != "failure"
        raised = [] if error is None or error in self.scope.errors else [error]
        for each in (*self.scope.errors[:_LOGGED], *raised):
            if isinstance(each, Exception) and not (interrupted and isinstance(each, HoldfastError)):
                log_failure(
                    _log,
                    f"agent {self._agent.name!r} failed",
                    each,
                    principal=self.actor.principal,
                    session=self.actor.key,
                    run_id=self.run_id,
                )

    # ── output: the Recorder ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def behind(self) -> bool:
        """Whether the log is behind. Thread-safe."""
        return len(self._buffer) >= BEHIND_AT or self._buffered_bytes >= BEHIND_BYTES

    def write(self, event: Event) -> None:
        """Buffer an event of the run."""
        if self.leaving or self._exceeded is not None:
            return
        encoded = encode_event(event)
        self._buffer.append(encoded)
        self._buffered_bytes += len(encoded[1])
        self._taken += 1
        if self._flush_timer is None and self._inflight is None:
            self._flush_timer = self._flush_later()

    def _flush_later(self) -> asyncio.TimerHandle:
        """Schedule a flush: soon if the run was idle until now, else at the shared beat."""
        host = self._host
        now = host.loop.time()
        if now - self._last_flush >= SILENT_S:
            return host.loop.call_later(FIRST_FLUSH_S, self._flush_in, FIRST_FLUSH_TICKS, context=host.context)
        beat = math.ceil(max(now, self._last_flush + FLUSH_EVERY_S - BEAT_S) / BEAT_S) * BEAT_S
        return host.loop.call_at(beat, self._flush, context=host.context)

    async def written(self) -> None:
        """Wait until all events buffered so far are stored."""
        goal = self._taken
        while self._stored < goal:
            if self.lost:
                raise StaleFence(f"run {self.run_id} no longer holds its session")
            if self._exceeded is not None:
                raise self._exceeded
            if self._over:
                raise RunClosed(f"run {self.run_id} has ended")
            self._hurry()
            await self._changed()

    async def room(self) -> None:
        """Wait while the log is behind."""
        while self.behind and not self.lost and not self._over:
            self._hurry()
            await self._changed()

    def late(self) -> None:
        """Count a result that came too late and is discarded. Thread-safe."""
        self._host.incidents.counts["late_results"] += 1

    @property
    def _over(self) -> bool:
        return self._committing or self.leaving or self.parked or self._ended or self._exceeded is not None

    def _hurry(self) -> None:
        """Flush early for a waiter, except while the store is failing."""
        if self._inflight is None and not self._retries:
            self._flush()

    async def _changed(self) -> None:
        future: asyncio.Future[None] = self._host.loop.create_future()
        self._waiting.append(future)
        await future

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _flush_in(self, ticks: int) -> None:
        if ticks:
            self._host.loop.call_soon(self._flush_in, ticks - 1, context=self._host.context)
        elif self._inflight is None:
            self._flush()

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._inflight is not None or self.lost or self._ended:
            return
        if not self._batch:
            if not self._buffer or self._committing:
                return
            self._batch = self._buffer[:BATCH_LIMIT]
            del self._buffer[:BATCH_LIMIT]
            self._buffered_bytes = sum([len(body) for _, body in self._buffer])
            self._nth += 1
        self._last_flush = self._host.loop.time()
        self._inflight = self._host.store.append(
            self._claim.lease, self._batch, nth=self._nth, stored_limit=self._host.run_stored_limit
        )
        self._inflight.add_done_callback(self._appended, context=self._host.context)

    def _appended(self, done: asyncio.Future[Appended]) -> None:
        self._inflight = None
        error = done.exception()
        if self._ended:
            return
        if error is None:
            self._retries = 0
            self._stored += len(self._batch)
            self._batch = []
            self.actor.publish(done.result().events)
        elif isinstance(error, StaleFence):
            self.lose(error)
        elif isinstance(error, QuotaExceeded):
            self._exceed(error)
        else:
            # It may be stored anyway: the retry has the same number, so it has no second effect.
            self._retry(self._flush, error, "append")
            return
        self._wake()
        if self._committing or self.parked or (self.leaving and self.scope.closed):
            self._go_on()
        elif self._buffer and self._flush_timer is None:
            if self.behind:
                self._flush()
            else:
                self._flush_timer = self._flush_later()

    def _retry(self, again: Callable[[], object], error: BaseException, what: str) -> None:
        self._host.store_failed(self.actor.key, self.run_id, what, error)
        delay_s = retry_after_s(self._retries)
        self._retries += 1
        if self._committing and self._retries >= len(RETRY_S):
            self._answer()  # the caller of the stop gets the receipt; the slot stays held until the end is stored
        self._flush_timer = self._host.loop.call_later(delay_s, again, context=self._host.context)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────

    def _commit(
        self,
        status: Literal["completed", "failed", "interrupted"],
        *,
        cause: Cause | None = None,
        receipt: StopReceipt | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._prepare_commit(status, cause=cause, receipt=receipt, error=error)
        self._go_on()

    def _prepare_commit(
        self,
        status: Literal["completed", "failed", "interrupted"],
        *,
        cause: Cause | None = None,
        receipt: StopReceipt | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._committing = True
        self.status = status
        self.run.close()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        transcript = self.run.transcript
        entries = transcript.entries(status=status, cause=cause)
        if self.run.replaced_history is not None:
            entries = [*self.run.replaced_history, *entries]
        self._host.transcript_made(entries)
        self._commit_fields = {
            "lease": self._claim.lease,
            "status": status,
            "at": self._host.now(),
            "text": transcript.text,
            "cause": cause,
            "error": None if error is None else one_line(error),
            "receipt": receipt,
            "usage": self.run.usage,
            "entries": entries,
            "replaces_history": self.run.replaced_history is not None,
            "not_undone": self._journal.begun_names,
            "stored_limit": self._host.run_stored_limit,
        }
        if self._exceeded is not None:
            self._shorten(self._exceeded)

    def _exceed(self, error: QuotaExceeded) -> None:
        """Handle an exceeded storage quota: the run fails, and its remaining output is dropped.

        This does not commit; the caller continues towards the end.
        """
        self._host.incidents.kept["P14"] += 1
        self._exceeded = error
        self._batch = []
        self._buffer.clear()
        self._buffered_bytes = 0
        self.run.close()
        if self._committing:
            self._shorten(error)
        elif self.scope.closed:
            self.parked = False
            self._prepare_commit("failed", receipt=self._receipt, error=error)
        else:
            with suppress(Interrupted, ScopeClosed):  # the run is already being stopped
                self.scope.spawn(_fail(error), name="quota")

    def _shorten(self, error: QuotaExceeded) -> None:
        """Reduce the commit to the run's input and its error, which are stored beyond any quota."""
        fields, run_id = self._commit_fields, self.run_id
        asked = [entry for entry in fields["entries"] if entry.role == "user" and entry.run_id == run_id]
        if asked:
            asked[-1] = msgspec.structs.replace(asked[-1], ended_by="failure")
        fields |= {
            "status": "failed" if fields["status"] == "completed" else fields["status"],
            "text": "",
            "error": fields["error"] or one_line(error),
            "entries": asked,
            "replaces_history": False,
            "stored_limit": ALL_BYTES,
        }

    def _go_on(self) -> None:
        """Continue towards the end, one write at a time: the unconfirmed batch first, then the commit or the unload."""
        if self._inflight is not None:
            return
        if self.lost:
            self._end(self._receipt)
        elif self._batch or (self._buffer and not self._committing):
            self._flush()
        elif self._committing:
            self._submit_once_released()
        elif self.leaving:
            self._let_go()
        else:
            self._end(self._receipt)

    def _let_go(self) -> None:
        """Release an unloaded run to the store, unless it was interrupted in the meantime."""
        self._flush_timer = None
        if self._cut_by is not None:
            if self._receipt is not None:
                self._receipt = replace(self._receipt, cause=self._cut_by)
            self._commit("interrupted", cause=self._cut_by, receipt=self._receipt)
            return
        done = self._host.store.park(self._claim.lease, at=self._host.now())
        done.add_done_callback(self._let_gone, context=self._host.context)

    def _let_gone(self, done: asyncio.Future[Parked]) -> None:
        error = done.exception()
        if self._ended:
            return
        if error is None or (isinstance(error, StaleFence) and self._retries):  # an earlier try's reply was lost
            self.parked = True
            parked, actor = self._host.dispatch.parked, self.actor
            if self._cut_by is None:
                self._end(self._receipt)
                parked.left(self, ready=error is not None or done.result().ready)
                return
            # It was interrupted while the store released it: the caller hears back once the store has ended it.
            receipts, self._receipts = self._receipts, []
            self._end(self._receipt)
            stop = parked.stop(actor.session, actor.principal, self.run_id, self._cut_by)
            stop.add_done_callback(functools.partial(_pass_on, receipts), context=self._host.context)
        elif isinstance(error, StaleFence):
            self.lose(error)
            self._end(self._receipt)
        else:
            self._retry(self._let_go, error, "park")

    def _answer(self) -> None:
        """Give the receipt to everyone who stopped the run."""
        for future in self._receipts:
            if not future.done():
                future.set_result(self._receipt or nothing_to_stop(self.run_id, self._host.now()))
        self._receipts.clear()

    def _submit_once_released(self) -> None:
        """Commit; an abandoned exclusive call keeps the slot until it has really ended."""
        if not self.run.exclusive_calls.names:
            self._submit()
            return
        self._answer()
        self.run.exclusive_calls.when_ended(
            functools.partial(self._host.loop.call_soon, self._released, context=self._host.context)
        )

    def _released(self) -> None:
        if not self._ended:
            self._submit()

    def _submit(self) -> None:
        """Submit the commit to the store, with the rest of the buffer."""
        self._flush_timer = None
        done = self._host.store.commit_run(
            RunCommit(**self._commit_fields, events=self._buffer, next_run_id=self._host.dispatch.next_run_id())
        )
        done.add_done_callback(self._committed, context=self._host.context)

    def _committed(self, done: asyncio.Future[Committed]) -> None:
        error = done.exception()
        if self._ended:
            return
        if isinstance(error, StaleFence):
            self.lose(error)
            self._end(self._receipt)
        elif isinstance(error, QuotaExceeded):
            self._exceed(error)
            self._submit()
        elif error is not None:
            if isinstance(error, IllegalTransition):
                self._host.incidents.broken["P10"] += 1
            self._retry(self._submit, error, "commit")
        else:
            committed = done.result()
            surroundings = self.surroundings
            self._host.committed(
                self._claim,
                self._commit_fields["status"],
                committed,
                surroundings.steered,
                sure=not surroundings.unsure,
            )
            self._end(self._receipt, committed)

    def lose(self, error: StaleFence) -> None:
        """End the run here without further writes: another holder has the session."""
        if self._ended or self.lost:
            return
        self.lost = True
        self.run.close()
        self._buffer.clear()
        self._buffered_bytes = 0
        self._batch = []
        self._host.run_lost(self, error)
        if not self.scope.closed:
            self.scope.request_stop(Cause(kind="lease_lost", reason=str(error), at=self._host.now()))

    def supersede(self) -> None:
        """End this run: a newer claim has the session."""
        self.lose(StaleFence(f"run {self.run_id} was superseded by a newer claim"))

    def _end(self, receipt: StopReceipt | None, committed: Committed | None = None) -> None:
        self._ended = True
        self.run.close()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._host.dispatch.ended(self, self._claim, committed)
        if self._trigger is not None:
            self._trigger.close()
            self._trigger = None
        self._receipt = receipt
        self._answer()
        self._wake()
        self.surroundings.end_rest()
        self.surroundings.release()
        del (
            self.run,
            self._handle,
            self.surroundings,
        )  # they refer back to this; breaking the cycle frees them at once


async def _fail(error: Exception) -> None:
    raise error


def nothing_to_stop(name: str, at: float) -> StopReceipt:
    """Return the receipt of a stop that found nothing to stop."""
    return StopReceipt(scope=name, cause=Cause(kind="stop", reason="nothing was running", origin=name, at=at))


def _pass_on(receipts: Sequence[asyncio.Future[StopReceipt]], done: asyncio.Future[StopReceipt]) -> None:
    """Copy the outcome of one future to the others."""
    error = done.exception()
    for future in receipts:
        if not future.done():
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)
