"""Agents that do their worst to the host: their sessions are never wedged, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from holdfast import Host, Run, RunFailed, Settings, agent
from holdfast.errors import HoldfastError, Interrupted, InvalidRequest, RunClosed, RunInterrupted
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, explore, run_virtual

QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0)


@agent
async def healthy(run: Run) -> str:
    """Answers."""
    return "healthy"


def hosted(scenario: Callable[[Host], Coroutine[Any, Any, None]], *agents: Any, settings: Settings = QUICK) -> None:
    """Run the scenario on a virtual clock; everything must be served at the end, and again after a restart."""

    async def main() -> None:
        store = MemoryStore(yielding=True)
        async with Host(agents=[*agents, healthy], store=store, settings=settings, clock=VirtualClock()) as host:
            await scenario(host)
            await served(host)
            assert host.admission.statistics().running == 0
            keys = [view.key for view in await host.sessions()]
        async with Host(agents=[*agents, healthy], store=store, settings=settings, clock=VirtualClock()) as host:
            assert host.recovered.restarted == host.recovered.interrupted == ()
            for key in keys:
                async for _ in host.session(key).events(after=None, follow=await last(host, key)):
                    pass

    async def last(host: Host, key: str) -> str:
        return (await host.session(key).send("x", agent="healthy")).message_id

    async def served(host: Host) -> None:
        for view in await host.sessions():
            assert await host.session(view.key).ask("hello", agent="healthy", timeout_s=60) == "healthy", view.key

    run_virtual(main())


class Spiteful(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise ValueError("no text for you")


ENDS: dict[str, BaseException] = {
    "spiteful": Spiteful(),
    "surrogate": RuntimeError("half a pair: \ud800"),
    "nul": RuntimeError("\0"),
    "cancelled": asyncio.CancelledError(),
    "interrupted": Interrupted(Cause(kind="user", reason="made up")),
    "generator_exit": GeneratorExit(),
    "stop_iteration": StopAsyncIteration(),
    "group": ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
    "timeout": TimeoutError(),
    "exit": SystemExit(3),
    "keyboard": BaseExceptionGroup("odd", [asyncio.CancelledError()]),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("where", ["agent", "call", "child", "branch", "generator"])
def test_whatever_is_raised_wherever_ends_the_run_and_leaves_the_session_usable(name: str, where: str) -> None:
    async def raising() -> None:
        await asyncio.sleep(0)
        raise ENDS[name]

    @agent
    async def child(run: Run) -> None:
        await raising()

    @agent
    async def bad(run: Run) -> AsyncIterator[str]:
        yield "half"
        match where:
            case "agent" | "generator":
                await raising()
            case "call":
                await run.call(raising)
            case "child":
                await run.delegate(child, "x")
            case _:
                run.spawn(raising)

    async def scenario(host: Host) -> None:
        with pytest.raises((RunFailed, RunInterrupted)):
            await host.session("s").ask("x", agent="bad", timeout_s=60)

    hosted(scenario, bad)


@pytest.mark.parametrize("where", ["agent", "generator", "child", "executor"])
def test_what_exits_in_a_thread_ends_its_run_and_not_the_host(where: str) -> None:
    @agent
    def leaves(run: Run) -> None:
        sys.exit(3)

    @agent
    def speaks(run: Run) -> Iterator[str]:
        yield "half"
        sys.exit(3)

    @agent
    async def asks(run: Run) -> None:
        if where == "child":
            await run.delegate(leaves, "x")
        await asyncio.to_thread(sys.exit, 3)

    async def main() -> None:
        bad = {"agent": leaves, "generator": speaks}.get(where, asks)
        async with asyncio.timeout(60), Host(agents=[bad, healthy], store="memory://", settings=QUICK) as host:
            with pytest.raises(RunFailed, match=r"called sys\.exit\(3\)"):
                await host.session("s").ask("x", agent=bad.name)
            assert await host.session("s").ask("x", agent="healthy") == "healthy"

    asyncio.run(main())


def test_a_keyboard_interrupt_in_a_thread_is_nobodys_ctrl_c() -> None:
    @agent
    def pretends(run: Run) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with asyncio.timeout(60), Host(agents=[pretends, healthy], store="memory://", settings=QUICK) as host:
            with pytest.raises(RunFailed, match="agent pretends raised KeyboardInterrupt"):
                await host.session("s").ask("x", agent="pretends")
            assert await host.session("s").ask("x", agent="healthy") == "healthy"

    asyncio.run(main())


def test_names_and_labels_that_are_no_text_poison_nothing() -> None:
    async def nothing() -> None:
        pass

    refused: list[str] = []

    @agent
    async def bad(run: Run) -> None:
        attempts: list[Callable[[], Any]] = [
            lambda: run.call(nothing, name=5),  # type: ignore[arg-type]
            lambda: run.call(nothing, name="\ud800"),
            lambda: run.call(nothing, idempotent="yes"),  # type: ignore[arg-type]
            lambda: run.step(7),  # type: ignore[arg-type]
            lambda: run.step("\ud800"),
            lambda: run.delegate(healthy, "\ud800"),
            lambda: run.call(output, 5),
            lambda: run.call(output, "\ud800"),
        ]
        for number, attempt in enumerate(attempts):
            try:
                await attempt()
            except (HoldfastError, TypeError):
                refused.append(str(number))

    async def output(call: Any, text: Any) -> None:
        call.output(text)

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("x", agent="bad", timeout_s=60) == ""
        async for event in host.session("s").events():
            if event.kind == "run.finished":
                break

    hosted(scenario, bad)
    assert refused == [str(number) for number in range(8) if number != 2]


@pytest.mark.parametrize("verb", ["interrupt", "stop"])
@pytest.mark.parametrize("reason", ["\ud800", 5, None])
def test_a_reason_that_is_no_text_is_refused_and_the_run_goes_on(verb: str, reason: Any) -> None:
    @agent
    async def slow(run: Run) -> str:
        await asyncio.sleep(10)
        return "done"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("x", agent="slow")
        with pytest.raises(InvalidRequest):
            await getattr(session, verb)(reason)
        assert (await session.wait(receipt.message_id, timeout_s=60)).state == "completed"

    hosted(scenario, slow)


@pytest.mark.parametrize("seconds", ["x", float("nan"), -1.0, float("inf")])
def test_times_that_are_none_are_refused(seconds: Any) -> None:
    @agent
    async def slow(run: Run) -> str:
        await asyncio.sleep(10)
        return "done"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("x", agent="slow")
        for attempt in (
            lambda: session.send("x", policy="collect", quiet_s=seconds),
            lambda: session.send("x", policy="collect", max_wait_s=seconds),
            lambda: session.interrupt(grace_s=seconds),
            lambda: session.stop(grace_s=seconds),
        ):
            with pytest.raises(InvalidRequest):
                await attempt()
        assert (await session.wait(receipt.message_id, timeout_s=60)).state == "completed"

    hosted(scenario, slow)


def test_an_iterator_of_the_agents_own_needs_no_aclose() -> None:
    class Two:
        def __init__(self) -> None:
            self.left = ["b", "a"]

        def __aiter__(self) -> Two:
            return self

        async def __anext__(self) -> str:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop()

    @agent
    def two(run: Run) -> Two:
        return Two()

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("x", agent="two", timeout_s=60) == "ab"

    async def main() -> None:
        async with asyncio.timeout(60):
            async with Host(two, store="memory://", settings=QUICK) as host:
                await scenario(host)

    asyncio.run(main())


def test_what_an_abandoned_task_does_with_its_run_does_not_count() -> None:
    outcomes: list[str] = []
    ended: asyncio.Event

    @agent
    async def stubborn(run: Run) -> None:
        async def noop() -> str:
            return ""

        await run.emit("begun")
        while not ended.is_set():
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                pass
        for attempt in (
            lambda: run.delegate(healthy, "late"),
            lambda: run.call(noop),
            lambda: run.parallel(noop),
            lambda: run.step("late"),
            lambda: run.process(["true"]),
        ):
            try:
                await attempt()
                outcomes.append("done")
            except RunClosed:
                outcomes.append("RunClosed")
            except BaseException as error:
                outcomes.append(type(error).__name__)
        for sync in (lambda: run.spawn(noop), lambda: run.background(noop, name="late"), lambda: run.emit("late")):
            try:
                sync()
                outcomes.append("done")
            except RunClosed:
                outcomes.append("RunClosed")

    async def scenario(host: Host) -> None:
        nonlocal ended
        ended = asyncio.Event()
        session = host.session("s")
        receipt = await session.send("x", agent="stubborn")
        await asyncio.sleep(0.1)
        stopped = await session.interrupt("enough")
        assert stopped.outcome == "quarantined"
        before = await session.info()
        ended.set()
        await asyncio.sleep(5)
        assert (await session.info()).seq == before.seq
        assert (await session.message(receipt.message_id)).state == "interrupted"

    hosted(scenario, stubborn)
    assert outcomes == ["RunClosed"] * 8


def test_background_work_that_begins_during_the_stop_does_not_outlive_it() -> None:
    ran: list[str] = []

    @agent
    async def sly(run: Run) -> None:
        async def forever() -> None:
            while True:
                await asyncio.sleep(1)
                ran.append("alive")

        try:
            await asyncio.sleep(1e9)
        finally:
            run.background(forever, name="sly")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("x", agent="sly")
        await asyncio.sleep(0.1)
        await session.stop("all of it")
        await asyncio.sleep(0)
        ran.clear()
        await asyncio.sleep(10)
        assert not ran

    hosted(scenario, sly)


def test_background_work_that_is_stopped_sends_nothing_any_more() -> None:
    @agent
    async def leaves(run: Run) -> None:
        async def swallows() -> str:
            try:
                await asyncio.sleep(1e9)
            except asyncio.CancelledError:
                pass
            return "stopped, but here I am"

        run.background(swallows, name="b")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("x", agent="leaves", timeout_s=60)
        await session.stop("all of it")
        await asyncio.sleep(10)
        assert (await session.info()).state == "idle"
        assert len(await session.runs()) == 1

    hosted(scenario, leaves)


@pytest.mark.parametrize("outcome", ["a\0b", "\ud800", Spiteful()])
def test_a_report_of_background_work_that_cannot_be_sent_is_an_incident(outcome: Any) -> None:
    @agent
    async def leaves(run: Run) -> None:
        async def work() -> str:
            if isinstance(outcome, Exception):
                raise outcome
            return str(outcome)

        if run.text == "x":
            run.background(work, name="b")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("x", agent="leaves", timeout_s=60)
        await asyncio.sleep(1)
        assert any(incident.kind == "background" for incident in host.incidents.newest)
        assert not host.tree().children

    hosted(scenario, leaves)


def test_two_thousand_branches_in_one_run_end_with_it() -> None:
    @agent
    async def many(run: Run) -> str:
        async def one() -> int:
            await asyncio.sleep(1)
            return 1

        return str(sum(await run.parallel(*[one] * 2_000)))

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("x", agent="many", timeout_s=60) == "2000"

    hosted(scenario, many)


def test_hundreds_of_runs_leave_no_task_thread_file_or_object() -> None:
    import gc

    @agent
    async def mixed(run: Run) -> str:
        async def noop() -> str:
            return "x"

        await run.parallel(noop, lambda: "y")
        await run.call(noop)
        return "ok"

    async def main() -> None:
        async with asyncio.timeout(60), Host(mixed, store="memory://", settings=QUICK) as host:

            async def some(count: int) -> None:
                for number in range(count):
                    await host.session(str(number % 10)).ask("x")

            def counted() -> tuple[int, int, int, int]:
                gc.collect()
                runs = sum(isinstance(thing, Run) for thing in gc.get_objects())
                threads = sum("holdfast-local" not in thread.name for thread in threading.enumerate())
                return len(asyncio.all_tasks()), threads, len(os.listdir("/proc/self/fd")), runs

            await some(100)
            before = counted()
            await some(300)
            assert counted() == before
            assert len(host.settlements) == 0 and not host.context.tasks

    asyncio.run(main())


def test_the_receipt_of_an_interrupt_is_that_of_the_run_in_every_schedule() -> None:
    @agent
    async def endless(run: Run) -> None:
        await asyncio.sleep(1e9)

    async def scenario() -> None:
        store = MemoryStore(yielding=True)
        async with Host(endless, store=store, settings=QUICK, clock=VirtualClock()) as host:
            session = host.session("s")
            receipt = await session.send("x")
            stopped = await session.interrupt("enough")
            assert stopped.cause.reason == "enough"
            assert stopped.stopped.tasks == 1
            assert (await session.message(receipt.message_id)).state == "interrupted"

    run_virtual(scenario())
    explore(scenario, schedules=100, seed=3)
    explore(scenario, schedules=50, seed=3, tasks="eager")
