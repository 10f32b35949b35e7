"""``holdfast grants``: list what people granted to calls beyond their wall, and revoke it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.command_group import RefusingGroup
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Url, User
from holdfast.cli.output import age, say, say_json, say_table, visible
from holdfast.cli.target import Target, run_with_client
from holdfast.protocol.access import describe

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.protocol.messages import Grant

__all__ = ["app", "list_grants", "revoke"]

app = typer.Typer(
    cls=RefusingGroup,
    help="List and revoke grants.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command("list")
def list_grants(
    session: Annotated[
        str | None, typer.Option("--session", "-s", help="List only the grants that hold in this session.")
    ] = None,
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """List grants with who granted them, when, and with which credential."""
    target = Target(url=url, key=key, user=user, as_json=json)

    async def work(client: Client) -> None:
        found = await client.grants(session=session)
        if target.as_json:
            say_json({"grants": found})
        else:
            say_table(
                ("grant", "holds for", "access", "granted", "by", "via"),
                (
                    (
                        grant.grant_id,
                        f"session {visible(grant.session)}" if grant.scope == "session" else "principal",
                        visible(describe(grant.access)),
                        age(grant.at),
                        visible(grant.by),
                        grant.approval_key or grant.via,
                    )
                    for grant in found
                ),
            )

    return run_with_client(target, work)


@app.command("revoke")
def revoke(
    grant_id: Annotated[str, typer.Argument(metavar="GRANT", help="Grant ID, g_…")],
    url: Url = None,
    key: Key = None,
    user: User = None,
    json: Json = False,
) -> Exit:
    """Revoke a grant at once, and end the programs that run with its access."""
    target = Target(url=url, key=key, user=user, as_json=json)

    async def work(client: Client) -> None:
        _say(await client.revoke_grant(grant_id), as_json=target.as_json)

    return run_with_client(target, work)


def _say(grant: Grant, *, as_json: bool) -> None:
    if as_json:
        say_json(grant)
    else:
        say(f"revoked: {grant.grant_id} ({visible(describe(grant.access))})")
