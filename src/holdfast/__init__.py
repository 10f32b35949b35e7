"""Holdfast hosts AI agents for many users at once and keeps them under control.

Names are loaded on first use, so that ``import holdfast`` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.agents import Agent, Run, Tool, agent, branch, parallel, periodic, route, sequence, supervised, tool
    from holdfast.client import Client
    from holdfast.errors import (
        HoldfastError,
        Interrupted,
        RunFailed,
        RunInterrupted,
        ToolFailed,
        WaitExpired,
    )
    from holdfast.host import Host, Session
    from holdfast.protocol.events import Event, Gap
    from holdfast.protocol.messages import Receipt, Settlement
    from holdfast.protocol.stopping import Cause, StopReceipt
    from holdfast.runtime import Interrupt, Scope
    from holdfast.settings import Settings

__version__ = "0.1.0"

_HOMES = {
    "agents": (
        "Agent",
        "Run",
        "Tool",
        "agent",
        "branch",
        "parallel",
        "periodic",
        "route",
        "sequence",
        "supervised",
        "tool",
    ),
    "client": ("Client",),
    "errors": ("HoldfastError", "Interrupted", "RunFailed", "RunInterrupted", "ToolFailed", "WaitExpired"),
    "host": ("Host", "Session"),
    "protocol.events": ("Event", "Gap"),
    "protocol.messages": ("Receipt", "Settlement"),
    "protocol.stopping": ("Cause", "StopReceipt"),
    "runtime": ("Interrupt", "Scope"),
    "settings": ("Settings",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Agent",
    "Cause",
    "Client",
    "Event",
    "Gap",
    "HoldfastError",
    "Host",
    "Interrupt",
    "Interrupted",
    "Receipt",
    "Run",
    "RunFailed",
    "RunInterrupted",
    "Scope",
    "Session",
    "Settings",
    "Settlement",
    "StopReceipt",
    "Tool",
    "ToolFailed",
    "WaitExpired",
    "agent",
    "branch",
    "parallel",
    "periodic",
    "route",
    "sequence",
    "supervised",
    "tool",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
