"""Run an async test under many schedules, and hand back the numbers that repeat the one that failed."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from holdfast.testing.choosers import ExhaustiveChooser, PctChooser, RandomChooser, ReplayChooser, ReplayMismatch
from holdfast.testing.failures import NotExplorable, ScheduleFailure, describe_task, show_replay
from holdfast.testing.loop import Actor, Chooser, Deadlock, ExploredLoop, Livelock, VirtualLoop

__all__ = ["Report", "explore", "run_virtual"]

T = TypeVar("T")

_FORBIDDEN_EVENTS = frozenset(
    {
        "_thread.start_new_thread",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "socket.bind",
        "socket.connect",
        "socket.getaddrinfo",
        "socket.sendto",
        "subprocess.Popen",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an exploration that found nothing has covered.

    Parameters:
        schedules: how many were run.
        distinct: how many of them differ.
        exhausted: every schedule there is was run (only the exhaustive chooser can tell).
        steps: steps taken in all.
        longest: the most choices in one schedule.
        elapsed_s: real time, in seconds.
    """

    schedules: int
    distinct: int
    exhausted: bool
    steps: int
    longest: int
    elapsed_s: float

    @property
    def schedules_per_s(self) -> float:
        """Speed, in schedules per second of real time."""
        return self.schedules / self.elapsed_s if self.elapsed_s else 0.0


def explore(
    test: Callable[[], Coroutine[Any, Any, object]],
    *,
    schedules: int = 300,
    chooser: Literal["random", "pct", "exhaustive"] = "random",
    seed: int = 0,
    depth: int = 3,
    replay: Sequence[int] | None = None,
    max_steps: int = 20_000,
    late_s: float = 0.0,
    tasks: Literal["ordinary", "eager"] = "ordinary",
) -> Report:
    """Run ``test()`` on a fresh loop for each schedule, and fail with the first schedule that fails.

    A schedule fails when the test raises, a callback raises, nothing can run any more, it does not end, tasks are left
    over, or a task failed and nobody asked for its result. Time is virtual. Each failure is repeated once to see that
    the test is deterministic. Call it outside of any running loop.

    Parameters:
        test: makes the coroutine; called anew for each schedule, inside the running loop.
        schedules: at most so many. With ``exhaustive``, see ``Report.exhausted`` for whether that were all.
        chooser: ``random``, ``pct`` (for orders that a fair dice hardly finds) or ``exhaustive`` (small models that
            do not wait in a loop).
        seed: for ``random`` and ``pct``; the same seed gives the same schedules.
        depth: for ``pct``: how many orderings the bug needs.
        replay: the numbers of a `ScheduleFailure`; runs this one schedule only.
        max_steps: a longer schedule fails as a livelock.
        late_s: how late a step may be, in virtual seconds after it could run. With 0, time passes only when nothing
            can run; with more, deadlines up to so long may overtake work that could still be done.
        tasks: ``eager``: a new task takes its first step at once, as with `asyncio.eager_task_factory`.

    Raises:
        ScheduleFailure: a schedule failed; its ``__cause__`` is the test's exception.
        ValueError: ``schedules`` or ``depth`` is below 1.
    """
    if schedules < 1:
        raise ValueError(f"schedules is {schedules}; it must be at least 1")

    def make_loop(picker: Chooser) -> ExploredLoop:
        return ExploredLoop(picker, max_steps=max_steps, late_s=late_s, tasks=tasks)

    exhaustive: ExhaustiveChooser | None = None
    picker: Chooser
    if replay is not None:
        schedules = 1
        picker = ReplayChooser(list(replay))
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
    count = steps = longest = 0
    seen: set[int] = set()
    with _real_world_closed(), _garbage_left():
        while count < schedules and picker.begin():
            _collect_some_garbage()
            outcome = _run_one(make_loop(picker), test, picker)
            count += 1
            steps += outcome.steps
            longest = max(longest, len(outcome.choices))
            if exhaustive is None:
                seen.add(hash(tuple(outcome.choices)))
            unsure = outcome.failed or (count == 1 and exhaustive is None and replay is None)
            if unsure and outcome.kind not in ("nondeterminism", "not_explorable"):
                again = _run_one(make_loop(repeat := ReplayChooser(outcome.choices)), test, repeat)
                outcome = outcome.compared_with(again)
            if outcome.failed:
                again_with = "".join(
                    f"{name}={value!r}, "
                    for name, value, usual in (("late_s", late_s, 0.0), ("tasks", tasks, "ordinary"))
                    if value != usual
                )
                raise outcome.failure(schedules=count, label=label, again_with=again_with) from outcome.error
    return Report(
        schedules=count,
        distinct=len(seen) if exhaustive is None else count,
        exhausted=exhaustive is not None and exhaustive.exhausted,
        steps=steps,
        longest=longest,
        elapsed_s=time.perf_counter() - began,
    )


def run_virtual(coro: Coroutine[Any, Any, T], *, max_steps: int = 1_000_000) -> T:
    """Run one coroutine in asyncio's own order on virtual time, and return its result.

    ``asyncio.sleep(3600)`` takes no time; ``loop.time()`` says an hour has passed. ``await asyncio.sleep(0.001)`` is
    "until all others wait". Executor calls work, and time stands still meanwhile; sockets and processes do not.

    Parameters:
        coro: runs as the task ``main``.
        max_steps: a longer run fails as a livelock.

    Raises:
        ScheduleFailure: deadlock, livelock, tasks left over, errors in callbacks or in tasks nobody asked.
        BaseException: whatever the coroutine raises, as it is.
    """
    outcome = _run_one(VirtualLoop(max_steps=max_steps), lambda: coro, None)
    if outcome.kind == "error":
        assert outcome.error is not None
        raise outcome.error
    if outcome.failed:
        raise outcome.failure() from outcome.error
    result: T = outcome.result
    return result


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """One schedule's trace and end. ``kind`` is empty when it passed."""

    kind: Any = ""
    text: str = ""
    error: BaseException | None = None
    tasks: tuple[str, ...] = ()
    result: Any = None
    steps: int = 0
    choices: list[int]
    widths: list[int]
    picked: list[int]
    actors: list[Actor]

    @property
    def failed(self) -> bool:
        return bool(self.kind)

    def failure(self, *, schedules: int = 1, label: str = "", again_with: str = "") -> ScheduleFailure:
        replay = list(self.choices)
        while replay and not replay[-1]:
            replay.pop()  # after the numbers, a replay takes the first choice anyway
        origin = ""
        if label:
            origin = (
                f"  schedule {schedules} ({label}), {self.steps} steps; to see it again: "
                f"explore(..., {again_with}replay={show_replay(replay)})"
            )
        return ScheduleFailure(
            self.kind, self.text, replay=replay, schedules=schedules, tasks=self.tasks, origin=origin
        )

    def compared_with(self, again: _Outcome) -> _Outcome:
        """This outcome, or one that tells that the same choices led elsewhere."""
        for at, (width, picked) in enumerate(zip(self.widths, self.picked, strict=True)):
            if at >= len(again.widths):
                return self._differs(f"the second time it ended before choice {at}")
            if (width, picked) != (again.widths[at], again.picked[at]):
                was, now = self.actors[picked].name, again.actors[again.picked[at]].name
                return self._differs(
                    f"at choice {at}, first {was} of {width} could run, then {now} of {again.widths[at]}"
                )
        if (self.kind, type(self.error)) != (again.kind, type(again.error)) or len(again.widths) != len(self.widths):
            first, second = (one.text or "it passed" for one in (self, again))
            return self._differs(f"first: {first}; then: {second}")
        return self

    def _differs(self, text: str) -> _Outcome:
        return _Outcome(
            kind="nondeterminism",
            text=f"the same choices led elsewhere: {text}. {_NONDETERMINISM_HINT}",
            error=self.error,
            steps=self.steps,
            choices=self.choices,
            widths=self.widths,
            picked=self.picked,
            actors=self.actors,
        )


_NONDETERMINISM_HINT = (
    "Look for state kept between runs, the real clock, randomness, or walking a set of objects; "
    "make everything inside the test function, take time from the loop or a VirtualClock, and use lists or dicts"
)


def _run_one(loop: VirtualLoop, test: Callable[[], Coroutine[Any, Any, Any]], picker: Chooser | None) -> _Outcome:
    if events._get_running_loop() is not None:
        loop.close()
        raise RuntimeError("a loop is running already; call explore() and run_virtual() from a plain function")
    explored = loop if isinstance(loop, ExploredLoop) else None
    outcome = _Outcome(
        choices=explored.choices if explored else [],
        widths=explored.widths if explored else [],
        picked=explored.picked if explored else [],
        actors=explored.actors if explored else [],
    )
    try:
        try:
            main = loop.run_main(test)
        except Deadlock:
            outcome.kind = "deadlock"
            outcome.text = "nothing can run and no timer is set, but these wait"
        except Livelock:
            outcome.kind = "livelock"
            outcome.text = f"not over after {loop.max_steps} steps{_busiest(explored)}; these are unfinished"
        except NotExplorable as error:
            outcome.kind, outcome.text, outcome.error = "not_explorable", str(error), error
        except ReplayMismatch as error:
            outcome.kind, outcome.text = "nondeterminism", f"{error}. {_NONDETERMINISM_HINT}"
        else:
            _judge(loop, main, outcome)
        outcome.steps = loop.steps
        left = loop.unfinished()
        if outcome.kind in ("deadlock", "livelock", "leak"):
            outcome.tasks = tuple(describe_task(task) for task in left)
        if explored is not None:
            outcome.choices, outcome.widths = list(explored.choices), list(explored.widths)
            outcome.picked = list(explored.picked)
            if picker is not None and outcome.kind != "nondeterminism":
                try:
                    picker.end(explored)
                except ReplayMismatch as error:
                    outcome.kind, outcome.text = "nondeterminism", f"{error}. {_NONDETERMINISM_HINT}"
        loop.unwind()
    finally:
        loop.close()
    return outcome


def _judge(loop: VirtualLoop, main: asyncio.Task[Any], outcome: _Outcome) -> None:
    """Fill in how a schedule ended whose main task is done."""
    if main.cancelled():
        outcome.kind, outcome.text = "error", "the test was cancelled"
        outcome.error = asyncio.CancelledError()
        return
    error = main.exception()
    if error is not None:
        outcome.kind, outcome.error = "error", error
        outcome.text = _told(error)
        return
    outcome.result = main.result()
    left = loop.unfinished()
    if left:
        outcome.kind, outcome.text = "leak", f"the test is over, but {len(left)} of its tasks are not"
        return
    troubles = loop.unretrieved()
    if troubles:
        first = troubles[0]
        outcome.error = first.get("exception")
        outcome.kind = "callback" if "handle" in first else "unretrieved"
        outcome.text = str(first.get("message", "")) + (f": {outcome.error!r}" if outcome.error is not None else "")


def _told(error: BaseException) -> str:
    """The error in one line; of a group, its first leaf as well."""
    text = f"{type(error).__name__}: {error}"
    leaf = error
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return text if leaf is error else f"{text}, first {type(leaf).__name__}: {leaf}"


def _busiest(loop: ExploredLoop | None) -> str:
    if loop is None or not loop.recent:
        return ""
    names = [actor.name for actor in loop.recent]
    ranked = sorted(dict.fromkeys(names), key=names.count, reverse=True)[:5]
    return f" (the last {len(names)} were taken by {', '.join(ranked)})"


# Keeping the garbage collector out: what it frees in the middle of a schedule may cancel timers or run callbacks

_MUCH_GARBAGE = 20_000


@contextmanager
def _garbage_left() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # what was there before need not be looked at between schedules
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def _collect_some_garbage() -> None:
    if gc.get_count()[0] > _MUCH_GARBAGE:
        gc.collect()


# Keeping real threads, processes and sockets out

_audit_installed = False
_start_thread = threading.Thread.start


def _explored_loop() -> ExploredLoop | None:
    loop = events._get_running_loop()
    return loop if isinstance(loop, ExploredLoop) else None


def _audit(event: str, _: tuple[Any, ...]) -> None:
    if event in _FORBIDDEN_EVENTS and (loop := _explored_loop()) is not None:
        loop._refuse(
            f"{event}: the explored test reaches for the operating system, which no schedule can repeat; "
            "hand it an in-memory double, or test that part with asyncio.run"
        )


def _guarded_start(thread: threading.Thread) -> None:
    if (loop := _explored_loop()) is not None:
        loop._refuse_thread()
    _start_thread(thread)


@contextmanager
def _real_world_closed() -> Iterator[None]:
    global _audit_installed
    if not _audit_installed:
        _audit_installed = True
        sys.addaudithook(_audit)
    before = threading.Thread.start
    threading.Thread.start = _guarded_start  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = before  # type: ignore[method-assign]
