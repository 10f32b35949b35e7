"""On virtual time an hour takes no time, and everything else is asyncio's."""

from __future__ import annotations

import asyncio
import threading

import pytest

from holdfast.testing import ManualClock, NotExplorable, ScheduleFailure, VirtualClock, run_virtual


def test_time_jumps_to_the_next_timer_and_only_when_nothing_can_run() -> None:
    async def test() -> list[str]:
        loop = asyncio.get_running_loop()
        clock = VirtualClock()
        began, began_wall = loop.time(), clock.now()
        seen: list[str] = []

        async def sleeper(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append(f"{name} {loop.time() - began:g}")

        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("hour", 3600))
            group.create_task(sleeper("second", 1))
            for _ in range(100):
                await asyncio.sleep(0)
            seen.append(f"busy {clock.monotonic() - began:g}")
        assert clock.now() - began_wall == 3600
        return seen

    assert run_virtual(test()) == ["busy 0", "second 1", "hour 3600"]


def test_timers_of_one_instant_fire_in_the_order_they_were_set() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        order: list[int] = []
        for number in range(50):
            loop.call_later(1.0, order.append, number)
        await asyncio.sleep(2)
        assert order == list(range(50))

    run_virtual(test())


def test_a_timeout_fires_in_virtual_time() -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86_400):
                await asyncio.Event().wait()

    run_virtual(test())


def test_many_cancelled_timers_are_dropped() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(10_000):
            loop.call_later(1e6, len, "").cancel()
        assert len(loop._timers) < 300  # type: ignore[attr-defined]
        began = loop.time()
        await asyncio.sleep(1)
        assert loop.time() == began + 1

    run_virtual(test())


def test_the_error_of_the_coroutine_comes_out_as_it_is() -> None:
    async def test() -> None:
        raise KeyError("this")

    with pytest.raises(KeyError, match="this"):
        run_virtual(test())


def test_a_wait_for_nothing_is_a_deadlock() -> None:
    with pytest.raises(ScheduleFailure, match="deadlock") as caught:
        run_virtual(asyncio.Event().wait())
    assert "wait" in caught.value.tasks[0]


def test_tasks_left_over_fail() -> None:
    async def test() -> None:
        task = asyncio.create_task(asyncio.sleep(5), name="forgotten")
        assert not task.done()

    with pytest.raises(ScheduleFailure, match="forgotten"):
        run_virtual(test())


def test_executor_calls_run_while_time_stands_still() -> None:
    async def test() -> str:
        gate = threading.Event()
        loop = asyncio.get_running_loop()
        began = loop.time()
        ticker = loop.call_later(5, len, "")
        call = asyncio.create_task(asyncio.to_thread(gate.wait, 10))
        await asyncio.sleep(0)
        loop.call_soon(gate.set)
        assert await call
        assert loop.time() == began
        ticker.cancel()
        return threading.current_thread().name

    assert run_virtual(test()) == threading.current_thread().name


def test_a_foreign_thread_can_wake_the_loop() -> None:
    async def test() -> int:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int] = loop.create_future()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(answer.set_result, 42))
        thread.start()
        value = await answer
        thread.join(10)
        return value

    assert run_virtual(test()) == 42


def test_call_soon_from_a_foreign_thread_is_refused() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(NotExplorable, match="call_soon_threadsafe"):
            await asyncio.to_thread(loop.call_soon, len, "")

    run_virtual(test())


def test_running_inside_a_running_loop_is_refused() -> None:
    async def inside() -> None:
        inner = asyncio.sleep(0)
        try:
            run_virtual(inner)
        finally:
            inner.close()

    with pytest.raises(RuntimeError, match="plain function"):
        asyncio.run(inside())


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(100.0)
    assert (clock.now(), clock.monotonic()) == (100.0, 0.0)
    clock.advance(5)
    assert (clock.now(), clock.monotonic()) == (105.0, 5.0)
    clock.jump(-50)
    assert (clock.now(), clock.monotonic()) == (55.0, 5.0)
    with pytest.raises(ValueError, match="jump"):
        clock.advance(-1)
