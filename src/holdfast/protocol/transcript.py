"""Conversion of a run's events to transcript entries that are always valid: each tool call has exactly one result.

A running host converts the events as they are emitted; recovery after a crash converts the events in the log. Both
produce the same entries.

Invariants
- The text of a step appears once, because the step's ``step.finished`` replaces the earlier pieces of its text.
- A call is open from the ``step.finished`` or ``tool.started`` that names the call until the call's ``tool.finished``.
  `entries` adds a result to each call that is still open.
- Calls made inside a call or a child are excluded. Their ids begin with the id of the outer call or child.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from holdfast.protocol.events import (
    ChildStarted,
    Event,
    MessageSteered,
    RunRestarted,
    StepFinished,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import AgentState, EndedBy, Entry, Message
from holdfast.protocol.model import NO_RESULT
from holdfast.protocol.stopping import Cause

__all__ = ["STEP_BREAK", "RunTranscript", "last_agent_state", "memory_bytes", "result_text"]

_ENTRY_BYTES = 256

STEP_BREAK = "\n\n"
"""Separator between the texts of two steps in a run's answer."""


def result_text(result: ToolFinished) -> str:
    """Return the result or error of a call as text for the model."""
    return _json(result.result) if result.status == "ok" else result.error or NO_RESULT


def memory_bytes(entries: Iterable[Entry]) -> int:
    """Return the approximate memory use of entries, in bytes."""
    size = 0
    for entry in entries:
        size += _ENTRY_BYTES + _text_bytes(entry.content) + len(entry.run_id or "")
        if entry.call_id is not None:
            size += len(entry.call_id) + len(entry.name or "")
        if entry.attachments:
            size += _ENTRY_BYTES * len(entry.attachments)
    return size


def _text_bytes(text: str) -> int:
    """Return a text's approximate size; stable, unlike ``sys.getsizeof``, which grows once a text is encoded."""
    return len(text) if text.isascii() else 4 * len(text)


def last_agent_state(entries: Sequence[Entry]) -> AgentState | None:
    """Return the last agent state in the entries that a summary replaces; None if no entry has an agent state."""
    return next((entry.agent_state for entry in reversed(entries) if entry.agent_state is not None), None)


def _ended_by(status: Literal["failed", "interrupted"], cause: Cause | None) -> EndedBy:
    if status == "failed":
        return "failure"
    while cause is not None and cause.parent is not None:
        cause = cause.parent
    return "stop" if cause is None else cause.kind


def _json(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class RunTranscript:
    """The entries of one run so far. Not thread-safe: use it only on the run's event loop.

    Parameters:
        run_id: id of the run; events of other runs and of children are ignored.
        messages: messages that the run took. They precede all other entries, except for steered messages, which are
            placed where the run received them.
    """

    __slots__ = (
        "_begun",
        "_entries",
        "_interrupted",
        "_messages",
        "_open",
        "_parts",
        "_run_id",
        "_steered",
        "_stepped",
        "_text",
        "agent_state",
        "size",
    )

    def __init__(self, run_id: str, messages: Iterable[Message]) -> None:
        self._run_id = run_id
        self._messages = {message.message_id: message for message in messages}
        self._entries: list[Entry] = []
        self._parts: list[str] = []
        self._text: list[str] = []
        self._open: dict[str, str] = {}
        self._begun: set[str] = set()  # ids of calls and children
        self._interrupted: dict[str, str] = {}
        self._steered: set[str] = set()
        self._stepped = False
        self.size = 0
        """Number of characters of text so far."""
        self.agent_state: AgentState | None = None
        """Agent state that the run's last entry keeps for the session's next run, if this run completes."""

    def say(self, text: str) -> None:
        """Add a piece of the answer."""
        self._parts.append(text)
        self.size += len(text)

    def know(self, messages: Iterable[Message]) -> None:
        """Add messages that the active run took later; their ``message.steered`` events determine their position."""
        for message in messages:
            self._messages.setdefault(message.message_id, message)
            self._steered.add(message.message_id)

    def feed(self, event: Event) -> None:
        """Add one event; kinds that do not affect a transcript are ignored."""
        match event:
            case TextDelta(run_id=self._run_id, text=text):
                self.say(text)
            case ToolStarted(call_id=call_id, name=name, arguments=arguments):
                if call_id not in self._begun and not self._is_inner(call_id):
                    self._flush(partial=False)
                    self._begin(call_id, name, _json(arguments))
            case ToolFinished(call_id=call_id, status=status) if call_id in self._open:
                if status == "interrupted":
                    self._interrupted[call_id] = self._open[call_id]
                self._result(call_id, result_text(event), status)
            case StepFinished(run_id=self._run_id):
                self._close_step(event)
            case MessageSteered(run_id=self._run_id, message_id=message_id):
                self._steer(message_id)
            case ChildStarted(child_id=child_id):
                self._begun.add(child_id)
            case RunRestarted(run_id=self._run_id):
                self._restart()
            case _:
                pass

    def _is_inner(self, call_id: str) -> bool:
        end = call_id.rfind(".")
        while end > len(self._run_id):
            outer = call_id[:end]
            if outer in self._begun:
                return True
            end = call_id.rfind(".", 0, end)
        return False

    def _begin(self, call_id: str, name: str, arguments: str) -> None:
        self._begun.add(call_id)
        self._open[call_id] = name
        self._entries.append(
            Entry(role="tool_call", content=arguments, call_id=call_id, name=name, run_id=self._run_id)
        )

    def _close_step(self, step: StepFinished) -> None:
        if step.step < 1:
            return  # a summary, for the model only
        self._stepped = True
        self._parts.clear()
        if step.text:
            self._text.append(STEP_BREAK + step.text if self._text else step.text)
            self._entries.append(Entry(role="assistant", content=step.text, run_id=self._run_id))
        self.size = sum(map(len, self._text))
        for call in step.calls:
            self._begin(call.call_id, call.name, _json(call.arguments))

    def _steer(self, message_id: str) -> None:
        message = self._messages.get(message_id)
        if message is None:
            return
        self._steered.add(message_id)
        if not any(entry.message_id == message_id for entry in self._entries):
            self._flush(partial=False)
            self._entries.append(self._user(message))

    def _restart(self) -> None:
        """Prepare for a new attempt: it resumes after the last complete step; a run without steps repeats its output.

        The attempt repeats only the calls that were interrupted.
        """
        self._parts.clear()
        if not self._stepped:
            self._text.clear()
        self.size = sum(map(len, self._text))
        self._entries = [
            entry
            for entry in self._entries
            if (entry.role != "assistant" or self._stepped)
            and not (entry.role == "tool_result" and entry.call_id in self._interrupted)
        ]
        self._open.update(self._interrupted)
        self._interrupted.clear()

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join([*self._text, *self._parts])

    def entries(
        self, *, status: Literal["completed", "failed", "interrupted"], cause: Cause | None = None
    ) -> list[Entry]:
        """Return all entries of the run for its commit. Calls that are still open get the result `NO_RESULT`.

        Parameters:
            status: how the run ended. If the run did not complete, its last entry is marked with the reason.
            cause: why the run was interrupted; None if it was not.
        """
        self._flush(partial=status != "completed")
        for call_id in list(self._open):
            self._result(call_id, NO_RESULT, "interrupted")
        entries = self._in_order()
        if self.agent_state is not None and entries and status == "completed":
            entries[-1] = msgspec.structs.replace(entries[-1], agent_state=self.agent_state)
        if entries and status != "completed":
            entries[-1] = msgspec.structs.replace(entries[-1], ended_by=_ended_by(status, cause))
        return entries

    def _in_order(self) -> list[Entry]:
        if not self._steered:
            return [*map(self._user, self._messages.values()), *self._entries]
        placed = {entry.message_id for entry in self._entries if entry.role == "user"}
        first = [self._user(m) for m in self._messages.values() if m.message_id not in self._steered]
        late = [self._user(self._messages[m]) for m in self._messages if m in self._steered and m not in placed]
        return [*first, *self._entries, *late]

    def _user(self, message: Message) -> Entry:
        return Entry(
            role="user",
            content=message.content,
            message_id=message.message_id,
            run_id=self._run_id,
            attachments=message.attachments,
        )

    def _flush(self, *, partial: bool) -> None:
        if self._parts:
            text = "".join(self._parts)
            said = text.removeprefix(STEP_BREAK) if self._text else text
            self._text.append(text)
            self._parts.clear()
            if said:
                self._entries.append(Entry(role="assistant", content=said, run_id=self._run_id, partial=partial))

    def _result(self, call_id: str, content: str, status: Literal["ok", "error", "interrupted"]) -> None:
        name = self._open.pop(call_id)
        self._entries.append(
            Entry(role="tool_result", content=content, call_id=call_id, name=name, run_id=self._run_id, status=status)
        )
