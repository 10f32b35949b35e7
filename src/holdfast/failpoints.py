"""Named points at which a test can kill the process or raise an error, to prove what survives.

A module registers its points at import and calls `hit` where they are. ``HOLDFAST_FAILPOINT=name`` in the environment
(or ``name:3`` for the third hit) makes the process send itself SIGKILL there, like a power failure between two
instructions. In process, `arm` raises an error instead, and `attend` calls a function at every point. If nothing is
armed, a `hit` costs one read of a global.
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
    """An armed point, which counts down to its ``nth`` hit."""

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
    """All points, for a test that observes every hit."""

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
    """Register a point at import time and return its name."""
    _names.add(name)
    return name


def names() -> tuple[str, ...]:
    """Return all points of the imported modules, sorted."""
    return tuple(sorted(_names))


def armed() -> str | None:
    """Return the name of the armed point, or None; ``*`` while all are attended.

    A point that is armed in the environment may not be registered yet.
    """
    return None if _armed is None else _armed.name


def hit(name: str) -> None:
    """Pass a point; does nothing unless it is armed or all points are attended. Callable from any thread."""
    if _armed is not None:
        _armed.passed(name)


@contextmanager
def arm(name: str, *, error: BaseException | None, nth: int = 1) -> Iterator[None]:
    """Within the block, raise `error` at the ``nth`` hit of the point, or kill the process if `error` is None.

    Raises:
        ConfigurationError: no imported module has such a point.
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
    """Within the block, call `passed` with the name of each point that is hit, in the thread that hits it.

    `passed` may block or raise. A point that was armed before is disarmed meanwhile.
    """
    global _armed
    before, _armed = _armed, _Attended(passed)
    try:
        yield
    finally:
        _armed = before
