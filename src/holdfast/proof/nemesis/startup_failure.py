"""Failed starts of a server: the exit code, and the error that it reported."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

__all__ = ["StartupFailure", "read_startup_failure"]


class StartupFailure(NamedTuple):
    """A failed start.

    Parameters:
        exited: the exit code.
        code, message, hint: the error that the server reported; if it reported none, ``code`` is empty and ``message``
            is its output.
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
    """The line of ``holdfast serve --json`` with the reason why it does not start."""

    error: _Error


def read_startup_failure(exited: int, said: str) -> StartupFailure:
    """Return a failed start from the exit code and the server's stderr; the last error there is the reason."""
    for line in reversed(said.splitlines()):
        try:
            error = msgspec.json.decode(line, type=_Told).error
        except msgspec.MsgspecError:
            continue
        return StartupFailure(exited, error.code, error.message, error.hint or "")
    return StartupFailure(exited, "", said)
