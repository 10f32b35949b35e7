"""Where a function of a run is run, what it is called, and what it carries along there."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any, Literal, assert_never

from holdfast.agents.journal import Branch, current_branch
from holdfast.agents.tool import Tool

__all__ = ["Placement", "importable", "name_of", "no_exit", "placed", "placement_of"]

Placement = Literal["loop", "thread", "process"]


def name_of(work: Callable[..., Any]) -> str:
    """A function's name, for people."""
    function = _function(work)
    return str(getattr(function, "__name__", type(function).__name__))


def placement_of(work: Callable[..., Any]) -> Placement:
    """``loop`` for what is async, ``thread`` for what may block."""
    function = _function(work)
    if not inspect.isroutine(function):
        function = type(function).__call__
    return "loop" if inspect.iscoroutinefunction(function) else "thread"


def placed(
    work: Callable[[], Any], branch: Branch, where: Placement, ended: Callable[[], object] | None = None
) -> Callable[[], Any]:
    """`work` with its own numbering of calls; in another process it makes none.

    Parameters:
        ended: called where the work ran, when it has ended, however that was; never for a process.
    """
    match where:
        case "process":
            return work
        case "loop":

            async def on_loop() -> Any:
                current_branch.set(branch)
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
                current_branch.set(branch)
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
    """The function as another process can import it: one that ``@tool`` made a tool of is found through that tool."""
    found: Any = sys.modules.get(getattr(work, "__module__", ""))
    for part in getattr(work, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    if isinstance(found, Tool) and found.work is work:
        return functools.partial(_work_of_tool, work.__module__, work.__qualname__)
    return work


def _work_of_tool(module: str, path: str, /, *args: Any, **kwargs: Any) -> Any:
    return operator.attrgetter(path)(importlib.import_module(module)).work(*args, **kwargs)


def _no_coroutine(work: Callable[..., Any], result: Any) -> Any:
    """The result of a sync function. A coroutine would be left undone, without a word."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"{name_of(work)} returned a coroutine that nobody awaits: give an async function, "
            "or functools.partial() of one"
        )
    return result


def no_exit(name: str, left: SystemExit) -> RuntimeError:
    """A function that wants to end the whole process ends itself."""
    return RuntimeError(f"{name} called sys.exit({left.code!r})")


def _function(work: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(work, functools.partial):
        work = work.func
    return work
