"""The grace period of a scope and the time after it: its own, those that a stop was given, and those of its parent."""

from __future__ import annotations

import math

from holdfast.errors import InvalidRequest

__all__ = ["StopTimes", "Times", "check_times"]

Times = tuple[float, float]
"""Grace period, and time after it until members are abandoned, in seconds."""

GRACE_S = 5.0
KILL_AFTER_S = 2.0


class StopTimes:
    """Times of the stops of one scope.

    Parameters:
        grace_s, kill_after_s: as in `Scope`; default: the parent's.
        parent: times of the enclosing scope.
    """

    __slots__ = ("_given", "_limits", "own")

    def __init__(self, grace_s: float | None, kill_after_s: float | None, parent: StopTimes | None) -> None:
        inherited = (GRACE_S, KILL_AFTER_S) if parent is None else parent.own
        self.own: Times = (
            inherited[0] if grace_s is None else grace_s,
            inherited[1] if kill_after_s is None else kill_after_s,
        )
        """Times of a stop that is given none."""
        self._limits: Times = (
            math.inf if grace_s is None else grace_s,
            math.inf if kill_after_s is None else kill_after_s,
        )
        self._given: Times | None = None

    def complete(self, grace_s: float | None, kill_after_s: float | None) -> Times | None:
        """Return the times that a stop is given, completed by the scope's own; None if it is given none."""
        if grace_s is None and kill_after_s is None:
            return None
        return (
            self.own[0] if grace_s is None else grace_s,
            self.own[1] if kill_after_s is None else kill_after_s,
        )

    def give(self, times: Times) -> None:
        """Give the first stop its times. Call it before the trigger, because what that wakes may begin the stop."""
        self._given = times

    def first(self, parent: Times | None) -> Times:
        """Return the times of the first stop: those it was given, else those of the parent's stop, else its own.

        Parameters:
            parent: times of the parent's stop; None if the parent is not being stopped.
        """
        if self._given is not None:
            return self._given
        return self.own if parent is None else self.limited(parent)

    def limited(self, parent: Times) -> Times:
        """Return times that the parent gives, but no more than the scope was created with."""
        return min(parent[0], self._limits[0]), min(parent[1], self._limits[1])


def check_times(deadline_s: object, grace_s: object, kill_after_s: object) -> None:
    """Raise `InvalidRequest` for an invalid time. A deadline may already be over, or infinite."""
    if deadline_s is not None and (not isinstance(deadline_s, (int, float)) or math.isnan(deadline_s)):
        raise InvalidRequest(f"deadline_s is {deadline_s!r}; use a number of seconds, or None for no deadline")
    for name, value in (("grace_s", grace_s), ("kill_after_s", kill_after_s)):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise InvalidRequest(f"{name} is {value!r}; use a number of seconds, 0 or more")
