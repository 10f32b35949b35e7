"""``holdfast tree``: show what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Url, User
from holdfast.cli.output import say_json, say_tree
from holdfast.cli.target import Target, run_with_client

if TYPE_CHECKING:
    from holdfast.client import Client

__all__ = ["tree"]


def tree(
    session: Annotated[str | None, typer.Option("--session", "-s", help="Show only this session.")] = None,
    everybody: Annotated[bool, typer.Option("--all", "-a", help="Show the work of all principals (admin).")] = False,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Show the live tasks, threads and programs."""
    target = Target(url=url, key=key, user=user, session=session, as_json=json)

    async def work(client: Client) -> None:
        node = await (client.session(session).tree() if session else client.tree(everybody=everybody))
        if target.as_json:
            say_json(node)
        else:
            say_tree(node)

    return run_with_client(target, work)
