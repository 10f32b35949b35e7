"""``holdfast retry``, ``undo``, ``compact``, ``fork``, ``export`` and ``import``: edit and copy a session's history."""

from __future__ import annotations

import sys
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import msgspec
import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.logs import summary
from holdfast.cli.options import Json, Key, Session, Url, User, Wait
from holdfast.cli.output import fit, note, say, say_json
from holdfast.cli.send import finish, read
from holdfast.cli.target import Target, run_with_client
from holdfast.errors import ConfigurationError
from holdfast.protocol.events import Gap
from holdfast.protocol.messages import SessionExport
from holdfast.protocol.model import ENDED_BY

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.messages import Entry, SessionView

__all__ = ["compact", "export", "fork", "import_archive", "retry", "undo"]

_PROGRESS_EVERY = 1000


def retry(
    session: Session = "main",
    wait: Wait = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Run the messages of the last run again. What that run added to the transcript is removed first."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> Exit:
        remote = client.session(session)
        return await finish(remote, await remote.retry(), wait, as_json=target.as_json)

    return run_with_client(target, work)


def undo(session: Session = "main", url: Url = None, key: Key = None, user: User = None, json: Json = False) -> Exit:
    """Remove the last run or edit from the transcript. Prints the removed entries."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        _say_entries(await client.session(session).undo(), "removed", as_json=target.as_json)

    return run_with_client(target, work)


def compact(
    session: Session = "main",
    keep: Annotated[int, typer.Option("--keep", help="Number of newest user messages to keep.", min=0, max=1000)] = 4,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Summarize the older part of the transcript. The agent's model writes the summary."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        if not target.as_json:
            note("summarizing …")
        _say_entries(await client.session(session).compact(keep=keep), "in the transcript now", as_json=target.as_json)

    return run_with_client(target, work)


def fork(
    to: Annotated[str, typer.Argument(metavar="KEY", help="Key of the new session.")],
    session: Session = "main",
    through: Annotated[
        int | None, typer.Option("--through", help="Copy up to this entry of the transcript (default: all).", min=0)
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Copy a transcript into a new session. Both sessions continue on their own."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        _say_view(await client.session(session).fork(to, through_n=through), as_json=target.as_json)

    return run_with_client(target, work)


def import_archive(
    file: Annotated[str, typer.Argument(help="Archive written by 'holdfast export --archive'.")],
    session: Session = "main",
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Start a new session with the history of an archive."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        try:
            archive = msgspec.json.decode(read(file), type=SessionExport)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{file} is not a session archive: {error}", hint="create one with 'holdfast export --archive'"
            ) from None
        _say_view(await client.session(session).import_history(archive), as_json=target.as_json)

    return run_with_client(target, work)


def export(
    session: Session = "main",
    events: Annotated[bool, typer.Option("--events", help="Export the event log instead of the transcript.")] = False,
    archive: Annotated[bool, typer.Option("--archive", help="Export an archive for import, with attachments.")] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON lines instead of Markdown.")] = False,
) -> Exit:
    """Export a session as Markdown, JSON lines or an archive. 'holdfast import' reads an archive."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        if events and archive:
            raise ConfigurationError("--events and --archive are mutually exclusive", hint="omit one of them")
        remote = client.session(session)
        if archive:
            whole = await remote.export()
            with _opened(output) if output else nullcontext(sys.stdout) as file:
                file.write(msgspec.json.encode(whole).decode() + "\n")
            if output:
                note(f"{len(whole.entries)} entries and {len(whole.attachments)} attachments written to {output}")
            return
        if output is None:
            await _export(remote, sys.stdout, events=events, as_json=target.as_json)
            return
        await remote.info()  # raises for an unknown session before the file is truncated
        with _opened(output) as file:
            count = await _export(remote, file, events=events, as_json=target.as_json)
        note(f"{count} {'events' if events else 'entries'} written to {output}")

    return run_with_client(target, work)


def _opened(output: str) -> TextIO:
    try:
        return Path(output).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{output} is not writable: {error.strerror}", hint="name another file") from None


async def _export(remote: RemoteSession, file: TextIO, *, events: bool, as_json: bool) -> int:
    if events:
        return await _export_events(remote, file, as_json=as_json)
    entries = await remote.transcript()
    if as_json:
        file.writelines(msgspec.json.encode(entry).decode() + "\n" for entry in entries)
    else:
        file.write(f"# Session {remote.key}\n")
        file.writelines(fit(_markdown(entry), file) for entry in entries)
    return len(entries)


async def _export_events(remote: RemoteSession, file: TextIO, *, as_json: bool) -> int:
    last = (await remote.info()).seq
    count = 0
    if not last:
        return 0
    progress = file is not sys.stdout and sys.stderr.isatty()
    async with aclosing(remote.events()) as found:
        async for event in found:
            file.write((msgspec.json.encode(event).decode() if as_json else summary(event)) + "\n")
            count += 1
            seq = event.until if isinstance(event, Gap) else event.seq
            if progress and (count % _PROGRESS_EVERY == 0 or seq >= last):
                print(f"\r{seq:,} of {last:,}", end="\n" if seq >= last else "", file=sys.stderr, flush=True)
            if seq >= last:
                break
    return count


def _markdown(entry: Entry) -> str:
    match entry.role:
        case "user" | "assistant":
            partial = " (interrupted)" if entry.partial else f" ({ENDED_BY[entry.ended_by]})" if entry.ended_by else ""
            files = "".join(f"- {one.name or one.digest[:12]} ({one.media_type})\n" for one in entry.attachments)
            return f"\n**{entry.role}**{partial}:\n\n{entry.content}\n{files and chr(10) + files}"
        case "summary":
            return f"\n*Summary of earlier messages:*\n\n{entry.content}\n"
        case "tool_call":
            return f"\n*Tool call: {entry.name}*\n\n```json\n{entry.content}\n```\n"
        case "tool_result":
            return f"\n*{entry.name} result*\n\n```\n{entry.content}\n```\n"


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
