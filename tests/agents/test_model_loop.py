"""The built-in agent on a host: what it does, its bounds and deadlines, its people and its children."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from holdfast import Agent, Host, Run, Settings, tool
from holdfast.agents import Call, Toolset, as_agent
from holdfast.agents.scripted import Pause
from holdfast.agents.tool import Tool
from holdfast.errors import (
    ConfigurationError,
    ModelFailed,
    NotSupported,
    RunClosed,
    RunFailed,
    RunInterrupted,
    ToolFailed,
)
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.events import (
    ChildFinished,
    ReasoningDelta,
    RunFinished,
    RunSuspended,
    StepFinished,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
)
from holdfast.protocol.messages import Usage
from holdfast.protocol.model import (
    AssistantMessage,
    CallPart,
    EndPart,
    Part,
    ReasoningPart,
    TextPart,
    ToolMessage,
    UserMessage,
)
from holdfast.runtime import current_interrupt
from tests.agents.modelled import (
    QUICK,
    approve_all,
    busy_agent,
    call,
    careful,
    check_entries,
    log_of,
    model,
    nap,
    on_host,
    steps,
)


def results(events: list[Any]) -> dict[str, tuple[str, Any]]:
    """Status and result or error of each call, by tool."""
    names = {e.call_id: e.name for e in events if isinstance(e, ToolStarted)}
    return {
        names[e.call_id]: (e.status, e.result if e.status == "ok" else e.error)
        for e in events
        if isinstance(e, ToolFinished)
    }


def one_call(name: str, /, *tools: Any, limits: AgentLimits | None = None, **arguments: Any) -> Agent:
    """An agent that makes one call and then says what it gave."""

    def script(request: Any) -> Any:
        last = request.messages[-1]
        return call(name, **arguments) if isinstance(last, UserMessage) else f"It gave: {last.content}"

    return Agent(name="a", model=model(script), tools=tools, limits=limits or AgentLimits())


def test_a_task_is_done_in_steps_with_calls_in_parallel_and_children() -> None:
    agent, models = busy_agent()

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("go") == "First this.\n\nDone."
        events = await log_of(host, "s")
        told = results(events)
        assert told["nap"] == ("ok", "napped 7")  # of the second child
        assert told["nested"] == ("ok", "nested napped 1")
        assert told["failing"] == ("error", "ValueError: it failed")
        assert told["nothing"][0] == "error"
        assert told["child"] == ("ok", "I call. \n\nThe child is done.")
        started = [e.call_id for e in events if isinstance(e, ToolStarted) and e.name in ("nap", "nested", "failing")]
        finished = [e.call_id for e in events if isinstance(e, ToolFinished)]
        assert events.index(next(e for e in events if isinstance(e, ToolFinished) and e.call_id == finished[2])) > max(
            at for at, e in enumerate(events) if isinstance(e, ToolStarted) and e.call_id in started[:3]
        )
        check_entries(await session.transcript())
        assert all(m.open == 0 for m in models)
        [view] = await session.runs()
        assert view.usage.steps == 7  # three of its own, two of each child
        assert view.usage.tool_calls == 11
        assert view.usage.input_tokens == 7
        text = "".join(e.text for e in events if isinstance(e, TextDelta) and e.run_id == view.run_id)
        assert text == view.text

    on_host(scenario, agent)


def test_a_step_is_stored_before_its_calls_begin_and_reasoning_is_shown() -> None:
    agent = Agent(
        name="a",
        model=model([[ReasoningPart(text="hm"), "I nap. ", call("nap")], "Done."]),
        tools=[nap],
        instructions="Be brief.",
        settings={"temperature": 0},
    )

    async def scenario(host: Host) -> None:
        await host.session("s").ask("go")
        events = await log_of(host, "s")
        kinds = [type(e) for e in events]
        assert kinds.index(StepStarted) < kinds.index(ReasoningDelta) < kinds.index(StepFinished)
        assert kinds.index(StepFinished) < kinds.index(ToolStarted) < kinds.index(ToolFinished)
        requests = agent.model.requests  # type: ignore[union-attr]
        assert [r.instructions for r in requests] == ["Be brief."] * 2
        assert requests[0].settings == {"temperature": 0}
        assert requests[0].tools == (nap.spec,)
        assert isinstance(requests[1].messages[-1], ToolMessage)

    on_host(scenario, agent)


def test_a_step_and_its_calls_are_in_the_store_before_a_call_has_its_effect() -> None:
    hosts: list[Host] = []

    @tool
    async def effect() -> str:
        """What a crash at this moment would leave."""
        return " ".join(event.kind for event in await hosts[0].store.read_events(1, after=0, limit=100))

    async def scenario(host: Host) -> None:
        hosts.append(host)
        await host.session("s").ask("go")
        (finished,) = [event for event in await log_of(host, "s") if isinstance(event, ToolFinished)]
        stored = str(finished.result).split()
        assert "step.finished" in stored
        assert stored[-1] == "tool.started"

    on_host(scenario, Agent(name="a", model=model([[call("effect")], "Done."]), tools=[effect]))


def test_the_next_run_sees_what_was_before() -> None:
    agent = Agent(name="a", model=model([[call("nap", number=3)], "Napped."]), tools=[nap])

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("one")
        await session.ask("two")
        first = agent.model.requests[2].messages  # type: ignore[union-attr]
        assert [type(m) for m in first] == [UserMessage, AssistantMessage, ToolMessage, AssistantMessage, UserMessage]

    on_host(scenario, agent)


# ── bad results, bad tools ───────────────────────────────────────────────────────────────────────────────────────────


class Odd:
    """What JSON does not know."""


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        ("x" * 100_000_000, "ok", "characters left out"),
        ("é" * 200_000, "ok", "characters left out"),
        ([list(range(100_000))], "ok", "characters left out"),
        (b"\x00" * 1000, "error", "1,000 bytes of binary data"),
        (Odd(), "error", "returned Odd, which cannot be shown"),
        ("lone \ud800", "ok", "lone \\ud800"),
        (None, "ok", "null"),
        ({"a": [1, "two"]}, "ok", '{"a":[1,"two"]}'),
        ("", "ok", "(nothing)"),
        (math.nan, "ok", "null"),
    ],
)
def test_the_model_gets_text_of_bounded_size_whatever_a_tool_returns(value: Any, status: str, text: str) -> None:
    @tool
    async def give() -> Any:
        return value

    async def scenario(host: Host) -> None:
        session = host.session("s")
        answer = await session.ask("go")
        assert text in answer
        assert len(answer.encode()) < 51_000
        [result] = [e for e in await session.transcript() if e.role == "tool_result"]
        assert result.status == status

    on_host(scenario, one_call("give", give))


def test_errors_of_tools_are_told_and_the_run_goes_on() -> None:
    @tool
    async def plain() -> None:
        raise ToolFailed("there is no such file", hint="list them first")

    @tool
    async def leaves() -> None:
        raise SystemExit(3)

    @tool
    async def cancels() -> None:
        raise asyncio.CancelledError

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.ask("go")
        told = results(await log_of(host, "s"))
        assert told["plain"] == ("error", "there is no such file (list them first)")
        assert told["leaves"] == ("error", "RuntimeError: leaves called sys.exit(3)")
        assert told["cancels"][0] == "error"

    tools = [plain, leaves, cancels]
    agent = Agent(name="a", model=model([[call(t.name) for t in tools], "Done."]), tools=tools)
    on_host(scenario, agent)


def test_two_tools_of_one_name_fail_the_run_and_say_so() -> None:
    class More(Toolset):
        def tools(self) -> list[Tool]:
            return [nap]

    async def scenario(host: Host) -> None:
        with pytest.raises(RunFailed, match="two tools named 'nap'"):
            await host.session("s").ask("go")

    on_host(scenario, Agent(name="a", model=model(["x"]), tools=[nap, More()]))


def test_an_agent_has_work_or_a_model() -> None:
    async def work(run: Run) -> None: ...

    with pytest.raises(ConfigurationError, match="neither work nor a model"):
        Agent(name="a")
    with pytest.raises(ConfigurationError, match="work and a model"):
        Agent(name="a", work=work, model=model(["x"]))
    with pytest.raises(ConfigurationError, match="invalid model name"):
        Agent(name="a", model="gpt")
    with pytest.raises(ConfigurationError, match="is not a tool"):
        Agent(name="a", model="scripted:hello", tools=[3])  # type: ignore[list-item]
    said = Agent(name="a", model="scripted:hello")
    assert said.replayable

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("x") == "hello"

    on_host(scenario, said)


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (AgentLimits(steps=3), "took 3 steps"),
        (AgentLimits(tool_calls=5), "made 5 calls"),
        (AgentLimits(tokens=60), "used 60 tokens"),
        (AgentLimits(cost_usd=0.2), "cost 0.2"),
    ],
)
def test_a_model_that_loops_is_ended_by_its_budget_and_what_it_said_is_kept(limits: AgentLimits, reason: str) -> None:
    agent = Agent(
        name="a",
        model=model(
            lambda _: ["again ", call("nap"), EndPart(usage=Usage(input_tokens=10, output_tokens=10, cost_usd=0.1))]
        ),
        tools=[nap],
        limits=limits,
    )

    async def scenario(host: Host) -> None:
        session = host.session("s")
        with pytest.raises(RunInterrupted, match=reason):
            await session.ask("go")
        [view] = await session.runs()
        assert view.cause is not None
        assert view.cause.kind == "budget"
        assert view.state == "interrupted"
        assert view.text.startswith("again \n\nagain ")
        check_entries(await session.transcript())

    on_host(scenario, agent)


def test_a_thousand_calls_at_once_are_too_many_or_taken_in_turns() -> None:
    running = most = made = 0

    @tool
    async def count() -> str:
        nonlocal running, most, made
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        made += 1
        return "x"

    async def scenario(host: Host) -> None:
        with pytest.raises(RunInterrupted, match="requests 1,000 more"):
            await host.session("s").ask("go")
        assert made == 0
        assert await host.session("t").ask("go", agent="b") == "Done."
        assert (made, most) == (1000, 16)

    script = [[call("count")] * 1000, "Done."]
    few = Agent(name="a", model=model(script), tools=[count])
    many = Agent(name="b", model=model(script), tools=[count], limits=AgentLimits(tool_calls=1000))
    on_host(scenario, few, many)


# ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_that_is_too_long_is_an_error_that_the_model_gets() -> None:
    cleaned = []

    @tool(timeout_s=2)
    async def slow() -> str:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(True)
        return "?"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("go") == "It gave: slow did not end within 2 s"
        assert cleaned
        assert (await session.runs())[0].state == "completed"

    on_host(scenario, one_call("slow", slow))


def test_a_call_that_swallows_its_stop_is_given_up_and_what_it_says_later_does_not_count() -> None:
    late = []

    @tool(timeout_s=2)
    async def stuck(call: Call) -> str:
        end = asyncio.get_running_loop().time() + 30
        while (left := end - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except BaseException:
                continue
        try:
            _ = call.output("late")
        except RunClosed:
            late.append("refused")
        return "late"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("go") == "It gave: stuck did not end within 2 s"
        [view] = await session.runs()
        assert view.receipt is not None
        assert [left.name for left in view.receipt.abandoned] == ["stuck"]
        await asyncio.sleep(60)
        assert late == ["refused"]
        assert not any(isinstance(e, ToolOutput) for e in await log_of(host, "s"))
        assert host.incidents.counts["late_results"] == 2  # its output, and its end

    on_host(scenario, one_call("stuck", stuck))


def test_a_call_that_was_given_up_says_nothing_more_while_its_run_goes_on() -> None:
    said = []

    async def stuck(call: Call) -> None:
        end = asyncio.get_running_loop().time() + 30
        while (left := end - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.sleep(left)
            except BaseException:
                continue
        try:
            _ = call.output("late")
        except RunClosed:
            said.append("refused")

    async def patient(run: Run) -> str:
        with pytest.raises(TimeoutError):
            await run.call(stuck, timeout_s=2)
        await run.interrupt.sleep(60)
        return "done"

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("go") == "done"
        assert said == ["refused"]
        assert not any(isinstance(e, ToolOutput) for e in await log_of(host, "s"))

    on_host(scenario, as_agent(patient))


def test_a_step_that_is_too_long_ends_the_run() -> None:
    async def scenario(host: Host) -> None:
        for key, agent in (("s", "stalls"), ("t", "calls")):
            session = host.session(key)
            with pytest.raises(RunInterrupted, match=r"deadline: step 1 did not end within 5 s"):
                await session.ask("go", agent=agent)
            [view] = await session.runs()
            assert view.cause is not None
            assert view.cause.kind == "deadline"
            check_entries(await session.transcript())
        assert (await host.session("s").runs())[0].text == "I wait"
        [partial] = [e for e in await host.session("s").transcript() if e.role == "assistant"]
        assert (partial.content, partial.partial) == ("I wait", True)
        assert all(agent.model.open == 0 for agent in agents)  # type: ignore[union-attr]

    @tool(timeout_s=4)
    async def slow() -> None:
        await asyncio.sleep(3)

    limits = AgentLimits(step_timeout_s=5)
    agents = [
        Agent(name="stalls", model=model([["I wait", Pause(1000)]]), limits=limits),
        Agent(name="calls", model=model([[Pause(3), call("slow")]]), tools=[slow], limits=limits),
    ]
    on_host(scenario, *agents)


def test_a_tool_with_a_longer_deadline_of_its_own_holds_that_of_the_step() -> None:
    @tool(timeout_s=1000)
    async def build() -> str:
        await asyncio.sleep(500)
        return "built"

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("go") == "It gave: built"

    on_host(scenario, one_call("build", build, limits=AgentLimits(step_timeout_s=5)))


def test_a_run_that_is_too_long_ends_with_cause_deadline() -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        with pytest.raises(RunInterrupted, match="deadline"):
            await session.ask("go")
        check_entries(await session.transcript())

    agent = Agent(name="a", model=model(lambda _: ["x ", call("nap"), Pause(1)]), tools=[nap])
    on_host(scenario, agent, settings=Settings(run_timeout_s=10, grace_s=1))


# ── the model fails ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_that_failed_before_it_said_anything_is_made_again_and_that_is_told() -> None:
    tries = 0

    def script(_: Any) -> Any:
        nonlocal tries
        tries += 1
        return [ModelFailed("429: too many", retry_after_s=3.0)] if tries < 3 else "At last."

    async def scenario(host: Host) -> None:
        began = asyncio.get_running_loop().time()
        assert await host.session("s").ask("go") == "At last."
        assert asyncio.get_running_loop().time() - began >= 6
        labels = [e.label for e in await log_of(host, "s") if isinstance(e, StepStarted)]
        assert labels == ["", "retry after: 429: too many", "retry after: 429: too many"]

    on_host(scenario, Agent(name="a", model=model(script)))


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        ([ModelFailed("401: bad key")], "401: bad key", ""),
        (["I sa", ModelFailed("it broke off", retry_after_s=0.0)], "it broke off", "I sa"),
        ([EndPart()], "an empty answer", ""),
        ([EndPart(reason="refused")], "refused to answer", ""),
        ([RuntimeError("a bug in the model layer")], "a bug in the model layer", ""),
    ],
)
def test_a_model_that_fails_fails_the_run_with_a_clear_error(answer: Any, error: str, text: str) -> None:
    agent = Agent(name="a", model=model(lambda _: answer))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        with pytest.raises(RunFailed, match=error):
            await session.ask("go")
        [view] = await session.runs()
        assert view.text == text
        check_entries(await session.transcript())
        assert agent.model.open == 0  # type: ignore[union-attr]

    on_host(scenario, agent)


def test_an_interrupt_while_the_model_speaks_closes_the_request_and_nothing_is_asked_again() -> None:
    agent = Agent(name="a", model=model([["I begin", Pause(100), "and end"]]))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("go")
        async for event in session.events(after=sent.cursor):
            if isinstance(event, TextDelta):
                break
        receipt = await session.interrupt("enough")
        assert receipt.outcome == "gone"
        assert agent.model.open == 0  # type: ignore[union-attr]
        assert len(agent.model.requests) == 1  # type: ignore[union-attr]
        assert (await session.runs())[0].text == "I begin"

    on_host(scenario, agent)


class Careless:
    """A model layer that closes nothing itself and leaves a task behind."""

    name = "careless"
    context_tokens = None

    def __init__(self) -> None:
        self.closed_in: list[asyncio.Task[Any] | None] = []
        self.asked_in: list[asyncio.Task[Any] | None] = []
        self.left: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def stream(self, request: Any, *, attachment: Any = None) -> AsyncIterator[AsyncIterator[Part]]:
        self.asked_in.append(asyncio.current_task())
        self.left.append(asyncio.get_running_loop().create_task(asyncio.sleep(1000)))
        yield self._parts(isinstance(request.messages[-1], ToolMessage))

    async def _parts(self, called: bool) -> AsyncIterator[Part]:
        try:
            await asyncio.sleep(0.01)
            yield TextPart(text="Well. ")
            if called:
                await asyncio.sleep(100)
            yield CallPart(name="look", arguments={})
            yield EndPart()
            yield TextPart(text="never read")
        finally:
            self.closed_in.append(asyncio.current_task())


def test_what_a_model_layer_leaves_open_is_closed_with_its_request_by_the_task_that_read_it() -> None:
    careless = Careless()
    seen = []

    @tool
    async def look() -> str:
        seen.append([task.done() for task in careless.left])
        return "x"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("go")
        await asyncio.sleep(1)
        assert seen == [[True]]
        await session.interrupt("now")
        assert len(careless.asked_in) == 2
        assert careless.closed_in == careless.asked_in
        assert all(task.done() for task in careless.left)

    on_host(scenario, Agent(name="a", model=careless, tools=[look]))


# ── steering ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_steered_message_is_seen_by_the_next_step_and_stands_there_in_the_transcript() -> None:
    agent = Agent(name="a", model=model(steps([[call("nap")], "Done."])), tools=[nap])

    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("go")
        async for event in session.events(after=sent.cursor):
            if isinstance(event, ToolStarted):
                break
        steered = await session.send("and this", policy="steer")
        settlement = await session.wait(steered.message_id)
        assert settlement.run_id == sent.run_id
        entries = await session.transcript()
        assert [e.role for e in entries][:4] == ["user", "tool_call", "tool_result", "user"]
        assert entries[3].content == "and this"
        check_entries(entries)

    on_host(scenario, agent)


# ── people ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("decision", ["approve", "deny", "expire"])
def test_a_call_waits_for_its_approval_while_others_go_on(decision: str) -> None:
    agent = Agent(name="a", model=model([[call("careful", text="x"), call("nap")], "Done."]), tools=[careful, nap])

    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("go")
        while not (questions := await session.questions()):
            await asyncio.sleep(0.01)
        [question] = questions
        assert (question.kind, question.tool, question.arguments) == ("approval", "careful", {"text": "x"})
        await asyncio.sleep(10)
        assert results(await log_of(host, "s"))["nap"] == ("ok", "napped 0")
        match decision:
            case "approve":
                await session.approve(question)
            case "deny":
                await session.deny(question.question_id, reason="not today")
            case _:
                await asyncio.sleep(4000)
        settlement = await session.wait(sent.message_id)
        assert settlement.state == "completed"
        status, text = results(await log_of(host, "s"))["careful"]
        expected = {
            "approve": ("ok", "careful with x"),
            "deny": ("error", "a person denied this call: not today"),
            "expire": ("error", "the approval of this call expired"),
        }[decision]
        assert status == expected[0]
        assert expected[1] in text
        check_entries(await session.transcript())

    on_host(scenario, agent)


def test_a_run_whose_children_all_wait_for_people_leaves_the_memory_and_goes_on() -> None:
    made = []

    @tool(approval=True)
    async def sign(text: str) -> str:
        made.append(text)
        return f"signed {text}"

    child_model = model(steps([["Child. ", call("sign", text="c")], "Child done."]))
    child = Agent(name="child", model=child_model, tools=[sign])
    own = model(steps([[call("child", task="t"), call("sign", text="own"), call("nap")], "Done."]))
    agent = Agent(name="a", model=own, tools=[child, sign, nap])

    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("go")
        for _ in range(200):
            await asyncio.sleep(0.05)
            if not host.live and (await session.info()).state == "suspended":
                break
        assert not host.live, "all of it waits for people, so it need not be in memory"
        assert len(await session.questions()) == 2
        await approve_all(session)
        assert (await session.message(sent.message_id)).text == "Done."
        assert sorted(made) == ["c", "own"]
        events = await log_of(host, "s")
        assert sum(isinstance(e, RunSuspended) for e in events) == 2
        assert len(own.requests) == 2
        assert len(child_model.requests) == 2
        check_entries(await session.transcript())

    on_host(scenario, agent)


def test_a_tool_may_ask_a_person_and_wait_without_a_deadline() -> None:
    @tool(timeout_s=math.inf)
    async def ask_user(call: Call, question: str) -> str:
        answer = await call.run.ask_user(question)
        return answer.text or answer.decision

    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("go")
        while not (questions := await session.questions()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(1000)
        await session.answer(questions[0].question_id, "blue")
        assert (await session.wait(sent.message_id)).text == "It gave: blue"

    on_host(scenario, one_call("ask_user", ask_user, question="which colour?", limits=AgentLimits(step_timeout_s=5)))


# ── children ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_children_are_bounded_in_depth_and_number_and_share_the_budget() -> None:
    at_once = most = 0

    async def work(run: Run) -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(1)
        at_once -= 1
        return "done"

    workers = Agent(name="worker", work=work)
    crowd = Agent(
        name="crowd",
        model=model([[call("worker", task="t")] * 6, "Done."]),
        tools=[workers],
        limits=AgentLimits(children=2),
    )

    async def deeper(run: Run) -> str:
        return f"({await run.delegate(nest, 'deeper')})"

    nest = Agent(name="nest", work=deeper)
    deep = Agent(
        name="deep", model=model([[call("nest", task="t")], "Done."]), tools=[nest], limits=AgentLimits(depth=2)
    )
    costly = EndPart(usage=Usage(input_tokens=400))
    spender = Agent(name="spender", model=model(lambda _: ["spent", call("nap"), costly]), tools=[nap])
    owner = Agent(
        name="owner",
        model=model([[call("spender", task="t")], "Done."]),
        tools=[spender],
        limits=AgentLimits(tokens=1000),
    )

    async def scenario(host: Host) -> None:
        assert await host.session("crowd", agent="crowd").ask("go") == "Done."
        assert most == 2
        assert await host.session("deep", agent="deep").ask("go") == "Done."
        assert "nested too deep" in results(await log_of(host, "deep"))["nest"][1]
        session = host.session("owner", agent="owner")
        with pytest.raises(RunInterrupted, match="budget: the run used 1,2"):
            await session.ask("go")
        [view] = await session.runs()
        assert view.usage.input_tokens == 1201
        check_entries(await session.transcript())

    on_host(scenario, crowd, deep, owner)


def test_a_childs_own_end_is_an_error_that_its_parent_gets() -> None:
    script: dict[str, Any] = {"fails": [["half ", ModelFailed("401")]], "spends": [["half ", call("nap")]]}
    children = [
        Agent(name=name, model=model(answers), tools=[nap], limits=AgentLimits(tool_calls=0))
        for name, answers in script.items()
    ]
    agent = Agent(name="a", model=model([[call(c.name, task="t") for c in children], "Done."]), tools=children)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("go") == "Done."
        told = results(await log_of(host, "s"))
        assert "child fails failed" in told["fails"][1]
        assert "half" in told["fails"][1]
        assert "child spends was interrupted (budget)" in told["spends"][1]
        assert (await session.runs())[0].state == "completed"

    on_host(scenario, agent)


def test_an_interrupt_stops_the_children_with_a_cause_that_names_their_parent() -> None:
    causes = []

    async def work(run: Run) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            causes.append(run.interrupt.cause)

    child = Agent(name="child", work=work)
    agent = Agent(name="a", model=model([[call("child", task="t")] * 3, "Done."]), tools=[child])

    async def scenario(host: Host) -> None:
        session = host.session("s")
        sent = await session.send("go")
        await asyncio.sleep(1)
        receipt = await session.interrupt("enough")
        assert receipt.outcome == "gone"
        assert len(causes) == 3
        for cause in causes:
            assert cause is not None
            assert cause.kind == "parent"
            chain = [cause]
            while chain[-1].parent is not None:
                chain.append(chain[-1].parent)
            assert (chain[-1].kind, chain[-1].reason) == ("user", "enough")
            assert sent.run_id in [above.origin for above in chain]
        events = await log_of(host, "s")
        ended = [(e.run_id, e.status) for e in events if isinstance(e, ChildFinished)]
        assert ended == [(sent.run_id, "interrupted")] * 3
        check_entries(await session.transcript())

    on_host(scenario, agent)


# ── threads and processes ────────────────────────────────────────────────────────────────────────────────────────────


def test_sync_tools_run_in_threads_and_see_the_stop() -> None:
    threads: list[bool] = []

    @tool
    def where(call: Call) -> str:
        threads.append(threading.current_thread() is not threading.main_thread())
        _ = call.output("from a thread")
        return "there"

    @tool
    def broken() -> None:
        raise KeyError("k")

    @tool(timeout_s=0.05)
    def slow(call: Call) -> None:
        call.run.interrupt.sleep_blocking(0)
        interrupt = current_interrupt()
        assert interrupt is not None
        interrupt.sleep_blocking(20)

    tools = [where, broken, slow]
    agent = Agent(name="a", model=model([[call(t.name) for t in tools], "Done."]), tools=tools)

    async def main() -> None:
        async with asyncio.timeout(20), Host(agent, store="memory://", settings=QUICK) as host:
            assert await host.session("s").ask("go") == "Done."
            events = await log_of(host, "s")
            assert [e.text for e in events if isinstance(e, ToolOutput)] == ["from a thread"]
            assert results(events) == {
                "where": ("ok", "there"),
                "broken": ("error", "KeyError: 'k'"),
                "slow": ("error", "slow did not end within 0.05 s"),
            }

    asyncio.run(main())
    assert threads == [True]


# ── long histories ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_history_that_is_too_long_is_summed_up_before_the_run() -> None:
    def script(request: Any) -> Any:
        if "summarize" in request.instructions:
            return "They spoke of x."
        return "long " * 50

    agent = Agent(name="a", model=model(script), limits=AgentLimits(context_tokens=300))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        for number in range(8):
            await session.ask(f"message {number}")
            check_entries(await session.transcript())
        entries = await session.transcript()
        assert entries[0].role == "summary"
        assert entries[0].content == "They spoke of x."
        assert entries[-2].content == "message 7"
        assert len(entries) < 10
        assert sum(e.role == "summary" for e in entries) == 1
        last = agent.model.requests[-1].messages  # type: ignore[union-attr]
        assert "They spoke of x." in str(last[0])
        assert any(e.step == 0 for e in await log_of(host, "s") if isinstance(e, StepFinished))

    on_host(scenario, agent)


def test_what_a_long_run_did_is_summed_up_for_its_next_requests_and_its_entries_stay() -> None:
    @tool(idempotent=True)
    async def read(part: int) -> str:
        return f"part {part}: " + "x" * 400

    sums = 0

    def script(request: Any) -> Any:
        nonlocal sums
        if "summarize" in request.instructions:
            sums += 1
            return f"Read so far, {sums}."
        done = agent_calls(request)
        return call("read", part=done) if done < 12 else "All is read."

    def agent_calls(request: Any) -> int:
        results = [m for m in request.messages if isinstance(m, ToolMessage)]
        return int(results[-1].content.split(":")[0].split()[1]) + 1 if results else 0

    agent = Agent(name="a", model=model(script), tools=[read], limits=AgentLimits(context_tokens=500))

    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert await session.ask("read all of it") == "All is read."
        assert 2 <= sums <= 6
        requests = agent.model.requests  # type: ignore[union-attr]
        assert all(sum(len(getattr(m, "content", "")) for m in r.messages) < 3000 for r in requests)
        summed = [r for r in requests if "Read so far" in str(r.messages[0]) and not r.instructions]
        assert all(r.messages[0].content.endswith("asked for last:\n\nread all of it") for r in summed)
        assert all(r.messages[0].content.count("asked for last") == 1 for r in summed)
        entries = await session.transcript()
        assert sum(e.role == "tool_result" for e in entries) == 12
        assert entries[0].content == "read all of it"
        check_entries(entries)
        [finished] = [e for e in await log_of(host, "s") if isinstance(e, RunFinished)]
        assert finished.text == "All is read."

    on_host(scenario, agent)


def test_an_agent_without_a_model_cannot_sum_up() -> None:
    async def work(run: Run) -> None: ...

    with pytest.raises(NotSupported):
        asyncio.run(Agent(name="a", work=work).summarise([]))


def test_the_end_of_a_run_carries_what_it_used() -> None:
    usage = Usage(input_tokens=100, output_tokens=20, cost_usd=0.25)
    agent = Agent(
        name="a", model=model([[call("nap"), EndPart(usage=usage)], ["Done.", EndPart(usage=usage)]]), tools=[nap]
    )

    async def scenario(host: Host) -> None:
        await host.session("s").ask("go")
        [finished] = [e for e in await log_of(host, "s") if isinstance(e, RunFinished)]
        assert finished.usage == Usage(steps=2, tool_calls=1, input_tokens=200, output_tokens=40, cost_usd=0.5)

    on_host(scenario, agent)
