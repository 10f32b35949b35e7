"""What runs and edits hold in memory and in the store is charged to their principal, and bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host, Run, Settings, agent
from holdfast.errors import BudgetExceeded, QuotaExceeded, RunFailed, RunInterrupted
from holdfast.host.context import RUN_EXCESS_BYTES
from holdfast.host.event_writer import BEHIND_BYTES
from holdfast.protocol.messages import Entry, SessionExport
from holdfast.storage import MemoryStore, SqliteStore
from holdfast.testing import VirtualClock, run_virtual

SHARE = 1_000_000


@agent
async def rereader(run: Run) -> str:
    """Reads its history in two branches at once, and waits where it is told to."""
    first, second = await run.parallel(run.history, run.history)
    assert first == second
    if "wait" in run.text:
        await asyncio.sleep(100)
    return str(len(first))


def host_of(*agents: Any, store: Any = None, **settings: Any) -> Host:
    given: dict[str, Any] = {
        "memory_limit_bytes": 3 * SHARE,
        "principal_memory_bytes": SHARE,
        "principal_stored_bytes": 10**9,
        "grace_s": 1.0,
    }
    return Host(
        agents=agents, store=store or MemoryStore(), clock=VirtualClock(), settings=Settings(**given | settings)
    )


async def begin_with(host: Host, key: str, size: int, *, principal: str = "alice", entries: int = 10) -> Any:
    """A session whose transcript takes about so many bytes."""
    session = host.session(key, principal=principal)
    content = "x" * (size // entries)
    history = tuple(Entry(role="user", content=content) for _ in range(entries))
    await session.import_history(SessionExport(key="x", agent=host.default_agent, entries=history))
    return session


def test_a_large_history_is_charged_once_until_its_run_ends_and_a_small_one_is_not() -> None:
    async def main() -> None:
        async with host_of(rereader) as host:
            histories = host.budgets.histories
            large = await begin_with(host, "large", 600_000)
            small = await begin_with(host, "small", 20_000)
            waiting = [asyncio.ensure_future(session.ask("wait")) for session in (small, large)]
            await asyncio.sleep(50)
            assert 600_000 <= histories.held("alice") < 610_000
            assert [await answer for answer in waiting] == ["10", "10"]
            assert histories.used == 0
            stopped = asyncio.ensure_future(large.ask("wait"))
            await asyncio.sleep(50)
            assert histories.used
            await large.stop()
            with pytest.raises(RunInterrupted):
                await stopped
            assert histories.used == 0

    run_virtual(main())


def test_runs_with_large_histories_wait_for_each_other_and_hold_up_nobody_else() -> None:
    async def main() -> None:
        async with host_of(rereader) as host:
            mine = [await begin_with(host, f"s{number}", 600_000) for number in range(4)]
            other = await begin_with(host, "s", 600_000, principal="bob")
            loop = asyncio.get_running_loop()
            began = loop.time()
            asked = [asyncio.ensure_future(session.ask("wait")) for session in mine]
            await asyncio.sleep(1)
            assert await other.ask("now") == "10"
            assert loop.time() - began < 50, "another principal waited"
            assert [await answer for answer in asked] == ["10"] * 4
            assert loop.time() - began >= 400, "they had their histories in memory at the same time"
            assert host.budgets.histories.used == 0

    run_virtual(main())


def test_a_run_that_waits_for_room_is_stopped_at_once() -> None:
    async def main() -> None:
        async with host_of(rereader) as host:
            first, second = [await begin_with(host, key, 600_000) for key in ("a", "b")]
            holding = asyncio.ensure_future(first.ask("wait"))
            await asyncio.sleep(1)
            waiting = asyncio.ensure_future(second.send("wait"))
            await asyncio.sleep(1)
            stop = await second.stop()
            assert stop.receipt.outcome == "gone"
            await waiting
            assert await holding == "10"
            assert host.budgets.histories.used == 0

    run_virtual(main())


def test_a_history_above_a_share_fails_its_run_with_the_reason_and_can_be_undone() -> None:
    async def main() -> None:
        async with host_of(rereader) as host:
            session = await begin_with(host, "s", 3 * SHARE)
            with pytest.raises(RunFailed, match=r"the transcript takes 3,.* the limit for alice is 1,000,000"):
                await session.ask("now")
            for edit in (lambda: session.fork("other"), session.retry):
                with pytest.raises(BudgetExceeded, match="the transcript takes"):
                    await edit()
            while await session.transcript():
                await session.undo()
            assert await session.ask("now") == "0"
            assert host.budgets.histories.used == 0

    run_virtual(main())


def test_edits_wait_for_room_and_are_refused_in_the_end() -> None:
    async def main() -> None:
        async with host_of(rereader, stream_stall_s=10) as host:
            first, second = [await begin_with(host, key, 600_000) for key in ("a", "b")]
            holding = asyncio.ensure_future(first.ask("wait"))
            await asyncio.sleep(1)
            with pytest.raises(BudgetExceeded, match="bytes of transcripts in memory"):
                await second.fork("c")
            await holding
            assert (await second.fork("c")).key == "c"
            assert len(await host.session("c", principal="alice").transcript()) == 10
            assert host.budgets.histories.used == 0

    run_virtual(main())


def test_a_run_waits_once_a_quarter_of_a_megabyte_is_not_stored() -> None:
    class Standing(MemoryStore):
        """Stores nothing for a while."""

        def append_all(self, appends: Any, **options: Any) -> Any:
            late = asyncio.get_running_loop().create_future()

            def store() -> None:
                stored = super(Standing, self).append_all(appends, **options)
                stored.add_done_callback(lambda done: late.set_result(done.result()))

            asyncio.get_running_loop().call_later(10, store)
            return late

    said: list[int] = []

    @agent
    async def talker(run: Run) -> None:
        for _ in range(40):
            await run.emit("x" * 100_000)
            said.append(100_000)

    async def main() -> None:
        async with host_of(talker, store=Standing(), principal_stored_bytes=10**9) as host:
            asked = asyncio.ensure_future(host.session("s", principal="alice").ask("go"))
            await asyncio.sleep(9)
            assert sum(said) <= 2 * BEHIND_BYTES + 200_000
            await asked
            assert len(said) == 40

    run_virtual(main())


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("part", ["events", "answer", "commit"])
def test_runs_go_over_the_quota_by_a_fixed_excess_and_fail_with_its_error(tmp_path: Path, kind: str, part: str) -> None:
    quota = 2_000_000

    @agent
    async def writer(run: Run) -> str:
        if part == "events":
            for _ in range(1000):
                await run.emit("y" * 50_000)
        return "z" * (5_000_000 if part == "answer" else 1_000_000)

    async def main() -> None:
        store = MemoryStore() if kind == "memory" else SqliteStore(str(tmp_path / "store.db"))
        settings = Settings(principal_stored_bytes=quota, grace_s=1.0)
        async with Host(writer, store=store, settings=settings) as host:
            asked = [asyncio.ensure_future(host.session(f"s{n}").ask("x" * 100_000)) for n in range(5)]
            told = await asyncio.gather(*asked, return_exceptions=True)
            failed = [str(error) for error in told if isinstance(error, RunFailed)]
            assert failed
            assert all("bytes stored, and its limit is" in text for text in failed)
            assert part == "commit" or len(failed) == 5
            stored = await host.store.stored_bytes("local")
            assert stored <= quota + RUN_EXCESS_BYTES + 5 * 250_000, f"{stored:,} bytes are stored"
            if part == "events":
                with pytest.raises(QuotaExceeded):
                    await host.session("s0").send("more")
            for number, error in enumerate(told):
                entries = await host.session(f"s{number}").transcript()
                if isinstance(error, RunFailed):
                    assert [(entry.role, entry.ended_by) for entry in entries] == [("user", "failure")]
            broken = {name for name, count in host.statistics().promises.items() if count.broken}
            assert not broken

    asyncio.run(main())


def test_a_store_in_memory_has_a_quota_that_fits_the_memory_limit() -> None:
    async def main() -> None:
        async with host_of(rereader, principal_stored_bytes=0) as host:
            assert host.stored_limit == 3 * SHARE // 2
            sent = 0
            with pytest.raises(QuotaExceeded):
                for sent in range(10_000):
                    await host.session(f"s{sent}", principal="alice").send("x")
            assert 0 < sent < 3 * SHARE // 2 // 1000, "sessions without contents count, too"
        async with Host(rereader, store="memory://", settings=Settings(principal_stored_bytes=123)) as host:
            assert host.stored_limit == 123

    run_virtual(main())
