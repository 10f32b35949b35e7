"""``holdfast retry``, ``undo``, ``compact``, ``branch`` and ``import``: edit a session's history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from holdfast.cli.connection import Target, run_with_client
from holdfast.cli.exits import Exit
from holdfast.cli.output import note, say, say_json
from holdfast.cli.sending import finish, read
from holdfast.errors import ConfigurationError
from holdfast.protocol.messages import SessionExport

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.protocol.messages import Entry, SessionView

__all__ = ["branch", "compact", "import_history", "retry", "undo"]


def retry(target: Target, session: str, *, wait_s: float | None) -> Exit:
    """Run the last messages again; with `wait_s`, print the answer."""

    async def work(client: Client) -> Exit:
        remote = client.session(session)
        return await finish(remote, await remote.retry(), wait_s, as_json=target.as_json)

    return run_with_client(target, work)


def undo(target: Target, session: str) -> Exit:
    """Remove the last run or edit from the transcript."""

    async def work(client: Client) -> None:
        _say_entries(await client.session(session).undo(), "removed", as_json=target.as_json)

    return run_with_client(target, work)


def compact(target: Target, session: str, *, keep: int) -> Exit:
    """Summarize the old part of the transcript with the agent's model."""

    async def work(client: Client) -> None:
        if not target.as_json:
            note("summarizing …")
        _say_entries(await client.session(session).compact(keep=keep), "in the transcript now", as_json=target.as_json)

    return run_with_client(target, work)


def branch(target: Target, session: str, key: str, *, through_n: int | None) -> Exit:
    """Copy the transcript into a new session."""

    async def work(client: Client) -> None:
        _say_view(await client.session(session).branch(key, through_n=through_n), as_json=target.as_json)

    return run_with_client(target, work)


def import_history(target: Target, session: str, file: str) -> Exit:
    """Start a session with an archive of ``holdfast export --archive``."""

    async def work(client: Client) -> None:
        try:
            export = msgspec.json.decode(read(file), type=SessionExport)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{file} is not a session archive: {error}", hint="create one with 'holdfast export --archive'"
            ) from None
        _say_view(await client.session(session).import_history(export), as_json=target.as_json)

    return run_with_client(target, work)


def _say_entries(entries: list[Entry], what: str, *, as_json: bool) -> None:
    if as_json:
        say_json({"entries": entries})
        return
    say(f"{len(entries)} entr{'y' if len(entries) == 1 else 'ies'} {what}")
    for entry in entries:
        first = entry.content.strip().partition("\n")[0][:80]
        say(f"  {entry.n:>4} {entry.role:<11} {first}".rstrip())


def _say_view(view: SessionView, *, as_json: bool) -> None:
    if as_json:
        say_json(view)
    else:
        say(f"session {view.key} of agent {view.agent}; continue with 'holdfast chat -s {view.key}'")
