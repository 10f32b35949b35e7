"""Locks, conditions, events, semaphores, barriers and queues made in an explored test: each classic race is found in
its faulty form, and the usual repair explores clean."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue as SimpleQueueByName
from threading import Lock as LockByName
from threading import RLock as RLockByName
from time import sleep as sleep_by_name
from typing import Any

import pytest

from holdfast.testing import Replay, ScheduleFailure, explore, start_thread

made_outside = threading.Lock()


def failure_of(call: Callable[[], object]) -> ScheduleFailure:
    with pytest.raises(ScheduleFailure) as caught:
        call()
    return caught.value


async def all_of(*threads: Awaitable[Any]) -> None:
    for thread in threads:
        await thread


async def both(first: Callable[[], object], second: Callable[[], object], form: str) -> None:
    """Two threads; to prove a form, the loop's own thread is the second one: that has far fewer schedules."""
    thread = start_thread(first, name="first")
    if form == "proven":
        second()
    else:
        await start_thread(second, name="second")
    await thread


# each race: a form ("faulty", "repaired", or "proven": the repaired one, smaller) -> a test that must be red or clean


async def check_then_set(form: str) -> None:
    """Two threads create one thing."""
    faulty = form == "faulty"
    lock, box = threading.Lock(), queue.Queue[int]()
    made: list[int] = []

    def claim() -> None:
        if faulty:
            if not made:
                box.put(1)
                made.append(1)
        else:
            with lock:
                if not made:
                    box.put(1)
                    made.append(1)

    await both(claim, claim, form)
    assert len(made) == 1


async def lost_update(form: str) -> None:
    """Each access is locked; the read and the write that belong together are not."""
    faulty = form == "faulty"
    lock, balance = threading.Lock(), [0]

    def pay() -> None:
        if faulty:
            with lock:
                read = balance[0]
            with lock:
                balance[0] = read + 1
        else:
            with lock:
                balance[0] += 1

    await both(pay, pay, form)
    assert balance == [2]


async def lost_wakeup(form: str) -> None:
    """The waiter looks, then waits, and the wake-up comes between."""
    faulty = form == "faulty"
    lock = threading.Lock()
    ready: list[int] = []
    condition = threading.Condition(lock)

    def wait() -> None:
        if faulty:
            with lock:
                is_ready = bool(ready)
            if not is_ready:
                with condition:
                    condition.wait()
        else:
            with condition:
                condition.wait_for(lambda: ready)

    def wake() -> None:
        with condition:
            ready.append(1)
            condition.notify()

    await both(wait, wake, form)


async def double_checked_init(form: str) -> None:
    """What the unlocked look finds is not ready yet."""
    faulty = form == "faulty"
    lock, shared = threading.RLock(), {}

    def use() -> None:
        if "config" not in shared:
            with lock:
                if "config" not in shared:
                    made: dict[str, int] = {}
                    if faulty:
                        shared["config"] = made
                    with lock:
                        made["size"] = 3
                    shared["config"] = made
        assert shared["config"]["size"] == 3

    await both(use, use, form)


async def wrong_notify(form: str) -> None:
    """A producer and two consumers share one condition; a wake-up for one reaches the wrong one."""
    faulty = form == "faulty"
    condition = threading.Condition()
    items: list[int] = []
    room = 1

    def produce() -> None:
        for item in range(2):
            with condition:
                condition.wait_for(lambda: len(items) < room)
                items.append(item)
                condition.notify() if faulty else condition.notify_all()

    def consume() -> None:
        with condition:
            condition.wait_for(lambda: items)
            items.pop()
            condition.notify() if faulty else condition.notify_all()

    await all_of(start_thread(consume), start_thread(consume), start_thread(produce))
    assert not items


async def philosophers(form: str) -> None:
    """Two at a table with two forks."""
    faulty = form == "faulty"
    forks = [threading.Lock(), threading.Lock()]

    def dine(seat: int) -> None:
        first, second = seat, (seat + 1) % 2
        if not faulty and first > second:
            first, second = second, first
        with forks[first], forks[second]:
            pass

    await both(partial(dine, 0), partial(dine, 1), form)


async def barrier_reuse(form: str) -> None:
    """A barrier of one counter is reused before all have left its first round."""
    faulty = form == "faulty"
    barrier = threading.Barrier(2)
    condition, counted, rounds = threading.Condition(), [0], []

    def by_hand() -> None:
        with condition:
            counted[0] += 1
            condition.notify_all()
            condition.wait_for(lambda: counted[0] == 2)  # the faster one has reset it
        with condition:
            counted[0] = 0

    def work(name: str) -> None:
        for number in range(2):
            if faulty:
                by_hand()
            else:
                barrier.wait()
            rounds.append((number, name))

    await both(partial(work, "a"), partial(work, "b"), form)
    assert [number for number, _ in rounds] == sorted(number for number, _ in rounds)


async def forgotten_release(form: str) -> None:
    """An early return leaves the lock taken."""
    faulty = form == "faulty"
    lock = threading.Lock()

    def work(number: int) -> None:
        lock.acquire()
        if faulty and number == 0:
            return
        lock.release()

    await both(partial(work, 0), partial(work, 1), form)


async def queue_check_then_get(form: str) -> None:
    """Two consumers see one item."""
    faulty = form == "faulty"
    box = queue.Queue[int]()
    box.put(1)

    def take() -> None:
        if faulty:
            if not box.empty():
                box.get()
        else:
            try:
                box.get_nowait()
            except queue.Empty:
                pass

    await both(take, take, form)


async def put_after_the_last_look(form: str) -> None:
    """A worker that leaves when its queue is empty, and a producer that saw it still at work."""
    faulty = form == "faulty"
    box, working, done = queue.Queue[int](), [True], []
    lock = threading.Lock()

    def work() -> None:
        while True:
            if faulty:
                if box.empty():
                    break
            else:
                with lock:
                    if box.empty():
                        working.clear()
                        return
            done.append(box.get())
        working.clear()

    def hand_over() -> None:
        if faulty:
            if working:
                box.put(1)
            else:
                done.append(1)
        else:
            with lock:
                if working:
                    box.put(1)
                else:
                    done.append(1)

    await both(work, hand_over, form)
    assert done == [1]


async def semaphore_leak(form: str) -> None:
    """A permit that is given back twice lets two in."""
    faulty = form == "faulty"
    permits = threading.Semaphore(1)
    inside: list[int] = []

    def work() -> None:
        with permits:
            inside.append(1)
            assert len(inside) == 1
            pausing.locked()
            inside.pop()
        if faulty:
            permits.release()

    pausing = threading.Lock()
    await all_of(start_thread(work), start_thread(work), start_thread(work))


async def try_lock(form: str) -> None:
    """Who finds the lock taken drops its work."""
    faulty = form == "faulty"
    lock, done = threading.Lock(), []

    def work() -> None:
        if lock.acquire(blocking=not faulty):
            done.append(1)
            lock.release()

    await both(work, work, form)
    assert len(done) == 2


async def lock_over_a_sleep(form: str) -> None:
    """Holdfast's own first example: a read, a sleep and a write."""
    faulty = form == "faulty"
    lock, total = threading.Lock(), [0]

    def add() -> None:
        if not faulty:
            lock.acquire()
        read = total[0]
        time.sleep(0.1)
        total[0] = read + 1
        if not faulty:
            lock.release()

    await both(add, add, form)
    assert total == [2]


async def simple_queue_race(form: str) -> None:
    """The answer is marked before, or after, it can be taken."""
    faulty = form == "faulty"
    box, answers = queue.SimpleQueue[str](), {}

    def answer() -> None:
        if faulty:
            box.put("a")
            answers["a"] = 1
        else:
            answers["a"] = 1
            box.put("a")

    def ask() -> None:
        assert answers[box.get()] == 1

    await both(ask, answer, form)


RACES = {
    check_then_set: "error",
    lost_update: "error",
    lost_wakeup: "deadlock",
    double_checked_init: "error",
    wrong_notify: "deadlock",
    philosophers: "deadlock",
    barrier_reuse: "deadlock",
    forgotten_release: "deadlock",
    queue_check_then_get: "deadlock",
    put_after_the_last_look: "error",
    semaphore_leak: "error",
    try_lock: "error",
    lock_over_a_sleep: "error",
    simple_queue_race: "error",
}
PROVEN = (
    check_then_set, lost_update, lost_wakeup, double_checked_init, philosophers, forgotten_release,
    queue_check_then_get, put_after_the_last_look, try_lock, simple_queue_race,
)  # fmt: skip
"""Small enough to run every schedule of the repaired form."""


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_a_classic_race_is_found_within_the_default_schedules(race: Any) -> None:
    for chooser in ("random", "pct"):
        assert failure_of(partial(explore, partial(race, "faulty"), chooser=chooser)).kind == RACES[race]


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_the_repaired_form_explores_clean(race: Any) -> None:
    for chooser in ("random", "pct"):
        explore(partial(race, "repaired"), chooser=chooser)


@pytest.mark.parametrize("race", PROVEN, ids=lambda race: race.__name__)
def test_every_schedule_of_the_repaired_form_is_clean(race: Any) -> None:
    assert explore(partial(race, "proven"), chooser="exhaustive", schedules=60_000).exhausted


def test_every_schedule_of_a_lock_over_a_sleep_is_clean() -> None:
    assert explore(partial(lock_over_a_sleep, "repaired"), chooser="exhaustive", schedules=10_000).exhausted


# how a failure is told


def test_a_race_over_a_lock_replays_from_a_file_and_is_made_short(tmp_path: Path) -> None:
    test = partial(wrong_notify, "faulty")
    long = failure_of(lambda: explore(test, shrink=False))
    short = failure_of(lambda: explore(test))
    assert len(short.replay) < len(long.replay)
    assert short.recorded is not None
    read = Replay.load(short.recorded.save(tmp_path / "it.json"))
    again = failure_of(lambda: explore(test, replay=read))
    assert (again.kind, again.replay) == ("deadlock", short.replay)


def test_a_deadlock_of_locks_is_told_with_names_and_places() -> None:
    told = "\n".join(failure_of(lambda: explore(partial(philosophers, "faulty"))).tasks)
    assert "waits for a lock that thread 'first' has" in told
    assert "waits for a lock that thread 'second' has" in told
    assert "dine (test_explored_primitives.py:" in told
    assert "thread_primitives.py" not in told


def test_a_forgotten_release_names_the_thread_that_has_ended() -> None:
    told = "\n".join(failure_of(lambda: explore(partial(forgotten_release, "faulty"))).tasks)
    assert "waits for a lock that thread 'first' took and did not release before it ended" in told


def test_a_wait_without_a_notify_is_a_deadlock_that_says_where() -> None:
    async def test() -> None:
        condition = threading.Condition()

        def wait() -> None:
            with condition:
                condition.wait()

        await start_thread(wait, name="waits")

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "deadlock"
    assert "thread 'waits' at wait (test_explored_primitives.py:" in "\n".join(failure.tasks)


def test_a_lock_held_across_an_await_that_another_task_takes_is_a_deadlock_of_the_loop() -> None:
    async def test() -> None:
        lock = threading.Lock()

        async def hold() -> None:
            with lock:
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(hold())
            group.create_task(hold())

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "deadlock"
    assert "the loop's own thread at" in str(failure)
    assert "waits for a lock that the loop has" in str(failure)


@pytest.mark.parametrize(
    "wait",
    [
        lambda: threading.Event().wait(),
        lambda: queue.Queue[int]().get(),
        lambda: threading.Semaphore(0).acquire(),
        lambda: threading.Barrier(2).wait(),
        lambda: concurrent.futures.Future[int]().result(),
    ],
)
def test_a_wait_that_blocks_the_loop_is_refused_in_words(wait: Callable[[], object]) -> None:
    async def test() -> None:
        wait()

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "not_explorable"
    assert "stops the whole loop" in str(failure)


def test_a_simple_queue_that_blocks_the_loop_for_ever_is_a_deadlock() -> None:
    async def test() -> None:
        queue.SimpleQueue[int]().get()

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "deadlock"
    assert "waits for an empty queue" in str(failure)


def test_a_lock_made_outside_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.testing.explorer.controlled_threads._PATIENCE_S", 1.0)

    def work() -> None:
        with made_outside:
            time.sleep(0.1)

    async def test() -> None:
        await all_of(start_thread(work), start_thread(work))

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "not_explorable"
    assert "made outside of the explored test" in str(failure)
    assert "make locks and queues inside the test function" in str(failure)


# each object does what the interpreter's does


def explored_in_a_thread(check: Callable[[], object]) -> None:
    async def test() -> None:
        await start_thread(check)

    explore(test, schedules=20)
    explore(test, schedules=20, chooser="pct", late_s=1.0)


def test_a_lock_does_what_the_interpreters_does() -> None:
    def check() -> None:
        lock = threading.Lock()
        assert not lock.locked()
        assert lock.acquire()
        assert lock.locked()
        assert not lock.acquire(False)
        assert not lock.acquire(timeout=5)
        with pytest.raises(ValueError, match="non-blocking"):
            lock.acquire(False, 1)
        with pytest.raises(ValueError, match="non-negative"):
            lock.acquire(timeout=-2)
        lock.release()
        with pytest.raises(RuntimeError, match="release unlocked lock"):
            lock.release()
        assert isinstance(lock, type(made_outside)) is False
        assert "unlocked" in repr(lock)

    explored_in_a_thread(check)


def test_another_thread_may_release_a_lock_but_not_an_rlock() -> None:
    async def test() -> None:
        lock, again = threading.Lock(), threading.RLock()

        def take() -> None:
            lock.acquire()
            again.acquire()
            again.acquire()

        await start_thread(take)

        def give_back() -> None:
            lock.release()
            assert not again.acquire(blocking=False)
            with pytest.raises(RuntimeError, match="cannot release un-acquired lock"):
                again.release()

        await start_thread(give_back)

    explore(test, schedules=50)


def test_an_rlock_is_re_entrant_and_a_condition_gives_all_of_it_back() -> None:
    async def test() -> None:
        lock = threading.RLock()
        condition = threading.Condition(lock)
        ready: list[int] = []

        def wait() -> None:
            with lock, lock, condition:
                assert condition.wait_for(lambda: ready)
                assert not condition.wait_for(lambda: False, timeout=60)
            with pytest.raises(RuntimeError):
                lock.release()

        def wake() -> None:
            with condition:
                ready.append(1)
                condition.notify_all()

        await all_of(start_thread(wait), start_thread(wake))

    explore(test)
    explore(test, chooser="pct")


def test_a_condition_of_a_lock_that_is_not_held_refuses() -> None:
    def check() -> None:
        for condition in (threading.Condition(), threading.Condition(threading.Lock())):
            with pytest.raises(RuntimeError, match="un-acquired"):
                condition.wait(1)
            with pytest.raises(RuntimeError, match="un-acquired"):
                condition.notify()

    explored_in_a_thread(check)


def test_a_thread_may_spin_until_an_event_a_lock_or_a_queue_changes() -> None:
    async def test() -> None:
        event, lock, box = threading.Event(), threading.Lock(), queue.SimpleQueue[int]()
        lock.acquire()

        def spin() -> None:
            while not event.is_set():
                pass
            while lock.locked():
                pass
            while box.empty():
                pass

        def change() -> None:
            event.set()
            lock.release()
            box.put(1)

        await all_of(start_thread(spin), start_thread(change))

    explore(test, schedules=50)
    explore(test, schedules=50, chooser="pct")


def test_semaphores_and_barriers_do_what_the_interpreters_do() -> None:
    async def test() -> None:
        bounded, barrier = threading.BoundedSemaphore(2), threading.Barrier(2)
        inside, most, led = [0], [0], []

        def work() -> None:
            with bounded:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(1)
                inside[0] -= 1
            led.append(barrier.wait())

        await all_of(*(start_thread(work) for _ in range(4)))
        assert most == [2]
        assert sorted(led) == [0, 0, 1, 1]

        def too_often() -> None:
            with pytest.raises(ValueError, match="released too many times"):
                bounded.release()
            assert not threading.Semaphore(0).acquire(timeout=3)
            with pytest.raises(threading.BrokenBarrierError):
                barrier.wait(timeout=3)
            assert barrier.broken

        await start_thread(too_often)

    explore(test, schedules=100)


@pytest.mark.parametrize("make", [queue.Queue, queue.LifoQueue, queue.PriorityQueue])
def test_a_bounded_queue_is_joined_when_all_its_items_are_done(make: Any) -> None:
    async def test() -> None:
        box = make(2)
        done: list[int] = []

        def work() -> None:
            while (item := box.get()) < 9:
                done.append(item)
                box.task_done()

        def produce() -> None:
            for item in (3, 1, 2):
                box.put(item)
            box.join()
            assert sorted(done) == [1, 2, 3]
            with pytest.raises(ValueError, match="too many times"):
                box.task_done()
            box.put(9)

        def overfill() -> None:
            box.put(1)
            box.put(1)
            with pytest.raises(queue.Full):
                box.put(1, timeout=60)

        await all_of(start_thread(work), start_thread(produce))
        await start_thread(overfill)

    explore(test)
    explore(test, chooser="pct")


def test_who_forgets_that_a_task_is_done_is_told_by_a_deadlock() -> None:
    async def test() -> None:
        box = queue.Queue[int]()
        box.put(1)

        def work() -> None:
            box.get()

        await all_of(start_thread(work), start_thread(box.join, name="joins"))

    failure = failure_of(lambda: explore(test))
    assert failure.kind == "deadlock"
    assert "thread 'joins'" in "\n".join(failure.tasks)


@pytest.mark.skipif(not hasattr(queue.Queue, "shutdown"), reason="Queue.shutdown came with Python 3.13")
def test_a_queue_that_is_shut_down_lets_its_readers_go() -> None:
    async def test() -> None:
        box: Any = queue.Queue[int]()

        def read() -> None:
            with pytest.raises(vars(queue)["ShutDown"]):
                box.get()

        await all_of(start_thread(read), start_thread(read), start_thread(box.shutdown))

    explore(test)


def test_a_simple_queue_does_what_the_one_in_c_does() -> None:
    async def test() -> None:
        box = queue.SimpleQueue[int]()
        assert isinstance(box, queue.SimpleQueue)
        got: list[int] = []

        def take() -> None:
            got.append(box.get())
            got.append(box.get(timeout=100))
            with pytest.raises(queue.Empty):
                box.get_nowait()
            with pytest.raises(queue.Empty):
                box.get(timeout=5)
            with pytest.raises(ValueError, match="non-negative"):
                box.get(timeout=-1)
            assert box.qsize() == 0

        def give() -> None:
            box.put(1)
            time.sleep(50)
            box.put_nowait(2)

        await all_of(start_thread(take), start_thread(give))
        assert got == [1, 2]

    explore(test)


@pytest.mark.parametrize("make", [lambda: queue.SimpleQueue(), lambda: queue.Queue()], ids=["simple", "queue"])
def test_a_put_is_a_switch_point(make: Callable[[], Any]) -> None:
    """Between what a thread has read and what it writes of it, others may work."""

    async def test() -> None:
        box, count = make(), [0]

        def add() -> None:
            before = count[0]
            box.put(before)
            count[0] = before + 1

        await all_of(start_thread(add), start_thread(add))
        assert count == [2]

    with pytest.raises(ScheduleFailure):
        explore(test)


def test_others_may_look_just_before_a_put() -> None:
    async def test() -> None:
        box = queue.SimpleQueue[int]()
        said: list[str] = []

        def announce_and_put() -> None:
            said.append("it is there")
            box.put(1)

        def believe() -> None:
            if said:
                box.get_nowait()

        await all_of(start_thread(announce_and_put), start_thread(believe))

    with pytest.raises(ScheduleFailure):
        explore(test)


class Letters(queue.SimpleQueue[str]):
    """Of the interpreter's own class."""


def test_a_subclass_of_the_simple_queue_is_one_of_the_schedule() -> None:
    async def test() -> None:
        class Named(queue.SimpleQueue[str]):
            name = "letters"

        box = Named()
        assert type(box) is Named
        await all_of(start_thread(box.get), start_thread(box.put, "a"))
        letters = Letters()
        letters.put("a")
        assert letters.get() == "a"

    explore(test, schedules=50)


def test_names_that_were_imported_from_the_module_are_replaced_too() -> None:
    async def test() -> None:
        lock, again, box = LockByName(), RLockByName(), SimpleQueueByName[int]()
        read: list[int] = []

        def work(number: int) -> None:
            with again, lock:
                sleep_by_name(3600)
                box.put(number)
                read.append(box.get())

        await all_of(start_thread(work, 1), start_thread(work, 2))
        assert sorted(read) == [1, 2]

    began = time.monotonic()
    explore(test, schedules=50)
    assert time.monotonic() - began < 60
    assert "explored" not in repr(LockByName())
    assert LockByName is threading.Lock


def test_library_code_called_in_the_test_takes_locks_of_the_schedule() -> None:
    async def test() -> None:
        future = concurrent.futures.Future[int]()
        told: list[str] = []

        class Telling(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                time.sleep(1)
                told.append(record.getMessage())

        handler = Telling()
        record = logging.makeLogRecord({"msg": "hello"})

        def work() -> int:
            handler.handle(record)
            return future.result(timeout=60)

        first, second, sets = start_thread(work), start_thread(work), start_thread(future.set_result, 3)
        assert await first == await second == 3
        await sets
        assert told == ["hello"] * 2
        handler.close()

    explore(test, schedules=100)


# what outlives a schedule


def test_a_lock_that_a_schedule_left_taken_is_free_in_the_next_and_outside() -> None:
    kept: dict[str, Any] = {}

    async def test() -> None:
        lock = kept.setdefault("lock", threading.Lock())
        again = kept.setdefault("again", threading.RLock())
        event = kept.setdefault("event", threading.Event())
        event.clear()
        seen: list[int] = []

        def work() -> None:
            with lock, again:
                seen.append(1)
                assert len(seen) == 1
                time.sleep(1)
                seen.pop()
            event.set()

        await all_of(start_thread(work), start_thread(work), start_thread(event.wait))
        lock.acquire()
        again.acquire()

    explore(test, schedules=30)
    lock, again, event = kept["lock"], kept["again"], kept["event"]
    assert lock.acquire(timeout=5)
    other = threading.Thread(target=lambda: kept.update(found=lock.acquire(timeout=0.01)))
    other.start()
    other.join(10)
    assert kept["found"] is False
    lock.release()
    with again, again:
        pass
    assert event.wait(5)


def test_a_queue_that_outlives_its_schedule_keeps_what_is_in_it() -> None:
    kept: list[Any] = []

    async def test() -> None:
        if not kept:
            kept.extend((queue.Queue[int](), queue.SimpleQueue[int]()))
        for box in kept:
            await start_thread(box.put, 1)
            assert await start_thread(box.get) == 1
            await start_thread(box.put, 2)
            assert await start_thread(box.get) == 2
            await start_thread(box.put, 3)
            box.get()
            await start_thread(box.put, 4)
            box.get()

    explore(test, schedules=10)
    for box in kept:
        box.put(5)
        assert box.get(timeout=5) == 5
        with pytest.raises(queue.Empty):
            box.get(timeout=0.01)


def test_real_threads_beside_an_exploration_get_the_interpreters_own() -> None:
    made: list[Any] = []
    explored = threading.Event()

    def beside() -> None:
        explored.wait(30)
        made.extend((threading.Lock(), threading.RLock(), queue.SimpleQueue[int](), threading.Event()))

    thread = threading.Thread(target=beside)
    thread.start()

    async def test() -> None:
        explored.set()
        while thread.is_alive():
            thread.join(0.01)  # real time: nothing of it is the schedule's

    failure = None
    try:
        explore(test, schedules=1)
    except ScheduleFailure as error:
        failure = error
    thread.join(30)
    assert failure is None or failure.kind == "not_explorable"
    assert [type(one).__module__ for one in made[:3]] == ["_thread", "_thread", "_queue"]


def test_threads_that_wait_for_any_of_these_end_with_their_schedule() -> None:
    before = set(threading.enumerate())

    async def test() -> None:
        lock, box, condition = threading.Lock(), queue.Queue[int](), threading.Condition()
        lock.acquire()

        def stubborn() -> None:
            with condition:
                while True:
                    condition.wait()

        for wait in (lock.acquire, box.get, queue.SimpleQueue[int]().get, threading.Event().wait, stubborn):
            start_thread(wait)
        await asyncio.sleep(1)

    assert failure_of(lambda: explore(test)).kind == "leak"
    assert set(threading.enumerate()) <= before
    assert threading.Lock is LockByName
    assert "explored" not in repr(threading.Lock())
