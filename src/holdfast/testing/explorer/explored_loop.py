"""The loop of an explored schedule: a stepped loop, and the threads that belong to the schedule."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, Literal, TypeVar, TypeVarTuple

from holdfast.runtime.adoption.executor_internals import default_executor
from holdfast.testing.explorer.controlled_threads import ThreadController, strands_here
from holdfast.testing.explorer.stepped_loop import Chooser, LoopStep, SteppedLoop

__all__ = ["ExploredLoop"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class ExploredLoop(SteppedLoop):
    """A stepped loop, together with the threads of the schedule.

    Parameters:
        chooser: picks the next step.
        max_steps, late_s, tasks: see `SteppedLoop`.
    """

    def __init__(
        self,
        chooser: Chooser,
        *,
        max_steps: int,
        late_s: float = 0.0,
        tasks: Literal["ordinary", "eager"] = "ordinary",
    ) -> None:
        super().__init__(chooser, max_steps=max_steps, late_s=late_s, tasks=tasks)
        self.strands = ThreadController(self)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback from any thread of the schedule; other threads may run before the call returns."""
        if threading.get_ident() == self.home:
            return self.call_soon(callback, *args, context=context)
        strands = self.strands
        if strands_here() is not strands:
            self.refuse_thread()
        self.check_open()
        step = LoopStep(0.0, callback, args, self, context, self.callbacks_of(self.running_actor))
        self.make_runnable(step)
        strands.pause()
        return step

    def close(self) -> None:
        """Close the loop as `SteppedLoop` does, then end the schedule's threads."""
        super().close()
        self.strands.unwind()

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        """Run ``func`` in the runtime's own executor, whose threads belong to the schedule; refuse other executors."""
        from holdfast.runtime.adoption.tasks import PoolExecutor

        if executor is None and isinstance(default_executor(self), PoolExecutor):
            return asyncio.BaseEventLoop.run_in_executor(self, None, func, *args)
        self.refuse_thread()

    def left_over(self) -> str:
        """Describe the tasks and threads that the test left unfinished."""
        threads = sum(strand.must_end for strand in self.strands.left())
        parts = (super().left_over(), f"{threads} of its threads" if threads else "")
        return " and ".join(part for part in parts if part)

    def described(self) -> list[str]:
        """Describe the unfinished tasks and threads and where each waits."""
        blocked = [self.strands.blocked] if self.strands.blocked else []
        return [*super().described(), *blocked, *(strand.described() for strand in self.strands.left())]

    def unretrieved(self) -> list[dict[str, Any]]:
        """Return errors from callbacks, and from tasks and threads whose result was never retrieved."""
        return super().unretrieved() + self.strands.unretrieved()

    def unwind(self, steps: int = 10_000) -> None:
        """Cancel the remaining tasks as `SteppedLoop` does, then end the schedule's threads."""
        super().unwind(steps)
        self.strands.unwind()
