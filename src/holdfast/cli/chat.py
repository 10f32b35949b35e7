"""``holdfast chat``: a conversation in the terminal.

One task follows the session's events and prints them; another sends the lines that a thread reads from stdin. Ctrl-C
never exits the program: it interrupts the run, and a second one soon after stops the session.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.chat_commands import command_of
from holdfast.cli.chat_view import ChatView, JsonChatView
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Key, Session, Url, User
from holdfast.cli.secret_input import hidden_typing
from holdfast.cli.target import Target, run
from holdfast.errors import (
    AlreadyAnswered,
    ApprovalKeyRequired,
    CallMismatch,
    HoldfastError,
    InvalidRequest,
    UnknownQuestion,
    UnknownSession,
)
from holdfast.protocol.events import (
    Event,
    Gap,
    MessageSettled,
    RunFinished,
    RunResumed,
    RunStarted,
    RunSuspended,
    format_cursor,
)
from holdfast.undumpable import make_undumpable

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Attachment, Policy, Question, Receipt, SessionView

__all__ = ["chat"]

_SECOND_S = 2.0
_SHOWN_ENTRIES = 6
_LOOK_BACK = 200
_PATIENCE_S = 120.0
_LAST_LINE_S = 2.0
_LOOK_S = 1.0
"""Time after one call replaces another during which a typed y is ignored, since it was meant for the earlier call."""
_WAITS = {
    "queued": "waiting for its turn",
    "steering": "the agent sees it before its next step",
    "collecting": "waiting for more messages",
    "interrupting": "interrupts the active run, then runs",
    "rolling_back": "rolls back the active run, then runs",
}


def chat(
    session: Session = "main",
    agent: Annotated[str | None, typer.Option("--agent", help="Agent to talk to.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Annotated[bool, typer.Option("--json", help="Print the events as JSON lines.")] = False,
) -> Exit:
    """Chat with an agent. Press Ctrl-C to interrupt the answer, twice to stop the session, Ctrl-D to exit."""
    target = Target(url=url, key=key, user=user, as_json=json)
    make_undumpable()  # a key that is typed stays in this process

    async def work() -> Exit:
        async with target.client() as client:
            client.reconnect_s = _PATIENCE_S
            screen = JsonChatView() if target.as_json else ChatView()
            lines = _Lines()
            current: str | None = session
            while current is not None:
                conversation = _Conversation(client, client.session(current), agent, screen, lines)
                await conversation.run()
                current = conversation.goes_to
            return Exit.WAITED if conversation.left_open else Exit.OK

    return run(work, as_json=target.as_json)


class _Lines:
    """Lines from stdin, read by a separate thread so that input never blocks the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lines: deque[str | None] = deque()
        self._more: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._reading = False

    def begin(self) -> None:
        """Start the reading thread, unless it has been started already."""
        if not self._reading:
            self._reading = True
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
        """Wait until a line is sent. Return False if the input ends first and the line is still unsent soon after."""
        if sys.stdin.isatty():
            await asyncio.wait((saying, self._ended), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((saying,), timeout=_LAST_LINE_S)
            return saying.done()
        await saying
        return True

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._next()) is not None:
            yield line

    async def _next(self) -> str | None:
        while not self._lines:
            self._more = self._loop.create_future()
            await self._more
        return self._lines.popleft()

    async def secret(self, ask: Callable[[], None]) -> str:
        """Return the next line, typed without echo; empty if the input has ended. `ask` runs once the echo is off."""
        with hidden_typing(0):
            ask()
            line = await self._next()
        if line is None:
            self._lines.append(None)
        return (line or "").strip()


class _Conversation:
    """A conversation with its state: the active run, our unsettled messages, and earlier uses of Ctrl-C."""

    def __init__(
        self, client: Client, session: RemoteSession, agent: str | None, screen: ChatView, lines: _Lines
    ) -> None:
        self.session = session
        self.screen = screen
        self.attached: list[Attachment] = []
        self.goes_to: str | None = None
        self.left_open = False
        self._client = client
        self._agent = agent
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._run_id: str | None = None
        self._last_ended: str | None = None
        self._skip_to: str | None = None
        self._ours: set[str] = set()
        self._settled: set[str] = set()
        self._open = 0
        self._sending = 0
        self._idle: asyncio.Future[None] | None = None
        self._begun: asyncio.Future[str | None] = self._loop.create_future()
        self._interrupted_at: float | None = None
        self._actions: set[asyncio.Task[None]] = set()
        self._questions: dict[str, Question] = {}
        self._shown: Question | None = None
        self._taken_from = 0.0
        self._taken_away = False  # the question on the screen ended, but was not answered here
        self._own: set[str] = set()  # ids of questions answered here
        self._leaving = False

    async def run(self) -> None:
        """Chat until the input ends, or the person switches to another session."""
        await self._begin()
        self._client.retry_s = _PATIENCE_S
        self._client.on_cut = self.screen.cut
        self._client.on_back = self.screen.back
        self._loop.add_signal_handler(signal.SIGINT, self._on_ctrl_c)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                following = group.create_task(self._follow())
                self._prompt()
                self._lines.begin()
                async for line in self._lines:
                    saying = group.create_task(self._hear(line.strip()))
                    if not await self._lines.outlast(saying):
                        saying.cancel()
                        self.screen.line(f"possibly not sent: {line.strip()[:60]}")
                        break
                    if self._leaving or following.done():
                        break
                if not sys.stdin.isatty() and not self._leaving:
                    await self._until_idle()
                following.cancel()
                for action in self._actions:
                    action.cancel()
        except* HoldfastError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        if self.goes_to is None:
            self.screen.leave(busy=self._run_id is not None)

    def leave(self, to: str | None) -> None:
        """End this conversation and switch to the session `to`; None ends the chat."""
        self.goes_to = to
        self._leaving = True

    async def go_to(self, key: str) -> None:
        """Switch to another session, new or existing. Raises `InvalidKey` if `key` is not a valid session key."""
        with suppress(UnknownSession):
            await self._client.session(key).info()
        self.leave(key)

    async def _begin(self) -> None:
        """Show the latest entries, and follow the active run, if any."""
        try:
            view: SessionView | None = await self.session.info()
        except UnknownSession:
            view = None
        self.screen.greet(self.session.key, self._client.url, view)
        if view is None:
            return
        for entry in (await self.session.transcript())[-_SHOWN_ENTRIES:]:
            self.screen.entry(entry.role, entry.content, partial=entry.partial or entry.ended_by is not None)
        seq = view.seq
        if view.run_id is not None:
            self._run_id = self._skip_to = view.run_id
            self.screen.line("a run is already active; following it")
            seq = max(0, seq - _LOOK_BACK)
            self._questions = {question.question_id: question for question in await self.session.questions()}
        self._begun.set_result(format_cursor(seq, view.number))

    async def _hear(self, line: str) -> None:
        """Handle a typed line: an answer to the open question, a command, or a message."""
        open_before = len(self._questions)
        try:
            command = command_of(line)
            if command is not None:
                slash, text = command
                await slash.work(self, text)
            elif line and self._shown is not None and sys.stdin.isatty():
                await self._answer(self._shown, line)
            elif line:
                await self.say(line.removeprefix("/"))
                return
        except HoldfastError as error:
            self.screen.error(error)
        if not self._leaving and (self._questions or not open_before):
            self._prompt()

    async def _answer(self, question: Question, line: str) -> None:
        """Answer a question with the typed line; an approval takes yes, no, or no and a reason."""
        word, _, rest = line.partition(" ")
        self._own.add(question.question_id)
        try:
            if question.kind == "question":
                await self.session.answer(question, line)
            elif line.lower() in ("y", "yes"):
                await self.approve(question)
            elif word.lower() in ("n", "no"):
                await self.session.deny(question, reason=rest.strip())
            else:
                self.screen.line("type y or n; to send a message, type /queue TEXT")
                return
        except (UnknownQuestion, AlreadyAnswered, CallMismatch):
            self.answered(question.question_id)  # no longer open; the next one is shown separately
            raise
        self.answered(question.question_id)

    async def approve(self, question: Question, note: str = "") -> None:
        """Approve the call that was shown; prompt for the approval key if the server requires a key."""
        if question is self._shown and self._loop.time() < self._taken_from:
            raise InvalidRequest("a different call has just replaced the one shown before", hint="read it, then answer")
        try:
            await self.session.approve(question, note=note)
        except ApprovalKeyRequired as error:
            if not sys.stdin.isatty():
                raise
            self.screen.line(f"{error.message}; {error.hint}")
            self._client.approval_key = await self._lines.secret(lambda: self.screen.prompt("approval key (hidden)> "))
            try:
                await self.session.approve(question, note=note)
            except ApprovalKeyRequired:
                self._client.approval_key = None
                raise

    def shown(self, kind: str) -> Question:
        """Return the question shown last. Raises `UnknownQuestion` if the question is not of the kind `kind`."""
        if self._shown is None or self._shown.kind != kind:
            raise UnknownQuestion(f"no open {'question' if kind == 'question' else 'approval'}")
        self._own.add(self._shown.question_id)
        return self._shown

    def answered(self, question_id: str) -> None:
        """Record that a question is no longer open."""
        self._questions.pop(question_id, None)
        if self._shown is not None and self._shown.question_id == question_id:
            self._take_away()

    def _take_away(self) -> None:
        """Forget the question on the screen."""
        if self._shown is not None:
            self._taken_away = self._shown.question_id not in self._own
            self._shown = None

    def _prompt(self) -> None:
        """Prompt for the next input, which is then taken as the answer to the question on the screen, if any."""
        if self._questions:
            self._shown = next(iter(self._questions.values()))
            self._taken_from = self._loop.time() + _LOOK_S if self._taken_away else 0.0
            self._taken_away = False
            self.screen.question(self._shown)
        else:
            self._shown = None
            self.screen.prompt()

    async def say(self, text: str, policy: Policy = "queue") -> None:
        """Send a message with the pending attachments; if the server refuses it, show the error and keep them."""
        self._sending += 1
        try:
            receipt = await self.session.send(text, agent=self._agent, policy=policy, attachments=tuple(self.attached))
        except HoldfastError as error:
            self.screen.error(error)
            self._prompt()
            return
        finally:
            self._sending -= 1
        self.attached.clear()
        self.took(receipt)

    def took(self, receipt: Receipt) -> None:
        """Track a message that we sent."""
        self._ours.add(receipt.message_id)
        if receipt.message_id in self._settled:
            self._settled.discard(receipt.message_id)  # it was settled before its receipt arrived
        else:
            self._open += 1
            if receipt.disposition == "started" and receipt.run_id != self._last_ended:
                self._run_id = receipt.run_id
        if receipt.disposition not in ("started", "duplicate"):
            self.screen.line(f"{receipt.disposition}: {_WAITS[receipt.disposition]}")
        if not self._begun.done():
            self._begun.set_result(receipt.cursor)

    async def _until_idle(self) -> None:
        """Wait after the end of the input until our messages are settled or a run waits for an answer."""
        while self._open:
            if self._questions:
                self.left_open = True
                self.screen.line("the run waits for an answer; see 'holdfast questions'")
                return
            self._idle = self._loop.create_future()
            await self._idle

    # ── Events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self) -> None:
        cursor = await self._begun
        async with aclosing(self.session.events(after=cursor)) as events:
            async for event in events:
                if self._skip_to is not None:
                    if getattr(event, "run_id", None) != self._skip_to:
                        continue
                    self._skip_to = None
                self._note(event)
                # While one of our messages is being sent, its event may arrive before its receipt.
                ours = self._sending > 0 or getattr(event, "message_id", None) in self._ours
                self.screen.show(event, ours=ours, idle=self._run_id is None and not self._open)
                if isinstance(event, (RunSuspended, RunResumed)):
                    self._ask(event)
        self.screen.line("the session is gone; press Ctrl-D to exit")

    def _ask(self, event: RunSuspended | RunResumed) -> None:
        """Show the oldest open question after a question was asked or answered."""
        if isinstance(event, RunSuspended):
            self._questions[event.question.question_id] = event.question
            self._wake()
            if len(self._questions) > 1:
                return
        else:
            self.answered(event.answer.question_id)
        if self._questions and self._shown is None:
            self._prompt()

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _note(self, event: Event | Gap) -> None:
        if isinstance(event, RunStarted):
            if event.run_id != self._run_id:
                self._interrupted_at = None
            self._run_id = event.run_id
        elif isinstance(event, RunFinished):
            self._last_ended = event.run_id
            self._questions.clear()
            self._take_away()
            if event.run_id == self._run_id:
                self._run_id = None
        elif isinstance(event, MessageSettled):
            if event.message_id in self._ours:
                self._open -= 1
                if not self._open:
                    self._wake()
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
            self._act(self.stop("Ctrl-C twice"))
        elif self._run_id is None and not self._open:
            self.screen.line("no active run; press Ctrl-D to exit")
            self.screen.prompt()
        else:
            self._interrupted_at = now
            self.screen.line("interrupting … (press Ctrl-C again to stop the session)")
            self._act(self.interrupt("Ctrl-C", self._run_id))

    def _act(self, work: Coroutine[object, object, None]) -> None:
        task = self._group.create_task(work)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)

    async def interrupt(self, reason: str, run_id: str | None = None) -> None:
        """Interrupt the active run and show the receipt of the interrupt."""
        try:
            receipt = await self.session.interrupt(reason, run_id=run_id)
        except HoldfastError as error:
            self.screen.error(error)
        else:
            self.screen.receipt(receipt)
            if self._run_id is None and not self._open:
                self._prompt()  # the run's end was shown before its receipt arrived

    async def stop(self, reason: str) -> None:
        """Stop all work of the session."""
        self.screen.line("stopping the session …")
        try:
            stopped = await self.session.stop(reason)
        except HoldfastError as error:
            self.screen.error(error)
            return
        self.screen.receipt(stopped.receipt)
        for message in stopped.withdrawn:
            self.screen.line(f"withdrawn: {message.content[:60]}")
        self._prompt()
