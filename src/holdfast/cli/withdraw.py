"""``holdfast withdraw``: take back a queued message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Session, Url, User
from holdfast.cli.output import say, say_json, visible
from holdfast.cli.target import Target, run_with_client
from holdfast.errors import ConfigurationError, UnknownMessage

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.protocol.messages import MailboxItem

__all__ = ["withdraw"]

_SHOWN = 60


def withdraw(
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE_ID]", help="Message ID; optional if only one is queued.")
    ] = None,
    session: Session = "main",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Withdraw a queued message. Once a run has taken a message, interrupt the run instead."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        remote = client.session(session)
        queued = {item.message.message_id: item for item in await remote.mailbox()}
        message_id = message or _only(remote.key, queued)
        settlement = await remote.withdraw(message_id)
        if target.as_json:
            say_json(settlement)
        else:
            content = f" {_described(queued[message_id])}" if message_id in queued else ""
            say(f"{'withdrawn' if message_id in queued else 'was already withdrawn'}: {message_id}{content}")

    return run_with_client(target, work)


def _only(session: str, queued: dict[str, MailboxItem]) -> str:
    """Return the id of the only queued message.

    Raises:
        UnknownMessage: if none is queued.
        ConfigurationError: if several are queued, which the message lists.
    """
    if not queued:
        raise UnknownMessage(f"session {session!r} has no queued message")
    if len(queued) > 1:
        listed = "\n".join(f"  {message_id}  {_described(item)}" for message_id, item in queued.items())
        raise ConfigurationError(f"{len(queued)} messages are queued; choose one:\n{listed}", hint="pass its id")
    return next(iter(queued))


def _described(item: MailboxItem) -> str:
    text = visible(item.message.content)
    return f'"{text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"}"'
