"""Starts, ends and turns of a host, at the worst moments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import (
    ConfigurationError,
    Draining,
    HoldfastError,
    InvalidKey,
    InvalidRequest,
    NotDeterministic,
    StoreLocked,
)
from holdfast.host.loop_watchdog import LoopWatchdog
from holdfast.protocol.events import RunRestarted, ToolFinished, ToolStarted
from holdfast.protocol.messages import Message
from holdfast.protocol.transcript import RunTranscript
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, explore, run_virtual
from tests.host.test_sessions_explored import check_log, settle_all

QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0)


@agent
async def echo(run: Run) -> str:
    """Answers after a while."""
    await asyncio.sleep(0.01)
    return run.text


@agent
async def endless(run: Run) -> None:
    """Never ends by itself."""
    await asyncio.sleep(1e9)


def hosted(*agents: Any, store: MemoryStore | None = None, settings: Settings = QUICK) -> Host:
    """A host on a virtual clock."""
    return Host(
        agents=[echo, endless, *agents],
        store=store or MemoryStore(yielding=True),
        settings=settings,
        clock=VirtualClock(),
    )


def test_who_waits_in_line_is_not_overtaken_by_those_who_ask_again_and_again() -> None:
    async def scenario() -> None:
        async with hosted(settings=Settings(max_runs=1, drain_timeout_s=1.0)) as host:
            answered = 0

            async def again_and_again() -> None:
                nonlocal answered
                while True:
                    await host.session("hot", principal="a").ask("x")
                    answered += 1

            hot = asyncio.ensure_future(again_and_again())
            await asyncio.sleep(0.015)
            before = answered
            assert await host.session("cold", principal="b").ask("y", timeout_s=600) == "y"
            assert answered - before <= 3
            hot.cancel()
            await asyncio.wait([hot])

    run_virtual(scenario())


def test_a_host_is_started_once() -> None:
    async def scenario() -> None:
        host = hosted()
        async with host:
            with pytest.raises(ConfigurationError):
                await host.start()
            assert await host.session("s").ask("x") == "x"
        with pytest.raises(ConfigurationError):
            await host.start()

    run_virtual(scenario())


def test_a_host_that_was_never_started_can_be_closed() -> None:
    async def scenario() -> None:
        await hosted().close()

    run_virtual(scenario())


def test_a_close_that_is_cancelled_at_any_moment_still_closes_everything() -> None:
    async def scenario() -> None:
        store = MemoryStore(yielding=True)
        host = hosted(store=store)
        await host.start()
        receipt = await host.session("s").send("x", agent="endless")
        closing = asyncio.ensure_future(host.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        await host.close()  # it may not even have begun
        async with hosted(store=store) as again:
            assert again.recovered.interrupted == ()
            assert (await again.session("s").message(receipt.message_id)).state == "interrupted"

    explore(scenario, schedules=100, seed=1)


def test_an_agent_may_close_its_host() -> None:
    @agent
    async def closer(run: Run) -> None:
        await the_host.close()

    the_host: Host

    async def scenario() -> None:
        nonlocal the_host
        store = MemoryStore(yielding=True)
        the_host = hosted(closer, store=store, settings=Settings(grace_s=1.0, abandon_after_s=1.0, drain_timeout_s=0.5))
        async with the_host:
            receipt = await the_host.session("s").send("x", agent="closer")
            await asyncio.sleep(0.1)
        async with hosted(closer, store=store) as again:
            assert (await again.session("s").message(receipt.message_id)).state == "interrupted"

    explore(scenario, schedules=50, seed=1)


def test_whoever_comes_while_the_host_closes_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        host = hosted()
        await host.start()
        receipt = await host.session("s").send("x", agent="endless")
        await asyncio.sleep(0.1)
        host.close_streams()
        async with asyncio.timeout(100):
            assert [event.kind async for event in host.session("s").events()] == ["message.accepted", "run.started"]
            host.settlements.close()
            with pytest.raises(Draining):
                await host.session("s").wait(receipt.message_id)
            await host.drain(deadline_s=0)
        await host.close()

    run_virtual(scenario())


def test_background_work_stops_with_the_drain_whatever_the_tasks_are() -> None:
    @agent
    async def leaves(run: Run) -> None:
        async def work() -> None:
            await asyncio.sleep(1e9)

        run.background(work, name="one")
        run.background(work, name="two")

    async def scenario() -> None:
        async with hosted(leaves) as host:
            await host.session("s").ask("x", agent="leaves")
            report = await host.drain(deadline_s=1)
            assert report.orphans == ()
            await asyncio.sleep(0.01)
            assert host.tree().children == ()

    explore(scenario, schedules=20, seed=1)
    explore(scenario, schedules=20, seed=1, tasks="eager")


def test_a_run_that_goes_on_after_a_start_reaches_every_other_that_was_left() -> None:
    async def effect() -> str:
        return ""

    @agent(replayable=True)
    async def first(run: Run) -> str:
        if run.attempt == 1:
            await asyncio.sleep(1e9)
        return (await hosts[-1].session("b").interrupt("from a")).cause.reason

    @agent(replayable=True)
    async def second(run: Run) -> None:
        await asyncio.sleep(1e9)

    hosts: list[Host] = []

    async def scenario() -> None:
        store = MemoryStore(yielding=True)
        hosts.append(hosted(first, second, store=store))
        async with hosts[-1] as host:
            a = await host.session("a").send("x", agent="first")
            await asyncio.sleep(0.1)
            b = await host.session("b").send("x", agent="second")
            await asyncio.sleep(0.1)
            report = await host.drain(deadline_s=0)
            assert report.suspended == (a.run_id, b.run_id)
        hosts.append(hosted(first, second, store=store))
        async with hosts[-1] as host:
            assert (await host.session("a").wait(a.message_id, timeout_s=60)).text == "from a"
            assert (await host.session("b").message(b.message_id)).state == "interrupted"

    explore(scenario, schedules=30, seed=1)


def test_a_parked_run_goes_on_and_what_cannot_go_on_is_not_called_parked() -> None:
    made: list[str] = []

    async def slow(name: str) -> str:
        made.append(name)
        try:
            await asyncio.sleep(0.5)
        finally:
            if name == "late":
                await asyncio.sleep(0.2)
        return name

    @agent(replayable=True)
    async def calls(run: Run) -> str:
        for number in range(5000):
            run.emit(f"{number} ")
        first = await run.call(slow, "one")
        await run.call(slow, run.text, idempotent=run.text == "again")
        return str(first)

    async def scenario() -> None:
        made.clear()
        store = MemoryStore(yielding=True)
        async with hosted(calls, store=store) as host:
            again = await host.session("again").send("again", agent="calls")
            never = await host.session("never").send("never", agent="calls")
            await asyncio.sleep(0.7)
            report = await host.drain(deadline_s=0)
            assert report.suspended == (again.run_id,)
            assert report.interrupted == (never.run_id,)
        async with hosted(calls, store=store) as host:
            assert host.recovered.restarted == (again.run_id,)
            assert (await host.session("again").wait(again.message_id, timeout_s=60)).text.endswith("one")
            assert (await host.session("never").message(never.message_id)).state == "interrupted"
            assert sorted(made) == ["again", "again", "never", "one", "one"]
            check_log(await settle_all(host, "again"))

    run_virtual(scenario())


def test_a_replay_with_other_arguments_is_named_and_gives_no_false_result() -> None:
    async def fetch(url: str) -> str:
        return url

    @agent(replayable=True)
    async def racing(run: Run) -> str:
        async def one(url: str, delay_s: float) -> str:
            await asyncio.sleep(delay_s)
            return str(await run.call(fetch, url))

        early, late = (0.1, 0.2) if run.attempt == 1 else (0.2, 0.1)
        a, b = await asyncio.gather(one("a", early), one("b", late))
        if run.attempt == 1:
            await asyncio.sleep(1e9)
        return a + b

    async def scenario() -> None:
        store = MemoryStore(yielding=True)
        async with hosted(racing, store=store) as host:
            receipt = await host.session("s").send("x", agent="racing")
            await asyncio.sleep(1)
            await host.drain(deadline_s=0)
        async with hosted(racing, store=store) as host:
            settlement = await host.session("s").wait(receipt.message_id, timeout_s=60)
            assert settlement.state == "failed"
            assert NotDeterministic.__name__ in (settlement.error or "")

    run_virtual(scenario())


def test_a_call_that_was_interrupted_and_made_again_has_its_last_result_in_the_transcript() -> None:
    transcript = RunTranscript("r", [Message(message_id="m", seq=1, content="x")])
    for event in (
        ToolStarted(run_id="r", call_id="r.1", name="f"),
        ToolFinished(run_id="r", call_id="r.1", status="interrupted"),
        RunRestarted(run_id="r", attempt=2, discard_from=2),
        ToolStarted(run_id="r", call_id="r.1", name="f"),
        ToolFinished(run_id="r", call_id="r.1", status="ok", result="done"),
    ):
        transcript.feed(event)
    entries = transcript.entries(status="completed")
    assert [(entry.role, entry.content) for entry in entries[1:]] == [("tool_call", "null"), ("tool_result", "done")]


def test_a_principal_that_has_gone_leaves_no_thread_pool_behind() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), Host(echo, store="memory://", settings=QUICK) as host:
            for number in range(50):
                assert await host.session("s", principal=f"p{number}").ask("x") == "x"
            host.maintenance.evict(idle_for_s=0)
            assert not host.parts.threads

    asyncio.run(main())


def test_two_hosts_on_two_loops_in_one_process_do_not_meet() -> None:
    failures: list[BaseException] = []

    async def main(name: str) -> None:
        @agent
        async def threads(run: Run) -> str:
            def shout() -> str:
                run.emit(name)
                return name

            return "".join(await run.parallel(shout, shout, shout))

        async with asyncio.timeout(30), Host(agents=[threads, echo], store="memory://", settings=QUICK) as host:
            for _ in range(20):
                assert await host.session("s").ask("x", agent="threads") == name * 6
            receipt = await host.session("t").send("x", agent="echo")
            stopped = await host.session("t").interrupt(name)
            assert stopped.cause.reason in (name, "nothing was running")
            await host.session("t").wait(receipt.message_id)

    def run(name: str) -> None:
        try:
            asyncio.run(main(name))
        except BaseException as error:
            failures.append(error)

    both = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert not failures


@pytest.mark.parametrize("late", ["stop", "delete", "interrupt"])
def test_stops_and_deletes_beside_sends_settle_every_message_once(late: str) -> None:
    async def scenario() -> None:
        async with hosted() as host:
            session = host.session("s")
            ids: list[str] = []

            async def send(number: int) -> None:
                try:
                    policy: Any = ("queue", "collect", "interrupt", "reject")[number % 4]
                    name = ("echo", "endless")[number % 2]
                    ids.append((await session.send(str(number), policy=policy, agent=name)).message_id)
                except HoldfastError:
                    pass

            async def end() -> None:
                await getattr(session, late)()

            acts: list[Callable[[], Any]] = [lambda n=n: send(n) for n in range(6)]  # type: ignore[misc]
            await session.send("first", agent="endless")
            await asyncio.gather(*(act() for act in [*acts, end, *acts[:2], end]), return_exceptions=True)
            if late != "delete":
                await session.stop()
                check_log(await settle_all(host, "s"))
                for message_id in ids:
                    assert (await session.wait(message_id, timeout_s=60)).state != "taken"
            assert host.admission.statistics().running == 0
            assert not host.live

    explore(scenario, schedules=60, seed=5)
    explore(scenario, schedules=30, seed=6, chooser="pct")


def test_a_watch_that_is_closed_while_it_waits_for_an_answer_raises_no_alarm() -> None:
    asked = threading.Event()
    alarms: list[float] = []

    class Silent:
        def call_soon_threadsafe(self, *values: object) -> None:
            asked.set()

    watch = LoopWatchdog(
        Silent(),  # type: ignore[arg-type]
        limit_s=60,
        report=lambda seconds, stack: alarms.append(seconds),
        recovered=alarms.append,
    )
    watch.start()
    assert asked.wait(60)
    watch.close()
    for thread in threading.enumerate():
        if thread.name == "holdfast loop watchdog":
            thread.join(60)
    assert not alarms


def test_a_key_that_is_no_text_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with hosted() as host:
            odd: Any = 5
            with pytest.raises(InvalidKey):
                host.session(odd)
            with pytest.raises(InvalidRequest):
                await host.session("s").send("x", idempotency_key=odd)
            assert host.admission.statistics().running == 0

    run_virtual(scenario())


def test_a_host_whose_store_is_taken_can_be_closed() -> None:
    async def scenario() -> None:
        store = MemoryStore(yielding=True)
        async with hosted(store=store) as host:
            second = hosted(store=store)
            with pytest.raises(StoreLocked):
                await second.start()
            assert await host.session("s").ask("x") == "x"
            await second.close()
            assert await host.session("s").ask("x") == "x"

    run_virtual(scenario())
