"""Agents in reactive streams (extra ``reactive``). Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.integrations.reactive.bridge import IntakeCounts, Outcome, Overflow, ReactiveBridge, Shaped

__all__ = ["IntakeCounts", "Outcome", "Overflow", "ReactiveBridge", "Shaped"]

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(
        __name__, {"bridge": ("IntakeCounts", "Outcome", "Overflow", "ReactiveBridge", "Shaped")}
    )
