"""Exit codes of all commands."""

from __future__ import annotations

from enum import IntEnum

from holdfast import errors

__all__ = ["Exit", "exit_of"]


class Exit(IntEnum):
    """Meaning of an exit code."""

    OK = 0
    """success"""
    FAILED = 1
    """the run failed, a promise was broken, a check found a fault, or some work could not be stopped"""
    USAGE = 2
    """an invalid argument, setting or agent"""
    UNREACHABLE = 3
    """the server does not answer"""
    REFUSED = 4
    """the server refused the request: busy, full, not found, not allowed, draining"""
    INTERRUPTED = 5
    """the run was interrupted, its message was withdrawn, or Ctrl-C ended the command; for serve: a second signal"""
    WAITED = 6
    """the wait timed out; the work continues"""
    STORE = 7
    """the store is unusable"""


def exit_of(error: errors.HoldfastError) -> Exit:
    """Return the exit code for an error."""
    match error:
        case errors.ConfigurationError():
            return Exit.USAGE
        case errors.ServerUnreachable():
            return Exit.UNREACHABLE
        case errors.WaitExpired():
            return Exit.WAITED
        case errors.RunInterrupted() | errors.MessageWithdrawn():
            return Exit.INTERRUPTED
        case errors.RunError():
            return Exit.FAILED
        case errors.StorageError():
            return Exit.STORE
        case _:
            return Exit.REFUSED
