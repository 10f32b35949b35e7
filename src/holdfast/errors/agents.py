"""Errors of agents: their runs, models, tools, calls and children."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors.base import Conflict, HoldfastError, NotFound

if TYPE_CHECKING:
    from holdfast.protocol.supervision import BranchResult

__all__ = [
    "AgentCycle",
    "BranchesFailed",
    "CallFailed",
    "EventsMissed",
    "InvalidArguments",
    "ModelFailed",
    "NotDeterministic",
    "RunClosed",
    "RunError",
    "RunFailed",
    "RunInterrupted",
    "StreamEnded",
    "TooManyRestarts",
    "ToolFailed",
    "UnknownBranch",
]


class UnknownBranch(NotFound):
    """The route has no branch with that name."""

    code = "unknown_branch"


class AgentCycle(Conflict):
    """Delegation cycle: the agent is already handling this request."""

    code = "agent_cycle"
    default_hint = "let one of the agents do the work itself, or delegate only part of the work"


class RunError(HoldfastError):
    """The run that took the message did not complete."""

    code = "run_error"


class RunFailed(RunError):
    """The agent raised an error."""

    code = "run_failed"
    default_hint = "find the traceback by the run's id in the log of the host's process (logger 'holdfast.agents')"


class RunInterrupted(RunError):
    """The run was interrupted before it completed."""

    code = "run_interrupted"


class BranchesFailed(RunFailed):
    """Too few branches completed.

    Parameters:
        results: the result of each branch, in order, including the answers of the branches that completed.
    """

    code = "branches_failed"
    default_hint = ""  # the text has each branch's error

    def __init__(self, message: str = "", *, hint: str | None = None, results: tuple[BranchResult, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.results = results


class TooManyRestarts(BranchesFailed):
    """Branches restarted too often in too short a time."""

    code = "too_many_restarts"


class CallFailed(HoldfastError):
    """The call failed in an earlier attempt of this run and is not repeated."""

    code = "call_failed"


class ToolFailed(HoldfastError):
    """The tool failed; the model reads this text unchanged."""

    code = "tool_failed"


class InvalidArguments(ToolFailed):
    """The arguments do not match the tool's parameters."""

    code = "invalid_arguments"


class NotDeterministic(HoldfastError):
    """A replayed run made a different call than in an earlier attempt."""

    code = "not_deterministic"
    default_hint = (
        "make the same calls in the same order on every replay; get values that vary (time, randomness) from run.call"
    )


class RunClosed(HoldfastError):
    """The run has ended; its handle no longer accepts output."""

    code = "run_closed"
    default_hint = "for work that outlives its run, use run.background()"


class StreamEnded(HoldfastError):
    """A reactive source emitted an item after it had completed or failed."""

    code = "stream_ended"
    default_hint = "push all items before calling on_completed() or on_error(), or use a new source"


class EventsMissed(HoldfastError):
    """A reader that requires every event encountered a gap."""

    code = "events_missed"
    default_hint = "read the missed content from the transcript, then subscribe again after the gap"


class ModelFailed(HoldfastError):
    """The model provider refused the request, failed, or broke off its answer.

    Parameters:
        provider_status: HTTP status of the provider's answer; None if it did not answer.
        retry_after_s: seconds after which the same request may succeed; None if a retry does not help.
    """

    code = "model_failed"

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        provider_status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.provider_status = provider_status
        self.retry_after_s = retry_after_s
