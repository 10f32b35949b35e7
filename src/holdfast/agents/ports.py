"""The ports of a run: its host, and the recorder of its events. The host implements both."""

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
        """Accept an event; it is stored within milliseconds."""
        ...

    async def written(self) -> None:
        """Wait until all accepted events are stored, which proves that the run still held its session."""
        ...

    async def room(self) -> None:
        """Wait while `behind`."""
        ...

    def late(self) -> None:
        """Count late output, from a run or call that has ended."""
        ...


class RunHost(Protocol):
    """The host, as a run sees it. Used on the run's event loop only."""

    clock: Clock

    async def history(self) -> Sequence[Entry]:
        """Return the session's transcript before this run."""
        ...

    async def agent_state(self, n: int) -> str:
        """Return the state that an agent kept with the transcript's entry `n` (`AgentState.n`); empty if not found."""
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
        """Take the messages steered to the run, before the step with that number. Durable on return."""
        ...

    async def suspend(self, question: Question) -> None:
        """Ask a person: on return, the open question is durable. A question with a known id has no effect."""
        ...

    async def answered(self, question_id: str) -> Answer:
        """Wait for the answer to an open question, which may be ``expired``."""
        ...

    def on_quiescence(self, is_quiescent: bool) -> None:
        """Report whether the run and its children only wait for people; called when this changes."""
        ...

    async def attachment(self, digest: str) -> bytes:
        """Return the bytes of an attachment of the run's principal. Raises `UnknownAttachment`."""
        ...
