"""Errors of scopes, their processes, and queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors.base import HoldfastError, LimitExceeded

if TYPE_CHECKING:
    from holdfast.protocol.stopping import Cause

__all__ = ["Interrupted", "ProcessEnded", "QueueClosed", "QueueEmpty", "QueueFull", "ScopeClosed"]


class Interrupted(BaseException):
    """The surrounding scope was interrupted; ``cause`` has the reason.

    This is a ``BaseException``, so that ``except Exception`` in an agent or tool does not swallow it. It is not a
    ``CancelledError``, because a task that awaits an interrupted task must not look cancelled itself.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(
            f"interrupted by {cause.kind}: {cause.reason}" if cause.reason else f"interrupted by {cause.kind}"
        )
        self.cause = cause


class QueueFull(LimitExceeded):
    """The queue is full; nothing was added."""

    code = "queue_full"
    default_hint = "wait until the queue has room, or raise the queue's limit"


class QueueClosed(HoldfastError):
    """The queue is closed and empty."""

    code = "queue_closed"


class QueueEmpty(HoldfastError):
    """The queue is empty."""

    code = "queue_empty"


class ProcessEnded(HoldfastError):
    """The process of an isolated call exited without returning a result."""

    code = "process_ended"
    default_hint = "read the standard error of the process; exit code -n means that signal n killed the process"


class ScopeClosed(HoldfastError):
    """The scope is stopping or closed and starts no new work."""

    code = "scope_closed"
