"""A value that is set once, from any thread, and awaited by tasks of any loop and by threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Oneshot"]

T = TypeVar("T")


class Oneshot(Generic[T]):
    """A value that is set once and can be awaited by tasks of any loop and by threads."""

    __slots__ = ("_callbacks", "_lock", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self._callbacks: list[Callable[[], object]] | None = []
        self._lock = threading.Lock()

    def set(self, value: T) -> bool:
        """Set the value and wake all waiters; if a value was already set, do nothing and return False."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
            if callbacks is None:
                return False
            self.value = value
        for callback in callbacks:
            callback()
        return True

    def add(self, callback: Callable[[], object]) -> bool:
        """Register ``callback`` to be called by the thread that sets the value; return False if it is already set."""
        with self._lock:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            return True

    def discard(self, callback: Callable[[], object]) -> None:
        """Remove a callback; does nothing if the value is already set."""
        with self._lock:
            if self._callbacks is not None and callback in self._callbacks:
                self._callbacks.remove(callback)

    async def wait(self) -> T:
        """Wait until the value is set, and return the value."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def callback() -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed and has no waiters any more
                loop.call_soon_threadsafe(wake)

        if self.add(callback):
            try:
                await woken
            finally:
                self.discard(callback)
        return self._get()

    def wait_blocking(self, timeout_s: float | None = None) -> T:
        """Block this thread until the value is set, and return the value.

        Parameters:
            timeout_s: timeout in seconds; None waits indefinitely.

        Raises:
            TimeoutError: the value was not set within ``timeout_s`` seconds.
        """
        woken = threading.Event()
        if self.add(woken.set):
            try:
                if not woken.wait(timeout_s):
                    raise TimeoutError
            finally:
                self.discard(woken.set)
        return self._get()

    def _get(self) -> T:
        assert self.value is not None
        return self.value
