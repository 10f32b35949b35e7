"""Failpoints: named points in the code at which a test can kill the process or raise an error.

A module registers its failpoints on import, and calls `hit` at each of them. If the environment contains
``HOLDFAST_FAILPOINT=name``, the process kills itself with SIGKILL at the first hit of that failpoint, or at the third
hit with ``name:3``. Within a test process, `arm` can raise an error instead, and `attend` calls a function at every
hit. If no failpoint is armed, a call of `hit` costs one read of a global variable.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.errors import ConfigurationError

__all__ = ["VARIABLE", "arm", "armed", "attend", "hit", "names", "register"]

VARIABLE = "HOLDFAST_FAILPOINT"

_names: set[str] = set()


class _Armed:
    """An armed failpoint, which acts at its ``nth`` hit."""

    __slots__ = ("error", "left", "name")

    def __init__(self, name: str, nth: int, error: BaseException | None) -> None:
        self.name = name
        self.left = nth
        self.error = error

    def passed(self, name: str) -> None:
        if self.name != name:
            return
        self.left -= 1
        if self.left != 0:
            return
        if self.error is not None:
            raise self.error
        os.kill(os.getpid(), signal.SIGKILL)


class _Attended:
    """All failpoints, while a test observes every hit."""

    __slots__ = ("passed",)
    name = "*"

    def __init__(self, passed: Callable[[str], None]) -> None:
        self.passed = passed


def _from_environment() -> _Armed | None:
    value = os.environ.get(VARIABLE, "")
    if not value:
        return None
    name, _, nth = value.partition(":")
    if nth and not (nth.isascii() and nth.isdigit() and int(nth) > 0):
        raise ConfigurationError(
            f"{VARIABLE}={value!r} is not a valid failpoint", hint="use name or name:nth, such as name:3"
        )
    return _Armed(name, int(nth or "1"), None)


_armed: _Armed | _Attended | None = _from_environment()


def register(name: str) -> str:
    """Register a failpoint, and return its name. Modules call this on import."""
    _names.add(name)
    return name


def names() -> tuple[str, ...]:
    """Return the sorted names of the failpoints of all imported modules."""
    return tuple(sorted(_names))


def armed() -> str | None:
    """Return the name of the armed failpoint, ``*`` within `attend`, or None if no failpoint is armed.

    A failpoint that was armed by the environment variable may not be registered yet.
    """
    return None if _armed is None else _armed.name


def hit(name: str) -> None:
    """Report that the code has reached a failpoint. Does nothing if the failpoint is neither armed nor attended.

    Callable from any thread.
    """
    if _armed is not None:
        _armed.passed(name)


@contextmanager
def arm(name: str, *, error: BaseException | None, nth: int = 1) -> Iterator[None]:
    """Arm a failpoint within the block.

    Parameters:
        name: name of the failpoint.
        error: error to raise at the failpoint; None kills the process.
        nth: which hit of the failpoint kills the process or raises the error, counted from 1.

    Raises:
        ConfigurationError: if no imported module has registered the failpoint.
    """
    global _armed
    if name not in _names:
        raise ConfigurationError(f"unknown failpoint {name!r}", hint="see failpoints.names()")
    before, _armed = _armed, _Armed(name, nth, error)
    try:
        yield
    finally:
        _armed = before


@contextmanager
def attend(passed: Callable[[str], None]) -> Iterator[None]:
    """Call `passed` at every hit of any failpoint within the block.

    `passed` is called with the failpoint's name, in the thread that calls `hit`, and may block or raise. Within the
    block, a failpoint that was armed before has no effect.
    """
    global _armed
    before, _armed = _armed, _Attended(passed)
    try:
        yield
    finally:
        _armed = before
