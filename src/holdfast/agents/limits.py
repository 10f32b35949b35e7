"""The limits that a host sets to all runs; an agent's own are `AgentLimits`."""

from __future__ import annotations

import msgspec

__all__ = ["RunLimits"]


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The host's limits of a run.

    Parameters:
        call_s: deadline of a call without one of its own, in seconds.
        step_timeout_s: deadline of a step of an agent with a model, in seconds.
        answer_limit_bytes: characters of text that a run may emit in all.
        result_limit_bytes: maximum size of the JSON of one call's arguments or result.
        depth: how deep `delegate` may nest.
    """

    call_timeout_s: float = 60.0
    step_timeout_s: float = 120.0
    answer_limit_bytes: int = 16_000_000
    result_limit_bytes: int = 1_000_000
    depth: int = 8
