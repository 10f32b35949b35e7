"""Interrupt and stop on a host with real threads and processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast import Host, Run, Session, Settings
from holdfast.agents.demo import agent as demo
from holdfast.errors import AlreadySettled, Draining, UnknownMessage, UnknownSession
from holdfast.protocol.events import Event, RunFinished, RunStopping, TextDelta
from holdfast.runtime.processes.procfs import all_pids, command
from holdfast.storage import MemoryStore
from holdfast.storage.port import Committed, RunCommit

QUICK = Settings(grace_s=2, abandon_after_s=2, drain_timeout_s=0.2)
MARK = f"holdfast-stopping-{os.getpid()}"
"""Tells the programs of these tests apart from those of the same tests in another process."""

STUBBORN = """\
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.fork()
os.write(1, b"up\\n")
time.sleep(600)
"""


def on_host(scenario: Callable[[Host], Coroutine[Any, Any, None]], *agents: Any, settings: Settings = QUICK) -> None:
    """Run the scenario on a host with the demo agent and these."""

    async def main() -> None:
        async with asyncio.timeout(60):
            async with Host(demo, agents=agents, store="memory://", settings=settings) as host:
                await scenario(host)

    asyncio.run(main())


async def until_said(session: Session, *texts: str) -> None:
    """Wait until the session's runs have said all of this."""
    said = ""
    async for event in session.events():
        if isinstance(event, TextDelta):
            said += event.text
            if all(text in said for text in texts):
                return


async def finished(session: Session, message_id: str) -> list[Event]:
    """The session's events up to the settlement of a message."""
    return [event async for event in session.events(follow=message_id) if event.kind != "gap"]  # type: ignore[misc]


def test_an_interrupt_stops_tasks_threads_processes_and_children_of_the_run() -> None:
    ended: list[str] = []
    child_begun = asyncio.Event()

    async def child(run: Run) -> None:
        child_begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("child")

    def in_thread(run: Run) -> None:
        _ = run.emit("threaded")
        try:
            run.interrupt.sleep_blocking(600)
        finally:
            ended.append("thread")

    async def busy(run: Run) -> None:
        process = await run.process([sys.executable, "-S", "-c", STUBBORN, MARK], stdout=-1)
        assert process.stdout is not None
        for _ in range(3):  # each of its processes says so: the parent may be first, before its child has forked
            assert await process.stdout.readline() == b"up\n"
        _ = run.spawn(in_thread, run)
        _ = run.spawn(run.delegate, child, "x")
        adopted = asyncio.get_running_loop().create_task(asyncio.sleep(600))
        await child_begun.wait()
        await run.emit("busy")
        try:
            await adopted
        finally:
            ended.append("task")

    async def scenario(host: Host) -> None:
        session = host.session("s", agent="busy")
        sent = await session.send("x")
        await until_said(session, "busy", "threaded")
        receipt = await session.interrupt("changed my mind", grace_s=0)
        assert receipt.outcome == "gone"
        assert receipt.survivors == ()
        assert receipt.stopped.threads == 1
        assert (receipt.stopped.programs, receipt.stopped.processes) == (1, 3)
        assert receipt.cause.reason == "changed my mind"
        assert sorted(ended) == ["child", "task", "thread"]
        assert not [pid for pid in all_pids() if MARK in command(pid)]
        events = await finished(session, sent.message_id)
        assert [e.cause.kind for e in events if isinstance(e, RunStopping)] == ["user"]
        last = next(e for e in events if isinstance(e, RunFinished))
        assert last.receipt == receipt
        assert (await session.tree()).children == ()

    on_host(scenario, busy)


def test_an_interrupt_of_one_session_leaves_the_others_alone() -> None:
    async def scenario(host: Host) -> None:
        others = [host.session(f"s{n}") for n in range(5)]
        sent = [await session.send("steps 2") for session in others]
        mine = host.session("mine")
        await mine.send("parallel 3")
        await mine.interrupt("only mine")
        for session, receipt in zip(others, sent, strict=True):
            assert (await session.wait(receipt.message_id)).state == "completed"

    on_host(scenario)


def test_an_idle_session_answers_an_interrupt_at_once_and_an_unknown_one_is_named() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        with pytest.raises(UnknownSession, match="'s'"):
            await session.interrupt()
        await session.ask("hello")
        receipt = await session.interrupt("nothing there")
        assert (receipt.outcome, receipt.stopped.tasks) == ("gone", 0)

    on_host(scenario)


def test_an_interrupt_aimed_at_an_ended_run_does_not_hit_the_next_one() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        first = await session.send("hello")
        await session.wait(first.message_id)
        second = await session.send("steps 1")
        receipt = await session.interrupt("late", run_id=first.run_id)
        assert receipt.stopped.tasks == 0
        assert (await session.wait(second.message_id)).state == "completed"

    on_host(scenario)


def test_a_soft_interrupt_leaves_background_work_and_a_stop_ends_it() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("background 600")
        await session.interrupt("soft")
        assert [node.name for node in (await session.tree()).children] == ["background"]
        stopped = await session.stop("hard")
        assert stopped.receipt.outcome == "gone"
        assert stopped.receipt.stopped.tasks == 1
        assert (await session.tree()).children == ()

    on_host(scenario)


def test_background_work_reports_back_as_a_message() -> None:
    async def later(run: Run) -> str:
        async def work() -> str:
            return "found it"

        if not run.text.startswith("["):
            run.background(work, name="search")
        return f"heard {run.text}"

    async def scenario(host: Host) -> None:
        session = host.session("s", agent="later")
        await session.ask("go")
        await until_said(session, "heard [search] found it")

    on_host(scenario, later)


def test_a_stop_withdraws_what_waits_and_a_later_message_runs() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        first = await session.send("tree")
        waiting = [await session.send(f"w{n}") for n in range(3)]
        stopped = await session.stop("all", grace_s=0)
        assert [m.message_id for m in stopped.withdrawn] == [r.message_id for r in waiting]
        assert (await session.message(first.message_id)).state == "interrupted"
        with pytest.raises(AlreadySettled):
            await session.withdraw(first.message_id)
        with pytest.raises(UnknownMessage):
            await session.withdraw("m_nothing")
        assert await session.ask("hello") == "1 word. Send help to see what else I can do."

    on_host(scenario)


def test_clean_up_within_the_grace_is_left_alone() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("resist 1")
        await until_said(session, "Interrupt me")
        receipt = await session.interrupt("politely")
        assert receipt.outcome == "gone"
        assert receipt.forced == ()
        assert (await session.wait(sent.message_id)).state == "interrupted"

    on_host(scenario)


@pytest.mark.parametrize("hard", [False, True], ids=["interrupt", "stop"])
def test_the_grace_given_to_an_interrupt_holds_though_it_is_longer_than_the_hosts(hard: bool) -> None:
    begun: list[str] = []
    cleaned_up: list[str] = []

    async def slow(run: Run, name: str) -> None:
        try:
            begun.append(name)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.4)
            cleaned_up.append(name)

    async def child(run: Run) -> None:
        await slow(run, "child")

    async def parent(run: Run) -> None:
        _ = run.spawn(run.delegate, child, "x")
        await slow(run, "parent")

    async def scenario(host: Host) -> None:
        session = host.session("s", agent="parent")
        await session.send("x")
        async with asyncio.timeout(20):
            while len(begun) < 2:
                await asyncio.sleep(0)
        receipt = (await session.stop("all", grace_s=20)).receipt if hard else await session.interrupt(grace_s=20)
        assert (receipt.outcome, receipt.forced) == ("gone", ())
        assert sorted(cleaned_up) == ["child", "parent"]

    on_host(scenario, parent, settings=Settings(grace_s=0.05, abandon_after_s=0.1, drain_timeout_s=0.2))


def test_an_agent_may_interrupt_its_own_session() -> None:
    async def suicidal(run: Run) -> None:
        await run.emit("bye")
        run.interrupt.trigger("I have had enough")
        await asyncio.sleep(600)

    async def scenario(host: Host) -> None:
        session = host.session("s", agent="suicidal")
        sent = await session.send("x")
        settlement = await session.wait(sent.message_id)
        assert settlement.state == "interrupted"
        assert settlement.text == "bye"
        assert settlement.cause is not None
        assert settlement.cause.reason == "I have had enough"

    on_host(scenario, suicidal)


def test_a_drain_waits_then_interrupts_what_is_left_and_takes_nothing_new() -> None:
    async def long(run: Run) -> None:
        await asyncio.sleep(600)

    async def scenario(host: Host) -> None:
        session = host.session("s", agent="long")
        sent = await session.send("x")
        waiting = await session.send("y")
        report = await host.drain()
        assert report.interrupted == (sent.run_id,)
        assert report.orphans == ()
        settlement = await session.message(sent.message_id)
        assert settlement.cause is not None
        assert settlement.cause.kind == "shutdown"
        assert (await session.message(waiting.message_id)).state == "accepted"
        with pytest.raises(Draining):
            await session.send("z")
        assert await host.drain() == report

    on_host(scenario, long)


class SlowToCommit(MemoryStore):
    """Commits no run before it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        async def later() -> Committed:
            self.asked.set()
            await self.let.wait()
            return await super(SlowToCommit, self).commit_run(commit)

        return asyncio.ensure_future(later())


def test_a_drain_calls_no_run_interrupted_that_ended_by_itself() -> None:
    """Its end is on its way to the store when the drain's time is over."""

    async def quick(run: Run) -> str:
        return "done"

    async def main() -> None:
        store = SlowToCommit()
        async with asyncio.timeout(20), Host(quick, store=store, settings=QUICK) as host:
            sent = await host.session("s").send("x")
            await store.asked.wait()
            draining = asyncio.ensure_future(host.drain(deadline_s=0.0))
            while not host.parts.drain._cut:
                await asyncio.sleep(0)
            store.let.set()
            report = await draining
            assert (await host.session("s").message(sent.message_id)).state == "completed"
            assert (report.finished, report.interrupted, report.suspended) == (1, (), ())

    asyncio.run(main())


def test_a_closing_host_ends_streams_and_waits() -> None:
    async def long(run: Run) -> None:
        await run.emit("on")
        await asyncio.sleep(600)

    async def main() -> None:
        async with Host(long, store="memory://", settings=QUICK) as host:
            session = host.session("s")
            sent = await session.send("x")
            waiting = await session.send("y")
            await until_said(session, "on")
            reading = asyncio.ensure_future(_read_all(session))
            waits = asyncio.ensure_future(session.wait(waiting.message_id))
            await asyncio.sleep(0)
        kinds = await reading
        assert kinds[-1] == "message.settled"
        with pytest.raises(Draining, match="not lost"):
            await waits
        assert sent.run_id is not None

    asyncio.run(main())


async def _read_all(session: Session) -> list[str]:
    return [event.kind async for event in session.events()]


def test_sixty_sessions_that_started_programs_by_themselves_are_all_gone_when_they_stop_at_once() -> None:
    programs: list[subprocess.Popen[bytes]] = []

    async def foreign(run: Run) -> None:
        programs.append(subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 600"]))
        await run.emit("up")
        await asyncio.sleep(600)

    async def scenario(host: Host) -> None:
        sessions = [host.session(f"s{number}", agent="foreign") for number in range(60)]
        for session in sessions:
            await session.send("x")
            await until_said(session, "up")
        receipts = await asyncio.gather(*(session.interrupt("all", grace_s=0.4) for session in sessions))
        assert {receipt.outcome for receipt in receipts} == {"gone"}
        assert [receipt.stopped.programs for receipt in receipts] == [1] * 60
        assert all(program.wait(20) < 0 for program in programs)

    on_host(scenario, foreign, settings=Settings(grace_s=2, abandon_after_s=20, drain_timeout_s=0.2))
