"""``holdfast tail`` and ``logs``: print the events of a session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Session, Url, User
from holdfast.cli.output import clock_time, say, say_json
from holdfast.cli.output_pipe import until_reader_leaves
from holdfast.cli.target import Target, note_back, note_cut, run_with_client
from holdfast.protocol.events import EventBase, Gap, format_cursor, parse_cursor

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.protocol.events import Event

__all__ = ["logs", "summary", "tail"]

After = Annotated[str | None, typer.Option("--after", help="Show only events after this cursor.")]
Lines = Annotated[
    int,
    typer.Option("--lines", "-n", help="Start with the newest N events of the log.", min=0),
]


def tail(
    session: Session = "main",
    after: After = None,
    lines: Lines = 20,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing new events.")] = True,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Follow a session: on a terminal as text, piped as events.

    Reconnects automatically. With --json, the events are JSON on a terminal too.
    """
    target = Target(url=url, key=key, user=user, session=session, as_json=json)
    show = say_json if json else _conversation(session) if sys.stdout.isatty() else _say_summary
    return _print_events(target, session, show, after=after, lines=lines, follow=follow)


def logs(
    session: Session = "main",
    after: After = None,
    lines: Lines = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new events.")] = False,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Show a session's newest events."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)
    show = say_json if json else _say_summary
    return _print_events(target, session, show, after=after, lines=lines, follow=follow)


def _conversation(session: str) -> Callable[[Event | Gap], None]:
    """Return a function that shows events on the terminal as text, with a line for each call and each end of a run."""
    from holdfast.cli.tail_view import TailView

    return TailView(session).follow


def _say_summary(event: Event | Gap) -> None:
    say(summary(event))


def _print_events(
    target: Target, session: str, show: Callable[[Event | Gap], None], *, after: str | None, lines: int, follow: bool
) -> Exit:
    async def work(client: Client) -> None:
        client.on_cut, client.on_back = note_cut, note_back
        remote = client.session(session)
        view = await remote.info()
        cursor = after or format_cursor(max(0, view.seq - lines), view.number)
        if not follow and parse_cursor(cursor, view.number) >= view.seq:
            return
        async with until_reader_leaves(), aclosing(remote.events(after=cursor)) as events:
            async for event in events:
                show(event)
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
