"""Count the different states that an exploration visits, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["States"]

_KEPT = 1 << 18


class States:
    """Counter of different states: exact up to about 260,000 states, and an estimate within 1 % above that.

    Each state is an integer hash. When the set of states is full, only states with a last bit of 0 are kept; when the
    set is full again, only states with two last bits of 0, and so on. The count is the size of the set times the number
    of states that each kept state represents.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._limit = kept
        self._mask = 0
        self._seen: set[int] = set()

    def note(self, states: Iterable[int]) -> None:
        """Record these states as visited."""
        if self._mask:
            mask = self._mask
            states = [state for state in states if not state & mask]
        self._seen.update(states)
        while len(self._seen) > self._limit:
            self._mask = mask = self._mask * 2 + 1
            self._seen = {state for state in self._seen if not state & mask}

    @property
    def exact(self) -> bool:
        """Whether the count is exact rather than an estimate."""
        return not self._mask

    def __len__(self) -> int:
        return len(self._seen) * (self._mask + 1)
