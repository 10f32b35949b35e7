"""Coroutines that share a task one after another: each has what it would have in a task of its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from holdfast import Host, Run, Settings, agent
from holdfast.errors import Interrupted, RunFailed
from holdfast.runtime import Scope, current_scope
from holdfast.testing import VirtualClock, explore, run_virtual

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


async def play(work: Callable[[Run], Any], **settings: Any) -> str:
    """What the agent answers."""
    async with Host(
        agent(name="main")(work), store="memory://", clock=VirtualClock(), settings=Settings(**settings)
    ) as host:
        return await host.session("s").ask("go")


def test_what_one_sets_the_next_does_not_see_whether_it_waits_or_not() -> None:
    async def quick(item: int) -> str:
        before = seen.get()
        seen.set(str(item))
        return before

    async def slow(item: int) -> str:
        before = seen.get()
        seen.set(str(item))
        await asyncio.sleep(1)
        assert seen.get() == str(item)
        return before

    async def work(run: Run) -> str:
        seen.set("the agent's")
        for one in (quick, slow):
            assert set(await run.map(one, range(70), concurrency=3)) == {"the agent's"}
        return "ok"

    assert run_virtual(play(work)) == "ok"


def test_what_never_waits_takes_one_task_and_what_waits_has_one_to_itself() -> None:
    tasks: dict[int, Any] = {}
    barrier = asyncio.Barrier(1)

    async def quick(item: int) -> None:
        tasks[item] = asyncio.current_task()

    async def meets(item: int) -> None:
        tasks[item] = asyncio.current_task()
        await barrier.wait()
        assert asyncio.current_task() is tasks[item]

    async def work(run: Run) -> str:
        nonlocal barrier
        await run.map(quick, range(500), concurrency=500)
        few = len(set(tasks.values()))
        tasks.clear()
        barrier = asyncio.Barrier(500)
        await run.map(meets, range(500), concurrency=500)
        return f"{few} {len(set(tasks.values()))}"

    assert run_virtual(play(work)) == "1 500"


def test_all_that_wait_have_begun_after_a_few_ticks() -> None:
    async def work(run: Run) -> str:
        ticks = 0
        begun = 0

        async def clock() -> int:
            nonlocal ticks
            while begun < 1000:
                ticks += 1
                await asyncio.sleep(0)
            return ticks

        async def wait(_: int) -> None:
            nonlocal begun
            begun += 1
            await asyncio.sleep(100)

        counting = run.spawn(clock)
        await run.map(wait, range(1000), concurrency=1000)
        return str(await counting)

    assert int(run_virtual(play(work))) < 80


def test_timeouts_task_groups_scopes_and_anyio_work_inside() -> None:
    async def inner(item: int) -> int:
        await asyncio.sleep(0.1)
        return item

    async def one(item: int) -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.sleep(10)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(inner(n)) for n in range(3)]
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
                await asyncio.sleep(10)
        async with Scope("own") as scope:
            assert current_scope() is scope
            handle = scope.spawn(inner(4))
        with anyio.move_on_after(0.5) as cut:
            await asyncio.sleep(10)
        assert cut.cancelled_caught
        return f"{item} {[task.result() for task in tasks]} {await handle}"

    async def fails() -> None:
        raise ValueError("no")

    async def work(run: Run) -> str:
        answers = await run.map(one, range(20), concurrency=4)
        assert answers == [f"{n} [0, 1, 2] 4" for n in range(20)]
        return "ok"

    assert run_virtual(play(work)) == "ok"


def test_one_that_cancels_its_own_task_and_goes_on_does_not_touch_the_next() -> None:
    async def rude(item: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        if item % 3 == 0:
            task.cancel()
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                return item
        elif item % 3 == 1:
            task.cancel()
            return item
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(1))
        async with asyncio.timeout(5):
            await asyncio.sleep(1)
        return item

    async def work(run: Run) -> str:
        return str(await run.map(rude, range(30), concurrency=2) == list(range(30)))

    assert run_virtual(play(work)) == "True"


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_ends_cancelled_ends_all_with_a_cause_that_names_it(waits: bool) -> None:
    async def one(item: int) -> None:
        if item == 2:
            if waits:
                await asyncio.sleep(1)
            raise asyncio.CancelledError
        await asyncio.sleep(50)

    async def work(run: Run) -> str:
        try:
            await run.map(one, range(9), concurrency=4, name="step")
        except Interrupted as interrupted:
            return interrupted.cause.reason
        return "nothing was said"

    assert run_virtual(play(work)) == "step 3 was cancelled"


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_wants_to_end_the_process_ends_itself(waits: bool) -> None:
    async def one() -> None:
        if waits:
            await asyncio.sleep(1)
        raise SystemExit(3)

    async def work(run: Run) -> None:
        await run.parallel(one)

    with pytest.raises(RunFailed, match=r"one 1 called sys\.exit\(3\)"):
        run_virtual(play(work))


def test_one_that_will_not_end_is_named_with_the_place_where_it_is() -> None:
    free = asyncio.Event()

    async def stubborn(item: int) -> None:
        while item == 1 and not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        await asyncio.sleep(1000)

    async def work(run: Run) -> None:
        await run.map(stubborn, range(3), name="step")

    async def main() -> None:
        nonlocal free
        free = asyncio.Event()
        settings = Settings(grace_s=0.1, abandon_after_s=0.1)
        async with Host(agent(name="main")(work), store="memory://", clock=VirtualClock(), settings=settings) as host:
            session = host.session("s")
            await session.send("go")
            await asyncio.sleep(1)
            receipt = await session.interrupt("enough")
            (left,) = receipt.abandoned
            assert left.name == "step 2"
            assert any("in stubborn" in line for line in left.stack)
            free.set()
            await asyncio.sleep(2000)

    run_virtual(main())


def test_items_that_come_late_are_in_order_whatever_the_schedule() -> None:
    async def main() -> None:
        asking = 0

        async def items() -> AsyncIterator[int]:
            nonlocal asking
            for number in range(6):
                asking += 1
                assert asking == 1
                await asyncio.sleep(0)
                asking -= 1
                yield number

        async def one(item: int) -> int:
            for _ in range(item % 3):
                await asyncio.sleep(0)
            return item

        async def work(run: Run) -> str:
            return str(await run.map(one, items(), concurrency=3))

        assert await play(work) == "[0, 1, 2, 3, 4, 5]"

    explore(main, schedules=60)
    explore(main, schedules=20, chooser="pct", tasks="eager")


def test_room_is_used_and_kept_whatever_the_schedule() -> None:
    async def main() -> None:
        busy = most = 0

        async def one(item: int) -> int:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(1)
            busy -= 1
            return item

        async def work(run: Run) -> str:
            return str(await run.map(one, iter(range(7)), concurrency=3))

        assert await play(work) == "[0, 1, 2, 3, 4, 5, 6]"
        assert most == 3

    explore(main, schedules=60)
    explore(main, schedules=20, tasks="eager")


def test_lanes_that_are_cancelled_before_they_begin_end_all_instead_of_being_waited_for() -> None:
    async def work(run: Run) -> str:
        async def one(item: int) -> None:
            if item == 0:
                before = asyncio.all_tasks()
                asyncio.get_running_loop().call_soon(lambda: [t.cancel() for t in asyncio.all_tasks() - before])
            await asyncio.sleep(50)

        try:
            await run.map(one, range(9), name="step")
        except Interrupted as interrupted:
            return interrupted.cause.reason
        return "nothing was said"

    assert run_virtual(play(work)) == "step was cancelled before it began"


def test_a_cancellation_that_comes_too_late_meets_no_other_item() -> None:
    async def one(item: int) -> int:
        if item == 0:
            task = asyncio.current_task()
            assert task is not None
            await asyncio.sleep(1)
            asyncio.get_running_loop().call_later(1, task.cancel)  # somebody's deadline, of somebody who has gone
        else:
            await asyncio.sleep(5)
        return item

    async def work(run: Run) -> str:
        return str(await run.map(one, range(6), concurrency=2))

    assert run_virtual(play(work)) == "[0, 1, 2, 3, 4, 5]"


def test_a_thousand_that_wait_begin_on_a_loop_of_eager_tasks_too() -> None:
    async def main() -> None:
        async def one(item: int) -> int:
            await asyncio.sleep(1)
            return item

        async def work(run: Run) -> str:
            return str(sum(await run.map(one, range(1_000), concurrency=1_000)))

        assert await play(work) == "499500"

    explore(main, schedules=1, tasks="eager")


@pytest.mark.parametrize("waits", [True, False])
def test_of_many_that_fail_at_once_the_first_error_is_raised_and_the_others_are_told(waits: bool) -> None:
    async def one(item: int) -> None:
        await asyncio.sleep(1)
        if not waits:
            raise ValueError(f"broke {item}")
        try:
            await asyncio.sleep(item)
        finally:
            raise ValueError(f"broke {item}")

    async def work(run: Run) -> str:
        with pytest.raises(ValueError, match="broke 0") as caught:
            await run.map(one, range(3), name="step")
        return "; ".join(caught.value.__notes__)

    assert (
        run_virtual(play(work))
        == "in step 1; then, in step 2: ValueError: broke 1; then, in step 3: ValueError: broke 2"
    )


def test_a_function_that_only_makes_a_coroutine_is_an_error_and_not_left_undone() -> None:
    async def one(item: int) -> int:
        return item

    async def work(run: Run) -> str:
        said = set()
        for attempt in (
            lambda: run.parallel(lambda: one(1)),
            lambda: run.map(lambda item: one(item), [1]),
            lambda: run.call(lambda: one(1)),
        ):
            with pytest.raises(TypeError) as caught:
                await attempt()
            said.add(str(caught.value))
        (told,) = said
        run.spawn(lambda: one(1))
        return told

    with pytest.raises(RunFailed, match="<lambda> returned a coroutine, which is never awaited"):
        asyncio.run(asyncio.wait_for(play(work), 60))
