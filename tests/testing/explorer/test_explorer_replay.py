"""A failing schedule is made short, kept in a file, and counted in states; what stops the loop's thread is refused."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest

from holdfast.runtime import Interrupt
from holdfast.testing import NotExplorable, Replay, ScheduleFailure, explore
from holdfast.testing.explorer.coverage import States
from holdfast.testing.explorer.shrinker import shrink


def failure_of(test: Callable[[], object]) -> ScheduleFailure:
    with pytest.raises(ScheduleFailure) as caught:
        test()
    return caught.value


async def rare_among_many() -> None:
    """Wrong when `quick` goes after `slow`; four others only add choices."""
    order: list[str] = []

    async def walk(name: str, steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(walk("quick", 1))
        group.create_task(walk("slow", 4))
        for number in range(4):
            group.create_task(walk(f"other {number}", 5))
    assert order.index("quick") < order.index("slow")


def test_a_failing_schedule_is_made_short() -> None:
    long = failure_of(lambda: explore(rare_among_many, schedules=2000, shrink=False))
    short = failure_of(lambda: explore(rare_among_many, schedules=2000))
    assert sum(map(bool, short.replay)) < sum(map(bool, long.replay)) / 2
    assert len(short.replay) < len(long.replay)
    assert "more runs" in str(short)
    again = failure_of(lambda: explore(rare_among_many, replay=short.replay))
    assert (again.kind, again.replay, type(again.__cause__)) == (short.kind, short.replay, AssertionError)


def test_shrinking_does_not_slip_to_another_failure() -> None:
    async def test() -> None:
        order: list[str] = []

        async def walk(name: str, steps: int) -> None:
            for _ in range(steps):
                await asyncio.sleep(0)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for number, name in enumerate("abc"):
                group.create_task(walk(name, 2 - number))
        if order == ["b", "c", "a"]:
            raise KeyError("the rare one")
        if order == ["a", "b", "c"]:
            raise ValueError("another")

    for seed in range(20):
        first = failure_of(partial(explore, test, seed=seed, schedules=2000, shrink=False))
        short = failure_of(partial(explore, test, seed=seed, schedules=2000))
        assert type(short.__cause__) is type(first.__cause__)


def test_shrinking_is_bounded() -> None:
    runs: list[int] = []

    def attempt(choices: list[int]) -> list[int] | None:
        runs.append(len(choices))
        return None

    found = shrink([1, 2, 3] * 200, attempt, runs=50)  # type: ignore[arg-type]
    assert (len(runs), found.runs, found.choices) == (50, 50, [1, 2, 3] * 200)


def test_the_smallest_list_is_found_when_each_part_counts() -> None:
    def fails(choices: list[int]) -> list[int] | None:
        return choices if len(choices) > 7 and choices[3] and choices[7] > 1 else None

    dice = random.Random(1)
    start = [1 + dice.randrange(4) for _ in range(60)]
    found = shrink(start, lambda choices: fails(list(choices)), runs=300)
    assert found.choices == [0, 0, 0, 1, 0, 0, 0, 2]


def test_a_replay_survives_its_file_and_brings_its_own_options(tmp_path: Path) -> None:
    async def test() -> None:
        async with asyncio.timeout(60):
            for _ in range(3):
                await asyncio.sleep(0)

    failure = failure_of(lambda: explore(test, chooser="exhaustive", late_s=60.0, tasks="eager"))
    assert failure.recorded is not None
    read = Replay.load(failure.recorded.save(tmp_path / "deep" / "it.json"))
    assert read == failure.recorded
    assert (read.late_s, read.tasks) == (60.0, "eager")
    assert "test_a_replay_survives" in read.test
    assert failure_of(lambda: explore(test, replay=read)).replay == failure.replay


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "holdfast-replay-1"}', '{"format": "holdfast-replay-1", "choices": ["a"]}']
)
def test_a_file_that_is_no_replay_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "it.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a replay file"):
        Replay.load(path)


def test_a_replay_of_another_version_that_does_not_fit_says_so() -> None:
    other = Replay(test="x", choices=(0, 17), versions={"holdfast": "0.0.1", "python": "3.9"})
    failure = failure_of(lambda: explore(rare_among_many, replay=other))
    assert failure.kind == "nondeterminism"
    assert "holdfast was 0.0.1" in str(failure)


def test_states_are_counted_once_however_they_are_reached() -> None:
    async def test() -> None:
        async def walk() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        loop = asyncio.get_running_loop()
        ends = [loop.create_task(walk()) for _ in range(2)]
        await asyncio.sleep(1)
        assert all(task.done() for task in ends)

    report = explore(test, chooser="exhaustive")
    # The test's first step; two tasks of three steps each in any order; the timer; the test's last step.
    assert report.states == 4 * 4 + 2
    assert report.exhausted
    assert report.states_exact
    assert report.states < report.steps
    assert report.states > report.longest
    assert "all there are" in str(report)


def test_very_many_states_are_estimated_in_bounded_memory() -> None:
    states = States(1000)
    dice = random.Random(1)
    for _ in range(50):
        states.note(dice.getrandbits(61) for _ in range(1000))
    assert not states.exact
    assert len(states._seen) <= 1000
    assert 40_000 < len(states) < 60_000


def test_randomness_that_shows_late_is_found_by_the_repeated_samples() -> None:
    dice = random.Random(5)
    runs = 0

    async def test() -> None:
        nonlocal runs
        runs += 1
        if runs > 20 and dice.random() < 0.5:
            await asyncio.sleep(0)

    failure = failure_of(lambda: explore(test, schedules=3000))
    assert failure.kind == "nondeterminism"
    assert "not deterministic" in str(failure)


async def sleep_for_real() -> None:
    time.sleep(0.001)


async def sleep_for_real_and_swallow() -> None:
    try:
        time.sleep(0.001)
    except RuntimeError:
        await asyncio.sleep(0)


async def wait_for_a_thread() -> None:
    threading.Event().wait()


async def get_from_threads() -> None:
    queue.Queue[int]().get()


async def wait_for_a_thread_for_a_while() -> None:
    threading.Event().wait(5)


async def get_from_threads_for_a_while() -> None:
    queue.Queue[int]().get(timeout=5)


async def meet_a_thread() -> None:
    threading.Barrier(2).wait(5)


async def wait_for_a_result() -> None:
    Future[int]().result()


async def wait_blocking_for_an_interrupt() -> None:
    Interrupt().wait_blocking()


async def sleep_blocking() -> None:
    Interrupt().sleep_blocking(0.001)


@pytest.mark.parametrize(
    ("test", "instead"),
    [
        (sleep_for_real, "asyncio.sleep"),
        (sleep_for_real_and_swallow, "asyncio.sleep"),
        (wait_for_a_thread, "asyncio.Event"),
        (get_from_threads, "asyncio.Queue"),
        (wait_for_a_result, "future"),
        (wait_for_a_thread_for_a_while, "asyncio.Event"),
        (get_from_threads_for_a_while, "asyncio.Queue"),
        (meet_a_thread, "asyncio"),
        (wait_blocking_for_an_interrupt, "await"),
        (sleep_blocking, "await"),
    ],
)
@pytest.mark.timeout(60)
def test_what_stops_the_loop_is_refused_and_the_error_says_what_to_use(
    test: Callable[[], Coroutine[None, None, None]], instead: str
) -> None:
    failure = failure_of(lambda: explore(test))
    assert failure.kind == "not_explorable"
    assert isinstance(failure.__cause__, NotExplorable)
    assert instead in str(failure)


def test_a_time_limit_ends_the_exploration_at_once() -> None:
    runs = 0

    class TimeIsUp(BaseException):
        pass

    async def test() -> None:
        nonlocal runs
        runs += 1
        raise TimeIsUp

    with pytest.raises(TimeIsUp):
        explore(test)
    assert runs == 1


def test_what_pytest_raises_for_the_test_is_a_finding_like_another() -> None:
    async def test() -> None:
        order: list[str] = []

        async def walk(name: str) -> None:
            await asyncio.sleep(0)
            order.append(name)

        await asyncio.gather(walk("a"), walk("b"))
        with pytest.raises(ValueError, match="b first"):
            if order == ["a", "b"]:
                raise ValueError("not b first")

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "error"
    assert "DID NOT RAISE" in str(failure)
    assert failure_of(lambda: explore(test, replay=failure.replay)).kind == "error"


def test_a_time_limit_that_pytest_raises_for_another_ends_the_exploration_at_once() -> None:
    runs = 0

    def pytest_timeout() -> None:
        pytest.fail("Timeout (>1.0s) from pytest-timeout.")

    timed_out = FunctionType(pytest_timeout.__code__, {"__name__": "pytest_timeout", "pytest": pytest})

    async def test() -> None:
        nonlocal runs
        runs += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            timed_out()

    with pytest.raises(BaseExceptionGroup) as caught:
        explore(test)
    assert "pytest-timeout" in str(caught.value.exceptions[0])
    assert runs == 1


def test_what_was_patched_is_put_back() -> None:
    before = time.sleep, threading.Condition.wait, threading.Thread.start
    explore(lambda: asyncio.sleep(1), schedules=1)
    assert (time.sleep, threading.Condition.wait, threading.Thread.start) == before
    time.sleep(0)


def test_a_deadlock_says_which_task_waits_for_which() -> None:
    async def test() -> None:
        async def wait_for_ever() -> None:
            await asyncio.get_running_loop().create_future()

        await asyncio.create_task(wait_for_ever(), name="stuck")

    failure = failure_of(lambda: explore(test))
    assert "waits for task 'stuck'" in failure.tasks[0]


def test_a_failure_tells_who_went() -> None:
    failure = failure_of(lambda: explore(rare_among_many, schedules=2000))
    assert "who went: main" in str(failure)
