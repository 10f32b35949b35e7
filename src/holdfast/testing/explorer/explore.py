"""Run an async test under many schedules, and report a failing schedule as numbers that replay it."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from holdfast.protocol.supervision import is_seconds
from holdfast.testing.explorer.coverage import States
from holdfast.testing.explorer.explored_loop import ExploredLoop
from holdfast.testing.explorer.isolation_guard import collect_some_garbage, garbage_left, real_world_closed
from holdfast.testing.explorer.patching import swapped_in
from holdfast.testing.explorer.replay import Replay
from holdfast.testing.explorer.schedule import NOT_REPEATED, ScheduleOutcome, run_one
from holdfast.testing.explorer.shrinker import shrink as shrunk_choices
from holdfast.testing.explorer.stepped_loop import Chooser
from holdfast.testing.explorer.strategies import (
    ExhaustiveChooser,
    NearChooser,
    PctChooser,
    RandomChooser,
    ReplayChooser,
)
from holdfast.testing.explorer.virtual_loop import VirtualLoop

__all__ = ["ExplorationReport", "explore", "run_virtual"]

T = TypeVar("T")

_CHOOSERS = ("random", "pct", "exhaustive")
_TASKS = ("ordinary", "eager")
_MAX_STEPS = 20_000
_SHRINKING_RUNS = 300
_SHRINKING_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorationReport:
    """Coverage of an exploration that found no failure.

    A *state* is how many steps each task, each task's callbacks and each thread have taken so far. A state that two
    schedules reach in different orders counts once. Because equal states may hold different data, ``states`` is a lower
    bound.

    Parameters:
        schedules: number of schedules run.
        distinct: number of different schedules.
        exhausted: whether every possible schedule was run; always False with a chooser other than ``exhaustive``.
        states: number of different states visited.
        states_exact: whether ``states`` is exact; it is an estimate above about 260,000.
        steps: total number of steps.
        choices: number of steps with two or more choices.
        longest: maximum number of choices in one schedule.
        elapsed_s: real time, in seconds.
    """

    schedules: int
    distinct: int
    exhausted: bool
    states: int
    states_exact: bool
    steps: int
    choices: int
    longest: int
    elapsed_s: float

    @property
    def schedules_per_s(self) -> float:
        """Speed, in schedules per second of real time."""
        return self.schedules / self.elapsed_s if self.elapsed_s else 0.0

    def __str__(self) -> str:
        end = "all there are" if self.exhausted else f"{self.distinct:,} different"
        about = "" if self.states_exact else "about "
        return (
            f"{self.schedules:,} schedules ({end}), {about}{self.states:,} states, {self.choices:,} choices, "
            f"{self.schedules_per_s:,.0f} schedules/s"
        )


def explore(
    test: Callable[[], Coroutine[Any, Any, object]],
    *,
    schedules: int = 300,
    chooser: Literal["random", "pct", "exhaustive"] = "random",
    seed: int = 0,
    depth: int = 3,
    replay: Sequence[int] | Replay | None = None,
    max_steps: int = _MAX_STEPS,
    late_s: float = 0.0,
    tasks: Literal["ordinary", "eager"] = "ordinary",
    shrink: bool = True,
) -> ExplorationReport:
    """Run ``test()`` on a new event loop for each schedule, and raise `ScheduleFailure` for the first that fails.

    A schedule fails if the test or a callback raises, if the test deadlocks, if the schedule takes more than
    ``max_steps`` steps, if tasks or threads are unfinished when the test ends, or if the error of a task or thread is
    never retrieved. Time is virtual. To check that the test is deterministic, the explorer repeats each failing
    schedule once, and also the 1st, 2nd, 4th, 8th … schedule. Call `explore` outside any running event loop.

    Parameters:
        test: async function under test; called without arguments for each schedule, while the schedule's loop runs.
        schedules: maximum number of schedules to run. With ``exhaustive``, `ExplorationReport.exhausted` is true if
            these were all possible schedules.
        chooser: strategy that chooses the schedules: ``random``, ``pct`` (finds orders that random choice rarely finds)
            or ``exhaustive`` (for small tests that do not poll in a loop).
        seed: random seed for ``random`` and ``pct``; the same seed gives the same schedules.
        depth: for ``pct``, the maximum number of ordering constraints that a bug needs in order to occur.
        replay: the only schedule to run, as the numbers that a `ScheduleFailure` prints or as its ``recorded`` replay.
            A `Replay` overrides ``max_steps``, ``late_s`` and ``tasks``. With None, the chooser picks the schedules.
        max_steps: maximum number of steps in a schedule; a longer schedule fails as a livelock.
        late_s: maximum time, in virtual seconds, by which a step that can run may be delayed. With 0, time passes only
            when nothing can run; otherwise, timers that are due within this time may fire before steps that are ready.
        tasks: how new tasks start. With ``eager``, a new task takes its first step at once, as with
            `asyncio.eager_task_factory`, but on every version of Python.
        shrink: whether to run the test up to 300 more times (100,000 steps in total) to find a simpler schedule with
            the same failure.

    Raises:
        ScheduleFailure: if a schedule fails; its ``__cause__`` is the exception that the test raised, if any.
        ValueError: if ``schedules``, ``depth`` or ``max_steps`` is below 1, ``late_s`` is not a number of seconds (0 or
            more), ``replay`` contains a number below 0, or ``chooser`` or ``tasks`` is unknown.
        TypeError: if ``test`` is not callable or does not return a coroutine, or if ``schedules``, ``depth``,
            ``max_steps`` or a number in ``replay`` is not an integer.
        BaseException: if the test raises an error other than an `Exception`, such as the error of a pytest time limit.
            The error is raised unchanged and ends the exploration. Errors from ``pytest.fail`` and ``pytest.raises``
            fail the schedule instead.
    """
    __tracebackhide__ = True
    if not callable(test):
        raise TypeError(f"explore() needs an `async def` function, which it calls for each schedule; got {test!r}")
    for name, number in (("schedules", schedules), ("depth", depth), ("max_steps", max_steps)):
        if not isinstance(number, int):
            raise TypeError(f"{name} is {number!r}; it must be a whole number")
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
    if not is_seconds(late_s):
        raise ValueError(f"late_s is {late_s!r}; it must be a number of seconds, 0 or more")
    for name, value, known in (("chooser", chooser, _CHOOSERS), ("tasks", tasks, _TASKS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be {' or '.join(map(repr, known))}")
    if isinstance(replay, Replay):
        max_steps, late_s, tasks = replay.max_steps, replay.late_s, replay.tasks
    elif replay is not None:
        _check_numbers(replay)

    def run(picker: Chooser) -> ScheduleOutcome:
        return run_one(ExploredLoop(picker, max_steps=max_steps, late_s=late_s, tasks=tasks), test, picker)

    exhaustive: ExhaustiveChooser | None = None
    picker: Chooser
    if replay is not None:
        schedules = 1
        picker = ReplayChooser(list(replay.choices if isinstance(replay, Replay) else replay))
        label = "replay"
    elif chooser == "exhaustive":
        picker = exhaustive = ExhaustiveChooser()
        label = "exhaustive"
    elif chooser == "pct":
        picker = PctChooser(depth, seed)
        label = f"pct, depth {depth}, seed {seed}"
    else:
        picker = RandomChooser(seed)
        label = f"random, seed {seed}"

    began = time.perf_counter()
    count = steps = choices = longest = 0
    seen: set[int] = set()
    states = States()
    with real_world_closed(), swapped_in(), garbage_left():
        while count < schedules and picker.begin():
            collect_some_garbage()
            outcome = run(picker)
            count += 1
            steps += outcome.steps
            choices += len(outcome.choices)
            longest = max(longest, len(outcome.choices))
            states.note(outcome.states)
            if exhaustive is None:
                seen.add(hash(tuple(outcome.choices)))
            if outcome.foreign:
                assert outcome.error is not None
                raise outcome.error
            is_sample = count & (count - 1) == 0 and replay is None
            if (outcome.failed or is_sample) and outcome.kind not in NOT_REPEATED:
                outcome = outcome.compared_with(run(ReplayChooser(outcome.choices)))
            if outcome.failed:
                shrunk = ""
                if shrink and replay is None and outcome.kind not in NOT_REPEATED:
                    outcome, shrunk = _made_short(outcome, run)
                again_with = "".join(
                    f"{name}={value!r}, "
                    for name, value, usual in (
                        ("late_s", late_s, 0.0),
                        ("tasks", tasks, "ordinary"),
                        ("max_steps", max_steps, _MAX_STEPS),
                    )
                    if value != usual
                )
                recorded = Replay(
                    test=_name_of(test),
                    choices=tuple(outcome.choices),
                    late_s=late_s,
                    tasks=tasks,
                    max_steps=max_steps,
                    kind=outcome.kind,
                    text=outcome.text,
                )
                if isinstance(replay, Replay) and outcome.kind == "nondeterminism" and (new := replay.changed_since()):
                    outcome.text += f". The replay is of other versions: {new}"
                raise outcome.failure(
                    schedules=count, label=label, again_with=again_with, shrunk=shrunk, recorded=recorded
                ) from outcome.error
    return ExplorationReport(
        schedules=count,
        distinct=len(seen) if exhaustive is None else count,
        exhausted=exhaustive is not None and exhaustive.exhausted,
        states=len(states),
        states_exact=states.exact,
        steps=steps,
        choices=choices,
        longest=longest,
        elapsed_s=time.perf_counter() - began,
    )


def _made_short(outcome: ScheduleOutcome, run: Callable[[Chooser], ScheduleOutcome]) -> tuple[ScheduleOutcome, str]:
    """Return the simplest outcome found that fails in the same way, and a description of how it was found."""
    best, wanted, steps = outcome, outcome.signature, 0

    def attempt(candidate: Sequence[int]) -> Sequence[int] | None:
        nonlocal best, steps
        if steps >= _SHRINKING_STEPS:
            return None
        found = run(NearChooser(candidate))
        steps += found.steps
        if found.signature != wanted:
            return None
        best = found
        return found.choices

    shrunk = shrunk_choices(outcome.choices, attempt, runs=_SHRINKING_RUNS)
    if best is outcome:
        return outcome, ""
    # The outcome found last need not be the simplest, so the shrunk choices run once more.
    best = run(ReplayChooser(shrunk.choices))
    if best.signature != wanted:
        return outcome, ""
    return best, f"; {len(outcome.choices)} choices made {len(shrunk.choices)} by {shrunk.runs} more runs"


def _check_numbers(replay: Sequence[int]) -> None:
    if not all(type(choice) is int for choice in replay):
        raise TypeError(
            f"replay is {replay!r}; it must be the list of numbers that a failure prints, or Replay.load(path)"
        )
    if any(choice < 0 for choice in replay):
        raise ValueError(f"replay is {replay!r}; its numbers must be 0 or more")


def _name_of(test: Callable[..., object]) -> str:
    return f"{getattr(test, '__module__', '?')}:{getattr(test, '__qualname__', repr(test))}"


def run_virtual(coro: Coroutine[Any, Any, T], *, max_steps: int = 1_000_000) -> T:
    """Run one coroutine in asyncio's own order in virtual time, and return the coroutine's result.

    ``asyncio.sleep(3600)`` takes no real time; ``loop.time()`` advances by an hour. ``await asyncio.sleep(0.001)``
    resumes once all other tasks are waiting. Executor calls work, and time stands still during each call. Sockets and
    subprocesses do not work.

    Parameters:
        coro: the coroutine to run, in a task named ``main``.
        max_steps: maximum number of steps; a longer run fails as a livelock.

    Raises:
        ScheduleFailure: if the run deadlocks, livelocks or uses real I/O, if tasks are unfinished when the coroutine
            ends, or if a callback or a task that was never awaited failed.
        BaseException: if the coroutine raises; its exception is raised unchanged.
    """
    outcome = run_one(VirtualLoop(max_steps=max_steps), lambda: coro, None)
    if outcome.kind == "error":
        assert outcome.error is not None
        raise outcome.error
    if outcome.failed:
        raise outcome.failure() from outcome.error
    result: T = outcome.result
    return result
