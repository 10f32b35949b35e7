"""The demo agent shows off: its stubborn programs are ended soon, and the receipt says what they were."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil

from holdfast import Host
from holdfast.agents.demo import agent as demo
from holdfast.protocol.messages import TreeNode


def programs(node: TreeNode) -> Iterator[TreeNode]:
    """The programs in a tree."""
    for child in node.children:
        if child.kind == "process":
            yield child
        yield from programs(child)


def is_complete(node: TreeNode) -> bool:
    """Whether the 8 processes of the stubborn tree have all been left to its reaper: then none forks any more."""
    try:
        reaper = psutil.Process(node.pid).parent()
        assert reaper is not None
        return len(reaper.children()) == 8
    except psutil.NoSuchProcess:
        return False


def test_an_interrupt_of_the_stubborn_tree_takes_half_a_second_and_names_only_the_tree() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), Host(demo, store="memory://") as host:
            session = host.session("s")
            await session.send("tree")
            while not any(is_complete(one) for one in programs(await session.tree())):
                await asyncio.sleep(0.01)
            assert [(one.name, one.processes) for one in programs(await session.tree())] == [("stubborn tree", 8)]
            receipt = await session.interrupt("enough")
        assert receipt.outcome == "gone"
        assert (receipt.stopped.programs, receipt.stopped.processes) == (1, 8)
        assert receipt.forced == ("stubborn tree",)
        assert receipt.force_reasons == ("ignored SIGTERM for 0.5 s",)

    asyncio.run(main())
