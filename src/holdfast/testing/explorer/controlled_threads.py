"""Threads of an explored schedule: real threads that run one at a time and switch only at the explorer's primitives.

A *strand* is such a thread. While code that uses threads is explored, the explorer's primitives replace the
interpreter's (see `holdfast.testing.explorer.patching`), so that the explorer also chooses which thread runs next.

Invariants

- Either the loop's thread runs or exactly one strand does; all others wait for their carrier's ``go``. At a switch
  point, a strand chooses the next step. If the step belongs to another actor, the strand hands control back to the
  loop's thread, which runs the step.
- A strand is an actor of the loop. Choices of strands are in the same list as all other choices, so they are replayed
  and shrunk in the same way.
- The loop's thread may pause in the middle of a step, at a switch point. Then only strands run, until the loop's thread
  is chosen to continue, or until the condition that the loop's thread waits for is met.
- No switch point lies inside a built-in mutex that was created before the test, so no such mutex is ever contended;
  locks that the test creates are the explorer's (see `holdfast.testing.explorer.thread_primitives`).
- When a schedule is over, every wait in a remaining strand raises `Unwound`, until the strand has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from _thread import LockType, allocate_lock
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Final

from holdfast.runtime import thread_pool as pool_module
from holdfast.testing.asyncio_internals import is_result_unretrieved
from holdfast.testing.explorer.failures import Deadlock, NotExplorable
from holdfast.testing.explorer.stepped_loop import Actor, LoopStep, SteppedLoop

__all__ = ["ControlledThread", "ThreadController", "Unwound", "end_carriers", "strands_here"]

_PATIENCE_S: Final = 30.0
"""Maximum real time, in seconds, that a strand may take from one switch point to the next."""
_UNWINDING_TRIES: Final = 100
_start_plainly = pool_module.start_plainly


class Unwound(BaseException):
    """The schedule is over, and this thread will never be woken."""


class _Carrier:
    """A real thread that runs strands, one after another."""

    def __init__(self) -> None:
        self.go: LockType = allocate_lock()
        self.back: LockType = allocate_lock()
        self.go.acquire()
        self.back.acquire()
        self.work: Callable[[], object] | None = None
        self.thread = threading.Thread(target=self._carry, name="explored thread", daemon=True)
        _start_plainly(self.thread)

    def _carry(self) -> None:
        while True:
            self.go.acquire()
            work, self.work = self.work, None
            if work is None:
                return
            work()
            del work
            self.back.release()

    def end(self) -> None:
        """End the thread, which must not be running a strand, and wait until it has ended."""
        self.go.release()
        self.thread.join()


_idle_carriers: list[_Carrier] = []
_by_thread: dict[int, ControlledThread] = {}


def end_carriers() -> None:
    """End the idle threads after an exploration."""
    while _idle_carriers:
        _idle_carriers.pop().end()


def strands_here() -> ThreadController | None:
    """Return the controller of the schedule that this thread belongs to; None outside a schedule."""
    loop = asyncio._get_running_loop()
    if loop is not None:
        return getattr(loop, "strands", None)
    strand = _by_thread.get(threading.get_ident())
    return None if strand is None else strand.strands


class ControlledThread(Actor):
    """One thread of a schedule.

    Parameters:
        strands: the controller of the thread's schedule.
        fn: the function to run in the thread.
        name: display name of the thread.
        must_end: whether the schedule fails if the test ends before this thread.
        thread: object that `threading.current_thread` returns in this thread; None selects the real thread.
        future: future for the result or error of the thread; None if the result is not awaited.
    """

    __slots__ = (
        "carrier", "ended", "ending", "fn", "future", "joining", "label", "must_end", "strands", "thread", "timer",
        "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        strands: ThreadController,
        fn: Callable[[], object],
        name: str,
        *,
        must_end: bool,
        thread: object | None = None,
        future: asyncio.Future[Any] | None = None,
    ) -> None:
        super().__init__(len(strands.loop.actors), None, None)
        strands.loop.actors.append(self)
        self.strands = strands
        self.fn = fn
        self.label = name
        self.must_end = must_end
        self.thread = thread
        self.future = future
        self.carrier: _Carrier | None = None
        self.ended = False
        self.ending = False
        self.joining: dict[ControlledThread, None] = {}
        self.timer: LoopStep | None = None
        self.waits_for: object = None

    @property
    def name(self) -> str:
        """The name under which the thread appears in lists of actors."""
        return f"thread {self.label}"

    @property
    def ident(self) -> int | None:
        """The identifier of the real thread; None before the thread first runs and after it has ended."""
        return None if self.carrier is None else self.carrier.thread.ident

    def described(self) -> str:
        """Return the thread's name, its stack (innermost frame last), and what the thread waits for."""
        why = "" if self.waits_for is None else f", waits for {self.waits_for}"
        frame = sys._current_frames().get(self.ident) if self.ident is not None else None
        where = _places(traceback.extract_stack(frame)) if frame is not None else "not started"
        return f"thread {self.label!r} at {where}{why}"


def _places(stack: traceback.StackSummary) -> str:
    """Format where a thread is, without frames of the explorer, `threading` and `contextvars`."""
    beside = (
        os.path.join(os.path.dirname(__file__), name)
        for name in ("isolation_guard.py", "patching.py", "runtime_primitives.py", "thread_primitives.py")
    )
    ours = {__file__, threading.__file__, sys.modules["contextvars"].__file__, *beside}
    shown = [entry for entry in stack if entry.filename not in ours]
    return " > ".join(f"{entry.name} ({os.path.basename(entry.filename)}:{entry.lineno})" for entry in shown[-8:])


class ThreadController:
    """The threads of one schedule, and the schedule's own instances of the runtime's per-process singletons.

    Parameters:
        loop: the schedule's loop.
    """

    def __init__(self, loop: SteppedLoop) -> None:
        self.loop = loop
        self.all: list[ControlledThread] = []
        self.running: ControlledThread | None = None
        self.over = False
        self.blocked = ""
        """Description of where the loop's own thread is deadlocked; empty if it is not."""
        self._own: dict[str, Any] = {}
        self._context = Context()
        self._loop_left = False  # whether the loop's thread is paused in the middle of a step
        self._left_by = loop.running_actor  # the actor of that step
        self._may_go_on = False  # whether the loop's thread could continue the step
        self._going_on: LoopStep | None = None

    def start(self, strand: ControlledThread) -> None:
        """Start a new thread of the schedule."""
        self.all.append(strand)
        self._let_go(strand)
        self.pause()

    def unretrieved(self) -> list[dict[str, Any]]:
        """Return the errors of failed threads, if their result was never retrieved."""
        return [
            {
                "message": f"thread {strand.label!r} failed and its result was never retrieved",
                "exception": strand.future.exception(),
            }
            for strand in self.all
            if strand.future is not None and strand.future.done() and is_result_unretrieved(strand.future)
        ]

    def left(self) -> list[ControlledThread]:
        """Return the strands that have not ended."""
        return [strand for strand in self.all if not strand.ended]

    def the_only(self, what: str, make: Callable[[], Any]) -> Any:
        """Return this schedule's own instance of a per-process singleton."""
        found = self._own.get(what)
        if found is None:
            found = self._own[what] = make()
        return found

    # switch points, on any thread of the schedule

    def pause(self) -> None:
        """Let other threads run before the caller continues."""
        strand = self.running
        loop = self.loop
        if strand is None:
            if self.all and loop.stepping and not self._loop_left:
                self._switch(may_go_on=True)
        elif not strand.ending:
            if not loop.runnable and not self._loop_left and loop.clock is None and loop.steps < loop.max_steps:
                loop.steps += 1  # nothing else could run
                return
            self._let_go(strand)
            if not self._goes_on(strand):
                self._hand_back(strand)

    def wait(
        self, ready: Callable[[], object], waiting: dict[ControlledThread, None], what: object, timeout_s: float | None
    ) -> bool:
        """Block the caller until ``ready()`` returns true; return False on a timeout.

        Parameters:
            ready: the awaited condition; called again whenever `wake` is called with ``waiting``.
            waiting: the strands that wait for this condition.
            what: description of the awaited condition, shown in reports of a deadlock.
            timeout_s: timeout in virtual seconds; None waits indefinitely.
        """
        loop = self.loop
        until = None if timeout_s is None else loop.now + timeout_s
        strand = self.running
        if strand is None:
            return self._block_loop(ready, what, until)
        while not ready():
            if strand.ending:
                raise Unwound
            if until is not None and loop.now >= until:
                return False
            waiting[strand] = None
            strand.waits_for = what
            if until is not None:
                strand.timer = self._new_step(strand, until)
                loop.set_timer(strand.timer)
            self._hand_back(strand)
            strand.waits_for = strand.timer = None
            waiting.pop(strand, None)
        return True

    def wake(self, waiting: dict[ControlledThread, None]) -> None:
        """Wake these strands, so that they check their condition again."""
        if not self.over:
            for strand in waiting:
                self._let_go(strand)
        waiting.clear()

    def sleep(self, delay_s: float) -> None:
        """Sleep in virtual time; on the loop's own thread, no time passes, but other threads may run."""
        if self.running is None or delay_s <= 0:
            self.pause()
        else:
            self.wait(bool, {}, f"{delay_s:g} s to pass", delay_s)

    # on a strand

    def _goes_on(self, strand: ControlledThread) -> bool:
        """Choose the next step as the loop's thread would; return True if the step belongs to this strand."""
        loop = self.loop
        if loop.halted is not None or (self._loop_left and not self._may_go_on):
            return False  # a loop that blocks checks by itself whether it can continue
        try:
            if self._loop_left:
                offered = self._offered()
            else:
                if loop.stale:
                    loop.drop_cancelled()
                offered = loop.runnable if loop.clock is None else loop.with_clock(loop.runnable)
            step = offered[loop.next_of(offered)]
            if step.actor is not strand:
                loop.chosen = step
                return False
            loop.take(_at(loop.runnable, step))
            loop.count(strand)
        except Exception as error:
            loop.halt(error)
            return False
        loop.recent.append(strand)
        return True

    def _hand_back(self, strand: ControlledThread) -> None:
        carrier = strand.carrier
        assert carrier is not None
        carrier.back.release()
        carrier.go.acquire()
        if strand.ending:
            raise Unwound

    def _run(self, strand: ControlledThread) -> None:
        """Run a strand from start to end, on the carrier's thread."""
        me = threading.get_ident()
        _by_thread[me] = strand
        try:
            Context().run(strand.fn)
        except Unwound:
            pass
        except BaseException as error:
            text = f"thread {strand.label!r} raised {type(error).__name__}: {error}"
            self.loop.call_exception_handler({"message": text, "exception": error})
        finally:
            del _by_thread[me]
            strand.ended = True
            strand.fn = _nothing
            self.wake(strand.joining)

    # on the loop's thread

    def _new_step(self, strand: ControlledThread, when: float = 0.0) -> LoopStep:
        return LoopStep(when, self._resume, (strand,), self.loop, self._context, strand)

    def _let_go(self, strand: ControlledThread) -> None:
        if strand.timer is not None:
            strand.timer.cancel()  # even if it has fired: one step is enough
        self.loop.make_runnable(self._new_step(strand))

    def _resume(self, strand: ControlledThread) -> None:
        """Let a strand run to its next switch point; called for each of the strand's steps."""
        loop = self.loop
        carrier = strand.carrier
        if carrier is None:
            carrier = strand.carrier = self._take_carrier()
            carrier.work = lambda: self._run(strand)
            carrier.thread.name = strand.label
        before, loop.running_actor = loop.running_actor, strand
        self.running = strand
        came_back = False
        try:
            carrier.go.release()
            came_back = carrier.back.acquire(timeout=_PATIENCE_S)
        finally:
            self.running = None
            loop.running_actor = before
            if not came_back:
                strand.ended = True  # for this schedule; its real thread is abandoned
        if not came_back:
            loop.halt(
                NotExplorable(
                    f"{strand.described()}: it has been there for {_PATIENCE_S:g} s of real time, so it waits for "
                    "something that no schedule can bring about (a lock, an event or a queue that was made outside of "
                    "the explored test, a file, a socket); make locks and queues inside the test function, "
                    "give it an in-memory double for the rest, or test that part with asyncio.run; races between "
                    "threads on objects made outside are found by frontrun"
                )
            )
        elif strand.ended:
            strand.carrier = None
            _idle_carriers.append(carrier)

    def _take_carrier(self) -> _Carrier:
        if _idle_carriers:
            return _idle_carriers.pop()
        asyncio._set_running_loop(None)  # so that no thread of the schedule starts it
        try:
            return _Carrier()
        finally:
            asyncio._set_running_loop(self.loop)

    def _switch(self, *, may_go_on: bool) -> bool:
        """Run strands in the middle of a step until the loop's thread is chosen.

        If the loop's thread cannot continue yet (``may_go_on`` is false), run at most one strand, and return True if
        a strand ran.
        """
        loop = self.loop
        runnable = loop.runnable
        if loop.halted is not None:
            raise loop.halted
        self._loop_left = True
        self._may_go_on = may_go_on
        self._left_by = loop.running_actor
        try:
            while True:
                offered = self._offered()
                if not offered:
                    return False
                at = loop.next_of(offered)
                strand = offered[at].actor
                if not isinstance(strand, ControlledThread):
                    return False
                step = loop.take(_at(runnable, offered[at]))
                loop.count(step.actor)
                loop.recent.append(step.actor)
                self._resume(strand)
                if loop.halted is not None:
                    raise loop.halted
                if not may_go_on:
                    return True
        finally:
            self._loop_left = False

    def _offered(self) -> list[LoopStep]:
        """Return the steps that can run in the middle of a step of the loop."""
        loop = self.loop
        if loop.stale:
            loop.drop_cancelled()
        offered = [step for step in loop.runnable if isinstance(step.actor, ControlledThread)]
        if offered and self._may_go_on:
            offered.insert(0, self._own_step())
        return offered

    def _own_step(self) -> LoopStep:
        loop = self.loop
        if self._going_on is None:
            self._going_on = LoopStep(0.0, _nothing, (), loop, self._context, self._left_by)
        self._going_on.actor = self._left_by
        self._going_on.born = loop.steps
        self._going_on.since = loop.now
        return self._going_on

    def _block_loop(self, ready: Callable[[], object], what: object, until: float | None) -> bool:
        loop = self.loop
        while not ready():
            if self._switch(may_go_on=False):
                continue
            when = loop.next_timer()
            if until is not None and (when is None or when > until):
                loop.now = max(loop.now, until)
                return False
            if when is None:
                self.blocked = f"the loop's own thread at {_places(traceback.extract_stack())}, waits for {what}"
                loop.halt(Deadlock())
                raise Deadlock
            loop.pass_time()
        return True

    def unwind(self) -> None:
        """Mark the schedule as over, and end the threads that still wait."""
        self.over = True
        for strand in self.all:
            strand.ending = True
            for _ in range(_UNWINDING_TRIES):
                if strand.ended:
                    break
                if strand.carrier is None:
                    strand.ended = True  # it never began
                else:
                    self._resume(strand)
        self.all.clear()
        self._own.clear()
        self._going_on = None


def _at(steps: Sequence[LoopStep], wanted: LoopStep) -> int:
    return next(at for at, step in enumerate(steps) if step is wanted)


def _nothing() -> None:
    """Do nothing: the work of an ended strand."""
