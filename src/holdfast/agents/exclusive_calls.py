"""The exclusive calls of a run that are still running; an abandoned call is included until its function returns."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ExclusiveCalls"]


class ExclusiveCalls:
    """The exclusive calls of a run and its children. Only `begin` may be called from any thread; call the other methods
    on the run's event loop."""

    __slots__ = ("_callbacks", "_names")

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._callbacks: list[Callable[[], object]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the open calls."""
        return tuple(self._names.values())

    def begin(self, call_id: str, name: str) -> None:
        """Add a call."""
        self._names[call_id] = name

    def end(self, call_id: str) -> None:
        """Remove a call, if present. When the last call has been removed, run the callbacks."""
        self._names.pop(call_id, None)
        while self._callbacks and not self._names:
            self._callbacks.pop()()

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Run the callback when all exclusive calls have ended, or at once if all have ended already."""
        if self._names:
            self._callbacks.append(callback)
        else:
            callback()
