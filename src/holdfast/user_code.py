"""Tell the user's code in a stack or a traceback from Holdfast, Python and installed packages."""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, MethodType

__all__ = ["defined_at", "is_installed", "nearest", "raised_at", "user_frames"]

_HOLDFAST = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FOLDERS = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_INSTALLED = tuple({f"{os.path.abspath(sysconfig.get_path(name))}{os.sep}" for name in _FOLDERS})


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, Holdfast or an installed package rather than to the user's code."""
    return file.startswith(("<", _HOLDFAST, *_INSTALLED))


def user_frames(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames in the user's code, in the given order."""
    return [frame for frame in frames if not is_installed(frame.filename)]


def raised_at(error: BaseException) -> str | None:
    """Return the file and line of the user's code that raised an error, such as ``hello.py, line 7``.

    Return None if the traceback has no frame in the user's code.
    """
    walked = traceback.walk_tb(error.__traceback__)
    frames = user_frames(traceback.StackSummary.extract(walked, lookup_lines=False))
    return f"{nearest(Path(frames[-1].filename))}, line {frames[-1].lineno}" if frames else None


def defined_at(function: object) -> str | None:
    """Return the file and line of a function, or of the function that an object calls; None if it has no code."""
    while isinstance(function, functools.partial):
        function = function.func
    if callable(function) and not isinstance(function, (FunctionType, MethodType)):
        function = type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return None if code is None else f"{nearest(Path(code.co_filename))}, line {code.co_firstlineno}"


def nearest(path: Path) -> str:
    """Return the shorter of a file's relative and absolute paths; as given if the current folder no longer exists."""
    try:
        return min(os.path.relpath(path), str(path), key=len)
    except OSError:
        return str(path)
