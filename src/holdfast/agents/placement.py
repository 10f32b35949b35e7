"""Placement of a run's functions on the event loop, in a thread or in another process."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any, Literal, assert_never

from holdfast.agents.journal import CallPath, current_call_path
from holdfast.agents.tool import Tool

__all__ = ["Placement", "importable", "name_of", "no_exit", "placed", "placement_of"]

Placement = Literal["loop", "thread", "process"]


def name_of(work: Callable[..., Any]) -> str:
    """Return a function's display name."""
    function = _function(work)
    return str(getattr(function, "__name__", type(function).__name__))


def placement_of(work: Callable[..., Any]) -> Placement:
    """Return ``loop`` for an async function, and ``thread`` for a sync function, which may block."""
    function = _function(work)
    if not inspect.isroutine(function):
        function = type(function).__call__
    return "loop" if inspect.iscoroutinefunction(function) else "thread"


def placed(
    work: Callable[[], Any], branch: CallPath, where: Placement, ended: Callable[[], object] | None = None
) -> Callable[[], Any]:
    """Return a function that calls `work` with `branch` as its call path.

    For a process, return `work` itself, because a function in another process cannot make calls.

    Parameters:
        ended: called when the function has returned or raised, on the loop or thread where the function ran; not called
            for a process.
    """
    match where:
        case "process":
            return work
        case "loop":

            async def on_loop() -> Any:
                current_call_path.set(branch)
                try:
                    return await work()
                except SystemExit as left:
                    raise no_exit(name_of(work), left) from left
                finally:
                    if ended is not None:
                        ended()

            return on_loop
        case "thread":

            def in_thread() -> Any:
                current_call_path.set(branch)
                try:
                    return _no_coroutine(work, work())
                except SystemExit as left:
                    raise no_exit(name_of(work), left) from left
                except (KeyboardInterrupt, StopIteration) as error:  # one would end the loop, the other a coroutine
                    raise RuntimeError(f"{name_of(work)} raised {type(error).__name__}") from error
                finally:
                    if ended is not None:
                        ended()

            return in_thread
        case _:
            assert_never(where)


def importable(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a callable that calls the function and that another process can import.

    If ``@tool`` replaced the function in its module, the callable imports the tool and calls the tool's function.
    """
    found: Any = sys.modules.get(getattr(work, "__module__", ""))
    for part in getattr(work, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    if isinstance(found, Tool) and found.work is work:
        return functools.partial(_work_of_tool, work.__module__, work.__qualname__)
    return work


def _work_of_tool(module: str, path: str, /, *args: Any, **kwargs: Any) -> Any:
    return operator.attrgetter(path)(importlib.import_module(module)).work(*args, **kwargs)


def _no_coroutine(work: Callable[..., Any], result: Any) -> Any:
    """Return the result of a sync function, unless it is a coroutine, which would silently never run."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"{name_of(work)} returned a coroutine, which is never awaited: pass an async function, "
            "or functools.partial() of one"
        )
    return result


def no_exit(name: str, left: SystemExit) -> RuntimeError:
    """Return the error to raise instead of a function's `SystemExit`, which would end the whole process."""
    return RuntimeError(f"{name} called sys.exit({left.code!r})")


def _function(work: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(work, functools.partial):
        work = work.func
    return work
