"""``holdfast ps``, ``tree`` and ``tail``: show state without changing it."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast.cli.approvals import asked
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Session, Url, User
from holdfast.cli.output import age, clock_time, note, say, say_json, say_table, say_tree
from holdfast.cli.target import Target, run_with_client
from holdfast.errors import HoldfastError
from holdfast.protocol.events import EventBase, Gap, format_cursor, parse_cursor

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.protocol.events import Event

__all__ = ["ps", "summary", "tail", "tree"]


def ps(
    everybody: Annotated[
        bool, typer.Option("--all", "-a", help="List the sessions of all principals (admin).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="Maximum number to list.", min=1, max=1000)] = 100,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """List sessions with their active runs and queued messages."""
    target = Target(url=url, key=key, user=user, as_json=json)

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


def tree(
    session: Annotated[str | None, typer.Option("--session", "-s", help="Show only this session.")] = None,
    everybody: Annotated[bool, typer.Option("--all", "-a", help="Show the work of all principals (admin).")] = False,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Show the live tasks, threads and processes."""
    target = Target(url=url, key=key, user=user, as_json=json)

    async def work(client: Client) -> None:
        node = await (client.session(session).tree() if session else client.tree(everybody=everybody))
        if target.as_json:
            say_json(node)
        else:
            say_tree(node)

    return run_with_client(target, work)


def tail(
    session: Session = "main",
    after: Annotated[str | None, typer.Option("--after", help="Show only events after this cursor.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Start with this many of the newest events.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Keep printing new events.")] = True,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Follow a session's events. Reconnects automatically."""
    target = Target(url=url, key=key, user=user, as_json=json)

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
