"""Slash commands of ``holdfast chat``: lines that begin with a slash bypass the queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from holdfast import old_names
from holdfast.cli.output import age
from holdfast.cli.send import attach
from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast.cli.chat_view import ChatView
    from holdfast.client import RemoteSession
    from holdfast.protocol.messages import Attachment, Policy, Question, Receipt, TreeNode

__all__ = ["COMMANDS", "ChatCommand", "Talk", "command_of"]


class Talk(Protocol):
    """The conversation that a command acts on."""

    session: RemoteSession
    screen: ChatView
    attached: list[Attachment]

    async def say(self, text: str, policy: Policy = "queue") -> None:
        """Send a message."""
        ...

    async def interrupt(self, reason: str) -> None:
        """Interrupt the active run."""
        ...

    async def stop(self, reason: str) -> None:
        """Stop all work of the session."""
        ...

    def took(self, receipt: Receipt) -> None:
        """Track a message that was sent."""
        ...

    def shown(self, kind: str) -> Question:
        """Return the question shown last. Raises `UnknownQuestion` if the question is not of the kind `kind`."""
        ...

    async def approve(self, question: Question, note: str = "") -> None:
        """Approve the call that was shown."""
        ...

    def answered(self, question_id: str) -> None:
        """Record that a question is no longer open."""
        ...

    def leave(self, to: str | None) -> None:
        """Switch to the session `to`; None ends the chat."""
        ...

    async def go_to(self, key: str) -> None:
        """Switch to another session, new or existing. Raises `InvalidKey` if `key` is not a valid session key."""
        ...


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A slash command with its usage, description and function."""

    usage: str
    doc: str
    work: Callable[[Talk, str], Awaitable[None]]


async def _help(talk: Talk, _: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    for command in COMMANDS.values():
        talk.screen.line(f"{command.usage.ljust(width)}  {command.doc}")
    talk.screen.line("//…".ljust(width + 1) + " send a message that starts with a slash")


async def _status(talk: Talk, _: str) -> None:
    view = await talk.session.info()
    screen = talk.screen
    screen.line(f"session {view.key} of agent {view.agent}: {view.state}, {view.waiting} waiting, {view.seq} events")
    for run in (await talk.session.runs())[:1]:
        screen.line(f"run {run.run_id} {run.state}, began {age(run.started_at)}, {run.usage.steps} steps")
        for question in run.questions:
            screen.question(question)


async def _tree(talk: Talk, _: str) -> None:
    def show(node: TreeNode, depth: int) -> None:
        pid = f" pid {node.pid}" if node.pid is not None else ""
        talk.screen.line(f"{'  ' * depth}{node.kind} {node.name}{pid} {node.state}".rstrip())
        for child in node.children:
            show(child, depth + 1)

    show(await talk.session.tree(), 0)


async def _interrupt(talk: Talk, text: str) -> None:
    if text:
        await talk.say(text, "interrupt")
    else:
        await talk.interrupt("/interrupt")


async def _stop(talk: Talk, text: str) -> None:
    await talk.stop(text or "/stop")


async def _queue(talk: Talk, text: str) -> None:
    await talk.say(text)


async def _steer(talk: Talk, text: str) -> None:
    await talk.say(text, "steer")


async def _rollback(talk: Talk, text: str) -> None:
    await talk.say(text, "rollback")


async def _approve(talk: Talk, text: str) -> None:
    question = talk.shown("approval")
    await talk.approve(question, text)
    talk.answered(question.question_id)


async def _deny(talk: Talk, text: str) -> None:
    question = talk.shown("approval")
    await talk.session.deny(question, reason=text)
    talk.answered(question.question_id)


async def _answer(talk: Talk, text: str) -> None:
    question = talk.shown("question")
    await talk.session.answer(question, text)
    talk.answered(question.question_id)


async def _retry(talk: Talk, _: str) -> None:
    talk.took(await talk.session.retry())


async def _undo(talk: Talk, _: str) -> None:
    gone = await talk.session.undo()
    asked = next((entry.content for entry in gone if entry.role == "user"), "")
    talk.screen.line(f"{len(gone)} entries removed{f', from {asked[:60]!r} on' if asked else ''}")


async def _compact(talk: Talk, text: str) -> None:
    keep = _number(text, "compact") if text else 4
    talk.screen.line("summarizing …")
    entries = await talk.session.compact(keep=keep)
    talk.screen.line(f"the transcript now has {len(entries)} entries")


async def _fork(talk: Talk, text: str) -> None:
    key, _, through = text.partition(" ")
    await talk.session.fork(key, through_n=_number(through.strip(), "fork") if through else None)
    talk.leave(key)


def _number(text: str, name: str) -> int:
    """Parse the number given to a command. Raises `InvalidRequest` if `text` is not a number."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(f"{text[:40]!r} is not a number", hint=f"use {COMMANDS[name].usage}")
    return int(text)


async def _attach(talk: Talk, text: str) -> None:
    kept = await attach(talk.session, text)
    talk.attached.append(kept)
    talk.screen.line(f"{kept.name} ({kept.media_type}, {kept.size_bytes:,} bytes) will be sent with the next message")


async def _new(talk: Talk, text: str) -> None:
    if text:
        await talk.go_to(text)
        return
    base, _, number = talk.session.key.rpartition("-")
    following = f"{base}-{int(number) + 1}" if base and number.isdigit() else f"{talk.session.key}-2"
    talk.leave(following)


async def _quit(talk: Talk, _: str) -> None:
    talk.leave(None)


COMMANDS: dict[str, ChatCommand] = {
    "help": ChatCommand("/help", "list the commands", _help),
    "status": ChatCommand("/status", "show the session's activity and pending questions", _status),
    "tree": ChatCommand("/tree", "show the live tasks, threads and processes", _tree),
    "interrupt": ChatCommand("/interrupt [TEXT]", "interrupt the run; TEXT is sent as the next message", _interrupt),
    "stop": ChatCommand("/stop [REASON]", "stop the run and background work, withdraw queued messages", _stop),
    "queue": ChatCommand("/queue TEXT", "queue a message, as a plain line does", _queue),
    "steer": ChatCommand("/steer TEXT", "send a message to the running agent, before its next step", _steer),
    "rollback": ChatCommand("/rollback TEXT", "roll back the active run and send this message instead", _rollback),
    "approve": ChatCommand("/approve [NOTE]", "approve the call", _approve),
    "deny": ChatCommand("/deny [REASON]", "deny the call", _deny),
    "answer": ChatCommand("/answer TEXT", "answer the question", _answer),
    "retry": ChatCommand("/retry", "run the last message again", _retry),
    "undo": ChatCommand("/undo", "remove the last run from the transcript", _undo),
    "compact": ChatCommand("/compact [KEEP]", "summarize all but the newest KEEP messages (default: 4)", _compact),
    "fork": ChatCommand("/fork KEY [N]", "copy the transcript, up to entry N, and continue there", _fork),
    "attach": ChatCommand("/attach FILE", "attach a file to the next message", _attach),
    "new": ChatCommand("/new [KEY]", "start another session", _new),
    "quit": ChatCommand("/quit", "exit; active runs continue", _quit),
}
_NEED_TEXT = frozenset(("queue", "steer", "rollback", "answer", "fork", "attach"))


def command_of(line: str) -> tuple[ChatCommand, str] | None:
    """Return the slash command in a line and the text after it, or None if the line is a message.

    Raises:
        InvalidRequest: if the command is unknown or lacks its text.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, text = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        renamed = old_names.COMMANDS.get(name)
        hint = f"it was renamed; use /{renamed}" if renamed else "see /help; // starts a message with a slash"
        raise InvalidRequest(f"unknown command /{name[:40]}", hint=hint)
    text = text.strip()
    if name in _NEED_TEXT and not text:
        raise InvalidRequest(f"missing text; use {command.usage}")
    return command, text
