"""``holdfast ps``, ``tree``, ``tail`` and ``export``: show state without changing it."""

from __future__ import annotations

import sys
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from holdfast.cli.answering import asked
from holdfast.cli.connection import Target, run_with_client
from holdfast.cli.exits import Exit
from holdfast.cli.output import age, clock_time, fit, note, say, say_json, say_table, say_tree
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.protocol.events import EventBase, Gap, format_cursor, parse_cursor
from holdfast.protocol.model import ENDED_BY

if TYPE_CHECKING:
    from holdfast.client import Client, RemoteSession
    from holdfast.protocol.events import Event
    from holdfast.protocol.messages import Entry

__all__ = ["export", "ps", "summary", "tail", "tree"]

_PROGRESS_EVERY = 1000


def ps(target: Target, *, everybody: bool, limit: int) -> Exit:
    """List sessions."""

    async def work(client: Client) -> None:
        sessions = await client.sessions(limit=limit, everybody=everybody)
        asking = [] if everybody else [view.key for view in sessions if view.state == "suspended"]
        waiting = {key: await client.session(key).questions() for key in asking}
        if target.as_json:
            say_json({"sessions": sessions, "questions": waiting})
            return
        if not sessions:
            note("no sessions yet: 'holdfast chat' starts one")
            return
        say_table(
            ("session", "principal", "state", "waiting", "events", "agent", "run", "changed"),
            (
                (
                    view.key,
                    view.principal,
                    view.state,
                    str(view.waiting),
                    str(view.seq),
                    view.agent,
                    view.run_id or "-",
                    age(view.updated_at),
                )
                for view in sessions
            ),
        )
        for key, questions in waiting.items():
            for question in questions:
                do = "answer" if question.kind == "question" else "approve (or deny)"
                say(f"{key} asks: {asked(question)}")
                say(f"  holdfast {do} -s {key}")

    return run_with_client(target, work)


def tree(target: Target, session: str | None, *, everybody: bool) -> Exit:
    """Show live tasks, threads and processes."""

    async def work(client: Client) -> None:
        node = await (client.session(session).tree() if session else client.tree(everybody=everybody))
        if target.as_json:
            say_json(node)
        else:
            say_tree(node)

    return run_with_client(target, work)


def tail(target: Target, session: str, *, after: str | None, lines: int, follow: bool) -> Exit:
    """Print a session's events, one per line."""

    def cut(error: HoldfastError) -> None:
        note(f"holdfast: {error.message}; reconnecting …")

    async def work(client: Client) -> None:
        client.on_cut = cut
        remote = client.session(session)
        view = await remote.info()
        cursor = after or format_cursor(max(0, view.seq - lines), view.number)
        if not follow and parse_cursor(cursor, view.number) >= view.seq:
            return
        async with aclosing(remote.events(after=cursor)) as events:
            async for event in events:
                if target.as_json:
                    say_json(event)
                else:
                    say(summary(event))
                seq = event.until if isinstance(event, Gap) else event.seq
                if not follow and seq >= view.seq:
                    return

    return run_with_client(target, work)


def summary(event: Event | Gap) -> str:
    """Return an event as one line."""
    if isinstance(event, Gap):
        return f"       gap: events {event.after + 1} to {event.until} are missing ({event.reason})"
    fields = {
        name: value
        for name in event.__struct_fields__
        if name not in EventBase.__struct_fields__ and (value := getattr(event, name)) not in (None, "", (), 0)
    }
    parts = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else msgspec.json.encode(_told(value)).decode()
        parts.append(f"{name}={_short(text)}")
    return f"{event.seq:>6} {clock_time(event.at)} {event.kind:<17} {' '.join(parts)}".rstrip()


def _told(value: object) -> object:
    """Return a value without its empty fields."""
    plain = msgspec.to_builtins(value)
    if isinstance(value, msgspec.Struct) and isinstance(plain, dict):
        return {name: field for name, field in plain.items() if field not in (None, "", 0)}
    return plain


def _short(text: str) -> str:
    shown = text if len(text) <= 100 else text[:97] + "…"
    return shown if shown.isprintable() and " " not in shown else repr(shown)


def export(target: Target, session: str, *, events: bool, archive: bool, output: str | None) -> Exit:
    """Write a session's transcript, event log or archive to stdout or a file."""
    if events and archive:
        raise ConfigurationError("--events and --archive exclude each other", hint="omit one of them")

    async def work(client: Client) -> None:
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
