"""The thread pool keeps its bounds, carries the context, replaces what does not come back, and holds nobody up."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from holdfast.errors import LimitExceeded, Unavailable
from holdfast.runtime.thread_pool import ThreadCall, ThreadPool

WAIT_S = 60


def submit(pool: ThreadPool, fn: Callable[..., Any], *values: Any, **options: Any) -> tuple[ThreadCall, Future[Any]]:
    """Submit a call whose end can be awaited."""
    future: Future[Any] = Future()

    def done(result: Any, error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    return pool.submit(fn, *values, on_done=done, **options), future


def until(condition: Callable[[], object]) -> None:
    deadline = threading.Event()
    for _ in range(WAIT_S * 1000):
        if condition():
            return
        deadline.wait(0.001)
    raise AssertionError("it did not come true in time")


def test_a_call_returns_or_raises_through_its_callback() -> None:
    pool = ThreadPool(name="test")
    assert submit(pool, pow, 2, 5)[1].result(WAIT_S) == 32
    with pytest.raises(ZeroDivisionError):
        submit(pool, divmod, 1, 0)[1].result(WAIT_S)
    assert submit(pool, dict, kwargs={"a": 1})[1].result(WAIT_S) == {"a": 1}


def test_a_call_runs_in_the_callers_context_and_changes_only_its_copy() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    pool = ThreadPool(max_threads=1, name="test")

    def change() -> str:
        before = variable.get()
        variable.set("changed")
        return before

    variable.set("caller")
    assert submit(pool, change)[1].result(WAIT_S) == "caller"
    assert variable.get() == "caller"
    empty = contextvars.Context()
    assert submit(pool, change, context=empty)[1].result(WAIT_S) == "none"
    assert empty[variable] == "changed"


def test_never_more_calls_at_once_than_the_cap_and_none_is_lost() -> None:
    pool = ThreadPool(max_threads=3, name="test")
    lock = threading.Lock()
    running = [0, 0]

    def work() -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)
        threading.Event().wait(0.001)
        with lock:
            running[0] -= 1

    futures: list[Future[Any]] = []

    def source() -> None:
        futures.extend(submit(pool, work)[1] for _ in range(50))

    sources = [threading.Thread(target=source) for _ in range(4)]
    for thread in sources:
        thread.start()
    for thread in sources:
        thread.join(WAIT_S)
    for future in futures:
        future.result(WAIT_S)
    assert len(futures) == 200
    assert running == [0, 3]
    until(lambda: pool.statistics().idle == 3)
    assert pool.statistics().running == 0


def test_an_idle_thread_is_used_again() -> None:
    pool = ThreadPool(name="test")
    first = submit(pool, threading.get_ident)[1].result(WAIT_S)
    until(lambda: pool.statistics().idle == 1)
    assert submit(pool, threading.get_ident)[1].result(WAIT_S) == first


def test_a_call_that_no_thread_has_begun_can_be_taken_back() -> None:
    pool = ThreadPool(max_threads=1, name="test")
    release = threading.Event()
    begun = threading.Event()

    def block() -> None:
        begun.set()
        release.wait(WAIT_S)

    blocking, future = submit(pool, block)
    assert begun.wait(WAIT_S)
    waiting, never = submit(pool, print, "never")
    assert pool.statistics().queued == 1
    assert not blocking.cancel()
    assert waiting.cancel()
    assert not waiting.cancel()
    release.set()
    future.result(WAIT_S)
    assert not never.done()
    assert pool.statistics().queued == 0


def test_an_abandoned_thread_is_counted_for_its_owner_replaced_and_ends_when_it_comes_back() -> None:
    pool = ThreadPool(max_threads=1, name="test")
    release = threading.Event()
    begun = threading.Event()

    def block() -> str:
        begun.set()
        release.wait(WAIT_S)
        return "late"

    blocking, future = submit(pool, block, owner="alice")
    assert begun.wait(WAIT_S)
    assert any(" in block" in line for line in blocking.stack())
    thread = blocking.thread
    assert thread is not None
    _, other = submit(pool, pow, 2, 3, owner="bob")
    assert not other.done()
    assert blocking.abandon()
    assert not blocking.abandon()
    assert other.result(WAIT_S) == 8
    assert (pool.abandoned(), pool.abandoned("alice"), pool.abandoned("bob")) == (1, 1, 0)
    assert pool.statistics().by_owner == {"alice": 1}
    release.set()
    assert future.result(WAIT_S) == "late"
    thread.join(WAIT_S)
    assert not thread.is_alive()
    statistics = pool.statistics()
    assert (statistics.abandoned, statistics.abandoned_total, statistics.running) == (0, 1, 0)
    assert statistics.by_owner == {}
    assert blocking.stack() == ()


def test_at_the_limit_of_abandoned_threads_and_of_the_queue_calls_are_refused() -> None:
    pool = ThreadPool(max_threads=1, abandoned_limit=1, queue_limit=1, name="test")
    release = threading.Event()
    begun = threading.Event()

    def block() -> None:
        begun.set()
        release.wait(WAIT_S)

    blocking, _ = submit(pool, block)
    assert begun.wait(WAIT_S)
    waiting, _ = submit(pool, block)
    with pytest.raises(LimitExceeded, match="calls wait for a thread"):
        submit(pool, block)
    assert waiting.cancel()
    assert blocking.abandon()
    with pytest.raises(LimitExceeded, match="were abandoned and still run"):
        submit(pool, block)
    release.set()
    until(lambda: pool.abandoned() == 0)
    assert submit(pool, pow, 2, 3)[1].result(WAIT_S) == 8


def test_a_closed_pool_refuses_calls_and_its_idle_threads_end() -> None:
    pool = ThreadPool(name="test")
    call, future = submit(pool, threading.current_thread)
    thread = future.result(WAIT_S)
    until(lambda: pool.statistics().idle == 1)
    pool.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(Unavailable, match="is closed"):
        submit(pool, print)
    assert call.thread is None


def test_a_finished_call_is_kept_by_nobody() -> None:
    class Payload:
        """Something a call refers to."""

    pool = ThreadPool(name="test")
    payload = Payload()
    reference = weakref.ref(payload)
    submit(pool, id, payload)[1].result(WAIT_S)
    del payload
    until(lambda: reference() is None)


def test_a_blocked_thread_does_not_hold_up_the_end_of_the_interpreter() -> None:
    program = (
        "import asyncio, time\n"
        "from holdfast.runtime.adoption.tasks import install\n"
        "async def main():\n"
        "    install(asyncio.get_running_loop())\n"
        "    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)\n"
        "    await asyncio.sleep(0.05)\n"
        "asyncio.run(main())\n"
        "print('over')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "over\n"
    assert ended.stderr == ""


def test_sharers_take_turns_for_threads_and_keep_their_own_order() -> None:
    pool = ThreadPool(max_threads=1)
    begun: list[str] = []
    busy, gate, over = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        gate.wait(WAIT_S)

    pool.submit(hold, on_done=lambda *_: None, sharer="first")
    assert busy.wait(WAIT_S)
    for number in range(4):
        pool.submit(begun.append, f"big {number}", on_done=lambda *_: None, sharer="big")
    dropped = pool.submit(begun.append, "dropped", on_done=lambda *_: None, sharer="dropped")
    for number in range(2):
        pool.submit(begun.append, f"small {number}", on_done=lambda *_: None, sharer="small")
    assert pool.statistics().queued == 7
    assert dropped.cancel()
    assert not dropped.cancel()
    pool.submit(over.set, on_done=lambda *_: None, sharer="big")
    gate.set()
    assert over.wait(WAIT_S)
    assert begun == ["big 0", "small 0", "big 1", "small 1", "big 2", "big 3"]
    assert pool.statistics().queued == 0
    pool.close()
