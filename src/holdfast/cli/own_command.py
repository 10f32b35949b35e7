"""The text to type to run this command, or its Python, again."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["own_command", "own_python"]


def own_command(folder: str | os.PathLike[str] = ".") -> str:
    """Return ``holdfast`` if that runs this command, or else the shorter of its paths as seen from `folder`."""
    here = os.path.abspath(sys.argv[0])
    found = shutil.which("holdfast")
    if found is not None and Path(here).exists() and os.path.samefile(found, here):
        return "holdfast"
    return _shorter(here, folder)


def own_python(folder: str | os.PathLike[str] = ".") -> str:
    """Return ``python`` if that is the Python of this command, or else the shorter of its paths seen from `folder`."""
    found = shutil.which("python")  # the Pythons of environments are links to the same file, so folders are compared
    if found is not None and os.path.samefile(os.path.dirname(found), os.path.dirname(sys.executable)):
        return "python"
    return _shorter(sys.executable, folder)


def _shorter(path: str, folder: str | os.PathLike[str]) -> str:
    return min(os.path.relpath(path, folder), path, key=len)
