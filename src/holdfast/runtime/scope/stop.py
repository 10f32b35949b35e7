"""The stop of a scope: ask members to end, force them after the grace period, abandon the rest, and create a receipt.

A stop is driven by timers of the loop and by members that end, not by a task. So no code can cancel a stop, and it ends
soon after its deadline even if members still run.

Phases
- ``grace``: each member is asked to stop once, and not again, so that its cleanup can finish. Tasks that foreign code
  started are first left to their owner: a task group, for example, cancels its children itself once its body has
  cleaned up. Such a task is asked when the code that started it has ended, or at the latest after half of the grace
  period.
- ``force``: closers have run, and process trees are being killed. Tasks are asked to stop repeatedly, at intervals that
  grow from 1 to 100 ms.
- ``last``: threads, processes and child scopes that did not end are abandoned. Tasks that only waited for one of these
  get a moment to end by themselves, so that the receipt names the member that hangs and not its waiters.
- ``ended``: every member is gone or abandoned, and the receipt is final. Even after all known processes are dead, the
  stop waits, until its deadline, for the kill of processes that foreign code started, because it may find more.

The receipt names each member that outlasted the grace period as forced, with the reason, except a task that probably
waited for another one: it ended before the last program or thread of the scope that outlasted the grace period, or soon
after that one or a child scope. Before a program is named as forced or as alive, its state is checked: if the loop was
blocked, the notification of its end may still be queued.

If foreign code started a program in the scope, the stop kills every process with the scope's tag before it reports that
nothing is left, even if all known processes have ended. It also looks for processes that may belong to the scope but
cannot be attributed; if the parent scope is being stopped too, the parent's stop does this search instead.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.protocol.stopping import Abandoned, Outcome, StopCounts, StopReceipt
from holdfast.runtime.scope.abandoned import AbandonedMember
from holdfast.runtime.scope.cancel_claim import CancelClaim
from holdfast.runtime.scope.handle import Handle
from holdfast.runtime.scope.process_handle import (
    STRANGER,
    UNHEARD,
    ForeignHandle,
    boot_ticks,
    foreign_programs,
    kill_foreign,
    look_soon,
    may_have_started,
    strangers,
)
from holdfast.runtime.scope.state import ScopeState
from holdfast.runtime.scope.stop_port import StopPhase
from holdfast.runtime.thread_pool import thread_stack

if TYPE_CHECKING:
    from holdfast.runtime.processes.tree import TreeResult

__all__ = ["Stopping"]

_FIRST_ESCALATION_S = 0.001
_LAST_ESCALATION_S = 0.1
_OWNERS_TICKS = 2
_CHUNK = 1_000
_LAST_S = 0.05
_LAST_TICKS = 10
"""Loop iterations, per level of nested scopes, that tasks get to end after something they waited for was abandoned.
Iterations are counted, because a blocked loop may spend the whole time in one iteration."""

_SHORTEST_GRACE_S = 0.01
_NO_GRACE = "no grace period"
"""Reason for forcing the members of a stop whose grace period was shorter than `_SHORTEST_GRACE_S`."""

_UNOWNED_S = 0.05
_UNOWNED_LOOK_S = 0.005


class Stopping:
    """The stop of one scope. Call all methods on the scope's loop."""

    def __init__(self, scope: ScopeState) -> None:
        self.scope = scope
        self.phase: StopPhase = "grace"
        self.receipt: StopReceipt | None = None
        self._loop = scope.open_loop()
        self._began = self._loop.time()
        self._force_at = float("inf")
        self._end_at = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._escalate_in_s = _FIRST_ESCALATION_S
        self._escalate_at = 0.0
        self._overdue: set[Handle[Any]] = set()
        self._blockers = 0
        """Number of programs and threads that outlasted the grace period and have not ended; some may be abandoned."""
        self._release_ticks = 0
        self._followers: dict[CancelClaim | None, list[Handle[object]]] = {}
        self._rest_at = float("inf")
        self._stopped: Counter[str] = Counter()
        self._processes = 0
        self._forced: list[tuple[str, str]] = []
        self._abandoned: list[Abandoned] = []
        self._survivors: list[int] = []
        self._unattributed: list[str] = []
        self._unknown = False
        self._killing: asyncio.Task[int] | None = None
        self._proven = False
        self._looking: object = None
        self._strangers: int | None = None
        self.asked_at_ticks = boot_ticks()
        """Start of the stop, in clock ticks since boot, the unit of process start times."""

    def shorten(self, grace_s: float, abandon_after_s: float) -> None:
        """Shorten the remaining grace period and the time after it to at most these times, for child scopes too."""
        if self.phase in ("last", "ended"):
            return
        now = self._loop.time()
        self._force_at = min(self._force_at, now + max(0.0, grace_s))
        self._rest_at = min(self._rest_at, now + max(0.0, grace_s) / 2)
        self._end_at = min(self._end_at, now + max(0.0, grace_s) + max(0.0, abandon_after_s))
        self._shorten_children()
        if self.phase == "grace" and self._force_at <= now:
            self._force()
        self._arm()

    def begin(self, grace_s: float, abandon_after_s: float) -> None:
        """Set the deadlines and ask every member to stop."""
        now = self._loop.time()
        self._force_at = now + max(0.0, grace_s)
        self._end_at = self._force_at + max(0.0, abandon_after_s)
        self.ask()

    def ask(self) -> None:
        """Ask every member to stop; a task that foreign code started is asked only after its starter has ended."""
        body = self.scope.body
        if body is not None:
            body.deliver()
        first: list[Handle[object]] = []
        for member in self.scope.handles():
            if member.adopted and member.kind == "task":
                starter = member.starter()
                self._followers.setdefault(starter if starter is not None and starter.live else None, []).append(member)
            else:
                first.append(member)
        self._ask_all(iter(first))
        self._follow(None)

    def _ask_all(self, members: Iterator[Handle[object]]) -> None:
        """Ask the members in chunks, so that a large number of members does not stall the loop."""
        count = 0
        for member in itertools.islice(members, _CHUNK):
            member.ask()
            count += 1
        if count == _CHUNK:
            self._loop.call_soon(self._ask_all, members, context=contextvars.Context())

    def _follow(self, starter: CancelClaim | None) -> None:
        """Ask tasks whose starter has ended, after their owner, such as a task group, had time to cancel them."""
        followers = self._followers.pop(starter, None)
        if followers is not None:
            self._ask_later(_OWNERS_TICKS, followers)

    def _ask_later(self, ticks: int, members: list[Handle[object]]) -> None:
        if ticks:
            self._loop.call_soon(self._ask_later, ticks - 1, members, context=contextvars.Context())
            return
        for member in members:
            if member.task is not None and not member.task.cancelling():
                member.ask()

    def _ask_rest(self) -> None:
        """Ask the remaining tasks to stop, because the code that started them had enough time to end them."""
        followers, self._followers = self._followers, {}
        for members in followers.values():
            self._ask_later(0, members)

    def member_ended(self, member: Handle[Any], /) -> None:
        """Record that a member has ended."""
        kind = member.kind
        if not member.is_descendant:
            self._stopped[kind] += 1
        self._looking = self._strangers = None
        if kind == "process":
            self._processes += member.processes_ended
            if member.is_foreign_program:
                self._proven = False
        if member in self._overdue:
            self._overdue.remove(member)
            is_task = kind == "task"
            if not (is_task and self._ends_like_a_waiter()):
                self._name_forced(member)
            if not is_task:
                self._blockers -= 1
                self._release_waiters()
        elif member.was_killed and self.phase == "grace" and self._loop.time() >= self._force_at:
            self._name_forced(member)  # its reaper keeps the time of the grace period, too
            self._release_waiters()
        if member in self._followers:
            self._follow(member)

    def _name_forced(self, member: Handle[Any]) -> None:
        grace_s = self._force_at - self._began
        grace = f"{round(grace_s, 1 if grace_s >= 1 else 2):g} s"
        self._forced.append((member.name, member.overdue(grace) if grace_s >= _SHORTEST_GRACE_S else _NO_GRACE))

    def _ends_like_a_waiter(self) -> bool:
        """Return whether a task that ends now probably waited for a member or child scope that was forced."""
        return self._blockers > 0 or self._release_ticks > 0

    def _release_waiters(self) -> None:
        """Give tasks that waited for what has just ended the rest of this loop iteration and some more to end."""
        if not self._release_ticks:
            self._loop.call_soon(self._count_release, context=contextvars.Context())
        self._release_ticks = _LAST_TICKS + 1

    def _count_release(self) -> None:
        self._release_ticks -= 1
        if self._release_ticks:
            self._loop.call_soon(self._count_release, context=contextvars.Context())

    def take_over(self, receipt: StopReceipt) -> None:
        """Take over the receipt of a child scope that has ended."""
        self._stopped.update(
            task=receipt.stopped.tasks, thread=receipt.stopped.threads, process=receipt.stopped.programs
        )
        self._processes += receipt.stopped.processes
        self._forced.extend(zip(receipt.forced, receipt.force_reasons, strict=True))
        self._inherit(receipt)
        if self.phase != "grace":
            # Tasks that wait for the child are woken in the next iteration: one that ends in this one did not wait.
            self._loop.call_soon(self._release_waiters, context=contextvars.Context())

    def _inherit(self, receipt: StopReceipt) -> None:
        """Add the abandoned members and survivors of a child's receipt to this scope's receipt."""
        self._abandoned.extend(receipt.abandoned)
        self._survivors.extend(receipt.survivors)
        self._unattributed.extend(receipt.unattributed)
        self._unknown = self._unknown or receipt.outcome == "unknown"

    def report_unproven(self, result: TreeResult) -> None:
        """Record a process tree that could not be proven dead."""
        self._survivors.extend(result.survivors)
        self._unattributed.extend(result.unattributed)
        self._unknown = True

    @property
    def grace_left_s(self) -> float:
        """Remaining grace period, in seconds."""
        return max(0.0, self._force_at - self._loop.time())

    def finish_if_empty(self) -> None:
        """End the stop if the scope is empty and its processes are known to be gone."""
        if self.phase == "ended":
            return
        body = self.scope.body
        if body in self._followers and body is not None and not body.live:
            self._follow(body)
        threads = self.scope.unowned_threads()
        if threads and self._loop.time() < min(self._began + _UNOWNED_S, self._end_at):
            # They may be about to end, and they send no notification.
            self._loop.call_later(_UNOWNED_LOOK_S, self.finish_if_empty, context=contextvars.Context())
        elif self._killing is not None and not self._killing.done():
            return  # the roots are gone, but the kill has not reported on the rest yet
        elif self._prove() and self.scope.shut():
            self._end()

    def _prove(self) -> bool:
        """Whether the search for unobserved processes is complete; if not, start it and check again when it ends.

        Always True while a member is left.
        """
        if not self.scope.is_empty():
            return True
        if not self._proven and may_have_started(self.scope):
            self._kill_foreign([])
            return False
        if self._strangers is not None or self._is_inside_a_stop():
            return True
        if self._looking is None:
            self._looking = asked = object()
            look_soon(self._loop, self.scope.opened_ticks, functools.partial(self._on_look, asked))
        return False

    def _is_inside_a_stop(self) -> bool:
        parent = self.scope.parent
        return parent is not None and parent.stopping is not None

    def _on_look(self, asked: object, strangers: int) -> None:
        if asked is not self._looking:
            return  # a member has left since: another search runs, or will
        self._strangers = strangers
        self.finish_if_empty()

    def _kill_foreign(self, foreign: Sequence[ForeignHandle]) -> None:
        killing = kill_foreign(self.scope, foreign, self._end_at - self._loop.time())
        self._killing = self.scope.make_own_task(killing, "kill foreign processes")
        self._killing.add_done_callback(self._killed, context=contextvars.Context())

    def _killed(self, killing: asyncio.Task[int]) -> None:
        """Handle the end of the task that kills the programs of foreign code."""
        self._proven = True
        if killing.cancelled():
            self._unknown = True
        elif (error := killing.exception()) is not None:
            self._unknown = True
            self._loop.call_exception_handler(
                {"message": f"{killing.get_name()} in scope {self.scope.name!r} failed", "exception": error}
            )
        else:
            self._processes += killing.result()
        self.finish_if_empty()

    def _arm(self) -> None:
        if self.phase == "ended":
            return
        if self.phase in ("force", "last"):
            at = min(self._escalate_at, self._end_at)
        else:
            at = min(self._rest_at, self._force_at) if self._followers else self._force_at
        if self._timer is not None:
            if self._timer_at == at:
                return
            self._timer.cancel()
        self._timer_at = at  # kept here: some loops' handles forget it once it has fired
        self._timer = self._loop.call_at(at, self._tick, context=contextvars.Context())

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self.phase == "grace":
            if now < self._force_at:
                self._ask_rest()
            else:
                self._force()
        elif now < self._end_at:
            self._escalate()
        elif self.phase == "last":
            self._end_at = float("inf")
            self._abandon_tasks_in(self.scope.height() * _LAST_TICKS)
        else:
            self.give_up()
        self._arm()

    def _shorten_children(self) -> None:
        now = self._loop.time()
        grace_s = max(0.0, self._force_at - now)
        abandon_after_s = max(0.0, self._end_at - now - grace_s)
        for child in self.scope.children():
            child.on_loop(child.stop_with_parent, grace_s, abandon_after_s)

    def _force(self) -> None:
        for member in self.scope.handles():
            if member.kind != "task":
                member.end_if_over()
        if self.receipt is not None:
            return  # the loop had not been notified yet that all of them had ended
        with self.scope.gate:  # what foreign code starts is either entered before and killed here, or refused
            self.phase = "force"
        # If the loop was blocked, the kills that begin now still get their full time.
        self._end_at += max(0.0, self._loop.time() - self._force_at)
        self._ask_rest()
        self._overdue.update(self.scope.handles())
        self._blockers = sum(member.kind != "task" for member in self._overdue)
        for closer in self.scope.take_closers():
            closer.run()
        for member in self.scope.handles():
            member.force()
        foreign = foreign_programs(self.scope.handles())
        in_threads = any(member.kind == "thread" for member in self.scope.handles())
        if foreign or in_threads or may_have_started(self.scope) or self.scope.unowned_threads():
            self._kill_foreign(foreign)
        self._escalate_at = self._loop.time() + self._escalate_in_s

    def _escalate(self) -> None:
        for member in self.scope.handles():
            member.ask_again()
        body = self.scope.body
        if body is not None:
            body.redeliver()
        self._escalate_in_s = min(_LAST_ESCALATION_S, self._escalate_in_s * 2)
        self._escalate_at = self._loop.time() + self._escalate_in_s

    def give_up(self) -> None:
        """Abandon all members except tasks, because the deadline has passed; abandon the tasks soon after."""
        if self.phase in ("last", "ended"):
            return
        self.phase = "last"
        others = [member for member in self.scope.handles() if member.kind != "task" and not member.end_if_over()]
        children = self.scope.children()
        self._end_at = self._loop.time() + self.scope.height() * _LAST_S
        for child in children:
            child.on_loop(child.give_up)
        for member in others:
            self._abandon_member(member)
        if children or others:
            self.finish_if_empty()
            self._arm()
        else:  # a scope inside may have ended in this very turn
            self._end_at = float("inf")
            self._abandon_tasks_in(_LAST_TICKS)

    def _abandon_member(self, member: Handle[object]) -> None:
        self.scope.give_up_member(member)
        abandoned = member.abandon()
        if abandoned is not None:
            self._abandoned.append(abandoned)
            living = member.running()  # after: a call that ended meanwhile has returned its thread
            if living is not None:
                self.scope.leave_over(AbandonedMember(abandoned.name, member.started_at, living))
        if (unproven := member.unproven()) is not None:
            self.report_unproven(unproven)

    def _abandon_tasks_in(self, ticks: int) -> None:
        if ticks:
            self._loop.call_soon(self._abandon_tasks_in, ticks - 1, context=contextvars.Context())
        else:
            self.give_up_tasks()

    def give_up_tasks(self) -> None:
        """Abandon all remaining members, tasks included, and end the stop."""
        if self.phase == "ended":
            return
        self.scope.shut(by_force=True)
        for child in self.scope.children():
            child.on_loop(child.give_up, True)
            if not child.closed:
                self._abandoned.append(Abandoned(kind="task", name=f"scope {child.name} on another loop"))
                self.scope.give_up_member(child)
        for member in self.scope.handles():
            self._abandon_member(member)
        body = self.scope.body
        if body is not None and body.live:
            self._abandoned.append(body.abandoned())
            if body.task is not None:
                self.scope.leave_over(AbandonedMember(body.name, self.scope.opened_at, body.task))
            body.leave()
        if self._killing is not None and not self._killing.done():
            self._unattributed.append(UNHEARD)
            self._unknown = True
        self._end()

    def _end(self) -> None:
        self.phase = "ended"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        scope = self.scope
        for receipt in scope.survived:
            self._inherit(receipt)
        for result in scope.unproven_trees:
            self.report_unproven(result)
        for thread in scope.unowned_threads():
            self._abandoned.append(Abandoned(kind="thread", name=thread.name, stack=thread_stack(thread)))
            scope.leave_over(AbandonedMember(thread.name, 0.0, thread))
        if self._strangers is None and not self._is_inside_a_stop():  # the time is over: no search is waited for
            self._strangers = strangers(scope.opened_ticks)
        if self._strangers:
            self._unattributed.append(STRANGER)
            self._unknown = True
        cause = scope.interrupt.cause
        assert cause is not None
        outcome: Outcome = "gone"
        if self._unknown or self._survivors:
            outcome = "unknown"
        elif self._abandoned:
            outcome = "quarantined"
        self.receipt = StopReceipt(
            scope=scope.name,
            cause=cause,
            outcome=outcome,
            stopped=StopCounts(
                tasks=self._stopped["task"],
                threads=self._stopped["thread"],
                programs=self._stopped["process"],
                processes=self._processes,
            ),
            forced=tuple(name for name, _ in self._forced),
            force_reasons=tuple(reason for _, reason in self._forced),
            abandoned=tuple(self._abandoned),
            survivors=tuple(dict.fromkeys(self._survivors)),
            unattributed=tuple(self._unattributed),
            elapsed_s=self._loop.time() - self._began,
        )
        self._overdue.clear()
        scope.finish()
