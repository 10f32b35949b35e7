"""The event loop of a command, which ends even if a task does not.

``asyncio.run`` waits, without a limit, for every task that is left. A task that ignores its cancellation would thus
keep the process alive after its stop has given it up.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.cli.output import note

__all__ = ["run_on_loop"]

T = TypeVar("T")

_ENDING_S = 1.0
"""Maximum time for tasks that are left to end after their cancellation, in seconds."""


def run_on_loop(
    work: Callable[[], Coroutine[Any, Any, T]], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> T:
    """Run `work()` on a new event loop as `asyncio.run` does, but leave tasks that do not end within a second.

    Raises `KeyboardInterrupt` if Ctrl-C was pressed. It may come before or after `work` too, and then nothing is
    printed about coroutines and tasks that had not begun.
    """
    runner = asyncio.Runner(loop_factory=loop_factory)
    loop = runner.get_loop()
    made: list[Coroutine[Any, Any, Any]] = []
    try:
        try:
            made.append(main := work())
            return runner.run(main)
        except KeyboardInterrupt:
            _do_not_report(loop)  # it may have cut a task anywhere
            raise
        finally:
            made.append(ending := _end_tasks())
            if left := runner.run(ending):
                note(f"did not wait for {', '.join(sorted(left))}: cancelled, but still running")
                _close_without_waiting(loop)
            else:
                runner.close()
    except asyncio.CancelledError:  # asyncio forgets a Ctrl-C that comes just before the first step
        raise KeyboardInterrupt from None
    except KeyboardInterrupt:
        _do_not_report(loop)
        raise
    finally:
        for coroutine in made:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()


async def _end_tasks() -> list[str]:
    """Cancel the other tasks of this loop, and return the names of those that did not end in time."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return []
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=_ENDING_S)
    return [task.get_name() for task in left]


def _close_without_waiting(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that still has tasks, which then never continue."""
    _do_not_report(loop)
    loop.close()


def _do_not_report(loop: asyncio.AbstractEventLoop) -> None:
    """Report no more about tasks of this loop: they were cut, or never continue."""
    loop.set_exception_handler(lambda _loop, _context: None)
