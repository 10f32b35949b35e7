"""The tree shows what lives, also what a stop gave up, until it has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from holdfast import Host, Run, Settings
from holdfast.protocol.messages import TreeNode

QUICK = Settings(grace_s=0.05, abandon_after_s=0.05)


def within(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
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
        gate.wait(10)

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
        gate.wait(10)

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
        gate.wait(10)

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
