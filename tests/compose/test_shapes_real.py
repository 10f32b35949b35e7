"""Shapes of tasks, threads, programs and children, stopped at any moment: nothing of them is left on the machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import psutil
import pytest

from holdfast import Agent, Host, Run, Settings, agent, branch, parallel, sequence, supervised
from holdfast.errors import RunFailed, RunInterrupted

LONG = f"1000.{os.getpid():07}"
"""Seconds; told apart by its digits from other programs, and from those of the same tests in another process."""


@agent
async def task(run: Run) -> str:
    await asyncio.sleep(1000)
    return "task"


@agent
def thread(run: Run) -> str:
    run.interrupt.sleep_blocking(1000)
    return "thread"


@agent
async def program(run: Run) -> str:
    process = await run.process(["sh", "-c", f"trap '' TERM; setsid sleep {LONG} & sleep {LONG}"])
    await process.wait()
    return "program"


@agent
async def family(run: Run) -> str:
    return await run.delegate(program, "go")


@agent
async def quick(run: Run) -> str:
    await asyncio.sleep(0.02)
    return "quick"


@agent
async def bad(run: Run) -> str:
    await asyncio.sleep(0.02)
    raise ValueError("broke")


def programs() -> list[int]:
    """The programs of these tests that are there."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(LONG in word for word in process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


FOUR = (task, thread, program, family)
SHAPES: dict[str, Callable[[Agent], Agent]] = {
    "all": lambda last: parallel(*FOUR, last, name="shape"),
    "first": lambda last: parallel(*FOUR, last, need="first", name="shape"),
    "late": lambda last: parallel(*(branch(one, deadline_s=0.05) for one in FOUR), last, need="some", name="shape"),
    "supervised": lambda last: supervised(*FOUR, last, restarts=0, name="shape"),
    "nested": lambda last: sequence(quick, parallel(parallel(*FOUR), last, name="inner"), name="shape"),
}


@pytest.mark.parametrize("last", [quick, bad], ids=lambda one: one.name)
@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_left_on_the_machine_when_a_shape_has_ended(name: str, last: Agent) -> None:
    async def main() -> None:
        settings = Settings(grace_s=0.2, abandon_after_s=20)
        async with (
            asyncio.timeout(100),
            Host(agents=[SHAPES[name](last), quick], store="memory://", settings=settings) as one,
        ):
            for delay_s in (0.0, 0.01, 0.03, 0.08):
                session = one.session(f"s {delay_s}")
                sent = await session.send("go", agent="shape")
                await asyncio.sleep(delay_s)
                receipt = await session.interrupt("enough")
                assert receipt.outcome == "gone", receipt
                assert (await session.wait(sent.message_id)).state in ("interrupted", "completed", "failed")
                assert programs() == []
                assert await session.ask("still there?", agent="quick") == "quick"
            assert one.parts.threads.of("local").statistics().running == 0

    asyncio.run(main())


@pytest.mark.parametrize(("name", "last"), [("first", quick), ("late", quick), ("all", bad), ("supervised", bad)])
def test_the_losers_are_gone_when_the_shape_ends_by_itself(name: str, last: Agent) -> None:
    async def main() -> None:
        settings = Settings(grace_s=0.2, abandon_after_s=20)
        left: list[object] = []

        async def outer(run: Run) -> str:
            try:
                return await run.delegate(SHAPES[name](last), "go")
            finally:
                left.extend(programs())
                left.extend(member for scope in run.scope.children() for member in scope.members())

        async with asyncio.timeout(30), Host(agent(outer), store="memory://", settings=settings) as one:
            if last is quick:
                assert await one.session("s").ask("go") == "quick"
            else:
                with pytest.raises((RunFailed, RunInterrupted), match="ValueError: broke"):
                    await one.session("s").ask("go")
        assert left == []

    asyncio.run(main())
