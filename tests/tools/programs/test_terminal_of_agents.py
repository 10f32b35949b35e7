"""The tools under a model's agent on a real host: stopped at the worst moment, killed, and told of afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent, Host, Session, Settings
from holdfast.agents.scripted import ScriptedModel
from holdfast.agents.tool import Approval, Toolset
from holdfast.protocol.messages import Entry
from holdfast.protocol.model import CallPart, ModelRequest, ToolMessage, UserMessage, conversation
from holdfast.tools import Files, Processes, Terminal, Workspace
from holdfast.tools.commands.danger import is_dangerous_call
from tests.runtime.processes_zoo import ROLES, await_condition, has_strayed, living, program
from tests.tools.programs.served_processes import agent_that_starts


def token_of(tmp_path: Path, what: str) -> str:
    return f"{what}-{os.getpid()}-{tmp_path.name}"


def on_agent(
    script: Any,
    toolsets: Sequence[Toolset],
    scenario: Callable[[Host], Coroutine[Any, Any, None]],
    *,
    store: str = "memory://",
    grace_s: float = 0.2,
    bound_s: float = 90.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    async def main() -> None:
        agent = Agent(name="a", model=ScriptedModel(script), tools=list(toolsets))
        settings = Settings(grace_s=grace_s, drain_timeout_s=0.5, principal_stored_bytes=1_000_000_000)
        async with asyncio.timeout(bound_s):
            async with Host(agent, store=store, settings=settings) as host:
                await scenario(host)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def entries(session: Session) -> list[Entry]:
    """The transcript; a model can be given it."""
    found = await session.transcript()
    conversation(found)
    return found


def say_after(*calls: CallPart) -> Callable[[Any], Any]:
    """The calls for the message ``go``, then ``done``; what tools answered is repeated."""

    def script(request: Any) -> Any:
        match request.messages[-1]:
            case UserMessage(content="go"):
                return list(calls)
            case ToolMessage():
                results = [one.content for one in request.messages if isinstance(one, ToolMessage)]
                return f"done: {' | '.join(results)}"
            case last:
                return f"heard {last.content}"

    return script


def test_a_model_runs_a_command_and_reads_its_result(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        answer = await host.session("s").ask("go")
        assert answer.endswith("done: hello\n[exit code 3] | data now has 5 bytes"), answer

    call = CallPart(name="terminal", arguments={"command": "echo hello; exit 3", "timeout_s": 20})
    write = CallPart(name="write_file", arguments={"path": "data", "content": "12345"})
    workspace = Workspace(tmp_path)
    on_agent(say_after(call, write), [Terminal(workspace), Files(workspace)], scenario)
    assert (tmp_path / "data").read_text() == "12345"


@pytest.mark.parametrize("how", ["interrupt", "stop", "message", "close"])
def test_parallel_commands_of_hostile_trees_all_end_with_the_run(tmp_path: Path, how: str) -> None:
    token = token_of(tmp_path, how)
    calls = [CallPart(name="terminal", arguments={"command": program(role, token)}) for role in ROLES]
    expected = sum(ROLES.values())

    async def scenario(host: Host) -> None:
        session = host.session("s")
        await session.send("go")
        # One of them ends by itself, and what it left with it: all the others are up.
        await until(lambda: len(living(token)) >= expected - ROLES["leaves-strays"])
        match how:
            case "interrupt":
                receipt = await session.interrupt("enough")
                assert receipt.outcome == "gone" and not receipt.survivors
            case "stop":
                await session.stop("enough")
            case "message":
                assert await session.ask("and now?", policy="interrupt") == "heard and now?"
            case _:
                return
        assert living(token) == []
        said = repr(await entries(session))
        assert said.count("interrupted") >= len(ROLES) - 1
        assert await session.ask("still there?") == "heard still there?"

    on_agent(say_after(*calls), [Terminal(tmp_path)], scenario)
    assert living(token) == []


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])])
def test_an_interrupt_at_any_moment_of_a_call_leaves_nothing(tmp_path: Path, rounds: int) -> None:
    token, background = token_of(tmp_path, "moment"), token_of(tmp_path, "background")
    toolset = Processes(tmp_path)
    moments = random.Random(rounds)
    calls = [
        CallPart(name="terminal", arguments={"command": program("double-fork", token)}),
        CallPart(name="terminal", arguments={"command": program("leaves-strays", token), "pty": True}),
        CallPart(name="start_process", arguments={"command": program("double-fork", background)}),
        CallPart(name="write_file", arguments={"path": "big", "content": "x" * 300_000}),
        CallPart(name="search_files", arguments={"pattern": "y"}),
    ]

    async def scenario(host: Host) -> None:
        descriptors = 0
        for number in range(rounds):
            session = host.session(f"s{number}")
            (tmp_path / "big").unlink(missing_ok=True)
            await session.send("go")
            await asyncio.sleep(moments.choice((0.0, 0.01, 0.1)) * moments.random())
            await session.interrupt("enough")
            kept = list(toolset._sessions.get(("local", f"s{number}"), {}).values())
            assert len(kept) <= 1
            assert living(token) == [], "only the background process may live"
            if not kept:  # the stop of a start that was cancelled goes on when the call has used up its grace period
                await until(lambda: living(background) == [])
            assert not (tmp_path / "big").exists() or (tmp_path / "big").stat().st_size == 300_000
            assert not list(tmp_path.glob(".big*")), "a part of a file was left"
            assert await session.ask("still there?") == "heard still there?"
            await entries(session)
            await session.stop("all of it")
            assert living(background) == []
            if number == rounds // 2:
                descriptors = len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 8  # sockets of threads and readers that linger

    on_agent(say_after(*calls), [Terminal(tmp_path), toolset, Files(tmp_path)], scenario, grace_s=0.1, bound_s=500)
    assert living(token) == living(background) == []


def test_an_interrupt_of_one_session_leaves_the_commands_of_others_alone(tmp_path: Path) -> None:
    def script(request: Any) -> Any:
        last = request.messages[-1]
        if isinstance(last, UserMessage):
            token = token_of(tmp_path, last.content)
            return CallPart(name="terminal", arguments={"command": program("double-fork", token)})
        return "never"

    async def scenario(host: Host) -> None:
        sessions = [host.session(key, principal=who) for key, who in (("a", "ann"), ("b", "ann"), ("a", "bob"))]
        tokens = [token_of(tmp_path, f"alone{number}") for number in range(3)]
        for number, session in enumerate(sessions):
            await session.send(f"alone{number}")
        await until(lambda: all(has_strayed(token) for token in tokens))
        for number, session in enumerate(sessions):
            await session.interrupt("enough")
            assert [len(living(token)) for token in tokens] == [0] * (number + 1) + [2] * (2 - number)

    on_agent(script, [Terminal(tmp_path)], scenario)


def test_a_command_of_a_child_agent_ends_with_its_parent(tmp_path: Path) -> None:
    token = token_of(tmp_path, "child")
    command = CallPart(name="terminal", arguments={"command": program("new-session", token)})
    child = Agent(name="child", model=ScriptedModel([command, "never"]), tools=[Terminal(tmp_path)])
    parent = Agent(
        name="parent", model=ScriptedModel([CallPart(name="child", arguments={"task": "go"}), "never"]), tools=[child]
    )

    async def main() -> None:
        async with asyncio.timeout(30):
            async with Host(parent, store="memory://", settings=Settings(grace_s=0.3)) as host:
                session = host.session("s")
                await session.send("go")
                await until(lambda: len(living(token)) == 2)
                receipt = await session.interrupt("enough")
                assert receipt.outcome == "gone" and living(token) == []

    asyncio.run(main())


def test_a_person_can_be_asked_before_each_command(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        for decision, said in ((session.approve, "exit code 0"), (session.deny, "done: ")):
            receipt = await session.send("go")
            async with asyncio.timeout(30):
                while not (open_ := await session.questions()):
                    await asyncio.sleep(0.01)
            assert not (tmp_path / "made").exists()
            await decision(open_[0])
            settled = await session.wait(receipt.message_id, timeout_s=15)
            assert said in settled.text, settled
            assert (tmp_path / "made").exists() == (decision == session.approve)
            (tmp_path / "made").unlink(missing_ok=True)

    call = CallPart(name="terminal", arguments={"command": "touch made"})
    on_agent(say_after(call), [Terminal(tmp_path, approval=True)], scenario)


@pytest.mark.parametrize("approval", [True, is_dangerous_call])
def test_what_is_written_to_a_shell_in_the_background_is_asked_about(tmp_path: Path, approval: Approval) -> None:
    (tmp_path / "build").mkdir()
    asked = ["start_process"] if approval is True else []

    def script(request: ModelRequest) -> Any:
        last = request.messages[-1]
        if isinstance(last, UserMessage):
            return CallPart(name="start_process", arguments={"command": "bash"})
        if isinstance(last, ToolMessage) and last.name == "start_process":
            (process_id,) = re.findall(r"process (p\w+) started", last.content)
            arguments = {"process_id": process_id, "text": "rm -rf build\n"}
            return CallPart(name="write_process", arguments=arguments)
        return "done"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        receipt = await session.send("go")
        for name in [*asked, "write_process"]:
            async with asyncio.timeout(30):
                while not (open_ := await session.questions()):
                    await asyncio.sleep(0.01)
            assert open_[0].tool == name
            await (session.approve if name == "start_process" else session.deny)(open_[0])
        assert (await session.wait(receipt.message_id, timeout_s=15)).text == "done"
        assert (tmp_path / "build").exists()

    on_agent(script, [Processes(tmp_path, approval=approval)], scenario)


def test_programs_are_fed_read_and_ended_on_uvloop_too(tmp_path: Path) -> None:
    token = token_of(tmp_path, "uvloop")
    uvloop = pytest.importorskip("uvloop")
    toolset = Processes(tmp_path)
    call = CallPart(name="terminal", arguments={"command": "cat; exit 4", "stdin": "fed", "pty": True})
    start = CallPart(name="start_process", arguments={"command": ["cat", "-u"]})
    trees = [CallPart(name="terminal", arguments={"command": program(role, token)}) for role in ROLES]

    def script(request: Any) -> Any:
        match request.messages[-1]:
            case UserMessage(content="go"):
                return [call, start]
            case UserMessage(content="trees"):
                return trees
            case ToolMessage() as last if " started, pid" in last.content:
                one = last.content.split()[1]
                return CallPart(
                    name="write_process", arguments={"process_id": one, "text": "x" * 1_000_000, "end": True}
                )
            case ToolMessage() as last if last.content.startswith("written"):
                (one,) = toolset._sessions[("local", "s")]
                return CallPart(name="wait_process", arguments={"process_id": one})
            case last:
                return f"answer {last.content}"

    async def scenario(host: Host) -> None:
        session = host.session("s")
        answer = await session.ask("go")
        assert "exit code 0; 1,000,000 bytes of output" in answer, answer[:300]
        assert "exit code 4" in repr(await entries(session))
        await session.send("trees")
        await until(lambda: len(living(token)) >= sum(ROLES.values()) - ROLES["leaves-strays"])
        await session.stop("enough")
        assert living(token) == []

    on_agent(script, [Terminal(tmp_path), toolset], scenario, loop_factory=uvloop.new_event_loop)


def heard(found: Sequence[Entry], text: str) -> bool:
    return any("heard [process p" in repr(entry) and text in repr(entry) for entry in found)


def test_the_end_of_a_process_is_told_to_its_session(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        session = host.session("s")
        assert " started, pid" in await session.ask("go")
        async with asyncio.timeout(30):
            while not heard(await entries(session), "exit code 5. Last output"):
                await asyncio.sleep(0.01)

    call = CallPart(name="start_process", arguments={"command": "sleep 0.2; echo bye; exit 5"})
    on_agent(say_after(call), [Processes(tmp_path)], scenario)


def test_processes_that_end_with_the_host_are_told_at_the_next_start(tmp_path: Path) -> None:
    token = token_of(tmp_path, "restart")
    store = f"sqlite:///{tmp_path / 'hold.db'}"
    call = CallPart(name="start_process", arguments={"command": program("double-fork", token)})

    async def first(host: Host) -> None:
        assert " started, pid" in await host.session("s").ask("go")
        await until(lambda: len(living(token)) == 2)

    async def second(host: Host) -> None:
        assert living(token) == []
        async with asyncio.timeout(30):
            while not heard(await entries(host.session("s")), "ended together with its host"):
                await asyncio.sleep(0.01)

    on_agent(say_after(call), [Processes(tmp_path / "work")], first, store=store)
    assert living(token) == []
    on_agent(say_after(call), [Processes(tmp_path / "work")], second, store=store)
    on_agent(say_after(call), [Processes(tmp_path / "work")], once, store=store)


async def once(host: Host) -> None:
    """Nothing is told twice."""
    assert len(await host.session("s").runs()) == 2


def test_a_killed_host_takes_its_processes_along_and_the_next_one_tells(tmp_path: Path) -> None:
    token = token_of(tmp_path, "killed")
    store = f"sqlite:///{tmp_path / 'hold.db'}"
    command = program("double-fork", token)
    words = [sys.executable, "-m", "tests.tools.programs.served_processes", store, str(tmp_path / "work"), *command]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    try:
        assert server.stdout is not None
        assert b" started, pid" in server.stdout.readline()
        await_condition(lambda: len(living(token)) >= 2, "the tree is up")
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.communicate()
    await_condition(lambda: not living(token), "the tree ended with its host")

    async def main() -> None:
        async with asyncio.timeout(30):
            async with Host(agent_that_starts(str(tmp_path / "work"), command), store=store) as host:
                while not heard(await entries(host.session("s")), "ended together with its host"):
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert living(token) == []
