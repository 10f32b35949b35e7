"""Run one schedule, classify its outcome, and check that the same choices lead to the same outcome."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from holdfast.errors import Interrupted
from holdfast.testing.explorer.controlled_threads import strands_here
from holdfast.testing.explorer.explored_loop import ExploredLoop
from holdfast.testing.explorer.failures import (
    Deadlock,
    Livelock,
    NotExplorable,
    ScheduleFailure,
    show_replay,
)
from holdfast.testing.explorer.replay import Replay
from holdfast.testing.explorer.shrinker import stripped
from holdfast.testing.explorer.stepped_loop import Actor, Chooser
from holdfast.testing.explorer.strategies import ReplayMismatch
from holdfast.testing.explorer.virtual_loop import VirtualLoop

__all__ = ["NOT_REPEATED", "ScheduleOutcome", "run_one"]

NOT_REPEATED = frozenset({"nondeterminism", "not_explorable"})
"""Kinds of failure for which the schedule is neither run again nor shortened."""
_SHOWN_STEPS = 40
_ASYNCIO = os.path.dirname(asyncio.__file__)


@dataclass(slots=True, kw_only=True)
class ScheduleOutcome:
    """Trace and outcome of one schedule.

    Parameters:
        kind: kind of failure, as in `ScheduleFailure`; empty if the schedule passed.
        text: description of the failure.
        error: the error that the test or a callback raised, if any.
        tasks: descriptions of the unfinished tasks and where they wait.
        went: names of the actors that took the last steps, oldest first.
        result: the value that the test returned.
        steps: number of steps taken.
        elapsed_s: elapsed virtual time, in seconds.
        choices: for each step with two or more choices, the index of the picked choice.
        widths: for each step with two or more choices, the number of choices.
        picked: for each step with two or more choices, the index of the picked actor in ``actors``.
        actors: all actors, in order of creation.
        states: for each step, a hash of the step counts of all actors after that step.
    """

    kind: Any = ""
    text: str = ""
    error: BaseException | None = None
    tasks: tuple[str, ...] = ()
    went: tuple[str, ...] = ()
    result: Any = None
    steps: int = 0
    elapsed_s: float = 0.0
    choices: list[int]
    widths: list[int]
    picked: list[int]
    actors: list[Actor]
    states: list[int]

    @property
    def failed(self) -> bool:
        """Whether the schedule failed."""
        return bool(self.kind)

    @property
    def foreign(self) -> bool:
        """Whether the error, such as a pytest time limit or `KeyboardInterrupt`, must end the exploration."""
        if self.error is None:
            return False
        leaf = _first_leaf(self.error)
        return not isinstance(leaf, (Exception, asyncio.CancelledError, Interrupted)) and not _is_pytests_failure(leaf)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Key that is the same for equal failures: the kind, and the type and place of the first error."""
        leaf = None if self.error is None else _first_leaf(self.error)
        place = leaf.__traceback__ if leaf is not None else None
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = (place.tb_frame.f_code.co_filename, place.tb_lineno) if place is not None else None
        return self.kind, type(leaf), where

    def failure(
        self,
        *,
        schedules: int = 1,
        label: str = "",
        again_with: str = "",
        shrunk: str = "",
        recorded: Replay | None = None,
    ) -> ScheduleFailure:
        """Return the error that reports this outcome.

        Parameters:
            schedules: number of schedules that were run, including the failing schedule.
            label: description of the chooser that made the choices.
            again_with: further arguments that `explore` needs for the replay.
            shrunk: description of how the choices were shortened; empty if they were not shortened.
            recorded: the replay of the failure, for the error's ``recorded``.
        """
        replay = stripped(self.choices)
        origin = ""
        if label:
            again = (
                "no replay: the same choices need not lead there again"
                if self.kind == "nondeterminism"
                else f"to see it again: explore(..., {again_with}replay={show_replay(replay)})"
            )
            origin = f"{_told_steps(self.went)}  schedule {schedules} ({label}{shrunk}), {self.steps} steps; {again}"
        return ScheduleFailure(
            self.kind,
            self.text,
            replay=replay,
            schedules=schedules,
            tasks=self.tasks,
            origin=origin,
            recorded=recorded,
        )

    def compared_with(self, again: ScheduleOutcome) -> ScheduleOutcome:
        """Return this outcome, or a ``nondeterminism`` failure if ``again``, the second outcome, differs."""
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
        if self.states != again.states:
            at = next(
                (at for at, (was, now) in enumerate(zip(self.states, again.states, strict=False)) if was != now),
                min(len(self.states), len(again.states)),
            )
            was, now = self._who_took(at), again._who_took(at)
            return self._differs(f"step {at + 1} was taken by {was}, and the second time by {now}")
        if self.elapsed_s != again.elapsed_s:
            return self._differs(f"it took {self.elapsed_s!r} s of virtual time, the second time {again.elapsed_s!r} s")
        return self

    def _who_took(self, at: int) -> str:
        """Return the name of the actor that took a step, derived from how the step changed the state."""
        if at >= len(self.states):
            return "no actor: it was over"
        change = self.states[at] ^ (self.states[at - 1] if at else 0)
        return next(
            actor.name
            for actor in self.actors
            for steps in range(1, actor.steps + 1)
            if hash((actor.number, steps)) == change
        )

    def _differs(self, text: str) -> ScheduleOutcome:
        return replace(
            self,
            kind="nondeterminism",
            text=f"the test is not deterministic, the same choices led elsewhere: {text}. {_NONDETERMINISM_HINT}",
            tasks=(),
        )


def _told_steps(went: Sequence[str]) -> str:
    """Format the actors of the last steps as one line, with a count for consecutive repeats."""
    if not went:
        return ""
    runs = [(name, sum(1 for _ in group)) for name, group in groupby(went)]
    shown = [name if count == 1 else f"{name} ×{count}" for name, count in runs[-_SHOWN_STEPS:]]
    return f"  who went{' (at the end)' if len(runs) > len(shown) else ''}: {', '.join(shown)}\n"


_NONDETERMINISM_HINT = (
    "Look for state kept between runs, the real clock, randomness, or walking a set of objects; "
    "make everything inside the test function, take time from the loop or a VirtualClock, and use lists or dicts"
)


def run_one(loop: VirtualLoop, test: Callable[[], Coroutine[Any, Any, Any]], picker: Chooser | None) -> ScheduleOutcome:
    """Run ``test()`` on the loop, close the loop, and return the outcome.

    Raises:
        RuntimeError: if an event loop is already running in this thread.
    """
    if asyncio._get_running_loop() is not None or strands_here() is not None:
        loop.close()
        raise RuntimeError("a loop is running already; call explore() and run_virtual() from a plain function")
    explored = loop if isinstance(loop, ExploredLoop) else None
    outcome = ScheduleOutcome(
        choices=explored.choices if explored else [],
        widths=explored.widths if explored else [],
        picked=explored.picked if explored else [],
        actors=explored.actors if explored else [],
        states=explored.states if explored else [],
    )
    began_at = loop.time()
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
        outcome.steps, outcome.elapsed_s = loop.steps, loop.time() - began_at
        if outcome.kind in ("deadlock", "livelock", "leak"):
            outcome.tasks = tuple(loop.described())
        if explored is not None:
            outcome.choices, outcome.widths = list(explored.choices), list(explored.widths)
            outcome.picked, outcome.states = list(explored.picked), list(explored.states)
            if outcome.failed:
                outcome.went = tuple(actor.name for actor in explored.recent)
            if picker is not None and outcome.kind != "nondeterminism":
                try:
                    picker.end(explored)
                except ReplayMismatch as error:
                    outcome.kind, outcome.text = "nondeterminism", f"{error}. {_NONDETERMINISM_HINT}"
        loop.unwind()
    finally:
        loop.close()
    return outcome


def _judge(loop: VirtualLoop, main: asyncio.Task[Any], outcome: ScheduleOutcome) -> None:
    """Fill in the outcome of a schedule whose main task is done."""
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
    left = loop.left_over()
    if left:
        outcome.kind, outcome.text = "leak", f"the test is over, but {left} are not"
        return
    troubles = loop.unretrieved()
    if troubles:
        first = troubles[0]
        outcome.error = first.get("exception")
        outcome.kind = "callback" if "handle" in first else "unretrieved"
        outcome.text = str(first.get("message", "")) + (f": {outcome.error!r}" if outcome.error is not None else "")


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_pytests_failure(error: BaseException) -> bool:
    """Whether ``pytest.fail`` or ``pytest.raises`` raised the error; pytest-timeout's time limit does not count."""
    failed = getattr(sys.modules.get("_pytest.outcomes"), "Failed", None)
    return (
        failed is not None
        and isinstance(error, failed)
        and all(
            frame.f_globals.get("__name__") != "pytest_timeout" for frame, _ in traceback.walk_tb(error.__traceback__)
        )
    )


def _told(error: BaseException) -> str:
    """Format an error in one line; for an exception group, add the group's first leaf."""
    leaf = _first_leaf(error)
    return _in_words(error) if leaf is error else f"{_in_words(error)}, first {_in_words(leaf)}"


def _in_words(error: BaseException) -> str:
    """Format an error's type and text; if it has no text (a bare assert, a timeout), its type and location."""
    name, text = type(error).__name__, str(error)
    if text:
        return f"{name}: {text}"
    shown = [
        f" in {frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if os.path.dirname(frame.f_code.co_filename) != _ASYNCIO
    ]
    return name + (shown[-1] if shown else "")


def _busiest(loop: ExploredLoop | None) -> str:
    if loop is None or not loop.recent:
        return ""
    names = [actor.name for actor in loop.recent]
    ranked = sorted(dict.fromkeys(names), key=names.count, reverse=True)[:5]
    return f" (the last {len(names)} were taken by {', '.join(ranked)})"
