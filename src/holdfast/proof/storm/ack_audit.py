"""Answers of a server that must hold: kept by those who asked, until they are checked at the end.

For what stands outside a storm's history: keys, files, schedules, deletions. A request whose answer was lost may have
been done or not; one that was answered has been done, whatever killed the server a moment later.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["GONE", "AckAudit"]

GONE = "gone"
"""The state of what does not exist, or no longer."""


class AckAudit:
    """States that things may be in: the one that was answered last, and all that were asked for since.

    Parameters:
        what: the kind of thing, in words: ``key``.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._may_be: dict[str, frozenset[str]] = {}

    def ask(self, name: str, state: str) -> None:
        """Note that a state was asked for, without an answer yet."""
        self._may_be[name] = self._may_be.get(name, frozenset((GONE,))) | {state}

    def answer(self, name: str, state: str) -> None:
        """Note that the server answered with this state."""
        self._may_be[name] = frozenset((state,))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all things that were asked for."""
        return tuple(self._may_be)

    def wrong(self, now: Mapping[str, str]) -> list[str]:
        """Return what is not as it was answered.

        Parameters:
            now: the state of each thing that is there.
        """
        return [
            f"{self._what} {name} was answered to be {' or '.join(sorted(may_be))}, and is {now.get(name, GONE)}"
            for name, may_be in self._may_be.items()
            if now.get(name, GONE) not in may_be
        ]
