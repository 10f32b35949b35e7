"""``holdfast questions``, ``approve``, ``deny`` and ``answer``: what suspended runs ask, and what people say to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.connection import Target, run_with_client
from holdfast.cli.exits import Exit
from holdfast.cli.output import age, note, say, say_json
from holdfast.errors import ConfigurationError, UnknownQuestion

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Answer, Question

__all__ = ["answer", "approve", "asked", "deny", "questions"]

_SHOWN = 300


def questions(target: Target, session: str) -> Exit:
    """List what the session's run waits for."""

    async def work(client: Client) -> None:
        found = await client.session(session).questions()
        if target.as_json:
            say_json({"questions": found})
        elif not found:
            note("nothing waits for an answer")
        else:
            for question in found:
                say(f"{question.question_id}  {asked(question)}")
                say(f"  asked {age(question.asked_at)}")

    return run_with_client(target, work)


def approve(target: Target, session: str, question_id: str | None, *, text: str) -> Exit:
    """Let a call be made."""

    async def work(client: Client) -> None:
        remote = client.session(session)
        question = await _the(remote, question_id, "approval")
        _say(await remote.approve(question, note=text), as_json=target.as_json)

    return run_with_client(target, work)


def deny(target: Target, session: str, question_id: str | None, *, text: str) -> Exit:
    """Refuse a call."""

    async def work(client: Client) -> None:
        remote = client.session(session)
        question = await _the(remote, question_id, "approval")
        _say(await remote.deny(question, reason=text), as_json=target.as_json)

    return run_with_client(target, work)


def answer(target: Target, session: str, question_id: str | None, *, text: str) -> Exit:
    """Answer a question."""

    async def work(client: Client) -> None:
        remote = client.session(session)
        question = await _the(remote, question_id, "question")
        _say(await remote.answer(question, text), as_json=target.as_json)

    return run_with_client(target, work)


async def _the(remote: RemoteSession, question_id: str | None, kind: str) -> str:
    """The id that was given, or that of the only question of its kind.

    Raises:
        UnknownQuestion: none is open.
        ConfigurationError: several are; the text names them.
    """
    if question_id is not None:
        return question_id
    found = [question for question in await remote.questions() if question.kind == kind]
    if not found:
        raise UnknownQuestion(f"session {remote.key!r} waits for no {'answer' if kind == 'question' else kind}")
    if len(found) > 1:
        listed = "\n".join(f"  {question.question_id}  {asked(question)}" for question in found)
        raise ConfigurationError(f"{len(found)} are open; name one:\n{listed}", hint="give its id")
    return found[0].question_id


def asked(question: Question) -> str:
    """A question in one line: its text, or the call that needs approval."""
    if question.kind == "question":
        return question.text
    arguments = msgspec.json.encode(question.arguments).decode() if question.arguments is not None else ""
    shown = f"{question.tool} {arguments}" if len(arguments) <= _SHOWN else f"{question.tool} {arguments[:_SHOWN]}…"
    usual = question.text in ("", f"May {question.tool} be called?")
    return shown if usual else f"{shown}  ({question.text})"


def _say(given: Answer, *, as_json: bool) -> None:
    if as_json:
        say_json(given)
    else:
        say(f"{given.decision}: {given.question_id}")
