"""The ready assistant does real work with its tools, asks before what is dangerous, and leaves nothing when stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import Agent, Host, Session, Settings
from holdfast.agents.demo_model import HELP, demo_model
from holdfast.agents.run_tools import toolbox
from holdfast.agents.scripted import ScriptedModel
from holdfast.errors import ConfigurationError
from holdfast.protocol.events import ChildFinished, RunFinished, RunSuspended, ToolStarted
from holdfast.protocol.messages import Question
from holdfast.protocol.model import CallPart
from holdfast.testing.model_server import ModelServer
from holdfast.tools.assistant import Approve, assistant
from holdfast.tools.sandbox.choice import use_backend

REPORT = "please make a report about the files here"
DANGEROUS = {"command": "rm -rf build"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workspace with two files."""
    (tmp_path / "README.md").write_text("# The project\n")
    (tmp_path / "code.py").write_text("print('hi')\n")
    return tmp_path


def programs_in(folder: Path) -> list[int]:
    """The processes of this machine that work in that folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process.pid)
        except psutil.Error:
            pass  # it has just ended, or is not ours to see
    return found


def with_session(agent: Agent, scenario: Callable[[Session], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(100):
            async with Host(agent, store="memory://", settings=Settings(**{"grace_s": 1.0, **settings})) as host:
                await scenario(host.session("alice"))

    asyncio.run(main())


async def question_of(session: Session, cursor: str) -> Question:
    async for event in session.events(after=cursor):
        if isinstance(event, RunSuspended):
            return event.question
        assert not isinstance(event, RunFinished), event
    raise AssertionError("the stream ended")


def test_the_demo_model_makes_a_report_with_terminal_python_and_a_child(folder: Path) -> None:
    async def scenario(session: Session) -> None:
        receipt = await session.send(REPORT)
        settlement = await session.wait(receipt.message_id)
        assert settlement.state == "completed", settlement
        used = []
        async for event in session.events(after=receipt.cursor):
            if isinstance(event, ToolStarted):
                used.append(event.name)
            if isinstance(event, ChildFinished):
                assert event.status == "completed"
            if isinstance(event, RunFinished):
                break
        assert sorted(used) == ["delegate", "python", "terminal", "terminal", "write_file"]
        report = (folder / "report.md").read_text()
        for part in ("code.py", ".md: 1 file, 14 bytes", "# The project"):
            assert part in report and part in settlement.text

    with_session(assistant(demo_model(pace_s=0), workspace=folder), scenario)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_it_does_the_same_through_a_real_protocol(provider: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), ModelServer(demo_model(pace_s=0)) as server:
            for variable, value in server.environment.items():
                monkeypatch.setenv(variable, value)
            async with Host(assistant(f"{provider}:demo", workspace=folder), store="memory://") as host:
                assert "# The project" in await host.session("alice").ask(REPORT)
                assert await host.session("alice").ask("what can you do?") == HELP
            assert "code.py" in (folder / "report.md").read_text()
            assert {exchange.ended for exchange in server.exchanges} == {"whole"}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("approve", "command", "asked"),
    [
        ("all", "echo hi", True),
        ("dangerous", "echo hi", False),
        ("dangerous", "rm -rf build", True),
        ("none", "rm -rf build", False),
    ],
)
def test_without_a_wall_it_asks_before_what_it_was_told_to_ask_about(
    approve: Approve, command: str, asked: bool, folder: Path
) -> None:
    (folder / "build").mkdir()

    async def scenario(session: Session) -> None:
        receipt = await session.send(f"run {command}")
        if asked:
            question = await question_of(session, receipt.cursor)
            assert (question.tool, question.arguments) == ("terminal", {"command": command})
            assert (folder / "build").exists()
            await session.approve(question)
        assert (await session.wait(receipt.message_id)).state == "completed"
        assert (folder / "build").exists() is ("rm" not in command)

    with use_backend("none"):
        with_session(assistant(demo_model(pace_s=0), workspace=folder, approve=approve), scenario, sandbox="none")


@pytest.mark.parametrize("approve", ["dangerous", "none"])
def test_behind_a_wall_it_asks_nothing_and_changes_nothing_of_others(approve: Approve, folder: Path) -> None:
    (folder / "build").mkdir()

    async def scenario(session: Session) -> None:
        text = await session.ask("run mkdir own && rm -rf own && rm -rf build")
        assert "Read-only file system" in text or "busy" in text, text
        assert (folder / "build").exists()
        assert not (folder / "own").exists()

    with_session(assistant(demo_model(pace_s=0), workspace=folder, approve=approve), scenario)


def test_what_is_denied_is_not_done_and_the_model_is_told(folder: Path) -> None:
    (folder / "build").mkdir()

    async def scenario(session: Session) -> None:
        receipt = await session.send("run rm -rf build")
        question = await question_of(session, receipt.cursor)
        await session.deny(question.question_id, reason="not that one")
        assert "not that one" in (await session.wait(receipt.message_id)).text
        assert (folder / "build").exists()

    with use_backend("none"):
        with_session(assistant(demo_model(pace_s=0), workspace=folder), scenario, sandbox="none")


def test_what_a_child_or_a_script_does_is_asked_about_too(folder: Path) -> None:
    script = "from holdfast_tools import terminal\nterminal(command='rm -rf build')"

    async def scenario(session: Session) -> None:
        for text in ("delegate run rm -rf build", f"python {script}"):
            (folder / "build").mkdir()
            receipt = await session.send(text)
            question = await question_of(session, receipt.cursor)
            if question.tool == "python":
                await session.approve(question)
                while not (found := await session.questions()):
                    await asyncio.sleep(0.01)
                question = found[0]
            assert question.arguments == DANGEROUS
            await session.approve(question)
            assert (await session.wait(receipt.message_id)).state == "completed"
            assert not (folder / "build").exists()

    with use_backend("none"):
        with_session(assistant(demo_model(pace_s=0), workspace=folder), scenario, sandbox="none")


def test_it_can_ask_the_user_and_goes_on_with_the_answer(folder: Path) -> None:
    async def scenario(session: Session) -> None:
        receipt = await session.send("ask which colour?")
        question = await question_of(session, receipt.cursor)
        assert (question.kind, question.text) == ("question", "which colour?")
        await session.answer(question.question_id, "blue")
        assert (await session.wait(receipt.message_id)).text == "I need to know something.\n\nblue"

    with_session(assistant(demo_model(pace_s=0), workspace=folder), scenario)


def test_its_programs_see_no_key_of_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HOLDFAST_KEY", "MY_TOKEN"):
        monkeypatch.setenv(name, "sk-do-not-tell")

    async def scenario(session: Session) -> None:
        tasks = ("run env", "python import os; print(dict(os.environ))", "start env")
        for text in tasks:
            assert "do-not-tell" not in await session.ask(text)
        ended = 0
        async for event in session.events():
            assert "do-not-tell" not in str(event)
            ended += isinstance(event, RunFinished)
            if ended == len(tasks):
                break

    with_session(assistant(demo_model(pace_s=0), workspace=folder), scenario)


def stopped_at_random(folder: Path, *, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    tasks: Sequence[str] = (
        REPORT,
        "wait 30",
        "python import time, subprocess\nsubprocess.Popen(['sleep', '30'])\ntime.sleep(30)",
        "delegate wait 30",
        "run (setsid sleep 30 &) ; trap '' TERM ; sleep 30",
        "start sleep 30",
    )

    async def scenario(session: Session) -> None:
        seen = n = 0
        while n < rounds or seen <= rounds // 4:
            text = tasks[n % len(tasks)]
            await session.send(text)
            await asyncio.sleep(chance.uniform(0, 0.4))
            while n >= rounds and "sleep" in text and not programs_in(folder):
                await asyncio.sleep(0.01)  # the machine is slow: until now, stops came before the programs
            seen += len(programs_in(folder))
            stopped = await session.stop(f"round {n}")
            assert stopped.receipt.outcome == "gone", (n, text, stopped)
            assert programs_in(folder) == [], (n, text)
            n += 1
        assert await session.ask("what can you do?") == HELP

    agent = assistant(demo_model(pace_s=0.002), workspace=folder, approve="none")
    with_session(agent, scenario, grace_s=0.1, abandon_after_s=20.0)


def test_a_stop_at_any_moment_leaves_no_program(folder: Path) -> None:
    stopped_at_random(folder, rounds=18, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_a_stop_at_any_moment_leaves_no_program_however_often(seed: int, folder: Path) -> None:
    stopped_at_random(folder, rounds=60, seed=seed)


def test_further_tools_are_the_childs_too_and_it_cannot_ask_or_delegate(folder: Path) -> None:
    def weather(place: str) -> str:
        """Tell the weather."""
        return f"fine in {place}"

    agent = assistant("scripted:hello", workspace=folder, tools=[weather], instructions="Speak French.")
    own = toolbox(agent)
    assert {"terminal", "python", "fetch", "read_file", "start_process", "weather", "delegate", "ask_user"} <= set(own)
    [child] = [thing for thing in agent.tools if isinstance(thing, Agent)]
    assert set(own) - set(toolbox(child)) == {"delegate", "ask_user"}
    assert agent.executes
    for one in (agent, child):
        assert one.instructions.endswith("Speak French.")
        assert "{" not in one.instructions


def test_it_has_a_browser_when_it_is_given_one(folder: Path) -> None:
    assert "browser_open" not in toolbox(assistant("scripted:hello", workspace=folder))
    tools = toolbox(assistant("scripted:hello", workspace=folder, browser=True, approve="all"))
    assert tools["browser_open"].approval is True


def test_a_loop_of_calls_meets_the_budget(folder: Path) -> None:
    async def scenario(session: Session) -> None:
        receipt = await session.send("go")
        settlement = await session.wait(receipt.message_id)
        assert settlement.state == "interrupted"
        assert settlement.cause is not None and settlement.cause.kind == "budget"

    endless = ScriptedModel(lambda request: CallPart(name="list_files", arguments={}))
    with_session(assistant(endless, workspace=folder), scenario)


def test_a_wrong_setting_is_named(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="choose all, dangerous or none"):
        assistant("scripted:hello", workspace=folder, approve="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="invalid model name"):
        assistant("hello", workspace=folder)
