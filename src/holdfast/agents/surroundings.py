"""The port of a run to its host, the host's limits, and the count of what is active in a run."""

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
    """The host's limits of a run.

    Parameters:
        call_s: deadline of a call without one of its own, in seconds.
        step_s: deadline of a step of an agent with a model, in seconds.
        answer_limit_bytes: characters of text that a run may emit in all.
        result_limit_bytes: maximum size of the JSON of one call's arguments or result.
        depth: how deep `delegate` may nest.
    """

    call_s: float = 60.0
    step_s: float = 120.0
    answer_limit_bytes: int = 16_000_000
    result_limit_bytes: int = 1_000_000
    depth: int = 8


class Surroundings(Protocol):
    """The host, as a run sees it. Used on the run's event loop only."""

    clock: Clock

    async def history(self) -> Sequence[Entry]:
        """Return the session's transcript before this run."""
        ...

    async def kept(self, n: int) -> str:
        """Return the state that an agent kept with the transcript's entry `n` (`KeptState.n`); empty if not found."""
        ...

    def find_agent(self, name: str) -> Agent:
        """Return the host's agent of that name. Raises `UnknownAgent`."""
        ...

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start work that outlives the run and belongs to the live session."""
        ...

    @property
    def steering(self) -> bool:
        """Whether a ``steer`` message may wait for this run."""
        ...

    async def steer(self, step: int) -> Sequence[Message]:
        """Take the messages steered to the run, before the step with that number. Durable when it returns."""
        ...

    async def suspend(self, question: Question) -> None:
        """Ask a person: when this returns, the question is durably open. A known id has no effect."""
        ...

    async def answered(self, question_id: str) -> Answer:
        """Wait for the answer to an open question; ``expired`` is one too."""
        ...

    def at_rest(self, resting: bool) -> None:
        """Report that the run and its children only wait for people, or no longer do."""
        ...

    async def attachment(self, digest: str) -> bytes:
        """Return the bytes of an attachment of the run's principal. Raises `UnknownAttachment`."""
        ...


class Lines:
    """Counts the tasks and threads of a run and its children that are active: a run is quiescent while all wait for
    people. One that waits for others of the run is counted through them. On the run's loop only.

    Parameters:
        on_change: called with True when nothing is active any more, and with False when something is again.
    """

    __slots__ = ("_on_change", "busy")

    def __init__(self, on_change: Callable[[bool], None]) -> None:
        self.busy = 1
        """How many are active."""
        self._on_change = on_change

    def add(self, number: int = 1) -> None:
        """Count that many more as active."""
        self.busy += number
        if number and self.busy == number:
            self._on_change(False)

    def remove(self, number: int = 1) -> None:
        """Count that many fewer as active."""
        self.busy -= number
        if number and not self.busy:
            self._on_change(True)
