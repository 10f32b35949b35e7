"""A store whose writes fail when a test says so: refused before they were made, or made and their answer lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from holdfast.errors import StorageError, StoreFull
from holdfast.storage import MemoryStore

WRITES = frozenset(
    (
        "send",
        "claim",
        "append_all",
        "commit_run",
        "interrupt",
        "stop_session",
        "withdraw",
        "delete_session",
        "restart",
        "steer",
        "suspend",
        "answer",
        "park",
        "edit_history",
        "put_schedule",
        "pause_schedule",
        "delete_schedule",
        "fire_schedule",
    )
)

Fate = Literal["done", "refused", "lost"]


class Unreliable:
    """Stands before a `MemoryStore`: a `Store` in all but its class.

    Parameters:
        fate: what becomes of the next write of the named verb.
        store: the one that keeps everything.
    """

    def __init__(self, fate: Callable[[str], Fate], store: MemoryStore | None = None) -> None:
        self.fate = fate
        self.store = store or MemoryStore(yielding=True)
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.store, name)
        return self._watched(name, verb) if name in WRITES else verb

    def _watched(self, name: str, verb: Callable[..., asyncio.Future[Any]]) -> Callable[..., asyncio.Future[Any]]:
        def write(*values: Any, **named: Any) -> asyncio.Future[Any]:
            fate = self.fate(name)
            if fate == "done":
                return verb(*values, **named)
            self.failed += 1
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if fate == "refused":
                future.set_exception(StoreFull("the disk is full; nothing was written"))
                return future

            def lose(done: asyncio.Future[Any]) -> None:
                error = done.exception() or StorageError("the answer was lost")
                if not future.done():
                    future.set_exception(error)

            verb(*values, **named).add_done_callback(lose)
            return future

        return write


def failing_at_random(random: Callable[[], float], *, chance: float, fate: Fate, times: int) -> Callable[[str], Fate]:
    """Each write fails with that chance, until so many have failed."""
    left = times

    def decide(verb: str) -> Fate:
        nonlocal left
        if left and random() < chance:
            left -= 1
            return fate
        return "done"

    return decide
