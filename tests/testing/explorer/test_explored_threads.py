"""Threads of an explored schedule: they take turns, replay, shrink, and end in deadlocks that name them."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast import Host, Run
from holdfast.errors import Interrupted
from holdfast.runtime import Interrupt, Scope, ThreadPool, install
from holdfast.runtime import thread_pool as threads
from holdfast.runtime.oneshot import Oneshot
from holdfast.storage import SqliteStore
from holdfast.storage.sql import writer
from holdfast.testing import NotExplorable, Replay, ScheduleFailure, VirtualClock, explore, start_thread

CHOOSERS: tuple[Literal["random", "pct", "exhaustive"], ...] = ("random", "pct", "exhaustive")


def failure_of(call: Callable[[], object]) -> ScheduleFailure:
    with pytest.raises(ScheduleFailure) as caught:
        call()
    return caught.value


def a_lock_of_ours() -> Any:
    """As the runtime's thread pool makes its own."""
    return vars(threads)["threading"].Lock()


async def two_steps() -> None:
    """Two threads look and then act, and let others go in between."""
    done: list[str] = []
    gate = Interrupt()

    def claim(name: str) -> None:
        if not done:
            gate.wait_blocking(1.0)
            done.append(name)

    first, second = start_thread(claim, "a"), start_thread(claim, "b")
    await first
    await second
    assert len(done) == 1


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_a_check_and_an_act_of_two_threads_are_found_apart(chooser: Any, tasks: Any) -> None:
    assert failure_of(partial(explore, two_steps, chooser=chooser, tasks=tasks)).kind == "error"


def test_a_schedule_of_threads_replays_and_is_made_short(tmp_path: Path) -> None:
    long = failure_of(lambda: explore(two_steps, seed=3, shrink=False))
    short = failure_of(lambda: explore(two_steps, seed=3))
    assert len(short.replay) <= len(long.replay)
    assert short.recorded is not None
    read = Replay.load(short.recorded.save(tmp_path / "it.json"))
    again = failure_of(lambda: explore(two_steps, replay=read))
    assert again.replay == short.replay
    assert "thread" in str(again)


async def one_lock_after_the_other() -> None:
    """Two threads take two of the runtime's locks in two orders."""
    first, second = a_lock_of_ours(), a_lock_of_ours()

    def take(*locks: Any) -> None:
        with locks[0], locks[1]:
            pass

    one = start_thread(take, first, second, name="one")
    other = start_thread(take, second, first, name="other")
    await one
    await other


def test_a_deadlock_of_threads_is_told_with_names_and_stacks() -> None:
    failure = failure_of(lambda: explore(one_lock_after_the_other, schedules=1000))
    assert failure.kind == "deadlock"
    told = "\n".join(failure.tasks)
    assert "thread 'one'" in told
    assert "waits for a lock that thread 'other' has" in told
    assert "waits for a lock that thread 'one' has" in told
    assert "take (test_explored_threads.py:" in told
    assert "(patching.py:" not in told


def test_a_thread_that_waits_is_told_where_its_own_code_does() -> None:
    async def test() -> None:
        await start_thread(lambda: threading.Event().wait(), name="waits")

    told = "\n".join(failure_of(lambda: explore(test)).tasks)
    assert "thread 'waits' at <lambda> (test_explored_threads.py:" in told
    assert "(isolation_guard.py:" not in told


def test_a_loop_that_blocks_for_ever_is_told_with_its_stack() -> None:
    async def test() -> None:
        lock = a_lock_of_ours()
        lock.acquire()
        lock.acquire()

    failure = failure_of(lambda: explore(test, schedules=1))
    assert failure.kind == "deadlock"
    assert "the loop's own thread" in str(failure)
    assert "waits for a lock that the loop has" in str(failure)


def test_a_loop_that_blocks_for_a_lock_goes_on_when_it_is_free() -> None:
    async def test() -> None:
        lock = a_lock_of_ours()
        held: list[str] = []

        def hold(name: str) -> None:
            with lock:
                assert not held
                held.append(name)
                time.sleep(0.01)
                held.remove(name)

        threads_of_it = [start_thread(hold, name) for name in "ab"]
        timer = asyncio.get_running_loop().create_task(asyncio.sleep(0.005))
        with lock:
            assert not held
        if lock.acquire(timeout=0.005):
            lock.release()
        for one in (*threads_of_it, timer):
            await one

    for chooser in CHOOSERS:
        explore(test, chooser=chooser, schedules=500)
        explore(test, chooser=chooser, schedules=200, late_s=0.02, tasks="eager")


def test_a_deadlock_that_the_test_catches_is_told_all_the_same() -> None:
    async def test() -> None:
        lock = a_lock_of_ours()
        lock.acquire()
        try:
            lock.acquire()
        except Exception:
            await asyncio.sleep(0)

    assert failure_of(lambda: explore(test, schedules=1)).kind == "deadlock"


def test_a_thread_that_is_left_over_is_a_leak() -> None:
    async def test() -> None:
        start_thread(Interrupt().wait_blocking, name="for ever")

    failure = failure_of(lambda: explore(test, schedules=1))
    assert failure.kind == "leak"
    assert "thread 'for ever'" in failure.tasks[0]


def test_what_a_thread_raises_is_raised_where_it_is_awaited_or_told() -> None:
    def fails() -> None:
        raise KeyError("no")

    async def awaits() -> None:
        with pytest.raises(KeyError):
            await start_thread(fails)

    async def forgets() -> None:
        start_thread(fails)
        await asyncio.sleep(1)

    explore(awaits, schedules=20)
    failure = failure_of(lambda: explore(forgets, schedules=1))
    assert failure.kind == "unretrieved"
    assert isinstance(failure.__cause__, KeyError)


def test_times_of_threads_are_virtual() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()

        def sleep() -> None:
            time.sleep(3600)
            Interrupt().wait_blocking(3600)
            threading.Event().wait(3600)
            with pytest.raises(queue.Empty):
                queue.Queue[int]().get(timeout=3600)
            with pytest.raises(TimeoutError):
                Oneshot[int]().wait_blocking(3600)

        await start_thread(sleep)
        assert loop.time() == pytest.approx(began + 5 * 3600)

    began = time.monotonic()
    explore(test, schedules=3)
    assert time.monotonic() - began < 60


def test_an_interrupt_with_a_deadline_is_triggered_in_virtual_time() -> None:
    async def test() -> None:
        def wait() -> None:
            with pytest.raises(Interrupted, match="deadline"):
                Interrupt(deadline_s=5).sleep_blocking(3600)

        await start_thread(wait)

    explore(test, schedules=30)


def test_events_conditions_queues_and_futures_of_the_interpreter_let_others_go() -> None:
    async def test() -> None:
        bell, box = threading.Event(), queue.Queue[int](1)
        got: list[int] = []

        def give() -> None:
            for item in (1, 2):
                box.put(item)
            bell.set()

        def take() -> None:
            got.extend(box.get() for _ in range(2))
            bell.wait()

        giving, taking = start_thread(give), start_thread(take)
        await giving
        await taking
        assert got == [1, 2]

    for chooser in CHOOSERS:
        explore(test, schedules=300, chooser=chooser)


def test_a_scope_runs_its_threads_and_on_an_adopting_loop_asyncio_to_thread_under_the_explorer() -> None:
    ran: list[str] = []

    def work(name: str) -> str:
        ran.append(name)
        return name

    async def test() -> None:
        async with Scope("run", threads=ThreadPool(max_threads=1)) as scope:
            handles = [scope.spawn(work, name, on="thread") for name in "ab"]
            assert [await handle for handle in handles] == ["a", "b"]
        with install(asyncio.get_running_loop()):
            async with Scope("adopts") as scope:
                assert await scope.spawn(asyncio.to_thread(work, "c")) == "c"

    explore(test, schedules=100)
    assert len(ran) >= 300


def test_a_tool_that_is_a_plain_function_runs_under_the_explorer() -> None:
    def count(text: str) -> int:
        time.sleep(1)
        return len(text)

    async def agent(run: Run) -> str:
        return str(await run.call(count, run.text)) + str(await asyncio.to_thread(count, run.text))

    async def test() -> None:
        async with Host(agent, store="memory://", clock=VirtualClock()) as host:
            assert await host.session("anna").ask("abc") == "33"

    explore(test, schedules=50)
    explore(test, schedules=20, tasks="eager")


def test_a_store_in_a_file_runs_under_the_explorer(tmp_path: Path) -> None:
    count = 0

    async def agent(run: Run) -> str:
        return run.text

    async def test() -> None:
        nonlocal count
        count += 1
        async with Host(agent, store=f"sqlite:///{tmp_path}/{count}.db", clock=VirtualClock()) as host:
            assert await host.session("anna").ask("abc") == "abc"

    explore(test, schedules=10)


def test_a_thread_that_waits_for_something_real_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.testing.explorer.controlled_threads._PATIENCE_S", 1.0)
    real = threading.Lock()

    def wait() -> None:
        with real:
            pass

    async def test() -> None:
        await start_thread(wait, name="stuck")

    with real:
        failure = failure_of(lambda: explore(test))
    assert failure.kind == "not_explorable"
    assert "thread 'stuck'" in str(failure)
    assert "wait (test_explored_threads.py:" in str(failure)
    assert "frontrun" in str(failure)


def start_a_real_one() -> None:
    threading.Thread(target=len, args=("",)).start()


def call_soon_from_a_thread(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon(len, "")


def test_a_real_thread_is_refused_in_a_thread_too_and_the_error_says_what_to_use() -> None:
    async def test() -> None:
        await start_thread(start_a_real_one)

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "not_explorable"
    assert "start_thread" in str(failure)


def test_call_soon_from_a_thread_is_refused() -> None:
    async def test() -> None:
        await start_thread(call_soon_from_a_thread, asyncio.get_running_loop())

    failure = failure_of(lambda: explore(test))
    assert isinstance(failure.__cause__, NotExplorable)
    assert "call_soon_threadsafe" in str(failure)


@pytest.mark.parametrize("raised", [SystemExit(3), StopIteration("none"), GeneratorExit(), asyncio.CancelledError()])
def test_what_would_end_the_loop_or_an_iteration_is_told_as_the_cause_of_an_error(raised: BaseException) -> None:
    def fails() -> None:
        raise raised

    async def awaits() -> None:
        with pytest.raises(RuntimeError, match=f"thread 'leaver' raised {type(raised).__name__}") as told:
            await start_thread(fails, name="leaver")
        assert told.value.__cause__ is raised

    explore(awaits, schedules=5)


def test_who_awaits_a_thread_learns_that_it_was_interrupted() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        thread = start_thread(interrupt.sleep_blocking, 100)
        await asyncio.sleep(1)
        interrupt.trigger("enough")
        with pytest.raises(Interrupted):
            await thread

    explore(test, schedules=50)


def test_a_sleep_of_no_time_lets_other_threads_go() -> None:
    async def test() -> None:
        number = 0

        def count() -> None:
            nonlocal number
            read = number
            time.sleep(0)
            number = read + 1

        for one in [start_thread(count) for _ in range(2)]:
            await one
        assert number == 2

    assert failure_of(lambda: explore(test)).kind == "error"


def test_a_thread_that_waits_for_a_condition_is_told_so() -> None:
    async def test() -> None:
        await start_thread(threading.Event().wait, name="reader")

    failure = failure_of(lambda: explore(test, schedules=1))
    assert failure.kind == "deadlock"
    assert "waits for a condition, an event, a queue or a future" in str(failure)


def test_a_thread_of_a_schedule_explores_nothing_itself() -> None:
    async def inner() -> None:
        await asyncio.sleep(0)

    async def test() -> None:
        with pytest.raises(RuntimeError, match="from a plain function"):
            await start_thread(explore, inner)

    explore(test, schedules=2)


def test_threads_are_started_under_the_explorer_only() -> None:
    with pytest.raises(RuntimeError, match="explore"):
        start_thread(len, "")


def test_a_test_that_is_over_leaves_no_thread_and_puts_everything_back() -> None:
    def names() -> list[object]:
        places = ((threads, "threading"), (threads, "start_plainly"), (writer, "SimpleQueue"), (threading, "_time"))
        return [vars(module)[name] for module, name in places]

    unchanged = names()
    before = set(threading.enumerate())

    async def pool() -> None:
        async with Scope("run") as scope:
            await scope.spawn(len, "ab", on="thread")

    async def fails() -> None:
        start_thread(Interrupt().wait_blocking)
        raise ValueError("no")

    explore(pool, schedules=20)
    with pytest.raises(ScheduleFailure):
        explore(fails)
    assert set(threading.enumerate()) <= before
    assert names() == unchanged


def test_a_thread_that_does_not_want_to_end_is_ended() -> None:
    async def test() -> None:
        def stubborn() -> None:
            for _ in range(3):
                try:
                    Interrupt().wait_blocking()
                except BaseException:
                    continue

        start_thread(stubborn)

    assert failure_of(lambda: explore(test, schedules=1)).kind == "leak"


def test_other_threads_go_on_as_before() -> None:
    interrupt, results = Interrupt(), []
    begin = threading.Event()

    def outside() -> None:
        begin.set()
        results.append(interrupt.wait_blocking(30))

    thread = threading.Thread(target=outside)
    thread.start()
    assert begin.wait(10)

    async def test() -> None:
        await start_thread(interrupt.trigger)

    explore(test, schedules=1)
    thread.join(10)
    assert results == [interrupt.cause]


def test_a_busy_thread_is_no_livelock_but_one_that_never_ends_is() -> None:
    async def test() -> None:
        def spin() -> None:
            lock = a_lock_of_ours()
            while True:
                with lock:
                    pass

        await start_thread(spin)

    failure = failure_of(lambda: explore(test, max_steps=500, schedules=1))
    assert failure.kind == "livelock"
    assert "spin" in str(failure)


def test_the_writer_makes_way_for_its_thread_under_the_explorer(tmp_path: Path) -> None:
    async def test() -> None:
        store = SqliteStore(f"{tmp_path}/one.db")
        await store.open(node_id="n", at=1.0)
        await store.close()

    assert explore(test, schedules=20).schedules == 20
