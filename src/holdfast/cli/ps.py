"""``holdfast ps``: list sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.approvals import asked
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Url, User
from holdfast.cli.output import age, fit_columns, note, say, say_json, say_table
from holdfast.cli.target import Target, run_with_client
from holdfast.errors import Forbidden

if TYPE_CHECKING:
    from holdfast.client import Client

__all__ = ["ps"]


def ps(
    everybody: Annotated[
        bool, typer.Option("--all", "-a", help="List the sessions of all principals (admin).")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="Maximum number to list.", min=1, max=1000)] = 100,
    before: Annotated[
        str | None, typer.Option("--before", help="List the next page: `next` of the previous page.")
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """List sessions with their active runs and queued messages. Deleted sessions are only in the JSON."""
    target = Target(url=url, key=key, user=user, as_json=json)

    async def work(client: Client) -> None:
        page = await client.session_page(limit=limit, everybody=everybody, before=before)
        sessions = page.sessions
        asking = [] if everybody else [view.key for view in sessions if view.state == "suspended"]
        waiting = {key: await client.session(key).questions() for key in asking}
        if target.as_json:
            say_json({"sessions": sessions, "questions": waiting, "next": page.next})
            return
        sessions = [view for view in sessions if view.state != "deleted"]
        if not sessions:
            if before is not None:
                note("no more sessions")
            else:
                note(await _no_sessions(client, limit=limit, everybody=everybody))
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
                say(fit_columns(f"{key} asks: {asked(question)}"))
                say(f"  holdfast {do} -s {key}")
        if page.next is not None:
            note(f"more sessions: repeat the command with --before {page.next}")

    return run_with_client(target, work)


async def _no_sessions(client: Client, *, limit: int, everybody: bool) -> str:
    """Return what to tell a principal without sessions: an admin key may see those of others."""
    if not everybody:
        try:
            others = [view for view in await client.sessions(limit=limit, everybody=True) if view.state != "deleted"]
        except Forbidden:
            others = []
        if others:
            more = " or more" if len(others) == limit else ""
            return f"no sessions of your own; others have {len(others)}{more}: holdfast ps --all"
    return "no sessions; start one: holdfast chat -s NAME"
