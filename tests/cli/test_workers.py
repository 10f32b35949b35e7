"""``holdfast serve --workers``: several processes answer at one address, and none outlives the supervisor."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import supervisor
from holdfast.cli.supervisor import Supervisor, restart_pause_s
from holdfast.cli.worker_share import worker_settings
from holdfast.errors import ConfigurationError
from holdfast.settings import Settings
from tests.cli.processes import LIMIT_S, Served, run, served

AGENT = """
import holdfast, os
@holdfast.agent(replayable=True)
async def agent(run: holdfast.Run):
    if run.text == "long" and run.attempt == 1:
        await run.interrupt.wait()
    return f"{run.text} answered by {os.getpid()} in attempt {run.attempt}"
"""
CLIENTS = 8


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pid_that_answers(url: str) -> int:
    with urllib.request.urlopen(f"{url}/v1/server", timeout=LIMIT_S) as answer:
        return int(json.load(answer)["statistics"]["pid"])


def pids_that_answer(server: Served, count: int) -> set[int]:
    """The workers that answer, once `count` of them have."""
    seen: set[int] = set()

    def are_seen() -> bool:
        seen.add(pid_that_answers(server.url))
        return len(seen) >= count

    until(are_seen)
    return seen


@contextmanager
def draining(store: str, folder: Path) -> Iterator[Served]:
    """Two workers that wait for the end of a run which does not end."""
    (folder / "slow.py").write_text("import asyncio\nasync def agent(run):\n    await asyncio.sleep(3600)\n")
    environment = {"HOLDFAST_STORE": store, "HOLDFAST_DRAIN_TIMEOUT_S": "600"}
    with served(folder, "slow.py", "--workers", "2", **environment) as server:
        server.run("send", "x")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout is not None
        while "Shutting down" not in server.process.stdout.readline():
            assert server.process.poll() is None
        yield server


def test_any_worker_serves_any_session_and_a_killed_one_comes_back(postgres_url: str, tmp_path: Path) -> None:
    with served(tmp_path, "--workers", "2", HOLDFAST_STORE=postgres_url) as server:
        workers = server.ready["workers"]
        assert len(set(workers)) == 2
        assert server.ready["pid"] == server.process.pid not in workers
        assert pids_that_answer(server, 2) == set(workers)
        for _ in range(4):  # whichever of them answers
            assert server.run("ask", "hello", "--session", "s").returncode == 0
        os.kill(workers[0], signal.SIGKILL)
        until(lambda: pid_that_answers(server.url) not in workers)
        assert server.run("ask", "hello", "--session", "s").returncode == 0
        assert not is_gone(workers[1])
        assert server.end() == 0
        assert f"(pid {workers[0]}) was killed by SIGKILL; restarting it in 0.5 s" in server.said
        assert server.lines[-1] == {"event": "stopped"}
        until(lambda: is_gone(workers[1]))


def test_no_worker_outlives_a_killed_supervisor_and_the_address_is_free(postgres_url: str, tmp_path: Path) -> None:
    with served(tmp_path, "--workers", "2", HOLDFAST_STORE=postgres_url) as server:
        port = server.url.rpartition(":")[2]
        server.process.kill()
        server.process.communicate(timeout=LIMIT_S)
        until(lambda: all(map(is_gone, server.ready["workers"])))
    with served(tmp_path, "--port", port, HOLDFAST_STORE=postgres_url) as again:
        assert again.run("ask", "hello").returncode == 0
        again.end()


def called(url: str, body: object = None) -> dict[str, Any]:
    """The answer to a request. Raises `OSError` if it is refused, or answered with an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        said: dict[str, Any] = json.load(answer)
        return said


class Clients:
    """Clients that ask one question after the other, each in a session of its own, until `over` is set."""

    def __init__(self, url: str) -> None:
        self.over = threading.Event()
        self.refused: list[str] = []
        self.pids: list[set[str]] = [set() for _ in range(CLIENTS)]
        """The workers that have answered each of them."""
        self.threads = [threading.Thread(target=self._ask, args=(url, number)) for number in range(CLIENTS)]

    def _ask(self, url: str, number: int) -> None:
        while not self.over.is_set():
            try:
                said = called(f"{url}/v1/sessions/s{number}/messages?wait=20", {"content": "short"})
            except OSError as error:
                self.refused.append(repr(error))
                continue
            if said.get("status") == "completed":
                self.pids[number].add(said["text"].split()[3])
            else:
                self.refused.append(f"not completed: {said}")

    def are_served_by_others(self, than: Sequence[int]) -> bool:
        """Whether each of them was answered by these workers before, and by another one since."""
        before = set(map(str, than))
        return all(pids & before and pids - before for pids in self.pids)


def test_a_replacement_of_all_workers_refuses_no_request_and_ends_no_run(postgres_url: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    with served(tmp_path, "agent.py", "--workers", "2", HOLDFAST_STORE=postgres_url) as server:
        before = server.ready["workers"]
        long = f"{server.url}/v1/sessions/long"
        message_id = called(f"{long}/messages", {"content": "long"})["message_id"]
        clients = Clients(server.url)
        for thread in clients.threads:
            thread.start()
        try:
            until(lambda: all(clients.pids))
            server.process.send_signal(signal.SIGUSR2)
            until(lambda: all(map(is_gone, before)) and clients.are_served_by_others(before))
        finally:
            clients.over.set()
            for thread in clients.threads:
                thread.join(LIMIT_S)
        assert clients.refused == []
        assert not pids_that_answer(server, 2) & set(before)
        settled = called(f"{long}/messages/{message_id}?wait=20")
        assert settled["state"] == "completed"
        assert settled["text"].endswith(" in attempt 2")
        assert server.end() == 0


def test_a_second_signal_ends_all_at_once(postgres_url: str, tmp_path: Path) -> None:
    with draining(postgres_url, tmp_path) as server:
        assert server.end() == 5
        until(lambda: all(map(is_gone, server.ready["workers"])))


def test_a_supervisor_that_is_killed_during_a_drain_leaves_nothing_behind(postgres_url: str, tmp_path: Path) -> None:
    with draining(postgres_url, tmp_path) as server:
        server.process.kill()
        server.process.communicate(timeout=LIMIT_S)
        until(lambda: all(map(is_gone, server.ready["workers"])))


@pytest.mark.parametrize("store", ["sqlite:///x.db", "memory://"])
def test_workers_without_a_shared_store_are_refused(store: str, tmp_path: Path) -> None:
    refused = run("serve", "--workers", "2", "--store", store, folder=tmp_path)
    assert refused.returncode == 2
    assert "--workers 2 requires a PostgreSQL store" in refused.stderr
    assert "postgresql://" in refused.stderr


def test_workers_that_cannot_start_end_with_the_reason(postgres_url: str, tmp_path: Path) -> None:
    failed = run("serve", "nothing.py", "--workers", "2", "--port", "0", folder=tmp_path, HOLDFAST_STORE=postgres_url)
    assert failed.returncode == 2
    assert "nothing.py" in failed.stderr


def test_a_password_is_in_no_argument_of_a_worker(postgres_url: str, tmp_path: Path) -> None:
    store = postgres_url.replace("holdfast@", "holdfast:do-not-print-me@", 1)
    with served(tmp_path, "--workers", "2", "--store", store) as server:
        for pid in (server.process.pid, *server.ready["workers"]):
            assert b"do-not-print-me" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        server.end()
        assert "do-not-print-me" not in f"{server.ready} {server.said}"


def test_limits_of_the_host_are_divided_and_pauses_grow() -> None:
    whole = Settings(max_runs=10, principal_threads=2, principal_program_memory_bytes=1000)
    share = worker_settings(whole, workers=4)
    assert (share.max_runs, share.principal_threads, share.principal_program_memory_bytes) == (2, 1, 250)
    assert share.memory_limit_bytes == whole.memory_limit_bytes // 4
    assert share.principal_rate_per_s == whole.principal_rate_per_s / 4
    assert worker_settings(Settings(), workers=2).principal_program_memory_bytes > 0
    with pytest.raises(ConfigurationError, match="max_runs=10 is too low for 11 workers"):
        worker_settings(whole, workers=11)
    assert [restart_pause_s(failures) for failures in (0, 1, 2, 3, 9)] == [0.0, 0.5, 1.0, 2.0, 30.0]


def test_a_worker_that_cannot_be_started_ends_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first starts fail, as they do when the user has too many processes. The supervisor starts it again."""
    starts: list[int] = []
    program = tmp_path / "worker"
    program.write_text("import sys\nsys.stdin.read()\nraise SystemExit(7)\n")
    started = subprocess.Popen

    def refuses_twice(command: object, **options: Any) -> Any:
        starts.append(len(starts))
        if len(starts) <= 2:
            raise BlockingIOError("Resource temporarily unavailable")
        return started([sys.executable, str(program)], **options)

    monkeypatch.setattr(subprocess, "Popen", refuses_twice)
    monkeypatch.setattr(supervisor, "restart_pause_s", lambda _: 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = Supervisor(listener, (), os.environ, workers=1, on_ready=lambda _: None).run()
    assert (code, len(starts)) == (7, 3)
