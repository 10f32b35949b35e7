"""Interrupts, cancellations and ends at every moment of a run that uses all that a run offers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host, Run, agent
from holdfast.errors import Draining, HoldfastError
from holdfast.protocol.messages import Entry
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.storage.sql import writer
from holdfast.testing import VirtualClock, explore
from tests.host.test_sessions_explored import check_log, settle_all

QUICK = Settings(grace_s=1.0, abandon_after_s=1.0, quiet_s=0.01, max_wait_s=0.05, drain_timeout_s=60.0, max_runs=2)


async def effect(name: str) -> str:
    """Takes a moment."""
    await asyncio.sleep(0.01)
    return name


@agent(replayable=True)
async def child(run: Run) -> str:
    """Calls, and answers."""
    return str(await run.call(effect, "child", idempotent=True))


@agent(replayable=True)
async def busy(run: Run) -> str:
    """Uses everything."""

    async def branch() -> str:
        await run.emit("b")
        return str(await run.call(effect, "branch", idempotent=True))

    await run.step("one")
    handle = run.spawn(branch)
    await run.parallel(branch, branch)
    await run.delegate(child, "x")
    await handle
    await run.call(effect, "last", idempotent=True)
    return "."


def hosted(store: MemoryStore) -> Host:
    """A host on a virtual clock."""
    return Host(agents=[busy, child], store=store, settings=QUICK, clock=VirtualClock())


def check_transcript(entries: list[Entry]) -> None:
    """Each call has exactly one result, after it."""
    open_calls: list[str | None] = []
    seen: set[str | None] = set()
    for entry in entries:
        if entry.role == "tool_call":
            assert entry.call_id not in seen, "a call twice"
            seen.add(entry.call_id)
            open_calls.append(entry.call_id)
        elif entry.role == "tool_result":
            open_calls.remove(entry.call_id)
    assert not open_calls, "a call without a result"
    assert [entry.n for entry in entries] == list(range(1, len(entries) + 1))


@pytest.mark.parametrize("tasks", ["ordinary", "eager"])
@pytest.mark.parametrize("how", ["interrupt", "message", "stop", "drain"])
def test_a_run_that_is_ended_at_any_moment_leaves_a_valid_transcript_and_one_settlement(how: str, tasks: Any) -> None:
    def scenario_at(delay_s: float) -> Any:
        async def scenario() -> None:
            store = MemoryStore(yielding=True)
            async with hosted(store) as host:
                session = host.session("s")
                receipt = await session.send("x", agent="busy")
                await asyncio.sleep(delay_s)
                match how:
                    case "interrupt":
                        stopped = await session.interrupt("now")
                        ended = (await session.message(receipt.message_id)).state
                        assert ended in ("interrupted", "completed")
                        assert (stopped.cause.reason == "now") or ended == "completed"
                    case "message":
                        await session.send("y", agent="child", policy="interrupt")
                    case "stop":
                        await session.stop("now")
                    case _:
                        await host.drain(deadline_s=0)
                if how != "drain":
                    check_log(await settle_all(host, "s"))
                    check_transcript(await session.transcript())
                    assert host.admission.statistics().running == 0
            async with hosted(store) as host:
                settlement = await host.session("s").wait(receipt.message_id, timeout_s=600)
                assert settlement.state in ("interrupted", "completed")
                if how == "drain":
                    assert settlement.state == "completed", "everything in it may be made again"
                check_log(await settle_all(host, "s"))
                check_transcript(await host.session("s").transcript())

        return scenario

    dice = random.Random(4)
    for seed in range(12):
        explore(scenario_at(dice.uniform(0, 0.05)), schedules=6, seed=seed, tasks=tasks, late_s=0.005)


def test_a_caller_that_is_cancelled_at_any_moment_leaves_nothing_behind() -> None:
    def scenario_at(delay_s: float) -> Any:
        async def scenario() -> None:
            async with hosted(MemoryStore(yielding=True)) as host:
                session = host.session("s")
                await session.send("x", agent="child", idempotency_key="k")

                async def ask(key: str | None) -> None:
                    await session.ask("x", idempotency_key=key)

                async def read() -> None:
                    async for _ in session.events():
                        pass

                callers = [
                    asyncio.ensure_future(caller)
                    for caller in (ask("k"), ask(None), ask("new"), read(), session.interrupt(), session.withdraw("no"))
                ]
                await asyncio.sleep(delay_s)
                for caller in callers:
                    caller.cancel()
                await asyncio.wait(callers)
                for caller in callers:
                    if not caller.cancelled():
                        caller.exception()
                await settle_all(host, "s")
                await asyncio.sleep(0.1)
                assert len(host.settlements) == 0
                assert host.readers == 0
                assert host.admission.statistics().running == 0
                assert not host.context.tasks

        return scenario

    dice = random.Random(5)
    for seed in range(20):
        explore(scenario_at(dice.choice([0, dice.uniform(0, 0.03)])), schedules=6, seed=seed, late_s=0.005)


def test_sends_beside_a_drain_are_accepted_and_kept_or_refused() -> None:
    async def scenario() -> None:
        store = MemoryStore(yielding=True)
        accepted: list[str] = []
        async with hosted(store) as host:

            async def send(number: int) -> None:
                for _ in range(number):
                    await asyncio.sleep(0)
                try:
                    receipt = await host.session(str(number % 3)).send("x", agent="child")
                except Draining:
                    return
                accepted.append(f"{receipt.session} {receipt.message_id}")

            sends = [asyncio.ensure_future(send(number)) for number in range(12)]
            await asyncio.sleep(0)
            await host.drain(deadline_s=0)
            await asyncio.wait(sends)
            assert host.admission.statistics().running == 0
            assert not host.live
        async with hosted(store) as host:
            for one in accepted:
                key, _, message_id = one.partition(" ")
                await host.session(key).wait(message_id, timeout_s=600)
            for view in await host.sessions():
                check_log(await settle_all(host, view.key))

    explore(scenario, schedules=150, seed=7)
    explore(scenario, schedules=50, seed=7, tasks="eager")


def test_a_store_that_is_overrun_for_a_while_loses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate: asyncio.Event

    @agent
    async def waits(run: Run) -> str:
        await gate.wait()
        return "done"

    async def main() -> None:
        nonlocal gate
        gate = asyncio.Event()
        async with asyncio.timeout(30), Host(waits, store=f"sqlite:///{tmp_path}/h.db", settings=QUICK) as host:
            session = host.session("s")
            receipt = await session.send("x")
            with monkeypatch.context() as patch:
                patch.setattr(writer, "_BUFFER_LIMIT", 0)
                gate.set()
                while not host.incidents.counts["incidents_store"]:
                    await asyncio.sleep(0.01)
                with pytest.raises(HoldfastError):
                    await session.send("y")
            assert (await session.wait(receipt.message_id, timeout_s=20)).text == "done"
            await session.wait((await session.send("z")).message_id, timeout_s=20)
            await host.parts.queue.unused()  # the slot is given back just after the answer

    asyncio.run(main())
