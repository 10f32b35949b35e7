"""Named points at which a test can end the process or raise an error, to prove what survives there.

A module registers its points when it is imported and calls `hit` where they are. In the environment,
``HOLDFAST_FAILPOINT=name`` (or ``name:3`` for the third time) makes the process end itself there with SIGKILL, as if
the machine had lost power between two instructions. In process, `arm` raises an error instead, and `attend` calls a
function at every point. Unarmed, a `hit` is one look at a global.
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
    """A point that waits to be hit: the ``nth`` hit from now counts."""

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
    """Every point, for one who looks at all of them."""

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
            f"{VARIABLE}={value!r} is not a failpoint", hint="use name or name:nth, such as name:3"
        )
    return _Armed(name, int(nth or "1"), None)


_armed: _Armed | _Attended | None = _from_environment()


def register(name: str) -> str:
    """Make a point known; call it at import. Returns the name."""
    _names.add(name)
    return name


def names() -> tuple[str, ...]:
    """All points of the modules that are imported, sorted."""
    return tuple(sorted(_names))


def armed() -> str | None:
    """The name of the point that is armed, if any; ``*`` while all are attended.

    What is armed in the environment may not be registered yet.
    """
    return None if _armed is None else _armed.name


def hit(name: str) -> None:
    """Be at a point: nothing happens unless it is armed. Safe in any thread."""
    if _armed is not None:
        _armed.passed(name)


@contextmanager
def arm(name: str, *, error: BaseException | None, nth: int = 1) -> Iterator[None]:
    """Within the block, the ``nth`` hit of the point raises `error`, or ends the process if that is None.

    Raises:
        ConfigurationError: no module that is imported has such a point.
    """
    global _armed
    if name not in _names:
        raise ConfigurationError(f"there is no failpoint {name!r}", hint="failpoints.names() lists them")
    before, _armed = _armed, _Armed(name, nth, error)
    try:
        yield
    finally:
        _armed = before


@contextmanager
def attend(passed: Callable[[str], None]) -> Iterator[None]:
    """Within the block, call `passed` with the name of each point, in the thread that is there; it may wait or raise.

    Inside it no single point is armed.
    """
    global _armed
    before, _armed = _armed, _Attended(passed)
    try:
        yield
    finally:
        _armed = before
