"""What a test left behind: tasks that nobody ended, threads, file descriptors, child processes.

What Holdfast keeps for the next use in a process is no leak: its dispatcher and process threads, idle threads of its
pools, the process that starts programs for it. It is started before the first look, so that it is never mistaken.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterable
from typing import Literal, get_args

import psutil

from holdfast.runtime.processes import process_host

__all__ = ["KINDS", "Inventory", "LeakKind"]

LeakKind = Literal["tasks", "threads", "fds", "processes"]
KINDS: tuple[LeakKind, ...] = get_args(LeakKind)

_PATIENCE_S = 1.0
_POLL_S = 0.01
_OUR_THREADS = ("holdfast",)
_DESCRIPTORS = ("/proc/self/fd", "/dev/fd")


class Inventory:
    """What there is in this process now.

    Parameters:
        kinds: what to look at.
    """

    def __init__(self, kinds: Iterable[LeakKind] = KINDS) -> None:
        self._kinds = tuple(kinds)
        if "processes" in self._kinds or "fds" in self._kinds:
            process_host().start()
        self._there = {kind: _LOOK[kind]() for kind in self._kinds}

    def left_since(self, *, patience_s: float = _PATIENCE_S) -> list[str]:
        """What came since, and did not go within ``patience_s`` real seconds, each as a line for people."""
        deadline = time.perf_counter() + patience_s
        while True:
            left = [
                f"{kind}: {told}"
                for kind in self._kinds
                for key, told in _LOOK[kind]().items()
                if key not in self._there[kind]
            ]
            if not left or time.perf_counter() > deadline:
                return left
            gc.collect()  # what only a cycle holds is given back late, but is not lost
            time.sleep(_POLL_S)


def _tasks() -> dict[object, str]:
    pending = (one for one in gc.get_objects() if isinstance(one, asyncio.Task) and not one.done())
    return {id(task): f"{task.get_name()!r} is not done: {task.get_coro()!r}" for task in pending}


def _threads() -> dict[object, str]:
    return {
        thread: f"{thread.name!r} still runs{', as a daemon' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if not thread.name.startswith(_OUR_THREADS)
    }


def _descriptors() -> dict[object, str]:
    folder = next((path for path in _DESCRIPTORS if os.path.isdir(path)), None)
    if folder is None:
        return {}
    found: dict[object, str] = {}
    for number in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{number}")
        except OSError:
            continue  # the one that listed the folder, or closed meanwhile
        found[number, target] = f"descriptor {number} is open: {target}"
    return found


def _processes() -> dict[object, str]:
    """This process's own children (the one that starts programs for Holdfast was there before), and those programs."""
    found: dict[object, str] = {}
    for child in psutil.Process().children():
        try:
            ended = " has ended, but nobody waited for it" if child.status() == psutil.STATUS_ZOMBIE else " still runs"
            found[child.pid, child.create_time()] = f"{child.pid} ({child.name()}){ended}"
        except psutil.NoSuchProcess:
            continue
    for number in range(process_host().statistics().live - process_host().cells.statistics().idle):
        found["program", number] = "a program that Holdfast started still runs"
    return found


_LOOK = {"tasks": _tasks, "threads": _threads, "fds": _descriptors, "processes": _processes}
