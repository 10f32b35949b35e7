"""One run on this host, from its claim to its commit.

Invariants
- All output of the run goes through its `EventWriter`. Output after the scope has closed is dropped.
- A run is committed only once its scope has ended, on its own or by a stop. The run's slot is freed only when the run
  leaves memory.
- A failed write is retried unchanged until the store accepts it. Meanwhile, the run keeps its slot, and its later
  writes wait. If the store refuses a write because another holder has the session, the run ends on this host and writes
  nothing more.
- A write is given up (`give_up`) only after a drain's deadlines have expired. The run then stays in the store and is
  recovered at the next start.
- The phases and their transitions are defined in `holdfast.protocol.run_phases`. Once the scope has closed, the phase
  determines what is still to be written.
- A run that is unloaded (`unload`) to wait for people does no further work and produces no further output. Before the
  store releases the run, everything that a later claim needs is stored. An interrupt before the release ends the run on
  this host.
- Once the quota of stored bytes and the extra allowance for active runs are used up, the run fails, and only its input
  and its error are stored.
- An ordinary run needs no host task of its own: callbacks on the host's loop do all of the above.
"""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from holdfast.agents.context import RunContext
from holdfast.agents.journal import CallPath, Journal
from holdfast.agents.perform import perform
from holdfast.errors import (
    HoldfastError,
    IllegalTransition,
    Interrupted,
    QuotaExceeded,
    ScopeClosed,
    StaleFence,
)
from holdfast.host.event_writer import EventWriter
from holdfast.host.run_host import RunHostAdapter
from holdfast.logs import log_failure, one_line
from holdfast.protocol.run_phases import TERMINAL_PHASES, RunPhase, next_phase
from holdfast.protocol.stopping import Cause, StopReceipt
from holdfast.runtime import Scope
from holdfast.storage.port import ALL_BYTES, Claim, Committed, Lease, Parked, RunCommit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from holdfast.agents.agent import Agent
    from holdfast.host.live_session import LiveSession
    from holdfast.host.run_history import RunHistory
    from holdfast.host.run_parts import RunParts
    from holdfast.protocol.messages import Answer
    from holdfast.protocol.transcript import RunTranscript
    from holdfast.runtime import Handle, Registration

__all__ = ["RunExecution", "nothing_to_stop"]

_log = logging.getLogger("holdfast.agents")

_LOGGED = 10
"""Maximum number of errors that are logged when several parts of a run raise together."""


class RunExecution:
    """One run on this host. Implements `LiveRun`; the module's docstring lists the invariants."""

    __slots__ = (
        "_adapter",
        "_agent",
        "_claim",
        "_commit_fields",
        "_context",
        "_cut_by",
        "_exceeded",
        "_finished_first",
        "_handle",
        "_journal",
        "_may_unload",
        "_parts",
        "_receipt",
        "_receipts",
        "_trigger",
        "_writer",
        "actor",
        "phase",
        "run",
        "scope",
        "status",
    )

    def __init__(
        self,
        parts: RunParts,
        actor: LiveSession,
        claim: Claim,
        agent: Agent,
        history: RunHistory | None,
        *,
        steering: bool,
    ) -> None:
        context = parts.context
        self._parts = parts
        self._context = context
        self._claim = claim
        self._agent = agent
        self._journal = journal = Journal() if history is None else history.journal()
        self.actor = actor
        self.phase: RunPhase = "running"
        self.status: Literal["completed", "failed", "interrupted"] | None = None
        """The run's final status; None until it ends."""
        self._may_unload = False
        self._cut_by: Cause | None = None
        self._exceeded: QuotaExceeded | None = None
        self._receipts: list[asyncio.Future[StopReceipt]] = []
        self._receipt: StopReceipt | None = None
        self._commit_fields: dict[str, Any] = {}
        self._finished_first = False
        self._writer = EventWriter(context, parts.beat, actor, claim.lease, self._appended)
        self.scope = Scope(
            claim.lease.run_id,
            parent=context.scope,
            deadline_s=context.settings.run_timeout_s,
            threads=parts.threads.of(claim.principal),
            owner=claim.principal,
            sharer=claim.lease.run_id,
        )
        self._adapter = RunHostAdapter(
            context,
            self,
            self._writer,
            claim,
            agents=parts.agents,
            directory=parts.directory,
            grants=parts.grants,
            programs=parts.programs,
            observer=parts.observer,
            steering=steering,
        )
        self.run = RunContext(  # positional: keywords would cost a microsecond
            claim.lease.run_id,
            claim.lease.run_id,
            agent,
            claim.principal,
            claim.key,
            context.session_id(claim.number),
            claim.messages,
            claim.attempt,
            self.scope,
            self._writer,
            journal,
            self._adapter,
            parts.limits,
            CallPath(claim.lease.run_id),
            perform,
        )
        self._handle: Handle[None] | None = None
        self._trigger: Registration | None = None

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._claim.lease.run_id

    @property
    def attempt(self) -> int:
        """1, plus one for each restart of the run."""
        return self._claim.attempt

    @property
    def ended(self) -> bool:
        """Whether the run has ended on this host."""
        return self.phase in TERMINAL_PHASES

    @property
    def lease(self) -> Lease:
        """The lease that authorizes the run's writes."""
        return self._claim.lease

    @property
    def transcript(self) -> RunTranscript:
        """The transcript of the run so far."""
        return self.run.transcript

    @property
    def is_quiescent(self) -> bool:
        """Whether the run waits only for answers from people."""
        return self._adapter.is_quiescent

    def take_answer(self, answer: Answer) -> None:
        """Deliver a person's answer to the run."""
        self._adapter.take_answer(answer)

    def expect_steering(self) -> None:
        """Record that a ``steer`` message may be waiting for the run."""
        self._adapter.steering = True

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the agent. Called in the host's context, so that the agent inherits nothing from a caller."""
        try:
            self.scope.open()
            self._handle = self.scope.spawn(perform(self.run), name=self._agent.name)
        except (Interrupted, ScopeClosed) as refusal:  # the host is shutting down
            cause = (
                refusal.cause if isinstance(refusal, Interrupted) else Cause(kind="shutdown", at=self._context.now())
            )
            self._commit("interrupted", cause=cause)
            return
        self._trigger = self.scope.interrupt.on_trigger(self._on_trigger)
        self.scope.close_when_done(self._closed)

    def stop(
        self, cause: Cause, *, grace_s: float | None = None, abandon_after_s: float | None = None
    ) -> asyncio.Future[StopReceipt]:
        """Interrupt the run and return a future of the stop receipt, which resolves as `follow` describes."""
        future = self.follow()
        self.request_stop(cause, grace_s=grace_s, abandon_after_s=abandon_after_s)
        self._answer_if_exhausted()
        return future

    def request_stop(self, cause: Cause, *, grace_s: float | None = None, abandon_after_s: float | None = None) -> None:
        """Request a stop of the run without waiting for it. A run that is already committing is not stopped."""
        if self.phase in ("unloading", "releasing") and self._cut_by is None:
            self._cut_by = cause
        if self.phase != "committing":
            self.scope.request_stop(cause, grace_s=grace_s, abandon_after_s=abandon_after_s)

    def follow(self) -> asyncio.Future[StopReceipt]:
        """Return a future of the run's stop receipt, without stopping the run.

        The future resolves once the run's slot is free. It resolves earlier if the store keeps failing, or if an
        abandoned exclusive call still holds the slot.
        """
        future: asyncio.Future[StopReceipt] = self._context.loop.create_future()
        self._receipts.append(future)
        return future

    def unload(self) -> bool:
        """Unload a quiescent run if a later claim can resume it. Return whether the run is being unloaded."""
        if self.phase != "running":
            return self.phase == "unloading"
        if self.scope.interrupt.triggered:
            return False
        if not (self._agent.replayable and self._journal.replayable):
            return False
        self.phase = next_phase(self.phase, "unload")
        self._close_trigger()  # this stop is not an interrupt
        self._writer.stop_accepting()
        self.run.close()
        reason = "the run is unloaded until its question is answered"
        self.scope.request_stop(Cause(kind="shutdown", reason=reason, origin=self.run_id, at=self._context.now()))
        return True

    def unload_on_stop(self) -> None:
        """Make the next stop unload the run instead of ending it, if the run can resume at the host's next start."""
        running = self.phase == "running" and not self.scope.interrupt.triggered
        self._may_unload = running and self._agent.replayable

    def give_up(self) -> None:
        """Stop waiting for the store and write nothing more for the run, which is recovered at the next start."""
        if not self.ended:
            self._end(self._receipt)

    def _on_trigger(self, cause: Cause) -> None:
        self._finished_first = self._handle is not None and self._handle.done()
        if self.scope.ended_by == "interrupt" and not self._finished_first:
            self._parts.accounting.interrupted(self, cause)

    def _closed(self) -> None:
        """Commit or release the run once its scope has closed. Results of work that still runs are then discarded."""
        if self.phase in TERMINAL_PHASES:
            return
        assert self._handle is not None
        scope = self.scope
        cause = scope.interrupt.cause
        self._receipt = receipt = scope.receipt
        error = self._handle.exception()
        self._log_failures(error)
        self._parts.accounting.scope_closed(scope)
        if self._adapter.is_quiescent:
            self._adapter.end_quiescence()
        if receipt is not None:
            self._parts.accounting.stopped(self, receipt)
        if self.phase == "lost":
            self._end(receipt)
        elif self._exceeded is not None:
            self._commit("failed", receipt=receipt, error=self._exceeded)
        elif self.phase == "unloading":
            self._release()
        elif scope.ended_by == "failure":
            self._commit("failed", error=scope.errors[0])
        elif error is None and (receipt is None or scope.ended_by == "members" or self._finished_first):
            # Without a receipt, nothing was stopped: the interrupt came after the scope had closed on its own.
            self._commit("completed", receipt=receipt)
        elif cause is None or scope.ended_by == "members":  # the agent raised its own cancellation
            self._commit("failed", error=error)
        elif self._may_unload and self._journal.replayable:
            self._writer.stop_accepting()
            self.run.close()
            self._release()
        else:
            errors: Sequence[BaseException] = scope.errors or ([error] if isinstance(error, Exception) else [])
            self._commit("interrupted", cause=cause, receipt=receipt, error=errors[0] if errors else None)

    def _log_failures(self, error: BaseException | None) -> None:
        """Log each error that the run raised once, except errors that an interrupt caused."""
        if self.phase != "running" or (error is None and not self.scope.errors):
            return
        interrupted = self.scope.interrupt.triggered and self.scope.ended_by != "failure"
        raised = [] if error is None or error in self.scope.errors else [error]
        for each in (*self.scope.errors[:_LOGGED], *raised):
            if isinstance(each, Exception) and not (interrupted and isinstance(each, HoldfastError)):
                self._parts.accounting.raised(self, each)
                log_failure(
                    _log,
                    f"agent {self._agent.name!r} failed",
                    each,
                    principal=self.actor.principal,
                    session=self.actor.key,
                    run_id=self.run_id,
                )

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _appended(self, error: BaseException | None) -> None:
        """Handle a completed append. If the run is ending, continue its end; otherwise, flush further output."""
        phase = self.phase
        if isinstance(error, StaleFence):
            self.lose(error)
        elif isinstance(error, QuotaExceeded):
            self._exceed(error)
        elif error is not None:  # the writer tries again
            self._answer_if_exhausted()
            return
        if phase in ("running", "unloading") or not self.scope.closed:  # else `_closed` has begun the end
            self._writer.flush_rest()
        else:
            self._go_on()

    def _retry(self, error: BaseException, what: str) -> None:
        self._writer.retry(self._go_on, error, what)
        self._answer_if_exhausted()

    def _answer_if_exhausted(self) -> None:
        """Resolve the stop futures if the store keeps failing. The run holds its slot until it has ended."""
        if self.phase == "committing" and self._writer.exhausted:
            self._answer()

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

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
        self.phase = next_phase(self.phase, "commit")
        self.status = status
        self.run.close()
        self._writer.seal()
        transcript = self.run.transcript
        entries = transcript.entries(status=status, cause=cause)
        if self.run.replaced_history is not None:
            entries = [*self.run.replaced_history, *entries]
        self._parts.accounting.transcript_made(entries)
        self._commit_fields = {
            "lease": self._claim.lease,
            "status": status,
            "at": self._context.now(),
            "text": transcript.text,
            "cause": cause,
            "error": None if error is None else one_line(error),
            "receipt": receipt,
            "usage": self.run.usage,
            "entries": entries,
            "replaces_history": self.run.replaced_history is not None,
            "not_undone": self._journal.begun_names,
            "stored_limit": self._context.run_stored_limit,
            "served": self._parts.served,
        }
        if self._exceeded is not None:
            self._shorten(self._exceeded)

    def _exceed(self, error: QuotaExceeded) -> None:
        """Make the run fail because it exceeded the storage quota, and drop its remaining output.

        This method does not commit the run; the caller continues the run's end.
        """
        self._context.incidents.promises.kept["P14"] += 1
        self._exceeded = error
        self._writer.discard(error)
        self.run.close()
        if self.phase == "committing":
            self._shorten(error)
        elif self.phase == "releasing":
            self._prepare_commit("failed", receipt=self._receipt, error=error)
        else:
            with suppress(Interrupted, ScopeClosed):  # the run is already being stopped
                self.scope.spawn(_fail(error), name="quota")

    def _shorten(self, error: QuotaExceeded) -> None:
        """Reduce the commit to the run's input and error, which are stored even if they exceed the quota."""
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

    def _release(self) -> None:
        self.phase = next_phase(self.phase, "release")
        self._go_on()

    def _go_on(self) -> None:
        """Continue the run's end, one write at a time: first the unconfirmed batch, then the commit or the release.

        Failed writes are retried through this method, which writes nothing if the run has lost its session in the
        meantime.
        """
        if self._writer.in_flight:
            return
        if self.phase == "lost":
            self._end(self._receipt)
        elif self._writer.has_batch or (self._writer.buffer and self.phase != "committing"):
            self._writer.flush()
        elif self.phase == "committing":
            self._submit_once_released()
        elif self._may_unload and self._parts.served is None:  # the next start finds the run
            self._end(self._receipt)
        else:
            self._let_go()

    def _let_go(self) -> None:
        """Release the unloaded run to the store, or commit it as interrupted if a stop was requested meanwhile."""
        self._writer.cancel_timer()
        if self._cut_by is not None:
            if self._receipt is not None:
                self._receipt = replace(self._receipt, cause=self._cut_by)
            self._commit("interrupted", cause=self._cut_by, receipt=self._receipt)
            return
        done = self._context.store.park(self._claim.lease, at=self._context.now(), restarts=self._may_unload)
        done.add_done_callback(self._let_gone, context=self._context.variables)

    def _let_gone(self, done: asyncio.Future[Parked]) -> None:
        error = done.exception()
        if self.ended:
            return
        if error is None or (isinstance(error, StaleFence) and self._writer.tries):  # an earlier try's reply was lost
            actor = self.actor
            if self._cut_by is None:
                self._end(self._receipt)
                if error is not None or done.result().ready:  # all its questions are answered
                    self._parts.queue.enqueue_when_due(actor.session, actor.principal, 0.0)
                return
            # It was interrupted while the store released it: the caller gets the receipt once the store has ended it.
            receipts, self._receipts = self._receipts, []
            self._end(self._receipt)
            stop = self._parts.observer.stop_unloaded(actor.session, actor.principal, self.run_id, self._cut_by)
            stop.add_done_callback(functools.partial(_pass_on, receipts), context=self._context.variables)
        elif isinstance(error, StaleFence):
            self.lose(error)
            self._end(self._receipt)
        else:
            self._retry(error, "park")

    def _answer(self) -> None:
        """Resolve all futures of the stop receipt."""
        for future in self._receipts:
            if not future.done():
                future.set_result(self._receipt or nothing_to_stop(self.run_id, self._context.now()))
        self._receipts.clear()

    def _submit_once_released(self) -> None:
        """Submit the commit once all abandoned exclusive calls have ended. Until then, the run keeps its slot."""
        if not self.run.exclusive_calls.names:
            self._submit()
            return
        self._answer()
        self.run.exclusive_calls.when_ended(
            functools.partial(self._context.loop.call_soon, self._released, context=self._context.variables)
        )

    def _released(self) -> None:
        if not self.ended:
            self._go_on()

    def _submit(self) -> None:
        """Submit the commit to the store, together with the events that are still buffered."""
        self._writer.cancel_timer()
        done = self._context.store.commit_run(
            RunCommit(**self._commit_fields, events=self._writer.buffer, next_run_id=self._parts.queue.next_run_id())
        )
        done.add_done_callback(self._committed, context=self._context.variables)

    def _committed(self, done: asyncio.Future[Committed]) -> None:
        error = done.exception()
        if self.phase in TERMINAL_PHASES:
            return
        if isinstance(error, StaleFence):
            self.lose(error)
            self._end(self._receipt)
        elif isinstance(error, QuotaExceeded):
            self._exceed(error)
            self._go_on()
        elif error is not None:
            if isinstance(error, IllegalTransition):
                self._context.incidents.promises.broken["P10"] += 1
            self._retry(error, "commit")
        else:
            committed = done.result()
            adapter = self._adapter
            self._parts.accounting.committed(
                self._claim,
                self._commit_fields["status"],
                committed,
                adapter.steered,
                sure=not adapter.unsure,
            )
            self._end(self._receipt, committed)

    def lose(self, error: StaleFence) -> None:
        """End the run here without further writes, because another holder has the session."""
        if self.phase == "lost" or self.ended:
            return
        self.phase = next_phase(self.phase, "lose")
        self.run.close()
        self._writer.discard(StaleFence(f"run {self.run_id} no longer holds its session"))
        self._parts.accounting.lease_lost(self, error)
        if not self.scope.closed:
            self.scope.request_stop(Cause(kind="lease_lost", reason=str(error), at=self._context.now()))

    def supersede(self) -> None:
        """End this run, because a newer claim holds the session."""
        self.lose(StaleFence(f"run {self.run_id} was superseded by a newer claim"))

    def _end(self, receipt: StopReceipt | None, committed: Committed | None = None) -> None:
        self.phase = next_phase(self.phase, "end")
        self.run.close()
        self._writer.cancel_timer()
        self._parts.observer.on_ended(self, self._claim, committed)
        self._close_trigger()
        self._receipt = receipt
        self._answer()
        self._writer.close()
        self._adapter.end_quiescence()
        self._adapter.release()
        del self.run, self._handle, self._adapter  # they refer back to this; breaking the cycle frees them at once

    def _close_trigger(self) -> None:
        if self._trigger is not None:
            self._trigger.close()
            self._trigger = None


async def _fail(error: Exception) -> None:
    raise error


def nothing_to_stop(name: str, at: float) -> StopReceipt:
    """Return the receipt for a stop of `name` when nothing was running."""
    return StopReceipt(scope=name, cause=Cause(kind="stop", reason="nothing was running", origin=name, at=at))


def _pass_on(receipts: Sequence[asyncio.Future[StopReceipt]], done: asyncio.Future[StopReceipt]) -> None:
    """Copy the outcome of `done` to the futures in `receipts`."""
    error = done.exception()
    for future in receipts:
        if not future.done():
            if error is None:
                future.set_result(done.result())
            else:
                future.set_exception(error)
