"""``holdfast keys``: manage keys through a running server, or else directly in the store."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import quote

import msgspec
import typer

from holdfast import ids
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Store, Url
from holdfast.cli.output import age, note, say, say_json, say_table, visible
from holdfast.cli.renamed_commands import RefusingGroup
from holdfast.cli.secret_input import read_secret, show_on_terminal
from holdfast.cli.target import Target, run
from holdfast.clock import system_clock
from holdfast.errors import ApprovalKeyRequired, ConfigurationError, StoreLocked
from holdfast.undumpable import make_undumpable

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.protocol.http import KeyRole
    from holdfast.server import KeyRing

__all__ = ["app", "create", "list_keys", "revoke"]

app = typer.Typer(
    cls=RefusingGroup,
    help="Create, list and revoke API keys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_STOP_S = 120.0
_ROLES = ("user", "trusted", "admin")


@app.command("create")
def create(
    principal: Annotated[str, typer.Argument(help="Principal of the key, who owns the sessions.")],
    role: Annotated[str, typer.Option("--role", help="Role: user, trusted (may act for others) or admin.")] = "user",
    label: Annotated[str, typer.Option("--label", help="Label for people.")] = "",
    agents: Annotated[
        list[str] | None,
        typer.Option("--agent", help="Agent that the key may use (repeatable; default: the public agents)."),
    ] = None,
    approve: Annotated[
        bool,
        typer.Option(
            "--approve", help="Create an approval key: a person types it to approve calls; it gives no other access."
        ),
    ] = False,
    store: Store = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> Exit:
    """Create a key. It is shown once; the store keeps its hash. From the first key on, every request needs one."""
    target = Target(url=url, key=key, as_json=json)
    if approve:
        return _create_approval_key(target, store, principal=principal, label=label)

    async def in_store(ring: KeyRing) -> dict[str, Any]:
        record, secret = await ring.create(principal=principal, role=cast("KeyRole", role), label=label, agents=agents)
        return {"key": _plain(record), "secret": secret}

    async def on_server(client: Client) -> dict[str, Any]:
        body = {"principal": principal, "role": role, "label": label, "agents": agents}
        return _decoded((await client.request("POST", "/v1/keys", body=body)).content)

    async def work() -> None:
        if role not in _ROLES:
            raise ConfigurationError(f"unknown role {role!r}", hint=f"choose {', '.join(_ROLES)}")
        made = await _either(target, store, in_store, on_server)
        if target.as_json:
            say_json(made)
            return
        say(made["secret"])
        note(f"Key {made['key']['key_id']} of {principal} with role {role}. It is shown only once: save it.")
        note("From the first key on, every request requires one: export HOLDFAST_KEY=…")

    return run(work, as_json=target.as_json)


def _create_approval_key(target: Target, store: str | None, *, principal: str, label: str) -> Exit:
    """Create an approval key and show it only on the terminal, because an agent may read redirected output."""

    async def in_store(ring: KeyRing) -> dict[str, Any]:
        record, secret = await ring.create(principal=principal, role="approver", label=label)
        return {"key": _plain(record), "secret": secret}

    async def on_server(client: Client) -> dict[str, Any]:
        body = {"principal": principal, "role": "approver", "label": label}
        try:
            return _decoded((await client.request("POST", "/v1/keys", body=body)).content)
        except ApprovalKeyRequired:
            body["approval_key"] = read_secret("existing approval key, or the one shown by serve: ")
            return _decoded((await client.request("POST", "/v1/keys", body=body)).content)

    async def work() -> None:
        if not (sys.stdin.isatty() and show_on_terminal("")):
            raise ConfigurationError(
                "approval keys are shown only on a terminal", hint="run this command at a terminal"
            )
        make_undumpable()
        made = await _either(target, store, in_store, on_server)
        show_on_terminal(made["secret"])
        note(f"Approval key {made['key']['key_id']} of {principal}. It is shown only once.")
        note("Type it when prompted; do not store it in a file or environment variable on this machine.")

    return run(work, as_json=target.as_json)


@app.command("list")
def list_keys(store: Store = None, url: Url = None, key: Key = None, json: Json = False) -> Exit:
    """List keys, including revoked ones."""
    target = Target(url=url, key=key, as_json=json)

    async def in_store(ring: KeyRing) -> dict[str, Any]:
        return {"keys": [_plain(record) for record in await ring.records()]}

    async def on_server(client: Client) -> dict[str, Any]:
        return _decoded((await client.request("GET", "/v1/keys", repeatable=True)).content)

    async def work() -> None:
        _say_keys(await _either(target, store, in_store, on_server), as_json=target.as_json)

    return run(work, as_json=target.as_json)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="Key ID, k_…")],
    stop: Annotated[
        bool, typer.Option("--stop", help="Also stop the principal's sessions and pause its schedules.")
    ] = False,
    store: Store = None,
    url: Url = None,
    key: Key = None,
    json: Json = False,
) -> Exit:
    """Revoke a key at once and close its streams. Lists the work that continues."""
    target = Target(url=url, key=key, as_json=json)

    async def in_store(ring: KeyRing) -> dict[str, Any]:
        record = await ring.revoke(key_id, again=stop)
        return {"keys": [_plain(one) for one in await ring.records()], "principal": record.principal}

    async def on_server(client: Client) -> dict[str, Any]:
        path = f"/v1/keys/{quote(key_id, safe='')}"
        query = {"stop": "true"} if stop else None
        return _decoded((await client.request("DELETE", path, query=query, reply_s=_STOP_S)).content)

    async def work() -> Exit:
        found = await _either(target, store, in_store, on_server)
        _say_keys(found, as_json=target.as_json)
        if "running" not in found:
            note("no server is running; queued messages and schedules continue when one starts")
            if stop:
                note(f"start it, then: holdfast keys revoke {key_id} --stop")
            return Exit.FAILED if stop else Exit.OK
        if not target.as_json:
            _say_work(found, key_id)
        return Exit.OK

    return run(work, as_json=target.as_json)


async def _either(
    target: Target,
    store: str | None,
    in_store: Callable[[KeyRing], Awaitable[dict[str, Any]]],
    on_server: Callable[[Client], Awaitable[dict[str, Any]]],
) -> dict[str, Any]:
    """Call `in_store` if no server is named and the store is not in use; otherwise, call `on_server`."""
    from holdfast.settings import load_settings

    locked: StoreLocked | None = None
    chosen = load_settings({"store": store}).store
    if not target.url and chosen != "memory://":
        try:
            async with _ring(chosen) as ring:
                return await in_store(ring)
        except StoreLocked as error:
            locked = error  # a server has the store open, so send the request to that server
    async with target.client() as client:
        if locked is not None:
            await _check_store(client, target, chosen, locked)
        return await on_server(client)


async def _check_store(client: Client, target: Target, url: str, locked: StoreLocked) -> None:
    """Raise `StoreLocked` if the server reports a store that is not the store at `url`."""
    told = _decoded((await client.request("GET", "/v1/server", repeatable=True)).content)["store"]
    # Only admins see the path; other callers will be refused.
    if told not in ("sqlite", f"sqlite {_real_path(url)}"):
        raise StoreLocked(
            f"{locked.message}, and the server at {target.address} uses another store",
            hint="pass the URL of the server that uses this store with --url",
        )


def _real_path(url: str) -> str:
    return os.path.realpath(url.removeprefix("sqlite:///"))


@asynccontextmanager
async def _ring(url: str) -> AsyncIterator[KeyRing]:
    from holdfast.server import KeyRing
    from holdfast.storage import open_store

    store = open_store(url)
    await store.open(node_id=ids.node_id(), at=system_clock.now())
    try:
        ring = KeyRing(store)
        await ring.load()
        yield ring
    finally:
        await store.close()


def _plain(record: Any) -> dict[str, Any]:
    from holdfast.server.routes.keys import key_view

    return _decoded(msgspec.json.encode(key_view(record)))


def _decoded(content: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(content)
    return decoded


def _say_work(found: dict[str, Any], key_id: str) -> None:
    """Print the work that was stopped when a key was revoked, and the principal's work that continues."""
    note("its streams and requests were ended")
    for name, text in (("stopped", "stopped sessions"), ("paused", "paused schedules")):
        if found[name]:
            note(f"{text}: {', '.join(map(visible, found[name]))}")
    for name, text in (("running", "sessions that continue"), ("active", "schedules that continue")):
        if found[name]:
            note(f"{text}: {', '.join(map(visible, found[name]))}")
    if found["running"] or found["active"]:
        note(f"run 'holdfast keys revoke {key_id} --stop' to stop {visible(found['principal'])}'s work")


def _say_keys(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        say_json(found)
        return
    if not found["keys"]:
        note("no keys: anyone on this machine acts as principal 'local'; create one with 'holdfast keys create'")
    say_table(
        ("key", "principal", "role", "agents", "created", "state", "label"),
        (
            (
                key["key_id"],
                key["principal"],
                key["role"],
                "" if key.get("agents") is None else ", ".join(key["agents"]) or "none",
                age(key["created_at"]),
                "valid" if key["revoked_at"] is None else f"revoked {age(key['revoked_at'])}",
                key["label"],
            )
            for key in found["keys"]
        ),
    )
