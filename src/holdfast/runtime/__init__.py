"""Interrupts, scopes, threads, process trees and queues, built on the standard library only.

Usable alone: ``from holdfast.runtime import Interrupt, Scope``. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.runtime.adoption import Restorer, install
    from holdfast.runtime.bounded import BoundedQueue
    from holdfast.runtime.broadcast import Broadcast, Reader
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
    from holdfast.runtime.worker_main import IsolatedCall

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

if not TYPE_CHECKING:  # or else type checkers would accept any name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "adoption": ("Restorer", "install"),
            "bounded": ("BoundedQueue",),
            "broadcast": ("Broadcast", "Reader"),
            "worker_main": ("IsolatedCall",),
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
        },
    )
