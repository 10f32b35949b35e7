"""``holdfast serve`` on a PostgreSQL database: two servers, a kill, and no password in anything that they say."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.cli.processes import run, served
from tests.storage.postgres.pools import leave_session

SECRET = "do-not-print-me"


@pytest.fixture
def store(postgres_url: str) -> str:
    """The address with a password, which the server of the tests does not ask for."""
    return postgres_url.replace("holdfast@", f"holdfast:{SECRET}@", 1)


def test_a_second_server_joins_the_first_and_takes_over_when_that_is_killed(store: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with served(folders[0], HOLDFAST_STORE=store) as first, served(folders[1], HOLDFAST_STORE=store) as second:
        asked = first.run("ask", "hello")
        assert asked.returncode == 0, asked
        sent = first.run("send", "--session", "s", "count 100000", "--json")
        looked = run("doctor", "--json", folder=folders[0], HOLDFAST_STORE=store, HOLDFAST_URL=first.url)
        (found,) = [check for check in json.loads(looked.stdout)["checks"] if check["name"] == "store"]
        assert found["state"] == "ok"
        assert "in use by" in found["found"]
        assert "bytes of the largest tables: " in found["found"]
        first.end(signal.SIGKILL)
        assert second.run("ask", "hello again").returncode == 0
        assert second.run("ps", "--json").returncode == 0
        second.end()
        said = f"{first.ready} {first.said} {looked.stdout} {second.ready} {second.said} {asked.stdout} {sent.stdout}"
    assert SECRET not in said


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"postgresql://u:{SECRET}@127.0.0.1:1/db"
    refused = run("serve", folder=tmp_path, HOLDFAST_STORE=url)
    assert refused.returncode == 7
    assert "postgresql://u@127.0.0.1:1/db" in refused.stderr
    looked = run("doctor", folder=tmp_path, HOLDFAST_STORE=url)
    assert "postgresql://u@127.0.0.1:1/db" in looked.stdout
    broken = run("serve", folder=tmp_path, HOLDFAST_STORE=f"postgresql://u:{SECRET}@x@h/db")
    assert broken.returncode == 2
    assert "percent-encode" in broken.stderr
    unknown = run("serve", folder=tmp_path, HOLDFAST_STORE=f"mysql://u:{SECRET}@h/db")
    assert unknown.returncode == 2
    for one in (refused, looked, broken, unknown):
        assert SECRET not in one.stdout + one.stderr


def test_doctor_names_the_pools_whose_sessions_wait_and_a_server_of_the_pool_runs_them(
    store: str, tmp_path: Path
) -> None:
    asyncio.run(leave_session(store, "rack-7", key="alice", queued=True))
    looked = run("doctor", "--json", folder=tmp_path, HOLDFAST_STORE=store)
    (found,) = [check for check in json.loads(looked.stdout)["checks"] if check["name"] == "store"]
    assert found["state"] == "advice"
    assert "no host has: 'rack-7' (1 session)" in found["found"]
    assert "workspace_pool" in found["advice"]
    with served(tmp_path, HOLDFAST_STORE=store, HOLDFAST_WORKSPACE_POOL="rack-7") as server:
        assert server.run("ask", "--session", "alice", "again").returncode == 0, "it runs after the message that waited"
        assert "hello" in server.run("export", "--session", "alice").stdout
    wrong = run("serve", folder=tmp_path, HOLDFAST_STORE=store, HOLDFAST_WORKSPACE_POOL="rack 7")
    assert wrong.returncode == 2
    assert "workspace_pool" in wrong.stderr
