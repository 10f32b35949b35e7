"""A shield keeps the delivery away for a bounded time, and loses none."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

import pytest

from holdfast.errors import Interrupted
from holdfast.runtime.interrupt.interrupt import Interrupt, check_interrupt, current_interrupt, use
from holdfast.runtime.interrupt.shield import shielded_by
from holdfast.testing import explore, run_virtual


class Owner:
    """Delivers as a scope does: natively, unless a shield holds the delivery."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.deliveries = 0
        self.interrupt = interrupt

    def start(self, task: asyncio.Task[object], context: contextvars.Context | None = None) -> None:
        self.interrupt.on_trigger(lambda _: self.deliver(task, context))

    def deliver(self, task: asyncio.Task[object], context: contextvars.Context | None) -> None:
        shield = shielded_by(task, context)
        if shield is not None:
            shield.hold(lambda: self.deliver(task, context))
        elif not task.done():
            self.deliveries += 1
            task.cancel()


def at(loop_time_s: float) -> Callable[[], bool]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    return lambda: loop.time() - began == pytest.approx(loop_time_s)


def test_what_is_awaited_inside_finishes_and_the_delivery_comes_afterwards() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        owner = Owner(interrupt)
        done: list[str] = []

        async def member() -> None:
            async with interrupt.shield(timeout_s=5):
                await asyncio.sleep(3)
                done.append("saved")
            await asyncio.sleep(100)
            done.append("never")

        over = at(3)
        task = asyncio.create_task(member())
        owner.start(task)
        await asyncio.sleep(1)
        interrupt.trigger()
        await asyncio.wait([task])
        assert task.cancelled()
        assert done == ["saved"]
        assert owner.deliveries == 1
        assert over()
        assert interrupt.statistics().callbacks == 0

    run_virtual(test())
    explore(test, schedules=50)


def test_a_shield_ends_by_its_time_counted_from_its_entry() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        owner = Owner(interrupt)

        async def member() -> None:
            async with interrupt.shield(timeout_s=5) as inner:
                assert current_interrupt() is inner
                check_interrupt()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.sleep(100)
                with pytest.raises(Interrupted):
                    check_interrupt()
                raise asyncio.CancelledError

        over = at(5)
        task = asyncio.create_task(member())
        owner.start(task)
        await asyncio.sleep(1)
        interrupt.trigger()
        await asyncio.wait([task])
        assert over()
        assert owner.deliveries == 1

    run_virtual(test())


def test_code_inside_does_not_see_the_interrupt_until_the_time_is_over() -> None:
    async def test() -> None:
        interrupt = Interrupt(name="run")
        interrupt.trigger("bye", kind="stop")
        over = at(2)
        with use(interrupt):
            async with interrupt.shield(timeout_s=2):
                inner = current_interrupt()
                assert inner is not None
                await asyncio.sleep(1)
                check_interrupt()
                cause = await inner.wait()
                assert (cause.kind, cause.reason, cause.parent) == ("parent", "bye", interrupt.cause)
            assert over()
            with pytest.raises(Interrupted):
                check_interrupt()

    run_virtual(test())


def test_the_end_of_the_grace_ends_a_shield_without_a_time() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        owner = Owner(interrupt)

        async def member() -> None:
            async with interrupt.shield() as inner:
                await inner.wait()
                await asyncio.sleep(100)

        over = at(4)
        task = asyncio.create_task(member())
        owner.start(task)
        await asyncio.sleep(1)
        interrupt.trigger()
        await asyncio.sleep(3)
        shield = shielded_by(task)
        assert shield is not None
        shield.expire()
        shield.expire()
        assert shielded_by(task) is None
        await asyncio.wait([task])
        assert over()
        assert owner.deliveries == 1

    run_virtual(test())


def test_tasks_started_inside_are_protected_until_the_block_ends() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        owner = Owner(interrupt)
        ended: dict[str, float] = {}
        loop = asyncio.get_running_loop()

        async def part(name: str, delay_s: float) -> None:
            try:
                await asyncio.sleep(delay_s)
            finally:
                ended[name] = loop.time() - began

        def start(name: str, delay_s: float) -> asyncio.Task[object]:
            context = contextvars.copy_context()
            task: asyncio.Task[object] = asyncio.create_task(part(name, delay_s), context=context)
            owner.start(task, context)
            return task

        async def member() -> None:
            async with interrupt.shield(timeout_s=10):
                await start("awaited", 2)
                stray.append(start("stray", 100))
                await asyncio.sleep(1)

        began = loop.time()
        stray: list[asyncio.Task[object]] = []
        task = asyncio.create_task(member())
        await asyncio.sleep(1)
        interrupt.trigger()
        await task
        await asyncio.wait(stray)
        assert ended == {"awaited": pytest.approx(2), "stray": pytest.approx(3)}

    run_virtual(test())


def test_an_inner_shield_does_not_outlast_the_outer_one_and_hands_on_what_it_held() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        owner = Owner(interrupt)
        done: list[str] = []

        async def member() -> None:
            async with interrupt.shield(timeout_s=5):
                async with interrupt.shield(timeout_s=2):
                    await asyncio.sleep(1)
                done.append("inner")
                await asyncio.sleep(1)
                done.append("outer")
                async with interrupt.shield(timeout_s=100):
                    await asyncio.sleep(50)

        over = at(5)
        task = asyncio.create_task(member())
        owner.start(task)
        await asyncio.sleep(0.5)
        interrupt.trigger()
        await asyncio.wait([task])
        assert done == ["inner", "outer"]
        assert over()
        assert owner.deliveries == 1

    run_virtual(test())


def test_a_foreign_cancel_passes_through() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        over = at(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), interrupt.shield(timeout_s=50):
                await asyncio.sleep(100)
        assert over()
        assert current_interrupt() is None
        assert interrupt.statistics().callbacks == 0

    run_virtual(test())


def test_without_an_interrupt_a_long_block_is_no_error() -> None:
    async def test() -> None:
        interrupt = Interrupt()
        async with interrupt.shield(timeout_s=1):
            await asyncio.sleep(10)
            check_interrupt()
        check_interrupt()

    run_virtual(test())
