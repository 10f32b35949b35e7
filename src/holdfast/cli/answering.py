"""``holdfast questions``, ``approve``, ``deny`` and ``answer``: list and answer the questions of suspended runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.connection import Target, run_with_client
from holdfast.cli.exits import Exit
from holdfast.cli.output import age, note, say, say_json, visible
from holdfast.cli.secret_input import read_secret
from holdfast.errors import ApprovalKeyRequired, CallMismatch, ConfigurationError, UnknownQuestion
from holdfast.undumpable import make_undumpable

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Answer, Question

__all__ = ["answer", "approve", "approve_as_person", "asked", "deny", "questions", "whole"]

_SHOWN = 300


def questions(target: Target, session: str) -> Exit:
    """List what the session's run waits for, each call whole."""

    async def work(client: Client) -> None:
        found = await client.session(session).questions()
        if target.as_json:
            say_json({"questions": found})
        elif not found:
            note("nothing waits for an answer")
        else:
            for question in found:
                say(f"{question.question_id}  {whole(question)}")
                say(f"  asked {age(question.asked_at)}")
                if question.kind == "approval":
                    say(f"  holdfast approve {question.question_id} -s {session} --call {question.call_hash}")

    return run_with_client(target, work)


def approve(target: Target, session: str, question_id: str | None, *, text: str, call_hash: str | None) -> Exit:
    """Let a call be made: the one with `call_hash`, or the one that is shown now and that a person agrees to."""

    async def work(client: Client) -> Exit:
        remote = client.session(session)
        question = await _the(remote, question_id, "approval")
        if isinstance(question, str):  # it is not open any more: the same answer again has no effect
            if call_hash is None:
                raise UnknownQuestion(f"no question {question[:80]!r} is open in session {session!r}")
            given = await remote.approve(question, note=text, call_hash=call_hash)
        else:
            if call_hash is not None and call_hash != question.call_hash:
                raise CallMismatch(f"{question.question_id!r} asks for another call now")
            if call_hash is None and not _agreed(question):
                return Exit.REFUSED
            given = await approve_as_person(client, remote, question, note=text)
        _say(given, as_json=target.as_json)
        return Exit.OK

    return run_with_client(target, work)


async def approve_as_person(client: Client, remote: RemoteSession, question: Question, *, note: str) -> Answer:
    """Approve the call that was shown; where an approval key is needed, the person at the terminal is asked for it.

    Raises:
        ApprovalKeyRequired: one is needed, and there is no terminal, or it is not the right one.
    """
    try:
        return await remote.approve(question, note=note)
    except ApprovalKeyRequired:
        if not sys.stdin.isatty():
            raise
        make_undumpable()  # before the key is in memory
        client.approval_key = read_secret("approval key: ")
        try:
            return await remote.approve(question, note=note)
        except ApprovalKeyRequired:
            client.approval_key = None
            raise


def _agreed(question: Question) -> bool:
    """Show the call, whole, and ask the person at the terminal. Raises `ConfigurationError` where there is none."""
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"it is not said which call of {question.question_id!r} is approved",
            hint="look at 'holdfast questions', and give its --call HASH; or approve it at a terminal",
        )
    say(f"may it call {whole(question)}?")
    return input("y/n> ").strip().lower() in ("y", "yes")


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


async def _the(remote: RemoteSession, question_id: str | None, kind: str) -> Question | str:
    """The open question with that id, or the only one of its kind; the id itself if it is not open.

    Raises:
        UnknownQuestion: none is open.
        ConfigurationError: several are; the text names them.
    """
    found = await remote.questions()
    if question_id is not None:
        return next((question for question in found if question.question_id == question_id), question_id)
    found = [question for question in found if question.kind == kind]
    if not found:
        raise UnknownQuestion(f"session {remote.key!r} waits for no {'answer' if kind == 'question' else kind}")
    if len(found) > 1:
        listed = "\n".join(f"  {question.question_id}  {whole(question)}" for question in found)
        raise ConfigurationError(f"{len(found)} are open; name one:\n{listed}", hint="give its id")
    return found[0]


def whole(question: Question) -> str:
    """All that is asked: every character of it can be seen, and none is left out."""
    if question.kind == "question":
        return visible(question.text)
    arguments = "" if question.arguments is None else msgspec.json.encode(question.arguments).decode()
    shown = visible(f"{question.tool} {arguments}".rstrip())
    usual = question.text in ("", f"May {question.tool} be called?")
    return shown if usual else f"{shown}  ({visible(question.text)})"


def asked(question: Question) -> str:
    """A question in one line for a list; nothing is approved by it. What is left out is counted."""
    text = whole(question)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text) - _SHOWN:,} more characters)"


def _say(given: Answer, *, as_json: bool) -> None:
    if as_json:
        say_json(given)
    else:
        say(f"{given.decision}: {given.question_id}")
