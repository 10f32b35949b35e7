"""Where agents do what a model says, nobody gets in without the local token, and only its owner can read it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast import Agent
from holdfast.cli import listener_owner
from holdfast.cli.listener_owner import owners_of_listener
from holdfast.cli.target import Target
from holdfast.client import Client
from holdfast.errors import ConfigurationError
from holdfast.local_token import keep_token, read_token, remove_token, token_path
from tests.server.live import GUARD_S, Live, echo, live
from tests.server.test_bad_input import refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Executing(Agent):
    """Stands for an agent whose tools do what a model says."""

    executes: bool = True


HAND = Executing(name="hand", work=echo)


def run_live(scenario: Callable[[Live], Awaitable[None]], store: str, *agents: Agent | Callable[..., Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(GUARD_S), live(*(agents or (HAND,)), store=store) as server:
            await scenario(server)

    asyncio.run(main())


def test_a_token_is_new_at_each_start_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    token, path = keep_token(store)
    assert path == token_path(store) == tmp_path / "a.db-token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(store) == token
    fresh, again = keep_token(store)
    assert (again, read_token(store)) == (path, fresh) and fresh != token
    assert [file.name for file in tmp_path.iterdir()] == ["a.db-token"]
    remove_token(store)
    assert read_token(store) is None


@pytest.mark.parametrize("spoiled", ["readable by others", "a link", "no token", "a pipe"])
def test_a_token_that_others_could_know_is_not_used(spoiled: str, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    token, path = keep_token(store)
    if spoiled == "readable by others":
        path.chmod(0o640)
    elif spoiled == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif spoiled == "no token":
        path.write_text("hft_x\n")
    else:
        path.unlink()
        os.mkfifo(path, 0o600)
    assert read_token(store) is None
    fresh, _ = keep_token(store)
    assert fresh != token
    assert read_token(store) == fresh


def test_a_store_without_a_file_has_a_token_for_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_path("memory://") is None
    assert read_token("memory://") is None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (first, path), (second, _) = keep_token("memory://"), keep_token("memory://")
    assert first != second
    assert (path.read_text().strip(), path.stat().st_mode & 0o777) == (first, 0o600)


def test_the_token_of_a_store_without_a_file_ends_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def scenario(server: Live) -> None:
        [file] = tmp_path.glob("*-token")
        right = {"authorization": f"Bearer {file.read_text().strip()}"}
        assert (await server.post_as("alice", right)).status_code == 202
        refused(await server.post("alice"), 401, "unauthenticated")

    run_live(scenario, "memory://")
    assert list(tmp_path.glob("*-token")) == []


def test_a_folder_that_cannot_be_written_is_a_mistake_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="failed to write the local token"):
        keep_token(f"sqlite:///{tmp_path}/none/a.db")


def test_even_on_loopback_nothing_but_health_answers_without_the_token(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"

    async def scenario(server: Live) -> None:
        token = read_token(store)
        assert token is not None
        for headers in ({}, {"authorization": "Bearer hft_" + "0" * 32}, {"authorization": "Basic OmhmdF8w"}):
            refused(await server.http.get("/v1/sessions", headers=headers), 401, "unauthenticated")
            refused(await server.post_as("alice", headers), 401, "unauthenticated")
            refused(await server.http.get("/metrics", headers=headers), 401, "unauthenticated")
        assert (await server.http.get("/healthz")).status_code == 200
        right = {"authorization": f"Bearer {token}"}
        assert (await server.post_as("alice", right)).status_code == 202

    run_live(scenario, store)


def test_the_page_takes_the_token_as_a_password_and_its_lines_send_one(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"

    async def scenario(server: Live) -> None:
        token = read_token(store)
        page = await server.http.get("/", auth=("anybody", str(token)))
        assert page.status_code == 200
        lines = page.text[page.text.index("curl -s") :]
        assert "Bearer $HOLDFAST_KEY" in lines and "os.environ[" in lines and str(token) not in page.text

    run_live(scenario, store)


def test_commands_on_this_machine_find_the_token_and_send_it_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    monkeypatch.setenv("HOLDFAST_STORE", store)

    async def scenario(server: Live) -> None:
        async with Target(url=server.url).client() as client:
            assert "alice" not in [view.key for view in await client.sessions()]
            assert await client.session("alice").ask("hello") == "echo hello"
        elsewhere = Target(url="http://holdfast.example:8420").client()
        assert "authorization" not in elsewhere.http.headers
        await elsewhere.http.aclose()

    run_live(scenario, store)


def test_the_first_key_takes_the_tokens_place(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"

    async def scenario(server: Live) -> None:
        token = {"authorization": f"Bearer {read_token(store)}"}
        body = {"principal": "ops", "role": "admin"}
        unproved = await server.http.post("/v1/keys", json=body, headers=token)
        refused(unproved, 403, "approval_key_required")  # the new key approves without one; the token must not
        body["approval_key"] = server.app.keys.show_approver()
        made = await server.http.post("/v1/keys", json=body, headers=token)
        assert made.status_code in (200, 201), made.text
        refused(await server.http.get("/v1/sessions", headers=token), 401, "unauthenticated")
        key = {"authorization": f"Bearer {made.json()['secret']}"}
        assert (await server.http.get("/v1/sessions", headers=key)).status_code == 200

    run_live(scenario, store)

    async def again(server: Live) -> None:
        assert read_token(store) is None

    run_live(again, store)


def test_agents_that_do_only_what_their_code_says_need_no_token(tmp_path: Path) -> None:
    async def scenario(server: Live) -> None:
        assert read_token(f"sqlite:///{tmp_path}/a.db") is None
        assert (await server.post("alice")).status_code == 202

    run_live(scenario, f"sqlite:///{tmp_path}/a.db", echo)


def test_the_token_is_gone_with_its_server(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    seen = []

    async def scenario(server: Live) -> None:
        seen.append(read_token(store))

    run_live(scenario, store)
    assert read_token(store) is None
    run_live(scenario, store)
    assert None not in seen and seen[0] != seen[1]


FOREIGN = """
import os, socket, sys
os.setuid(65533)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
print(connection.recv(10000), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root can listen as another user")
def test_the_token_is_not_sent_to_a_program_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"sqlite:///{tmp_path}/a.db"
    keep_token(store)
    monkeypatch.setenv("HOLDFAST_STORE", store)
    with subprocess.Popen([sys.executable, "-c", FOREIGN], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
            for address in (url, url.replace("127.0.0.1", "localhost")):
                with pytest.raises(ConfigurationError, match=r"another user \(uid 65533\)"):
                    Target(url=address).client()
            asyncio.run(aclosed(Target(url=url, key="hf_given").client()))
        finally:
            process.kill()


async def aclosed(client: Client) -> None:
    async with client:
        pass


def test_the_socket_that_takes_a_connection_is_the_one_that_is_judged() -> None:
    here, there = ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("127.0.0.2")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        assert owners_of_listener(there, port) == {os.geteuid()}
        assert owners_of_listener(here, port) == set()
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        assert owners_of_listener(here, port) == owners_of_listener(ipaddress.ip_address("::1"), port) == {os.geteuid()}


def test_a_socket_on_the_very_address_is_judged_before_those_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's on loopback takes the connection, whoever listens on all addresses beside it."""
    here = ipaddress.ip_address("127.0.0.1")
    bound = [(ipaddress.ip_address("0.0.0.0"), os.geteuid()), (here, 65533)]
    monkeypatch.setattr(listener_owner, "_listeners", lambda port: iter(bound))
    assert owners_of_listener(here, 1) == {65533}
    assert owners_of_listener(ipaddress.ip_address("127.0.0.2"), 1) == {os.geteuid()}
