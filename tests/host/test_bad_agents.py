"""Agents that misbehave: each gets a clear end, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from holdfast import Host, Run, RunFailed, Session, Settings
from holdfast.errors import ConfigurationError, InvalidKey, RunClosed, UnknownAgent
from holdfast.protocol.messages import Settlement

QUICK = Settings(grace_s=0.05, abandon_after_s=0.5, loop_block_s=0.2)


def hosted(scenario: Callable[[Host], Coroutine[Any, Any, None]], *agents: Any, settings: Settings = QUICK) -> Host:
    """Run the scenario on a host with these agents; a healthy session must be served at the end."""

    async def healthy(run: Run) -> str:
        return "healthy"

    async def main() -> Host:
        async with asyncio.timeout(30):
            async with Host(agents=[*agents, healthy], store="memory://", settings=settings) as host:
                await scenario(host)
                assert await host.session("another").ask("hello", agent="healthy") == "healthy"
            return host

    return asyncio.run(main())


async def begun(session: Session) -> None:
    """Wait until the session's run has said something."""
    async for event in session.events():
        if event.kind == "text.delta":
            return


async def settled(host: Host, name: str) -> Settlement:
    """What becomes of a message to the agent of that name."""
    session = host.session(name, agent=name)
    receipt = await session.send("x")
    return await session.wait(receipt.message_id, timeout_s=20)


def test_an_agent_that_raises_fails_its_run_with_its_error() -> None:
    async def bad(run: Run) -> None:
        await run.emit("half")
        raise KeyError("gone")

    async def scenario(host: Host) -> None:
        settlement = await settled(host, "bad")
        assert (settlement.state, settlement.error, settlement.text) == ("failed", "KeyError: 'gone'", "half")

    hosted(scenario, bad)


@pytest.mark.parametrize("nonsense", [42, b"bytes", ["a"], object()])
def test_an_agent_that_returns_nonsense_fails_with_a_text_that_says_so(nonsense: object) -> None:
    async def bad(run: Run) -> Any:
        return nonsense

    async def scenario(host: Host) -> None:
        settlement = await settled(host, "bad")
        assert settlement.state == "failed"
        assert "return or yield text (str), or None" in (settlement.error or "")

    hosted(scenario, bad)


def test_a_generator_that_never_yields_completes_with_no_text() -> None:
    async def silent(run: Run) -> AsyncIterator[str]:
        if run.attempt < 0:
            yield "never"

    async def scenario(host: Host) -> None:
        settlement = await settled(host, "silent")
        assert (settlement.state, settlement.text) == ("completed", "")

    hosted(scenario, silent)


def test_an_agent_that_blocks_the_loop_is_reported_with_its_stack() -> None:
    async def blocking(run: Run) -> None:
        time.sleep(2.0)  # the fault that is tested

    async def scenario(host: Host) -> None:
        await settled(host, "blocking")

    host = hosted(scenario, blocking)
    blocked = [incident for incident in host.incidents.newest if incident.kind == "loop_blocked"]
    assert any("time.sleep(2.0)" in line for incident in blocked for line in incident.stack)


def test_an_agent_that_swallows_cancellation_is_abandoned_and_named() -> None:
    let_go = False

    async def stubborn(run: Run) -> str:
        await run.emit("begun")
        while not let_go:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        return "never counts"

    async def scenario(host: Host) -> None:
        nonlocal let_go
        session = host.session("s", agent="stubborn")
        receipt = await session.send("x")
        await begun(session)
        try:
            stopped = await session.interrupt("enough")
            assert stopped.outcome == "quarantined"
            assert [left.name for left in stopped.abandoned] == ["stubborn"]
            assert any("in stubborn" in line for line in stopped.abandoned[0].stack)
            assert (await session.wait(receipt.message_id)).state == "interrupted"
            assert await session.ask("next", agent="healthy") == "healthy"
        finally:
            let_go = True

    hosted(scenario, stubborn)


def test_an_agent_that_raises_in_its_clean_up_is_interrupted_with_the_error_attached() -> None:
    async def bad(run: Run) -> None:
        await run.emit("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("clean-up broke")

    async def scenario(host: Host) -> None:
        session = host.session("bad", agent="bad")
        receipt = await session.send("x")
        await begun(session)
        await session.interrupt("enough")
        assert (await session.wait(receipt.message_id)).state == "interrupted"
        run = (await session.runs())[0]
        assert run.error == "ValueError: clean-up broke"

    hosted(scenario, bad)


def test_a_run_that_is_used_after_its_end_refuses_and_nothing_counts() -> None:
    kept: list[Run] = []

    async def leaking(run: Run) -> str:
        kept.append(run)
        return "done"

    async def scenario(host: Host) -> None:
        await settled(host, "leaking")
        with pytest.raises(RunClosed, match="has ended"):
            kept[0].emit("late")
        with pytest.raises(RunClosed):
            kept[0].spawn(asyncio.sleep, 0)
        with pytest.raises(RunClosed):
            await kept[0].call(len, "x")
        assert [e.content for e in await host.session("leaking").transcript()] == ["x", "done"]

    hosted(scenario, leaking)


def test_a_thread_that_cannot_be_stopped_is_quarantined_and_what_it_says_later_does_not_count() -> None:
    release = threading.Event()  # stands for C code that waits on its own
    refused: list[BaseException] = []

    def stuck(run: Run) -> None:
        run.emit("before")
        release.wait(60)
        try:
            run.emit("after")
        except RunClosed as error:
            refused.append(error)

    async def scenario(host: Host) -> None:
        session = host.session("s", agent="stuck")
        receipt = await session.send("x")
        await begun(session)
        stopped = await session.interrupt("enough")
        assert stopped.outcome == "quarantined"
        assert stopped.abandoned[0].kind == "thread"
        assert (await session.wait(receipt.message_id)).text == "before"
        release.set()
        assert await session.ask("next", agent="healthy") == "healthy"
        while not refused:
            await asyncio.sleep(0.01)
        assert "after" not in str(await session.transcript())

    hosted(scenario, stuck)


def test_a_call_with_arguments_or_results_that_json_cannot_hold_says_which() -> None:
    async def give(thing: object = None) -> object:
        return object()

    async def arguments(run: Run) -> None:
        await run.call(give, object())

    async def results(run: Run) -> None:
        await run.call(give)

    async def scenario(host: Host) -> None:
        assert "the arguments of give cannot be encoded as JSON" in ((await settled(host, "arguments")).error or "")
        assert "the result of give cannot be encoded as JSON" in ((await settled(host, "results")).error or "")
        entries = await host.session("results").transcript()
        assert [e.role for e in entries] == ["user", "tool_call", "tool_result"]

    hosted(scenario, arguments, results)


def test_a_call_that_does_not_end_times_out_and_the_run_goes_on() -> None:
    async def patient(run: Run) -> str:
        try:
            await run.call(asyncio.sleep, 3600, timeout_s=0.01)
        except TimeoutError as error:
            return str(error)
        return "?"

    async def scenario(host: Host) -> None:
        assert (await settled(host, "patient")).text == "sleep did not end within 0.01 s"

    hosted(scenario, patient)


def test_a_run_past_its_deadline_is_interrupted_with_that_cause() -> None:
    async def endless(run: Run) -> None:
        await asyncio.sleep(3600)

    async def scenario(host: Host) -> None:
        settlement = await settled(host, "endless")
        assert settlement.state == "interrupted"
        assert settlement.cause is not None
        assert settlement.cause.kind == "deadline"
        kinds = [e.kind async for e in host.session("endless").events(follow=settlement.message_id)]
        assert kinds.count("run.stopping") == 1

    hosted(scenario, endless, settings=Settings(run_timeout_s=2.0, grace_s=0.05))


def test_what_a_run_leaves_behind_ends_with_it() -> None:
    left: list[asyncio.Task[None]] = []

    async def littering(run: Run) -> str:
        left.append(asyncio.get_running_loop().create_task(asyncio.sleep(3600)))
        return "done"

    async def scenario(host: Host) -> None:
        assert (await settled(host, "littering")).state == "completed"
        assert left[0].cancelled()

    hosted(scenario, littering)


def test_a_branch_that_fails_fails_the_run_and_stops_its_siblings() -> None:
    stopped: list[str] = []

    async def branch() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.append("sibling")

    async def broken() -> None:
        raise ValueError("branch broke")

    async def forking(run: Run) -> None:
        await run.parallel(branch, broken)

    async def scenario(host: Host) -> None:
        settlement = await settled(host, "forking")
        assert (settlement.state, settlement.error) == ("failed", "ValueError: branch broke")
        assert stopped == ["sibling"]

    hosted(scenario, forking)


def test_children_that_fail_or_nest_too_deep_say_so() -> None:
    async def failing(run: Run) -> None:
        raise ValueError("child broke")

    async def parent(run: Run) -> None:
        await run.delegate("failing", "x")

    async def russian_doll(run: Run) -> str:
        return await run.delegate("russian_doll", f"{run.text} and smaller")

    async def mirror(run: Run) -> str:
        return await run.delegate("other_mirror", run.text)

    async def other_mirror(run: Run) -> str:
        return await run.delegate("mirror", run.text)

    async def scenario(host: Host) -> None:
        assert (await settled(host, "parent")).error == "RunFailed: child failing failed: ValueError: child broke"
        error = (await settled(host, "russian_doll")).error or ""
        assert "agents are nested too deep: russian_doll ▸ russian_doll ▸ russian_doll" in error
        error = (await settled(host, "mirror")).error or ""
        assert "is already handling this request: mirror ▸ other_mirror ▸ mirror (" in error
        with pytest.raises(RunFailed):
            await host.session("another", agent="parent").ask("x")

    hosted(scenario, failing, parent, russian_doll, mirror, other_mirror)


def test_what_is_no_agent_and_what_is_no_session_is_refused_with_a_hint() -> None:
    for wrong in (42, int, lambda: None, lambda a, b: None):
        with pytest.raises(ConfigurationError) as refusal:
            Host(wrong, store="memory://")  # type: ignore[arg-type]
        assert refusal.value.hint
    with pytest.raises(ConfigurationError, match="two agents"):
        Host(agents=[as_named("x"), as_named("x")], store="memory://")
    with pytest.raises(ConfigurationError, match="at least one agent"):
        Host(store="memory://")
    host = Host(as_named("x"), store="memory://")
    for key in ("", "a/b", "a\0b", "a\nb", "x" * 201):
        with pytest.raises(InvalidKey):
            host.session(key)
    with pytest.raises(UnknownAgent, match="unknown agent 'y'") as unknown:
        host.session("s", agent="y")
    assert "available: x" in unknown.value.hint and "name one with the message" in unknown.value.hint


def as_named(name: str) -> Any:
    """An agent of that name."""

    async def work(run: Run) -> None:
        pass

    work.__name__ = name
    return work
