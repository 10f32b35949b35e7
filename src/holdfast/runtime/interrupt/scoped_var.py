"""Context variables that follow the flow of a program: into tasks and threads, but not out of a generator.

If a generator sets a plain context variable, the value stays set in the code that iterates over the generator: between
two items, and forever if the generator is dropped before its end. `ScopedVar` records the generator that entered a
value, and makes the value visible only while that generator runs.

Invariants
- A value that a generator entered is visible in the generator, in the code that the generator calls and awaits, and in
  the tasks and threads that it starts. The value is never visible in the code that iterates over the generator, except
  that `@contextmanager` and `@asynccontextmanager` functions pass the value on to the body of their ``with``.
- After ``leave()``, a value is invisible in the whole task that entered it, whichever context ``leave()`` ran in.
- Values are invisible in a forked child, because they belong to the parent's loop and their locks may be held forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
from contextvars import Context, ContextVar, Token
from functools import partial
from types import FrameType
from typing import Generic, TypeVar

__all__ = ["GeneratorValue", "ScopedToken", "ScopedVar"]

T = TypeVar("T")

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_ENTERING = frozenset({"__enter__", "__aenter__"})
_HERE = (__file__, contextlib.__file__)


def _owner() -> object:
    """Return the running task, or the id of the thread if no task is running."""
    if asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
        if task is not None:
            return task
    return threading.get_ident()


def _iterated_frame() -> FrameType | None:
    """Return the frame of the generator whose own code enters a value now, or None outside generators."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_flags & _GENERATOR:
            behind = frame.f_back
            if behind is None or behind.f_code.co_filename != contextlib.__file__:
                return frame
            frame = behind
        elif code.co_name not in _ENTERING and code.co_filename not in _HERE:
            return None
        else:
            frame = frame.f_back
    return None


class GeneratorValue(Generic[T]):
    """A value that a generator entered, and the value of the surrounding code."""

    __slots__ = ("_frame", "_inner", "_outer", "_owner")

    def __init__(self, inner: T | None, outer: T | GeneratorValue[T] | None, frame: FrameType) -> None:
        self._inner = inner
        self._outer = outer
        self._frame: FrameType | None = frame
        self._owner: object = _owner()

    def value(self) -> T | None:
        """Return the value that is visible to the calling code."""
        frame = self._frame
        # The frame of a suspended generator has no caller.
        if frame is not None and (frame.f_back is not None or _owner() != self._owner):
            return self._inner
        outer = self._outer
        return outer.value() if isinstance(outer, GeneratorValue) else outer

    def close(self) -> None:
        """Mark the value as left, so that the surrounding code's value is visible again."""
        self._frame = None
        self._owner = None


class ScopedToken(Generic[T]):
    """Token for a value that was entered; ``leave()``, in any context, makes the previous value visible again."""

    __slots__ = ("_bound", "_token", "_variable")

    def __init__(
        self,
        variable: ContextVar[T | GeneratorValue[T] | None],
        token: Token[T | GeneratorValue[T] | None],
        bound: GeneratorValue[T] | None,
    ) -> None:
        self._variable = variable
        self._token = token
        self._bound = bound

    @property
    def frame(self) -> FrameType | None:
        """Frame of the generator that entered the value; None if no generator did."""
        return None if self._bound is None else self._bound._frame

    def leave(self) -> None:
        """Make the previous value visible again."""
        if self._bound is None:
            self._variable.reset(self._token)
            return
        self._bound.close()
        # A generator that was dropped half-way is closed by its loop, in a context of its own.
        with contextlib.suppress(ValueError):
            self._variable.reset(self._token)


class ScopedVar(Generic[T]):
    """A context variable that does not leak out of generators. All methods are callable from any thread.

    Parameters:
        name: name of the variable.
        in_generator: wrapper for a value that a generator entered.
    """

    __slots__ = ("_in_generator", "variable")

    def __init__(self, name: str, in_generator: type[GeneratorValue[T]] = GeneratorValue) -> None:
        self._in_generator = in_generator
        self.variable: ContextVar[T | GeneratorValue[T] | None] = ContextVar(name, default=None)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(self.variable.set, None))

    def get(self) -> T | None:
        """Return the value that is visible to the calling code, if any."""
        value = self.variable.get()
        return value.value() if isinstance(value, GeneratorValue) else value

    def get_in(self, context: Context) -> T | None:
        """Return the value that is visible to code that runs in `context`, if any."""
        value = context.get(self.variable)
        return value.value() if isinstance(value, GeneratorValue) else value

    def enter(self, value: T | None) -> ScopedToken[T]:
        """Make `value` visible until ``leave()`` of the returned token is called.

        Call this method in ``__enter__`` or ``__aenter__`` of a context manager.
        """
        frame = _iterated_frame()
        if frame is None:
            return ScopedToken(self.variable, self.variable.set(value), None)
        bound = self._in_generator(value, self.variable.get(), frame)
        return ScopedToken(self.variable, self.variable.set(bound), bound)
