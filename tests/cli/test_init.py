"""``holdfast init`` writes an agent that works, and ``holdfast run`` runs an agent without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import HOLDFAST, LIMIT_S, clean_environment, run, served, terminal


def in_process(*arguments: str, folder: Path, stdin: str | bytes = "") -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own, because it imports the user's modules and configures the log."""
    return subprocess.run(
        [*HOLDFAST, *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_what_init_writes_passes_its_test_runs_and_serves(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["elsewhere"]\nunheard_of = 1\n')
    made = run("init", "my-agent", folder=tmp_path)
    assert made.returncode == 0, made
    assert (
        "created my-agent/agent.py, my-agent/test_agent.py, my-agent/pytest.ini, my-agent/holdfast.toml" in made.stdout
    )
    here, there = made.stdout.split("  In another terminal:\n")
    assert all(part.count("  cd my-agent\n") == 1 for part in (here, there)), "each terminal begins in the parent"
    assert "serve" in here
    assert "ask" in there
    effects = ("stays open", "sends a message", "runs the test")
    assert len({line.index(effect) for line in made.stdout.splitlines() for effect in effects if effect in line}) == 1
    folder = tmp_path / "my-agent"
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert in_process("run", "agent.py", "one two", folder=folder).stdout == b"Your message has 2 words.\n"
    with served(folder) as server:
        assert server.ready["agents"] == ["agent"]
        assert server.run("send", "one two three", "--wait", "60").stdout == "Your message has 3 words.\n"
        assert server.run("send", "and again", "--wait", "60").stdout == "Your message has 2 words.\n"
        assert server.end() == 0


def test_init_leaves_a_folder_with_files_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused = run("init", folder=tmp_path)
    assert refused.returncode == 2
    assert "folder '.' is not empty" in refused.stderr
    assert "holdfast init my-agent" in refused.stderr
    assert os.listdir(tmp_path) == ["notes.txt"]
    (tmp_path / "my-agent").mkdir()
    (tmp_path / "my-agent" / "notes.txt").write_text("mine")
    assert "holdfast init my-agent-2\n" in run("init", "my-agent", folder=tmp_path).stderr
    assert "cannot write to 'notes.txt'" in run("init", "notes.txt", folder=tmp_path).stderr


def test_init_takes_a_folder_that_has_only_a_repository(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    made = json.loads(run("init", "--json", folder=tmp_path).stdout)
    assert made["files"] == ["agent.py", "test_agent.py", "pytest.ini", "holdfast.toml", ".gitignore"]
    assert run("init", folder=tmp_path).returncode == 2, "a second time it would write over them"


AGENTS = """import asyncio

async def echo(run):
    return run.text

async def broken(run):
    raise ValueError("no config")

async def asks(run):
    return await run.ask_user("which one?")

async def counts(run):
    return {"words": 2}

async def endless(run):
    yield "begun\\n"
    await asyncio.sleep(3600)

async def many(run):
    for number in range(100_000):
        yield f"{number}\\n"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(AGENTS)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "out", "error"),
    [
        (("mine:echo", "hello"), "", 0, "hello\n", ""),
        (("mine:echo",), "from a pipe\n", 0, "from a pipe\n", ""),
        (("mine:echo", "-"), "x", 0, "x\n", ""),
        (("mine:echo",), "", 2, "", "no message on stdin"),
        (("mine:echo",), b"\xff\xfe", 2, "", "not UTF-8 text"),
        (("mine:broken", "x"), "", 1, "", "holdfast: ValueError: no config"),
        (("mine:counts", "x"), "", 1, "", "NotText: agent 'counts' (mine.py, line 12) returned or yielded dict"),
        (("mine:asks", "x"), "", 4, "", "the agent asks a person: which one?"),
        (("mine.py", "x"), "", 2, "", "choose one: mine:echo, mine:broken"),
        (("mien.py", "x"), "", 2, "", "did you mean mine.py?"),
    ],
)
def test_run_answers_as_a_server_would(
    folder: Path, arguments: tuple[str, ...], stdin: str | bytes, code: int, out: str, error: str
) -> None:
    done = in_process("run", *arguments, folder=folder, stdin=stdin)
    assert (done.returncode, done.stdout.decode()) == (code, out), done.stderr.decode()
    assert error in done.stderr.decode()
    assert done.stderr.count(b"Traceback") == (1 if "broken" in arguments[0] else 0)
    assert done.stderr.count(b"returned or yielded") <= 1
    assert not (folder / ".holdfast").exists()


def test_run_prints_the_settlement_as_json(folder: Path) -> None:
    done = in_process("run", "mine:broken", "x", "--json", folder=folder)
    assert done.returncode == 1
    assert json.loads(done.stdout)["state"] == "failed"


def test_run_at_a_terminal_without_a_message_names_the_way_to_talk(folder: Path) -> None:
    with terminal("run", "mine:echo", folder=folder) as screen:
        screen.expect("no message")
        screen.expect("holdfast serve mine:echo, then holdfast chat")
        assert screen.end() == 2


def test_ctrl_c_ends_a_run_at_once_with_a_receipt(folder: Path) -> None:
    with terminal("run", "mine:endless", "x", folder=folder) as screen:
        screen.expect("begun")
        screen.type("\x03")
        screen.expect("gone after")
        screen.expect("ms: 1 task")
        assert screen.end() == 5


def test_a_reader_that_leaves_ends_the_run(folder: Path) -> None:
    line = f"{HOLDFAST[0]} run mine:many x | head -2"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0\n1\n", "")


def test_run_offers_no_attachment_for_bytes_that_are_not_text(folder: Path) -> None:
    done = in_process("run", "mine:echo", folder=folder, stdin=b"\xff")
    assert (done.returncode, b"--attach" in done.stderr) == (2, False)
    assert b"write UTF-8 text to stdin" in done.stderr
