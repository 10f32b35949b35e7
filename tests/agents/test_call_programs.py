"""A program that a call starts ends with the call, as a whole tree; one of `run.process` ends with the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from holdfast import Agent, Call, Host, Run, Settings, tool
from holdfast.errors import RunClosed, ToolFailed
from holdfast.protocol.events import TextDelta
from holdfast.protocol.messages import TreeNode
from holdfast.protocol.model import UserMessage
from holdfast.runtime import Process
from holdfast.runtime.process_host import PIPE
from holdfast.runtime.processes import procfs
from tests.agents.modelled import call as calls
from tests.agents.modelled import model

QUICK = Settings(grace_s=0.3, abandon_after_s=5.0)
MEEK = "setsid sleep 1000 & echo $!; sleep 1000"
STUBBORN = f"trap '' TERM; {MEEK}"
SCRIPTS = pytest.mark.parametrize("script", [MEEK, STUBBORN], ids=["meek", "stubborn"])


class Tree:
    """A program that runs for long, and its child in a session of its own."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    async def start(self, process: Callable[..., Awaitable[Process]], script: str = MEEK) -> Process:
        """Start the program, and return when its child runs too."""
        program = await process(["sh", "-c", script], stdout=PIPE, name="program")
        assert program.stdout is not None
        self.pids = [program.pid, int(await program.stdout.readline())]
        assert self.alive == self.pids
        return program

    @property
    def alive(self) -> list[int]:
        assert self.pids, "the program was not started"
        return procfs.living(self.pids)


def on_host(scenario: Callable[[Host], Awaitable[None]], agent: Agent | Callable[..., Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), Host(agent, store="memory://", settings=QUICK) as host:
            await scenario(host)

    asyncio.run(main())


def answered(agent: Agent | Callable[..., Any], answer: str) -> None:
    """Ask the agent once: it gives this answer."""

    async def scenario(host: Host) -> None:
        assert await host.session("s").ask("go") == answer

    on_host(scenario, agent)


def over_time(call: Call) -> None:
    """What the deadline of a call does when it expires."""
    call.scope.interrupt.trigger("its deadline has passed", kind="deadline")


@SCRIPTS
def test_the_model_learns_that_a_call_was_too_long_when_its_program_is_gone(script: str) -> None:
    tree = Tree()

    @tool(timeout_s=1000)
    async def build(call: Call) -> str:
        program = await tree.start(call.process, script)
        over_time(call)
        return f"exit code {await program.wait()}"

    def answer(request: Any) -> Any:
        last = request.messages[-1]
        return calls("build") if isinstance(last, UserMessage) else f"{last.content}: {tree.alive}"

    agent = Agent(name="a", model=model(answer), tools=[build])
    answered(agent, "build did not end within 1000 s: []")


@SCRIPTS
def test_a_call_that_is_over_its_time_ends_its_program_and_the_run_goes_on(script: str) -> None:
    tree = Tree()

    async def work(call: Call) -> None:
        program = await tree.start(call.process, script)
        over_time(call)
        await program.wait()

    async def agent(run: Run) -> str:
        with pytest.raises(TimeoutError, match="work did not end"):
            await run.call(work)
        return f"alive: {tree.alive}"

    answered(agent, "alive: []")


@SCRIPTS
def test_a_call_that_fails_ends_its_program(script: str) -> None:
    tree = Tree()

    async def work(call: Call) -> None:
        await tree.start(call.process, script)
        raise ToolFailed("no such page")

    async def agent(run: Run) -> str:
        with pytest.raises(ToolFailed, match="no such page"):
            await run.call(work)
        return f"alive: {tree.alive}"

    answered(agent, "alive: []")


@SCRIPTS
def test_a_call_that_is_stopped_because_its_neighbour_failed_ends_its_program(script: str) -> None:
    tree = Tree()
    started = asyncio.Event()

    async def work(call: Call) -> None:
        program = await tree.start(call.process, script)
        started.set()
        await program.wait()

    async def fails() -> None:
        await started.wait()
        raise ValueError("no")

    async def agent(run: Run) -> str:
        with pytest.raises(ValueError, match="no"):
            await run.parallel(partial(run.call, work), fails)
        return f"alive: {tree.alive}"

    answered(agent, "alive: []")


def test_a_call_waits_for_the_program_that_its_function_left_running() -> None:
    tree = Tree()
    programs: list[Process] = []
    returned = asyncio.Event()

    async def work(call: Call) -> str:
        programs.append(await tree.start(call.process))
        returned.set()
        return "started"

    async def agent(run: Run) -> str:
        calling = run.spawn(partial(run.call, work))
        await returned.wait()
        assert not calling.done()
        programs[0].signal(15)
        return f"{await calling}, alive: {tree.alive}"

    answered(agent, "started, alive: []")


def test_a_call_whose_function_has_returned_ends_its_program_at_the_deadline() -> None:
    tree = Tree()

    @tool(timeout_s=1000)
    async def serve(call: Call) -> str:
        await tree.start(call.process, STUBBORN)
        asyncio.get_running_loop().call_soon(over_time, call)
        return "started"

    def answer(request: Any) -> Any:
        last = request.messages[-1]
        return calls("serve") if isinstance(last, UserMessage) else f"{last.content}: {tree.alive}"

    agent = Agent(name="a", model=model(answer), tools=[serve])
    answered(agent, "serve did not end within 1000 s; before it was stopped it returned: started: []")


def test_an_interrupt_names_the_program_of_a_call_that_had_to_be_killed() -> None:
    tree = Tree()

    async def work(call: Call) -> None:
        program = await tree.start(call.process, STUBBORN)
        await call.run.emit("started")
        await program.wait()

    async def agent(run: Run) -> None:
        await run.call(work)

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("go")
        async for event in session.events():
            if isinstance(event, TextDelta):
                break
        while (nodes := path(host.tree(), "program"))[-1].processes < 3:  # its last one starts after it has said so
            await asyncio.sleep(0.005)
        assert [node.name for node in nodes][-2:] == ["work", "program"]
        receipt = await session.interrupt("enough")
        assert (receipt.outcome, receipt.forced) == ("gone", ("program",))
        assert (receipt.stopped.programs, receipt.stopped.processes) == (1, 3)
        assert tree.alive == []

    on_host(scenario, agent)


def path(node: TreeNode, name: str) -> list[TreeNode]:
    """The nodes from this one down to the one with the name; none if it is not below."""
    if node.name == name:
        return [node]
    return next(([node, *below] for child in node.children if (below := path(child, name))), [])


def test_a_program_belongs_to_the_call_whose_handle_started_it_not_to_the_task_that_did() -> None:
    tree = Tree()

    async def work(call: Call) -> None:
        await call.run.spawn(tree.start, call.process)
        raise ToolFailed("no such page")

    async def agent(run: Run) -> str:
        with pytest.raises(ToolFailed):
            await run.call(work)
        return f"alive: {tree.alive}"

    answered(agent, "alive: []")


def test_a_call_that_has_ended_starts_no_program() -> None:
    ended: list[Call] = []

    async def work(call: Call) -> None:
        ended.append(call)

    async def agent(run: Run) -> str:
        await run.call(work)
        with pytest.raises(RunClosed, match="has ended"):
            await ended[0].process(["true"])
        return "refused"

    answered(agent, "refused")


def test_a_program_of_the_run_outlives_the_call_that_started_it_and_ends_with_the_run() -> None:
    tree = Tree()

    async def work(call: Call) -> None:
        await tree.start(call.run.process)

    async def agent(run: Run) -> None:
        await run.call(work)
        await run.emit(f"alive: {len(tree.alive)}")

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("go")
        async for event in session.events():
            if isinstance(event, TextDelta):
                assert event.text == "alive: 2"
                break
        receipt = await session.interrupt("enough")
        assert (receipt.outcome, tree.alive) == ("gone", [])

    on_host(scenario, agent)
