"""The exit codes of every command."""

from __future__ import annotations

from enum import IntEnum

from holdfast import errors

__all__ = ["Exit", "exit_of"]


class Exit(IntEnum):
    """What an exit code says."""

    OK = 0
    """done"""
    FAILED = 1
    """the run failed, a promise was broken, a check found a fault, or something is left that should be gone"""
    USAGE = 2
    """an argument, setting or agent that cannot work"""
    UNREACHABLE = 3
    """the server does not answer"""
    REFUSED = 4
    """the server refused: busy, full, not found, not allowed, draining"""
    INTERRUPTED = 5
    """the run was interrupted or its message withdrawn; for serve: it was forced to end"""
    WAITED = 6
    """the wait is over before the work is; the work goes on"""
    STORE = 7
    """the store cannot be used"""


def exit_of(error: errors.HoldfastError) -> Exit:
    """The exit code for an error."""
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
