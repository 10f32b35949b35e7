"""The interfaces that a run needs from its host: `RunHost`, and the `Recorder` of events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.agents.program_usage import ProgramAccounts
    from holdfast.clock import Clock
    from holdfast.protocol.events import Event
    from holdfast.protocol.messages import Answer, Entry, Grant, Message, Question

__all__ = ["Recorder", "RunHost", "WalledStart"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WalledStart:
    """How to start a program behind a wall.

    Parameters:
        options: options of `Scope.process`, ``argv`` included. The caller closes ``pass_fds`` after the start.
        on_gone: called, from any thread, when the program is gone or did not start; None if no call is needed.
    """

    options: dict[str, Any]
    on_gone: Callable[[], object] | None = None


class RunHost(Protocol):
    """The services of the host that a run uses, on the run's event loop only."""

    clock: Clock

    @property
    def programs(self) -> ProgramAccounts:
        """The host's accounts of what the programs of each principal use."""
        ...

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

    async def grants(self) -> Sequence[Grant]:
        """Return the grants that hold in the run's session now."""
        ...

    def watch_grants(self, on_revoked: Callable[[str], None]) -> Callable[[], None]:
        """Call `on_revoked` with the id of each grant of the run's principal that is revoked from now on.

        Return a function that ends the watch. The callback runs on the run's event loop.
        """
        ...

    def on_quiescence(self, is_quiescent: bool) -> None:
        """Handle that the run has become quiescent (True) or active again (False); see `ActivityCounter`."""
        ...

    async def launch(self, argv: Sequence[str], sandbox: object, options: Mapping[str, Any]) -> WalledStart:
        """Return how to start a program behind a wall for the session.

        Parameters:
            sandbox: a `holdfast.tools.Sandbox`.
            options: options of `Scope.process`; ``cwd`` is the folder that the program may change.

        Raises:
            NotSupported: if this machine cannot build the wall.
            ConfigurationError: if a path or a secret of the sandbox is missing.
        """
        ...

    async def use_workspace(self) -> None:
        """Record that the session has files on this host, before the first one is made; see `Run.use_workspace`."""
        ...

    async def attachment(self, digest: str) -> bytes:
        """Return an attachment's bytes. Raises `UnknownAttachment` if the run's principal has no such attachment."""
        ...
