"""Interrupts, scopes, threads, process trees and queues, built on the standard library only.

The package is usable on its own: ``from holdfast.runtime import Interrupt, Scope``. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.lazy import lazy_names

if TYPE_CHECKING:
    from holdfast.runtime.adoption.tasks import Restorer, install
    from holdfast.runtime.interrupt.interrupt import (
        Interrupt,
        InterruptStatistics,
        Registration,
        check_interrupt,
        current_interrupt,
        is_interrupted,
    )
    from holdfast.runtime.process_host import Process, ProcessHost
    from holdfast.runtime.queues.bounded import BoundedQueue
    from holdfast.runtime.queues.broadcast import Broadcast, Reader
    from holdfast.runtime.queues.fair import FairQueue
    from holdfast.runtime.scope.cancel_claim import detached
    from holdfast.runtime.scope.handle import Handle, Member
    from holdfast.runtime.scope.scope import Scope, current_scope
    from holdfast.runtime.scope.state import ScopeStatistics
    from holdfast.runtime.thread_pool import ThreadPool
    from holdfast.runtime.workers.main import IsolatedCall

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
            "adoption.tasks": ("Restorer", "install"),
            "queues.bounded": ("BoundedQueue",),
            "queues.broadcast": ("Broadcast", "Reader"),
            "workers.main": ("IsolatedCall",),
            "queues.fair": ("FairQueue",),
            "scope.cancel_claim": ("detached",),
            "scope.handle": ("Handle", "Member"),
            "interrupt.interrupt": (
                "Interrupt",
                "InterruptStatistics",
                "Registration",
                "check_interrupt",
                "current_interrupt",
                "is_interrupted",
            ),
            "process_host": ("Process", "ProcessHost"),
            "scope.scope": ("Scope", "current_scope"),
            "scope.state": ("ScopeStatistics",),
            "thread_pool": ("ThreadPool",),
        },
    )
