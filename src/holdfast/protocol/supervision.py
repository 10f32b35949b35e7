"""Results of a composite agent's branches, the quorum of branches that must complete, and the limit on restarts.

This module only decides; `holdfast.agents.compose` acts on the decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from holdfast.errors.base import ConfigurationError
from holdfast.protocol.stopping import Cause

__all__ = ["BranchResult", "Intensity", "Need", "Quorum", "Verdict", "is_seconds", "told_results"]

Need = Literal["all", "first", "some"] | int
Verdict = Literal["open", "met", "lost"]

_TOLD = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """The result of one branch.

    Parameters:
        name: name of the branch.
        status: how the branch ended; ``not_begun`` if it never started.
        text: answer of the branch; partial if the branch did not complete.
        error: error of the branch, if any.
        cause: why the branch was interrupted; None if it was not.
    """

    name: str
    status: Literal["completed", "failed", "interrupted", "not_begun"]
    text: str = ""
    error: str | None = None
    cause: Cause | None = None

    @property
    def completed(self) -> bool:
        """Whether the branch completed."""
        return self.status == "completed"


def is_seconds(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number of 0 or more; infinity is allowed, NaN is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


class Quorum:
    """Decides when enough branches have completed, and when the quorum is out of reach.

    Parameters:
        need: how many branches must complete. ``all`` requires all branches. ``first`` requires one, and a number
            requires that many; neither waits for the other branches. ``some`` waits until all branches have ended, and
            requires at least one.
        total: number of branches.

    Raises:
        ConfigurationError: if `need` is invalid or exceeds `total`, or if `total` is 0.
    """

    __slots__ = ("required", "total", "waits")

    def __init__(self, need: Need, total: int) -> None:
        required = total if need == "all" else 1 if need in ("first", "some") else need
        if isinstance(required, (bool, str)) or not isinstance(required, int):
            raise ConfigurationError(f"need={need!r} is invalid", hint='use "all", "first", "some" or a number')
        if total < 1:
            raise ConfigurationError("no branches given", hint="pass at least one agent")
        if not 1 <= required <= total:
            raise ConfigurationError(f"{required} branches are required, but the number of branches is {total}")
        self.required = required
        self.total = total
        self.waits = need == "some"

    def verdict(self, completed: int, ended: int) -> Verdict:
        """Return whether the quorum is met, lost or still open.

        Parameters:
            completed: number of branches that have completed.
            ended: number of branches that have ended, including the completed ones.
        """
        if completed >= self.required and (not self.waits or ended == self.total):
            return "met"
        return "lost" if completed + self.total - ended < self.required else "open"


class Intensity:
    """Restart intensity: a limit on restarts within a sliding window, as in an OTP supervisor.

    Parameters:
        limit: maximum number of restarts within the window.
        within_s: length of the window, in seconds.
    """

    __slots__ = ("_times", "limit", "within_s")

    def __init__(self, limit: int, within_s: float) -> None:
        whole: object = limit
        if not isinstance(whole, int) or whole < 0 or not is_seconds(within_s) or within_s == 0:
            raise ConfigurationError(
                f"invalid restarts={limit!r}, within_s={within_s!r}; "
                "restarts must be a whole number, 0 or more, and within_s must be more than 0"
            )
        self.limit = limit
        self.within_s = within_s
        self._times: deque[float] = deque()

    def restart(self, at: float) -> bool:
        """Count a restart. Return False if the restart exceeds the limit.

        Parameters:
            at: time of the restart, in seconds since the epoch. If the clock was set back, the time of the previous
                restart is used instead.
        """
        times = self._times
        times.append(max(at, times[-1]) if times else at)
        while times[-1] - times[0] > self.within_s:
            times.popleft()
        return len(times) <= self.limit


def told_results(results: Sequence[BranchResult], *, decided: Cause | None = None) -> str:
    """Return a summary, for display, of the branches that did not complete.

    Failed branches are listed first, then those that were stopped because the outcome was decided, then those that
    never started.

    Parameters:
        results: results of all branches.
        decided: cause with which the remaining branches were stopped once the outcome was decided; None if no branches
            were stopped.
    """
    stopped = [result for result in results if result.cause is not None and result.cause == decided]
    waiting = [result for result in results if result.status == "not_begun"]
    wrong = [result for result in results if not result.completed and result not in stopped and result not in waiting]
    told = [result.error or f"{result.name} was interrupted" for result in wrong[:_TOLD]]
    if len(wrong) > _TOLD:
        told.append(f"and {len(wrong) - _TOLD:,} more")
    if stopped:
        told.append(f"interrupted as a result: {_names(stopped)}")
    if waiting:
        told.append(f"not started: {_names(waiting)}")
    return "; ".join(told)


def _names(results: Sequence[BranchResult]) -> str:
    more = f" and {len(results) - _TOLD:,} more" if len(results) > _TOLD else ""
    return ", ".join(result.name for result in results[:_TOLD]) + more
