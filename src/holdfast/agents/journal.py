"""The journal of a run: each call's intent is durable before its effect, and a result that is in the log is replayed.

A call's id is its place in the program: the run's id, then the branch, then its number there. Branches (`Run.spawn`,
`Run.parallel`, `Run.delegate`) count for themselves, so the ids are the same in every attempt, however the branches
interleave.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Protocol

from holdfast.errors import NotDeterministic
from holdfast.protocol.events import Event, RunRestarted, ToolFinished, ToolStarted

__all__ = ["Branch", "Journal", "Recorder", "current_branch"]


class Recorder(Protocol):
    """Where a run's events go. Given by the host; used on the run's event loop only."""

    @property
    def behind(self) -> bool:
        """Whether too much is given and not yet stored. May be read from any thread."""
        ...

    def write(self, event: Event) -> None:
        """Take an event; it is stored within milliseconds."""
        ...

    async def written(self) -> None:
        """Wait until all that was given to `write` is stored: the run then still held its session."""
        ...

    async def room(self) -> None:
        """Wait while `behind`."""
        ...


class Branch:
    """A line of execution that numbers its calls."""

    __slots__ = ("_numbers", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self._numbers = itertools.count(1)

    def next_id(self) -> str:
        """The id of the next call or branch. From any thread."""
        return f"{self.path}.{next(self._numbers)}"


current_branch: ContextVar[Branch | None] = ContextVar("holdfast_branch", default=None)


class Journal:
    """What earlier attempts of a run called, by call id, and whether the run could be made once more.

    Parameters:
        events: the stored events of the run, oldest first; empty in a first attempt.
    """

    __slots__ = ("_intents", "_open", "_restarts", "_results", "replayed")

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._intents: dict[str, ToolStarted] = {}
        self._results: dict[str, ToolFinished] = {}
        self._open: set[str] = set()
        self._restarts = 0
        self.replayed = 0
        """Results that were taken from the log in this attempt."""
        for event in events:
            if isinstance(event, ToolStarted):
                self._intents[event.call_id] = event
                self.begun(event)
            elif isinstance(event, ToolFinished):
                self.ended(event)
                if event.status != "interrupted":
                    self._results[event.call_id] = event
                    self._restarts = 0
            elif isinstance(event, RunRestarted):
                self._restarts += 1

    @property
    def restarts_in_vain(self) -> int:
        """Restarts since the last call that came to a result: a run that gets on may be restarted again and again."""
        return self._restarts

    @property
    def replayable(self) -> bool:
        """Whether each call that was started, in this attempt too, has its result, or may be made again."""
        return not self._open

    def begun(self, call: ToolStarted) -> None:
        """A call is made."""
        if not call.idempotent:
            self._open.add(call.call_id)

    def ended(self, call: ToolFinished) -> None:
        """A call has ended; where it was interrupted, its effect may be there or not."""
        if call.status != "interrupted":
            self._open.discard(call.call_id)

    def past(self, call_id: str, name: str, arguments: object) -> ToolFinished | None:
        """The result of the call in an earlier attempt. Raises `NotDeterministic` if that was another call."""
        intent = self._intents.get(call_id)
        if intent is None:
            return None
        if intent.name != name:
            raise NotDeterministic(f"call {call_id} was {intent.name!r} in an earlier attempt and is {name!r} now")
        if intent.arguments != arguments:
            raise NotDeterministic(f"call {call_id}, {name!r}, had other arguments in an earlier attempt than now")
        result = self._results.get(call_id)
        if result is not None:
            self.replayed += 1
        return result
