"""How a scope is stopped: ask, wait for the grace, press, give up, and say in a receipt what became of everything.

It is driven by the loop's timers and by the members that leave, not by a task: nobody can cancel it, and it ends at
``end_at`` whatever the members do.

Phases
- ``grace``: each member was asked once; nothing is repeated, so that honest clean-up finishes.
- ``force``: closers ran, process trees are being killed; tasks are asked again with back-off from 1 to 100 ms.
- ``ended``: every member is gone or abandoned, and the receipt stands.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from holdfast.protocol.stopping import Abandoned, Outcome, StopReceipt, Tally
from holdfast.runtime.members import Handle, MemberKind
from holdfast.runtime.owned_processes import ProcessHandle
from holdfast.runtime.owned_tasks import TaskHandle
from holdfast.runtime.threads import thread_stack

if TYPE_CHECKING:
    from holdfast.runtime.membership import Membership
    from holdfast.runtime.processes import TreeResult

__all__ = ["Stopping"]

_FIRST_PRESS_S = 0.001
_LAST_PRESS_S = 0.1
_TICKS_PER_WAVE = 2
_CHUNK = 1_000
_UNOWNED_S = 0.05
_UNOWNED_LOOK_S = 0.005


class Stopping:
    """The stop of one scope. All methods on the scope's loop."""

    def __init__(self, scope: Membership) -> None:
        self.scope = scope
        self.phase: Literal["grace", "force", "ended"] = "grace"
        self.receipt: StopReceipt | None = None
        self._loop = scope._loop_here()
        self._began = self._loop.time()
        self._force_at = float("inf")
        self._end_at = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._press_in_s = _FIRST_PRESS_S
        self._press_at = 0.0
        self._pressed: dict[object, str] = {}
        self._stopped: Counter[str] = Counter()
        self._forced: list[str] = []
        self._abandoned: list[Abandoned] = []
        self._survivors: list[int] = []
        self._unknown = False

    def tighten(self, grace_s: float, kill_after_s: float) -> None:
        """End the grace and the stop no later than this, counted from now."""
        if self.phase == "ended":
            return
        now = self._loop.time()
        self._force_at = min(self._force_at, now + max(0.0, grace_s))
        self._end_at = min(self._end_at, now + max(0.0, grace_s) + max(0.0, kill_after_s))
        self._tell_scopes()
        if self.phase == "grace" and self._force_at <= now:
            self._force()
        self._arm()

    def begin(self, grace_s: float, kill_after_s: float) -> None:
        """Set the deadlines and tell every member."""
        now = self._loop.time()
        self._force_at = now + max(0.0, grace_s)
        self._end_at = self._force_at + max(0.0, kill_after_s)
        self.ask()

    def ask(self) -> None:
        """Tell every member once; what foreign code started comes after those who started it."""
        body = self.scope._body
        if body is not None:
            body.deliver()
        waves: dict[int, list[Handle[object]]] = {}
        first: list[Handle[object]] = []
        for member in self.scope._handles():
            if member.adopted and isinstance(member, TaskHandle):
                waves.setdefault(member.depth, []).append(member)
            else:
                first.append(member)
        self._ask_all(iter(first), waves)

    def _ask_all(self, members: Iterator[Handle[object]], waves: dict[int, list[Handle[object]]]) -> None:
        """Ask in chunks, so that many members do not stall the loop."""
        count = 0
        for member in itertools.islice(members, _CHUNK):
            member._ask()
            count += 1
        if count == _CHUNK:
            self._loop.call_soon(self._ask_all, members, waves, context=contextvars.Context())
        elif waves:
            self._later(_TICKS_PER_WAVE, waves)

    def _later(self, ticks: int, waves: dict[int, list[Handle[object]]]) -> None:
        if ticks:
            self._loop.call_soon(self._later, ticks - 1, waves, context=contextvars.Context())
            return
        for member in waves.pop(min(waves)):
            # Its owner may have cancelled it by now, as a task group does: once is enough.
            if member.task is not None and not member.task.cancelling():
                member._ask()
        if waves:
            self._later(_TICKS_PER_WAVE, waves)

    def left(self, kind: MemberKind, name: str, member: object) -> None:
        """A member has ended."""
        if kind != "scope":
            self._stopped[kind] += 1
        if self._pressed.pop(member, None) is not None:
            self._forced.append(name)

    def take_over(self, receipt: StopReceipt) -> None:
        """A child scope has ended with this receipt."""
        self._stopped.update(
            task=receipt.stopped.tasks, thread=receipt.stopped.threads, process=receipt.stopped.processes
        )
        self._forced.extend(receipt.forced)
        self._abandoned.extend(receipt.abandoned)
        self._survivors.extend(receipt.survivors)
        self._unknown = self._unknown or receipt.outcome == "unknown"

    def unproven(self, result: TreeResult) -> None:
        """A process tree could not be proven dead."""
        self._survivors.extend(result.survivors)
        self._unknown = True

    @property
    def grace_left_s(self) -> float:
        """What is left of the grace, in seconds."""
        return max(0.0, self._force_at - self._loop.time())

    def look(self) -> None:
        """End if nothing is left."""
        if self.phase == "ended":
            return
        threads = self.scope._unowned_threads()
        if threads and self._loop.time() < min(self._began + _UNOWNED_S, self._end_at):
            # They may be about to end, and nobody tells when they do.
            self._loop.call_later(_UNOWNED_LOOK_S, self.look, context=contextvars.Context())
        elif self.scope._shut():
            self._abandoned.extend(
                Abandoned(kind="thread", name=thread.name, stack=thread_stack(thread)) for thread in threads
            )
            self._end()

    def _arm(self) -> None:
        if self.phase == "ended":
            return
        at = self._force_at if self.phase == "grace" else min(self._press_at, self._end_at)
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick, context=contextvars.Context())

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self.phase == "grace":
            self._force()
        elif now >= self._end_at:
            self._give_up()
        else:
            self._press()
        self._arm()

    def _tell_scopes(self) -> None:
        now = self._loop.time()
        grace_s = max(0.0, self._force_at - now)
        kill_after_s = max(0.0, self._end_at - now - grace_s)
        for child in self.scope._children():
            child._on_loop(child._stop_here, grace_s, kill_after_s)

    def _force(self) -> None:
        self.phase = "force"
        for member in self.scope._handles():
            self._pressed[member] = member.name
        body = self.scope._body
        if body is not None and body.live:
            self._pressed[body] = body.name
        for closer in self.scope._take_closers():
            closer.run()
        for member in self.scope._handles():
            member._force()
        self._press_at = self._loop.time() + self._press_in_s

    def _press(self) -> None:
        for member in self.scope._handles():
            self._pressed.setdefault(member, member.name)
            member._press()
        body = self.scope._body
        if body is not None:
            body.redeliver()
        self._press_in_s = min(_LAST_PRESS_S, self._press_in_s * 2)
        self._press_at = self._loop.time() + self._press_in_s

    def _give_up(self) -> None:
        self.scope._shut(by_force=True)
        for child in self.scope._children():
            child._on_loop(child._give_up)
            if not child.closed:
                self._abandoned.append(Abandoned(kind="task", name=f"scope {child.name} on another loop"))
                self.scope._members.pop(child, None)
        for member in self.scope._handles():
            self.scope._members.pop(member, None)
            self.scope._adopted.pop(member, None)
            abandoned = member._abandon()
            if abandoned is not None:
                self._abandoned.append(abandoned)
            elif isinstance(member, ProcessHandle):
                self._unknown = True
                if member.process is not None:
                    self._survivors.append(member.process.pid)
        body = self.scope._body
        if body is not None and body.live:
            self._abandoned.append(body.abandoned())
        self._end()

    def _end(self) -> None:
        self.phase = "ended"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        scope = self.scope
        for receipt in scope._survived:
            self._abandoned.extend(receipt.abandoned)
            self._survivors.extend(receipt.survivors)
            self._unknown = self._unknown or receipt.outcome == "unknown"
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
            stopped=Tally(
                tasks=self._stopped["task"], threads=self._stopped["thread"], processes=self._stopped["process"]
            ),
            forced=tuple(self._forced),
            abandoned=tuple(self._abandoned),
            survivors=tuple(self._survivors),
            elapsed_s=self._loop.time() - self._began,
        )
        self._pressed.clear()
        scope._closed()
