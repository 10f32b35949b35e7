"""Slash commands of ``holdfast chat``: a line that begins with one slash is a command, not a message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol, cast, get_args

from holdfast import old_names
from holdfast.cli.output import age, clean, counted
from holdfast.cli.send import attach
from holdfast.errors import InvalidRequest, UnknownSession
from holdfast.protocol.messages import GrantScope

if TYPE_CHECKING:
    from holdfast.cli.chat_agents import AgentNames
    from holdfast.cli.chat_view import ChatView
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Attachment, Policy, Question, Receipt, TreeNode

__all__ = [
    "COMMANDS",
    "ChatCommand",
    "Talk",
    "approved_scope",
    "command_of",
    "completions",
    "spoken_command",
    "unescaped",
]


class Talk(Protocol):
    """The conversation that a command acts on."""

    client: Client
    session: RemoteSession
    screen: ChatView
    attached: list[Attachment]
    agent: str | None
    """Agent that is named with each message; None leaves it to the session."""

    @property
    def is_connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        ...

    async def agents(self) -> AgentNames:
        """Return the names of the server's agents as they are now."""
        ...

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
        """Return the question on the screen. Raises `UnknownQuestion` unless a question of the kind `kind` is shown."""
        ...

    async def approve(self, question: Question, note: str = "", scope: GrantScope = "call") -> None:
        """Approve the call that was shown."""
        ...

    def answered(self, question_id: str) -> None:
        """Record that a question is closed."""
        ...

    def leave(self, to: str | None) -> None:
        """Switch to the session `to`; None ends the chat."""
        ...

    async def go_to(self, key: str) -> None:
        """Switch to another session, new or existing. Raises `InvalidKey` if `key` is not a valid session key."""
        ...


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A slash command with its usage, description and function, and whether it works only while connected."""

    usage: str
    doc: str
    work: Callable[[Talk, str], Awaitable[None]]
    needs_server: bool = True


async def _help(talk: Talk, _: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    rows = [(command.usage, command.doc) for command in COMMANDS.values()]
    rows += [
        ("//…", "send a message that starts with a slash"),
        ("Alt-Enter", "begin a new line, as Ctrl-O does; Enter sends"),
        ("Up, Tab", "recall earlier input, complete a command"),
    ]
    talk.screen.listing(f"  {name.ljust(width)}  {meaning}" for name, meaning in rows)


async def _status(talk: Talk, _: str) -> None:
    view = await talk.session.info()
    screen = talk.screen
    screen.line(f"session {view.key} of agent {view.agent}: {view.state}, {view.waiting} waiting, {view.seq} events")
    for run in (await talk.session.runs())[:1]:
        screen.line(f"run {run.run_id} {run.state}, began {age(run.started_at)}, {run.usage.steps} steps")
        for question in run.questions:
            screen.question(question)


async def _tree(talk: Talk, _: str) -> None:
    def rows(node: TreeNode, depth: int) -> Iterator[str]:
        pid = f" pid {node.pid}" if node.pid is not None else ""
        processes = f" {counted(node.processes, 'process')}" if node.processes > 1 else ""
        yield f"{'  ' * depth}{node.kind} {clean(node.name)}{pid}{processes} {node.state}".rstrip()
        for child in node.children:
            yield from rows(child, depth + 1)

    talk.screen.listing(rows(await talk.session.tree(), 1))


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


def approved_scope(line: str) -> GrantScope | None:
    """Return what a typed ``y``, ``y session`` or ``y principal`` approves; None if the line is not an approval."""
    word, _, scope = line.lower().partition(" ")
    scope = scope.strip() or "call"
    if word not in ("y", "yes") or scope not in get_args(GrantScope):
        return None
    return cast("GrantScope", scope)


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
    talk.leave(await _unused(talk))


async def _unused(talk: Talk) -> str:
    """Return the key of a session that does not exist: this one's, with the next number."""
    found = re.fullmatch(r"(.+)-(\d{1,9})", talk.session.key)
    base, number = (found[1], int(found[2])) if found else (talk.session.key, 1)
    for following in count(number + 1):
        try:
            await talk.client.session(f"{base}-{following}").info()
        except UnknownSession:
            break
    return f"{base}-{following}"


async def _clear(talk: Talk, _: str) -> None:
    if not talk.is_connected:
        talk.screen.clear()
        talk.screen.line(f"not connected; this is still session {talk.session.key}")
        return
    key = await _unused(talk)
    talk.screen.clear()
    talk.leave(key)


async def _agent(talk: Talk, text: str) -> None:
    known = await talk.agents()
    if text:
        known.require(text)
        talk.agent = text
        talk.screen.line(f"your messages go to agent {text!r} now")
        return
    try:
        current = talk.agent or (await talk.session.info()).agent
    except UnknownSession:
        current = talk.agent or known.default_agent
    rows = []
    for name in known.agents:
        marks = ["this session"] if name == current else []
        marks += ["default"] if name == known.default_agent else []
        rows.append(f"  {name}  ({', '.join(marks)})" if marks else f"  {name}")
    talk.screen.listing(rows)


async def _show(talk: Talk, text: str) -> None:
    number = _number(text, "show") if text else 1
    if not talk.screen.show_call(number):
        talk.screen.line(f"call {number} is not among those of this chat" if text else "this chat has had no calls")


async def _plain(talk: Talk, text: str) -> None:
    if text not in ("", "on", "off"):
        raise InvalidRequest(f"invalid mode {text[:40]!r}", hint=f"use {COMMANDS['plain'].usage}")
    talk.screen.set_plain(text != "off")


async def _quit(talk: Talk, _: str) -> None:
    talk.leave(None)


COMMANDS: dict[str, ChatCommand] = {
    "help": ChatCommand("/help", "list the commands", _help, needs_server=False),
    "agent": ChatCommand("/agent [NAME]", "talk to another agent in this session, or list the agents", _agent),
    "status": ChatCommand("/status", "show the session's activity and pending questions", _status),
    "tree": ChatCommand("/tree", "show the live tasks, threads and processes", _tree),
    "show": ChatCommand(
        "/show [N]", "show the last call, or the N-th last one, with its output", _show, needs_server=False
    ),
    "plain": ChatCommand("/plain [off]", "show answers as they are, without formatting", _plain, needs_server=False),
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
    "clear": ChatCommand("/clear", "start another session on a clear screen", _clear, needs_server=False),
    "quit": ChatCommand("/quit", "exit; active runs continue", _quit, needs_server=False),
}
_ALIASES = {"exit": "quit", "bye": "quit", "q": "quit", "h": "help", "?": "help"}
_SPOKEN = {"exit": "quit", "quit": "quit", "?": "help"}
_NEED_TEXT = frozenset(("queue", "steer", "rollback", "answer", "fork", "attach"))


def spoken_command(line: str) -> str:
    """Return the slash command that a line without a slash stands for, such as ``exit``, or the line itself."""
    name = _SPOKEN.get(line.lower())
    return line if name is None else f"/{name}"


def command_of(line: str) -> tuple[ChatCommand, str] | None:
    """Return the slash command in a line and the text after it, or None if the line is a message.

    Raises:
        InvalidRequest: if the command is unknown, or if the text that it requires is missing.
    """
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, *rest = line[1:].split(None, 1) or [""]
    command = COMMANDS.get(_ALIASES.get(name, name))
    if command is None:
        raise InvalidRequest(f"unknown command /{name[:40]}", hint=_hint(name))
    text = rest[0].strip() if rest else ""
    if name in _NEED_TEXT and not text:
        raise InvalidRequest(f"missing text; use {command.usage}")
    return command, text


def _hint(name: str) -> str:
    """Return what to do about the name of a command that does not exist."""
    renamed = old_names.COMMANDS.get(name)
    if renamed:
        return f"it was renamed; use /{renamed}"
    near = difflib.get_close_matches(name, COMMANDS, 1)
    meant = f"did you mean /{near[0]}? " if near else ""
    return f"{meant}see /help; // starts a message with a slash"


def unescaped(line: str) -> str:
    """Return the message in a line: ``//`` is a slash, or nothing before a word that would be a command."""
    if not line.startswith("//"):
        return line
    return line[2:] if line[2:].lower() in _SPOKEN else line[1:]


def completions(typed: str, agents: Sequence[str]) -> list[tuple[str, str]]:
    """Return what the last word of a line may become, with its meaning: a command, or an agent after ``/agent``."""
    if typed.startswith("/agent "):
        begun = typed.removeprefix("/agent ")
        return [(name, "") for name in agents if name.startswith(begun)]
    if not typed.startswith("/") or " " in typed:
        return []
    return [(f"/{name}", command.doc) for name, command in COMMANDS.items() if name.startswith(typed[1:])]
