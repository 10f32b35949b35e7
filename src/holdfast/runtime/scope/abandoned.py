"""Tasks and threads that a stop abandoned. The tree shows them while they run, although their scope is closed."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Literal

from holdfast.runtime.scope.handle import LivenessCheck, Member

__all__ = ["AbandonedMember"]


class AbandonedMember:
    """An abandoned task or thread, held by a weak reference.

    Parameters:
        name: name as in the receipt.
        started_at: as in `Member`.
        living: the task, the thread, or the call if its thread belongs to a pool of foreign code.
    """

    __slots__ = ("_living", "kind", "name", "started_at")

    def __init__(self, name: str, started_at: float, living: asyncio.Task[Any] | LivenessCheck) -> None:
        self.kind: Literal["task", "thread"] = "task" if isinstance(living, asyncio.Future) else "thread"
        self.name = name
        self.started_at = started_at
        self._living: weakref.ref[Any] = weakref.ref(living)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs. Callable from any thread."""
        living = self._living()
        if living is None:
            return False
        return bool(living.is_alive() if self.kind == "thread" else not living.done())

    def member(self) -> Member:
        """Return it as a member in the state ``abandoned``."""
        return Member(kind=self.kind, name=self.name, started_at=self.started_at, state="abandoned")
