"""A hosted graph and its options, validated by `graph_agent`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from holdfast.agents.run import Run
    from holdfast.protocol.messages import Answer, Question

__all__ = ["STATE_LIMIT_BYTES", "GraphAgent"]

STATE_LIMIT_BYTES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphAgent:
    """A hosted graph. Created by `graph_agent`, which documents the other fields.

    Parameters:
        graph: the compiled graph. Each run works with a copy of the graph that has its own checkpointer.
        takes_messages: whether the graph's input is a list of messages under ``messages``.
        breaks: whether the graph may stop at breakpoints.
        inputs: field names of the graph's input; None if the input has no fields.
    """

    name: str
    graph: Any
    takes_messages: bool
    breaks: bool
    inputs: frozenset[str] | None
    input: str | Callable[[Run], Any] | None = None
    answer: str | Callable[[Any], str] | None = None
    speakers: Collection[str] | None = None
    ask: Callable[[Any], str | Question] | None = None
    resume: Callable[[Answer, Any], Any] | None = None
    config: RunnableConfig | None = None
    context: Any = None
    idempotent: bool = False
    state_limit_bytes: int = STATE_LIMIT_BYTES
