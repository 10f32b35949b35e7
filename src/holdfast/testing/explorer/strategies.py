"""Strategies that choose the next step: at random, by random priorities (PCT), exhaustively, or from a recording."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.testing.explorer.stepped_loop import Actor, LoopStep, SteppedLoop

__all__ = ["ExhaustiveChooser", "NearChooser", "PctChooser", "RandomChooser", "ReplayChooser", "ReplayMismatch"]

# So that busy waiting does not become a livelock, an actor that was chosen this often in a row is put last, and a step
# that has been runnable for this many steps runs next.
_IN_A_ROW = 100
_OVERDUE_STEPS = 1000


class ReplayMismatch(Exception):  # noqa: N818
    """A replayed choice does not exist, because the test behaves differently than when the choices were recorded."""


class RandomChooser:
    """Chooser that picks a runnable step uniformly at random.

    Parameters:
        seed: random seed; the same seed gives the same schedules.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def begin(self) -> bool:
        """Return True: another random schedule can always be run."""
        return True

    def pick(self, runnable: Sequence[LoopStep]) -> int:
        """Return the index of a random step."""
        return int(self._random() * len(runnable))

    def end(self, loop: SteppedLoop) -> None:
        """Do nothing: this chooser learns nothing from a schedule."""


class PctChooser:
    """Probabilistic concurrency testing: random priorities, lowered at ``depth - 1`` random moments.

    The actor with the highest priority always runs first and gets far ahead of the others. This finds orders that a
    uniformly random choice rarely reaches. The clock (see ``late_s``) gets a new priority each time it is chosen.

    Parameters:
        depth: maximum number of ordering constraints that a bug needs in order to occur; 3 finds most bugs.
        seed: random seed; the same seed gives the same schedules.
    """

    def __init__(self, depth: int, seed: int) -> None:
        self._depth = depth
        self._random = random.Random(seed)
        self._length = 20
        self._priorities: dict[Actor, float] = {}
        self._changes: set[int] = set()
        self._made = 0
        self._lowest = 0.0
        self._last: Actor | None = None
        self._in_a_row = 0

    def begin(self) -> bool:
        """Reset the priorities, choose new random moments at which priorities change, and return True."""
        self._priorities = {}
        self._changes = {self._random.randrange(self._length) for _ in range(self._depth - 1)}
        self._made = 0
        self._lowest = 0.0
        self._last = None
        return True

    def pick(self, runnable: Sequence[LoopStep]) -> int:
        """Return the index of the step with the highest priority.

        At one of the random moments, the actor of this step then gets the lowest priority. A step that has been
        runnable for more than 1000 steps is picked first, whatever its priority.
        """
        oldest = runnable[0]
        if oldest.overdue(_OVERDUE_STEPS):
            return 0
        priorities = self._priorities
        best, best_priority = 0, -1e9
        for at, step in enumerate(runnable):
            actor = step.actor
            priority = priorities.get(actor)
            if priority is None:
                priority = priorities[actor] = self._random.random()
            if priority > best_priority:
                best, best_priority = at, priority
        chosen = runnable[best].actor
        self._in_a_row = self._in_a_row + 1 if chosen is self._last else 1
        self._last = chosen
        if self._made in self._changes or self._in_a_row > _IN_A_ROW:
            self._lowest -= 1.0
            priorities[chosen] = self._lowest
            self._in_a_row = 0
        elif chosen.is_clock:
            priorities[chosen] = self._random.random()
        self._made += 1
        return best

    def end(self, loop: SteppedLoop) -> None:
        """Learn how long schedules are, so that the changes of priority are spread over the whole schedule."""
        self._length = max(1, len(loop.choices)) if self._length == 20 else max(self._length, len(loop.choices))


class ReplayChooser:
    """Chooser that repeats recorded choices, then always picks the first runnable step.

    Parameters:
        choices: the recorded choices.
    """

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._made = 0

    def begin(self) -> bool:
        """Start again at the first recorded choice, and return True."""
        self._made = 0
        return True

    def pick(self, runnable: Sequence[LoopStep]) -> int:
        """Return the next recorded choice, or 0 after the last one.

        Raises:
            ReplayMismatch: if too few steps can run for the recorded choice.
        """
        made = self._made
        self._made = made + 1
        if made >= len(self._choices):
            return 0
        choice = self._choices[made]
        if choice >= len(runnable):
            names = ", ".join(step.actor.name for step in runnable)
            raise ReplayMismatch(
                f"choice {made} of the replay is {choice}, but only {len(runnable)} steps can run: {names}"
            )
        return choice

    def end(self, loop: SteppedLoop) -> None:
        """Do nothing: this chooser learns nothing from a schedule."""


class NearChooser(ReplayChooser):
    """Chooser that repeats given choices, or picks the last runnable step if a choice does not exist."""

    def pick(self, runnable: Sequence[LoopStep]) -> int:
        """Return the next given choice, or the nearest choice that exists; after the last given choice, return 0."""
        made = self._made
        self._made = made + 1
        return min(self._choices[made], len(runnable) - 1) if made < len(self._choices) else 0


class ExhaustiveChooser(ReplayChooser):
    """Chooser that runs every schedule once, depth first: it repeats a prefix, then always picks the first step."""

    def __init__(self) -> None:
        super().__init__([])
        self._widths: list[int] = []
        self._picked: list[int] = []
        self.exhausted = False

    def begin(self) -> bool:
        """Start the next prefix; return False once every schedule has been run."""
        super().begin()
        return not self.exhausted

    def end(self, loop: SteppedLoop) -> None:
        """Set the next prefix, which ends with an untried alternative to the last choice that has any left.

        Raises:
            ReplayMismatch: if the repeated prefix did not offer the same steps as before.
        """
        if loop.widths[: len(self._widths)] != self._widths or loop.picked[: len(self._picked)] != self._picked:
            raise ReplayMismatch("repeating the first choices of an earlier schedule offered different steps")
        choices = list(loop.choices)
        widths = loop.widths
        at = len(choices) - 1
        while at >= 0 and choices[at] + 1 >= widths[at]:
            at -= 1
        if at < 0:
            self.exhausted = True
            return
        self._choices = [*choices[:at], choices[at] + 1]
        self._widths = widths[: at + 1]
        self._picked = loop.picked[:at]
