"""``holdfast chat``: a conversation in the terminal.

One task follows the session's events and prints them, another sends the lines that come from a thread which reads
stdin. Ctrl-C never ends the program: it interrupts the run, and a second one soon after stops the session.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING

from holdfast.cli.connection import Target, run
from holdfast.cli.output import note, printable, say_json
from holdfast.errors import HoldfastError, UnknownSession
from holdfast.protocol.events import (
    ChildFinished,
    ChildStarted,
    Event,
    Gap,
    MessageAccepted,
    MessageSettled,
    ReasoningDelta,
    RunFinished,
    RunRestarted,
    RunStarted,
    RunStopping,
    SessionDeletedEvent,
    StepStarted,
    TextDelta,
    ToolFinished,
    ToolOutput,
    ToolStarted,
    format_cursor,
)

if TYPE_CHECKING:
    from holdfast.cli.exits import Exit
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import SessionView
    from holdfast.protocol.stopping import StopReceipt

__all__ = ["chat"]

_SECOND_S = 2.0
_SHOWN_ENTRIES = 6
_LOOK_BACK = 200
_PATIENCE_S = 120.0
_LAST_LINE_S = 2.0


def chat(target: Target, session: str, *, agent: str | None) -> Exit:
    """Talk to the agent of a session until the input ends."""

    async def work() -> None:
        async with target.client() as client:
            client.reconnect_s = _PATIENCE_S
            screen = _JsonScreen() if target.as_json else _Screen()
            conversation = _Conversation(client, client.session(session), agent, screen)
            await conversation.run()

    return run(work, as_json=target.as_json)


class _Lines:
    """Lines from stdin, read by a thread of its own so that the loop never waits for a person."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str | None] = deque()
        self._more: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                chunk = os.read(0, 65_536)
            except OSError:
                chunk = b""
            *lines, rest = (rest + chunk).split(b"\n")
            if not chunk and rest:
                lines.append(rest)
            for line in lines:
                self._loop.call_soon_threadsafe(self._put, line.decode("utf-8", "replace"))
            if not chunk:
                self._loop.call_soon_threadsafe(self._put, None)
                return

    def _put(self, line: str | None) -> None:
        self._lines.append(line)
        if line is None:
            self._ended.set_result(None)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def outlast(self, saying: asyncio.Task[None]) -> bool:
        """Wait until a line was sent. False: the person left in the meantime, and it is still not sent."""
        if sys.stdin.isatty():
            await asyncio.wait((saying, self._ended), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((saying,), timeout=_LAST_LINE_S)
            return saying.done()
        await saying
        return True

    async def __aiter__(self) -> AsyncIterator[str]:
        while True:
            while not self._lines:
                self._more = self._loop.create_future()
                await self._more
            line = self._lines.popleft()
            if line is None:
                return
            yield line


class _Conversation:
    """What is going on: the run that is on, the messages of ours that are open, and what Ctrl-C was used for."""

    def __init__(self, client: Client, session: RemoteSession, agent: str | None, screen: _Screen) -> None:
        self._client = client
        self._session = session
        self._agent = agent
        self._screen = screen
        self._loop = asyncio.get_running_loop()
        self._run_id: str | None = None
        self._last_ended: str | None = None
        self._skip_to: str | None = None
        self._ours: set[str] = set()
        self._settled: set[str] = set()
        self._open = 0
        self._idle: asyncio.Future[None] | None = None
        self._begun: asyncio.Future[str | None] = self._loop.create_future()
        self._interrupted_at: float | None = None
        self._actions: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Talk until the input ends."""
        await self._begin()
        self._client.retry_s = _PATIENCE_S
        self._client.on_cut = self._screen.cut
        self._client.on_back = self._screen.back
        self._loop.add_signal_handler(signal.SIGINT, self._on_ctrl_c)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                following = group.create_task(self._follow())
                self._screen.prompt()
                lines = _Lines()
                async for line in lines:
                    saying = group.create_task(self._say(line))
                    if not await lines.outlast(saying):
                        saying.cancel()
                        self._screen.line(f"perhaps not sent: {line.strip()[:60]}")
                        break
                    if following.done():
                        break
                if not sys.stdin.isatty():
                    await self._until_idle()
                following.cancel()
                for action in self._actions:
                    action.cancel()
        except* HoldfastError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        self._screen.leave(busy=self._run_id is not None)

    async def _begin(self) -> None:
        """Show what was said before; follow the run that is on, if any."""
        try:
            view: SessionView | None = await self._session.info()
        except UnknownSession:
            view = None
        self._screen.greet(self._session.key, self._client.url, view)
        if view is None:
            return
        for entry in (await self._session.transcript())[-_SHOWN_ENTRIES:]:
            self._screen.entry(entry.role, entry.content, partial=entry.partial)
        seq = view.seq
        if view.run_id is not None:
            self._run_id = self._skip_to = view.run_id
            self._screen.line("a run is on: here is how it goes on")
            seq = max(0, seq - _LOOK_BACK)
        self._begun.set_result(format_cursor(seq, view.number))

    async def _say(self, line: str) -> None:
        text = line.strip()
        if not text:
            self._screen.prompt()
            return
        try:
            receipt = await self._session.send(text, agent=self._agent)
        except HoldfastError as error:
            self._screen.error(error)
            self._screen.prompt()
            return
        self._ours.add(receipt.message_id)
        if receipt.message_id in self._settled:
            self._settled.discard(receipt.message_id)  # its settlement was quicker than its receipt
        else:
            self._open += 1
            if receipt.disposition == "started" and receipt.run_id != self._last_ended:
                self._run_id = receipt.run_id
        if receipt.disposition not in ("started", "duplicate"):
            self._screen.line(f"{receipt.disposition}: it waits for its turn")
        if not self._begun.done():
            self._begun.set_result(receipt.cursor)

    async def _until_idle(self) -> None:
        while self._open:
            self._idle = self._loop.create_future()
            await self._idle

    # ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self) -> None:
        cursor = await self._begun
        async with aclosing(self._session.events(after=cursor)) as events:
            async for event in events:
                if self._skip_to is not None:
                    if isinstance(event, RunStarted) and event.run_id == self._skip_to:
                        self._skip_to = None
                    continue
                self._note(event)
                self._screen.show(event, ours=self._ours, idle=self._run_id is None and not self._open)
        self._screen.line("the session is gone; Ctrl-D leaves")

    def _note(self, event: Event | Gap) -> None:
        if isinstance(event, RunStarted):
            if event.run_id != self._run_id:
                self._interrupted_at = None
            self._run_id = event.run_id
        elif isinstance(event, RunFinished):
            self._last_ended = event.run_id
            if event.run_id == self._run_id:
                self._run_id = None
        elif isinstance(event, MessageSettled):
            if event.message_id in self._ours:
                self._open -= 1
                if not self._open and self._idle is not None and not self._idle.done():
                    self._idle.set_result(None)
            else:
                self._settled.add(event.message_id)

    # ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_ctrl_c(self) -> None:
        now = self._loop.time()
        again = self._interrupted_at is not None and (
            now - self._interrupted_at < _SECOND_S or self._run_id is not None
        )
        if again:
            self._interrupted_at = None
            self._act(self._stop())
        elif self._run_id is None and not self._open:
            self._screen.line("nothing runs; Ctrl-D leaves")
            self._screen.prompt()
        else:
            self._interrupted_at = now
            self._screen.line("interrupting … (once more stops the session)")
            self._act(self._interrupt(self._run_id))

    def _act(self, work: Coroutine[object, object, None]) -> None:
        task = self._group.create_task(work)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)

    async def _interrupt(self, run_id: str | None) -> None:
        try:
            receipt = await self._session.interrupt("Ctrl-C", run_id=run_id)
        except HoldfastError as error:
            self._screen.error(error)
        else:
            self._screen.receipt(receipt)

    async def _stop(self) -> None:
        self._screen.line("stopping the session …")
        try:
            stopped = await self._session.stop("Ctrl-C twice")
        except HoldfastError as error:
            self._screen.error(error)
            return
        self._screen.receipt(stopped.receipt)
        for message in stopped.withdrawn:
            self._screen.line(f"withdrawn: {message.content[:60]}")
        self._screen.prompt()


class _Screen:
    """The terminal: text as it streams, everything else in short dim lines of its own."""

    def __init__(self) -> None:
        self._column = 0
        self._tty = sys.stdout.isatty()
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if self._tty and "NO_COLOR" not in os.environ else ("", "")

    def _write(self, text: str) -> None:
        shown = printable(text)
        if shown:
            sys.stdout.write(shown)
            sys.stdout.flush()
            self._column = 0 if shown.endswith("\n") else 1

    def line(self, text: str) -> None:
        """A dim line of its own."""
        if not self._tty:
            note(f"[{text}]")
            return
        if self._column:
            self._write("\n")
        sys.stdout.write(self._dim)
        self._write(f"[{text}]")
        sys.stdout.write(f"{self._plain}\n")
        sys.stdout.flush()
        self._column = 0

    def prompt(self) -> None:
        """Ask for the next message."""
        if self._tty:
            if self._column:
                self._write("\n")
            self._write("> ")
            self._column = 0  # what the person types ends with a line break

    def greet(self, key: str, url: str, view: SessionView | None) -> None:
        """The first line."""
        state = "new" if view is None else f"{view.state}, {view.waiting} waiting" if view.waiting else view.state
        self.line(f"session {key} at {url}, {state}; Ctrl-C interrupts, twice stops, Ctrl-D leaves")

    def entry(self, role: str, content: str, *, partial: bool) -> None:
        """Something that was said before."""
        if role == "user":
            self._write(f"> {content}\n")
        elif role == "assistant":
            self._write(content if content.endswith("\n") else f"{content}\n")
            if partial:
                self.line("interrupted")

    def receipt(self, receipt: StopReceipt) -> None:
        """What a stop has proven."""
        stopped = receipt.stopped
        what = f"{stopped.tasks} tasks, {stopped.threads} threads, {stopped.processes} processes"
        self.line(f"{receipt.outcome} after {receipt.elapsed_s * 1000:.0f} ms: {what}")
        for left in receipt.abandoned:
            self.line(f"abandoned: {left.kind} {left.name}")

    def error(self, error: HoldfastError) -> None:
        """Something that was refused."""
        self.line(str(error))

    def cut(self, error: HoldfastError) -> None:
        """The connection is gone."""
        self.line(f"{error.message}; coming back …")

    def back(self) -> None:
        """The connection is there again."""
        self.line("connected again")

    def leave(self, *, busy: bool) -> None:
        """The last line."""
        if self._tty:
            self.line("what runs goes on; 'holdfast chat' comes back to it" if busy else "bye")

    def show(self, event: Event | Gap, *, ours: set[str], idle: bool) -> None:
        """An event as it comes."""
        match event:
            case TextDelta():
                self._write(event.text)
            case MessageAccepted():
                if event.message_id not in ours and not idle:
                    self.line(f"message: {event.content[:200]}")
            case ReasoningDelta():
                self.line(event.text)
            case StepStarted():
                self.line(f"step {event.step} {event.label}".rstrip())
            case ToolStarted():
                self.line(f"{event.name} …")
            case ToolOutput():
                self._write(event.text)
            case ToolFinished():
                if event.status != "ok":
                    self.line(f"call {event.status}{f': {event.error}' if event.error else ''}")
            case ChildStarted():
                self.line(f"child {event.agent}: {event.text[:100]}")
            case ChildFinished():
                self.line(f"child {event.status}")
            case RunRestarted():
                self.line(f"the server was started again: the run goes on, attempt {event.attempt}")
            case RunStopping():
                self.line(f"stopping: {_why(event.cause.kind, event.cause.reason)}")
            case RunFinished():
                self._finish(event)
            case SessionDeletedEvent():
                self.line("the session was deleted")
            case Gap():
                self.line(f"events {event.after + 1} to {event.until} are gone")
            case MessageSettled():
                if idle:
                    self.prompt()
            case _:
                pass

    def _finish(self, event: RunFinished) -> None:
        if self._column:
            self._write("\n")
        if event.status == "failed":
            self.line(f"failed: {event.error or 'no reason given'}")
        elif event.status == "interrupted":
            cause = event.cause
            self.line(f"interrupted: {_why(cause.kind, cause.reason) if cause else event.error or 'no reason given'}")


def _why(kind: str, reason: str) -> str:
    return f"{kind}, {reason}" if reason else kind


class _JsonScreen(_Screen):
    """For programs: each event as a line of JSON; notes go to stderr."""

    def line(self, text: str) -> None:
        """To stderr."""
        note(text)

    def prompt(self) -> None:
        """Programs need none."""

    def entry(self, role: str, content: str, *, partial: bool) -> None:
        """`holdfast export` has what was said before."""

    def leave(self, *, busy: bool) -> None:
        """Nothing to say."""

    def show(self, event: Event | Gap, *, ours: set[str], idle: bool) -> None:
        """One line."""
        say_json(event)
