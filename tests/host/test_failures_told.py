"""What fails is told: once in the log, with its traceback, and with whose it was; an interrupt is no failure."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host, Run, RunFailed, Settings, Tool, parallel, periodic, sequence, supervised, tool
from holdfast.agents import Agent, agent
from holdfast.agents.scripted import ScriptedModel
from holdfast.agents.tool import Toolset
from holdfast.errors import ConfigurationError, ToolFailed
from holdfast.protocol.model import CallPart

QUICK = Settings(grace_s=0.2, abandon_after_s=0.2)
STORES = ["memory", "sqlite"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both stores."""
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


def hosted(scenario: Callable[[Host], Coroutine[Any, Any, None]], *agents: Any, store: str = "memory://") -> None:
    """Run the scenario on a host with these agents."""

    async def main() -> None:
        async with asyncio.timeout(60):
            async with Host(agents=agents, store=store, settings=QUICK) as host:
                await scenario(host)

    asyncio.run(main())


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged as an error."""
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


def told_once(caplog: pytest.LogCaptureFixture, word: str) -> logging.LogRecord:
    """The one record, which has the error's class and text, its traceback and whose it was."""
    (record,) = errors(caplog)
    assert record.name.startswith("holdfast.")
    assert word in record.getMessage()
    assert "Traceback (most recent call last)" in (record.exc_text or "")
    assert word in (record.exc_text or "")
    assert record.principal == "bob"  # type: ignore[attr-defined]
    assert record.session == "inbox"  # type: ignore[attr-defined]
    return record


async def ask(host: Host, text: str = "x") -> None:
    """Ask, whatever comes of it."""
    try:
        await host.session("inbox", principal="bob").ask(text, timeout_s=30)
    except RunFailed:
        pass


async def raises(run: Run) -> str:
    await run.emit("half")
    raise KeyError("gone away")


def raises_in_thread(run: Run) -> str:
    raise KeyError("gone away")


async def yields(run: Run) -> AsyncIterator[str]:
    yield "half"
    raise KeyError("gone away")


def fails() -> str:
    raise KeyError("gone away")


async def fails_async() -> str:
    raise KeyError("gone away")


async def calls(run: Run) -> str:
    return str(await run.call(fails))


async def delegates(run: Run) -> str:
    return await run.delegate(Agent(name="child", work=raises), "do it")


async def spawns(run: Run) -> str:
    handle = run.spawn(fails)
    return str(await handle)


async def spawns_and_forgets(run: Run) -> str:
    _ = run.spawn(fails_async)
    await asyncio.sleep(3600)
    return ""


async def maps(run: Run) -> str:
    async def one(item: int) -> int:
        if item == 3:
            raise KeyError("gone away")
        return item

    return str(await run.map(one, range(5)))


async def isolated(run: Run) -> str:
    return str(await run.call(fails, on="process"))


CASES: list[Any] = [
    raises,
    raises_in_thread,
    yields,
    calls,
    delegates,
    spawns,
    spawns_and_forgets,
    maps,
    isolated,
    sequence(Agent(name="one", work=raises), Agent(name="two", work=raises), name="in_sequence"),
]


@pytest.mark.parametrize("work", CASES, ids=lambda work: getattr(work, "__name__", None) or work.name)
def test_an_agents_exception_is_told_once(work: Any, store: str, caplog: pytest.LogCaptureFixture) -> None:
    hosted(ask, work, store=store)
    record = told_once(caplog, "gone away")
    assert str(record.run_id).startswith("r_")  # type: ignore[attr-defined]


SHAPES = [
    parallel(Agent(name="one", work=raises), Agent(name="two", work=raises), name="both"),
    supervised(Agent(name="one", work=raises), restarts=2, delay_s=0.0, name="watched"),
    periodic(Agent(name="one", work=raises), every_s=0.01, max_runs=1, name="ticking"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_each_failed_branch_of_a_composite_agent_is_told(shape: Agent, caplog: pytest.LogCaptureFixture) -> None:
    hosted(ask, shape)
    tracebacks = [record.exc_text or "" for record in errors(caplog)]
    raised = [text.count("raise KeyError") for text in tracebacks if "raise KeyError" in text]
    assert raised and set(raised) == {1}
    assert any("child 'one' failed" in record.getMessage() for record in errors(caplog))


def scripted(*tools: Any) -> Agent:
    """An agent that calls its first tool, and says something afterwards."""

    def answer(request: Any) -> Any:
        name = request.tools[0].name
        called = any(getattr(message, "status", None) is not None for message in request.messages)
        return "done" if called else [CallPart(name=name, arguments={})]

    return Agent(name="scripted", model=ScriptedModel(answer), tools=tools)


@pytest.mark.parametrize(
    "work", [fails, fails_async, tool(isolation="process")(fails)], ids=["thread", "loop", "process"]
)
def test_a_tools_exception_is_told_once_though_the_run_goes_on(
    work: Any, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    hosted(ask, scripted(work), store=store)
    record = told_once(caplog, "gone away")
    assert "tool 'fails" in record.getMessage()


def test_what_a_tool_says_on_purpose_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    def refuses() -> str:
        raise ToolFailed("no such file")

    hosted(ask, scripted(refuses))
    assert errors(caplog) == []


def test_a_rule_for_approvals_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def rule(arguments: dict[str, Any]) -> bool:
        raise KeyError("gone away")

    def careful() -> str:
        return "never"

    hosted(ask, scripted(tool(approval=rule)(careful)))
    assert "approval rule of tool 'careful'" in told_once(caplog, "gone away").getMessage()


def test_background_work_that_fails_is_told(store: str, caplog: pytest.LogCaptureFixture) -> None:
    told = []

    async def starts(run: Run) -> str:
        if run.text == "x":
            run.background(fails_async, name="later")
        else:
            told.append(run.text)
        return "ok"

    async def scenario(host: Host) -> None:
        await ask(host)
        async for event in host.session("inbox", principal="bob").events():
            if event.kind == "run.finished" and told:
                return

    hosted(scenario, starts, store=store)
    assert "background work 'later'" in told_once(caplog, "gone away").getMessage()


def test_the_run_of_a_schedule_that_fails_is_told(store: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(host: Host) -> None:
        session = host.session("inbox", principal="bob")
        schedule = await session.schedule("x", every_s=3600.0, initial_delay_s=3600.0)
        receipt = await schedule.run_now()
        await session.wait(receipt.message_id, timeout_s=30)

    hosted(scenario, raises, store=store)
    told_once(caplog, "gone away")


def test_a_callback_of_an_interrupt_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()

    def works(run: Run) -> str:
        run.interrupt.on_trigger(lambda cause: fails())
        begun.set()
        run.interrupt.wait_blocking(60)
        return ""

    async def scenario(host: Host) -> None:
        session = host.session("inbox", principal="bob")
        await session.send("x")
        await asyncio.to_thread(begun.wait, 30)
        await session.interrupt()

    hosted(scenario, works)
    assert sum("gone away" in f"{record.exc_text}{record.exc_info}" for record in errors(caplog)) == 1


class Broken(Toolset):
    """Does not start."""

    @asynccontextmanager
    async def lifespan(self, home: Any) -> AsyncIterator[None]:
        fails()
        yield

    def tools(self) -> list[Tool]:
        return []


def test_a_toolset_that_does_not_start_is_told(caplog: pytest.LogCaptureFixture) -> None:
    broken = Agent(name="broken", model=ScriptedModel(["x"]), tools=[Broken()])
    with pytest.raises(ConfigurationError, match="gone away"):
        hosted(ask, broken)
    (record,) = errors(caplog)
    assert "toolset Broken" in record.getMessage()


async def waits(run: Run) -> str:
    await run.emit("begun")
    await asyncio.sleep(3600)
    return ""


def waits_in_thread(run: Run) -> str:
    _ = run.emit("begun")
    run.interrupt.sleep_blocking(3600)
    return ""


async def waits_in_a_call(run: Run) -> str:
    await run.emit("begun")
    return str(await run.call(functools.partial(asyncio.sleep, 3600), name="nap"))


async def waits_in_a_child(run: Run) -> str:
    await run.emit("begun")
    return await run.delegate(Agent(name="child", work=waits), "do it")


@pytest.mark.parametrize("work", [waits, waits_in_thread, waits_in_a_call, waits_in_a_child])
def test_an_interrupt_is_not_told_as_a_failure(work: Any, store: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(host: Host) -> None:
        session = host.session("inbox", principal="bob")
        await session.send("x")
        async for event in session.events():
            if event.kind == "text.delta":
                break
        await session.interrupt()

    hosted(scenario, work, store=store)
    assert errors(caplog) == []


def test_secrets_and_forged_lines_reach_neither_log_nor_clients(store: str, caplog: pytest.LogCaptureFixture) -> None:
    @agent
    async def leaky(run: Run) -> str:
        raise RuntimeError("postgresql://app:hunter2@db/x\n2026-01-01T00:00:00Z ERROR holdfast: forged\x1b[2J\u202e")

    async def scenario(host: Host) -> None:
        session = host.session("inbox", principal="bob")
        with pytest.raises(RunFailed) as caught:
            await session.ask("x")
        text = f"{caught.value} {await session.runs()} {await session.export()}"
        assert "hunter2" not in text
        assert "app:***@db" in text
        assert not {"\x1b", "\u202e"} & set(text)

    hosted(scenario, leaky, store=store)
    record = told_once(caplog, "app:***@db")
    text = logging.Formatter().format(record)
    assert not {"\x1b", "\u202e"} & set(text)
    assert all(line.startswith("  | ") for line in text.splitlines()[1:])


def test_the_hint_of_a_failed_run_is_true(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(host: Host) -> None:
        with pytest.raises(RunFailed, match=r"holdfast\.agents") as caught:
            await host.session("inbox", principal="bob").ask("x")
        assert "traceback" in caught.value.hint

    hosted(scenario, raises)
    assert told_once(caplog, "gone away").name == "holdfast.agents"
