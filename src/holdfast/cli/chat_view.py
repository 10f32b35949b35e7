"""Display of ``holdfast chat``: the answer as it streams, a line for each step and call, and everything else dimmed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from holdfast.cli.approvals import whole
from holdfast.cli.chat_calls import CallLog, CallRecord, short, spent_time
from holdfast.cli.chat_screen import USUAL_SIGN
from holdfast.cli.chat_text import LinePainter, TextFlow, fit_cells
from holdfast.cli.output import clean, fit, note, printable, say_json
from holdfast.cli.receipt_text import receipt_lines
from holdfast.cli.style import style_for
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    Gap,
    HistoryEdited,
    MessageAccepted,
    MessageSteered,
    ReasoningDelta,
    RunFinished,
    RunRestarted,
    RunResumed,
    RunRolledBack,
    RunStarted,
    RunStopping,
    RunSuspended,
    SessionDeletedEvent,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
)
from holdfast.protocol.model import ENDED_BY

if TYPE_CHECKING:
    from holdfast.cli.chat_screen import Screen
    from holdfast.errors import HoldfastError
    from holdfast.protocol.messages import Entry, Question, SessionView, Usage
    from holdfast.protocol.stopping import StopReceipt

__all__ = ["ChatView", "JsonChatView", "PipedChatView", "TerminalChatView"]

_LIVE_ROWS = 8
_LIVE_CALLS = 4
_LIVE_OUTPUT = 3
_TAIL_CHARS = 2000


class ChatView:
    """Display of a chat whose notices go to stderr; the base of all displays."""

    def line(self, text: str) -> None:
        """Print a notice."""
        note(f"[{text}]")

    def listing(self, rows: Iterable[str]) -> None:
        """Print what a command lists."""
        for row in rows:
            note(row)

    def prompt(self, sign: str = USUAL_SIGN) -> None:
        """Prompt for the next line."""

    def heard(self, text: str) -> None:
        """Keep a typed line in the record."""

    def greet(self, key: str, url: str, view: SessionView | None) -> None:
        """Print the first line."""

    def entry(self, entry: Entry) -> None:
        """Print an earlier entry of the transcript."""

    def receipt(self, receipt: StopReceipt) -> None:
        """Print the receipt of a stop."""
        for line in receipt_lines(receipt):
            self.line(line)

    def error(self, error: HoldfastError, hint: str) -> None:
        """Print an error and what to do about it."""
        self.line(f"{error.message} ({hint})" if hint else error.message)

    def cut(self, error: HoldfastError) -> None:
        """Report that the connection was lost."""
        self.line(f"disconnected: {error.message}; reconnecting …")

    def back(self) -> None:
        """Report that the connection is back."""
        self.line("reconnected")

    def leave(self, key: str, *, busy: bool) -> None:
        """Print the last line."""

    def question(self, question: Question) -> None:
        """Show a question of a run, and prompt for the answer."""

    def show(self, event: Event | Gap, *, ours: bool) -> None:
        """Show an event as it arrives. `ours`: whether it belongs to something typed here."""

    def show_call(self, number: int) -> bool:
        """Show the call of that number in full, the newest one being 1. Return False if no such call is kept."""
        return False

    def clear(self) -> None:
        """Clear the terminal."""

    def set_plain(self, plain: bool) -> None:
        """Show answers as they are, or format their Markdown."""


class PipedChatView(ChatView):
    """Display for pipes: the answers on stdout, everything else on stderr."""

    def __init__(self) -> None:
        self._calls = CallLog()
        self._open_line = False

    def question(self, question: Question) -> None:
        """Print the question on stderr."""
        self.line(_asked(question))

    def show(self, event: Event | Gap, *, ours: bool) -> None:
        """Print text of the answer on stdout, and what else happens on stderr."""
        match event:
            case TextDelta() if not _is_child(event.run_id):
                self._print(event.text)
            case ToolStarted():
                self._calls.start(event)
            case ToolOutput():
                self._calls.add_output(event)
            case ToolFinished():
                record = self._calls.finish(event)
                self.line(f"{record.title}: {record.reason or 'ok'}{spent_time(record.elapsed_s)}")
            case StepStarted() if event.label:
                self.line(event.label)
            case RunFinished():
                self._end_line()
                self._calls.drop_running(event.run_id)
                ended = _ended(event)
                if ended:
                    self.line(ended)
            case _:
                described = _described(event, ours=ours)
                if described:
                    self.line(described)

    def _print(self, text: str) -> None:
        shown = fit(text if self._open_line else text.lstrip("\n"), sys.stdout)
        if shown:
            sys.stdout.write(shown)
            sys.stdout.flush()
            self._open_line = not shown.endswith("\n")

    def _end_line(self) -> None:
        if self._open_line:
            self._print("\n")


class JsonChatView(ChatView):
    """Display for programs: each event as a line of JSON on stdout, notices on stderr."""

    def line(self, text: str) -> None:
        """Print the line on stderr."""
        note(text)

    def show(self, event: Event | Gap, *, ours: bool) -> None:
        """Print the event as one line."""
        say_json(event)


class TerminalChatView(ChatView):
    """Display on a terminal; text from agents and users cannot control the terminal.

    Parameters:
        screen: the terminal.
        takes_commands: whether the person can type the commands of the chat.
    """

    def __init__(self, screen: Screen, *, takes_commands: bool = True) -> None:
        self._screen = screen
        self._style = style_for(sys.stdout)
        self._wide = _encodes("✓…•│─┼")
        self._painter = LinePainter(lambda: screen.columns, styled=bool(self._style.plain), wide=self._wide)
        self._markdown = True
        self._flows: dict[str, TextFlow] = {}
        self._steps: dict[str, StepStarted] = {}
        self._children: dict[str, ChildStarted] = {}
        self._working: set[str] = set()
        self._calls = CallLog()
        self._has_hinted = not takes_commands
        self._sign = USUAL_SIGN

    # ── lines of the conversation ────────────────────────────────────────────────────────────────────────────────────

    def line(self, text: str) -> None:
        """Print a dim line in brackets."""
        self._print(f"[{text}]", self._style.dim)

    def listing(self, rows: Iterable[str]) -> None:
        """Print what a command lists, in dim lines."""
        for row in rows:
            self._print(row, self._style.dim)

    def _print(self, text: str, style: str = "") -> None:
        flow = TextFlow(self._painter, markdown=False)
        self._screen.write(self._styled(line, style) for line in (*flow.add(text), *flow.end()))

    def _after(self, sign: str, text: str) -> list[str]:
        """Return the lines of a text after a sign, which the other lines leave room for."""
        indent = " " * len(sign)
        rows: list[str] = []
        for line in printable(text).split("\n"):
            rows += self._painter.lines(Text(line), first=indent if rows else sign, indent=indent)
        return rows

    def _styled(self, line: str, style: str) -> str:
        return f"{style}{line}{self._style.plain}" if style and line else line

    def prompt(self, sign: str = USUAL_SIGN) -> None:
        """Prompt for the next line."""
        self._sign = sign
        self._screen.ask(sign)

    def heard(self, text: str) -> None:
        """Keep a typed line, with its sign, in the record."""
        lines = self._after(self._sign, text)
        self._sign = USUAL_SIGN
        self._screen.heard(lines)

    def greet(self, key: str, url: str, view: SessionView | None) -> None:
        """Print the first lines."""
        self._forget_runs()
        state = "new" if view is None else f"{view.state}, {view.waiting} waiting" if view.waiting else view.state
        self.line(f"session {key} at {url}, {state}")
        self.line("Ctrl-C interrupts, twice stops; Ctrl-D exits; /help lists the commands")

    def entry(self, entry: Entry) -> None:
        """Print an earlier entry of the transcript, with a mark if it did not come to its end."""
        if entry.role == "user":
            self._screen.write(self._after(USUAL_SIGN, entry.content))
        elif entry.role == "assistant":
            self._screen.write(self._formatted(entry.content))
        elif entry.role == "summary":
            self.line(f"summary: {short(entry.content)}")
        if entry.role != "summary" and (entry.partial or entry.ended_by is not None):
            how = ENDED_BY[entry.ended_by] if entry.ended_by is not None else "interrupted"
            if entry.ended_by == "failure":
                self._mark(how, ok=False)
            else:
                self.line(how)

    def _formatted(self, text: str) -> list[str]:
        flow = TextFlow(self._painter, markdown=self._markdown)
        return [*flow.add(text), *flow.end()]

    def leave(self, key: str, *, busy: bool) -> None:
        """Print the last line."""
        self._forget_runs()
        back = f"holdfast chat -s {shlex.quote(key)}"
        self.line(f"the run continues; '{back}' returns to it" if busy else "bye")

    def _forget_runs(self) -> None:
        """Complete what is shown of runs whose further events will not be shown."""
        self._end_flows()
        self._working.clear()
        self._steps.clear()
        self._children.clear()
        self._calls.running.clear()
        self._screen.show_live(())

    def question(self, question: Question) -> None:
        """Show a question of a run, and prompt for the answer."""
        self._end_flows()
        self._print(_asked(question), self._style.yellow)
        self.prompt("answer> " if question.kind == "question" else "y/n> ")

    def show_call(self, number: int) -> bool:
        """Show the call of that number in full, the newest one being 1. Return False if no such call is kept."""
        if not 0 < number <= len(self._calls.newest):
            return False
        for line in self._calls.newest[-number].details():
            self._print(line, self._style.dim)
        return True

    def clear(self) -> None:
        """Clear the terminal."""
        self._screen.clear()

    def set_plain(self, plain: bool) -> None:
        """Show answers as they are, or format their Markdown."""
        self._markdown = not plain
        self.line("answers are shown as they are" if plain else "Markdown of answers is formatted")

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def show(self, event: Event | Gap, *, ours: bool) -> None:
        """Show an event as it arrives."""
        match event:
            case TextDelta():
                self._end_step(event.run_id)
                self._end_flow(f"{event.run_id} reasoning")
                self._stream(event.run_id, event.text, _is_child(event.run_id))
            case ReasoningDelta():
                self._stream(f"{event.run_id} reasoning", event.text, True)
            case StepStarted():
                self._end_flows(event.run_id)
                self._end_step(event.run_id)
                if event.label:
                    self._steps[event.run_id] = event
            case ToolStarted():
                self._end_flows(event.run_id)
                self._calls.start(event)
            case ToolOutput():
                self._calls.add_output(event)
            case ToolFinished():
                self._end_call(self._calls.finish(event))
            case ChildStarted():
                self._end_flows(event.run_id)
                self._children[event.child_id] = event
            case ChildFinished():
                self._end_child(event)
            case RunStarted():
                self._working.add(event.run_id)
            case RunFinished():
                self._finish(event)
            case _:
                described = _described(event, ours=ours)
                if described:
                    self.line(described)
        self._show_live()

    def _stream(self, speaker: str, text: str, is_aside: bool) -> None:
        """Show a piece of a speaker's text."""
        flow = self._flows.get(speaker)
        if flow is None:
            text = text.lstrip("\n")
            if not text:
                return
            flow = TextFlow(self._painter, markdown=self._markdown and not is_aside, style="dim" if is_aside else "")
            self._flows[speaker] = flow
        self._screen.write(flow.add(text))

    def _end_flow(self, speaker: str) -> None:
        flow = self._flows.pop(speaker, None)
        if flow is not None:
            self._screen.write(flow.end())

    def _end_flows(self, run_id: str = "") -> None:
        """Complete the text of a run and of its children, or all text."""
        for speaker in list(self._flows):
            whose = speaker.partition(" ")[0]
            if not run_id or whose == run_id or whose.startswith(f"{run_id}."):
                self._end_flow(speaker)

    def _end_step(self, run_id: str, *, ok: bool = True) -> None:
        """Print the line of a named step that has ended: another one, or the answer to it, follows."""
        step = self._steps.get(run_id)
        if step is not None and not any(call.run_id == run_id for call in self._calls.running.values()):
            del self._steps[run_id]
            self._mark(short(clean(step.label)), ok=ok, depth=run_id.count("."))

    def _end_call(self, call: CallRecord) -> None:
        """Print the line of a call that has ended, unless the line of its step stands for it."""
        if call.outcome == "ok" and call.run_id in self._steps:
            return
        ending = f"{f'  {clean(call.reason)}' if call.reason else ''}{spent_time(call.elapsed_s)}"
        self._mark(clean(call.title), ending, ok=call.outcome == "ok", depth=call.run_id.count("."))

    def _end_child(self, event: ChildFinished) -> None:
        self._end_flows(event.child_id)
        self._end_step(event.child_id, ok=event.status == "completed")
        started = self._children.pop(event.child_id, None)
        text = "child" if started is None else f"child {started.agent}: {short(started.text)}"
        spent = "" if started is None else spent_time(event.at - started.at)
        ok = event.status == "completed"
        why = "" if ok else f"  {event.status}{f': {short(event.error)}' if event.error else ''}"
        self._mark(clean(text), clean(f"{why}{spent}"), ok=ok, depth=event.run_id.count("."))

    def _finish(self, event: RunFinished) -> None:
        self._working.discard(event.run_id)
        self._calls.drop_running(event.run_id)
        self._end_flows(event.run_id)
        for run_id in [run_id for run_id in self._steps if f"{run_id}.".startswith(f"{event.run_id}.")]:
            self._end_step(run_id, ok=event.status == "completed")
        self._children = {
            child_id: child for child_id, child in self._children.items() if not child_id.startswith(f"{event.run_id}.")
        }
        ended = _ended(event)
        if event.status == "failed":
            sign, color = self._outcome(ok=False)
            first, *more = self._after(f"  {sign} ", ended)
            self._screen.write([first.replace(sign, self._styled(sign, color), 1), *more])
        elif ended:
            self.line(ended)
        if event.usage.input_tokens:
            self.line(_spent(event.usage))
        if not self._has_hinted and self._calls.newest:
            self._has_hinted = True
            self.line("/show prints the last call with its output")

    def _mark(self, text: str, ending: str = "", *, ok: bool, depth: int = 0) -> None:
        """Print the line of a step, call, child or run that has ended; the text is shortened, but not its ending."""
        sign, color = self._outcome(ok=ok)
        indent = "  " * (depth + 1)
        room = self._painter.columns - len(indent) - len(sign) - 1
        ending = fit_cells(ending, room // 2) if text else ending
        shown = f"{fit_cells(text, room - cell_len(ending))}{ending}"
        self._screen.write([f"{indent}{self._styled(sign, color)} {self._styled(shown, self._style.dim)}"])

    def _outcome(self, *, ok: bool) -> tuple[str, str]:
        """Return the mark of what went well or failed, and its colour."""
        if ok:
            return "✓" if self._wide else "ok", self._style.green
        return "✗" if self._wide else "FAILED", self._style.red

    # ── live lines ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _show_live(self) -> None:
        """Show what is not complete: unfinished text, and the steps, calls and children that run."""
        rows = [row for flow in self._flows.values() for row in flow.live()]
        self._screen.show_live([*rows[-_LIVE_ROWS:], *self._running()])

    def _running(self) -> list[str]:
        dots = "…" if self._wide else "..."
        titles = [(run_id.count("."), short(step.label)) for run_id, step in self._steps.items()]
        titles += [
            (child_id.count(".") - 1, f"child {child.agent}: {short(child.text)}")
            for child_id, child in self._children.items()
        ]
        calls = [call for call in self._calls.running.values() if call.run_id not in self._steps]
        titles += [(call.run_id.count("."), call.title) for call in calls]
        rows = [f"{'  ' * (depth + 1)}{dots} {clean(title)}" for depth, title in titles[:_LIVE_CALLS]]
        if len(titles) > _LIVE_CALLS:
            rows.append(f"  {dots} and {len(titles) - _LIVE_CALLS} more")
        if len(calls) == 1:
            printed = calls[0].printed[-_TAIL_CHARS:].split("\n")
            tail = [line for line in printed if line.strip()][-_LIVE_OUTPUT:]
            rows += [f"      {clean(line)}" for line in tail]
        if not rows and not self._flows and self._working:
            rows.append(f"  {dots}")
        return [self._styled(fit_cells(row, self._painter.columns), self._style.dim) for row in rows]


def _encodes(text: str) -> bool:
    """Return whether stdout can show a text."""
    with suppress(UnicodeEncodeError, LookupError):
        text.encode(sys.stdout.encoding or "ascii")
        return True
    return False


def _is_child(run_id: str) -> bool:
    """Return whether a run is a child run, whose id is a path below its parent's id."""
    return "." in run_id


def _asked(question: Question) -> str:
    """Return a question with all that it asks for, and how to answer it."""
    if question.kind == "question":
        return f"question: {whole(question)}"
    return f'Allow {whole(question)}?  y = yes, n = no, "n because …"'


def _ended(event: RunFinished) -> str:
    """Return how a run ended; empty if it completed."""
    if event.status == "failed":
        return f"failed: {event.error or 'no reason given'}"
    if event.status == "interrupted":
        cause = event.cause
        is_crash = cause is not None and cause.kind == "crash"
        again = "; /retry runs it again, unless another message has run since" if is_crash else ""
        return f"interrupted: {_why(cause.kind, cause.reason) if cause else event.error or 'no reason given'}{again}"
    return ""


def _described(event: Event | Gap, *, ours: bool) -> str | None:
    """Return an event as one line, or None for an event that is not shown."""
    match event:
        case MessageAccepted():
            return None if ours else f"message: {short(event.content)}"
        case MessageSteered():
            return f"delivered before step {event.step}"
        case ChildStarted():
            return f"child {event.agent}: {short(event.text)}"
        case ChildFinished():
            return f"child {event.status}{f': {short(event.error)}' if event.error else ''}"
        case RunSuspended():
            return None  # the conversation asks
        case RunResumed():
            answer = event.answer
            return f"{answer.decision}{f': {short(answer.text)}' if answer.text else ''}"
        case RunRestarted():
            return f"the server restarted; the run continues, attempt {event.attempt}"
        case RunStopping():
            return None if ours else f"stopping: {_why(event.cause.kind, event.cause.reason)}"
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
