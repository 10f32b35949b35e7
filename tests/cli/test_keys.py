"""The first key of a store: what it changes for requests and for the sessions that exist already."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast.server.routes.keys import key_created
from tests.cli.processes import run, served, terminal
from tests.server.live import Live
from tests.server.live import served as serving


@pytest.mark.parametrize("running", [False, True], ids=["in the store", "through the server"])
def test_the_first_key_tells_what_becomes_of_the_sessions_of_local(tmp_path: Path, running: bool) -> None:
    with served(tmp_path) as server:
        server.run("send", "count a", "--wait", "60")
        server.run("send", "count b", "-s", "other", "--wait", "60")
        if running:
            first = server.run("keys", "create", "ops", "--role", "admin")
    if not running:
        first = run("keys", "create", "ops", "--role", "admin", folder=tmp_path)
    secret = first.stdout.strip()
    assert secret.startswith("hf_")
    assert "From now on every request needs a key" in first.stderr
    assert "2 sessions of 'local' stay" in first.stderr
    with served(tmp_path) as server:
        shown = server.run("ps", "--user", "local", "--json", HOLDFAST_KEY=secret)
        assert {view["key"] for view in json.loads(shown.stdout)["sessions"]} == {"main", "other"}
        second = server.run("keys", "create", "bob", "--json", HOLDFAST_KEY=secret)
        made = json.loads(second.stdout)
        assert (made["first"], made["local_sessions"]) == (False, 0)
        later = server.run("keys", "create", "eve", HOLDFAST_KEY=secret)
    assert "every request needs a key" not in later.stderr
    assert "shown only once" in later.stderr


def test_a_first_key_of_an_empty_store_has_no_sessions_to_tell_of(tmp_path: Path) -> None:
    made = run("keys", "create", "ops", folder=tmp_path)
    assert "every request needs a key" in made.stderr
    assert "'local'" not in made.stderr


@contextmanager
def foreign(body: bytes) -> Iterator[str]:
    """A server of another kind, which answers every request with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"<html>", b'{"ok":true}'], ids=["HTML", "JSON"])
def test_a_foreign_server_is_told_in_two_lines(body: bytes, tmp_path: Path) -> None:
    with foreign(body) as url:
        for command in ("keys list", "keys create bob", "keys revoke k_1", "ps", "drain"):
            found = run(*command.split(), "--url", url, folder=tmp_path)
            assert (found.returncode, found.stdout) == (4, ""), found
            error, hint = found.stderr.splitlines()[-2:]
            assert error.startswith("holdfast: unexpected response from the server")
            assert "check that the URL is that of a Holdfast server" in hint
        checked = run("doctor", "--url", url, folder=tmp_path)
        assert "unexpected response from the server" in checked.stdout


def test_a_store_without_a_scheme_is_offered_with_it(tmp_path: Path) -> None:
    assert "sqlite:///bad.db" in run("keys", "list", "--store", "bad.db", folder=tmp_path).stderr


def test_a_table_fits_its_terminal_and_is_whole_in_a_pipe(tmp_path: Path) -> None:
    principal = "a-principal-with-a-name-as-long-as-a-line-of-text"
    assert run("keys", "create", principal, folder=tmp_path).returncode == 0
    assert principal in run("keys", "list", folder=tmp_path, COLUMNS="60").stdout
    with terminal("keys", "list", folder=tmp_path, COLUMNS="60") as screen:
        screen.until(lambda lines: len(lines) > 1)
        assert screen.end() == 0
    lines = screen.display()
    assert len(lines) == 2, lines
    assert "a-princ" in lines[1]
    assert "…" in lines[1]
    assert lines[1].split()[-1] == "valid"


@pytest.mark.parametrize(("live", "deleted", "count"), [(1, 3, 1), (2, 3, 2), (3, 0, 2), (0, 4, 0)])
def test_the_first_key_counts_the_sessions_that_are_not_deleted(
    live: int, deleted: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.routes.keys._LOCAL_SESSIONS", 2)

    async def scenario(server: Live) -> None:
        for number in range(live + deleted):
            await server.host.session(f"s{number}").ask("hi")
        for number in range(live, live + deleted):
            await server.host.session(f"s{number}").delete()
        record, secret = await server.app.keys.create(principal="alice", role="user")
        made = await key_created(server.host.context.store, record, secret, first=True)
        assert made.local_sessions == count

    serving(scenario)
