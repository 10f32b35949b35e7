"""``holdfast rm``: delete sessions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.confirm import confirmed
from holdfast.cli.exit_codes import Exit, exit_of
from holdfast.cli.options import Json, Key, Url, User
from holdfast.cli.output import counted, note, say, say_error, say_json
from holdfast.cli.receipt_text import counts_in_words, receipt_lines
from holdfast.cli.stop_progress import announce
from holdfast.cli.target import Target, run_with_client
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.protocol.stopping import StopCounts

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession

__all__ = ["rm"]


def rm(
    sessions: Annotated[list[str], typer.Argument(metavar="SESSION...", help="Keys of the sessions.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Delete sessions with all their messages. Work that a session still does is stopped first.

    Sessions are deleted one after another. If one cannot be deleted, the rest still are; the exit code is that of the
    first failure.
    """
    target = Target(url=url, key=key, user=user, as_json=json)
    if not yes and not sys.stdin.isatty():
        raise ConfigurationError(
            "nothing was deleted: standard input is not a terminal to ask at",
            hint="to delete without a question: --yes",
        )

    async def work(client: Client) -> Exit:
        worst = Exit.OK
        for name in sessions:
            remote = client.session(name)
            try:
                code = await _delete(remote, as_json=target.as_json) if yes or await _agreed(remote) else Exit.REFUSED
            except HoldfastError as error:
                say_error(error, as_json=target.as_json, session=name)
                code = exit_of(error)
            worst = worst or code
        return worst

    return run_with_client(target, work)


async def _agreed(remote: RemoteSession) -> bool:
    messages = sum(entry.role == "user" for entry in await remote.transcript())
    content = counted(messages, "message")
    return confirmed(f"delete session {remote.key!r} with {content}? its name is not free for a week; y/n> ")


async def _delete(remote: RemoteSession, *, as_json: bool) -> Exit:
    deleted = await announce(remote, remote.delete(), note)
    receipt = deleted.receipt
    if as_json:
        say_json(deleted)
    else:
        stopped = "" if receipt.stopped == StopCounts() else f"; stopped: {counts_in_words(receipt.stopped)}"
        say(f"deleted {remote.key}{stopped}")
        for line in receipt_lines(receipt)[1:]:
            say(f"  {line}")
    return Exit.OK if receipt.outcome == "gone" else Exit.FAILED
