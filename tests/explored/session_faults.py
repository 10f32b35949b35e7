"""Faults of the session actor, and which meeting of `tests.explored.of_sessions` must see each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from holdfast.host.run_execution import RunExecution, nothing_to_stop
from holdfast.host.run_host import RunHostAdapter
from holdfast.host.run_launcher import RunLauncher
from holdfast.host.session import Session
from holdfast.host.slot_queue import SlotQueue
from holdfast.protocol import mailbox_policies
from holdfast.protocol.messages import Policy
from holdfast.storage import transactions
from holdfast.storage.memory.tables import MemoryTables
from holdfast.storage.port import Steered
from holdfast.storage.transactions import messages, runs, session_log, stops
from tests.explored.model import Fault, fault

__all__ = ["Ending", "faults_of", "patch_stop_run"]

Ending = Literal["finishing", "failing", "crashed"]
"""Of the run that is on, if nobody stops it; a crashed one is found by a host that starts."""


def decided(patch: pytest.MonkeyPatch, policy: Policy, **changed: Any) -> None:
    """Another row in the table of what a session does with a message."""
    for (state, other), row in list(mailbox_policies.DECISIONS.items()):
        if other == policy and isinstance(row, mailbox_policies.Decision):
            patch.setitem(mailbox_policies.DECISIONS, (state, other), row._replace(**changed))


def patch_stop_run(patch: pytest.MonkeyPatch, stop_run: Callable[..., bool]) -> None:
    """Replace `session_log.stop_run` in all transactions that call it."""
    for module in (messages, runs, stops):
        patch.setattr(module, "stop_run", stop_run)


@fault
def a_session_that_is_busy_starts_another_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(messages, "occupancy", lambda **_: "idle")


@fault
def what_waits_is_forgotten_when_a_run_ends(patch: pytest.MonkeyPatch) -> None:
    commit = transactions.commit_run

    def forgetful(tables: Any, request: Any) -> Any:
        row = tables.get(request.lease.session)
        row.waiting = row.waiting[:1]
        return commit(tables, request)

    patch.setattr(transactions, "commit_run", forgetful)


@fault
def what_waits_is_run_newest_first(patch: pytest.MonkeyPatch) -> None:
    choose = runs._choose

    def newest(row: Any, now: float) -> Any:
        row.waiting = row.waiting[::-1]
        return choose(row, now)

    patch.setattr(runs, "_choose", newest)


@fault
def what_waits_is_not_run_after_a_run(patch: pytest.MonkeyPatch) -> None:
    def pass_on(self: RunLauncher, claim: Any, committed: Any) -> None:
        if committed.claim is not None:
            self.start(committed.claim)
            return
        self._parts.queue.release(claim.principal)

    patch.setattr(RunLauncher, "_pass_on", pass_on)
    patch.setattr(SlotQueue, "next_run_id", lambda self: None)


@fault
def what_waits_for_a_time_is_never_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotQueue, "_arm", lambda self: None)


@fault
def a_settlement_between_look_and_wait_is_missed(patch: pytest.MonkeyPatch) -> None:
    async def expect(self: Session, message_id: str) -> Any:
        await self.message(message_id)
        return self._expect(message_id)

    patch.setattr(Session, "expect", expect)


@fault
def the_slot_is_free_before_the_end_is_stored(patch: pytest.MonkeyPatch) -> None:
    commit = RunExecution._commit

    def early(self: RunExecution, *args: Any, **fields: Any) -> None:
        row = self._context.store.backend.tables.get(self.lease.session)  # type: ignore[attr-defined]
        row.run_id = None
        commit(self, *args, **fields)

    patch.setattr(RunExecution, "_commit", early)


@fault
def an_interrupt_hits_the_run_that_comes_after(patch: pytest.MonkeyPatch) -> None:
    async def late(self: Session, reason: str = "", **_: Any) -> Any:
        receipt = await interrupt(self, reason)
        for run in list(self._parts.launcher.live.values()):
            run.request_stop(receipt.cause)
        return receipt

    interrupt = Session.interrupt
    patch.setattr(Session, "interrupt", late)


@fault
def an_interrupt_is_answered_before_anything_has_stopped(patch: pytest.MonkeyPatch) -> None:
    def stop(self: RunExecution, cause: Any, **_: Any) -> Any:
        receipt = self._context.loop.create_future()
        receipt.set_result(nothing_to_stop(self.run_id, 0.0))
        return receipt

    patch.setattr(RunExecution, "stop", stop)


@fault
def a_run_that_fails_settles_nothing(patch: pytest.MonkeyPatch) -> None:
    commit = transactions.commit_run

    def silent(tables: Any, request: Any) -> Any:
        if request.status == "failed":
            tables.get(request.lease.session).taken = ()
        return commit(tables, request)

    patch.setattr(transactions, "commit_run", silent)


@fault
def a_run_that_fails_keeps_the_slot(patch: pytest.MonkeyPatch) -> None:
    submit = RunExecution._submit

    def only_good_ends(self: RunExecution) -> None:
        if self._commit_fields["status"] != "failed":
            submit(self)

    patch.setattr(RunExecution, "_submit", only_good_ends)


@fault
def a_failure_while_stopping_is_a_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "_final_state", lambda row, status: status)


@fault
def the_run_of_a_dead_holder_is_left_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTables, "orphans", lambda self: ())


@fault
def the_run_of_a_dead_holder_is_freed_and_not_ended(patch: pytest.MonkeyPatch) -> None:
    def rescue(tables: Any, at: float, served: Any = None) -> tuple[()]:
        for row in tables.orphans():
            session_log.release_slot(row)
            tables.save(row)
        return ()

    patch.setattr(transactions, "rescue", rescue)


@fault
def an_interrupt_is_forgotten_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    rescue = transactions.rescue

    def forgetful(tables: Any, at: float, served: Any) -> Any:
        for row in tables.orphans():
            row.cause = None
            row.run_state = "running"
        return rescue(tables, at, served)

    patch.setattr(transactions, "rescue", forgetful)


@fault
def a_rollback_is_forgotten_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    rescue = transactions.rescue

    def forgetful(tables: Any, at: float, served: Any) -> Any:
        for row in tables.orphans():
            row.rolled_back = False
        return rescue(tables, at, served)

    patch.setattr(transactions, "rescue", forgetful)


@fault
def what_steers_is_given_and_waits_on(patch: pytest.MonkeyPatch) -> None:
    steer = transactions.steer

    def twice(tables: Any, lease: Any, step: int, at: float) -> Steered:
        row = tables.get(lease.session)
        waiting = row.waiting
        steered = steer(tables, lease, step, at)
        row.waiting = waiting
        return steered

    patch.setattr(transactions, "steer", twice)


@fault
def what_steers_is_taken_and_not_given(patch: pytest.MonkeyPatch) -> None:
    steer = RunHostAdapter.steer

    async def keep(self: RunHostAdapter, step: int) -> tuple[()]:
        await steer(self, step)
        return ()

    patch.setattr(RunHostAdapter, "steer", keep)


@fault
def what_did_not_steer_ends_with_its_run(patch: pytest.MonkeyPatch) -> None:
    commit = transactions.commit_run

    def forgetful(tables: Any, request: Any) -> Any:
        row = tables.get(request.lease.session)
        row.waiting = tuple(mail for mail in row.waiting if mail.message.policy != "steer")
        return commit(tables, request)

    patch.setattr(transactions, "commit_run", forgetful)


@fault
def a_run_that_is_stopped_is_steered(patch: pytest.MonkeyPatch) -> None:
    steer = transactions.steer

    def anyway(tables: Any, lease: Any, step: int, at: float) -> Steered:
        row = tables.get(lease.session)
        cause, row.cause = row.cause, None
        try:
            return steer(tables, lease, step, at)
        finally:
            row.cause = cause

    patch.setattr(transactions, "steer", anyway)


@fault
def what_comes_close_together_is_not_joined(patch: pytest.MonkeyPatch) -> None:
    send = transactions.send

    def alone(tables: Any, request: Any) -> Any:
        sent = send(tables, request)
        row = tables.get(sent.session)
        row.waiting = tuple(mail._replace(batch=mail.message.seq) for mail in row.waiting)
        return sent

    patch.setattr(transactions, "send", alone)


@fault
def a_newer_message_does_not_stop_the_run(patch: pytest.MonkeyPatch) -> None:
    decided(patch, "interrupt", interrupt=False)


@fault
def a_newer_message_leaves_older_ones_waiting(patch: pytest.MonkeyPatch) -> None:
    decided(patch, "interrupt", take_all_waiting=False)


@fault
def a_rollback_is_an_interrupt(patch: pytest.MonkeyPatch) -> None:
    stop_run = session_log.stop_run

    def plain(row: Any, log: Any, cause: Any, at: float, grace_s: float | None = None) -> bool:
        return stop_run(row, log, replace(cause, kind="message") if cause.kind == "rollback" else cause, at, grace_s)

    patch_stop_run(patch, plain)


@fault
def a_rollback_that_comes_after_an_interrupt_is_lost(patch: pytest.MonkeyPatch) -> None:
    stop_run = session_log.stop_run

    def first_only(row: Any, log: Any, cause: Any, at: float, grace_s: float | None = None) -> bool:
        return row.cause is None and stop_run(row, log, cause, at, grace_s)

    patch_stop_run(patch, first_only)


@fault
def what_is_to_be_rejected_waits(patch: pytest.MonkeyPatch) -> None:
    for state in ("busy", "waiting"):
        patch.setitem(mailbox_policies.DECISIONS, (state, "reject"), mailbox_policies.Decision("queued"))


@fault
def what_may_be_rejected_always_is(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(mailbox_policies.DECISIONS, ("idle", "reject"), "busy")


OF_POLICY: dict[Policy, tuple[Fault, ...]] = {
    "queue": (
        a_session_that_is_busy_starts_another_run,
        what_waits_is_forgotten_when_a_run_ends,
        what_waits_is_run_newest_first,
        what_waits_is_not_run_after_a_run,
    ),
    "steer": (what_did_not_steer_ends_with_its_run,),
    "collect": (what_comes_close_together_is_not_joined, what_waits_for_a_time_is_never_woken),
    "interrupt": (a_newer_message_does_not_stop_the_run, a_newer_message_leaves_older_ones_waiting),
    "rollback": (a_rollback_is_an_interrupt, a_rollback_that_comes_after_an_interrupt_is_lost),
    "reject": (what_is_to_be_rejected_waits, what_may_be_rejected_always_is),
}
OF_ENDING: dict[Ending, tuple[Fault, ...]] = {
    "finishing": (
        the_slot_is_free_before_the_end_is_stored,
        an_interrupt_is_answered_before_anything_has_stopped,
        a_settlement_between_look_and_wait_is_missed,
    ),
    "failing": (
        a_run_that_fails_settles_nothing,
        a_run_that_fails_keeps_the_slot,
        a_failure_while_stopping_is_a_failure,
    ),
    "crashed": (
        the_run_of_a_dead_holder_is_left_on,
        the_run_of_a_dead_holder_is_freed_and_not_ended,
        an_interrupt_is_forgotten_in_a_crash,
    ),
}
OF_MEETING: dict[tuple[Policy, Ending], tuple[Fault, ...]] = {
    ("queue", "finishing"): (an_interrupt_hits_the_run_that_comes_after,),
    ("interrupt", "failing"): (an_interrupt_hits_the_run_that_comes_after,),
    ("steer", "finishing"): (
        what_steers_is_given_and_waits_on,
        what_steers_is_taken_and_not_given,
        a_run_that_is_stopped_is_steered,
    ),
    ("rollback", "crashed"): (a_rollback_is_forgotten_in_a_crash,),
}


def faults_of(policy: Policy, ending: Ending) -> tuple[Fault, ...]:
    """The faults that a meeting of these must see."""
    return (*OF_POLICY[policy], *OF_ENDING[ending], *OF_MEETING.get((policy, ending), ()))
