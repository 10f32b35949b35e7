"""One small model of a part of the core, and how its schedules are explored."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from holdfast.testing import ExplorationReport, ScheduleFailure, explore

__all__ = ["TASKS", "Covered", "Fault", "Model", "Tasks", "fault"]

Tasks = Literal["ordinary", "eager"]
Scenario = Callable[[], Coroutine[Any, Any, object]]
TASKS: tuple[Tasks, ...] = ("ordinary", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that is put into the product: the model must turn red.

    Parameters:
        name: what is wrong.
        put_in: does it, for as long as the patch lasts.
    """

    name: str
    put_in: Callable[[pytest.MonkeyPatch], object]

    @contextmanager
    def there(self) -> Iterator[None]:
        """The product with the fault."""
        with pytest.MonkeyPatch.context() as patch:
            self.put_in(patch)
            yield


BY_MISTAKE = (AttributeError, ImportError, NameError, TypeError)
"""What a fault of the product does not raise, and one of the patch does."""


def leaves(error: BaseException | None) -> Iterator[BaseException]:
    """What is in a group of errors, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    elif error is not None:
        yield error


def fault(put_in: Callable[[pytest.MonkeyPatch], object]) -> Fault:
    """The fault that a function puts in; the function's name says what is wrong."""
    return Fault(name=put_in.__name__.replace("_", " "), put_in=put_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What an exploration of a model covered, with one task factory.

    Parameters:
        tasks: which.
        exhausted: all schedules there are were run.
        schedules: how many were.
        distinct: how many of them differ, at least.
        states: different states that were visited, at least.
        cpu_s: what it took of one processor, in seconds.
    """

    tasks: Tasks
    exhausted: bool
    schedules: int
    distinct: int
    states: int
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A small model: an async test whose every schedule must keep a promise.

    Parameters:
        item: the part of the core that it belongs to.
        name: what happens in it.
        promise: what must hold, with the number of the promise.
        scenario: the test.
        faults: at least one; each must be found.
        ends: there are no more schedules than this, with either task factory; 0 when they are too many to run all.
        share: of the schedules that its item owes, how much this model gets, against the others of its item.
        seeks: how many schedules of each chooser and task factory are enough to find its faults.
    """

    item: str
    name: str
    promise: str
    scenario: Scenario
    faults: tuple[Fault, ...]
    ends: int = 0
    share: float = 1.0
    seeks: int = 500

    def __str__(self) -> str:
        return f"{self.item}: {self.name}"

    def run(self, schedules: int, *, tasks: Tasks, whole: int = 3_000) -> Covered:
        """Run so many, two thirds at random and a third by priorities; or all, if they are at most ``whole``.

        Raises:
            ScheduleFailure: a schedule broke the promise.
        """
        began = time.process_time()
        if 0 < self.ends <= whole:
            reports = [self._explored(self.ends, "exhaustive", tasks)]
            assert reports[0].exhausted, f"{self} has more than {self.ends} schedules"
        else:
            by_priorities = max(1, schedules // 3)
            reports = [
                self._explored(max(1, schedules - by_priorities), "random", tasks),
                self._explored(by_priorities, "pct", tasks),
            ]
        return Covered(
            tasks=tasks,
            exhausted=all(report.exhausted for report in reports),
            schedules=sum(report.schedules for report in reports),
            distinct=max(report.distinct for report in reports),
            states=max(report.states for report in reports),
            cpu_s=time.process_time() - began,
        )

    def seek(self, fault: Fault) -> int:
        """Put a fault in and run schedules of each chooser and task factory until one fails; how many that took.

        Raises:
            AssertionError: the fault was not found, or it is none: what failed is the patch that puts it in.
        """
        before = 0
        with fault.there():
            for tasks in TASKS:
                for chooser in ("random", "pct"):
                    try:
                        before += self._explored(self.seeks, chooser, tasks).schedules
                    except ScheduleFailure as failure:
                        for error in leaves(failure.__cause__):
                            assert not isinstance(error, BY_MISTAKE), f"the patch does not fit the product: {error!r}"
                        return before + failure.schedules
        raise AssertionError(f"{self}: {fault.name}: not found in {before} schedules")

    def _explored(self, schedules: int, chooser: Any, tasks: Tasks) -> ExplorationReport:
        return explore(self.scenario, schedules=schedules, chooser=chooser, seed=1, tasks=tasks, shrink=False)
