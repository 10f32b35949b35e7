"""What a host lends to a run, and the bounds that it sets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.protocol.messages import Answer, Entry, Message, Question

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.clock import Clock

__all__ = ["Lines", "RunLimits", "Surroundings"]


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a run.

    Parameters:
        call_s: deadline of a call that names none, in seconds.
        step_s: deadline of a step of an agent with a model, in seconds.
        answer_limit_bytes: characters of text that a run may emit in all.
        result_limit_bytes: size of the JSON of one call's arguments or result.
        depth: how deep `delegate` may nest.
    """

    call_s: float = 60.0
    step_s: float = 120.0
    answer_limit_bytes: int = 16_000_000
    result_limit_bytes: int = 1_000_000
    depth: int = 8


class Surroundings(Protocol):
    """What the host lends to a run. Used on the run's event loop only."""

    clock: Clock

    async def history(self) -> Sequence[Entry]:
        """The session's transcript before this run."""
        ...

    async def kept(self, n: int) -> str:
        """What an agent kept with the transcript's entry `n` (`KeptState.n`); empty if that cannot be found."""
        ...

    def find_agent(self, name: str) -> Agent:
        """The host's agent of that name. Raises `UnknownAgent`."""
        ...

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start work that outlives the run and belongs to the session's activation."""
        ...

    @property
    def steering(self) -> bool:
        """Whether a ``steer`` message may wait for this run."""
        ...

    async def steer(self, step: int) -> Sequence[Message]:
        """Take what was steered to the run, before the step of that number. Durable when it returns."""
        ...

    async def suspend(self, question: Question) -> None:
        """Ask a person: the question is open, durably, when this returns. A known id has no effect."""
        ...

    async def answered(self, question_id: str) -> Answer:
        """Wait for the answer to an open question; ``expired`` is one too."""
        ...

    def at_rest(self, resting: bool) -> None:
        """Tell that all lines of the run and its children wait for people only, or do so no more."""
        ...

    async def attachment(self, digest: str) -> bytes:
        """The bytes of an attachment of the run's principal. Raises `UnknownAttachment`."""
        ...


class Lines:
    """Counts the lines of execution of a run, and of its children, that do something: a run whose lines all wait for
    people is at rest. A line that waits for other lines of the run is counted through them. On the run's loop only.

    Parameters:
        tell: gets True when nothing is busy any more, and False when something is again.
    """

    __slots__ = ("_busy", "_tell")

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self._busy = 1
        self._tell = tell

    def add(self, lines: int = 1) -> None:
        """So many more are busy."""
        self._busy += lines
        if lines and self._busy == lines:
            self._tell(False)

    def remove(self, lines: int = 1) -> None:
        """So many are busy no more."""
        self._busy -= lines
        if lines and not self._busy:
            self._tell(True)
