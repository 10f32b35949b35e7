"""``holdfast questions``, ``approve``, ``deny`` and ``answer``: list and answer the questions of suspended runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, cast, get_args

import msgspec
import typer

from holdfast.cli.confirm import confirmed
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Session, Url, User
from holdfast.cli.output import age, note, say, say_json, visible
from holdfast.cli.secret_input import read_secret
from holdfast.cli.target import Target, run_with_client
from holdfast.errors import ApprovalKeyRequired, CallMismatch, ConfigurationError, UnknownQuestion
from holdfast.protocol.messages import GrantScope
from holdfast.undumpable import make_undumpable

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Answer, Question

__all__ = ["answer", "approve", "approve_as_person", "asked", "deny", "questions", "whole"]

_SHOWN = 300

QuestionId = Annotated[
    str | None, typer.Argument(metavar="[QUESTION]", help="Question ID; optional if only one is open.")
]


def questions(
    session: Session = "main", url: Url = None, key: Key = None, user: User = None, json: Json = False
) -> Exit:
    """List the open approvals and questions of a session."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        found = await client.session(session).questions()
        if target.as_json:
            say_json({"questions": found})
        elif not found:
            note("no open questions")
        else:
            for question in found:
                say(f"{question.question_id}  {whole(question)}")
                say(f"  asked {age(question.asked_at)}")
                if question.kind == "approval":
                    say(f"  holdfast approve {question.question_id} -s {session} --call {question.call_hash}")

    return run_with_client(target, work)


def approve(
    question: QuestionId = None,
    session: Session = "main",
    text: Annotated[str, typer.Option("--note", help="Note to the model.")] = "",
    scope: Annotated[
        str, typer.Option("--for", help="What the access holds for: call, session or principal (all your sessions).")
    ] = "call",
    call_hash: Annotated[
        str | None,
        typer.Option("--call", metavar="HASH", help="Hash of the call to approve, as shown by 'holdfast questions'."),
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Approve a call. Without --call, show it and ask for confirmation."""
    if scope not in get_args(GrantScope):
        raise typer.BadParameter(f"{scope!r} is not one of {', '.join(get_args(GrantScope))}", param_hint="--for")
    holds_for = cast("GrantScope", scope)
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> Exit:
        remote = client.session(session)
        found = await _the(remote, question, "approval")
        if isinstance(found, str):  # no longer open; repeating the same answer has no effect
            if call_hash is None:
                raise UnknownQuestion(f"question {found[:80]!r} is not open in session {session!r}")
            given = await remote.approve(found, note=text, call_hash=call_hash, scope=holds_for)
        else:
            if call_hash is not None and call_hash != found.call_hash:
                raise CallMismatch(f"question {found.question_id!r} now asks about a different call")
            if call_hash is None and not _agreed(found):
                return Exit.REFUSED
            given = await approve_as_person(client, remote, found, note=text, scope=holds_for)
        _say(given, as_json=target.as_json)
        return Exit.OK

    return run_with_client(target, work)


async def approve_as_person(
    client: Client, remote: RemoteSession, question: Question, *, note: str, scope: GrantScope = "call"
) -> Answer:
    """Approve the call that was shown; prompt for an approval key at the terminal if the server requires a key.

    Raises:
        ApprovalKeyRequired: if the server requires a key, and stdin is not a terminal or the typed key is wrong.
    """
    try:
        return await remote.approve(question, note=note, scope=scope)
    except ApprovalKeyRequired:
        if not sys.stdin.isatty():
            raise
        make_undumpable()  # before the key is in memory
        client.approval_key = read_secret("approval key: ")
        try:
            return await remote.approve(question, note=note, scope=scope)
        except ApprovalKeyRequired:
            client.approval_key = None
            raise


def _agreed(question: Question) -> bool:
    """Show the full call and ask for confirmation. Raises `ConfigurationError` if stdin is not a terminal."""
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"approving {question.question_id!r} without --call requires a terminal",
            hint="pass --call HASH as shown by 'holdfast questions', or run this command at a terminal",
        )
    say(f"approve {whole(question)}?")
    return confirmed("y/n> ")


def deny(
    question: QuestionId = None,
    session: Session = "main",
    reason: Annotated[str, typer.Option("--reason", "-r", help="Reason, passed on to the model.")] = "",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Deny a call that waits for approval."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        remote = client.session(session)
        found = await _the(remote, question, "approval")
        _say(await remote.deny(found, reason=reason), as_json=target.as_json)

    return run_with_client(target, work)


def answer(
    text: Annotated[str, typer.Argument(help="Answer text.")],
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="Question ID; optional if only one is open.")
    ] = None,
    session: Session = "main",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Answer a question from a run."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        remote = client.session(session)
        found = await _the(remote, question, "question")
        _say(await remote.answer(found, text), as_json=target.as_json)

    return run_with_client(target, work)


async def _the(remote: RemoteSession, question_id: str | None, kind: str) -> Question | str:
    """Return the open question with the id `question_id`, or `question_id` itself if that question is not open.

    Without a `question_id`, return the only open question of the kind `kind`.

    Raises:
        UnknownQuestion: if no `question_id` is given and no question of that kind is open.
        ConfigurationError: if no `question_id` is given and several such questions are open, which the message lists.
    """
    found = await remote.questions()
    if question_id is not None:
        return next((question for question in found if question.question_id == question_id), question_id)
    found = [question for question in found if question.kind == kind]
    if not found:
        raise UnknownQuestion(f"session {remote.key!r} has no open {'question' if kind == 'question' else kind}")
    if len(found) > 1:
        listed = "\n".join(f"  {question.question_id}  {whole(question)}" for question in found)
        raise ConfigurationError(f"{len(found)} are open; choose one:\n{listed}", hint="pass its id")
    return found[0]


def whole(question: Question) -> str:
    """Return the whole question, with every character visible and none omitted."""
    if question.kind == "question":
        return visible(question.text)
    arguments = "" if question.arguments is None else msgspec.json.encode(question.arguments).decode()
    shown = visible(f"{question.tool} {arguments}".rstrip())
    usual = question.text in ("", f"May {question.tool} be called?")
    return shown if usual else f"{shown}  ({visible(question.text)})"


def asked(question: Question) -> str:
    """Return a question as one line for a list, truncated if it is long. For approvals, show `whole` instead."""
    text = whole(question)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text) - _SHOWN:,} more characters)"


def _say(given: Answer, *, as_json: bool) -> None:
    if as_json:
        say_json(given)
    else:
        granted = f" (grant {given.grant_id}, for the {given.scope})" if given.grant_id else ""
        say(f"{given.decision}: {given.question_id}{granted}")
