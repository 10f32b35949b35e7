"""Why a server did not start: its exit code, and what it told."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

__all__ = ["Refusal", "read_refusal"]


class Refusal(NamedTuple):
    """A start that came to nothing.

    Parameters:
        exited: the exit code.
        code, message, hint: the error that the server told; no code where it ended with something else, which is the
            message then.
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
    """The line of ``holdfast serve --json`` that says why it does not start."""

    error: _Error


def read_refusal(exited: int, said: str) -> Refusal:
    """A refused start from the exit code and from what the server wrote to stderr, where the last error is why."""
    for line in reversed(said.splitlines()):
        try:
            error = msgspec.json.decode(line, type=_Told).error
        except msgspec.MsgspecError:
            continue
        return Refusal(exited, error.code, error.message, error.hint or "")
    return Refusal(exited, "", said)
