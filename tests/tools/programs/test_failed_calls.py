"""A call whose program failed is marked as failed, and keeps its status and its text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent, Host, ScriptedModel
from holdfast.protocol.events import ToolFinished, ToolStarted
from holdfast.protocol.model import CallPart
from holdfast.tools import Python, Terminal

Ends = dict[str, list[ToolFinished]]


def ends_of(root: Path, *calls: CallPart) -> Ends:
    """The ends of a model's calls and of those that its scripts made, by tool."""
    ends: Ends = {}
    tools = [Terminal(root / "work"), Python(root / "work")]
    worker = Agent(name="worker", model=ScriptedModel([[*calls], "done"]), tools=tools)

    async def main() -> None:
        async with asyncio.timeout(60), Host(worker, store=f"sqlite:///{root}/store.db") as host:
            session = host.session("s")
            receipt = await session.send("go")
            await session.wait(receipt.message_id)
            names: dict[str, str] = {}
            async for event in session.events(follow=receipt.message_id):
                match event:
                    case ToolStarted():
                        names[event.call_id] = event.name
                    case ToolFinished():
                        ends.setdefault(names[event.call_id], []).append(event)

    asyncio.run(main())
    return ends


@pytest.mark.parametrize(
    ("arguments", "failed", "text"),
    [
        ({"command": "true"}, False, "[exit code 0]"),
        ({"command": "echo no; exit 3"}, True, "no\n[exit code 3]"),
        ({"command": "kill -KILL $$"}, True, "[killed by signal 9 (SIGKILL)]"),
        ({"command": "sleep 1000", "timeout_s": 0.2}, True, "[timed out after 0.2 s and was killed;"),
    ],
)
def test_a_command_has_failed_unless_its_exit_code_is_0(
    tmp_path: Path, arguments: dict[str, Any], failed: bool, text: str
) -> None:
    (end,) = ends_of(tmp_path, CallPart(name="terminal", arguments=arguments))["terminal"]
    assert (end.status, end.failed) == ("ok", failed)
    assert type(end.result) is str
    assert end.result.startswith(text)


@pytest.mark.parametrize(
    ("arguments", "failed", "text"),
    [
        ({"script": "6 * 7"}, False, "[value] 42"),
        ({"script": "1 / 0"}, True, "Traceback"),
        ({"script": "import time; time.sleep(1000)", "timeout_s": 0.5}, True, "[timed out after 0.5 s and was killed]"),
    ],
)
def test_a_script_has_failed_if_it_raised_or_was_killed(
    tmp_path: Path, arguments: dict[str, Any], failed: bool, text: str
) -> None:
    (end,) = ends_of(tmp_path, CallPart(name="python", arguments=arguments))["python"]
    assert (end.status, end.failed) == ("ok", failed)
    assert end.result.startswith(text)


def test_a_failed_command_of_a_script_is_marked_and_the_script_is_not(tmp_path: Path) -> None:
    script = "from holdfast_tools import terminal\nterminal(command='exit 7')"
    ends = ends_of(tmp_path, CallPart(name="python", arguments={"script": script}))
    assert [end.failed for end in ends["terminal"]] == [True]
    assert [(end.failed, end.result) for end in ends["python"]] == [(False, '[value] "[exit code 7]"')]
