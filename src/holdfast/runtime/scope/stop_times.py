"""Times of a stop, computed from the arguments of the stop, of the scope and of the parent scope."""

from __future__ import annotations

import math

from holdfast.errors import InvalidRequest

__all__ = ["StopTimes", "Times", "check_times"]

Times = tuple[float, float]
"""Grace period, and time from its end until members are abandoned, in seconds."""

_DEFAULT: Times = (5.0, 2.0)
_UNLIMITED: Times = (math.inf, math.inf)


class StopTimes:
    """Times of the stops of one scope.

    Parameters:
        grace_s, abandon_after_s: arguments of the `Scope`; None uses the parent's value, or the default if the scope
            has no parent.
        parent: times of the parent scope; None if the scope has no parent.
    """

    __slots__ = ("_given", "_limits", "own")

    def __init__(self, grace_s: float | None, abandon_after_s: float | None, parent: StopTimes | None) -> None:
        self.own: Times = _DEFAULT if parent is None else parent.own
        """Default times of a stop."""
        self._limits: Times = _UNLIMITED
        self._given: Times | None = None
        if grace_s is not None or abandon_after_s is not None:
            self.own = _completed(grace_s, abandon_after_s, self.own)
            self._limits = _completed(grace_s, abandon_after_s, _UNLIMITED)

    def complete(self, grace_s: float | None, abandon_after_s: float | None) -> Times | None:
        """Return the times of a stop, with the scope's own value for a missing time; None if both are missing."""
        if grace_s is None and abandon_after_s is None:
            return None
        return _completed(grace_s, abandon_after_s, self.own)

    def give(self, times: Times) -> None:
        """Set the first stop's times, before the interrupt is triggered, because woken code may start the stop."""
        self._given = times

    def first(self, parent: Times | None) -> Times:
        """Return the times of the first stop: those set by `give`, else the parent's (limited), else the scope's own.

        Parameters:
            parent: times of the parent's stop; None if the parent is not being stopped.
        """
        if self._given is not None:
            return self._given
        return self.own if parent is None else self.limited(parent)

    def limited(self, parent: Times) -> Times:
        """Return the parent's times, limited to those that the scope was created with."""
        return min(parent[0], self._limits[0]), min(parent[1], self._limits[1])


def _completed(grace_s: float | None, abandon_after_s: float | None, by: Times) -> Times:
    return by[0] if grace_s is None else grace_s, by[1] if abandon_after_s is None else abandon_after_s


def check_times(deadline_s: object, grace_s: object, abandon_after_s: object) -> None:
    """Raise `InvalidRequest` for an invalid time. A deadline may be in the past or infinite."""
    if deadline_s is not None and (not isinstance(deadline_s, (int, float)) or math.isnan(deadline_s)):
        raise InvalidRequest(f"deadline_s is {deadline_s!r}; use a number of seconds, or None for no deadline")
    if grace_s is not None:
        _check_time("grace_s", grace_s)
    if abandon_after_s is not None:
        _check_time("abandon_after_s", abandon_after_s)


def _check_time(name: str, value: object) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
        raise InvalidRequest(f"{name} is {value!r}; use a number of seconds, 0 or more")
