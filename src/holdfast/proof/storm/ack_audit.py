"""Record of acknowledged changes, which is checked at the end of a storm.

The record covers changes to keys, sessions and schedules that a storm's history does not contain. If the answer to a
request was lost, the request may or may not have taken effect. A request that was acknowledged must have taken effect,
even if the server was killed a moment later.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["GONE", "AckAudit"]

GONE = "gone"
"""State of an item that does not exist, or no longer exists."""


class AckAudit:
    """Possible states of each item: the last acknowledged state, and all states that were requested since then.

    Parameters:
        what: kind of the items, such as ``key``.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._may_be: dict[str, frozenset[str]] = {}

    def ask(self, name: str, state: str) -> None:
        """Record that this state is about to be requested for an item. Call this before sending the request."""
        self._may_be[name] = self._may_be.get(name, frozenset((GONE,))) | {state}

    def answer(self, name: str, state: str) -> None:
        """Record that the server acknowledged this state of the item."""
        self._may_be[name] = frozenset((state,))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all items whose state has been requested or acknowledged."""
        return tuple(self._may_be)

    def wrong(self, now: Mapping[str, str]) -> list[str]:
        """Return a description of each item whose state contradicts an acknowledgement.

        Parameters:
            now: the actual state of each existing item.
        """
        return [
            f"{self._what} {name} was answered to be {' or '.join(sorted(may_be))}, and is {now.get(name, GONE)}"
            for name, may_be in self._may_be.items()
            if now.get(name, GONE) not in may_be
        ]
