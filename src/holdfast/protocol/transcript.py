"""Folds the events of a run into transcript entries that are always valid: each tool call has exactly one result.

The running host feeds it what the run emits; recovery after a crash feeds it what the log holds. Both get the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from holdfast.protocol.events import Event, RunRestarted, TextDelta, ToolFinished, ToolStarted
from holdfast.protocol.messages import Entry, Message

__all__ = ["RunTranscript"]

INTERRUPTED_RESULT = "interrupted: this call has no result"


def _json(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class RunTranscript:
    """The entries of one run so far. Not safe across threads: the run's own loop feeds it.

    Parameters:
        run_id: events of other runs (children) are left out.
        messages: what the run took; they come first.
    """

    __slots__ = ("_called", "_entries", "_interrupted", "_messages", "_open", "_parts", "_run_id", "_text", "size")

    def __init__(self, run_id: str, messages: Iterable[Message]) -> None:
        self._run_id = run_id
        self._messages = tuple(messages)
        self._entries: list[Entry] = []
        self._parts: list[str] = []
        self._text: list[str] = []
        self._open: dict[str, str] = {}
        self._called: set[str] = set()
        self._interrupted: dict[str, str] = {}
        self.size = 0
        """Characters of text so far."""

    def say(self, text: str) -> None:
        """Add a piece of the answer."""
        self._parts.append(text)
        self.size += len(text)

    def feed(self, event: Event) -> None:
        """Add one event; kinds that are no part of a transcript are passed over."""
        match event:
            case TextDelta(run_id=self._run_id, text=text):
                self.say(text)
            case ToolStarted(call_id=call_id, name=name, arguments=arguments) if call_id not in self._called:
                self._flush(partial=False)
                self._called.add(call_id)
                self._open[call_id] = name
                self._entries.append(
                    Entry(role="tool_call", content=_json(arguments), call_id=call_id, name=name, run_id=self._run_id)
                )
            case ToolFinished(call_id=call_id, status=status, result=result, error=error) if call_id in self._open:
                content = _json(result) if status == "ok" else error or INTERRUPTED_RESULT
                if status == "interrupted":
                    self._interrupted[call_id] = self._open[call_id]
                self._result(call_id, content)
            case RunRestarted():
                self._restart()
            case _:
                pass

    def _restart(self) -> None:
        """A new attempt says everything again, and makes again only the calls that were interrupted."""
        self._parts.clear()
        self._text.clear()
        self.size = 0
        self._entries = [
            entry
            for entry in self._entries
            if entry.role != "assistant" and not (entry.role == "tool_result" and entry.call_id in self._interrupted)
        ]
        self._open.update(self._interrupted)
        self._interrupted.clear()

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join([*self._text, *self._parts])

    def entries(self, *, status: Literal["completed", "failed", "interrupted"]) -> list[Entry]:
        """All entries of the run, for its commit: the messages, then what it said and did; open calls get a result."""
        self._flush(partial=status != "completed")
        for call_id in list(self._open):
            self._result(call_id, INTERRUPTED_RESULT)
        return [
            *(
                Entry(role="user", content=m.content, message_id=m.message_id, run_id=self._run_id)
                for m in self._messages
            ),
            *self._entries,
        ]

    def _flush(self, *, partial: bool) -> None:
        if self._parts:
            text = "".join(self._parts)
            self._text.append(text)
            self._parts.clear()
            self._entries.append(Entry(role="assistant", content=text, run_id=self._run_id, partial=partial))

    def _result(self, call_id: str, content: str) -> None:
        name = self._open.pop(call_id)
        self._entries.append(
            Entry(role="tool_result", content=content, call_id=call_id, name=name, run_id=self._run_id)
        )
