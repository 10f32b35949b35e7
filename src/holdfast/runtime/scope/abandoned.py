"""Tasks and threads that a stop abandoned; the task tree shows them while they run, even if their scope is closed."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Literal

from holdfast.runtime.scope.handle import LivenessCheck, Member

__all__ = ["AbandonedMember"]


class AbandonedMember:
    """An abandoned task or thread, referenced weakly.

    Parameters:
        name: name of the member in the receipt.
        started_at: start time on the monotonic clock, in seconds; 0 if unknown.
        living: task, thread or call to watch; a call if its thread belongs to a pool of foreign code.
    """

    __slots__ = ("_living", "kind", "name", "started_at")

    def __init__(self, name: str, started_at: float, living: asyncio.Task[Any] | LivenessCheck) -> None:
        self.kind: Literal["task", "thread"] = "task" if isinstance(living, asyncio.Future) else "thread"
        self.name = name
        self.started_at = started_at
        self._living: weakref.ref[Any] = weakref.ref(living)

    @property
    def is_alive(self) -> bool:
        """Whether the task or thread still runs. Callable from any thread."""
        living = self._living()
        if living is None:
            return False
        return bool(living.is_alive() if self.kind == "thread" else not living.done())

    def member(self) -> Member:
        """Return a snapshot of the task or thread, in the state ``abandoned``."""
        return Member(kind=self.kind, name=self.name, started_at=self.started_at, state="abandoned")
