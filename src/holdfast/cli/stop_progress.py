"""Report what a stop still waits for, while its receipt is not there yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli.output import clean, counted
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.protocol.messages import TreeNode
    from holdfast.protocol.session_api import SessionAPI

__all__ = ["announce", "progress_line"]

T = TypeVar("T")

_FIRST_S = 1.0
_EVERY_S = 5.0
_SHOWN = 3


async def announce(session: SessionAPI, stop: Awaitable[T], report: Callable[[str], None]) -> T:
    """Await a stop of a session, and report after 1 s, then every 5 s, what it still waits for.

    Parameters:
        session: the session whose work is being stopped.
        stop: the request that ends with the stop's receipt.
        report: prints one line.
    """
    failure: HoldfastError | None = None
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch(session, report))
        try:
            result = await stop
        except HoldfastError as error:
            failure = error  # the group would raise it as part of an ExceptionGroup
        finally:
            watch.cancel()
    if failure is not None:
        raise failure
    return result


async def _watch(session: SessionAPI, report: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    pause_s = _FIRST_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = _EVERY_S
        try:
            tree = await session.tree()
        except HoldfastError:
            continue  # the stop reports it, if it lasts
        report(progress_line(tree, loop.time() - began))


def progress_line(tree: TreeNode, elapsed_s: float) -> str:
    """Return a line that names the programs and threads that a stop waits for; tasks only if nothing else is left."""
    members = list(_members(tree))
    left = [node for node in members if node.kind != "task"] or members
    names = [_described(node) for node in left[:_SHOWN]]
    if len(left) > _SHOWN:
        names.append(f"{len(left) - _SHOWN} more")
    line = f"still stopping after {elapsed_s:.0f} s"
    if names:
        line += f": {', '.join(names)}"
    if any(node.kind == "process" for node in left):
        line += "; a program is killed when its grace period ends"
    return line


def _members(node: TreeNode) -> Iterator[TreeNode]:
    if node.kind in ("task", "thread", "process") and node.state != "abandoned":
        yield node
    for child in node.children:
        yield from _members(child)


def _described(node: TreeNode) -> str:
    kind = "program" if node.kind == "process" else node.kind
    processes = f" ({counted(node.processes, 'process')})" if node.processes > 1 else ""
    return f"{kind} {clean(node.name)}{processes}"
