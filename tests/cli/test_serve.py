"""``holdfast serve`` says what a person needs, ends in order, and takes up what a crash left."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.agent_spec import find_agent
from holdfast.cli.send import say_outcome
from holdfast.errors import ConfigurationError
from holdfast.protocol.messages import Settlement
from holdfast.protocol.stopping import Cause
from tests.cli.processes import HOLDFAST, LIMIT_S, clean_environment, run, served, start, terminal


def test_it_prints_its_address_pid_and_lines_that_work_when_pasted(tmp_path: Path) -> None:
    environment = clean_environment(HOLDFAST_DRAIN_TIMEOUT_S="0.2")
    with subprocess.Popen(
        [*HOLDFAST, "serve", "--port", "0"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            printed = ""
            while "to see active runs" not in printed:
                line = process.stdout.readline()
                assert line, printed
                printed += line
            assert f"(pid {process.pid})" in printed
            assert "holdfast chat --url http://127.0.0.1:" in printed
            assert "sqlite:///.holdfast/holdfast.db" in printed
            curl = printed[printed.index("curl -s") :].split("\n\n")[0]
            answer = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=LIMIT_S, check=True)
            assert json.loads(answer.stdout)["status"] == "completed"
            program = (
                printed[printed.index("import asyncio") : printed.index("asyncio.run(main())")] + "asyncio.run(main())"
            )
            said = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True
            )
            assert said.stdout == "1 word. Send help to see what else I can do.\n"
            assert [line for line in printed.splitlines() if line.endswith(":")][:3] == [
                "Try it from another terminal:",
                "With curl:",
                "From Python:",
            ]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_in_order(number: signal.Signals, tmp_path: Path) -> None:
    with served(tmp_path) as server:
        assert server.run("send", "steps 1000").returncode == 0
        assert server.end(number) == 0
        assert [line["event"] for line in server.lines] == ["stopping", "stopped"]
        report = server.lines[-1]["report"]
        assert len(report["suspended"]) == 1, "the demo is replayable: its run goes on at the next start"
        assert report["orphans"] == []


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with served(tmp_path, HOLDFAST_DRAIN_TIMEOUT_S="600") as server:
        server.run("send", "steps 1000")
        server.process.send_signal(signal.SIGINT)
        assert server.process.stdout is not None
        assert (
            "Shutting down: waiting up to 600 s for 1 run (main). Press Ctrl-C again"
            in server.process.stdout.readline()
        )
        assert server.end(signal.SIGINT) == 5
        assert "Quitting now" in server.lines[-1]["text"]


def test_after_kill_9_it_says_what_was_recovered_and_nothing_is_lost(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for text in ("steps 8", "count these words", "count more"):
            assert server.run("send", text, "-s", "alice").returncode == 0
        server.process.kill()
        server.process.communicate(timeout=LIMIT_S)
    with served(tmp_path) as server:
        recovered = server.ready["recovered"]
        assert len(recovered["restarted"]) == 1
        assert recovered["restarted_in"] == ["alice"]
        assert recovered["waiting_in"] == ["alice"][: recovered.get("waiting", 0)]
        assert recovered.get("waiting", 0) >= 0
        last = json.loads(server.run("send", "count the last", "-s", "alice", "--wait", "60", "--json").stdout)
        assert last["state"] == "completed"
        entries = [json.loads(line) for line in server.run("export", "-s", "alice", "--json").stdout.splitlines()]
        asked = [entry["content"] for entry in entries if entry["role"] == "user"]
        assert asked == ["steps 8", "count these words", "count more", "count the last"]
        lines = server.run("export", "-s", "alice", "--events", "--json").stdout.splitlines()
        events = [json.loads(line) for line in lines]
        restarted = [event for event in events if event["kind"] == "run.restarted"]
        assert [event["run_id"] for event in restarted] == recovered["restarted"]
        settled = [event["state"] for event in events if event["kind"] == "message.settled"]
        assert settled == ["completed"] * 4
        assert server.end() == 0


def test_after_a_crash_it_names_the_session_and_the_command_that_runs_its_message_again(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\nasync def agent(run):\n    yield 'begun'\n    await asyncio.sleep(3600)\n"
    )
    with served(tmp_path, "slow.py") as server:
        receipt = json.loads(server.run("send", "x", "-s", "shop", "--json").stdout)
        server.process.kill()
        server.process.communicate(timeout=LIMIT_S)
    with terminal("serve", "slow.py", "--port", "0", folder=tmp_path) as screen:
        screen.expect("recovered: 1 run interrupted: shop")
        screen.expect("to run the messages again: ")
        screen.expect("retry -s shop")
        screen.type("\x03")
        assert screen.end() == 0
    with served(tmp_path, "slow.py") as server:
        events = [json.loads(line) for line in server.run("logs", "-s", "shop", "--json").stdout.splitlines()]
        (ended,) = [event for event in events if event["kind"] == "run.finished"]
        assert ended["run_id"] == receipt["run_id"]
        assert ended["cause"]["reason"].endswith(
            "not declared replayable: @agent(replayable=True) or Agent(…, replayable=True)"
        )


@pytest.mark.parametrize(("kind", "hint"), [("crash", "  run it again: holdfast retry -s 'a b'\n"), ("interrupt", "")])
def test_an_outcome_after_a_crash_names_the_command_that_runs_the_message_again(
    capsys: pytest.CaptureFixture[str], kind: Any, hint: str
) -> None:
    cause = Cause(kind=kind, reason="why", origin="n", at=0.0)
    settlement = Settlement(message_id="m_1", state="interrupted", cause=cause)
    assert say_outcome(settlement, "a b", as_json=False) == 5
    assert capsys.readouterr().err == f"holdfast: interrupted ({kind}: why)\n{hint}"


def test_a_locked_store_names_the_commands_of_the_host_that_has_it_and_the_other_store(tmp_path: Path) -> None:
    with served(tmp_path):
        refused = run("serve", "--port", "0", folder=tmp_path)
    assert refused.returncode == 7
    assert "talk to the host that has it open: holdfast chat, holdfast ask" in refused.stderr
    assert "open another store: --store sqlite:///other.db" in refused.stderr


def test_a_busy_port_names_its_holder_and_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = run("serve", "--port", str(port), folder=tmp_path)
        assert refused.returncode == 2
        assert "address already in use" in refused.stderr
        assert f"pid {os.getpid()}" in refused.stderr
        assert "HOLDFAST_PORT=8421 or --port 8421" in refused.stderr
        assert not (tmp_path / ".holdfast").exists(), "the store was not touched"


def test_an_address_of_another_machine_is_not_taken_for_a_busy_port(tmp_path: Path) -> None:
    refused = run("serve", "--port", "0", "--host", "192.0.2.1", folder=tmp_path)
    assert refused.returncode == 2
    assert "--host 127.0.0.1 or HOLDFAST_HOST" in refused.stderr
    assert "HOLDFAST_PORT" not in refused.stderr, "no other port helps"


def test_a_second_host_on_the_same_file_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        refused = run("serve", "--port", "0", folder=tmp_path)
        assert refused.returncode == 7
        assert f"process {server.process.pid}" in refused.stderr
        assert server.run("send", "count a b", "--wait", "60").stdout == "2 words.\n"
        assert server.end() == 0


def test_an_open_address_is_refused_without_a_key(tmp_path: Path) -> None:
    refused = run("serve", "--port", "0", "--host", "0.0.0.0", folder=tmp_path)
    assert refused.returncode == 2
    assert "keys create" in refused.stderr
    assert run("keys", "create", "ops", "--role", "admin", folder=tmp_path).returncode == 0
    with served(tmp_path, "--host", "0.0.0.0") as server:
        assert server.ready["keys_required"] is True
        assert server.run("ps").returncode == 4
        assert server.end() == 0


def test_agents_that_cannot_be_loaded_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_.py").write_text("x = 1\nasync def good(run): return 'hi'\nasync def two(a, b): ...\n")
    (tmp_path / "broken_.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "worse_.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for spec, part in (
        ("nowhere_:agent", "no module named 'nowhere_'"),
        ("mine_:missing", "agents there: good"),
        ("mine_:x", "not an agent"),
        ("mine_:two", "one argument"),
        ("broken_:agent", "nothing_of_that_name"),
        ("worse_:agent", "ZeroDivisionError"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            find_agent(spec)
        assert part in str(caught.value)
    assert find_agent("mine_:good").name == "good"
    refused = run("serve", "mine_:missing", "--port", "0", folder=tmp_path)
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    with served(tmp_path, "mine_.py", "holdfast.agents.demo:agent") as server:
        assert (server.ready["agents"], server.ready["default_agent"]) == (["demo", "good"], "good")
        assert server.run("send", "x", "--wait", "60").stdout == "hi\n"
        assert server.run("send", "count a", "--agent", "demo", "--wait", "60").stdout == "1 word.\n"
        assert server.end() == 0


def test_settings_that_cannot_be_are_named(tmp_path: Path) -> None:
    for arguments, part in (
        (["--log-level", "loud"], "log_level"),
        (["--store", "mysql://x"], "mysql://x"),
        (["--store", "sqlite:///no/such/folder/x.db"], "no such folder"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
    ):
        refused = run("serve", "--port", "0", *arguments, folder=tmp_path)
        assert refused.returncode == 2, (arguments, refused)
        assert part in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_store_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, whatever its name says" * 100)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE t (x)")
    for name in ("text.db", "other.db"):
        refused = run("serve", "--port", "0", "--store", f"sqlite:///{name}", folder=tmp_path)
        assert refused.returncode == 7, refused
        assert "Traceback" not in refused.stderr


def test_its_output_may_go_away_without_disturbing_the_end(tmp_path: Path) -> None:
    server = start(tmp_path)
    assert server.process.stdout is not None
    server.process.stdout.close()
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + LIMIT_S
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.process.poll() == 0
    assert server.process.stderr is not None
    assert "Traceback" not in server.process.stderr.read()
    server.process.stderr.close()


def test_a_library_that_waits_at_exit_does_not_keep_the_process(tmp_path: Path) -> None:
    (tmp_path / "clinging.py").write_text(
        "import atexit, threading\nasync def agent(run):\n    return 'hello'\natexit.register(threading.Event().wait)\n"
    )
    with served(tmp_path, "clinging:agent") as server:
        assert server.run("send", "hi").returncode == 0
        assert server.end() == 0
        assert server.lines[-1]["event"] == "stopped"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"mine.py": "x = 1\n\nagent = nothing_there\n"}, "mine.py, line 3: NameError: name 'nothing_there'"),
        ({"mine.py": "x = 1\ndef broken(:\n"}, "mine.py, line 2: SyntaxError"),
        ({"mine.py": "import other\n", "other.py": "\n\n1 / 0\n"}, "other.py, line 3: ZeroDivisionError"),
        ({"mine.py": "\nimport not_installed_anywhere\n"}, "mine.py, line 2: ModuleNotFoundError"),
        ({"mine.py": "import json\njson.loads('{')\n"}, "mine.py, line 2: JSONDecodeError"),
        ({"mine.py": "import sys\nsys.exit('not today')\n"}, "mine.py, line 2: SystemExit: not today"),
    ],
)
def test_an_import_that_fails_is_told_with_file_and_line(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused = run("serve", "mine:agent", folder=tmp_path)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert refused.stderr.count("Traceback (most recent call last)") <= 1


LEAKY = """
async def agent(run):
    raise ValueError("password=hunter2 \\x1b[2J\\n2026-01-01T00:00:00Z ERROR forged")
"""


@pytest.mark.parametrize("level", ["info", "error"])
def test_what_fails_stands_in_the_terminal_once_and_without_secrets(tmp_path: Path, level: str) -> None:
    (tmp_path / "mine.py").write_text(LEAKY)
    with served(tmp_path, "mine:agent", HOLDFAST_LOG_LEVEL=level) as server:
        asked = server.run("send", "x", "--wait", "60", "-s", "inbox")
        assert asked.returncode == 1, asked
        assert server.end() == 0
        said = server.said
    assert said.count("Traceback (most recent call last)") == 1
    assert "session 'inbox', run 'r_" in said
    assert "principal 'local'" in said
    assert "hunter2" not in said + asked.stderr + asked.stdout
    assert "\x1b" not in said
    assert not any(line.startswith("2026-01-01") for line in said.splitlines())
