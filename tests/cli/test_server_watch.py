"""A command says when its server stops to respond, and a tail ends with its reader."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import Exit
from holdfast.proof.storm.server import free_port
from tests.cli.processes import HOLDFAST, LIMIT_S, Served, clean_environment, served, shows, terminal

AGENT = """
import asyncio
from holdfast import Run

async def wait_for_someone():
    await asyncio.Event().wait()

async def agent(run: Run):
    if run.text == "wait":
        await run.call(wait_for_someone)
    if run.text == "ask":
        return "You like " + (await run.ask_user("Which colour?")).text
    await run.emit("first **line**\\nsec")
    await run.emit("ond")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses sessions of its own."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "speaker.py").write_text(AGENT)
    with served(folder, "speaker:agent", "holdfast.agents.demo:agent", HOLDFAST_GRACE_S="0.3") as running:
        yield running
        assert running.end() == 0


def begin(server: Served, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HOLDFAST, *arguments],
        cwd=server.folder,
        env=clean_environment(HOLDFAST_URL=server.url),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("command", ["tree", "ps", "interrupt", "stop"])
def test_a_server_that_does_not_respond_is_told_and_waited_for(server: Served, command: str) -> None:
    server.run("send", "hi", "-s", "main", "--wait", "60")
    server.process.send_signal(signal.SIGSTOP)
    try:
        waiting = begin(server, command)
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == f"the server at {server.url} does not respond; still waiting\n"
        assert "its event loop may be blocked" in waiting.stderr.readline()
        assert waiting.poll() is None
    finally:
        server.process.send_signal(signal.SIGCONT)
    out, err = waiting.communicate(timeout=LIMIT_S)
    assert (waiting.returncode, bool(out)) == (Exit.OK, True), err


def test_ctrl_c_in_a_chat_whose_server_does_not_respond_says_why_nothing_happens(server: Served) -> None:
    with terminal("chat", "-s", "chat", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.prompt()
        screen.type("hello\r")
        screen.until(shows("second"))  # the server has the message, or else the chat would wait for that
        server.process.send_signal(signal.SIGSTOP)
        try:
            screen.type("/status\r")
            screen.expect("does not respond; still waiting")
        finally:
            server.process.send_signal(signal.SIGCONT)
        screen.type("/stop\r/quit\r")
        assert screen.end() == 0


def test_a_tail_ends_quietly_as_soon_as_its_reader_is_gone(server: Served) -> None:
    server.run("send", "hi", "-s", "idle", "--wait", "60")
    last = next(one["seq"] for one in json.loads(server.run("ps", "--json").stdout)["sessions"] if one["key"] == "idle")
    reader, writer = os.pipe()
    tailing = begin(server, "tail", "-s", "idle", stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        kinds = [next(lines).split()[2] for _ in range(last)]
    assert kinds[-1] == "message.settled", "all was read; nothing more will be written"
    _, err = tailing.communicate(timeout=LIMIT_S)
    assert (tailing.returncode, err) == (Exit.OK, "")


def test_a_tail_on_a_terminal_shows_the_conversation(server: Served) -> None:
    server.run("send", "hi", "-s", "talk", "--wait", "60")
    server.run("send", "count a b", "-s", "talk", "--agent", "demo", "--wait", "60")
    server.run("send", "fail", "-s", "talk", "--agent", "demo", "--wait", "60")
    server.run("send", "ask", "-s", "talk", "--agent", "agent")
    with terminal("tail", "-s", "talk", "-n", "100", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("[message: hi]")
        screen.expect("line\r\nsecond\r\n[completed")
        screen.expect("✓ count_words")
        screen.expect("2 words.")
        screen.expect("✗ failed: RuntimeError: it was asked to fail")
        screen.expect("[asks: Which colour?]")
        screen.expect('[holdfast answer "…" -s talk]')
        assert server.run("answer", "blue", "-s", "talk").returncode == 0
        screen.expect("You like blue")
        screen.expect("[completed")
        screen.type("\x03")
        assert screen.end() == Exit.INTERRUPTED
    assert b"message_id" not in screen.raw
    piped = server.run("tail", "-s", "talk", "--no-follow").stdout
    assert "message.settled" in piped, "a pipe gets a line for each event, as before"


def test_a_tail_on_a_terminal_shows_the_call_that_runs(server: Served) -> None:
    server.run("send", "wait", "-s", "calls")
    with terminal("tail", "-s", "calls", folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect("[running: wait_for_someone]")
        assert server.run("interrupt", "-s", "calls").returncode == 0
        screen.expect("wait_for_someone  interrupted")
        screen.type("\x03")
        assert screen.end() == Exit.INTERRUPTED


def test_a_tail_says_that_the_connection_is_lost_and_that_it_is_back(tmp_path: Path) -> None:
    port = str(free_port())
    with served(tmp_path, "--port", port) as server:
        server.run("send", "hi", "-s", "cut", "--wait", "60")
        tailing = begin(server, "tail", "-s", "cut")
        assert tailing.stdout is not None
        while "message.settled" not in tailing.stdout.readline():
            pass
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        assert tailing.stderr is not None
        while "reconnecting" not in (said := tailing.stderr.readline()):
            assert said
        with served(tmp_path, "--port", port) as again:
            while (said := tailing.stderr.readline()) != "holdfast: reconnected\n":
                assert said
            tailing.send_signal(signal.SIGINT)
            tailing.communicate(timeout=LIMIT_S)
            assert again.end() == 0


def test_a_tail_on_a_terminal_prints_events_as_json_if_asked_to(server: Served) -> None:
    server.run("send", "hi", "-s", "json", "--wait", "60")
    arguments = ("tail", "-s", "json", "--json", "--no-follow")
    with terminal(*arguments, folder=server.folder, HOLDFAST_URL=server.url) as screen:
        screen.expect('"kind":"message.settled"')
        assert screen.end() == 0
