"""A value that is set once, from any thread, and awaited by tasks of any loop and by threads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Oneshot"]

T = TypeVar("T")


class Oneshot(Generic[T]):
    """A value that is set once and can be awaited by tasks of any loop and by threads."""

    __slots__ = ("_callbacks", "_lock", "_waiters", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self._callbacks: list[Callable[[], object]] | None = []
        self._waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        self._lock = threading.Lock()

    def set(self, value: T) -> bool:
        """Set the value and wake all waiters; if a value was already set, do nothing and return False."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
            if callbacks is None:
                return False
            self.value = value
            self._waiters = {}
        for callback in callbacks:
            callback()
        return True

    def add(self, callback: Callable[[], object]) -> bool:
        """Register a callback that the setting thread will call; return False if the value is already set."""
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
        """Wait until the value is set, and return the value. All waiters of a loop are woken in one iteration of it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._callbacks is None:
                return self._get()
            waiters = self._waiters.get(loop)
            if waiters is None:
                waiters = self._waiters[loop] = []
                self._callbacks.append(functools.partial(_wake_all, loop, waiters))
            woken = loop.create_future()
            waiters.append(woken)
        try:
            await woken
        finally:
            waiters.remove(woken)
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


def _wake_all(loop: asyncio.AbstractEventLoop, waiters: list[asyncio.Future[None]]) -> None:
    """Wake all waiters of one loop, from any thread.

    If each waiter were woken by a call of its own, the setting thread could pause between two of them, and a waiter
    could end many iterations of the loop before another one learns of the value.
    """
    with contextlib.suppress(RuntimeError):  # that loop is closed and has no waiters any more
        loop.call_soon_threadsafe(_release, waiters)


def _release(waiters: list[asyncio.Future[None]]) -> None:
    for woken in waiters:
        if not woken.done():
            woken.set_result(None)
