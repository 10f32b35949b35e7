"""Keep signals to a forked child away from its parent's event loop.

A loop that handles signals makes the interpreter write each signal into a socket of the loop (`signal.set_wakeup_fd`).
A forked child shares that socket, so the parent's loop would otherwise read a SIGTERM meant for the child, and end.

Invariant: signals to the child are blocked from the fork until the child has removed the loop's signal handlers.
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
    """Make every child forked from now on remove the loop's signal handlers. Idempotent."""
    global _watching
    if not _watching:
        _watching = True
        os.register_at_fork(before=_block_signals, after_in_parent=_deliver, after_in_child=_unblock_signals)


def _block_signals() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _deliver() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _unblock_signals() -> None:
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            module: str | None = getattr(signal.getsignal(number), "__module__", None)
            if module is not None and module.partition(".")[0] in _LOOPS:
                signal.signal(number, signal.SIG_DFL)
    finally:
        _deliver()
