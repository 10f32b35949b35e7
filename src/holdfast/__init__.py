"""Holdfast hosts AI agents for many users at once and keeps them under control.

Most programs need only the names in this package. Each name is loaded on first use, so that ``import holdfast`` is
cheap.
"""

from __future__ import annotations

from holdfast.lazy import lazy_names
from holdfast.version import __version__ as __version__

TYPE_CHECKING = False  # importing it from typing would be most of the cost of ``import holdfast``
if TYPE_CHECKING:
    from holdfast.agents import (
        Agent,
        Call,
        CallPart,
        Run,
        ScriptedModel,
        Tool,
        Toolset,
        agent,
        branch,
        parallel,
        periodic,
        route,
        sequence,
        supervised,
        tool,
    )
    from holdfast.client import Client
    from holdfast.errors import HoldfastError, MailboxFull, RunFailed, SessionBusy, ToolFailed, WaitExpired
    from holdfast.host import Host, Schedule, Session
    from holdfast.protocol.messages import Receipt
    from holdfast.runtime import Interrupt, Scope
    from holdfast.settings import Settings
    from holdfast.tools.assistant import assistant

__all__ = [
    "Agent",
    "Call",
    "CallPart",
    "Client",
    "HoldfastError",
    "Host",
    "Interrupt",
    "MailboxFull",
    "Receipt",
    "Run",
    "RunFailed",
    "Schedule",
    "Scope",
    "ScriptedModel",
    "Session",
    "SessionBusy",
    "Settings",
    "Tool",
    "ToolFailed",
    "Toolset",
    "WaitExpired",
    "agent",
    "assistant",
    "branch",
    "parallel",
    "periodic",
    "route",
    "sequence",
    "supervised",
    "tool",
]

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "agents": (
                "Agent",
                "Call",
                "CallPart",
                "Run",
                "ScriptedModel",
                "Tool",
                "Toolset",
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
            "errors": ("HoldfastError", "MailboxFull", "RunFailed", "SessionBusy", "ToolFailed", "WaitExpired"),
            "host": ("Host", "Schedule", "Session"),
            "protocol.messages": ("Receipt",),
            "runtime": ("Interrupt", "Scope"),
            "settings": ("Settings",),
            "tools.assistant": ("assistant",),
        },
        elsewhere=("errors", "runtime", "agents", "host", "client"),
    )
