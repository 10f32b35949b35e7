"""Display of ``holdfast chat``: the answer as it streams, and everything else in short dim lines."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.cli.approvals import whole
from holdfast.cli.output import ended, note, printable, say_json, visible
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    Gap,
    HistoryEdited,
    MessageAccepted,
    MessageSettled,
    MessageSteered,
    ReasoningDelta,
    RunFinished,
    RunRestarted,
    RunResumed,
    RunRolledBack,
    RunStopping,
    RunSuspended,
    SessionDeletedEvent,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
)

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.protocol.messages import Question, SessionView, Usage
    from holdfast.protocol.stopping import StopReceipt

__all__ = ["ChatView", "JsonChatView"]

_SHORT = 120
_OUTPUT_CHARS = 4000


class ChatView:
    """The chat's display on a terminal; printed text from agents and users cannot control the terminal."""

    def __init__(self) -> None:
        self._column = 0
        self._tty = sys.stdout.isatty()
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if self._tty and "NO_COLOR" not in os.environ else ("", "")
        self._calls: dict[str, str] = {}
        self._shown: dict[str, int] = {}
        self._speaker: str | None = None

    def _write(self, text: str, *, dim: bool = False) -> None:
        shown = printable(text)
        if shown:
            sys.stdout.write(f"{self._dim}{shown}{self._plain}" if dim else shown)
            sys.stdout.flush()
            self._column = 0 if shown.endswith("\n") else 1

    def _speak(self, speaker: str) -> None:
        """Start a new line when the speaker changes: the answer, the reasoning or a call's output."""
        if speaker != self._speaker:
            if self._column:
                self._write("\n")
            self._speaker = speaker

    def line(self, text: str) -> None:
        """Print a dim line."""
        if not self._tty:
            note(f"[{text}]")
            return
        self._speak("")
        if self._column:
            self._write("\n")
        self._write(f"[{text}]", dim=True)
        self._write("\n")

    def prompt(self, sign: str = "> ") -> None:
        """Prompt for the next line."""
        if self._tty:
            self._speak("person")
            if self._column:
                self._write("\n")
            self._write(sign)
            self._column = 0  # what the person types ends with a line break

    def greet(self, key: str, url: str, view: SessionView | None) -> None:
        """Print the first line."""
        state = "new" if view is None else f"{view.state}, {view.waiting} waiting" if view.waiting else view.state
        self.line(f"session {key} at {url}, {state}; Ctrl-C interrupts, twice stops, Ctrl-D exits, /help for help")

    def entry(self, role: str, content: str, *, partial: bool) -> None:
        """Print an earlier entry of the transcript."""
        if role == "user":
            self._write(f"> {content}\n")
            if partial:
                self.line("interrupted")
        elif role == "assistant":
            self._write(content if content.endswith("\n") else f"{content}\n")
            if partial:
                self.line("interrupted")
        elif role == "summary":
            self.line(f"summary: {content[:_SHORT]}")

    def receipt(self, receipt: StopReceipt) -> None:
        """Print the receipt of a stop."""
        self.line(f"{receipt.outcome} after {receipt.elapsed_s * 1000:.0f} ms: {ended(receipt)}")
        for left in receipt.abandoned:
            self.line(f"abandoned: {left.kind} {left.name}")

    def error(self, error: HoldfastError) -> None:
        """Print an error."""
        self.line(str(error))

    def cut(self, error: HoldfastError) -> None:
        """Report that the connection was lost."""
        self.line(f"{error.message}; reconnecting …")

    def back(self) -> None:
        """Report that the connection is back."""
        self.line("reconnected")

    def leave(self, *, busy: bool) -> None:
        """Print the last line."""
        if self._tty:
            self.line("the run continues; 'holdfast chat' returns to it" if busy else "bye")

    def question(self, question: Question) -> None:
        """Show a question of a run, and prompt for the answer."""
        if question.kind == "question":
            self.line(f"question: {visible(question.text)}")
            self.prompt("answer> ")
        else:
            self.line(f"approve {whole(question)}?  y, n, or n and a reason")
            self.prompt("y/n> ")

    def show(self, event: Event | Gap, *, ours: bool, idle: bool) -> None:
        """Show an event as it arrives."""
        match event:
            case TextDelta():
                text = event.text if event.run_id == self._speaker else event.text.lstrip("\n")
                self._speak(event.run_id)
                self._write(text, dim=_is_child(event.run_id))
            case ReasoningDelta():
                self._speak("reasoning")
                self._write(event.text, dim=True)
            case MessageAccepted():
                if not ours:
                    self.line(f"message: {_short(event.content)}")
            case StepStarted():
                if event.label or event.step > 1:
                    whose = "child's step" if _is_child(event.run_id) else "step"
                    self.line(f"{whose} {event.step} {event.label}".rstrip())
            case ToolStarted():
                self._calls[event.call_id] = event.name
                self.line(f"{event.name}{_arguments(event.arguments)}")
            case ToolOutput():
                self._show_output(event)
            case ToolFinished():
                self._show_result(event)
            case MessageSettled():
                if idle:
                    self.prompt()
            case RunFinished():
                self._finish(event)
            case _:
                told = _told(event)
                if told:
                    self.line(told)

    def _show_output(self, event: ToolOutput) -> None:
        """Show the output of a call in dim text; if the output is long, show only its beginning."""
        before = self._shown.get(event.call_id, 0)
        self._shown[event.call_id] = before + len(event.text)
        if before > _OUTPUT_CHARS:
            return
        if self._speaker not in (None, event.call_id) and len(self._calls) > 1:
            self.line(f"{self._calls.get(event.call_id, 'call')}:")
        self._speak(event.call_id)
        self._write(event.text[: _OUTPUT_CHARS - before], dim=True)
        if before + len(event.text) > _OUTPUT_CHARS:
            self.line("… truncated; 'holdfast export --events' has all of it")

    def _show_result(self, event: ToolFinished) -> None:
        name = self._calls.pop(event.call_id, "call")
        streamed = self._shown.pop(event.call_id, 0)
        if event.status == "ok":
            result = "" if streamed or event.result in (None, "") else f": {_short(_text(event.result))}"
            self.line(f"{name} ok{result}")
        else:
            self.line(f"{name} {event.status}{f': {_short(event.error)}' if event.error else ''}")

    def _finish(self, event: RunFinished) -> None:
        self._speak("")
        if self._column:
            self._write("\n")
        self._calls.clear()
        self._shown.clear()
        if event.status == "failed":
            self.line(f"failed: {event.error or 'no reason given'}")
        elif event.status == "interrupted":
            cause = event.cause
            self.line(f"interrupted: {_why(cause.kind, cause.reason) if cause else event.error or 'no reason given'}")
        if event.usage.input_tokens:
            self.line(_spent(event.usage))


def _is_child(run_id: str) -> bool:
    """Return whether a run is a child run, whose id is a path below its parent's id."""
    return "." in run_id


def _told(event: Event | Gap) -> str | None:
    """Return an event as one line, or None for an event that is not shown."""
    match event:
        case MessageSteered():
            return f"delivered before step {event.step}"
        case ChildStarted():
            return f"child {event.agent}: {_short(event.text)}"
        case ChildFinished():
            return f"child {event.status}{f': {_short(event.error)}' if event.error else ''}"
        case RunSuspended():
            return None  # the conversation asks
        case RunResumed():
            answer = event.answer
            return f"{answer.decision}{f': {_short(answer.text)}' if answer.text else ''}"
        case RunRestarted():
            return f"the server restarted; the run continues, attempt {event.attempt}"
        case RunStopping():
            return f"stopping: {_why(event.cause.kind, event.cause.reason)}"
        case RunRolledBack():
            left = f"; not undone: {', '.join(event.not_undone)}" if event.not_undone else ""
            return f"rolled back{left}"
        case HistoryEdited():
            return f"{event.edit}: the transcript was changed"
        case SessionDeletedEvent():
            return "the session was deleted"
        case Gap():
            return f"events {event.after + 1} to {event.until} are missing"
        case _:
            return None


def _arguments(arguments: Any) -> str:
    """Return a call's arguments in a short form from which a reader can recognize the call."""
    if not arguments:
        return ""
    if not isinstance(arguments, dict):
        return f" {_short(_text(arguments))}"
    if arguments.keys() == {"args"} and isinstance(arguments["args"], list):  # of a plain function, without names
        return " " + _short(", ".join(map(_text, arguments["args"])))
    if len(arguments) == 1:
        return f" {_short(_text(next(iter(arguments.values()))))}"
    return " " + _short(", ".join(f"{name}={_text(value)}" for name, value in arguments.items()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _SHORT else f"{flat[: _SHORT - 1]}…"


def _spent(usage: Usage) -> str:
    parts = [f"{usage.steps} step{'' if usage.steps == 1 else 's'}"]
    if usage.tool_calls:
        parts.append(f"{usage.tool_calls} call{'' if usage.tool_calls == 1 else 's'}")
    parts.append(f"{usage.input_tokens:,} + {usage.output_tokens:,} tokens")
    if usage.cost_usd:
        parts.append(f"${usage.cost_usd:.4f}")
    return ", ".join(parts)


def _why(kind: str, reason: str) -> str:
    return f"{kind}, {reason}" if reason else kind


class JsonChatView(ChatView):
    """Display for programs: prints each event as a line of JSON on stdout, and notes on stderr."""

    def line(self, text: str) -> None:
        """Print the line on stderr."""
        note(text)

    def prompt(self, sign: str = "> ") -> None:
        """Do nothing: programs need no prompt."""

    def entry(self, role: str, content: str, *, partial: bool) -> None:
        """Do nothing: programs get the earlier entries from `holdfast export`."""

    def leave(self, *, busy: bool) -> None:
        """Do nothing."""

    def question(self, question: Question) -> None:
        """Do nothing: the printed event contains the question."""

    def show(self, event: Event | Gap, *, ours: bool, idle: bool) -> None:
        """Print the event as one line."""
        say_json(event)
