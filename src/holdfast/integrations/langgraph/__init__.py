"""LangGraph graphs as agents (extra ``langgraph``). Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.integrations.langgraph.agent import current_run, graph_agent

__all__ = ["current_run", "graph_agent"]

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(__name__, {"agent": ("current_run", "graph_agent")})
