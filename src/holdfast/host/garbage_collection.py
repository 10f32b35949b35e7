"""Run Python's cyclic garbage collector less often while hosts are active in this process.

With the thresholds that Python starts with, the collector runs hundreds of times a second without effect, because runs
leave no cyclic garbage. Thresholds that the program has set itself are left as they are.
"""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["ACTIVE_THRESHOLDS", "ThresholdClaim"]

ACTIVE_THRESHOLDS: Final = (10_000, 20, 20)
"""Thresholds while a host is active."""
_INITIAL: Final = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
"""Thresholds that versions of Python start with."""

_claims: set[ThresholdClaim] = set()
_before: list[tuple[int, int, int]] = []
"""The thresholds to restore with the last claim; empty if they were not changed."""


class ThresholdClaim:
    """A host's claim to the thresholds, from its creation to `release`."""

    __slots__ = ()

    def __init__(self) -> None:
        _claims.add(self)
        if gc.get_threshold() in _INITIAL:
            _before[:] = [gc.get_threshold()]
            gc.set_threshold(*ACTIVE_THRESHOLDS)

    def release(self) -> None:
        """Restore the thresholds, unless other hosts are active or the program has changed them. Idempotent."""
        _claims.discard(self)
        if not _claims and _before:
            before = _before.pop()
            if gc.get_threshold() == ACTIVE_THRESHOLDS:
                gc.set_threshold(*before)
