"""Whole runs of an agent whose model is reached over the real protocols: tools, faults, interrupts, the next run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from holdfast import Agent, Host, RunFailed, Session, Settings
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.messages import Settlement
from holdfast.protocol.model import ModelRequest, ToolMessage, UserMessage
from holdfast.testing.model_server import Exchange, ModelServer, Reply

NAMES = ("openai:gpt-test", "openai-responses:gpt-test", "anthropic:claude-test")
SETTINGS = Settings(grace_s=5.0, abandon_after_s=20.0, drain_timeout_s=0.5)


@pytest.fixture(params=NAMES, ids=["openai", "responses", "anthropic"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def forever() -> None:
    """Wait until it is stopped."""
    await asyncio.get_running_loop().create_future()


Scenario = Callable[[ModelServer, Session], Awaitable[None]]


def with_run(
    scenario: Scenario,
    script: Sequence[Reply] | Callable[[ModelRequest], Reply],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> None:
    """Run a scenario with a session of an agent with that model; afterwards nothing is connected, no promise broken."""

    async def main() -> None:
        async with asyncio.timeout(90), ModelServer(script) as server:
            for variable, value in server.environment.items():
                monkeypatch.setenv(variable, value)
            agent = Agent(**{"name": "agent", "model": name, "tools": (add, forever), **options})
            host = Host(agent, store="memory://", settings=SETTINGS)
            async with host:
                await scenario(server, host.session("alice"))
            await server.disconnected()
            assert {number for number, count in host.statistics().promises.items() if count.broken} == set()

    asyncio.run(main())


async def settled(session: Session, text: str) -> Settlement:
    receipt = await session.send(text)
    return await session.wait(receipt.message_id, timeout_s=60)


def results_of(exchange: Exchange) -> list[str]:
    """What the model was told of the calls, in any of the protocols."""
    found = []
    for message in exchange.body.get("messages") or exchange.body["input"]:
        if message.get("type") == "function_call_output":
            found.append(message["output"])
        elif message.get("role") == "tool":
            found.append(message["content"])
        elif isinstance(message.get("content"), list):
            found += [str(block["content"]) for block in message["content"] if block["type"] == "tool_result"]
    return found


def test_a_run_calls_tools_in_parallel_and_the_next_run_knows_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        assert await session.ask("add") == "I add.\n\nIt is 3 and 7."
        assert "3" in results_of(server.exchanges[1])[0] and "7" in results_of(server.exchanges[1])[1]
        assert await session.ask("and again?") == "As I said."
        assert len(results_of(server.exchanges[2])) == 2
        assert server.opened == 1, "connections are kept between requests"

    calls = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
    script = [Reply(text="I add.", calls=calls), Reply(text="It is 3 and 7."), Reply(text="As I said.")]
    with_run(scenario, script, name, monkeypatch)


def test_what_the_model_gets_wrong_it_is_told_and_can_mend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        assert (await session.ask("add")).endswith("It is 3.")
        broken, unknown, wrong, good = results_of(server.exchanges[1])
        assert "JSON" in broken
        assert "unknown tool 'subtract'" in unknown
        assert "a" in wrong and "invalid arguments" in wrong
        assert "3" in good

    calls: list[tuple[str, dict[str, Any] | str]] = [
        ("add", '{"a": 1, "b'),
        ("subtract", {"a": 1}),
        ("add", {"a": "one", "b": 2}),
        ("add", {"a": 1, "b": 2}),
    ]
    with_run(scenario, [Reply(calls=calls), Reply(text="It is 3.")], name, monkeypatch)


@pytest.mark.parametrize("status", [429, 500])
def test_a_request_that_was_turned_away_is_made_again(status: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        assert await session.ask("hello") == "Hello."
        assert len(server.exchanges) == 2

    away = Reply(status=status, retry_after_s=0.01)
    with_run(scenario, [away, Reply(text="Hello.")], name, monkeypatch)


def test_a_request_that_is_refused_fails_the_run_with_what_to_do_and_is_not_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        with pytest.raises(RunFailed, match="check the model's name"):
            await session.ask("hello")
        assert len(server.exchanges) == 1
        assert await session.ask("again") == "Hello."

    with_run(scenario, [Reply(status=404), Reply(text="Hello.")], name, monkeypatch)


@pytest.mark.parametrize("fault", ["cut", "short", "garbage", "error"])
def test_an_answer_that_breaks_off_fails_the_run_and_the_next_one_works(
    fault: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        settlement = await settled(session, "hello")
        assert settlement.state == "failed"
        assert len(server.exchanges) == 1, "what was told is not asked for again"
        assert await session.ask("again") == "Hello."

    with_run(scenario, [Reply(text="some words", fault=fault), Reply(text="Hello.")], name, monkeypatch)


def test_a_model_that_stalls_meets_the_deadline_of_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        settlement = await settled(session, "hello")
        assert settlement.state == "interrupted"
        assert settlement.cause is not None and settlement.cause.kind == "deadline"
        await server.exchanges[0].until(ended=True)
        assert server.exchanges[0].ended == "closed"
        assert await session.ask("again") == "Hello."

    stall = Reply(text="some words", fault="stall")
    with_run(scenario, [stall, Reply(text="Hello.")], name, monkeypatch, limits=AgentLimits(step_timeout_s=3.0))


def test_a_message_that_is_steered_comes_after_the_results_of_the_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Session] = []

    async def scenario(server: ModelServer, session: Session) -> None:
        begun.append(session)
        sent = await session.send("add")
        assert (await session.wait(sent.message_id)).text.endswith("In French: trois.")
        assert "3" in results_of(server.exchanges[1])[0]
        assert "say it in French" in str(server.exchanges[1].body)

    async def slowly(a: int, b: int) -> int:
        """Add two numbers; meanwhile the user says something."""
        await begun[0].send("say it in French", policy="steer")
        return a + b

    script = [Reply(calls=[("slowly", {"a": 1, "b": 2})]), Reply(text="In French: trois.")]
    with_run(scenario, script, name, monkeypatch, tools=(slowly,))


def test_a_history_is_summed_up_undone_and_asked_again_in_requests_that_the_provider_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        for n in range(4):
            assert (await session.ask(f"add {n}")).endswith("It is 3.")
        await session.compact(keep=1)
        assert await session.ask("hello") == "Hello."
        assert "They added." in str(server.exchanges[-1].body)
        again = await session.retry()
        assert (await session.wait(again.message_id)).text == "Hello."
        await session.undo()
        assert (await session.ask("add 5")).endswith("It is 3.")

    def answer(request: ModelRequest) -> Reply:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return Reply(text="It is 3.")
        if isinstance(last, UserMessage) and last.content.startswith("add"):
            return Reply(text="I add. ", calls=[("add", {"a": 1, "b": 2})])
        return Reply(text="Hello.") if request.tools else Reply(text="They added.")

    with_run(scenario, answer, name, monkeypatch)


# ── interrupts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def scripted(first: Reply) -> Callable[[ModelRequest], Reply]:
    """`first` for the request "go", whatever was before it; a plain answer for anything else."""

    def answer(request: ModelRequest) -> Reply:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return Reply(text="Both are done.", fault="stall", after=1)
        return first if isinstance(last, UserMessage) and last.content.endswith("go") else Reply(text="Hello.")

    return answer


WAITS = {
    "for the headers": (Reply(headers_s=math.inf), 0),
    "for the first piece": (Reply(text="never", pace_s=math.inf), 0),
    "for the next piece": (Reply(text="some words and then none", fault="stall", after=2), 2),
    "for the rest of a call": (Reply(text="I add. ", calls=[("add", {"a": 1, "b": 2})], fault="stall", after=2), 2),
}


@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupted_run_closes_its_connection_and_the_next_run_works(
    wait: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, pieces = WAITS[wait]

    async def scenario(server: ModelServer, session: Session) -> None:
        sent = await session.send("go")
        exchange = await server.requests(1)
        await exchange.until(pieces=pieces)
        receipt = await session.interrupt("enough")
        assert receipt.outcome == "gone", receipt
        await exchange.until(ended=True)
        assert exchange.ended == "closed"
        assert (await session.wait(sent.message_id, timeout_s=60)).state == "interrupted"
        assert len(server.exchanges) == 1, "nothing asks again after the interrupt"
        assert await session.ask("again") == "Hello."

    with_run(scenario, scripted(reply), name, monkeypatch)


def test_a_run_that_is_interrupted_in_its_tools_has_a_result_for_each_call(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: ModelServer, session: Session) -> None:
        sent = await session.send("go")
        async for event in session.events(after=sent.cursor):
            if event.kind == "tool.finished":
                break
        await session.interrupt("enough")
        assert await session.ask("again") == "Hello."
        first, second = results_of(server.exchanges[-1])
        assert "3" in first and "interrupted" in second

    calls: list[tuple[str, dict[str, Any] | str]] = [("add", {"a": 1, "b": 2}), ("forever", {})]
    with_run(scenario, scripted(Reply(text="I try.", calls=calls)), name, monkeypatch)


def test_wherever_a_run_is_interrupted_the_provider_takes_the_next_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any] | str]] = [("add", {"a": 1, "b": 2}), ("forever", {})]
    reply = Reply(reasoning="I wonder.", text="I try this and then that.", calls=calls, pace_s=0.002)

    async def scenario(server: ModelServer, session: Session) -> None:
        for hops in range(0, 120, 6):
            seen = len(server.exchanges)
            sent = await session.send("go")
            exchange = await server.requests(seen + 1)
            await exchange.until(pieces=min(hops // 15, 6))
            for _ in range(hops % 15):
                await asyncio.sleep(0)
            await session.interrupt(f"at {hops}")
            assert (await session.wait(sent.message_id, timeout_s=60)).state == "interrupted"
            assert await session.ask("again") == "Hello."

    with_run(scenario, scripted(reply), name, monkeypatch)


def said(exchange: Exchange) -> list[tuple[str, str]]:
    """Role and text of each message that the provider got, in any of the protocols."""
    found = []
    for message in exchange.body.get("messages") or exchange.body["input"]:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        if message.get("role") in ("user", "assistant"):
            found.append((message["role"], content or ""))
    return found


@pytest.mark.parametrize("wait", ["for the headers", "for the next piece"])
def test_what_was_interrupted_is_not_joined_with_the_next_message(
    wait: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply, pieces = WAITS[wait]

    async def scenario(server: ModelServer, session: Session) -> None:
        await session.send("delete all my files, go")
        exchange = await server.requests(1)
        await exchange.until(pieces=pieces)
        await session.interrupt()
        assert await session.ask("hello") == "Hello."
        asked, noted, hello = said(server.exchanges[-1])
        assert asked == ("user", "delete all my files, go")
        assert noted[0] == "assistant"
        assert "interrupted by the user before this was" in noted[1]
        assert "unless it is asked for again" in noted[1]
        assert hello == ("user", "hello")

    with_run(scenario, scripted(reply), name, monkeypatch)
