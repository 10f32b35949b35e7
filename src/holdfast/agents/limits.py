"""The host's limits on every run. `AgentLimits` holds the limits that an agent sets for its own runs."""

from __future__ import annotations

import msgspec

__all__ = ["RunLimits"]


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The host's limits on a run.

    Parameters:
        call_timeout_s: default deadline of a call, in seconds.
        step_timeout_s: default deadline of a step of an agent with a model, in seconds.
        answer_limit_bytes: maximum length of all text that a run emits, in characters.
        result_limit_bytes: maximum size of the JSON of one call's arguments or result.
        depth: maximum nesting depth of children.
    """

    call_timeout_s: float = 60.0
    step_timeout_s: float = 120.0
    answer_limit_bytes: int = 16_000_000
    result_limit_bytes: int = 1_000_000
    depth: int = 8
