"""Signals that end a forked child are the child's own, and never seen by the loop of its parent.

A loop that handles signals has the interpreter write each one into a socket of the loop (`signal.set_wakeup_fd`). A
forked child has the same socket, so the loop of the parent would read a SIGTERM meant for the child, and end.

Invariant: between the fork and the moment when the child has let go of the loop's signals it receives none.
"""

from __future__ import annotations

import os
import signal
import threading

__all__ = ["watch_forks"]

_LOOPS = ("asyncio", "uvloop")
_masks = threading.local()
_watching = False


def watch_forks() -> None:
    """Have every child that is forked from now on let go of the loop's signals. Once for the process."""
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(before=_hold_back, after_in_parent=_deliver, after_in_child=_let_go)


def _hold_back() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _deliver() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _let_go() -> None:
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            module: str | None = getattr(signal.getsignal(number), "__module__", None)
            if module is not None and module.partition(".")[0] in _LOOPS:
                signal.signal(number, signal.SIG_DFL)
    finally:
        _deliver()
