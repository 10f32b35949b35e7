"""Failures of a schedule and their report: the tasks, where they wait, and the numbers that replay the schedule."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Literal

from holdfast.testing.asyncio_internals import awaited_future
from holdfast.testing.explorer.replay import Replay

__all__ = [
    "Deadlock",
    "FailureKind",
    "Livelock",
    "NotExplorable",
    "ScheduleFailure",
    "describe_task",
    "show_replay",
]

FailureKind = Literal[
    "error", "callback", "deadlock", "livelock", "leak", "unretrieved", "not_explorable", "nondeterminism"
]

_SHOWN = 200


class Deadlock(Exception):  # noqa: N818
    """Nothing can run and no timer is set."""


class Livelock(Exception):  # noqa: N818
    """The schedule took more steps than allowed."""


class NotExplorable(RuntimeError):
    """The code under test used a real thread, a real process or real I/O on a loop that does not support it."""


class ScheduleFailure(AssertionError):
    """A schedule of the explored test failed. The exception that the test raised, if any, is the ``__cause__``.

    Parameters:
        kind: ``error`` (the test raised), ``callback`` (a loop callback raised), ``deadlock`` (nothing can run and no
            timer is set), ``livelock`` (more than ``max_steps`` steps), ``leak`` (tasks or threads were unfinished at
            the end of the test), ``unretrieved`` (the error of a task or thread was never retrieved),
            ``not_explorable`` (a real thread, process or socket was used), ``nondeterminism`` (the same choices gave
            another result).
        text: description of the failure.
        replay: the choices of the schedule, to be passed to ``explore(test, replay=...)``.
        schedules: number of schedules that were run, including the failing schedule.
        tasks: descriptions of the unfinished tasks and threads, each with its name and the place where it waits.
        origin: end of the message, with the last steps and how to replay the schedule.
        recorded: the schedule with everything needed to run it again; ``recorded.save("it.json")`` writes it to a file.
    """

    def __init__(
        self,
        kind: FailureKind,
        text: str,
        *,
        replay: Sequence[int] = (),
        schedules: int = 1,
        tasks: Sequence[str] = (),
        origin: str = "",
        recorded: Replay | None = None,
    ) -> None:
        self.kind: FailureKind = kind
        self.replay = list(replay)
        self.schedules = schedules
        self.tasks = tuple(tasks)
        self.recorded = recorded
        lines = [f"{kind}: {text}", *(f"  {entry}" for entry in self.tasks)]
        if origin:
            lines.append(origin)
        super().__init__("\n".join(lines))


def show_replay(choices: Sequence[int]) -> str:
    """Return the choices as Python source, truncated after the first 200."""
    if len(choices) <= _SHOWN:
        return repr(list(choices))
    head = ", ".join(map(str, choices[:_SHOWN]))
    return f"[{head}, ...] ({len(choices)} numbers: take them from the failure's .replay)"


def describe_task(task: asyncio.Task[object]) -> str:
    """Return the task's name, and the chain of coroutines down to the place where the task waits."""
    places: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        frame: FrameType | None = None
        code: CodeType | None = None
        following: object = None
        for prefix, chain in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if hasattr(awaited, f"{prefix}_code"):
                frame = getattr(awaited, f"{prefix}_frame")
                code = getattr(awaited, f"{prefix}_code")
                following = getattr(awaited, chain)
                break
        if frame is None or code is None:
            break
        places.append(f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
        awaited = following
    where = " > ".join(places) if places else "not started"
    waits_for = awaited_future(task)
    whom = f", waits for task {waits_for.get_name()!r}" if isinstance(waits_for, asyncio.Task) else ""
    return f"task {task.get_name()!r} at {where}{whom}"
