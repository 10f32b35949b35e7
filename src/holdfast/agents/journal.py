"""The journal of a run. A call's intent is durable before the call has an effect, and a recorded result is replayed.

A call's id encodes the call's place in the program: the run's id, then the numbers on the call path. Subtasks, parallel
functions and children number their own calls, so the ids are the same in every attempt, even if the work interleaves
differently.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar

from holdfast.errors import NotDeterministic
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    MessageSteered,
    RunRestarted,
    RunResumed,
    RunSuspended,
    StepFinished,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import Answer, Usage

__all__ = ["CallPath", "Journal", "current_call_path"]


class CallPath:
    """The position of a task or thread in the run's call tree; numbers the calls made there."""

    __slots__ = ("_numbers", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self._numbers = itertools.count(1)

    def next_id(self) -> str:
        """Return the id of the next call, subtask or child. Callable from any thread."""
        return f"{self.path}.{next(self._numbers)}"


_NO_IDS: frozenset[str] = frozenset()

current_call_path: ContextVar[CallPath | None] = ContextVar("holdfast_branch", default=None)


class Journal:
    """The recorded calls, steps, answers and children of a run, and whether the run can be replayed.

    Parameters:
        events: the stored events of the run, oldest first; empty in a first attempt.
    """

    __slots__ = (
        "_answers",
        "_asked",
        "_children",
        "_inside",
        "_intents",
        "_names",
        "_open",
        "_restarts",
        "_results",
        "_steered",
        "_steps",
        "discard_from",
        "remembers",
        "replayed",
    )

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._intents: dict[str, ToolStarted] = {}
        self._results: dict[str, ToolFinished] = {}
        self._steps: dict[tuple[str, int], StepFinished] = {}
        self._steered: dict[int, list[str]] = {}
        self._answers: dict[str, Answer] = {}
        self._asked: set[str] = set()
        self._children: dict[str, ChildStarted | ChildFinished] = {}
        self._open: dict[str, None] = {}
        self._names: dict[str, None] = {}
        self._restarts = 0
        self._inside: dict[str, Usage] | None = None  # usage, by the id of the call or child around it
        self.replayed = 0
        """The number of results that this attempt has taken from the log."""
        self.remembers = False
        """Whether to record this attempt's own calls and children too, so that code that runs again after an answer
        does not repeat them. Must be set before the first call or child starts."""
        self.discard_from: int | None = None
        """The seq from which a new attempt repeats all output; None means from the start of the run."""
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case ToolStarted():
                self._intents[event.call_id] = event
                self.begun(event)
            case ToolFinished():
                self.ended(event)
                if event.status != "interrupted":
                    self._results[event.call_id] = event
                    self._restarts = 0
            case StepFinished(run_id=run_id, step=step):
                self._steps[run_id, step] = event
                self._restarts = 0
                if run_id not in self._children:
                    self.discard_from = event.seq + 1
            case MessageSteered(message_id=message_id, step=step):
                self._steered.setdefault(step, []).append(message_id)
            case RunSuspended(question=question):
                self._asked.add(question.question_id)
            case RunResumed(answer=answer):
                self._answers[answer.question_id] = answer
                self._restarts = 0
            case ChildStarted(child_id=child_id):
                self._children[child_id] = event
            case ChildFinished(child_id=child_id):
                self._children[child_id] = event
                self.child_ended(event)
            case RunRestarted():
                self._restarts += 1
            case _:
                pass

    @property
    def restarts_in_vain(self) -> int:
        """The number of restarts since a step or call last completed, or a question was last answered."""
        return self._restarts

    @property
    def replayable(self) -> bool:
        """Whether each started call, including calls of this attempt, has a recorded result or may be repeated."""
        return not self._open

    @property
    def begun_names(self) -> tuple[str, ...]:
        """The names of all started calls, including calls of this attempt. Each may have had effects."""
        return tuple(self._names)

    @property
    def steered_ids(self) -> frozenset[str]:
        """The ids of the steered messages that earlier attempts took."""
        if not self._steered:
            return _NO_IDS
        return frozenset(message_id for ids in self._steered.values() for message_id in ids)

    def begun(self, call: ToolStarted) -> None:
        """Record the start of a call."""
        self._names[call.name] = None
        if self.remembers:
            self._intents[call.call_id] = call
        if not call.idempotent:
            self._open[call.call_id] = None

    def ended(self, call: ToolFinished) -> None:
        """Record the end of a call. An interrupted call stays open, because it may already have had an effect."""
        if call.status != "interrupted":
            if self.remembers:
                self._results[call.call_id] = call
            self._open.pop(call.call_id, None)
            self._close_inside(call.call_id)

    def child_ended(self, child: ChildFinished) -> None:
        """Record the end of a child. If the end is final (see `stands`), the child's open calls are not repeated."""
        if self.remembers:
            self._children[child.child_id] = child
        if stands(child):
            self._close_inside(child.child_id)

    def _close_inside(self, outer: str) -> None:
        if self._open:
            for call_id in [call_id for call_id in self._open if call_id.startswith(f"{outer}.")]:
                del self._open[call_id]

    def past(self, call_id: str, name: str, arguments: object) -> ToolFinished | None:
        """Return the call's result from an earlier attempt, or None if the earlier attempts have no result.

        Raises:
            NotDeterministic: if an earlier attempt made a different call with this id.
        """
        intent = self._intents.get(call_id)
        if intent is None:
            return None
        if intent.name != name:
            raise NotDeterministic(f"call {call_id} was {intent.name!r} in an earlier attempt and is {name!r} now")
        if intent.arguments != arguments:
            raise NotDeterministic(f"call {call_id}, {name!r}, had different arguments in an earlier attempt")
        result = self._results.get(call_id)
        if result is not None:
            self.replayed += 1
        return result

    def has_result(self, call_id: str) -> bool:
        """Return whether the call has a recorded result, so that it is not repeated."""
        return call_id in self._results

    def step(self, run_id: str, step: int) -> StepFinished | None:
        """Return a step that an earlier attempt finished, or None."""
        return self._steps.get((run_id, step))

    def steered(self, step: int) -> Sequence[str]:
        """Return the ids of the messages that an earlier attempt took at the start of the step with this number."""
        return self._steered.get(step, ())

    def was_asked(self, question_id: str) -> bool:
        """Return whether an earlier attempt asked this question, answered or not."""
        return question_id in self._asked

    def answer(self, question_id: str) -> Answer | None:
        """Return the recorded answer to a question, or None."""
        return self._answers.get(question_id)

    def outcome(self, child_id: str, agent: str) -> ChildFinished | None:
        """Return the child's final outcome from an earlier attempt, or None if the child has no final outcome.

        Raises:
            NotDeterministic: if an earlier attempt started another agent as the child with this id.
        """
        known = self._children.get(child_id)
        if known is None:
            return None
        if isinstance(known, ChildFinished):
            return known if stands(known) else None
        if known.agent != agent:
            raise NotDeterministic(f"child {child_id} was {known.agent!r} in an earlier attempt and is {agent!r} now")
        return None

    def knows_child(self, child_id: str) -> bool:
        """Return whether an earlier attempt started the child."""
        return child_id in self._children

    def left_open(self, child_id: str) -> bool:
        """Return whether an earlier attempt started the child but recorded no final outcome."""
        known = self._children.get(child_id)
        return known is not None and not (isinstance(known, ChildFinished) and stands(known))

    def used_inside(self, child_id: str) -> Usage:
        """Return the recorded usage of all completed steps and calls inside a child or call, at any depth."""
        if self._inside is None:
            self._inside = self._sum_up()
        return self._inside.get(child_id, Usage())

    def _sum_up(self) -> dict[str, Usage]:
        inside: defaultdict[str, Usage] = defaultdict(Usage)
        for (run_id, _), step in self._steps.items():
            for outer in (run_id, *_around(run_id)):
                inside[outer] += step.usage
        for call_id in self._results:
            for outer in _around(call_id):
                inside[outer] += Usage(tool_calls=1)
        return inside


def _around(inner: str) -> Iterator[str]:
    """Yield the ids of all calls and children around this one, innermost first."""
    end = inner.rfind(".")
    while end > 0:
        yield inner[:end]
        end = inner.rfind(".", 0, end)


def stands(child: ChildFinished) -> bool:
    """Return whether the child's end is final. If not, the child was interrupted together with its parent, and a new
    attempt resumes the child."""
    return child.status != "interrupted" or child.error is not None
