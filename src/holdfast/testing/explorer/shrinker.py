"""Shorten a failing schedule: fewer choices, and fewer that differ from asyncio's own order.

This is delta debugging on the list of choices. A candidate is kept if it fails in the same way and is simpler. Lists
are compared by the number of choices that differ from 0 (asyncio's own choice), then by length, then by sum; the
smaller list is simpler. The comparison uses the choices that the run actually made, so a candidate may contain choices
that do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

__all__ = ["Shrunk", "shrink", "stripped"]


class Shrunk:
    """The simplest failing list of choices found so far.

    Parameters:
        choices: the choices of the original failure.
        attempt: called with a candidate; runs the test with these choices. Returns the choices that the run made if the
            run failed in the same way, otherwise None.
        runs: maximum number of candidates to run.
    """

    def __init__(
        self, choices: Sequence[int], attempt: Callable[[Sequence[int]], Sequence[int] | None], runs: int
    ) -> None:
        self.choices = stripped(choices)
        self.runs = 0
        self._attempt = attempt
        self._limit = runs
        self._tried: set[tuple[int, ...]] = set()

    @property
    def spent(self) -> bool:
        """Whether no more candidates may be run."""
        return self.runs >= self._limit

    def try_one(self, candidate: Sequence[int]) -> bool:
        """Run a candidate. If it fails in the same way and is simpler, keep it and return True."""
        wanted = tuple(stripped(candidate))
        if self.spent or wanted in self._tried or _size(wanted) >= _size(self.choices):
            return False
        self._tried.add(wanted)
        self.runs += 1
        made = self._attempt(wanted)
        if made is None or _size(made := stripped(made)) >= _size(self.choices):
            return False
        self.choices = list(made)
        return True


def shrink(choices: Sequence[int], attempt: Callable[[Sequence[int]], Sequence[int] | None], *, runs: int) -> Shrunk:
    """Look for a simpler list of choices that fails in the same way; see `Shrunk` for the parameters."""
    best = Shrunk(choices, attempt, runs)
    if best.try_one([]):
        return best
    improved = True
    while improved and not best.spent:
        before = best.choices
        for candidates in (_ends_early, _with_less, _with_zeros, _with_smaller):
            _greedily(best, candidates)
        improved = best.choices != before
    return best


def _greedily(best: Shrunk, candidates: Callable[[Sequence[int]], Iterator[list[int]]]) -> None:
    """Keep the first simpler candidate and search again from it, until no candidate is simpler."""
    again = True
    while again and not best.spent:
        again = any(best.try_one(candidate) for candidate in candidates(best.choices))


def _ends_early(choices: Sequence[int]) -> Iterator[list[int]]:
    kept = len(choices) // 2
    while kept < len(choices):
        yield list(choices[:kept])
        kept += max(1, (len(choices) - kept) // 2)


def _chunks(length: int) -> Iterator[tuple[int, int]]:
    size = length // 2
    while size:
        for at in range(0, length, size):
            yield at, min(at + size, length)
        size //= 2


def _with_less(choices: Sequence[int]) -> Iterator[list[int]]:
    for at, end in _chunks(len(choices)):
        yield [*choices[:at], *choices[end:]]


def _with_zeros(choices: Sequence[int]) -> Iterator[list[int]]:
    for at, end in _chunks(len(choices)):
        yield [*choices[:at], *[0] * (end - at), *choices[end:]]


def _with_smaller(choices: Sequence[int]) -> Iterator[list[int]]:
    for at, choice in enumerate(choices):
        if choice > 1:
            yield [*choices[:at], 1, *choices[at + 1 :]]
            yield [*choices[:at], choice - 1, *choices[at + 1 :]]


def stripped(choices: Sequence[int]) -> list[int]:
    """Return the choices without trailing zeros, because a replay picks 0 after its last choice anyway."""
    end = len(choices)
    while end and not choices[end - 1]:
        end -= 1
    return list(choices[:end])


def _size(choices: Sequence[int]) -> tuple[int, int, int]:
    return sum(choice > 0 for choice in choices), len(choices), sum(choices)
