"""An interrupt of one scope is never seen in another: threads, pools, sibling tasks, generators, contexts."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.errors import Interrupted
from holdfast.runtime.interrupt.interrupt import Interrupt, check_interrupt, current_interrupt, is_interrupted, use
from holdfast.testing import explore

PATIENCE_S = 10.0


def on_asyncio(test: Callable[[], Coroutine[Any, Any, object]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(bounded())


def triggered() -> Interrupt:
    interrupt = Interrupt(name="somebody else's")
    interrupt.trigger()
    return interrupt


def test_a_thread_with_a_recycled_id_is_not_born_interrupted() -> None:
    seen: dict[int, list[bool]] = {}

    def run(interrupt: Interrupt) -> None:
        with use(interrupt):
            seen.setdefault(threading.get_ident(), []).append(is_interrupted())

    for number in range(20):
        thread = threading.Thread(target=run, args=(triggered() if number % 2 == 0 else Interrupt(),))
        thread.start()
        thread.join(PATIENCE_S)
    assert any(len(states) > 1 for states in seen.values()), "no id was recycled"
    states = [state for states in seen.values() for state in states]
    assert states.count(True) == states.count(False) == 10


def test_the_next_call_on_a_pool_thread_sees_nothing_of_the_last() -> None:
    def run(interrupt: Interrupt) -> tuple[bool, int]:
        with use(interrupt):
            return is_interrupted(), threading.get_ident()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, triggered()).result(PATIENCE_S)
        second = pool.submit(run, Interrupt()).result(PATIENCE_S)
        bare = pool.submit(current_interrupt).result(PATIENCE_S)
    assert first[0]
    assert not second[0]
    assert first[1] == second[1]
    assert bare is None


def test_a_thread_that_carries_the_context_sees_its_own_interrupt_only() -> None:
    mine, yours = Interrupt(name="mine"), Interrupt(name="yours")
    ready, go = threading.Barrier(3), threading.Event()
    seen: dict[str, str] = {}

    def work() -> None:
        interrupt = current_interrupt()
        assert interrupt is not None
        ready.wait(PATIENCE_S)
        go.wait(PATIENCE_S)
        seen[interrupt.name] = "interrupted" if is_interrupted() else "going on"

    threads = []
    for interrupt in (mine, yours):
        with use(interrupt):
            threads.append(threading.Thread(target=contextvars.copy_context().run, args=(work,)))
    for thread in threads:
        thread.start()
    ready.wait(PATIENCE_S)
    yours.trigger()
    go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == {"mine": "going on", "yours": "interrupted"}


async def siblings() -> None:
    ended: list[str] = []

    async def session(name: str, interrupt: Interrupt) -> None:
        with use(interrupt):
            await asyncio.sleep(0)
            assert current_interrupt() is interrupt
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
                    check_interrupt()
                await interrupt.sleep(1)
            except Interrupted as error:
                assert error.cause.reason == name
                ended.append(name)
        assert current_interrupt() is None

    interrupts = {name: Interrupt(name=name) for name in ("a", "b", "c")}
    tasks = {name: asyncio.create_task(session(name, interrupt)) for name, interrupt in interrupts.items()}
    interrupts["b"].trigger("b")
    await asyncio.gather(*tasks.values())
    assert ended == ["b"]


def test_sibling_coroutines_see_only_their_own_under_every_schedule() -> None:
    explore(siblings)
    explore(siblings, tasks="eager")


# Generators


def numbers(interrupt: Interrupt | None, count: int = 3) -> Iterator[Interrupt | None]:
    with use(interrupt):
        for _ in range(count):
            yield current_interrupt()


async def async_numbers(interrupt: Interrupt, count: int = 3) -> AsyncIterator[Interrupt | None]:
    with use(interrupt):
        for _ in range(count):
            await asyncio.sleep(0)
            with pytest.raises(Interrupted):
                check_interrupt()
            yield current_interrupt()


def test_a_generator_does_not_hand_its_interrupt_to_who_iterates() -> None:
    stopped, mine = triggered(), Interrupt(name="mine")
    for surrounding in (None, mine):
        with use(surrounding):
            for inside in numbers(stopped):
                assert inside is stopped
                assert current_interrupt() is surrounding
                assert not is_interrupted()
                check_interrupt()
            assert current_interrupt() is surrounding


def test_an_async_generator_does_not_hand_its_interrupt_to_who_iterates() -> None:
    stopped = triggered()

    async def test() -> None:
        async for inside in async_numbers(stopped):
            assert inside is stopped
            assert current_interrupt() is None
            check_interrupt()
            await asyncio.sleep(0)
            assert current_interrupt() is None

    on_asyncio(test)
    explore(test, schedules=20)


def test_a_generator_that_is_dropped_half_way_leaves_nothing_behind() -> None:
    stopped = triggered()

    async def test() -> None:
        async for _ in async_numbers(stopped):
            break
        assert current_interrupt() is None
        gc.collect()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        check_interrupt()
        assert current_interrupt() is None
        for _ in numbers(stopped):
            break
        assert current_interrupt() is None

    on_asyncio(test)


def test_generators_inside_each_other_each_see_their_own() -> None:
    first, second = Interrupt(name="first"), Interrupt(name="second")

    def outer() -> Iterator[str]:
        with use(first):
            for inside in numbers(second, 2):
                here = current_interrupt()
                assert here is not None
                assert inside is not None
                yield f"{here.name} around {inside.name}"

    assert list(outer()) == ["first around second"] * 2


def test_what_a_generator_starts_carries_its_interrupt() -> None:
    interrupt = Interrupt()

    async def look() -> Interrupt | None:
        await asyncio.sleep(0)
        return current_interrupt()

    async def starting() -> AsyncIterator[tuple[asyncio.Task[Interrupt | None], Interrupt | None]]:
        with use(interrupt):
            yield asyncio.create_task(look()), await asyncio.to_thread(current_interrupt)

    async def test() -> None:
        async for task, in_thread in starting():
            assert in_thread is interrupt
            assert await task is interrupt
            assert current_interrupt() is None

    on_asyncio(test)


def test_a_context_manager_made_of_a_generator_hands_it_to_its_body() -> None:
    interrupt = Interrupt()

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        with use(interrupt):
            yield

    @contextlib.asynccontextmanager
    async def async_using() -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(use(interrupt))
            yield

    async def test() -> None:
        with using():
            assert current_interrupt() is interrupt
        assert current_interrupt() is None
        async with async_using():
            await asyncio.sleep(0)
            assert current_interrupt() is interrupt
        assert current_interrupt() is None

    on_asyncio(test)


def test_a_generator_that_uses_such_a_context_manager_still_keeps_it_to_itself() -> None:
    stopped = triggered()

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        with use(stopped):
            yield

    def items() -> Iterator[bool]:
        with using():
            yield is_interrupted()

    for inside in items():
        assert inside
        check_interrupt()
