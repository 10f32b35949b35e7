"""``holdfast keys``: manage API keys directly in the store or, if a server has the store open, through that server."""

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
from holdfast.cli.command_group import RefusingGroup
from holdfast.cli.exit_codes import Exit
from holdfast.cli.options import Json, Key, Store, Url
from holdfast.cli.output import age, counted, note, say, say_json, say_table, visible
from holdfast.cli.secret_input import read_secret, show_on_terminal
from holdfast.cli.target import Target, run
from holdfast.clock import system_clock
from holdfast.errors import ApprovalKeyRequired, ConfigurationError, StoreLocked
from holdfast.undumpable import make_undumpable

if TYPE_CHECKING:
    import httpx2

    from holdfast.client import Client
    from holdfast.protocol.http import KeyRole, KeyView
    from holdfast.server import KeyRing
    from holdfast.storage.port import KeyRecord
    from holdfast.storage.port import Store as OpenStore

__all__ = ["app", "create", "list_keys", "revoke"]

app = typer.Typer(
    cls=RefusingGroup,
    help="Create, list and revoke API keys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

_STOP_S = 120.0
_COUNTED = 1000
"""Number of sessions of `local` at which the server stops counting."""
_ROLES = ("user", "trusted", "admin")


@app.command("create")
def create(
    principal: Annotated[str, typer.Argument(help="Principal that the key identifies.")],
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
    """Create a key. It is shown once; the store keeps its hash. Once a key exists, every request requires one."""
    target = Target(url=url, key=key, as_json=json)
    if approve:
        return _create_approval_key(target, store, principal=principal, label=label)

    async def in_store(ring: KeyRing, kept: OpenStore) -> dict[str, Any]:
        from holdfast.server.routes.keys import key_created

        first = not ring.ever
        record, secret = await ring.create(principal=principal, role=cast("KeyRole", role), label=label, agents=agents)
        return _plain(await key_created(kept, record, secret, first=first))

    async def on_server(client: Client) -> dict[str, Any]:
        from holdfast.protocol.http import KeyCreated

        body: dict[str, Any] = {"principal": principal, "role": role, "label": label, "agents": agents}
        return _read(await _create_on(client, body), KeyCreated)

    async def work() -> None:
        if role not in _ROLES:
            raise ConfigurationError(f"unknown role {role!r}", hint=f"choose {', '.join(_ROLES)}")
        made = await _either(target, store, in_store, on_server)
        if target.as_json:
            say_json(made)
            return
        say(made["secret"])
        note(f"Key {made['key']['key_id']} of {principal} with role {role}. It is shown only once: save it.")
        if made["first"]:
            _say_first(made["local_sessions"])

    return run(work, as_json=target.as_json)


def _say_first(local_sessions: int) -> None:
    """Print what the store's first key changes."""
    note("From now on every request needs a key: export HOLDFAST_KEY=…")
    if local_sessions:
        count = "1,000 or more sessions" if local_sessions >= _COUNTED else counted(local_sessions, "session")
        note(f"{count} of 'local' {'stays' if local_sessions == 1 else 'stay'}. With an admin key:")
        note("  holdfast ps --user local            lists them")
        note("  holdfast chat -s NAME --user local  opens one")


def _create_approval_key(target: Target, store: str | None, *, principal: str, label: str) -> Exit:
    """Create an approval key and show it only on the terminal, because an agent may read redirected output."""

    async def in_store(ring: KeyRing, _: OpenStore) -> dict[str, Any]:
        from holdfast.protocol.http import KeyCreated

        record, secret = await ring.create(principal=principal, role="approver", label=label)
        return _plain(KeyCreated(key=_view(record), secret=secret))

    async def on_server(client: Client) -> dict[str, Any]:
        from holdfast.protocol.http import KeyCreated

        body: dict[str, Any] = {"principal": principal, "role": "approver", "label": label}
        return _read(await _create_on(client, body), KeyCreated)

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


async def _create_on(client: Client, body: dict[str, Any]) -> httpx2.Response:
    """Create a key on the server; prompt for an approval key at the terminal if the server requires one."""
    try:
        return await client.request("POST", "/v1/keys", body=body)
    except ApprovalKeyRequired:
        if not sys.stdin.isatty():
            raise
        make_undumpable()  # before the key is in memory
        body["approval_key"] = read_secret("existing approval key, or the one shown by serve: ")
        return await client.request("POST", "/v1/keys", body=body)


@app.command("list")
def list_keys(store: Store = None, url: Url = None, key: Key = None, json: Json = False) -> Exit:
    """List keys, including revoked ones."""
    target = Target(url=url, key=key, as_json=json)

    async def in_store(ring: KeyRing, _: OpenStore) -> dict[str, Any]:
        return {"keys": [_plain(_view(record)) for record in await ring.records()]}

    async def on_server(client: Client) -> dict[str, Any]:
        from holdfast.protocol.http import KeyList

        return _plain(await client.read("/v1/keys", KeyList))

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

    async def in_store(ring: KeyRing, _: OpenStore) -> dict[str, Any]:
        record = await ring.revoke(key_id, again=stop)
        return {"keys": [_plain(_view(one)) for one in await ring.records()], "principal": record.principal}

    async def on_server(client: Client) -> dict[str, Any]:
        from holdfast.protocol.http import KeyRevoked

        path = f"/v1/keys/{quote(key_id, safe='')}"
        query = {"stop": "true"} if stop else None
        return _read(await client.request("DELETE", path, query=query, reply_s=_STOP_S), KeyRevoked)

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
    in_store: Callable[[KeyRing, OpenStore], Awaitable[dict[str, Any]]],
    on_server: Callable[[Client], Awaitable[dict[str, Any]]],
) -> dict[str, Any]:
    """Call `in_store` if no server is named and the store is not in use; otherwise, call `on_server`."""
    from holdfast.settings import load_settings

    locked: StoreLocked | None = None
    chosen = load_settings({"store": store}).store
    if not target.url and chosen != "memory://":
        try:
            async with _opened(chosen) as (ring, kept):
                return await in_store(ring, kept)
        except StoreLocked as error:
            locked = error  # a server has the store open, so send the request to that server
    async with target.client() as client:
        if locked is not None:
            await _check_store(client, target, chosen, locked)
        return await on_server(client)


class _StoreTold(msgspec.Struct):
    """The store that a server reports."""

    store: str


async def _check_store(client: Client, target: Target, url: str, locked: StoreLocked) -> None:
    """Raise `StoreLocked` if the server reports a store that is not the store at `url`."""
    told = (await client.read("/v1/server", _StoreTold)).store
    # Only admins see the path; other callers will be refused.
    if told not in _descriptions(url):
        raise StoreLocked(
            f"{locked.message}, and the server at {target.address} uses another store",
            hint="pass the URL of the server that uses this store with --url",
        )


def _descriptions(url: str) -> tuple[str, str]:
    """Return what a server that uses this store may report: the engine, and the engine with the path."""
    from holdfast.store_url import shown_store

    if url.startswith("sqlite:///"):
        return "sqlite", f"sqlite {os.path.realpath(url.removeprefix('sqlite:///'))}"
    return "postgresql", f"postgresql {shown_store(url)}"


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[tuple[KeyRing, OpenStore]]:
    from holdfast.server import KeyRing
    from holdfast.storage import open_store

    store = open_store(url)
    await store.open(node_id=ids.node_id(), at=system_clock.now())
    try:
        others = () if store.cluster is None else await store.cluster.other_nodes()
        if others:
            raise StoreLocked(
                f"{store.backend.path} is in use by {counted(len(others), 'host')}",
                hint="run this command against one of them with --url",
            )
        ring = KeyRing(store)
        await ring.load()
        yield ring, store
    finally:
        await store.close()


def _view(record: KeyRecord) -> KeyView:
    from holdfast.server.routes.keys import key_view

    return key_view(record)


def _read(response: httpx2.Response, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of a server's answer. Raises `HoldfastError` if the answer is not a `kind`."""
    from holdfast.client.wire import decode

    return _plain(decode(response, kind))


def _plain(value: msgspec.Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value)
    return fields


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
