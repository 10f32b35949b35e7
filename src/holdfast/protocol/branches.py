"""What the branches of a shape came to, how many of them must complete, and how often one may be started again.

Values and decisions only; `holdfast.agents.compose` acts on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from holdfast.errors import ConfigurationError
from holdfast.protocol.stopping import Cause

__all__ = ["BranchResult", "Intensity", "Need", "Quorum", "Verdict", "is_seconds", "told_results"]

Need = Literal["all", "first", "some"] | int
Verdict = Literal["open", "met", "lost"]

_TOLD = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchResult:
    """What one branch came to.

    Parameters:
        name: the branch's name.
        status: ``not_begun`` for one whose turn never came.
        text: its answer; what it had said, where it did not complete.
        error: why it did not complete.
        cause: what interrupted it, where something did.
    """

    name: str
    status: Literal["completed", "failed", "interrupted", "not_begun"]
    text: str = ""
    error: str | None = None
    cause: Cause | None = None

    @property
    def completed(self) -> bool:
        """Whether it has an answer."""
        return self.status == "completed"


def is_seconds(value: object) -> TypeGuard[float]:
    """Whether it is a length of time: a number of seconds, 0 or more; infinity is one, nan is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


class Quorum:
    """Decides when enough branches have completed, and when that cannot be any more.

    Parameters:
        need: ``all``; ``first``: one; a number: so many, and the rest is not waited for; ``some``: all are waited for,
            and one must complete.
        total: how many branches there are.

    Raises:
        ConfigurationError: no branches, or more needed than there are.
    """

    __slots__ = ("required", "total", "waits")

    def __init__(self, need: Need, total: int) -> None:
        required = total if need == "all" else 1 if need in ("first", "some") else need
        if isinstance(required, (bool, str)) or not isinstance(required, int):
            raise ConfigurationError(f"need={need!r} is not known", hint='use "all", "first", "some" or a number')
        if total < 1:
            raise ConfigurationError("there are no branches", hint="give it at least one agent")
        if not 1 <= required <= total:
            raise ConfigurationError(f"{required} branches are needed, and there are {total}")
        self.required = required
        self.total = total
        self.waits = need == "some"

    def verdict(self, completed: int, ended: int) -> Verdict:
        """Whether it is decided.

        Parameters:
            completed: branches that have an answer.
            ended: branches that have ended, these included.
        """
        if completed >= self.required and (not self.waits or ended == self.total):
            return "met"
        return "lost" if completed + self.total - ended < self.required else "open"


class Intensity:
    """How often something was started again lately; as a supervisor of OTP counts it.

    Parameters:
        limit: so many restarts are allowed …
        within_s: … in so many seconds.
    """

    __slots__ = ("_times", "limit", "within_s")

    def __init__(self, limit: int, within_s: float) -> None:
        whole: object = limit
        if not isinstance(whole, int) or whole < 0 or not is_seconds(within_s) or within_s == 0:
            raise ConfigurationError(
                f"restarts={limit!r}, within_s={within_s!r}: it takes a whole number from 0, in more than 0 s"
            )
        self.limit = limit
        self.within_s = within_s
        self._times: deque[float] = deque()

    def restart(self, at: float) -> bool:
        """Count a restart; False if that is one too many.

        Parameters:
            at: when, in seconds since the epoch. A clock that went back makes no room.
        """
        times = self._times
        times.append(max(at, times[-1]) if times else at)
        while times[-1] - times[0] > self.within_s:
            times.popleft()
        return len(times) <= self.limit


def told_results(results: Sequence[BranchResult], *, decided: Cause | None = None) -> str:
    """Those that did not complete, for people: what went wrong first, then who was stopped for it or had no turn.

    Parameters:
        decided: with it those were stopped that were left when the end was decided.
    """
    stopped = [result for result in results if result.cause is not None and result.cause == decided]
    waiting = [result for result in results if result.status == "not_begun"]
    wrong = [result for result in results if not result.completed and result not in stopped and result not in waiting]
    told = [result.error or f"{result.name} was interrupted" for result in wrong[:_TOLD]]
    if len(wrong) > _TOLD:
        told.append(f"and {len(wrong) - _TOLD:,} more")
    if stopped:
        told.append(f"interrupted for that: {_names(stopped)}")
    if waiting:
        told.append(f"not begun: {_names(waiting)}")
    return "; ".join(told)


def _names(results: Sequence[BranchResult]) -> str:
    more = f" and {len(results) - _TOLD:,} more" if len(results) > _TOLD else ""
    return ", ".join(result.name for result in results[:_TOLD]) + more
