"""The agent loop where its tools, its limits or what its model says are not as they should be, and people are asked."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from holdfast import Agent, Host, Run, agent, tool
from holdfast.agents.scripted import Pause, ScriptedModel
from holdfast.errors import ConfigurationError, RunFailed, RunInterrupted
from holdfast.host.session import Session
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.messages import Question, Usage
from holdfast.protocol.model import CallPart, ModelMessage, ModelRequest, ToolMessage
from holdfast.storage import MemoryStore
from holdfast.testing import VirtualClock, run_virtual
from tests.agents.modelled import QUICK, approve_all, call, careful, check_entries, model, nap, on_host, steps


@tool
async def quick(text: str) -> str:
    """Asks nobody."""
    return text


async def asked(session: Session, count: int) -> list[Question]:
    """The questions of a run that has left the memory."""
    while len(questions := await session.questions()) < count:
        await asyncio.sleep(0.05)
    return questions


def seeing(answers: list[Any], seen: list[tuple[ModelMessage, ...]]) -> ScriptedModel:
    """A model with this script; `seen` gets the messages of its requests."""

    def answer(request: ModelRequest) -> Any:
        seen.append(request.messages)
        return steps(answers)(request)

    return model(answer)


async def results(host: Host, key: str) -> list[tuple[str | None, str]]:
    """The name and text of each result in the transcript, in the order of the calls."""
    entries = await host.session(key).transcript()
    check_entries(entries)
    found = {entry.call_id: (entry.name, entry.content) for entry in entries if entry.role == "tool_result"}
    return [found[entry.call_id] for entry in entries if entry.role == "tool_call"]


def on_two_hosts(first: Agent, second: Agent, before: Any, after: Any) -> None:
    """One scenario on a host with the first agent, then one on another host with the second, on the same store."""

    async def main() -> None:
        store = MemoryStore()
        given = None
        async with Host(agents=[first], store=store, settings=QUICK, clock=VirtualClock()) as host:
            given = await before(host)
            await asyncio.sleep(0.5)
            assert not host.live
        async with Host(agents=[second], store=store, settings=QUICK, clock=VirtualClock()) as host:
            await after(host, given)
            broken = {number: count for number, count in host.statistics().promises.items() if count.broken}
            assert not broken

    run_virtual(main())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_run_leaves_the_memory_only_when_all_that_it_and_its_children_ask_is_there(order: tuple[int, ...]) -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("go")
        await asyncio.sleep(0.5)
        assert not host.live
        questions = await session.questions()
        assert len(questions) == 3
        for number in order:
            await session.approve(questions[number])
            await asyncio.sleep(0.1)
        await approve_all(session)
        assert await results(host, "s") == [
            ("careful", "careful with p"),
            ("child", "That is all."),
            ("child", "That is all."),
        ]

    child = Agent(name="child", model=model([[call("careful", text="c")]]), tools=[careful], description="A child.")
    answers = [[call("careful", text="p"), call("child", task="x"), call("child", task="y")]]
    on_host(scenario, Agent(name="parent", model=model(answers), tools=[careful, child]))


def test_what_children_used_counts_although_the_run_left_the_memory_after_they_had_ended() -> None:
    used: list[Usage] = []

    def agent(asking: bool, limits: AgentLimits) -> Agent:
        other = careful if asking else quick
        child = Agent(name="child", model=model([[call("nap", number=1)]]), tools=[nap], description="A child.")
        answers = [[call("child", task="x"), call("child", task="y")], [call(other.name, text="p")]]
        return Agent(name="parent", model=model(answers), tools=[other, child], limits=limits)

    async def scenario(host: Host) -> None:
        await host.session("s").send("go")
        await asyncio.sleep(0.5)
        await approve_all(host.session("s"))
        (run,) = await host.session("s").runs()
        used.append(run.usage)
        assert run.state == "completed"

    async def over(host: Host) -> None:
        await host.session("s").send("go")
        await asyncio.sleep(0.5)
        await approve_all(host.session("s"))
        (run,) = await host.session("s").runs()
        assert run.cause is not None
        assert run.cause.kind == "budget"

    for asking in (False, True):
        on_host(scenario, agent(asking, AgentLimits()))
    assert used[0] == used[1]
    assert used[0].tool_calls == 5
    on_host(over, agent(True, AgentLimits(tool_calls=4)))


def test_a_call_that_a_person_denied_is_not_made_although_its_tool_asks_nobody_any_more() -> None:
    made: list[str] = []

    def agent(approval: bool) -> Agent:
        @tool(approval=approval)
        async def delete(path: str) -> str:
            """Deletes."""
            made.append(path)
            return "deleted"

        return Agent(name="a", model=model([[call("delete", path="x")]]), tools=[delete])

    async def before(host: Host) -> Question:
        await host.session("s").send("go")
        return (await asked(host.session("s"), 1))[0]

    async def after(host: Host, question: Question) -> None:
        await host.session("s").deny(question.question_id, reason="never")
        await approve_all(host.session("s"))
        assert await results(host, "s") == [("delete", "a person denied this call: never; it was not made")]

    on_two_hosts(agent(True), agent(False), before, after)
    assert not made


def test_a_call_that_has_its_result_is_told_as_it_was_although_its_tool_is_gone_or_asks_now() -> None:
    @tool(name="nap", approval=True)
    async def asking_nap(number: int) -> str:
        """Asks first, nowadays."""
        raise AssertionError("made twice")

    answers = [[call("nap", number=1), call("careful", text="c")]]
    for tools in ([careful], [careful, asking_nap], []):
        seen: list[tuple[ModelMessage, ...]] = []

        async def before(host: Host) -> Question:
            await host.session("s").send("go")
            return (await asked(host.session("s"), 1))[0]

        async def after(host: Host, question: Question, seen: list[tuple[ModelMessage, ...]] = seen) -> None:
            await host.session("s").approve(question)
            await asyncio.sleep(0.5)
            assert not await host.session("s").questions()
            (*_, last) = seen
            told = [(message.name, message.content) for message in last if isinstance(message, ToolMessage)]
            assert told == await results(host, "s")
            assert told[0] == ("nap", "napped 1")

        second = Agent(name="a", model=seeing(answers, seen), tools=tools)
        on_two_hosts(Agent(name="a", model=model(answers), tools=[nap, careful]), second, before, after)


@pytest.mark.parametrize(
    "part",
    [
        CallPart(name="nap\ud800", arguments={}),
        CallPart(name="nap", arguments={"number": "\ud800", "x\ud800": 1}),
        CallPart(name="nap", arguments='{"number": "\ud800"}'),
        CallPart(name="nap", arguments={"number": math.nan}),
    ],
)
def test_a_call_that_json_cannot_carry_is_an_error_that_the_model_gets(part: CallPart) -> None:
    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("go") == "That is all."
        ((_, text),) = await results(host, "s")
        assert text.startswith(("unknown tool", "the arguments", "invalid arguments"))

    on_host(scenario, Agent(name="a", model=model([part]), tools=[nap]))


class Odd(BaseException):
    """What no ``except Exception`` takes."""


ODD_ERRORS = [Odd("x"), GeneratorExit(), StopIteration(), SystemExit(3)]


@pytest.mark.parametrize(
    ("isolation", "error"),
    [(isolation, error) for isolation in ("thread", "loop") for error in ODD_ERRORS]
    + [("thread", KeyboardInterrupt())],
)
def test_whatever_a_tool_raises_is_an_error_that_the_model_gets(isolation: str, error: BaseException) -> None:
    def blocking() -> None:
        raise error

    async def asynchronous() -> None:
        raise error

    async def main() -> None:
        raising = tool(name="raising")(blocking if isolation == "thread" else asynchronous)
        agent = Agent(name="a", model=model([[call("raising"), call("nap", number=1)]]), tools=[raising, nap])
        async with asyncio.timeout(60), Host(agent, store=MemoryStore(), settings=QUICK) as host:
            assert await host.session("s").ask("go") == "That is all."
            (_, text), (_, napped) = await results(host, "s")
            assert napped == "napped 1"
            assert type(error).__name__ in text or "sys.exit(3)" in text

    asyncio.run(main())


def test_a_question_that_is_too_long_is_refused() -> None:
    @agent
    async def wordy(run: Run) -> str:
        return (await run.ask_user("why? " * 300_000)).text

    async def scenario(host: Host) -> None:
        with pytest.raises(RunFailed, match="the words of the question: 1,500,002 bytes"):
            await host.session("s").ask("go")

    on_host(scenario, wordy)


def test_a_summary_that_takes_too_long_interrupts_the_run_and_the_next_one_works() -> None:
    delays = [1000.0, 0.0]

    def answer(request: ModelRequest) -> Any:
        return [Pause(delays.pop(0)), "In short."] if request.instructions else "Yes."

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("x" * 400)
        with pytest.raises(RunInterrupted, match="summarizing the conversation did not end within 5 s"):
            await session.ask("and now?")
        cause = (await session.runs())[0].cause
        assert cause is not None
        assert cause.kind == "deadline"
        assert await session.ask("and now?") == "Yes."
        check_entries(await session.transcript())

    limits = AgentLimits(context_tokens=50, step_timeout_s=5)
    on_host(scenario, Agent(name="a", model=ScriptedModel(answer), limits=limits))


@pytest.mark.parametrize(
    "limits",
    [{"calls_at_once": 0}, {"children": 0}, {"steps": 0}, {"step_timeout_s": 0}, {"retries": -1}, {"tokens": math.nan}],
)
def test_a_limit_that_nothing_could_work_within_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(limits))):
        AgentLimits(**limits)
