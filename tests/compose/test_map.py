"""`Run.map`: the same work for many items, bounded, in order, fair, and stopped whole."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from holdfast import Host, Run, Settings, agent, parallel
from holdfast.errors import InvalidRequest, MailboxFull, RunFailed, RunInterrupted, UnknownAgent
from holdfast.protocol.events import ChildFinished, ChildStarted
from holdfast.runtime import current_interrupt
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, run_virtual
from tests.compose.kit import log_of


def virtual(work: Callable[[Run], Any], *others: Any, **settings: Any) -> str:
    """What an agent answers, on virtual time."""

    async def main() -> str:
        async with Host(
            agents=[agent(name="main")(work), *others],
            store="memory://",
            clock=VirtualClock(),
            settings=Settings(**settings),
        ) as host:
            return await host.session("s").ask("go")

    return run_virtual(main())


def real(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it with real threads, in bounded time."""

    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())


def test_results_come_in_the_order_of_the_items_and_no_more_than_so_many_are_at_work() -> None:
    busy = most = 0

    async def work(run: Run) -> str:
        async def one(item: int) -> int:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(10 - item % 10)
            busy -= 1
            return item * item

        return str(await run.map(one, range(40), concurrency=7) == [n * n for n in range(40)])

    assert virtual(work) == "True"
    assert most == 7


def test_an_item_is_taken_when_there_is_room_for_it_and_not_before() -> None:
    async def work(run: Run) -> str:
        taken = done = 0

        def items() -> Iterator[int]:
            nonlocal taken
            for number in range(50):
                taken += 1
                assert taken - done <= 4
                yield number

        async def one(_: int) -> None:
            nonlocal done
            await asyncio.sleep(1)
            done += 1

        async def later() -> AsyncIterator[int]:
            for item in items():
                await asyncio.sleep(0.1)
                yield item

        await run.map(one, items(), concurrency=4)
        taken = done = 0
        await run.map(one, later(), concurrency=4)
        return "ok"

    assert virtual(work) == "ok"


def test_ten_thousand_items_wait_for_next_to_nothing() -> None:
    """What they cost at most at one time does not grow with their number."""

    async def peak(run: Run, items: int) -> int:
        async def one(_: int) -> None:
            await asyncio.sleep(0)

        gc.collect()
        tracemalloc.start()
        await run.map(one, range(items), concurrency=20)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    async def work(run: Run) -> str:
        few = await peak(run, 500)
        many = await peak(run, 10_000)
        return f"{few} {many}"

    few, many = map(int, virtual(work).split())
    assert many - few < 10_000 * 8 * 3  # the list of results


def test_the_first_error_stops_the_others_and_says_which_item_it_was() -> None:
    stopped: list[int] = []
    begun: list[int] = []

    async def work(run: Run) -> str:
        async def one(item: int) -> None:
            begun.append(item)
            try:
                await asyncio.sleep(1 if item == 2 else 5)
            except asyncio.CancelledError:
                stopped.append(item)
                raise
            raise KeyError(item)

        with pytest.raises(KeyError) as caught:
            await run.map(one, range(100), concurrency=4, name="look up")
        assert caught.value.__notes__ == ["in look up 3"]
        return "ok"

    assert virtual(work) == "ok"
    assert (begun, sorted(stopped)) == ([0, 1, 2, 3], [0, 1, 3])


def test_an_agent_is_asked_each_item_as_a_child() -> None:
    @agent
    async def upper(run: Run) -> str:
        await asyncio.sleep(1)
        return run.text.upper()

    async def work(run: Run) -> str:
        return " ".join([*await run.map(upper, "abc"), *await run.map("upper", ["d"], name="by name")])

    assert virtual(work, upper) == "A B C D"


def test_an_item_that_fails_or_is_late_interrupts_the_other_children_with_a_cause_that_names_it() -> None:
    @agent
    async def picky(run: Run) -> str:
        if run.text == "bad":
            raise ValueError("not that")
        await asyncio.sleep(50)
        return run.text

    async def work(run: Run) -> str:
        with pytest.raises(RunFailed, match="child picky 2 failed: ValueError: not that") as caught:
            await run.map(picky, ["a", "bad", "c"])
        assert caught.value.__notes__ == ["in picky 2"]
        with pytest.raises(RunInterrupted, match="deadline of 9 s"):
            await run.map(picky, ["a"], timeout_s=9)
        with pytest.raises(UnknownAgent, match=r"add the agent to the host") as unknown:
            await run.map("nobody", ["a"])
        assert "--agent" not in str(unknown.value), "no message of a person names it"
        for no_function in (5, None, picky):
            with pytest.raises(InvalidRequest, match=r"parallel\(\) takes functions; .* is not callable") as refused:
                await run.parallel(no_function)  # type: ignore[arg-type]
        assert "delegate()" in refused.value.hint
        with pytest.raises(InvalidRequest, match=r"map\(\) takes functions; 5 is not callable"):
            await run.map(5, ["a"])  # type: ignore[arg-type]
        timeout_s: Any
        for timeout_s in (math.nan, "5"):
            for timed in (picky, len):
                with pytest.raises(InvalidRequest, match=f"deadline_s is {timeout_s!r}"):
                    await run.map(timed, ["a"], timeout_s=timeout_s)
            with pytest.raises(InvalidRequest, match="deadline_s is "):
                await run.delegate(picky, "a", timeout_s=timeout_s)
        for no_time in (float("nan"), "5"):
            with pytest.raises(InvalidRequest, match=f"deadline_s is {no_time!r}"):
                await run.call(len, "a", timeout_s=no_time)  # type: ignore[arg-type]
        for no_items in (5, None, picky):
            for asked in (picky, len):
                with pytest.raises(InvalidRequest, match=r"invalid items for map\(\): .*range\(n\)"):
                    await run.map(asked, no_items)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least 1"):
            await run.map(picky, ["a"], concurrency=0)
        with pytest.raises(TypeError, match="concurrency is '4'; it must be a whole number"):
            await run.map(picky, ["a"], concurrency="4")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="an item of picky takes text"):
            await run.map(picky, [3])
        return "ok"

    async def main() -> None:
        async with Host(agents=[agent(name="main")(work)], store="memory://", clock=VirtualClock()) as host:
            assert await host.session("s").ask("go") == "ok"
            causes = [e.cause.reason for e in await log_of(host) if isinstance(e, ChildFinished) and e.cause]
            assert causes[:2] == ["picky 2 did not complete: child picky 2 failed: ValueError: not that"] * 2

    run_virtual(main())


def test_the_deadline_of_an_item_is_applied_to_tasks_and_threads() -> None:
    def blocking(_: int) -> None:
        interrupt = current_interrupt()
        assert interrupt is not None
        interrupt.sleep_blocking(30)

    async def waiting(_: int) -> None:
        await asyncio.sleep(30)

    async def work(run: Run) -> str:
        for one in (waiting, blocking):
            with pytest.raises(TimeoutError, match=r"it did not end within 0\.05 s"):
                await run.map(one, [1], timeout_s=0.05, name="it")
        return "ok"

    async def scenario() -> None:
        async with Host(agent(name="main")(work), store="memory://") as host:
            assert await host.session("s").ask("go") == "ok"

    real(scenario)


def test_sync_functions_get_threads_and_no_more_than_their_principal_has() -> None:
    lock = threading.Lock()
    busy = most = 0
    ready = threading.Barrier(3, timeout=60)

    def one(item: int) -> str:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        if item < 3:
            ready.wait()
        with lock:
            busy -= 1
        return threading.current_thread().name

    async def work(run: Run) -> str:
        names = await run.map(one, range(60), concurrency=1000)
        return str(all("holdfast" in name for name in names))

    async def scenario() -> None:
        settings = Settings(principal_threads=3)
        async with Host(agent(name="main")(work), store="memory://", settings=settings) as host:
            assert await host.session("s").ask("go") == "True"

    real(scenario)
    assert most == 3


def test_two_runs_that_fan_out_get_on_side_by_side() -> None:
    """The small one is done long before the big one, in tasks and in threads."""
    order: list[str] = []

    async def in_tasks(item: int) -> None:
        await asyncio.sleep(0)

    def in_thread(item: int) -> None:
        pass

    async def work(run: Run) -> None:
        big = run.session_key == "big"
        for one in (in_tasks, in_thread):
            await run.map(one, range(3000 if big else 100), concurrency=1000 if big else 10)
        order.append(run.session_key)

    async def scenario() -> None:
        async with Host(agent(name="main")(work), store="memory://", settings=Settings(principal_threads=4)) as host:
            big = await host.session("big").send("go")
            small = await host.session("small").send("go")
            await host.session("small").wait(small.message_id)
            await host.session("big").wait(big.message_id)

    real(scenario)
    assert order == ["small", "big"]


def test_while_the_log_is_behind_no_item_begins() -> None:
    class Slow(MemoryStore):
        """A log that stands still for a while."""

        appended = 0

        def append_all(self, appends: Any, **options: Any) -> Any:
            self.appended += 1
            if self.appended < 3:
                return super().append_all(appends, **options)
            loop = asyncio.get_running_loop()
            late = loop.create_future()

            def store() -> None:
                stored = super(Slow, self).append_all(appends, **options)
                stored.add_done_callback(lambda done: late.set_result(done.result()))

            loop.call_later(5, store)
            return late

    most = 0

    @agent
    async def quick(run: Run) -> str:
        return "x" * 10

    async def work(run: Run) -> None:
        nonlocal most
        recorder: Any = run.context.recorder

        def items() -> Iterator[str]:
            nonlocal most
            for number in range(4000):
                most = max(most, len(recorder.buffer))
                yield str(number)

        await run.map(quick, items(), concurrency=64)

    async def main() -> None:
        settings = Settings(run_timeout_s=10_000)
        async with Host(
            agents=[agent(name="main")(work)], store=Slow(), clock=VirtualClock(), settings=settings
        ) as host:
            assert (await host.session("s").ask("go", timeout_s=9_000)) == ""
            log = await log_of(host)
            assert sum(isinstance(event, ChildStarted) for event in log) == 4000

    run_virtual(main())
    assert most < 2 * 1024


def test_a_branch_that_floods_another_session_is_told_or_waits_as_it_likes() -> None:
    hosts: list[Host] = []

    @agent
    async def slow(run: Run) -> str:
        await asyncio.sleep(1)
        return run.text

    async def work(run: Run) -> str:
        full = 0

        async def tell(item: int) -> None:
            nonlocal full
            for _ in range(100):
                try:
                    await hosts[0].session("other", agent="slow").send(str(item))
                except MailboxFull as refusal:
                    full += 1
                    await asyncio.sleep(refusal.retry_after_s or 1.0)
                else:
                    return
            raise AssertionError("never any room")

        await run.map(tell, range(30), concurrency=10)
        return str(full > 0)

    async def main() -> None:
        async with Host(
            agents=[agent(name="main")(work), slow],
            store="memory://",
            clock=VirtualClock(),
            settings=Settings(mailbox_limit=3),
        ) as host:
            hosts.append(host)
            assert await host.session("s").ask("go") == "True"
            other = host.session("other")
            while (await other.info()).state != "idle":
                await asyncio.sleep(1)
            said = [entry.content for entry in await other.transcript() if entry.role == "user"]
            assert sorted(map(int, said)) == list(range(30))

    run_virtual(main())


def test_an_interrupt_ends_a_map_of_anything_and_the_source_is_closed() -> None:
    closed: list[bool] = []

    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    async def one(_: int) -> None:
        await asyncio.sleep(1)

    async def work(run: Run) -> None:
        await run.map(one, endless(), concurrency=3)

    async def main() -> None:
        async with Host(agents=[agent(name="main")(work)], store="memory://", clock=VirtualClock()) as host:
            session = host.session("s")
            await session.send("go")
            await asyncio.sleep(10)
            assert (await session.interrupt("enough")).outcome == "gone"
            assert closed == [True]

    run_virtual(main())


def test_a_parallel_of_many_sync_agents_leaves_the_other_runs_of_its_principal_their_turn() -> None:
    order: list[str] = []

    @agent
    def blocking(run: Run) -> None:
        time.sleep(0.002)

    async def small(run: Run) -> None:
        for _ in range(5):
            await run.call(time.sleep, 0.001)

    shape = parallel(*[blocking] * 400, name="big")

    async def scenario() -> None:
        async with Host(
            agents=[shape, agent(name="small")(small)], store="memory://", settings=Settings(principal_threads=2)
        ) as host:

            async def ask(name: str) -> None:
                await host.session(name, agent=name).ask("go")
                order.append(name)

            async with asyncio.TaskGroup() as group:
                group.create_task(ask("big"))
                await asyncio.sleep(0.05)
                group.create_task(ask("small"))

    real(scenario)
    assert order == ["small", "big"]


@pytest.mark.parametrize("of_agents", [True, False])
def test_an_item_that_fails_is_not_kept_waiting_for_the_next_one(of_agents: bool) -> None:
    where: list[Any] = []

    async def slowly() -> AsyncIterator[str]:
        """Runs in one task from its first step to its last, as cancel scopes in it need."""
        try:
            async with asyncio.timeout(1e6):
                for item in ("good", "bad"):
                    where.append(asyncio.current_task())
                    yield item
                await asyncio.sleep(1e9)
        finally:
            where.append(asyncio.current_task())

    @agent
    async def picky(run: Run) -> str:
        return await one(run.text)

    async def one(item: str) -> str:
        await asyncio.sleep(1)
        if item == "bad":
            raise ValueError("not that")
        return item

    async def work(run: Run) -> str:
        began = run.now()
        with pytest.raises(RunFailed if of_agents else ValueError, match="not that"):
            await run.map(picky if of_agents else one, slowly())
        assert len(where) == 3
        assert len(set(where)) == 1
        return str(run.now() - began < 10)

    assert virtual(work) == "True"
