"""What a start does with what a crash left. The crash is a store that another epoch was writing to when it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast import Host, Run, agent
from holdfast.protocol.events import (
    Event,
    RunFinished,
    RunRestarted,
    TextDelta,
    ToolFinished,
    ToolStarted,
    decode_event,
    encode_event,
)
from holdfast.protocol.stopping import Cause
from holdfast.settings import Settings
from holdfast.storage import MemoryStore
from holdfast.storage.port import Claim, InterruptRequest, Send
from holdfast.testing import VirtualClock, run_virtual

CALLED: list[str] = []


async def effect(name: str) -> str:
    """Leaves a trace each time it is really called."""
    CALLED.append(name)
    return f"did {name}"


@agent(replayable=True)
async def workbench(run: Run) -> str:
    """Makes two calls and says what they gave."""
    await run.emit(f"attempt {run.attempt}: ")
    first = await run.call(effect, "one")
    second = await run.call(effect, "two")
    return f"{first}, {second}"


@agent
async def plain(run: Run) -> str:
    """Is not declared replayable."""
    return f"heard {run.text}"


async def crashed(
    name: str, *, events: Sequence[Event] = (), interrupted: bool = False, waiting: int = 0, times: int = 1
) -> tuple[MemoryStore, Claim]:
    """A store whose last holder ended in the middle of a run that had written `events`."""
    store = MemoryStore()
    CALLED.clear()
    await store.open(node_id="n_gone", at=1.0)
    sent = await store.send(
        Send(
            principal="local",
            key="s",
            agent=name,
            default_agent=name,
            message_id="m_1",
            content="go",
            policy="queue",
            at=1.0,
            run_id="r_1",
        )
    )
    assert sent.claim is not None
    for number in range(waiting):
        await store.send(
            Send(
                principal="local",
                key="s",
                agent=None,
                default_agent=name,
                message_id=f"m_w{number}",
                content=f"w{number}",
                policy="queue",
                at=2.0,
            )
        )
    if events:
        await store.append(sent.claim.lease, [encode_event(event) for event in events])
    if interrupted:
        cause = Cause(kind="user", reason="enough", origin="s", at=3.0)
        await store.interrupt(InterruptRequest(principal="local", key="s", cause=cause, at=3.0))
    await store.close()
    for _ in range(times - 1):
        await store.open(node_id="n_again", at=4.0)
        for claim in await store.rescue(at=4.0):
            await store.restart(claim.lease, at=4.0)
        await store.close()
    return store, sent.claim


def started(number: int, name: str = "effect", *, idempotent: bool = False) -> ToolStarted:
    """The intent of call `number`."""
    arguments = {"args": [["one", "two"][number - 1]]}
    return ToolStarted(run_id="r_1", call_id=f"r_1.{number}", name=name, arguments=arguments, idempotent=idempotent)


def finished(number: int, result: str) -> ToolFinished:
    """The result of call `number`."""
    return ToolFinished(run_id="r_1", call_id=f"r_1.{number}", status="ok", result=result)


async def log(host: Host) -> list[Event]:
    """All events of the session."""
    return [decode_event(event) for event in await host.store.read_events(1, after=0, limit=1000)]


def revived(store: MemoryStore) -> Host:
    """The next host on that store."""
    return Host(agents=[workbench, plain], store=store, clock=VirtualClock(), settings=Settings(restart_limit=3))


def test_a_replayable_run_goes_on_under_its_id_and_repeats_no_call_that_has_a_result() -> None:
    async def scenario() -> None:
        store, _ = await crashed(
            "workbench",
            events=[TextDelta(run_id="r_1", text="attempt 1: "), started(1), finished(1, "did one")],
        )
        async with revived(store) as host:
            assert host.recovered.restarted == ("r_1",)
            settlement = await host.session("s").wait("m_1")
            assert (settlement.run_id, settlement.state) == ("r_1", "completed")
            assert settlement.text == "attempt 2: did one, did two"
            assert CALLED == ["two"]
            events = await log(host)
            restarted = next(e for e in events if isinstance(e, RunRestarted))
            said = [e for e in events if isinstance(e, TextDelta) and e.seq < restarted.seq]
            assert all(e.seq >= restarted.discard_from for e in said)
            calls = [e for e in await host.session("s").transcript() if e.role.startswith("tool")]
            assert [(e.role, e.call_id) for e in calls] == [
                ("tool_call", "r_1.1"),
                ("tool_result", "r_1.1"),
                ("tool_call", "r_1.2"),
                ("tool_result", "r_1.2"),
            ]

    run_virtual(scenario())


def test_an_idempotent_call_without_a_result_is_made_again() -> None:
    async def scenario() -> None:
        store, _ = await crashed("workbench", events=[started(1, idempotent=True)])
        async with revived(store) as host:
            assert (await host.session("s").wait("m_1")).state == "completed"
            assert CALLED == ["one", "two"]

    run_virtual(scenario())


def check_interrupted(name: str, why: str, *, kind: str = "crash", events: Sequence[Event] = (), **how: object) -> None:
    """The run ends as interrupted, is not made again, leaves a valid transcript, and what waits runs."""

    async def scenario() -> None:
        store, _ = await crashed(name, events=events, waiting=2, **how)  # type: ignore[arg-type]
        async with revived(store) as host:
            assert host.recovered.interrupted == ("r_1",)
            session = host.session("s")
            settlement = await session.wait("m_1")
            assert settlement.state == "interrupted"
            assert settlement.cause is not None
            assert settlement.cause.kind == kind
            assert why in settlement.cause.reason
            for number in range(2):
                assert (await session.wait(f"m_w{number}")).state in ("completed", "failed")
            entries = await session.transcript()
            calls = [e.call_id for e in entries if e.role == "tool_call"]
            assert calls == [e.call_id for e in entries if e.role == "tool_result"]
            run = await session.run("r_1")
            assert run.state == "interrupted"
            assert next(e.run_id for e in await log(host) if isinstance(e, RunFinished)) == "r_1"

    run_virtual(scenario())


def test_a_run_that_is_not_replayable_is_interrupted_and_its_partial_text_kept() -> None:
    check_interrupted("plain", "not declared replayable", events=[TextDelta(run_id="r_1", text="half")])


def test_a_run_with_a_call_of_unknown_outcome_is_interrupted() -> None:
    check_interrupted("workbench", "a call that is not idempotent started and has no result", events=[started(1)])


def test_a_run_whose_interrupt_was_recorded_is_not_run_again() -> None:
    check_interrupted("workbench", "enough", kind="user", interrupted=True)


def test_a_run_that_crashes_its_host_again_and_again_is_given_up() -> None:
    check_interrupted("workbench", "given up after 3 restarts", times=4)


def test_a_run_of_an_agent_that_is_gone_is_interrupted() -> None:
    check_interrupted("somebody", "unknown agent 'somebody'")


def test_a_crash_during_the_recovery_is_recovered_too() -> None:
    async def scenario() -> None:
        store, claim = await crashed("workbench", times=2)
        async with revived(store) as host:
            assert (await host.session("s").wait("m_1")).run_id == claim.lease.run_id
            assert (await host.session("s").run("r_1")).attempt == 3

    run_virtual(scenario())


def test_a_drain_parks_replayable_runs_and_the_next_start_goes_on_with_them() -> None:
    @agent(name="workbench", replayable=True)
    async def slow(run: Run) -> str:
        first: str = await run.call(effect, "one")
        await asyncio.sleep(100 if run.attempt == 1 else 0)
        return first

    async def scenario() -> None:
        CALLED.clear()
        store = MemoryStore()
        async with Host(
            slow, store=store, clock=VirtualClock(), settings=Settings(drain_timeout_s=1, grace_s=1)
        ) as host:
            receipt = await host.session("s").send("go")
            await asyncio.sleep(1)
            report = await host.drain()
            assert report.suspended == (receipt.run_id,)
            assert (report.finished, report.interrupted, report.orphans) == (0, (), ())
        async with Host(slow, store=store, clock=VirtualClock()) as host:
            settlement = await host.session("s").wait(receipt.message_id)
            assert (settlement.state, settlement.run_id) == ("completed", receipt.run_id)
        assert CALLED == ["one"]

    run_virtual(scenario())
