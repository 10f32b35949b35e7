"""``holdfast chat`` on a terminal: Ctrl-C interrupts, twice stops, Ctrl-D exits, and a restart is survived."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.chat import TWICE_S
from holdfast.proof.storm.server import free_port
from tests.cli.processes import LIMIT_S, Served, served, shows, start, terminal

CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses a session of its own."""
    with served(tmp_path_factory.mktemp("chat"), HOLDFAST_GRACE_S="5") as running:
        yield running


def runs(server: Served, session: str) -> list[str]:
    """How the session's runs ended, the first one first, once none is left."""
    while True:
        lines = server.run("export", "-s", session, "--events", "--json").stdout.splitlines()
        events = [json.loads(line) for line in lines]
        ended = [event["status"] for event in events if event["kind"] == "run.finished"]
        if len(ended) == sum(event["kind"] == "run.started" for event in events):
            return ended


def test_a_conversation_and_its_end_by_ctrl_d(server: Served) -> None:
    with terminal("chat", "-s", "talk", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("session talk")
        screen.prompt()
        screen.type("count one two\n")
        screen.expect("2 words.")
        screen.prompt()
        screen.type("fail\n")
        screen.expect("failed: RuntimeError")
        screen.prompt()
        screen.type(CTRL_C)
        screen.expect("no active run; press Ctrl-D to exit")
        screen.type(CTRL_D)
        screen.expect("bye")
        assert screen.end() == 0
    with terminal("chat", "-s", "talk", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("> count one two")
        screen.expect("2 words.")
        screen.type(CTRL_D)
        assert screen.end() == 0


def test_ctrl_c_once_interrupts_the_run_and_what_waits_goes_on(server: Served) -> None:
    with terminal("chat", "-s", "once", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("stream 100000\n")
        screen.until(shows("word5"))
        screen.type("count a b c\n")
        screen.expect("queued")
        screen.type(CTRL_C)
        screen.expect("interrupting")
        screen.expect("interrupted: user, Ctrl-C")
        screen.expect("3 words.")
        screen.type(CTRL_D)
        assert screen.end() == 0
    assert runs(server, "once") == ["interrupted", "completed"]


def test_ctrl_c_twice_stops_the_session_and_withdraws_what_waits(server: Served) -> None:
    with terminal("chat", "-s", "twice", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("resist 3\n")  # it outlasts what is between the presses
        screen.expect("\n")
        screen.type("count a b c\n")
        screen.expect("queued")
        screen.type(CTRL_C)
        screen.expect("interrupting")
        screen.type(CTRL_C)
        screen.expect("stopping the session")
        screen.expect("gone after")
        screen.expect("withdrawn: count a b c")
        assert sum("gone after" in line for line in screen.display()) == 1, "both presses have the same receipt"
        screen.type(CTRL_D)
        assert screen.end() == 0
    states = [
        event["state"]
        for line in server.run("export", "-s", "twice", "--events", "--json").stdout.splitlines()
        if (event := json.loads(line))["kind"] == "message.settled"
    ]
    assert sorted(states) == ["interrupted", "withdrawn"]


def test_each_run_takes_a_first_ctrl_c_of_its_own(server: Served) -> None:
    pressed_at = -TWICE_S

    def interrupt_a_run() -> None:
        nonlocal pressed_at
        screen.type("stream 100000\n")
        screen.expect("word5")
        while time.monotonic() - pressed_at < 2 * TWICE_S:
            time.sleep(0.05)  # sooner, it would be a second press
        screen.type(CTRL_C)
        pressed_at = time.monotonic()
        said = screen.expect("gone after")  # the receipt and the run's end come on two connections, in any order
        if "interrupted: user, Ctrl-C" not in said:
            said += screen.expect("interrupted: user, Ctrl-C")
        assert "stopping" not in said
        screen.prompt()

    with terminal("chat", "-s", "each", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        interrupt_a_run()
        interrupt_a_run()
        screen.type("count a b\n")
        screen.expect("2 words.")
        screen.prompt()
        interrupt_a_run()
        screen.type(CTRL_C)
        screen.expect("no active run")
        interrupt_a_run()
        screen.type(CTRL_D)
        assert screen.end() == 0
    causes = [
        event["cause"]["reason"]
        for line in server.run("export", "-s", "each", "--events", "--json").stdout.splitlines()
        if (event := json.loads(line))["kind"] == "run.finished" and event["status"] == "interrupted"
    ]
    assert causes == ["Ctrl-C"] * 4


def test_ctrl_d_during_a_run_leaves_it_running_and_chat_comes_back_to_it(server: Served) -> None:
    with terminal("chat", "-s", "back", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("stream 100000\n")
        screen.until(shows("word5"))
        screen.type(CTRL_D)
        screen.type(CTRL_D)
        screen.expect("the run continues; 'holdfast chat -s back' returns to it")
        assert screen.end() == 0
    with terminal("chat", "-s", "back", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("a run is already active")
        screen.until(shows("word"))
        screen.type(CTRL_C)
        screen.expect("interrupted: user, Ctrl-C")
        screen.type(CTRL_D)
        assert screen.end() == 0


def test_a_chat_survives_kill_9_and_shows_how_the_run_goes_on(tmp_path: Path) -> None:
    port = str(free_port())
    server = start(tmp_path, "--port", port)
    with terminal("chat", "-s", "killed", folder=tmp_path, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("steps 12\n")  # some are left when the server dies
        screen.expect("Step 2 of 12")
        server.process.kill()
        server.process.communicate(timeout=LIMIT_S)
        screen.expect("reconnecting")
        with served(tmp_path, "--port", port) as again:
            assert len(again.ready["recovered"]["restarted"]) == 1
            screen.expect("reconnected")
            screen.expect("the run continues, attempt 2")
            screen.expect("Step 12 of 12")
            screen.prompt()
            screen.type("count a b\n")
            screen.expect("2 words.")
            screen.type(CTRL_D)
            assert screen.end() == 0
            assert runs(again, "killed") == ["completed", "completed"]
            assert again.end() == 0


def test_lines_from_a_pipe_are_sent_and_answered_before_it_ends(server: Served) -> None:
    found = server.run("chat", "-s", "pipe", stdin="count a\ncount a b\n\ncount a b c")
    assert found.returncode == 0
    assert found.stdout.splitlines() == ["1 word.", "2 words.", "3 words."]
    assert "count_words" in found.stderr, "notes do not mix with the answers"
    as_json = server.run("chat", "-s", "pipe-json", "--json", stdin="count a\n")
    kinds = [json.loads(line)["kind"] for line in as_json.stdout.splitlines()]
    assert kinds[0] == "message.accepted"
    assert "run.finished" in kinds


def test_without_a_server_it_says_so_at_once(tmp_path: Path) -> None:
    with terminal("chat", folder=tmp_path, HOLDFAST_URL="http://127.0.0.1:9") as screen:
        screen.expect("does not answer")
        screen.expect("holdfast serve")
        assert screen.end() == 3


def test_ctrl_d_leaves_also_while_the_server_is_away(tmp_path: Path) -> None:
    server = start(tmp_path)
    with terminal("chat", "-s", "away", folder=tmp_path, HOLDFAST_URL=server.url) as screen:
        screen.expect("session away")
        server.process.kill()
        server.process.communicate(timeout=LIMIT_S)
        screen.type("is anybody there\n")
        screen.type(CTRL_D)
        screen.expect("not sent: is anybody there")
        assert screen.end() == 0
