"""Threads that outlive their loop, and callbacks that fail."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.runtime.scope.scope import Scope
from holdfast.runtime.thread_pool import ThreadPool


def until_idle(pool: ThreadPool) -> None:
    """Wait until the one thread of the pool waits for a call again."""
    parked = threading.Event()
    pool.submit(parked.set, on_done=lambda result, error: None)
    assert parked.wait(20)


@pytest.mark.parametrize("state", ["open", "closing", "stopping"])
def test_a_call_that_ends_after_its_loop_was_closed_does_not_cost_the_pool_a_thread(state: str) -> None:
    pool = ThreadPool(max_threads=1, name="test")
    release = threading.Event()

    async def main() -> Scope:
        scope = Scope("left", threads=pool).open()
        scope.spawn(release.wait, 20, on="thread")
        if state == "closing":
            scope.close_when_done(lambda: None)
        elif state == "stopping":
            scope.interrupt.trigger("enough")
            await asyncio.sleep(0.01)
        return scope

    scope = asyncio.run(main())
    release.set()
    until_idle(pool)
    assert not scope.members()
    pool.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_does_not_cost_the_pool_its_thread() -> None:
    pool = ThreadPool(max_threads=1, name="test")

    def fails(result: object, error: BaseException | None) -> None:
        raise ValueError("odd")

    pool.submit(int, on_done=fails)
    until_idle(pool)
    pool.close()
