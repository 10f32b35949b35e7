"""What could go on without an end, and does not: waits for oneself, background work, restarts, stops of a full disk."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from holdfast import Host, Run, Settings, agent
from holdfast.agents.journal import Journal
from holdfast.errors import LimitExceeded, RunFailed, StoreFull
from holdfast.host import recovery
from holdfast.protocol.events import RunFinished, RunRestarted, RunResumed, ToolFinished, ToolStarted
from holdfast.protocol.messages import Answer, Entry
from holdfast.storage import MemoryStore
from holdfast.storage.port import Committed, RunCommit
from holdfast.testing import VirtualClock, run_virtual


def virtual_host(*agents: object, store: MemoryStore | None = None, **settings: object) -> Host:
    """A host on virtual time."""
    given = Settings(**{"drain_timeout_s": 1, "grace_s": 1, "abandon_after_s": 1, **settings})  # type: ignore[arg-type]
    return Host(agents=agents, store=store or MemoryStore(), clock=VirtualClock(), settings=given)  # type: ignore[arg-type]


def test_a_run_that_asks_its_own_session_is_told_so_and_stores_nothing() -> None:
    hosts: list[Host] = []

    @agent
    async def narcissus(run: Run) -> str:
        if run.text == "wait":
            sent = await hosts[0].session(run.session_key).send("later")
            await hosts[0].session(run.session_key).wait(sent.message_id)
        return await hosts[0].session(run.session_key if run.text == "ask" else "echo").ask("x")

    @agent
    async def echo(run: Run) -> str:
        return run.text

    async def main() -> None:
        async with virtual_host(narcissus, echo) as host:
            hosts.append(host)
            session = host.session("s")
            for text in ("ask", "wait"):
                with pytest.raises(RunFailed, match="waits for a message of its own session"):
                    await session.ask(text)
            assert len(await session.mailbox()) == 0

    run_virtual(main())


def test_background_work_is_bounded_per_principal() -> None:
    @agent
    async def starter(run: Run) -> str:
        async def forever() -> None:
            await asyncio.sleep(1e6)

        for number in range(10):
            try:
                run.background(forever, name=f"b{number}")
            except LimitExceeded:
                return str(number)
        return "no limit"

    async def main() -> None:
        async with virtual_host(starter, principal_background=3) as host:
            assert await host.session("s").ask("x") == "3"
            assert await host.session("t").ask("x") == "0"
            assert await host.session("t", principal="other").ask("x") == "3"
            await host.session("s").stop()
            assert await host.session("s").ask("x") == "3"

    run_virtual(main())


class FullOnCommit(MemoryStore):
    """A store whose disk is full for the ends of runs."""

    full = False

    def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
        if not self.full:
            return super().commit_run(commit)
        refused: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        refused.set_exception(StoreFull())
        return refused


def test_a_stop_is_answered_though_the_end_cannot_be_stored_and_the_slot_stays_held() -> None:
    @agent
    async def endless(run: Run) -> None:
        await asyncio.sleep(1e6)

    async def main() -> None:
        store = FullOnCommit()
        async with virtual_host(endless, store=store) as host:
            session = host.session("s")
            sent = await session.send("x")
            store.full = True
            async with asyncio.timeout(30):
                receipt = await session.interrupt("enough")
            assert receipt.outcome == "gone"
            assert receipt.stopped.tasks == 1
            async with asyncio.timeout(30):
                assert (await session.interrupt("once more")).outcome == "gone"
            assert (await session.info()).state == "stopping"
            store.full = False
            assert (await session.wait(sent.message_id, timeout_s=30)).state == "interrupted"
            events = [e async for e in session.events(follow=sent.message_id)]
            assert [e.receipt for e in events if isinstance(e, RunFinished)] == [receipt]

    run_virtual(main())


def test_a_run_that_gets_on_is_parked_and_restarted_any_number_of_times() -> None:
    async def one() -> int:
        return 1

    @agent(replayable=True)
    async def steady(run: Run) -> str:
        for _ in range(8):
            await run.call(one, idempotent=True)
            if run.replayed < run.usage.tool_calls < 8:
                await asyncio.sleep(1e6)
        return f"attempt {run.attempt}"

    async def main() -> None:
        store = MemoryStore()
        async with virtual_host(steady, store=store, restart_limit=2) as host:
            sent = await host.session("s").send("x")
            await asyncio.sleep(1)
        for _ in range(7):
            async with virtual_host(steady, store=store, restart_limit=2) as host:
                assert host.recovered.interrupted == ()
                await asyncio.sleep(1)
        async with virtual_host(steady, store=store, restart_limit=2) as host:
            settlement = await host.session("s").wait(sent.message_id, timeout_s=10)
            assert (settlement.state, settlement.text) == ("completed", "attempt 8")

    run_virtual(main())


def test_only_restarts_without_a_new_result_count() -> None:
    started = ToolStarted(run_id="r", call_id="r.1", name="t")
    ended = ToolFinished(run_id="r", call_id="r.1", status="ok")
    broken = ToolFinished(run_id="r", call_id="r.2", status="interrupted")
    restart = RunRestarted(run_id="r", attempt=2, discard_from=3)
    assert Journal([restart, restart]).restarts_in_vain == 2
    assert Journal([restart, restart, started, ended]).restarts_in_vain == 0
    assert Journal([restart, started, ended, restart, broken]).restarts_in_vain == 1
    answered = RunResumed(run_id="r", answer=Answer(question_id="r.3", decision="answered"))
    assert Journal([restart, restart, answered, restart]).restarts_in_vain == 1


def test_a_start_takes_up_every_waiting_session_also_when_there_are_more_than_it_reads_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "READY_LIMIT", 3)

    @agent
    async def echo(run: Run) -> str:
        return run.text

    async def main() -> None:
        store = MemoryStore()
        async with virtual_host(echo, store=store, max_runs=5) as host:
            while host.admission.reserve("local"):
                pass  # nobody else gets a place
            sent = [await host.session(f"s{number}").send("x") for number in range(10)]
            assert {receipt.disposition for receipt in sent} == {"queued"}
        async with virtual_host(echo, store=store, evict_after_s=1) as host:
            assert host.recovered.waiting == 3
            for number, receipt in enumerate(sent):
                assert (await host.session(f"s{number}").wait(receipt.message_id, timeout_s=60)).state == "completed"

    run_virtual(main())


def test_the_counters_of_the_promises_can_tell_a_broken_one() -> None:
    @agent
    async def echo(run: Run) -> str:
        return run.text

    class Forgetful(MemoryStore):
        def commit_run(self, commit: RunCommit) -> asyncio.Future[Committed]:
            done = super().commit_run(commit).result()
            lying: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
            lying.set_result(msgspec.structs.replace(done, settled=()))
            return lying

    async def main() -> None:
        async with virtual_host(echo, store=Forgetful()) as host:
            await host.session("s").send("x")
            await asyncio.sleep(1)
            host.parts.accounting.transcript_made([Entry(role="tool_call", content="{}", call_id="c")])
            counted = host.statistics().promises
            assert {number for number, count in counted.items() if count.broken} == {"P5", "P6"}

    run_virtual(main())
