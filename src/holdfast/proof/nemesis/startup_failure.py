"""Failed starts of a server: the exit code, and the error that it reported."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

__all__ = ["StartupFailure", "read_startup_failure"]


class StartupFailure(NamedTuple):
    """A failed start.

    Parameters:
        exited: exit code of the server.
        code, message, hint: the error that the server reported; if it did not report an error, ``code`` is empty and
            ``message`` is the server's output.
    """

    exited: int
    code: str
    message: str
    hint: str = ""


class _Error(msgspec.Struct):
    code: str
    message: str
    hint: str | None = None


class _Told(msgspec.Struct):
    """The line of ``holdfast serve --json`` that gives the reason for a failed start."""

    error: _Error


def read_startup_failure(exited: int, said: str) -> StartupFailure:
    """Describe a failed start by its exit code and the last error that the server wrote to stderr."""
    for line in reversed(said.splitlines()):
        try:
            error = msgspec.json.decode(line, type=_Told).error
        except msgspec.MsgspecError:
            continue
        return StartupFailure(exited, error.code, error.message, error.hint or "")
    return StartupFailure(exited, "", said)
