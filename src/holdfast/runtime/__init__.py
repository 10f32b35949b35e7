"""Interrupts, scopes, threads, process trees and queues, built on the standard library only.

Usable alone: ``from holdfast.runtime import Interrupt, Scope``. Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.runtime.adoption import Restorer, install
    from holdfast.runtime.bounded import BoundedQueue
    from holdfast.runtime.broadcast import Broadcast, Reader
    from holdfast.runtime.cell import IsolatedCall
    from holdfast.runtime.fair import FairQueue
    from holdfast.runtime.handle import Handle, Member
    from holdfast.runtime.interrupt import (
        Interrupt,
        InterruptStatistics,
        Registration,
        check_interrupt,
        current_interrupt,
        is_interrupted,
    )
    from holdfast.runtime.processes import Process, ProcessHost
    from holdfast.runtime.scope import Scope, current_scope, detached
    from holdfast.runtime.scope_state import ScopeStatistics
    from holdfast.runtime.threads import ThreadPool

_HOMES = {
    "adoption": ("Restorer", "install"),
    "bounded": ("BoundedQueue",),
    "broadcast": ("Broadcast", "Reader"),
    "cell": ("IsolatedCall",),
    "fair": ("FairQueue",),
    "handle": ("Handle", "Member"),
    "interrupt": (
        "Interrupt",
        "InterruptStatistics",
        "Registration",
        "check_interrupt",
        "current_interrupt",
        "is_interrupted",
    ),
    "processes": ("Process", "ProcessHost"),
    "scope": ("Scope", "current_scope", "detached"),
    "scope_state": ("ScopeStatistics",),
    "threads": ("ThreadPool",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BoundedQueue",
    "Broadcast",
    "FairQueue",
    "Handle",
    "Interrupt",
    "InterruptStatistics",
    "IsolatedCall",
    "Member",
    "Process",
    "ProcessHost",
    "Reader",
    "Registration",
    "Restorer",
    "Scope",
    "ScopeStatistics",
    "ThreadPool",
    "check_interrupt",
    "current_interrupt",
    "current_scope",
    "detached",
    "install",
    "is_interrupted",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
