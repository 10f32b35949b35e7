"""The calls of a chat: one line for each, and what is behind the newest ones for ``/show``."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.protocol.events import ToolFinished, ToolOutput, ToolStarted

__all__ = ["CallLog", "CallRecord", "short", "spent_time"]

_KEPT = 50
_OUTPUT_CHARS = 20_000
_SHORT = 120
_REASON = re.compile(r"\[([^\[\]\n]{1,200})\]\s*\Z")


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call: what was called, what it has printed, and how it ended."""

    name: str
    run_id: str
    arguments: Any
    began_at: float
    printed: str = ""
    omitted: int = 0
    result: Any = None
    error: str | None = None
    outcome: Literal["running", "ok", "failed", "error", "interrupted"] = "running"
    elapsed_s: float = 0.0

    @property
    def title(self) -> str:
        """The call's name with its arguments in a short form from which a reader can recognize the call."""
        return f"{self.name}{_arguments(self.arguments)}"

    @property
    def reason(self) -> str:
        """Why the call failed, in a few words; empty if the call did not fail."""
        if self.outcome == "interrupted":
            return "interrupted"
        if self.outcome == "error":
            return short(self.error or "error")
        if self.outcome == "failed":
            found = _REASON.search(_text(self.result)) or _REASON.search(self.printed)
            return found[1] if found else "failed"
        return ""

    def details(self) -> Iterator[str]:
        """Yield the lines that describe the call in full, as far as they are kept."""
        ended = "still running" if self.outcome == "running" else self.reason or "ok"
        yield f"{self.name}: {ended}{spent_time(self.elapsed_s)}"
        if self.arguments not in (None, {}, []):
            yield "arguments"
            named = self.arguments if isinstance(self.arguments, dict) else {"": self.arguments}
            for name, value in named.items():
                first, *more = _text(value).splitlines() or [""]
                yield f"  {name}: {first}" if name else f"  {first}"
                yield from (f"    {line}" for line in more)
        for title, text in (("output", self.printed), ("result", _text(self.result)), ("error", self.error or "")):
            if text and not (title == "result" and (self.result is None or text == self.printed)):
                yield title
                yield from (f"  {line}" for line in text.splitlines())
        if self.outcome == "interrupted" and not self.printed and self.result is None and not self.error:
            yield "no output"
        if self.omitted:
            yield f"… {self.omitted:,} more characters; 'holdfast export --events' has them"


@dataclass(slots=True, eq=False)
class CallLog:
    """The running calls by id, and the newest calls, the newest one last."""

    running: dict[str, CallRecord] = field(default_factory=dict)
    newest: deque[CallRecord] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def start(self, event: ToolStarted) -> CallRecord:
        """Add a call that begins."""
        record = CallRecord(event.name, event.run_id, event.arguments, event.at)
        self.running[event.call_id] = record
        self.newest.append(record)
        return record

    def add_output(self, event: ToolOutput) -> None:
        """Add what a call has printed; the end of a long output is not kept."""
        record = self.running.get(event.call_id)
        if record is not None:
            room = _OUTPUT_CHARS - len(record.printed)
            record.printed += event.text[:room]
            record.omitted += max(0, len(event.text) - room)

    def finish(self, event: ToolFinished) -> CallRecord:
        """End a call."""
        record = self.running.pop(event.call_id, None) or CallRecord("call", event.run_id, None, event.at)
        record.outcome = "failed" if event.status == "ok" and event.failed else event.status
        record.error = event.error
        record.elapsed_s = max(0.0, event.at - record.began_at)
        if isinstance(event.result, str) and len(event.result) > _OUTPUT_CHARS:
            record.result = event.result[:_OUTPUT_CHARS]
            record.omitted += len(event.result) - _OUTPUT_CHARS
        else:
            record.result = event.result
        return record

    def drop_running(self, run_id: str) -> None:
        """Forget the running calls of a run that has ended, and of its children."""
        for call_id, record in list(self.running.items()):
            if record.run_id == run_id or record.run_id.startswith(f"{run_id}."):
                record.outcome = "interrupted"
                del self.running[call_id]


def _arguments(arguments: Any) -> str:
    if not arguments:
        return ""
    if not isinstance(arguments, dict):
        return f" {short(_text(arguments))}"
    if arguments.keys() == {"args"} and isinstance(arguments["args"], list):  # of a plain function, without names
        return " " + short(", ".join(map(_text, arguments["args"])))
    if len(arguments) == 1:
        return f" {short(_text(next(iter(arguments.values()))))}"
    return " " + short(", ".join(f"{name}={_text(value)}" for name, value in arguments.items()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def short(text: str) -> str:
    """Return a text as one line of at most 120 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= _SHORT else f"{flat[: _SHORT - 1]}…"


def spent_time(seconds: float) -> str:
    """Return a duration for the end of a line; empty if it is too short to be of interest."""
    if seconds < 0.05:
        return ""
    return f"  {seconds:.1f} s" if seconds < 60 else f"  {seconds // 60:.0f} min {seconds % 60:.0f} s"
