"""The tree shows what lives, also what a stop gave up, until it has ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from holdfast import Host, Run, Settings
from holdfast.host import tree
from holdfast.protocol.events import TextDelta
from holdfast.protocol.messages import TreeNode

QUICK = Settings(grace_s=0.05, abandon_after_s=0.5)


def within(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


def nodes(node: TreeNode) -> Iterator[TreeNode]:
    """All below it."""
    for child in node.children:
        yield child
        yield from nodes(child)


def abandoned(node: TreeNode) -> list[tuple[str, str]]:
    """What is left behind in a tree."""
    return [(one.kind, one.name) for one in nodes(node) if one.state == "abandoned"]


async def until(seen: Callable[[], bool]) -> None:
    while not seen():
        await asyncio.sleep(0.002)


def test_a_thread_that_a_stop_gave_up_is_shown_until_it_has_ended_and_to_its_principal_only() -> None:
    gate = threading.Event()
    begun = threading.Event()

    def stuck() -> None:
        begun.set()
        gate.wait(60)

    async def agent(run: Run) -> str:
        if run.text == "stick":
            await run.call(stuck)
        return "fine"

    async def work() -> None:
        async with Host(agent, store="memory://", settings=QUICK) as host:
            session = host.session("s", principal="ann")
            try:
                await session.send("stick")
                await until(begun.is_set)
                receipt = await session.interrupt("enough")
                names = [left.name for left in receipt.abandoned]
                assert names == ["stuck"]
                assert abandoned(await session.tree()) == [("thread", "stuck")]
                assert abandoned(host.tree()) == abandoned(host.tree(principal="ann")) == [("thread", "stuck")]
                assert abandoned(host.tree(principal="bob")) == []
                host.maintenance.evict(idle_for_s=0.0)
                assert not host.actors, "the session is not in memory any more"
                assert abandoned(await session.tree()) == [("thread", "stuck")]
                assert await session.ask("go on") == "fine"
            finally:
                gate.set()
            await until(lambda: not abandoned(host.tree()))
            assert list(nodes(await session.tree())) == []

    within(work)


def test_a_thread_that_a_part_of_a_run_gave_up_is_shown_while_the_run_goes_on() -> None:
    gate = threading.Event()
    begun = threading.Event()
    seen: list[tuple[str, str]] = []

    def stuck() -> None:
        begun.set()
        gate.wait(60)

    async def agent(run: Run) -> str:
        part = run.scope.child("part").open()
        _ = part.spawn(stuck, on="thread", name="stuck")
        await until(begun.is_set)
        await part.stop("enough", grace_s=0.0, abandon_after_s=0.0)
        seen.extend(abandoned(host.tree()))
        return "late"

    host = Host(agent, store="memory://", settings=QUICK)

    async def work() -> None:
        async with host:
            try:
                assert await host.session("s").ask("go") == "late"
                assert seen == [("thread", "stuck")]
                assert abandoned(host.tree()) == [("thread", "stuck")]
            finally:
                gate.set()
            await until(lambda: not abandoned(host.tree()))

    within(work)


def test_a_task_that_swallows_every_cancel_is_shown_until_it_has_ended() -> None:
    async def agent(run: Run) -> str:
        waiting.append(asyncio.get_running_loop().create_future())
        while not waiting[0].done():
            try:
                await asyncio.shield(waiting[0])
            except asyncio.CancelledError:
                continue
        return "late"

    waiting: list[asyncio.Future[None]] = []

    async def work() -> None:
        async with Host(agent, store="memory://", settings=QUICK) as host:
            session = host.session("s")
            await session.send("go")
            await until(lambda: bool(waiting))
            receipt = await session.interrupt("enough")
            assert receipt.outcome == "quarantined"
            assert abandoned(await session.tree()) == [("task", left.name) for left in receipt.abandoned] != []
            waiting[0].set_result(None)
            await until(lambda: not abandoned(host.tree()))

    within(work)


def test_what_background_work_leaves_behind_is_shown_too() -> None:
    gate = threading.Event()
    begun = threading.Event()

    def stuck() -> None:
        begun.set()
        gate.wait(60)

    async def behind() -> None:
        await asyncio.to_thread(stuck)

    async def agent(run: Run) -> str:
        run.background(behind, name="watch")
        return "started"

    async def work() -> None:
        async with Host(agent, store="memory://", settings=QUICK) as host:
            session = host.session("s")
            try:
                assert await session.ask("go") == "started"
                await until(begun.is_set)
                stop = await session.stop("enough")
                assert stop.receipt.outcome == "quarantined"
                assert [kind for kind, _ in abandoned(await session.tree())] == ["thread"]
            finally:
                gate.set()
            await until(lambda: not abandoned(host.tree()))

    within(work)


PARENT = """\
import subprocess, sys
children = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
print("ready", flush=True)
children[0].wait()
"""


def test_a_program_has_the_number_of_its_processes_and_one_tree_counts_a_limited_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def agent(run: Run) -> None:
        for name in ("first", "second"):
            process = await run.process([sys.executable, "-S", "-c", PARENT], stdout=-1, name=name)
            assert process.stdout is not None
            await process.stdout.readline()
        await run.emit("ready")
        await process.wait()

    async def work() -> None:
        async with Host(agent, store="memory://", settings=QUICK) as host:
            session = host.session("s")
            await session.send("begin")
            async for event in session.events():
                if isinstance(event, TextDelta):
                    break

            async def counts() -> dict[str, int]:
                return {node.name: node.processes for node in nodes(await session.tree()) if node.kind == "process"}

            assert await counts() == {"first": 4, "second": 4}
            assert {node.name: node.processes for node in nodes(host.tree()) if node.processes} == await counts()
            monkeypatch.setattr(tree, "_COUNTED_PROCESSES", 6)
            assert await counts() == {"first": 4, "second": 2}
            monkeypatch.setattr(tree, "_COUNTED_PROCESSES", 4)
            assert await counts() == {"first": 4, "second": 0}
            receipt = await session.interrupt("enough")
            assert (receipt.stopped.programs, receipt.stopped.processes) == (2, 8)

    within(work)


@pytest.mark.parametrize("by_asyncio", [False, True])
def test_a_receipt_counts_the_programs_that_the_tree_shows(by_asyncio: bool) -> None:
    """The children of a program outlive it for a moment, and are then members of the scope themselves."""
    command = ("sh", "-c", "sleep 600 & sleep 600 & echo up; wait")
    started: list[subprocess.Popen[bytes]] = []

    async def agent(run: Run) -> None:
        if by_asyncio:
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert process.stdout is not None
            await process.stdout.readline()
        else:
            program = subprocess.Popen(command, stdout=subprocess.PIPE)
            started.append(program)
            assert program.stdout is not None
            with program.stdout:
                program.stdout.readline()
        await run.emit("up")
        await asyncio.Event().wait()

    async def work() -> None:
        async with Host(agent, store="memory://", settings=QUICK) as host:
            session = host.session("s")
            await session.send("begin")
            async for event in session.events():
                if isinstance(event, TextDelta):
                    break
            shown = [node.processes for node in nodes(await session.tree()) if node.kind == "process"]
            receipt = await session.interrupt("enough", grace_s=20.0)
            assert receipt.outcome == "gone"
            assert (receipt.stopped.programs, receipt.stopped.processes) == (len(shown), sum(shown)) == (1, 3)
        for program in started:
            program.wait()

    asyncio.run(work())
