"""``holdfast chat``: a conversation in the terminal.

One task follows the session's events and shows them; another sends the lines that are typed or piped in. Ctrl-C does
not exit the program: it interrupts the run, and pressing Ctrl-C again stops the session.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast import ids
from holdfast.cli.chat_agents import AgentNames, fetch_agents, missing_agent, other_store
from holdfast.cli.chat_commands import ChatCommand, approved_scope, command_of, spoken_command, unescaped
from holdfast.cli.chat_connection import PATIENCE_S, ChatConnection
from holdfast.cli.chat_place import ChatPlace, open_place
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.hints import command_hint
from holdfast.cli.options import Key, Session, Url, User
from holdfast.cli.server_watch import watch_server
from holdfast.cli.stop_progress import announce
from holdfast.cli.target import Target, run
from holdfast.errors import (
    AlreadyAnswered,
    ApprovalKeyRequired,
    CallMismatch,
    HoldfastError,
    InvalidRequest,
    ServerUnreachable,
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
    RunStopping,
    RunSuspended,
    format_cursor,
)
from holdfast.undumpable import make_undumpable

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Attachment, GrantScope, Policy, Question, Receipt, SessionView, SettledAs
    from holdfast.protocol.stopping import StopReceipt

__all__ = ["TWICE_S", "chat"]

_SHOWN_ENTRIES = 6
_LOOK_BACK = 200
_LOOK_S = 1.0
"""Time after one call replaces another during which a typed y is ignored, since it was meant for the earlier call."""
TWICE_S = 0.6
"""Time within which a second Ctrl-C stops the session although the interrupt of the first has its receipt."""
_LAST_MESSAGE_S = 2.0
"""Time that a message on its way has, when the person leaves."""
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
            client.reconnect_s = PATIENCE_S
            place = open_place(as_json=target.as_json)
            current: str | None = session
            wanted = agent
            try:
                while current is not None:
                    conversation = _Conversation(client, client.session(current), wanted, place)
                    await conversation.run()
                    current, wanted = conversation.goes_to, conversation.agent
            finally:
                await place.lines.close()
            return place.outcome

    return run(work, as_json=target.as_json, session=session)


@dataclass(frozen=True, slots=True, eq=False)
class _Press:
    """A Ctrl-C whose interrupt has no receipt yet: pressed again, it stops the session, or gives the message up.

    Parameters:
        run_id: the run that it ends, if known.
        awaits_delivery: whether it ends the run of the message on its way.
    """

    run_id: str | None
    awaits_delivery: bool


class _Conversation:
    """A conversation with its state: the active run, our unsettled messages, and a Ctrl-C without its receipt."""

    def __init__(self, client: Client, session: RemoteSession, agent: str | None, place: ChatPlace) -> None:
        self.client = client
        self.session = session
        self.screen = place.screen
        self.attached: list[Attachment] = []
        self.agent = agent
        self.goes_to: str | None = None
        self._place = place
        self._lines = place.lines
        self._loop = asyncio.get_running_loop()
        self._connection = ChatConnection(place.screen)
        self._run_id: str | None = None
        self._last_ended: str | None = None
        self._skip_to: str | None = None
        self._replays_to = 0
        self._ours: set[str] = set()
        self._settled: dict[str, SettledAs] = {}
        self._open = 0
        self._sending = 0
        self._ending = 0  # requests of ours that end something
        self._receipt: StopReceipt | None = None  # the newest one shown
        self._idle: asyncio.Future[None] | None = None
        self._begun: asyncio.Future[str | None] = self._loop.create_future()
        self._pressed: _Press | None = None
        self._pressed_at = -TWICE_S
        self._actions: set[asyncio.Task[object]] = set()
        self._questions: dict[str, Question] = {}
        self._shown: Question | None = None
        self._taken_from = 0.0
        self._taken_away = False  # the question on the screen ended, but was not answered here
        self._own: set[str] = set()  # ids of questions answered here
        self._leaving = False

    async def run(self) -> None:
        """Chat until the input ends, or the person switches to another session."""
        self._lines.begin()
        async with self._watched():
            await self._begin()
        if self._place.has_person:
            self.client.on_cut = self._connection.on_cut
            self.client.on_back = self._connection.on_back
        else:  # lines from a pipe wait for the server
            self.client.retry_s = PATIENCE_S
            self.client.on_cut = self.screen.cut
            self.client.on_back = self.screen.back
        self._loop.add_signal_handler(signal.SIGINT, self._on_ctrl_c)
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                following = group.create_task(self._follow())
                if not self._questions:  # or else the question is shown after the events that led to it
                    self._prompt()
                async for line in self._lines:
                    saying = group.create_task(self._hear(line.strip()))
                    if not await self._lines.outlast(saying):
                        saying.cancel()
                        if not self._connection.is_delivering:
                            self.screen.line(f"possibly not sent: {line.strip()[:60]}")
                        break
                    if self._leaving or following.done():
                        break
                if self._place.has_person:
                    self._leaving = True
                    await self._connection.until_delivered(_LAST_MESSAGE_S)
                elif not self._leaving:
                    await self._until_idle()
                following.cancel()
                for action in self._actions:
                    action.cancel()
        except* (HoldfastError, OSError) as errors:  # an OSError if the reader of a pipe is gone, or the disk is full
            raise errors.exceptions[0] from None
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
        if self.goes_to is None:
            self.screen.leave(self.session.key, busy=self._run_id is not None)

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return not self._connection.is_lost

    def leave(self, to: str | None) -> None:
        """End this conversation and switch to the session `to`; None ends the chat."""
        self.goes_to = to
        self._leaving = True

    async def go_to(self, key: str) -> None:
        """Switch to another session, new or existing. Raises `InvalidKey` if `key` is not a valid session key."""
        with suppress(UnknownSession):
            await self.client.session(key).info()
        self.leave(key)

    async def _begin(self) -> None:
        """Show the latest entries, and follow the active run, if any."""
        try:
            view: SessionView | None = await self.session.info()
        except UnknownSession:
            view = None
        known = await self.agents()
        self.screen.greet(self.session.key, self.client.url, view)
        for line in other_store(known) if self._place.has_person else ():
            self.screen.line(line)
        if view is None:
            return
        for entry in (await self.session.transcript())[-_SHOWN_ENTRIES:]:
            self.screen.entry(entry)
        if self.agent is None:
            for line in missing_agent(view, known):
                self.screen.line(line)
        seq = view.seq
        if view.run_id is not None:
            self._run_id = self._skip_to = view.run_id
            self.screen.line("a run is already active; following it")
            seq = max(0, seq - _LOOK_BACK)
            self._questions = {question.question_id: question for question in await self.session.questions()}
            self._replays_to = view.seq
        self._begun.set_result(format_cursor(seq, view.number))

    async def agents(self) -> AgentNames:
        """Return the names of the server's agents as they are now."""
        known = await fetch_agents(self.client)
        self._place.agents[:] = known.agents
        return known

    async def _hear(self, line: str) -> None:
        """Handle a typed line: an answer to the open question, a command, or a message."""
        open_before = len(self._questions)
        try:
            async with self._watched():
                if await self._carry_out(line):
                    return
        except HoldfastError as error:
            self._refused(error)
        prompts_later = self._connection.is_delivering and not (self._questions or self._place.keeps_input_line)
        if not self._leaving and not prompts_later and (self._questions or not open_before):
            self._prompt()

    async def _carry_out(self, line: str) -> bool:
        """Do what a line asks for. Return whether it was sent as a message."""
        if self._place.has_person and (self._shown is None or self._shown.kind == "approval"):
            line = spoken_command(line)
        command = command_of(line)
        needs_server = bool(line) and (command is None or command[0].needs_server)
        if needs_server and self._place.has_person and not await self._connection.until_free():
            self._refuse_unsent(line, None if command is None else command[0])
            return False
        if command is not None:
            slash, text = command
            await slash.work(self, text)
        elif line and self._shown is not None and self._place.has_person:
            await self._answer(self._shown, line)
        elif line:
            await self.say(unescaped(line))
            return True
        return False

    def _refuse_unsent(self, line: str, command: ChatCommand | None) -> None:
        """Report that a line is not sent, because the connection is lost or the message before it was given up."""
        why = "not connected; " if self._connection.is_lost else ""
        if command is not None:
            refusal = f"{command.usage.split()[0]} was not carried out"
        elif self._connection.is_delivering or not self._connection.is_lost:
            refusal = f"not sent: {line[:60]}"  # another message than the one before it
        else:
            again = "press Up to get it again" if self._place.keeps_input_line else "type it again once reconnected"
            refusal = f"the {'message' if self._shown is None else 'answer'} was not sent: {again}"
        self.screen.line(f"{why}{refusal}")

    def _watched(self) -> AbstractAsyncContextManager[None]:
        """Report on the screen if the server does not respond during the block."""
        return watch_server(self.client, self.screen.line)

    async def _answer(self, question: Question, line: str) -> None:
        """Answer a question with the typed line; an approval takes yes, no, or no and a reason."""
        word, _, rest = line.partition(" ")
        self._own.add(question.question_id)
        try:
            if question.kind == "question":
                await self.session.answer(question, line)
            elif (scope := approved_scope(line)) is not None:
                await self.approve(question, scope=scope)
            elif word.lower() in ("n", "no"):
                await self.session.deny(question, reason=rest.strip())
            else:
                scopes = ", y session, y principal" if question.access else ""
                self.screen.line(f"type y{scopes} or n; to send a message, type /queue TEXT")
                return
        except (UnknownQuestion, AlreadyAnswered, CallMismatch):
            self.answered(question.question_id)  # no longer open; the next one is shown separately
            raise
        self.answered(question.question_id)

    async def approve(self, question: Question, note: str = "", scope: GrantScope = "call") -> None:
        """Approve the call that was shown; prompt for the approval key if the server requires a key."""
        if question is self._shown and self._loop.time() < self._taken_from:
            raise InvalidRequest("a different call has just replaced the one shown before", hint="read it, then answer")
        try:
            await self.session.approve(question, note=note, scope=scope)
        except ApprovalKeyRequired as error:
            if not self._place.has_person:
                raise
            self.screen.line(f"{error.message}; {error.hint}")
            typed = await self._lines.secret(lambda: self.screen.prompt("approval key (hidden)> "))
            if not typed:
                raise InvalidRequest("no approval key was typed; the call still waits") from None
            self.client.approval_key = typed
            try:
                await self.session.approve(question, note=note, scope=scope)
            except ApprovalKeyRequired:
                self.client.approval_key = None
                raise

    def shown(self, kind: str) -> Question:
        """Return the question on the screen. Raises `UnknownQuestion` unless a question of the kind `kind` is shown."""
        if self._shown is None or self._shown.kind != kind:
            raise UnknownQuestion(f"no open {'question' if kind == 'question' else 'approval'}")
        self._own.add(self._shown.question_id)
        return self._shown

    def answered(self, question_id: str) -> None:
        """Record that a question is closed."""
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
            if self._run_id is None or self._place.keeps_input_line:
                self.screen.prompt()

    def _refused(self, error: HoldfastError) -> None:
        """Show why something that was typed had no effect."""
        if self._connection.is_lost and isinstance(error, ServerUnreachable):
            self.screen.line("no response; the request may or may not have taken effect")
        else:
            self.screen.error(error, command_hint(error, session=self.session.key, chat=True))
        self._place.worsen(exit_of(error))

    async def say(self, text: str, policy: Policy = "queue") -> None:
        """Send a message with the pending attachments; a person need not wait for it, only the next message does."""
        send = partial(
            self.session.send,
            text,
            agent=self.agent,
            policy=policy,
            attachments=tuple(self.attached),
            idempotency_key=ids.message_id(),
        )
        if not self._place.has_person:
            await self._send(text, send)
            return
        delivery = self._group.create_task(self._send(text, partial(self._connection.deliver, send)))
        self._actions.add(delivery)
        delivery.add_done_callback(self._actions.discard)
        self._connection.begin(delivery)

    async def _send(self, text: str, send: Callable[[], Awaitable[Receipt | None]]) -> bool:
        """Send a message; if the server refuses it, show the error and keep the attachments.

        Return False if the message was given up, with the lines that waited behind it.
        """
        self._sending += 1
        try:
            receipt = await send()
        except HoldfastError as error:
            self._refused(error)
            self._prompt()
            return True
        except asyncio.CancelledError:
            self.screen.line(f"possibly not sent: {text[:60]}")
            raise
        finally:
            self._sending -= 1
        if receipt is None:
            for line in self._lines.take_entered():
                self.screen.line(f"not sent: {line.strip()[:60]}")
            self._prompt()
            return False
        self.attached.clear()
        self.took(receipt)
        return True

    def took(self, receipt: Receipt) -> None:
        """Track a message that we sent."""
        self._ours.add(receipt.message_id)
        settled = self._settled.pop(receipt.message_id, None)
        if settled is not None:
            self._place.settle(settled)  # it was settled before its receipt arrived
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
                self._place.worsen(Exit.WAITED)
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
                        self._end_replay(event)
                        continue
                    self._skip_to = None
                self._note(event)
                # While one of our messages is being sent, its event may arrive before its receipt.
                ours = self._sending > 0 or getattr(event, "message_id", None) in self._ours
                if isinstance(event, RunStopping):
                    ours = self._ending > 0
                self.screen.show(event, ours=ours)
                if isinstance(event, (RunSuspended, RunResumed)):
                    self._ask(event)
                elif isinstance(event, MessageSettled) and self._run_id is None and not self._open:
                    self.screen.prompt()
                self._end_replay(event)
        self.screen.line("the session is gone; press Ctrl-D to exit")

    def _end_replay(self, event: Event | Gap) -> None:
        """Show the open question of the run that was joined, after the last event that was there before."""
        if self._replays_to and getattr(event, "seq", 0) >= self._replays_to:
            self._replays_to = 0
            if self._questions and self._shown is None:
                self._prompt()

    def _ask(self, event: RunSuspended | RunResumed) -> None:
        """Show the oldest open question after a question was asked or answered."""
        if isinstance(event, RunSuspended):
            self._questions[event.question.question_id] = event.question
            self._wake()
            if len(self._questions) > 1:
                return
        else:
            self.answered(event.answer.question_id)
        if self._shown is None:
            self._prompt()

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _note(self, event: Event | Gap) -> None:
        if isinstance(event, RunStarted):
            if self._pressed is not None and self._pressed.run_id not in (None, event.run_id):
                self._pressed = None
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
                self._place.settle(event.state)
                if not self._open:
                    self._wake()
            else:
                self._settled[event.message_id] = event.state

    # ── Ctrl-C ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_ctrl_c(self) -> None:
        has_run = self._run_id is not None or self._open > 0
        pressed, self._pressed = self._pressed, None
        is_second = self._loop.time() - self._pressed_at < TWICE_S
        self._pressed_at = self._loop.time()
        if self._leaving:
            self._connection.give_up()
        elif self._connection.is_lost:
            self._on_ctrl_c_while_lost()
        elif pressed is not None and pressed.awaits_delivery:
            self._connection.give_up()
        elif pressed is not None or (is_second and has_run):
            self._act(partial(self.stop, "Ctrl-C twice"))
        elif has_run or self._connection.is_delivering:
            self._pressed = _Press(self._run_id, awaits_delivery=not has_run)
            if has_run:
                self.screen.line("interrupting … (press Ctrl-C again to stop the session)")
            else:
                self.screen.line("interrupting once the message is delivered … (press Ctrl-C again to give it up)")
            self._act(partial(self._interrupt_once, self._pressed))
        elif not self._lines.discard():
            self.screen.line("no active run; press Ctrl-D to exit")
            self.screen.prompt()

    def _on_ctrl_c_while_lost(self) -> None:
        if self._connection.is_delivering:
            self._connection.give_up()
        elif not self._lines.discard():
            self.screen.line("not connected; nothing can be interrupted: press Ctrl-D to exit")
            self._prompt()

    async def _interrupt_once(self, press: _Press) -> None:
        """Interrupt the run of a Ctrl-C; with the receipt, the next Ctrl-C is a first one again."""
        try:
            run_id = press.run_id
            if press.awaits_delivery:
                await self._connection.until_delivered()
                run_id = self._run_id
                if run_id is None and not self._open:
                    return  # it was given up, or has ended already
            await self.interrupt("Ctrl-C", run_id)
        finally:
            if self._pressed is press:
                self._pressed = None

    def _act(self, work: Callable[[], Awaitable[None]]) -> None:
        async def watched() -> None:
            async with self._watched():
                await work()

        task = self._group.create_task(watched())
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)

    async def interrupt(self, reason: str, run_id: str | None = None) -> None:
        """Interrupt the active run and show the receipt of the interrupt."""
        self._ending += 1
        try:
            receipt = await announce(self.session, self.session.interrupt(reason, run_id=run_id), self.screen.line)
        except HoldfastError as error:
            self._refused(error)
        else:
            self._show_receipt(receipt)
            if self._run_id is None and not self._open:
                self._prompt()  # the run's end was shown before its receipt arrived
        finally:
            self._ending -= 1

    async def stop(self, reason: str) -> None:
        """Stop all work of the session."""
        self.screen.line("stopping the session …")
        self._ending += 1
        try:
            stopped = await announce(self.session, self.session.stop(reason), self.screen.line)
        except HoldfastError as error:
            self._refused(error)
            return
        finally:
            self._ending -= 1
        self._show_receipt(stopped.receipt)
        for message in stopped.withdrawn:
            self.screen.line(f"withdrawn: {message.content[:60]}")
        self._prompt()

    def _show_receipt(self, receipt: StopReceipt) -> None:
        """Show a receipt, unless it is the one shown before: a stop may join the interrupt that it follows."""
        if receipt != self._receipt:
            self.screen.receipt(receipt)
        self._receipt = receipt
