"""The state tables of messages and runs.

A change that is missing from its table raises `IllegalTransition`. The docs' diagrams are generated from these tables.
Whether a run is orphaned or stuck is computed when needed and is not a state. The phases of a run in memory are in
`holdfast.protocol.run_phases`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from holdfast.errors import IllegalTransition
from holdfast.protocol.messages import MessageState, RunState

__all__ = [
    "MESSAGE_TABLE",
    "RUN_TABLE",
    "TERMINAL_MESSAGE_STATES",
    "TERMINAL_RUN_STATES",
    "MessageInput",
    "RunInput",
    "illegal_transition",
    "next_message_state",
    "next_run_state",
]

RunInput = Literal["suspend", "resume", "interrupt", "restart", "complete", "fail", "stopped", "crash"]
MessageInput = Literal["take", "complete", "fail", "interrupt", "supersede", "withdraw"]

RUN_TABLE: Mapping[tuple[RunState, RunInput], RunState] = {
    ("running", "suspend"): "suspended",
    ("running", "interrupt"): "stopping",
    ("running", "restart"): "running",
    ("running", "complete"): "completed",
    ("running", "fail"): "failed",
    ("running", "crash"): "interrupted",
    ("suspended", "suspend"): "suspended",
    ("suspended", "resume"): "running",
    ("suspended", "restart"): "suspended",
    ("suspended", "interrupt"): "stopping",
    ("suspended", "crash"): "interrupted",
    ("stopping", "interrupt"): "stopping",
    ("stopping", "complete"): "completed",
    ("stopping", "fail"): "interrupted",
    ("stopping", "stopped"): "interrupted",
    ("stopping", "crash"): "interrupted",
}

MESSAGE_TABLE: Mapping[tuple[MessageState, MessageInput], MessageState] = {
    ("accepted", "take"): "taken",
    ("accepted", "withdraw"): "withdrawn",
    ("taken", "complete"): "completed",
    ("taken", "fail"): "failed",
    ("taken", "interrupt"): "interrupted",
    ("taken", "supersede"): "superseded",
}

TERMINAL_RUN_STATES: frozenset[RunState] = frozenset(("completed", "failed", "interrupted"))
TERMINAL_MESSAGE_STATES: frozenset[MessageState] = frozenset(
    ("completed", "failed", "interrupted", "superseded", "withdrawn")
)

_S = TypeVar("_S", bound=str)
_I = TypeVar("_I", bound=str)


def illegal_transition(what: str, table: Mapping[tuple[_S, _I], _S], state: _S, event: _I) -> IllegalTransition:
    """Return the error for an event that `table` does not list for `state`."""
    allowed = sorted(i for s, i in table if s == state)
    return IllegalTransition(
        f"a {what} that is {state} cannot {event}",
        hint=f"from {state} it can: {', '.join(allowed)}" if allowed else f"{state} is final",
    )


def _next(what: str, table: Mapping[tuple[_S, _I], _S], state: _S, event: _I) -> _S:
    try:
        return table[state, event]
    except KeyError:
        raise illegal_transition(what, table, state, event) from None


def next_run_state(state: RunState, event: RunInput) -> RunState:
    """Return the run's state after `event`. Raises `IllegalTransition` if `RUN_TABLE` does not list the change."""
    return _next("run", RUN_TABLE, state, event)


def next_message_state(state: MessageState, event: MessageInput) -> MessageState:
    """Return the message's state after `event`.

    Raises `IllegalTransition` if `MESSAGE_TABLE` does not list the change.
    """
    return _next("message", MESSAGE_TABLE, state, event)
