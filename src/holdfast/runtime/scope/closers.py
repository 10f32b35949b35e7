"""Callbacks that run after the grace period and free the resources on which members of a scope block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Closer", "Closers"]


class Closer:
    """Callback that frees resources after the grace period; created by `Scope.add_closer`. ``close()`` removes it."""

    __slots__ = ("_closers", "_fn", "_loop")

    def __init__(self, closers: dict[Closer, None], fn: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._closers = closers
        self._fn = fn
        self._loop = loop

    def close(self) -> None:
        """Remove the callback; it will not run. Callable from any thread."""
        self._closers.pop(self, None)

    def run(self) -> None:
        """Run the callback; if it raises, report the error to the loop's exception handler and continue."""
        try:
            self._fn()
        except Exception as error:
            self._loop.call_exception_handler({"message": f"closer {self._fn!r} raised", "exception": error})


class Closers:
    """The closers of a scope. All methods are callable from any thread."""

    __slots__ = ("_closers",)

    def __init__(self) -> None:
        self._closers: dict[Closer, None] = {}

    def add(self, fn: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Closer:
        """Add a callback, whose errors are reported to the exception handler of ``loop``."""
        closer = Closer(self._closers, fn, loop)
        self._closers[closer] = None
        return closer

    def take(self, closer: Closer) -> bool:
        """Remove a closer, which the caller must run; return False if the closer was already removed."""
        return self._closers.pop(closer, 0) is None

    def take_all(self) -> list[Closer]:
        """Remove and return all closers, which the caller must run; the closer added last is first."""
        taken = []
        while self._closers:
            closer, _ = self._closers.popitem()
            taken.append(closer)
        return taken
