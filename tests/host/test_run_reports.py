"""Whoever watches a host gets one report for each run that ends, and none afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast import Host, Run, Settings
from holdfast.host import DrainReport, RunReport
from holdfast.testing import run_virtual


class Seen:
    def __init__(self) -> None:
        self.runs: list[RunReport] = []
        self.drains: list[DrainReport] = []

    def on_run(self, report: RunReport) -> None:
        self.runs.append(report)

    def on_drained(self, report: DrainReport) -> None:
        self.drains.append(report)


async def fine(run: Run) -> str:
    await asyncio.sleep(3)
    return "done"


async def broken(run: Run) -> str:
    raise ValueError("no config")


async def endless(run: Run) -> AsyncIterator[str]:
    yield "on it"
    await asyncio.sleep(3600)


def test_each_end_of_a_run_is_reported_with_its_reason() -> None:
    async def scenario() -> None:
        seen = Seen()
        async with Host(fine, agents=[broken, endless], store="memory://") as host:
            host.watch_runs(seen)
            session = host.session("s", principal="alice")
            await session.wait((await session.send("x")).message_id)
            await session.wait((await session.send("x", agent="broken")).message_id)
            receipt = await session.send("x", agent="endless")
            await session.interrupt("changed my mind")
            await session.wait(receipt.message_id)
        completed, failed, interrupted = seen.runs
        assert [report.status for report in seen.runs] == ["completed", "failed", "interrupted"]
        assert [report.agent for report in seen.runs] == ["fine", "broken", "endless"]
        assert {(report.principal, report.session) for report in seen.runs} == {("alice", "s")}
        assert 3 <= completed.elapsed_s < 4
        assert failed.error == "ValueError: no config"
        assert failed.raised_at is not None
        assert "test_run_reports.py, line" in failed.raised_at
        assert interrupted.cause is not None
        assert (interrupted.cause.kind, interrupted.cause.reason) == ("user", "changed my mind")
        assert interrupted.run_id == receipt.run_id
        assert len(seen.drains) == 1

    run_virtual(scenario())


def test_a_thread_that_outlived_the_stop_is_reported() -> None:
    started, gate = threading.Event(), threading.Event()

    def stubborn(run: Run) -> None:
        started.set()
        gate.wait(60)

    async def scenario() -> None:
        seen = Seen()
        settings = Settings(grace_s=0, abandon_after_s=0)
        async with Host(stubborn, store="memory://", settings=settings) as host:
            host.watch_runs(seen)
            session = host.session("s")
            message_id = (await session.send("x")).message_id
            assert await asyncio.to_thread(started.wait, 60)
            assert (await session.interrupt("enough")).outcome == "quarantined"
            await session.wait(message_id)
            gate.set()
        assert [report.abandoned for report in seen.runs] == [("thread stubborn",)]

    asyncio.run(scenario())


def test_a_listener_that_was_removed_gets_no_further_report() -> None:
    async def scenario() -> None:
        seen = Seen()
        async with Host(fine, store="memory://") as host:
            remove = host.watch_runs(seen)
            await host.session("s").ask("x")
            remove()
            await host.session("s").ask("x")
        assert len(seen.runs) == 1
        assert not seen.drains

    run_virtual(scenario())


def test_background_work_that_a_drain_ends_is_named() -> None:
    async def starts(run: Run) -> str:
        async def watch() -> None:
            await asyncio.sleep(3600)

        run.background(watch, name="watch prices")
        return "watching"

    async def scenario() -> None:
        async with Host(starts, store="memory://") as host:
            await host.session("shop").ask("x")
            report = await host.drain(deadline_s=0)
        assert report.ended_background == ("task 'watch prices' of session shop",)

    run_virtual(scenario())


def test_a_listener_that_fails_holds_up_neither_the_session_nor_the_drain() -> None:
    class Failing(Seen):
        def on_run(self, report: RunReport) -> None:
            raise RuntimeError("no")

        def on_drained(self, report: DrainReport) -> None:
            raise RuntimeError("no")

    async def scenario() -> None:
        seen = Seen()
        async with Host(fine, store="memory://") as host:
            host.watch_runs(Failing())
            host.watch_runs(seen)
            session = host.session("s")
            assert await session.ask("x") == "done"
            assert await session.ask("y") == "done"
            await host.drain()
        assert (len(seen.runs), len(seen.drains)) == (2, 1)

    run_virtual(scenario())


def test_a_run_that_fails_settles_where_the_current_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()

    async def scenario() -> None:
        seen = Seen()
        async with Host(broken, store="memory://") as host:
            host.watch_runs(seen)
            session = host.session("s")
            receipt = await session.send("x")
            assert (await session.wait(receipt.message_id, timeout_s=10)).state == "failed"
        assert seen.runs[0].raised_at is not None

    with contextlib.chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        asyncio.run(scenario())
