"""An event loop on virtual time that lets a chooser pick the next step.

Invariants:

- `ExploredLoop` hands every runnable *actor* to its chooser. A task is an actor; the plain callbacks that an actor
  schedules (timers included) are one more actor, whose callbacks stay in order among themselves, as transports need it.
- Choice 0 is the step that became runnable first, as in asyncio; but steps that became runnable together stand in the
  order of their actors' age and not of the calls, so that walking a set of tasks does not make two runs differ.
- A number of choices identifies a schedule: the same choices give the same schedule.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextvars import Context, copy_context
from typing import Any, Literal, NoReturn, Protocol, TypeVar, TypeVarTuple

from holdfast.testing.explorer.controlled_threads import ControlledThread, ThreadController, strands_here
from holdfast.testing.explorer.failures import Deadlock, Livelock, NotExplorable
from holdfast.testing.explorer.virtual_loop import VirtualLoop

__all__ = ["Actor", "Chooser", "ExploredLoop", "LoopStep"]

_Task = asyncio.Task
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

# How asyncio names the callbacks that drive a task; the C step has no name.
_TASK_STEPS = frozenset({"step", "task_wakeup", "TaskWakeupMethWrapper", "__step", "__wakeup"})


class Actor:
    """Something that takes steps: a task, a thread, the callbacks that one actor scheduled, or the clock.

    Parameters:
        number: the actor's age: the first one is 0. Equal in two runs of one schedule.
        task: the task, for a task.
        scheduled_by: for callbacks, the actor that scheduled them.
    """

    __slots__ = ("callbacks", "is_clock", "number", "queue", "runnable", "scheduled_by", "steps", "strand", "task")

    def __init__(self, number: int, task: asyncio.Task[Any] | None, scheduled_by: Actor | None) -> None:
        self.number = number
        self.task = task
        self.scheduled_by = scheduled_by
        self.strand: ControlledThread | None = None
        self.is_clock = False
        self.callbacks: Actor | None = None
        self.queue: deque[LoopStep] = deque()
        self.runnable = False
        self.steps = 0

    @property
    def name(self) -> str:
        """The task's name, or whose callbacks these are."""
        if self.task is not None:
            return self.task.get_name()
        if self.strand is not None:
            return f"thread {self.strand.name}"
        if self.scheduled_by is not None:
            return f"callbacks of {self.scheduled_by.name}"
        return "the clock" if self.is_clock else "outside"


_NOBODY = Actor(0, None, None)


class LoopStep(asyncio.TimerHandle):
    """A handle that knows its actor, and in which step (``born``) and when (``since``) it became runnable."""

    __slots__ = ("actor", "born", "since")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: ExploredLoop,
        context: Context | None,
        actor: Actor,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = False
        self.actor = actor
        self.born = 0
        self.since = when

    def cancel(self) -> None:
        """Like asyncio's; the chooser is not offered the step any more."""
        if not self._cancelled:
            if self._scheduled:
                self._loop._timer_handle_cancelled(self)
            else:
                self._loop._stale = True
            self._cancelled = True
            self._callback = _nothing
            self._args = ()

    def overdue(self, steps: int) -> bool:
        """Whether it was runnable for more than `steps` steps."""
        return self._loop.steps - self.born > steps

    def __repr__(self) -> str:
        return f"<LoopStep of {self.actor.name!r}>"


class Chooser(Protocol):
    """Picks who goes next. One chooser serves all schedules of an exploration, one after the other."""

    def begin(self) -> bool:
        """Prepare for the next schedule; False when all are done."""
        ...

    def pick(self, runnable: Sequence[LoopStep]) -> int:
        """Return the index of the step to run. Called only when there are at least two."""
        ...

    def end(self, loop: ExploredLoop) -> None:
        """Learn from a schedule that is over; its trace is in the loop's ``choices``, ``widths`` and ``picked``."""
        ...


class ExploredLoop(VirtualLoop):
    """An asyncio loop whose chooser picks the next step among all that can run.

    Parameters:
        chooser: who picks.
        max_steps: `Livelock` is raised when more steps than this were taken.
        late_s: how late a step may be, in virtual seconds after it could run. While none would be later than that,
            letting the time pass to the next timer is one more choice.
        tasks: ``eager``: a new task takes its first step inside ``create_task``.
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
        """After each step: a number for how many steps each actor has taken."""
        self.recent: deque[Actor] = deque(maxlen=64)
        self.halted: Exception | None = None
        """The error that ends the schedule, although the running code may have caught it."""
        self.chosen: LoopStep | None = None
        """Who goes next, when a thread has chosen another than itself."""
        self._stepping = False
        self._stale = False
        self._state = 0
        self._unnamed = 0
        self._pick: Callable[[Sequence[LoopStep]], int] = chooser.pick
        self._by_task: dict[asyncio.Task[Any], Actor] = {}
        self._runnable: list[LoopStep] = []
        self._running_actor = self._new_actor(None, None)
        self.strands = ThreadController(self)
        self._clock: LoopStep | None = None
        self._late_s = late_s
        if late_s > 0:
            self._clock = LoopStep(0.0, self._pass_time, (), self, None, self._new_actor(None, None))
            self._clock.actor.is_clock = True
        if tasks == "eager":
            self.set_task_factory(_start_eagerly)

    def _new_actor(self, task: asyncio.Task[Any] | None, scheduled_by: Actor | None) -> Actor:
        actor = Actor(len(self.actors), task, scheduled_by)
        self.actors.append(actor)
        if task is not None:
            self._by_task[task] = actor
        return actor

    def _actor_of(self, callback: Callable[..., object]) -> Actor:
        task = getattr(callback, "__self__", None)
        if isinstance(task, _Task) and getattr(callback, "__name__", "step") in _TASK_STEPS:
            return self._by_task.get(task) or self._new_actor(task, None)
        return self._callbacks_of(self._running_actor)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Like asyncio's, but a task without a name gets the same one in each run of a schedule."""
        if options.get("name") is None:
            self._unnamed += 1
            options["name"] = f"task {self._unnamed}"
        task: asyncio.Task[Any]
        if self.get_task_factory() is None:
            self._check_closed()
            return _Task(coro, loop=self, **options)
        task = super().create_task(coro, **options)
        if task not in self._by_task and not task.done():
            self._new_actor(task, None)  # a factory of the test's own began it
        return task

    def _callbacks_of(self, actor: Actor) -> Actor:
        # Callbacks that callbacks schedule stay with them.
        if actor.task is None and actor.scheduled_by is not None:
            return actor
        if actor.callbacks is None:
            actor.callbacks = self._new_actor(None, actor)
        return actor.callbacks

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Like asyncio's; refuses other threads."""
        if self._closed:
            self._check_closed()
        if threading.get_ident() != self._home:
            self._refuse("call_soon was called from another thread than the loop's; use call_soon_threadsafe")
        step = LoopStep(0.0, callback, args, self, context, self._actor_of(callback))
        self._make_runnable(step)
        return step

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Like `call_soon`; also for the threads of the schedule, of which others may go before it returns."""
        if threading.get_ident() == self._home:
            return self.call_soon(callback, *args, context=context)
        strands = self.strands
        if strands_here() is not strands:
            self._refuse_thread()
        self._check_closed()
        step = LoopStep(0.0, callback, args, self, context, self._callbacks_of(self._running_actor))
        self._make_runnable(step)
        strands.pause()
        return step

    def _make_timer(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], context: Context | None
    ) -> asyncio.TimerHandle:
        return LoopStep(when, callback, args, self, context, self._callbacks_of(self._running_actor))

    def _make_runnable(self, handle: asyncio.Handle) -> None:
        assert isinstance(handle, LoopStep)
        actor = handle.actor
        if actor.runnable:
            actor.queue.append(handle)
            return
        actor.runnable = True
        handle.born = now = self.steps
        handle.since = self._now
        runnable = self._runnable
        at = len(runnable)
        number = actor.number
        while at and (before := runnable[at - 1]).born == now and before.actor.number > number:
            at -= 1
        runnable.insert(at, handle)

    def _take(self, at: int) -> LoopStep:
        step = self._runnable.pop(at)
        actor = step.actor
        actor.runnable = False
        while actor.queue and not actor.runnable:
            following = actor.queue.popleft()
            if not following.cancelled():
                self._make_runnable(following)
        return step

    def _drop_cancelled(self) -> None:
        self._stale = False
        at = 0
        while at < len(self._runnable):
            if self._runnable[at].cancelled():
                self._take(at)
            else:
                at += 1

    def _new_step(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], context: Context, actor: Actor
    ) -> LoopStep:
        return LoopStep(when, callback, args, self, context, actor)

    def _run_once(self) -> None:
        if self._stale:
            self._drop_cancelled()
        runnable = self._runnable
        if not runnable and not self._pass_time():
            raise Deadlock
        offered = runnable if self._clock is None else self._with_clock(runnable)
        at = 0 if len(offered) == 1 and self.chosen is None else self._next_of(offered)
        if at == len(runnable):
            self._count(offered[at].actor)
            self._pass_time()
            return
        step = self._take(at)
        self._running_actor = actor = step.actor
        self._count(actor)
        self.recent.append(actor)
        self._stepping = True
        step._run()
        self._stepping = False
        if self.halted is not None:
            raise self.halted

    def _with_clock(self, runnable: list[LoopStep]) -> list[LoopStep]:
        """Return the runnable steps, and the clock if none of them would be too late."""
        assert self._clock is not None
        when = self._next_timer()
        return [*runnable, self._clock] if when is not None and when <= runnable[0].since + self._late_s else runnable

    def _next_of(self, offered: Sequence[LoopStep]) -> int:
        """Return the index of the step to run; a thread may have chosen already."""
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

    def _count(self, actor: Actor) -> None:
        """Count a step of this actor.

        Raises:
            Livelock: the step is one too many.
        """
        self.steps += 1
        if self.steps > self.max_steps:
            self.halt(Livelock())
            raise Livelock
        actor.steps += 1
        self._state ^= hash((actor.number, actor.steps))
        self.states.append(self._state)

    def close(self) -> None:
        """Like asyncio's; drops what keeps the loop in cycles, so that it goes without the garbage collector."""
        super().close()
        self.strands.unwind()
        for actor in self.actors:
            actor.callbacks = None
        self.actors = []
        self.recent = deque()
        self._by_task = {}
        self._runnable = []
        self._running_actor = _NOBODY
        self._clock = None
        self.set_task_factory(None)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Like asyncio's on the runtime's own executor, whose threads the schedule has; others are refused."""
        from holdfast.runtime.adoption.tasks import PoolExecutor

        if executor is None and isinstance(getattr(self, "_default_executor", None), PoolExecutor):
            return asyncio.BaseEventLoop.run_in_executor(self, None, func, *args)
        self._refuse_thread()

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of this loop that are not done, oldest first."""
        return [task for task in self._by_task if not task.done()]

    def left_over(self) -> str:
        """Describe what the test left over and should not have, for people."""
        threads = sum(strand.must_end for strand in self.strands.left())
        parts = (super().left_over(), f"{threads} of its threads" if threads else "")
        return " and ".join(part for part in parts if part)

    def described(self) -> list[str]:
        """Describe the unfinished tasks and threads and where each waits."""
        blocked = [self.strands.blocked] if self.strands.blocked else []
        return [*super().described(), *blocked, *(strand.described() for strand in self.strands.left())]

    def unretrieved(self) -> list[dict[str, Any]]:
        """Return errors from callbacks, and from finished tasks whose result was never retrieved."""
        found = list(self.errors)
        for task in self._by_task:
            if task._log_traceback:
                text = f"task {task.get_name()!r} failed and its result was never retrieved"
                found.append({"message": text, "exception": task.exception()})
        return found + self.strands.unretrieved()

    def _note_threads(self) -> None:
        """Do nothing: no thread can wake an explored loop."""

    def _settle(self) -> None:
        pick, clock = self._pick, self._clock
        traced = len(self.choices)
        self._pick, self._clock = _first, None
        try:
            super()._settle()
        finally:
            self._pick, self._clock = pick, clock
            for trace in (self.choices, self.widths, self.picked):
                del trace[traced:]

    def _can_run(self) -> bool:
        if self._stale:
            self._drop_cancelled()
        return bool(self._runnable)

    def unwind(self, steps: int = 10_000) -> None:
        """Cancel what is left and let it end in asyncio's order."""
        self._pick = _first
        self._clock = None
        self.halted = self.chosen = None
        super().unwind(steps)
        self.halted = self.chosen = None
        self.strands.unwind()

    def _refuse_thread(self) -> NoReturn:
        self._refuse(
            "a real thread was used under the explorer, where schedules must be repeatable; start it with "
            "holdfast.testing.start_thread, or in a scope: scope.spawn(…, on='thread'), or run that part as a "
            "coroutine; or test it with run_virtual (executors) or asyncio.run (threads); "
            "races between real threads are found by frontrun"
        )

    def _refuse(self, text: str) -> NoReturn:
        error = NotExplorable(text)
        self.halt(error)
        raise error

    def halt(self, error: Exception) -> None:
        """End the schedule with this error after the present step, even if the error is caught."""
        if self.halted is None:
            self.halted = error

    def begin_now(self, task: asyncio.Task[Any]) -> None:
        """Take the new task's first step at once, inside the step that created it."""
        actor = self._by_task[task]
        step = self._take(next(at for at, step in enumerate(self._runnable) if step.actor is actor))
        outside, creator, stepping = self._running_actor, asyncio.current_task(self), self._stepping
        self._running_actor, self._stepping = actor, True
        if creator is not None:
            asyncio.tasks._leave_task(self, creator)
        try:
            step._run()
        finally:
            self._running_actor, self._stepping = outside, stepping
            if creator is not None:
                asyncio.tasks._enter_task(self, creator)


def _start_eagerly(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    # Not asyncio's own factory of 3.12: with that a task would take its first step before the loop knows it, as if
    # it were its creator; and a schedule is the same on each version of Python.
    assert isinstance(loop, ExploredLoop)
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    loop.begin_now(task)
    return task


def _nothing() -> None:
    """Do nothing: the callback of a cancelled step, so that it keeps nothing alive."""


def _first(_: Sequence[LoopStep]) -> int:
    return 0
