"""Bombs of a model's commands behind the wall: the tool's answer says what happened, and the operator is told."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast import Host, Run, Settings
from holdfast.runtime.processes import procfs
from holdfast.tools.files.workspace import Workspace
from holdfast.tools.programs.processes import Processes
from holdfast.tools.programs.python import Python
from holdfast.tools.programs.terminal import Terminal
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.tools.using import Bench

pytestmark = pytest.mark.skipif(not procfs.supported(), reason="programs are watched only on Linux")

MIB = 1 << 20
QUOTAS = {
    "principal_program_memory_bytes": 200 * MIB,
    "principal_program_processes": 60,
    "principal_program_files": 400,
    "principal_disk_bytes": 30 * MIB,
    "principal_inodes": 2000,
    "disk_reserve_bytes": 0,
}


class Scene:
    """A host whose agent calls the tools as it is told, and what they answered."""

    def __init__(self, host: Host, answers: list[str]) -> None:
        self.host = host
        self.answers = answers

    async def call(self, principal: str, session: str, text: str) -> str:
        """Run the agent once in a session; return the answer of its tool."""
        one = self.host.session(session, principal=principal)
        receipt = await one.send(text)
        await one.wait(receipt.message_id)
        return self.answers[-1]


def on_scene(folder: Path, body: Callable[[Scene], Coroutine[Any, Any, None]], **limits: int) -> None:
    workspace = Workspace(folder / "work", per_session=True)
    toolsets = [Terminal(workspace), Processes(workspace), Python(workspace)]
    answers: list[str] = []

    async def agent(run: Run) -> None:
        if run.text.startswith("["):
            answers.append(run.text)  # the message of a background process
            return
        name, _, rest = run.text.partition(" ")
        arguments = {"script": rest} if name == "python" else {"command": rest}
        answers.append(await Bench(run, toolsets)(name, **arguments))

    async def main() -> None:
        values: dict[str, Any] = {**QUOTAS, **limits, "grace_s": 0.2}
        async with asyncio.timeout(90):
            async with Host(agent, store="memory://", settings=Settings(**values)) as host:
                await body(Scene(host, answers))

    asyncio.run(main())


def python(source: str) -> str:
    return f"terminal {sys.executable} -I -S -c '{source}'"


BOMBS = {
    "memory": (
        python('import time\nkept = []\nfor _ in range(200): kept.append(b"x" * (4 << 20)); time.sleep(0.01)'),
        "of memory; the limit is 200 MiB",
    ),
    "memory of /tmp and /dev/shm": (
        "terminal for n in $(seq 100); do head -c 2M /dev/zero >/tmp/$n; head -c 2M /dev/zero >/dev/shm/$n; done; "
        "sleep 60",
        "of memory; the limit is 200 MiB",
    ),
    "processes": ("terminal for n in $(seq 90); do sleep 60 & done; wait", "the limit is 60"),
    "descriptors": (
        python('import os, time\nos.fork()\nfor _ in range(250): os.open("/dev/null", 0); time.sleep(0.001)\n').replace(
            "\n'", "\ntime.sleep(60)'"
        ),
        "open files; the limit is 400",
    ),
    "disk": ("terminal for n in $(seq 100); do head -c 1M /dev/zero >$n; done; sleep 60", "the limit is 30 MiB"),
    "inodes": (
        "terminal for n in $(seq 100); do (cd . && for m in $(seq 50); do : >$n.$m; done); done; sleep 60",
        "files and folders; the limit is 2,000",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_ended_and_told_to_the_model_and_the_operator(tmp_path: Path, bomb: str) -> None:
    text, why = BOMBS[bomb]

    async def body(scene: Scene) -> None:
        own = asyncio.create_task(scene.call("bob", "b", "terminal sleep 1; echo fine"))
        answer = await scene.call("mallory", "m", text)
        assert "[ended: " in answer, answer
        assert why in answer, answer
        assert "mallory" in answer
        assert "fine" in await own
        incidents = [one.text for one in scene.host.incidents.newest if one.kind == "budget"]
        assert len(incidents) == 1
        assert why in incidents[0]
        counts = scene.host.statistics().counts
        assert sum(count for name, count in counts.items() if name.startswith("programs_ended_")) == 1
        refused = {name: usage.refused for name, usage in scene.host.budget_usage().items() if usage.refused}
        assert sum(refused.values()) == 1
        if bomb in ("disk", "inodes"):
            answer = await scene.call("mallory", "n", "python 1")
            assert answer.startswith("!ToolFailed: the workspace of user mallory holds"), "also in another session"
            answer = await scene.call("mallory", "m", "terminal rm -rf ./[0-9]*; echo done")
            assert "done" in answer
            assert "commands can delete but not write files" in answer
        assert "[value] 2" in await scene.call("mallory", "m", "python 1 + 1")

    on_scene(tmp_path, body)


def test_background_programs_count_too_and_their_message_says_why_they_ended(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        hold = 'import time\nkept = b"x" * ({} << 20)\ntime.sleep({})'
        for session in ("one", "two"):
            command = python(hold.format(80, 60)).removeprefix("terminal ")
            assert "started" in await scene.call("alice", session, f"start_process {command}")
        assert "[exit code 0]" in await scene.call("alice", "three", python(hold.format(60, 2)))
        while not (told := [text for text in scene.answers if "has ended" in text]):
            await asyncio.sleep(0.05)
        assert "has ended: ended: user alice's programs used" in told[0]
        assert "of memory; the limit is 200 MiB" in told[0]

    on_scene(tmp_path, body)


def test_programs_that_an_agent_starts_behind_a_wall_count_too(tmp_path: Path) -> None:
    async def agent(run: Run) -> None:
        process = await run.process(
            ["sh", "-c", "for n in $(seq 90); do sleep 60 & done; wait"], sandbox=Sandbox(), cwd=tmp_path
        )
        await process.wait_gone()

    async def main() -> None:
        settings = Settings(principal_program_processes=60, disk_reserve_bytes=0)
        async with asyncio.timeout(60), Host(agent, store="memory://", settings=settings) as host:
            session = host.session("s", principal="mallory")
            receipt = await session.send("go")
            await session.wait(receipt.message_id)
            assert host.statistics().counts["programs_ended_processes"] == 1

    asyncio.run(main())


def test_output_without_end_keeps_memory_and_loop_time_bounded(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        delays: list[float] = []

        async def tick() -> None:
            while True:
                began = loop.time()
                await asyncio.sleep(0.005)
                delays.append(loop.time() - began - 0.005)

        ticking = asyncio.create_task(tick())
        before = _resident()
        started = await scene.call("alice", "b", "start_process yes out of bounds")
        assert "started" in started
        answer = await scene.call("alice", "t", "terminal timeout 3 head -c 10G /dev/zero | tr '\\0' x")
        ticking.cancel()
        assert "bytes omitted" in answer
        assert len(answer) < 40_000
        assert _resident() - before < 100 * MIB
        assert sorted(delays)[len(delays) * 9 // 10] < 0.5, "the loop was never busy for long"

    on_scene(tmp_path, body)


def _resident() -> int:
    line = procfs.read_text("/proc/self/statm") or b"0 0"
    return int(line.split()[1]) * 4096
