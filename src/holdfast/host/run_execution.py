"""One run on this host, from its claim to its commit.

Invariants
- All output of the run goes through its `EventWriter`. Output after the scope has closed is dropped.
- A run is committed only once its scope has ended, on its own or by a stop. The slot is freed only when the run leaves
  memory.
- A failed write is retried unchanged until the store accepts it. The slot stays held and later writes wait behind it.
  If a write is refused because another holder has the session, the run ends here and writes nothing more.
- Only an expired drain gives up a write (`give_up`): the store keeps the run, and the next start ends it.
- The phases and their transitions are defined in `holdfast.protocol.run_phases`. Once the scope has closed, the phase
  determines what is still to be written.
- A run that is unloaded to wait for people (`unload`) does no further work and produces no further output. Before the
  store releases it, everything that a later claim needs is stored. An interrupt before the release ends the run here.
- Once the quota of stored bytes and the extra allowance for active runs are used up, only the run's end, as failed, is
  stored.
- The host needs no task for an ordinary run: callbacks on its loop do all of the above.
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
    """One run on this host; implements `LiveRun`. The module's docstring lists the invariants."""

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
        self._writer = EventWriter(context, actor, claim.lease, self._appended)
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
            observer=parts.observer,
            steering=steering,
        )
        self.run = RunContext(
            run_id=claim.lease.run_id,
            root_id=claim.lease.run_id,
            agent=agent,
            principal=claim.principal,
            session_key=claim.key,
            session_id=context.session_id(claim.number),
            messages=claim.messages,
            attempt=claim.attempt,
            scope=self.scope,
            recorder=self._writer,
            journal=journal,
            host=self._adapter,
            limits=parts.limits,
            call_path=CallPath(claim.lease.run_id),
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
        return self.phase in TERMINAL_PHASES

    @property
    def lease(self) -> Lease:
        """The lease that allows writing for the run."""
        return self._claim.lease

    @property
    def transcript(self) -> RunTranscript:
        """The transcript of the run so far."""
        return self.run.transcript

    @property
    def is_quiescent(self) -> bool:
        """Whether the run waits only for people."""
        return self._adapter.is_quiescent

    def take_answer(self, answer: Answer) -> None:
        """Deliver a person's decision."""
        self._adapter.take_answer(answer)

    def expect_steering(self) -> None:
        """Note that a ``steer`` message may wait for the run."""
        self._adapter.steering = True

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start the agent, in the host's context so that it inherits nothing from a caller."""
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
        """Interrupt the run; the future resolves to the receipt, as for `follow`."""
        future = self.follow()
        self.request_stop(cause, grace_s=grace_s, abandon_after_s=abandon_after_s)
        self._answer_if_exhausted()
        return future

    def request_stop(self, cause: Cause, *, grace_s: float | None = None, abandon_after_s: float | None = None) -> None:
        """Request a stop without waiting. It does not affect a run that is already committing."""
        if self.phase in ("unloading", "releasing") and self._cut_by is None:
            self._cut_by = cause
        if self.phase != "committing":
            self.scope.request_stop(cause, grace_s=grace_s, abandon_after_s=abandon_after_s)

    def follow(self) -> asyncio.Future[StopReceipt]:
        """Return a future of the stop receipt, whatever stops the run.

        It resolves once the slot is free, or earlier if the store keeps failing or an abandoned exclusive call holds
        the slot.
        """
        future: asyncio.Future[StopReceipt] = self._context.loop.create_future()
        self._receipts.append(future)
        return future

    def unload(self) -> bool:
        """Unload a run that waits only for people, if a later claim can resume it. Return whether it unloads."""
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
        """Make the next stop unload the run instead of ending it, if the next start can resume it."""
        running = self.phase == "running" and not self.scope.interrupt.triggered
        self._may_unload = running and self._agent.replayable

    def give_up(self) -> None:
        """Stop waiting for the store, and write nothing more for the run; the next start ends it."""
        if not self.ended:
            self._end(self._receipt)

    def _on_trigger(self, cause: Cause) -> None:
        self._finished_first = self._handle is not None and self._handle.done()
        if self.scope.ended_by == "interrupt" and not self._finished_first:
            self._parts.accounting.interrupted(self, cause)

    def _closed(self) -> None:
        """Handle the closed scope: all work of the run has ended, or its results are discarded from now on."""
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
        """Log each error of the agent and its parts once, except those caused by an interrupt."""
        if self.phase != "running" or (error is None and not self.scope.errors):
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

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _appended(self, error: BaseException | None) -> None:
        """Handle a completed append: continue the run's end if it has begun, otherwise flush further output."""
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
        """Give the receipt to the callers of a stop if the store keeps failing; the slot stays held until the end."""
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
        }
        if self._exceeded is not None:
            self._shorten(self._exceeded)

    def _exceed(self, error: QuotaExceeded) -> None:
        """Handle an exceeded storage quota: the run fails, and its remaining output is dropped.

        This does not commit; the caller continues towards the end.
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

    def _release(self) -> None:
        self.phase = next_phase(self.phase, "release")
        self._go_on()

    def _go_on(self) -> None:
        """Continue towards the end, one write at a time: the unconfirmed batch first, then the commit or the release.

        A failed write is retried from here, so that a run that has lost its session in the meantime does not write.
        """
        if self._writer.in_flight:
            return
        if self.phase == "lost":
            self._end(self._receipt)
        elif self._writer.has_batch or (self._writer.buffer and self.phase != "committing"):
            self._writer.flush()
        elif self.phase == "committing":
            self._submit_once_released()
        elif self._may_unload:  # the store need not know: the next start finds the run
            self._end(self._receipt)
        else:
            self._let_go()

    def _let_go(self) -> None:
        """Release an unloaded run to the store, unless it was interrupted in the meantime."""
        self._writer.cancel_timer()
        if self._cut_by is not None:
            if self._receipt is not None:
                self._receipt = replace(self._receipt, cause=self._cut_by)
            self._commit("interrupted", cause=self._cut_by, receipt=self._receipt)
            return
        done = self._context.store.park(self._claim.lease, at=self._context.now())
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
        """Give the receipt to everyone who stopped the run."""
        for future in self._receipts:
            if not future.done():
                future.set_result(self._receipt or nothing_to_stop(self.run_id, self._context.now()))
        self._receipts.clear()

    def _submit_once_released(self) -> None:
        """Commit; an abandoned exclusive call keeps the slot until it has really ended."""
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
        """Submit the commit to the store, with the rest of the buffer."""
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
