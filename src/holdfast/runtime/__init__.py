"""Interrupts, scopes, threads, process trees and queues. Needs nothing outside the standard library."""

from holdfast.runtime.interrupt import (
    Interrupt,
    InterruptStatistics,
    Registration,
    check_interrupt,
    current_interrupt,
    is_interrupted,
)

__all__ = [
    "Interrupt",
    "InterruptStatistics",
    "Registration",
    "check_interrupt",
    "current_interrupt",
    "is_interrupted",
]
