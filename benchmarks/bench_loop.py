"""The built-in agent loop: what a step and a call cost over bare coroutines, and a thousand runs with tools at once."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import uvloop

from benchmarks.rows import Row, print_rows
from holdfast import Agent, Host, Settings, tool
from holdfast.agents import Model
from holdfast.protocol.agent_loop import AgentLimits
from holdfast.protocol.messages import Usage
from holdfast.protocol.model import AssistantMessage, CallPart, EndPart, ModelRequest, Part, TextPart, UserMessage

__all__ = ["rows"]

STEPS = 100
DURABLE_STEPS = 50
MANY = 8
ROUNDS = 7
RUNS = 1000
LIMITS = AgentLimits(steps=10 * STEPS, tool_calls=100 * STEPS)


@tool
async def noop(number: int = 0) -> str:
    """Answer at once."""
    return "ok"


@tool
def think(seconds: float) -> str:
    """Block a thread for a moment."""
    time.sleep(seconds)
    return "thought"


@tool
async def wait(seconds: float) -> str:
    """Wait on the loop."""
    await asyncio.sleep(seconds)
    return "x" * 1000


class Straight:
    """A model that asks for calls in each step, without a script to look anything up in.

    Parameters:
        steps: how many steps with calls.
        calls: in each of them.
        pause_s: before each answer.
    """

    name = "straight"
    context_tokens = None

    def __init__(self, steps: int, calls: tuple[CallPart, ...], *, pause_s: float = 0.0) -> None:
        self._steps = steps
        self._calls = calls
        self._pause_s = pause_s

    @contextlib.asynccontextmanager
    async def stream(
        self, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
    ) -> AsyncIterator[AsyncIterator[Part]]:
        """One answer."""
        said = sum(isinstance(message, AssistantMessage) for message in request.messages)
        yield self._parts(said)

    async def _parts(self, said: int) -> AsyncIterator[Part]:
        await asyncio.sleep(self._pause_s)
        if said < self._steps:
            for call in self._calls:
                yield call
        else:
            yield TextPart(text="done")
        yield EndPart(usage=Usage(input_tokens=1))


async def _bare(model: Model, steps: int) -> None:
    """The same work in bare coroutines."""
    messages: list[UserMessage | AssistantMessage] = [UserMessage(content="x")]
    for _ in range(steps + 1):
        calls = []
        async with model.stream(ModelRequest(messages=tuple(messages))) as parts:
            async for part in parts:
                if isinstance(part, CallPart):
                    calls.append(part)
        messages.append(AssistantMessage(text="x"))
        async with asyncio.TaskGroup() as group:
            for call in calls:
                assert isinstance(call.arguments, dict)
                group.create_task(noop.work(**call.arguments))


async def _added_s(calls: int) -> float:
    """CPU seconds that the loop adds to a step with so many calls; the least of some rounds."""
    model = Straight(STEPS, tuple(CallPart(name="noop", arguments={"number": n}) for n in range(calls)))
    agent = Agent(name="a", model=model, tools=[noop], limits=LIMITS)
    ours, bare = [], []
    async with Host(agent, store="memory://") as host:
        for number in range(ROUNDS):
            began = time.process_time()
            await host.session(f"s{number}").ask("x")
            ours.append(time.process_time() - began)
            began = time.process_time()
            await _bare(model, STEPS)
            bare.append(time.process_time() - began)
    return (min(ours) - min(bare)) / STEPS


async def _overhead() -> list[Row]:
    none_s, many_s = await _added_s(1), await _added_s(1 + MANY)
    call_us = (many_s - none_s) / MANY * 1e6
    step_us = none_s * 1e6 - call_us
    note = "CPU time over bare coroutines, memory store, best of some"
    return [
        Row(
            name="the agent loop adds to a step",
            value=step_us,
            unit="µs",
            target="<= 150",
            met=step_us <= 150,
            note=note,
        ),
        Row(name="… to a tool call", value=call_us, unit="µs", target="<= 60", met=call_us <= 60, note=note),
    ]


async def _durable() -> list[Row]:
    """Commits of a run on SQLite: one for each step with its intents, one for the send, one for the end."""
    model = Straight(DURABLE_STEPS, (CallPart(name="noop", arguments={}),) * 3)
    agent = Agent(name="a", model=model, tools=[noop], limits=LIMITS)
    with tempfile.TemporaryDirectory() as folder:
        async with Host(agent, store=f"sqlite:///{folder}/loop.db") as host:
            await host.session("first").ask("x")
            before = (await host.store.info()).commits
            await host.session("second").ask("x")
            commits = (await host.store.info()).commits - before
    needed = DURABLE_STEPS + 2
    return [
        Row(
            name=f"commits of a durable run of {DURABLE_STEPS} steps, over those it needs",
            value=commits / needed,
            unit="x",
            target="<= 1.2",
            met=commits <= 1.2 * needed,
            note=f"{commits} of {needed}; three calls in each step",
        ),
    ]


async def _crowd() -> list[Row]:
    """A thousand runs at once, each with calls on the loop and in threads."""
    calls = (
        CallPart(name="wait", arguments={"seconds": 0.5}),
        CallPart(name="wait", arguments={"seconds": 0.2}),
        CallPart(name="think", arguments={"seconds": 0.01}),
    )
    agent = Agent(name="a", model=Straight(4, calls, pause_s=0.2), tools=[wait, think], limits=LIMITS)
    settings = Settings(max_runs=RUNS, principal_runs=RUNS)
    async with Host(agent, store="memory://", settings=settings) as host:
        began = time.perf_counter()
        sent = [(host.session(f"s{n}"), await host.session(f"s{n}").send("x")) for n in range(RUNS)]
        most = host.admission.statistics().running
        for session, receipt in sent:
            settlement = await session.wait(receipt.message_id)
            assert settlement.state == "completed", settlement
        taken_s = time.perf_counter() - began
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        Row(
            name=f"{RUNS:,} runs with tools at once, peak memory of the process",
            value=peak_mb,
            unit="MB",
            target="<= 1000",
            met=peak_mb <= 1000,
            note=f"{most} were on at the same time; all done in {taken_s:.1f} s",
        )
    ]


def rows() -> list[Row]:
    """All figures of this module."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_overhead()) + runner.run(_durable()) + runner.run(_crowd())


if __name__ == "__main__":
    print_rows(rows())
