"""Functions that record a list of a storm's processes and the statistics of its host."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import suppress

from holdfast.client import Client
from holdfast.clock import system_clock
from holdfast.host import Host
from holdfast.proof.history import ProcessesListed, ProcessSeen, StatisticsRead
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.stamps import MARKER
from holdfast.protocol.messages import TreeNode

__all__ = [
    "in_tree",
    "list_processes",
    "note_processes",
    "own_figures",
    "process_figures",
    "server_figures",
    "until_gone",
]


def list_processes(storm: str) -> list[ProcessSeen]:
    """Return all live processes that have the marker of the storm named `storm` in their environment."""
    begin = f"{MARKER}={storm} ".encode()
    seen = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
            if begin not in environment:
                continue
            with open(f"/proc/{name}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue  # the process has ended, or belongs to another user
        if state in (b"Z", b"X"):
            continue
        for value in environment.split(b"\0"):
            if value.startswith(begin):
                _, principal, session, run_id, host = value.decode().split()
                seen.append(
                    ProcessSeen(pid=int(name), principal=principal, session=session, run_id=run_id, host_pid=int(host))
                )
                break
    return seen


async def note_processes(recorder: StormRecorder, storm: str) -> None:
    """Record a list of the storm's live processes."""
    began_at = system_clock.monotonic()
    alive = await asyncio.to_thread(list_processes, storm)
    recorder.note(ProcessesListed, began_at=began_at, alive=tuple(alive))


async def until_gone(recorder: StormRecorder, storm: str, seconds: float) -> None:
    """Wait up to `seconds` until all processes of the storm have ended; then record the list of processes."""
    deadline = system_clock.monotonic() + seconds
    while await asyncio.to_thread(list_processes, storm) and system_clock.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await note_processes(recorder, storm)


def in_tree(node: TreeNode) -> int:
    """Return the number of runs, scopes, tasks, threads and processes in a task tree."""
    own = 0 if node.kind in ("host", "session") else 1
    return own + sum(in_tree(child) for child in node.children)


def _children(pid: int) -> Iterator[int]:
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children = file.read().split()
        except OSError:
            continue  # the thread has ended
        for child in children:
            yield int(child)


def _connections() -> set[str]:
    """Return the machine's TCP sockets as ``socket:[inode]``, the form of the links in ``/proc/<pid>/fd``."""
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError), open(f"/proc/net/{table}", encoding="ascii") as file:
            found.update(f"socket:[{line.split()[9]}]" for line in file.readlines()[1:])
    return found


def _descriptors(pid: int) -> int:
    """Count the open descriptors of a process, except TCP sockets, because their number depends on the clients.

    Return 0 if this user may not see them: a server hides them from all but root.
    """
    connections = _connections()
    count = 0
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return 0
    for descriptor in descriptors:
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{pid}/fd/{descriptor}") not in connections
    return count


def process_figures(pid: int) -> dict[str, int]:
    """Return a process's numbers of threads, descriptors and children. Raises `OSError` if the process has ended."""
    return {
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "descriptors": _descriptors(pid),
        "processes": len(list(_children(pid))),
    }


async def server_figures(admin: Client, incarnation: int, pid: int, moment: str, recorder: StormRecorder) -> None:
    """Record the statistics of a server on this machine. Raises `HoldfastError` if it does not answer."""
    tree = await admin.tree(everybody=True)
    recorder.note(
        StatisticsRead,
        incarnation=incarnation,
        moment=moment,
        running=len([run for session in tree.children for run in session.children]),
        in_tree=in_tree(tree),
        **process_figures(pid),
    )


def own_figures(host: Host, incarnation: int, moment: str, recorder: StormRecorder) -> None:
    """Record the statistics of a host that runs in this process."""
    statistics = host.statistics()
    running: dict[str, int] = {}
    for run in host.live.values():
        running[run.actor.principal] = running.get(run.actor.principal, 0) + 1
    recorder.note(
        StatisticsRead,
        incarnation=incarnation,
        moment=moment,
        running=statistics.running,
        waiting=statistics.awaiting_slot,
        in_tree=in_tree(host.tree()),
        tasks=len(asyncio.all_tasks()),
        running_of=tuple(sorted(running.items())),
        **{**process_figures(os.getpid()), "threads": threading.active_count()},
    )
