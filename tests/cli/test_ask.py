"""``holdfast ask``: the answer as it is written, and nothing else, on stdout."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import typer

import holdfast.cli.send as sending
from holdfast.cli.exit_codes import Exit
from holdfast.runtime.processes import procfs
from tests.cli.processes import HOLDFAST, LIMIT_S, Served, clean_environment, served, terminal

AGENT = """
from holdfast import Run

async def agent(run: Run):
    if run.text == "returned":
        return "not in pieces"
    if run.text == "question":
        return "You like " + (await run.ask_user("Which colour?")).text
    await run.emit("a b")
    await run.interrupt.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses sessions of its own."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "asker.py").write_text(AGENT)
    with served(folder, "asker:agent", "holdfast.agents.demo:agent", HOLDFAST_GRACE_S="0.3") as running:
        yield running
        assert running.end() == 0


def address(server: Served) -> dict[str, str]:
    return {"HOLDFAST_URL": server.url}


def start(server: Served, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HOLDFAST, "ask", *arguments],
        cwd=server.folder,
        env=clean_environment(HOLDFAST_URL=server.url),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_timeout_counts_while_the_server_does_not_take_the_message(server: Served) -> None:
    server.process.send_signal(signal.SIGSTOP)
    try:
        asking = start(server, "returned", "-s", "late", "--timeout", "0.5")
        _, err = asking.communicate(timeout=LIMIT_S)  # the server is asleep: only the command can have ended it
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert asking.returncode == Exit.WAITED
    assert "the server did not confirm the message within 0.5 s" in err


def test_only_the_answer_is_on_stdout(server: Served) -> None:
    found = server.run("ask", "returned", "-s", "plain")
    assert (found.returncode, found.stdout, found.stderr) == (0, "not in pieces\n", "")
    piped = server.run("ask", "-s", "plain", stdin="returned")
    assert (piped.returncode, piped.stdout) == (0, "not in pieces\n")


def test_an_answer_is_printed_while_it_is_written_and_ctrl_c_interrupts_its_run(server: Served) -> None:
    asking = start(server, "endless", "-s", "interrupted")
    assert asking.stdout is not None
    assert asking.stdout.read(3) == "a b", "before the run has ended"
    asking.send_signal(signal.SIGINT)
    out, err = asking.communicate(timeout=LIMIT_S)
    assert (asking.returncode, out) == (Exit.INTERRUPTED, "\n")
    assert err.startswith("gone after ")
    assert err.endswith("\n  run it again: holdfast retry -s interrupted\n")
    run = server.run("export", "-s", "interrupted", "--events", "--json").stdout.splitlines()
    finished = next(event for event in map(json.loads, run) if event["kind"] == "run.finished")
    assert (finished["cause"]["kind"], finished["cause"]["reason"]) == ("user", "Ctrl-C")


def test_ctrl_c_withdraws_a_message_that_no_run_has_taken(server: Served) -> None:
    server.run("send", "endless", "-s", "queued")
    asking = start(server, "later", "-s", "queued")
    assert asking.stderr is not None
    assert asking.stderr.readline() == "waiting: another run of this session is active\n"
    asking.send_signal(signal.SIGINT)
    out, err = asking.communicate(timeout=LIMIT_S)
    assert (asking.returncode, out, err) == (Exit.INTERRUPTED, "", "withdrawn: no run had taken the message\n")
    assert json.loads(server.run("ps", "--json").stdout)["sessions"][0]["waiting"] == 0
    server.run("stop", "-s", "queued")


def test_a_question_names_the_command_that_answers_it(server: Served) -> None:
    asking = start(server, "question", "-s", "my colours")
    assert asking.stderr is not None
    assert asking.stderr.readline() == "the agent asks: Which colour?\n"
    hint = asking.stderr.readline()
    assert hint == "  answer it in another terminal: holdfast answer \"…\" -s 'my colours'\n"
    assert server.run("answer", "blue", "-s", "my colours").returncode == 0
    assert asking.communicate(timeout=LIMIT_S)[0] == "You like blue\n"
    assert asking.returncode == 0


@pytest.mark.parametrize(
    ("message", "more", "code", "told"),
    [
        ("fail", ("--agent", "demo"), Exit.FAILED, "holdfast: failed (RuntimeError: it was asked to fail)\n"),
        ("endless", ("--timeout", "0.3"), Exit.WAITED, "  it continues; to follow it: holdfast tail -s outcomes6\n"),
        ("x", ("--agent", "nobody"), Exit.REFUSED, "  choose one: --agent NAME (available: agent, demo)\n"),
        ("x", ("--timeout", "soon"), Exit.USAGE, "'soon' is not a number of seconds"),
        ("x", ("--attach", "missing.txt"), Exit.USAGE, "missing.txt is not readable"),
    ],
)
def test_exit_codes_are_those_of_send(
    server: Served, message: str, more: tuple[str, ...], code: Exit, told: str
) -> None:
    found = server.run("ask", message, "-s", f"outcomes{code}", *more)
    server.run("stop", "-s", f"outcomes{code}")
    assert (found.returncode, told in found.stderr) == (code, True), found


def test_json_is_the_outcome_alone(server: Served) -> None:
    done = server.run("ask", "returned", "-s", "json", "--json")
    settled = json.loads(done.stdout)
    assert (done.returncode, settled["state"], settled["text"]) == (0, "completed", "not in pieces")
    failed = server.run("ask", "fail", "-s", "json", "--agent", "demo", "--json")
    assert (failed.returncode, json.loads(failed.stdout)["state"], failed.stderr) == (1, "failed", "")


@pytest.mark.parametrize("command", ["ask", "send"])
def test_bytes_that_are_no_text_are_refused_with_the_way_to_send_them(server: Served, command: str) -> None:
    for arguments, stdin in (([command], b"\xff\xfe\x00"), ([command, b"caf\xe9"], b"")):
        found = subprocess.run(
            [*HOLDFAST, *arguments],
            input=stdin,
            env=clean_environment(HOLDFAST_URL=server.url),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (found.returncode, found.stdout) == (Exit.USAGE, b"")
        assert found.stderr == b"holdfast: the message is not UTF-8 text\n  attach it: --attach FILE\n"


def test_no_message_at_all_is_a_usage_error(server: Served) -> None:
    found = server.run("ask")
    assert (found.returncode, found.stdout) == (Exit.USAGE, "")
    assert "no message on stdin" in found.stderr
    for blank in ("", "  "):
        assert "the message is empty" in server.run("send", blank).stderr


def test_ctrl_c_while_a_message_is_typed_sends_nothing_and_says_so(server: Served) -> None:
    with terminal("ask", "-s", "typed", folder=server.folder, **address(server)) as screen:
        screen.expect("press Ctrl-D on an empty line")
        screen.type("abc\x03")
        screen.expect("^C\r\nnothing was sent\r\n")
        assert screen.end() == Exit.INTERRUPTED
    assert "typed" not in server.run("ps").stdout


def test_ctrl_c_before_the_message_is_confirmed_says_that_it_may_run(server: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with terminal("ask", "go", "-s", "it", folder=server.folder, HOLDFAST_URL=url) as screen:
            with silent.accept()[0] as request:
                request.recv(1)  # the message is on its way
                screen.type("\x03")
                screen.expect("the server has not confirmed the message; if it arrived, it runs: holdfast tail -s it")
                assert screen.end() == Exit.INTERRUPTED


def test_ctrl_c_right_after_the_prompt_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)
        if "Ctrl-D" in text:
            raise KeyboardInterrupt  # the terminal sends it before the read of stdin begins

    monkeypatch.setattr(sending, "note", note)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    with pytest.raises(typer.Exit) as ended:
        sending.content_of(None)
    assert (ended.value.exit_code, said[-1]) == (Exit.INTERRUPTED, "nothing was sent")


def test_ctrl_c_that_comes_just_before_the_read_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that another thread receives interrupts no system call of this one, as one that came just before."""
    master, terminal_end = pty.openpty()
    reader = threading.get_native_id()
    asked = threading.Event()

    def press() -> None:
        asked.wait(LIMIT_S)
        while (stat := procfs.read_stat(reader)) is None or stat.state != "S":
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        if not ended.wait(5):
            lost.set()
            os.write(master, b"\x04")  # or the read would never end

    lost = threading.Event()
    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)
        asked.set()

    ended = threading.Event()
    presser = threading.Thread(target=press)
    presser.start()
    with open(terminal_end) as stdin:
        monkeypatch.setattr(sending, "note", note)
        monkeypatch.setattr("sys.stdin", stdin)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with pytest.raises(typer.Exit) as exited:
                sending.content_of(None)
        finally:
            ended.set()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            presser.join()
            os.close(master)
    assert not lost.is_set()
    assert (exited.value.exit_code, said[-1]) == (Exit.INTERRUPTED, "nothing was sent")


def test_ctrl_c_ends_the_wait_of_send_and_leaves_the_run(server: Served) -> None:
    with terminal("send", "endless", "-s", "left", "--wait", "60", folder=server.folder, **address(server)) as screen:
        screen.expect("… ")  # 2 s, or more if the command was late to look
        screen.type("\x03")
        screen.expect(
            "stopped waiting; the run continues: holdfast tail -s left  (stop it: holdfast interrupt -s left)"
        )
        assert screen.end() == Exit.INTERRUPTED
    assert "running" in server.run("ps").stdout
    server.run("stop", "-s", "left")


def test_the_receipt_of_send_names_the_command_that_follows_it(server: Served) -> None:
    sent = server.run("send", "returned", "-s", "it's mine")
    assert sent.stdout.splitlines()[-1] == """  follow  holdfast tail -s 'it'"'"'s mine'"""
