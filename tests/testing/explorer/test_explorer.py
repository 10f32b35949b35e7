"""The explorer finds what is wrong, repeats it exactly, and names what it cannot explore."""

from __future__ import annotations

import _thread
import asyncio
import itertools
import random
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Literal

import pytest

from holdfast.testing import NotExplorable, ScheduleFailure, explore

CHOOSERS: list[Literal["random", "pct", "exhaustive"]] = ["random", "pct", "exhaustive"]
TASKS: list[Literal["ordinary", "eager"]] = ["ordinary", "eager"]


async def lost_update() -> None:
    total = 0

    async def add() -> None:
        nonlocal total
        seen = total
        await asyncio.sleep(0)
        total = seen + 1

    async with asyncio.TaskGroup() as group:
        group.create_task(add())
        group.create_task(add())
    assert total == 2


async def locked_update() -> None:
    total = 0
    lock = asyncio.Lock()

    async def add() -> None:
        nonlocal total
        async with lock:
            seen = total
            await asyncio.sleep(0)
            total = seen + 1

    async with asyncio.TaskGroup() as group:
        group.create_task(add())
        group.create_task(add())
    assert total == 2


async def hidden_by_fifo() -> None:
    """Wrong only when one task overtakes the other by four steps."""
    claimed: list[str] = []

    async def slow() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        claimed.append("slow")

    async def quick() -> None:
        await asyncio.sleep(0)
        claimed.append("quick")

    async with asyncio.TaskGroup() as group:
        group.create_task(quick())
        group.create_task(slow())
    assert claimed == ["quick", "slow"]


def failure_of(test: Callable[[], object]) -> ScheduleFailure:
    with pytest.raises(ScheduleFailure) as caught:
        test()
    return caught.value


@pytest.mark.parametrize("tasks", TASKS)
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_a_lost_update_is_found_by_each_chooser_and_task_kind(
    chooser: Literal["random", "pct", "exhaustive"], tasks: Literal["ordinary", "eager"]
) -> None:
    failure = failure_of(lambda: explore(lost_update, chooser=chooser, tasks=tasks, schedules=50))
    assert failure.kind == "error"
    assert isinstance(failure.__cause__, AssertionError)
    assert "assert 1 == 2" in str(failure)


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_the_replay_numbers_repeat_the_failing_schedule(chooser: Literal["random", "pct", "exhaustive"]) -> None:
    first = failure_of(lambda: explore(hidden_by_fifo, chooser=chooser, schedules=2000))
    again = failure_of(lambda: explore(hidden_by_fifo, replay=first.replay))
    assert again.replay == first.replay
    assert again.schedules == 1
    assert f"replay={first.replay}" in str(first)


def test_without_choices_the_first_to_become_runnable_goes_first() -> None:
    explore(hidden_by_fifo, replay=[])


@pytest.mark.parametrize("tasks", TASKS)
def test_a_correct_test_passes_every_schedule(tasks: Literal["ordinary", "eager"]) -> None:
    report = explore(locked_update, chooser="exhaustive", schedules=10_000, tasks=tasks)
    assert report.exhausted
    assert report.distinct == report.schedules > 1


def test_exhaustive_visits_every_interleaving_exactly_once() -> None:
    orders: list[tuple[str, ...]] = []

    async def test() -> None:
        order: list[str] = []

        async def walk(name: str) -> None:
            order.append(name)
            await asyncio.sleep(0)
            order.append(name)

        await asyncio.gather(walk("a"), walk("b"))
        orders.append(tuple(order))

    report = explore(test, chooser="exhaustive", schedules=10_000)
    assert report.exhausted
    assert set(orders) == set(itertools.permutations(["a", "a", "b", "b"]))


def test_the_same_seed_gives_the_same_schedules() -> None:
    def once(seed: int) -> list[str]:
        steps: list[str] = []

        async def test() -> None:
            async def walk(name: str) -> None:
                for _ in range(3):
                    steps.append(name)
                    await asyncio.sleep(0)

            await asyncio.gather(*(walk(str(number)) for number in range(4)))

        explore(test, schedules=20, seed=seed)
        return steps

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_an_error_in_a_group_is_told() -> None:
    async def test() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.open_connection("nowhere", 1))

    async def fail() -> None:
        raise KeyError("the cause")

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    assert "first KeyError: 'the cause'" in str(failure_of(lambda: explore(grouped)))
    assert failure_of(lambda: explore(test)).kind == "not_explorable"


def test_a_deadlock_names_the_tasks_and_where_they_wait() -> None:
    async def test() -> None:
        one, two = asyncio.Lock(), asyncio.Lock()

        async def both(first: asyncio.Lock, second: asyncio.Lock) -> None:
            async with first:
                await asyncio.sleep(0)
                async with second:
                    pass

        async with asyncio.TaskGroup() as group:
            group.create_task(both(one, two), name="anna")
            group.create_task(both(two, one), name="bert")

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "deadlock"
    assert [entry.split("'")[1] for entry in failure.tasks] == ["main", "anna", "bert"]
    assert "acquire" in failure.tasks[1]


def test_a_livelock_names_who_keeps_running() -> None:
    async def test() -> None:
        async def spin() -> None:
            while True:
                await asyncio.sleep(0)

        await asyncio.create_task(spin(), name="spinner")

    failure = failure_of(lambda: explore(test, max_steps=500))
    assert failure.kind == "livelock"
    assert "spinner" in str(failure)


@pytest.mark.parametrize("chooser", ["random", "pct"])
def test_waiting_in_a_loop_for_another_task_is_no_livelock(chooser: Literal["random", "pct"]) -> None:
    async def test() -> None:
        done = False

        async def finish() -> None:
            nonlocal done
            await asyncio.sleep(0)
            done = True

        task = asyncio.create_task(finish())
        while not done:
            await asyncio.sleep(0)
        await task

    explore(test, chooser=chooser, max_steps=2_000)


def test_tasks_left_over_are_named() -> None:
    async def test() -> None:
        task = asyncio.create_task(asyncio.sleep(10), name="forgotten")
        assert not task.done()

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "leak"
    assert "'forgotten'" in failure.tasks[0]


def test_a_task_that_can_still_end_is_not_left_over() -> None:
    async def test() -> None:
        reached = asyncio.Event()

        async def finish() -> None:
            reached.set()
            await asyncio.sleep(0)

        task = asyncio.create_task(finish())
        await reached.wait()
        del task

    explore(test, chooser="exhaustive")


def test_an_error_in_a_callback_fails_the_schedule() -> None:
    async def test() -> None:
        asyncio.get_running_loop().call_soon(lambda: [].pop())
        await asyncio.sleep(0.1)

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "callback"
    assert isinstance(failure.__cause__, IndexError)


def test_an_error_that_nobody_asked_for_fails_the_schedule() -> None:
    async def test() -> None:
        async def fail() -> None:
            raise ValueError("unseen")

        task = asyncio.create_task(fail(), name="failing")
        await asyncio.sleep(0.1)
        assert task.done()

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "unretrieved"
    assert "'failing'" in str(failure)
    assert "unseen" in str(failure)


def test_callbacks_that_one_task_schedules_stay_in_order() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        finished = loop.create_future()
        for number in range(4):
            loop.call_soon(order.append, number)
        loop.call_soon(finished.set_result, None)
        other = asyncio.create_task(asyncio.sleep(0))
        await finished
        await other
        assert order == [0, 1, 2, 3]

    assert explore(test, chooser="exhaustive", schedules=10_000).exhausted


def test_a_cancelled_callback_is_no_choice() -> None:
    outcomes: list[list[int]] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()
        ran: list[int] = []
        handles = [loop.call_soon(ran.append, number) for number in range(2)]
        loop.call_soon(ran.append, 2).cancel()
        await asyncio.sleep(0)
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(0)
        outcomes.append(ran)

    report = explore(test, chooser="exhaustive")
    assert report.exhausted
    assert report.schedules == 3
    assert {tuple(ran) for ran in outcomes} == {(), (0,), (0, 1)}


def test_timers_of_one_instant_may_fire_in_any_order() -> None:
    orders: set[tuple[str, ...]] = set()

    async def test() -> None:
        order: list[str] = []

        async def wait(name: str) -> None:
            await asyncio.sleep(1)
            order.append(name)

        await asyncio.gather(wait("a"), wait("b"))
        orders.add(tuple(order))

    assert explore(test, chooser="exhaustive").exhausted
    assert orders == {("a", "b"), ("b", "a")}


def test_late_steps_let_a_deadline_overtake_work() -> None:
    async def test() -> None:
        async with asyncio.timeout(60):
            for _ in range(3):
                await asyncio.sleep(0)

    assert explore(test, chooser="exhaustive").exhausted
    assert explore(test, chooser="exhaustive", late_s=59.0).exhausted
    failure = failure_of(lambda: explore(test, chooser="exhaustive", late_s=60.0))
    assert isinstance(failure.__cause__, TimeoutError)
    assert "explore(..., late_s=60.0, replay=" in str(failure)
    assert failure_of(lambda: explore(test, replay=failure.replay, late_s=60.0)).replay == failure.replay


@pytest.mark.parametrize("chooser", ["random", "pct"])
def test_late_steps_and_a_ticking_timer_are_no_livelock(chooser: Literal["random", "pct"]) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        ended = False

        def tick() -> None:
            if not ended:
                loop.call_later(0.1, tick)

        tick()
        for _ in range(20):
            await asyncio.sleep(0)
        ended = True

    explore(test, chooser=chooser, late_s=1.0, max_steps=5_000)


def test_an_eager_task_begins_inside_its_creation() -> None:
    async def test() -> None:
        begun: list[str] = []

        async def child() -> None:
            current = asyncio.current_task()
            assert current is not None
            begun.append("child")

        creator = asyncio.current_task()
        task = asyncio.get_running_loop().create_task(child())
        assert begun == ["child"]
        assert task.done()
        assert asyncio.current_task() is creator

    explore(test, tasks="eager")


def test_walking_a_set_of_tasks_is_repeatable() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        tasks = {asyncio.create_task(gate.wait()) for _ in range(8)}
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    explore(test, chooser="exhaustive", schedules=300)


def test_state_kept_between_runs_is_named_as_nondeterminism() -> None:
    runs = 0

    async def test() -> None:
        nonlocal runs
        runs += 1
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(1 + runs % 3)))

    for chooser in CHOOSERS:
        failure = failure_of(partial(explore, test, chooser=chooser))
        assert failure.kind == "nondeterminism"
        assert "set of objects" in str(failure)


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_randomness_that_no_choice_shows_is_named_with_who_went(
    chooser: Literal["random", "pct", "exhaustive"],
) -> None:
    runs = 0

    async def test() -> None:
        nonlocal runs
        runs += 1
        if runs % 2:
            await asyncio.sleep(1)

    failure = failure_of(lambda: explore(test, chooser=chooser))
    assert failure.kind == "nondeterminism"
    assert "step 2 was taken by callbacks of main, and the second time by no actor: it was over" in str(failure)
    assert "to see it again" not in str(failure)


@pytest.mark.parametrize("chooser", CHOOSERS)
def test_times_that_differ_are_named_as_nondeterminism(chooser: Literal["random", "pct", "exhaustive"]) -> None:
    dice = random.Random(5)

    async def test() -> None:
        await asyncio.sleep(dice.random())

    failure = failure_of(lambda: explore(test, chooser=chooser))
    assert failure.kind == "nondeterminism"
    assert "s of virtual time" in str(failure)


def test_an_error_that_does_not_come_again_is_named_as_nondeterminism() -> None:
    runs = 0

    async def test() -> None:
        nonlocal runs
        runs += 1
        if runs == 5:
            raise ValueError("only once")

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "nondeterminism"
    assert isinstance(failure.__cause__, ValueError)


def test_a_replay_that_does_not_fit_is_named() -> None:
    failure = failure_of(lambda: explore(lost_update, replay=[0, 17]))
    assert failure.kind == "nondeterminism"
    assert "17" in str(failure)


async def use_to_thread() -> None:
    await asyncio.to_thread(len, "")


async def start_thread() -> None:
    threading.Thread(target=len, args=("",)).start()


async def swallow_the_refusal() -> None:
    try:
        threading.Thread(target=len, args=("",)).start()
    except RuntimeError:
        await asyncio.sleep(0)


async def start_thread_by_hand() -> None:
    _thread.start_new_thread(len, ("",))


async def connect() -> None:
    await asyncio.open_connection("127.0.0.1", 9)


async def connect_blocking() -> None:
    with socket.socket() as plain:
        plain.connect(("127.0.0.1", 9))


async def ask_for_a_name() -> None:
    socket.gethostbyaddr("127.0.0.1")


async def ask_for_the_name_of_an_address() -> None:
    socket.getnameinfo(("127.0.0.1", 80), 0)


async def ask_the_user() -> None:
    input()


async def start_process() -> None:
    subprocess.run(["true"], check=True)


async def start_async_process() -> None:
    await asyncio.create_subprocess_exec("true")


@pytest.mark.parametrize(
    "test",
    [
        use_to_thread,
        start_thread,
        start_thread_by_hand,
        swallow_the_refusal,
        connect,
        connect_blocking,
        ask_for_a_name,
        ask_for_the_name_of_an_address,
        ask_the_user,
        start_process,
        start_async_process,
    ],
)
def test_the_real_world_is_refused_and_the_error_says_what_to_use(
    test: Callable[[], Coroutine[None, None, None]],
) -> None:
    failure = failure_of(lambda: explore(test))
    assert failure.kind == "not_explorable"
    assert isinstance(failure.__cause__, NotExplorable)
    assert "asyncio.run" in str(failure)


def test_a_call_from_a_thread_that_was_there_before_is_refused() -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    errors: list[BaseException] = []
    begin, over = threading.Event(), threading.Event()

    def outsider() -> None:
        assert begin.wait(10)
        try:
            loops[0].call_soon_threadsafe(len, "")
        except NotExplorable as error:
            errors.append(error)
        over.set()

    thread = threading.Thread(target=outsider)
    thread.start()

    async def test() -> None:
        loops.append(asyncio.get_running_loop())
        begin.set()
        while not over.is_set():
            pass

    failure = failure_of(lambda: explore(test, schedules=1))
    thread.join(10)
    assert failure.kind == "not_explorable"
    assert len(errors) == 1


def test_threads_start_again_after_an_exploration() -> None:
    explore(locked_update, schedules=1)
    thread = threading.Thread(target=len, args=("",))
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_exploring_inside_a_running_loop_is_refused() -> None:
    async def inside() -> None:
        explore(locked_update)

    with pytest.raises(RuntimeError, match="plain function"):
        asyncio.run(inside())


def test_fewer_than_one_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedules"):
        explore(locked_update, schedules=0)
    with pytest.raises(ValueError, match="depth"):
        explore(locked_update, chooser="pct", depth=0)


@pytest.mark.parametrize(
    ("name", "wrong"), [("late_s", -1.0), ("late_s", float("nan")), ("max_steps", 0), ("replay", [0, -1])]
)
def test_a_number_that_makes_no_sense_is_refused(name: str, wrong: Any) -> None:
    numbers: dict[str, Any] = {name: wrong}
    with pytest.raises(ValueError, match=name):
        explore(locked_update, **numbers)


@pytest.mark.parametrize("name", ["schedules", "depth", "max_steps"])
def test_what_is_no_whole_number_is_refused(name: str) -> None:
    words: dict[str, Any] = {name: "many"}
    with pytest.raises(TypeError, match=f"{name} is 'many'; it must be a whole number"):
        explore(locked_update, **words)


@pytest.mark.parametrize("wrong", ["it.json", ["0"], [True], [0.0]])
def test_a_replay_that_is_no_list_of_numbers_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"Replay.load"):
        explore(locked_update, replay=wrong)


def test_what_is_no_async_function_is_refused_and_the_error_says_what_is_wanted() -> None:
    async def generator() -> AsyncIterator[int]:
        yield 1

    not_tests: list[Any] = [lambda: None, generator, 5]
    for wrong in not_tests:
        with pytest.raises(TypeError, match="async def"):
            explore(wrong)
    coroutine: Any = locked_update()
    with pytest.raises(TypeError, match="needs an `async def` function"):
        explore(coroutine)
    coroutine.close()


def test_an_error_without_words_is_told_with_its_place() -> None:
    async def test() -> None:
        raise AssertionError

    async def times_out() -> None:
        async with asyncio.timeout(1):
            await asyncio.sleep(2)

    assert "AssertionError in test (test_explorer.py:" in str(failure_of(lambda: explore(test)))
    assert "TimeoutError in times_out (test_explorer.py:" in str(failure_of(lambda: explore(times_out)))


def test_a_limit_of_ones_own_is_told_with_the_replay() -> None:
    async def test() -> None:
        while True:
            await asyncio.sleep(0)

    assert "max_steps=50, " in str(failure_of(lambda: explore(test, max_steps=50)))


@pytest.mark.parametrize(("name", "wrong"), [("chooser", "exhaustiv"), ("tasks", "lazy")])
def test_a_word_that_is_not_known_is_refused_instead_of_taken_for_the_usual_one(name: str, wrong: str) -> None:
    words: dict[str, Any] = {name: wrong}
    with pytest.raises(ValueError, match=f"{name} is '{wrong}'; it must be '"):
        explore(locked_update, **words)


def test_generators_left_open_are_closed() -> None:
    closed: list[int] = []

    async def test() -> None:
        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
                yield 2
            finally:
                await asyncio.sleep(0)
                closed.append(1)

        async for _ in numbers():
            break

    explore(test, schedules=1)
    assert closed
