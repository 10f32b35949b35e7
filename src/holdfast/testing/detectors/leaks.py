"""Detector of leaks: unfinished tasks, threads, file descriptors and child processes that a test leaves behind.

Resources that the process keeps for reuse are not leaks. Holdfast keeps its dispatcher and process threads, the idle
threads of its pools, and the process that starts programs. The standard library keeps the idle threads of a loop's own
executor, and ``multiprocessing``'s resource tracker and fork server. uvloop keeps its signal pipe. Where possible, the
detector starts these resources before its first snapshot, so that it does not mistake them for leaks.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal, get_args

import psutil

from holdfast.runtime.adoption.executor_internals import waits_for_a_call
from holdfast.runtime.adoption.multiprocessing_internals import kept_descriptors, kept_pids
from holdfast.runtime.process_host import process_host
from holdfast.runtime.processes.seal import seal
from holdfast.runtime.thread_pool import runs_a_call, thread_stack
from holdfast.testing.asyncio_internals import Cancel, cancelling_all_tasks_with

__all__ = ["KINDS", "Inventory", "LeakKind", "left_to_runners"]

LeakKind = Literal["tasks", "threads", "fds", "processes"]
KINDS: tuple[LeakKind, ...] = get_args(LeakKind)

_PATIENCE_S = 1.0
_POLL_S = 0.01
_STDLIB = os.path.dirname(os.__file__) + os.sep
_ANYIOS = "TestRunner._run_tests_and_fixtures"
"""Name of the coroutine in which anyio's pytest plugin runs tests; anyio's test runner ends its task."""
_TURNS = 10
"""Maximum number of loop iterations in which unfinished tasks may end by themselves."""
_DESCRIPTORS = ("/proc/self/fd", "/dev/fd")


class Inventory:
    """A snapshot of this process's resources.

    Parameters:
        kinds: kinds of resources to check.
    """

    def __init__(self, kinds: Iterable[LeakKind] = KINDS) -> None:
        self._kinds = tuple(kinds)
        if "processes" in self._kinds or "fds" in self._kinds:
            seal()  # as a host does: a zygote from before it is replaced, which would look like a leak
            process_host().start()
        if "fds" in self._kinds:
            _open_uvloops_pipe()
        self._there = self._look()

    def _look(self) -> dict[LeakKind, dict[object, str]]:
        return {kind: _LOOK[kind]() for kind in self._kinds}

    @contextmanager
    def passed_over(self) -> Iterator[None]:
        """Do not report resources created in this block, because they belong to a fixture with a wider scope."""
        before = self._look()
        yield
        for kind, found in self._look().items():
            self._there[kind].update((key, told) for key, told in found.items() if key not in before[kind])

    def left_since(self, *, patience_s: float = _PATIENCE_S) -> list[str]:
        """Return a line for each new resource that still exists after ``patience_s`` seconds of real time."""
        deadline = time.perf_counter() + patience_s
        while True:
            left = [
                f"{kind}: {told}"
                for kind in self._kinds
                for key, told in _LOOK[kind]().items()
                if key not in self._there[kind] and key is not threading.current_thread()
            ]
            if not left or time.perf_counter() > deadline:
                return left
            gc.collect()  # objects that only a reference cycle keeps alive are not leaks
            time.sleep(_POLL_S)


@contextmanager
def left_to_runners() -> Iterator[list[str]]:
    """Yield a list that receives a line for each task that `asyncio.run` and `asyncio.Runner` find unfinished.

    The runners cancel such tasks, so an `Inventory` does not see them, although the test did not end them itself. The
    loop first runs for a few more iterations, so that tasks that are about to end are not listed.
    """
    left: list[str] = []

    async def turn() -> None:
        await asyncio.sleep(0)

    def look_first(cancel_all: Cancel, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(_TURNS):
            if not asyncio.all_tasks(loop):
                break
            loop.run_until_complete(turn())
        left.extend(
            f"tasks: {task.get_name()!r} was not done when its loop closed, which cancelled it: {task.get_coro()!r}"
            for task in asyncio.all_tasks(loop)
            if getattr(task.get_coro(), "__qualname__", "") != _ANYIOS
        )
        cancel_all(loop)

    with cancelling_all_tasks_with(look_first):
        yield left


@cache
def _open_uvloops_pipe() -> None:
    """Open the signal pipe that uvloop's first loop opens and that stays open for later loops."""
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        uvloop.new_event_loop().close()


def _tasks() -> dict[object, str]:
    pending = (one for one in gc.get_objects() if isinstance(one, asyncio.Task) and not one.done())
    return {id(task): f"{task.get_name()!r} is not done: {task.get_coro()!r}" for task in pending}


def _threads() -> dict[object, str]:
    return {
        thread: f"{thread.name!r} still runs{', as a daemon' if thread.daemon else ''}{_place(thread)}"
        for thread in threading.enumerate()
        if not _waits_for_its_next_use(thread)
    }


def _place(thread: threading.Thread) -> str:
    """Return the line that the thread is executing, preferably the innermost one outside the standard library."""
    stack = thread_stack(thread)[::-1]
    if not stack:
        return ""
    return f", now at {next((line for line in stack if not line.startswith(_STDLIB)), stack[0])}"


def _waits_for_its_next_use(thread: threading.Thread) -> bool:
    """Whether a thread is an idle thread of Holdfast or of a loop's own executor."""
    frame = sys._current_frames().get(thread.ident or 0)
    codes = [one.f_code for one, _ in traceback.walk_stack(frame)] if frame is not None else []
    if thread.name.startswith("holdfast"):
        return not runs_a_call(codes)
    return thread.name.startswith("asyncio_") and bool(codes) and waits_for_a_call(codes[0])


def _descriptors() -> dict[object, str]:
    folder = next((path for path in _DESCRIPTORS if os.path.isdir(path)), None)
    if folder is None:
        return {}
    kept = kept_descriptors()
    found: dict[object, str] = {}
    for number in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{number}")
        except OSError:
            continue  # the descriptor that listed the folder, or one that was closed meanwhile
        if int(number) in kept:
            continue
        found[number, target] = f"descriptor {number} is open: {target}"
    return found


def _processes() -> dict[object, str]:
    """Describe this process's children, except those kept for reuse, and the programs that Holdfast started."""
    found: dict[object, str] = {}
    kept = kept_pids()
    children = psutil.Process().children()
    for child in [*children, *(one for keeper in children if keeper.pid in kept for one in _children_of(keeper))]:
        if child.pid in kept:
            continue
        try:
            ended = " has ended, but was never waited for" if child.status() == psutil.STATUS_ZOMBIE else " still runs"
            found[child.pid, child.create_time()] = f"{child.pid} ({child.name()}){ended}"
        except psutil.NoSuchProcess:
            continue
    for number in range(process_host().statistics().live - process_host().workers.statistics().idle):
        found["program", number] = "a program that Holdfast started still runs"
    return found


def _children_of(keeper: psutil.Process) -> list[psutil.Process]:
    try:
        return keeper.children()
    except psutil.NoSuchProcess:
        return []


_LOOK = {"tasks": _tasks, "threads": _threads, "fds": _descriptors, "processes": _processes}
