"""Detector of leaks: unfinished tasks, threads, file descriptors and child processes that a test leaves behind.

Resources that the process keeps for reuse are not leaks. For Holdfast, these are its dispatcher and process threads,
idle threads of its pools, and the process that starts programs for it. For the standard library, they are idle threads
of a loop's own executor, and ``multiprocessing``'s resource tracker and fork server. For uvloop, it is the pipe for
signals. If possible, they are started before the first snapshot, so that they are never mistaken for leaks.
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
"""The task in which anyio's pytest plugin runs tests; its runner ends it."""
_TURNS = 10
"""Number of loop iterations that unfinished tasks get to end by themselves."""
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
        """Treat resources created in this block as existing before: they belong to a fixture with a wider scope."""
        before = self._look()
        yield
        for kind, found in self._look().items():
            self._there[kind].update((key, told) for key, told in found.items() if key not in before[kind])

    def left_since(self, *, patience_s: float = _PATIENCE_S) -> list[str]:
        """Return new resources that did not go away within ``patience_s`` real seconds, each described in one line."""
        deadline = time.perf_counter() + patience_s
        while True:
            left = [
                f"{kind}: {told}"
                for kind in self._kinds
                for key, told in _LOOK[kind]().items()
                if key not in self._there[kind] and key is not threading.current_thread()  # which looks
            ]
            if not left or time.perf_counter() > deadline:
                return left
            gc.collect()  # what only a cycle holds is given back late, but is not lost
            time.sleep(_POLL_S)


@contextmanager
def left_to_runners() -> Iterator[list[str]]:
    """Yield the tasks that `asyncio.run` and `asyncio.Runner` found unfinished, each described in one line.

    The runners cancel such tasks, so nothing is left, but the test did not end them itself. Before that, the tasks get
    a few more iterations of the loop.
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
    """Open uvloop's signal pipe now: the first loop opens it, and it stays open for later loops."""
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
    """Return where the thread is now, preferably outside the standard library."""
    stack = thread_stack(thread)[::-1]
    if not stack:
        return ""
    return f", now at {next((line for line in stack if not line.startswith(_STDLIB)), stack[0])}"


def _waits_for_its_next_use(thread: threading.Thread) -> bool:
    """Whether it is an idle thread of Holdfast or of a loop's own executor."""
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
            continue  # the one that listed the folder, or closed meanwhile
        if int(number) in kept:
            continue
        found[number, target] = f"descriptor {number} is open: {target}"
    return found


def _processes() -> dict[object, str]:
    """Return this process's children (but for the one that starts programs for Holdfast), and Holdfast's programs."""
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
