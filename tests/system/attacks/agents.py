"""What attacked servers serve: agents that answer, that never end, that stop slowly, that talk, that run programs."""

from __future__ import annotations

import asyncio
import subprocess

from holdfast import Agent, Run
from holdfast.agents.scripted import ScriptedModel
from holdfast.protocol.model import CallPart, ModelRequest, UserMessage
from holdfast.tools.programs.processes import Processes
from holdfast.tools.programs.terminal import Terminal

STUBBORN_S = 3.0


async def echo(run: Run) -> str:
    """Answer with the text."""
    return run.text


async def endless(run: Run) -> None:
    """Wait until it is interrupted."""
    await run.interrupt.wait()


async def stubborn(run: Run) -> None:
    """Say so, and need some time to stop."""
    await run.emit("it runs")
    try:
        await run.interrupt.wait()
    finally:
        await asyncio.sleep(STUBBORN_S)


async def chatty(run: Run) -> None:
    """Say something, again and again, until it is interrupted."""
    while not run.interrupt.triggered:
        await run.emit("x" * 1000)
        await asyncio.sleep(0.01)


async def programs(run: Run) -> None:
    """Start a program as foreign code does, and one of the run's own; go on until it is interrupted."""
    plain = subprocess.Popen(["sleep", run.text], stdin=-3, stdout=-3, stderr=-3)
    async with run.scope.child("tool") as scope:
        await scope.process(["sleep", run.text])
        await run.interrupt.wait()
    await asyncio.to_thread(plain.wait)


def _start_in_background(request: ModelRequest) -> CallPart | str:
    last = request.messages[-1]
    if isinstance(last, UserMessage):
        return CallPart(name="start_process", arguments={"command": f"sleep {last.content}"})
    return "it runs on"


background = Agent(name="background", model=ScriptedModel(_start_in_background), tools=[Processes(approval=False)])
"""Starts a program that outlives its run."""


def _run_command(request: ModelRequest) -> CallPart | str:
    last = request.messages[-1]
    if isinstance(last, UserMessage):
        return CallPart(name="terminal", arguments={"command": last.content, "timeout_s": 20.0})
    return "it has ended"


command = Agent(name="command", model=ScriptedModel(_run_command), tools=[Terminal(approval=False)])
"""Runs each message as a command."""
