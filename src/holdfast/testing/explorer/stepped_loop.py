"""An event loop in virtual time, in which a chooser picks the next step.

Invariants:

- `SteppedLoop` offers every runnable *actor* to its chooser. Each task is an actor. The plain callbacks that an actor
  schedules, including timers, together form another actor; they run in order, as transports require.
- Choice 0 is the step that became runnable first, as in asyncio. Steps that became runnable together are ordered by the
  age of their actors, not by the order of the calls, so that iterating over a set of tasks gives the same schedule.
- A list of choices identifies a schedule: the same choices give the same schedule.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Literal, NoReturn, Protocol

from holdfast.testing.asyncio_internals import StepHandle, is_result_unretrieved
from holdfast.testing.explorer.failures import Deadlock, Livelock, NotExplorable
from holdfast.testing.explorer.virtual_loop import VirtualLoop

__all__ = ["Actor", "Chooser", "LoopStep", "SteppedLoop"]

_Task = asyncio.Task

# How asyncio names the callbacks that drive a task; the C step has no name.
_TASK_STEPS = frozenset({"step", "task_wakeup", "TaskWakeupMethWrapper", "__step", "__wakeup"})


class Actor:
    """Something that takes steps: a task, a thread, the callbacks that one actor scheduled, or the clock.

    Parameters:
        number: position in the order of creation, from 0; the same in all runs of a schedule.
        task: the task that takes the steps; None for all other kinds of actors.
        scheduled_by: the actor that scheduled the callbacks; None for all other kinds of actors.
    """

    __slots__ = ("callbacks", "is_clock", "number", "queue", "runnable", "scheduled_by", "steps", "task")

    def __init__(self, number: int, task: asyncio.Task[Any] | None, scheduled_by: Actor | None) -> None:
        self.number = number
        self.task = task
        self.scheduled_by = scheduled_by
        self.is_clock = False
        self.callbacks: Actor | None = None
        self.queue: deque[LoopStep] = deque()
        self.runnable = False
        self.steps = 0

    @property
    def name(self) -> str:
        """The task's name, or a description if the actor is not a task."""
        if self.task is not None:
            return self.task.get_name()
        if self.scheduled_by is not None:
            return f"callbacks of {self.scheduled_by.name}"
        return "the clock" if self.is_clock else "outside"


_NOBODY = Actor(0, None, None)


class LoopStep(StepHandle):
    """A handle with its actor, and the step number (``born``) and time (``since``) at which it became runnable."""

    __slots__ = ()

    actor: Actor
    loop: SteppedLoop

    def on_cancel(self) -> None:
        """Mark the loop's runnable steps as stale, so that this step is not offered to the chooser."""
        self.loop.stale = True

    def overdue(self, steps: int) -> bool:
        """Return whether this step has been runnable for more than `steps` steps of the loop."""
        return self.loop.steps - self.born > steps

    def __repr__(self) -> str:
        return f"<LoopStep of {self.actor.name!r}>"


class Chooser(Protocol):
    """Strategy that picks the next step. One chooser serves all schedules of an exploration, one after the other."""

    def begin(self) -> bool:
        """Prepare for the next schedule; return False if all schedules have been run."""
        ...

    def pick(self, runnable: Sequence[LoopStep]) -> int:
        """Return the index of the step to run. Called only if at least two steps can run."""
        ...

    def end(self, loop: SteppedLoop) -> None:
        """Learn from the trace of a finished schedule: ``loop.choices``, ``loop.widths`` and ``loop.picked``."""
        ...


class SteppedLoop(VirtualLoop):
    """An asyncio loop whose chooser picks the next step among all that can run.

    Parameters:
        chooser: strategy that picks the next step.
        max_steps: maximum number of steps; a further step raises `Livelock`.
        late_s: maximum time, in virtual seconds, by which a step that can run may be delayed. If advancing the time to
            the next timer would delay no step by more than this, advancing the time is one more choice.
        tasks: how new tasks start. With ``eager``, a new task takes its first step inside ``create_task``.
    """

    def __init__(
        self,
        chooser: Chooser,
        *,
        max_steps: int,
        late_s: float = 0.0,
        tasks: Literal["ordinary", "eager"] = "ordinary",
    ) -> None:
        super().__init__(max_steps=max_steps)
        self.choices: list[int] = []
        self.widths: list[int] = []
        self.picked: list[int] = []
        self.actors: list[Actor] = []
        self.states: list[int] = []
        """For each step, a hash of the step counts of all actors after that step."""
        self.recent: deque[Actor] = deque(maxlen=64)
        self.halted: Exception | None = None
        """The error that ends the schedule, even if the running code catches this error."""
        self.chosen: LoopStep | None = None
        """The next step, if a thread of the schedule has already chosen a step of another actor."""
        self.stepping = False
        """Whether a step is being taken."""
        self.stale = False
        """Whether a runnable step was cancelled."""
        self._is_closed = False
        self._state = 0
        self._unnamed = 0
        self._pick: Callable[[Sequence[LoopStep]], int] = chooser.pick
        self._by_task: dict[asyncio.Task[Any], Actor] = {}
        self.runnable: list[LoopStep] = []
        """One step of each actor that can run; the first to become runnable comes first."""
        self.running_actor = self.new_actor(None, None)
        self.clock: LoopStep | None = None
        """The step that advances the time; None if ``late_s`` is 0."""
        self._late_s = late_s
        if late_s > 0:
            self.clock = LoopStep(0.0, self.pass_time, (), self, None, self.new_actor(None, None))
            self.clock.actor.is_clock = True
        if tasks == "eager":
            self.set_task_factory(_start_eagerly)

    def new_actor(self, task: asyncio.Task[Any] | None, scheduled_by: Actor | None) -> Actor:
        """Create an actor, add it to the loop's actors, and return it."""
        actor = Actor(len(self.actors), task, scheduled_by)
        self.actors.append(actor)
        if task is not None:
            self._by_task[task] = actor
        return actor

    def _actor_of(self, callback: Callable[..., object]) -> Actor:
        task = getattr(callback, "__self__", None)
        if isinstance(task, _Task) and getattr(callback, "__name__", "step") in _TASK_STEPS:
            return self._by_task.get(task) or self.new_actor(task, None)
        return self.callbacks_of(self.running_actor)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Create a task as asyncio does; a task without a name gets the same name in each run of a schedule."""
        if options.get("name") is None:
            self._unnamed += 1
            options["name"] = f"task {self._unnamed}"
        task: asyncio.Task[Any]
        if self.get_task_factory() is None:
            self.check_open()
            return _Task(coro, loop=self, **options)
        task = super().create_task(coro, **options)
        if task not in self._by_task and not task.done():
            self.new_actor(task, None)  # the test's own task factory created it
        return task

    def callbacks_of(self, actor: Actor) -> Actor:
        """Return the actor for the callbacks that this actor schedules."""
        # Callbacks that a callback schedules belong to the callback's own actor.
        if actor.task is None and actor.scheduled_by is not None:
            return actor
        if actor.callbacks is None:
            actor.callbacks = self.new_actor(None, actor)
        return actor.callbacks

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback as asyncio does, but refuse calls from other threads."""
        if self._is_closed:
            self.check_open()
        if threading.get_ident() != self.home:
            self.refuse("call_soon was called from another thread than the loop's; use call_soon_threadsafe")
        step = LoopStep(0.0, callback, args, self, context, self._actor_of(callback))
        self.make_runnable(step)
        return step

    def make_timer(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], context: Context | None
    ) -> LoopStep:
        """Return a timer that belongs to the actor for the running actor's callbacks."""
        return LoopStep(when, callback, args, self, context, self.callbacks_of(self.running_actor))

    def make_runnable(self, handle: LoopStep) -> None:  # type: ignore[override]
        """Offer a step to the chooser, once the earlier steps of the same actor have run."""
        actor = handle.actor
        if actor.runnable:
            actor.queue.append(handle)
            return
        actor.runnable = True
        handle.born = now = self.steps
        handle.since = self.now
        runnable = self.runnable
        at = len(runnable)
        number = actor.number
        while at and (before := runnable[at - 1]).born == now and before.actor.number > number:
            at -= 1
        runnable.insert(at, handle)

    def take(self, at: int) -> LoopStep:
        """Remove and return the runnable step at index ``at``, and offer the next step of the same actor."""
        step = self.runnable.pop(at)
        actor = step.actor
        actor.runnable = False
        while actor.queue and not actor.runnable:
            following = actor.queue.popleft()
            if not following.cancelled():
                self.make_runnable(following)
        return step

    def drop_cancelled(self) -> None:
        """Remove runnable steps that were cancelled."""
        self.stale = False
        at = 0
        while at < len(self.runnable):
            if self.runnable[at].cancelled():
                self.take(at)
            else:
                at += 1

    def run_step(self) -> None:
        """Run the chosen step, or advance the time."""
        if self.stale:
            self.drop_cancelled()
        runnable = self.runnable
        if not runnable and not self.pass_time():
            raise Deadlock
        offered = runnable if self.clock is None else self.with_clock(runnable)
        at = 0 if len(offered) == 1 and self.chosen is None else self.next_of(offered)
        if at == len(runnable):
            self.count(offered[at].actor)
            self.pass_time()
            return
        step = self.take(at)
        self.running_actor = actor = step.actor
        self.count(actor)
        self.recent.append(actor)
        self.stepping = True
        step.run()
        self.stepping = False
        if self.halted is not None:
            raise self.halted

    def with_clock(self, runnable: list[LoopStep]) -> list[LoopStep]:
        """Return the runnable steps, and also the clock if advancing the time would delay no step beyond ``late_s``."""
        assert self.clock is not None
        when = self.next_timer()
        return [*runnable, self.clock] if when is not None and when <= runnable[0].since + self._late_s else runnable

    def next_of(self, offered: Sequence[LoopStep]) -> int:
        """Return the index of the step to run, which a thread of the schedule may already have chosen."""
        chosen, self.chosen = self.chosen, None
        if chosen is not None:
            return next(at for at, step in enumerate(offered) if step is chosen)
        if len(offered) == 1:
            return 0
        at = self._pick(offered)
        self.choices.append(at)
        self.widths.append(len(offered))
        self.picked.append(offered[at].actor.number)
        return at

    def count(self, actor: Actor) -> None:
        """Count a step of this actor.

        Raises:
            Livelock: if this step exceeds ``max_steps``.
        """
        self.steps += 1
        if self.steps > self.max_steps:
            self.halt(Livelock())
            raise Livelock
        actor.steps += 1
        self._state ^= hash((actor.number, actor.steps))
        self.states.append(self._state)

    def close(self) -> None:
        """Close the loop, and break its reference cycles, so that it is freed without the garbage collector."""
        super().close()
        self._is_closed = True
        for actor in self.actors:
            actor.callbacks = None
        self.actors = []
        self.recent = deque()
        self._by_task = {}
        self.runnable = []
        self.running_actor = _NOBODY
        self.clock = None
        self.set_task_factory(None)

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of this loop that are not done, oldest first."""
        return [task for task in self._by_task if not task.done()]

    def unretrieved(self) -> list[dict[str, Any]]:
        """Return errors from callbacks, and from finished tasks whose result was never retrieved."""
        found = list(self.errors)
        for task in self._by_task:
            if is_result_unretrieved(task):
                text = f"task {task.get_name()!r} failed and its result was never retrieved"
                found.append({"message": text, "exception": task.exception()})
        return found

    def note_threads(self) -> None:
        """Do nothing: no thread can wake a stepped loop."""

    def settle(self) -> None:
        """Run everything that can still run at this instant, in asyncio's order, without adding to the trace."""
        pick, clock = self._pick, self.clock
        traced = len(self.choices)
        self._pick, self.clock = _first, None
        try:
            super().settle()
        finally:
            self._pick, self.clock = pick, clock
            for trace in (self.choices, self.widths, self.picked):
                del trace[traced:]

    def can_run(self) -> bool:
        """Whether a step can run at this instant."""
        if self.stale:
            self.drop_cancelled()
        return bool(self.runnable)

    def unwind(self, steps: int = 10_000) -> None:
        """Cancel the remaining tasks and let them end, in asyncio's order."""
        self._pick = _first
        self.clock = None
        self.halted = self.chosen = None
        super().unwind(steps)
        self.halted = self.chosen = None

    def refuse_thread(self) -> NoReturn:
        """Refuse the use of a real thread, with an error that names the alternatives."""
        self.refuse(
            "a real thread was used under the explorer, where schedules must be repeatable; start it with "
            "holdfast.testing.start_thread, or in a scope: scope.spawn(…, on='thread'), or run that part as a "
            "coroutine; or test it with run_virtual (executors) or asyncio.run (threads); "
            "races between real threads are found by frontrun"
        )

    def refuse(self, text: str) -> NoReturn:
        """Raise `NotExplorable`, and end the schedule with this error even if the test catches it."""
        error = NotExplorable(text)
        self.halt(error)
        raise error

    def halt(self, error: Exception) -> None:
        """End the schedule with ``error`` after the current step, even if the test catches the error."""
        if self.halted is None:
            self.halted = error

    def begin_now(self, task: asyncio.Task[Any]) -> None:
        """Run the first step of a new task at once, inside the step that created the task."""
        actor = self._by_task[task]
        step = self.take(next(at for at, step in enumerate(self.runnable) if step.actor is actor))
        outside, creator, stepping = self.running_actor, asyncio.current_task(self), self.stepping
        self.running_actor, self.stepping = actor, True
        if creator is not None:
            asyncio._leave_task(self, creator)
        try:
            step.run()
        finally:
            self.running_actor, self.stepping = outside, stepping
            if creator is not None:
                asyncio._enter_task(self, creator)


def _start_eagerly(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    # Not asyncio's own factory of 3.12: with it, a task would take its first step before the loop knows the task, so
    # the step would count as its creator's. Also, a schedule is then the same on every version of Python.
    assert isinstance(loop, SteppedLoop)
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    loop.begin_now(task)
    return task


def _first(_: Sequence[LoopStep]) -> int:
    return 0
