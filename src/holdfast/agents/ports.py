"""The interfaces that a run needs from its host: `RunHost` and the `Recorder` of the run's events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.clock import Clock
    from holdfast.protocol.events import Event
    from holdfast.protocol.messages import Answer, Entry, Message, Question

__all__ = ["Recorder", "RunHost"]


class Recorder(Protocol):
    """The sink for a run's events, implemented by the host. Used on the run's event loop only."""

    @property
    def behind(self) -> bool:
        """Whether too many events wait to be stored. May be read from any thread."""
        ...

    def write(self, event: Event) -> None:
        """Accept an event, which is stored within milliseconds."""
        ...

    async def written(self) -> None:
        """Wait until all accepted events are stored. Success proves that the run still held its session's lease."""
        ...

    async def room(self) -> None:
        """Wait while `behind` is true."""
        ...

    def late(self) -> None:
        """Count output that was produced after the end of its run or call."""
        ...


class RunHost(Protocol):
    """The services of the host that a run uses, on the run's event loop only."""

    clock: Clock

    async def history(self) -> Sequence[Entry]:
        """Return the session's transcript before this run."""
        ...

    async def agent_state(self, n: int) -> str:
        """Return the state that an agent stored with entry `n` of the transcript (`AgentState.n`).

        If that state is not found, return an empty string.
        """
        ...

    def find_agent(self, name: str) -> Agent:
        """Return the host's agent with this name. Raises `UnknownAgent` if the host has no such agent."""
        ...

    def background(self, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start work that outlives the run and belongs to the live session."""
        ...

    @property
    def steering(self) -> bool:
        """Whether a ``steer`` message may be waiting for this run."""
        ...

    async def steer(self, step: int) -> Sequence[Message]:
        """Take the messages steered to the run, at the start of step number `step`.

        On return, the store has durably recorded that the run took them at that step.
        """
        ...

    async def suspend(self, question: Question) -> None:
        """Open a question to a person. On return, the question is durable.

        If the run has already opened a question with this id, do nothing.
        """
        ...

    async def answered(self, question_id: str) -> Answer:
        """Wait for the answer to an open question and return the answer, which may be ``expired``."""
        ...

    def on_quiescence(self, is_quiescent: bool) -> None:
        """Handle that the run has become quiescent (True) or active again (False); see `ActivityCounter`."""
        ...

    async def attachment(self, digest: str) -> bytes:
        """Return an attachment's bytes. Raises `UnknownAttachment` if the run's principal has no such attachment."""
        ...
