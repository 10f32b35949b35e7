"""``holdfast serve --model`` gives a useful assistant, for those who may have it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.exit_codes import Exit
from holdfast.cli.serve import AssistantFlags, run_server
from tests.cli.processes import HOLDFAST, LIMIT_S, approval_key, clean_environment, run, served, terminal
from tests.tools.test_assistant import programs_in

REPORT = "make a report about the files here"
CTRL_C, CTRL_D = "\x03", "\x04"


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def made(folder: Path, name: str) -> bool:
    """Whether a file is somewhere below a folder; folders may come and go meanwhile."""
    return any(name in files for _, _, files in os.walk(folder))


@contextmanager
def model_server(*arguments: str) -> Iterator[dict[str, str]]:
    """``python -m holdfast.testing.model_server`` until the end of the block; the variables that it prints."""
    argv = [sys.executable, "-m", "holdfast.testing.model_server", "--port", "0", *arguments]
    with subprocess.Popen(argv, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = ""
            while "Ctrl-C" not in printed:
                line = process.stdout.readline()
                assert line, printed
                printed += line
            lines = [line.removeprefix("export ") for line in printed.splitlines() if line.startswith("export ")]
            yield dict(line.split("=", 1) for line in lines)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 0


def test_it_works_in_its_folder_for_commands_that_find_the_token(tmp_path: Path) -> None:
    work = tmp_path / "work"
    with served(tmp_path, "--model", "scripted:demo", "--workspace", "work") as server:
        assert server.ready["agents"] == ["assistant"]
        assert server.ready["token_file"] == str(tmp_path / ".holdfast" / "holdfast.db-token")
        (work / "note.txt").write_text("hello")
        said = server.run("send", REPORT, "--wait", "60")
        assert said.returncode == 0, said
        assert "note.txt" in (work / "report.md").read_text()
        assert server.run("ps").returncode == 0
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        refused = run("ps", folder=elsewhere, HOLDFAST_URL=server.url)
        assert refused.returncode != 0
        assert "token" in refused.stderr
        token = (tmp_path / ".holdfast" / "holdfast.db-token").read_text().strip()
        assert run("ps", folder=elsewhere, HOLDFAST_URL=server.url, HOLDFAST_KEY=token).returncode == 0
        assert server.end() == 0


def test_the_demo_model_reports_on_a_sample_in_the_folder_of_the_session(tmp_path: Path) -> None:
    with served(tmp_path, "--model", "scripted:demo") as server:
        said = server.run("send", REPORT, "--wait", "60")
        assert said.returncode == 0, said
        for part in ("README.md", "sales.csv", ".csv: 1 file, ", "# Corner shop"):
            assert part in said.stdout
        assert server.end() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".holdfast"]


def test_what_it_prints_has_a_line_that_finds_the_token_and_not_the_token(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    argv = [*HOLDFAST, "serve", "--model", "scripted:demo", "--port", "0"]
    environment = clean_environment(HOLDFAST_DRAIN_TIMEOUT_S="0.2")
    with subprocess.Popen(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        printed = ""
        while "to see active runs" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        assert "the token as the password" in printed
        token = (folder / ".holdfast" / "holdfast.db-token").read_text().strip()
        export = next(line for line in printed.splitlines() if "export HOLDFAST_KEY" in line)
        shell = f"{export}\necho $HOLDFAST_KEY"
        found = subprocess.run(["sh", "-c", shell], cwd=folder, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == token
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(LIMIT_S) == 0
        assert token not in printed + rest


def test_it_serves_a_model_that_is_reached_over_a_real_protocol(tmp_path: Path) -> None:
    with (
        model_server() as variables,
        served(tmp_path, "--model", "openai:demo", "--workspace", "work", **variables) as server,
    ):
        said = server.run("send", REPORT, "--wait", "60")
        assert said.returncode == 0, said
        assert (tmp_path / "work/report.md").exists()
        assert server.end() == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"model": "openai:gpt-5"}, "OPENAI_API_KEY"),
        ({"model": "nobody:gpt"}, "is not a provider"),
        ({"model": "gpt-5"}, "write provider:model"),
        ({"approve": "some"}, "choose all, dangerous or none"),
        ({"mcp": ["files"]}, "NAME=COMMAND"),
        ({"workspace": "/proc/no"}, "workspace"),
    ],
)
def test_what_cannot_be_served_is_named_with_what_to_do(
    flags: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.cli.serve.configure_logging", lambda level: None)
    chosen = AssistantFlags(
        **{"model": "scripted:demo", "workspace": ".", "approve": "none", "mcp": [], "browser": False, **flags}
    )
    assert run_server([], {"port": 0}, as_json=True, chosen=chosen) == Exit.USAGE
    assert told in str(json.loads(capsys.readouterr().err)["error"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--workspace", "x"], ["--approve", "all"], ["--mcp", "a=b"], ["--browser"]])
def test_flags_of_the_assistant_without_a_model_are_a_mistake(flags: list[str]) -> None:
    ended = CliRunner().invoke(app, ["serve", *flags])
    assert ended.exit_code == Exit.USAGE
    assert "--model" in ended.stderr


@pytest.mark.parametrize("model", ["scripted:demo", "openai:demo"])
def test_a_chat_does_a_task_and_stopping_it_leaves_no_program(model: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        variables = stack.enter_context(model_server()) if model.startswith("openai") else {}
        server = stack.enter_context(served(tmp_path, "--model", model, "--workspace", "work", **variables))
        work = tmp_path / "work"
        (work / "README.md").write_text("# A project of mine\n")
        screen = stack.enter_context(terminal("chat", folder=tmp_path, HOLDFAST_URL=server.url))
        screen.prompt()
        screen.type(f"{REPORT}\n")
        for part in ("terminal", "python", "delegate", "README.md", "# A project of mine"):
            screen.expect(part)
        screen.expect("report.md")
        screen.prompt()
        screen.type("run (sleep 30 &) ; trap '' TERM ; sleep 30\n")
        until(lambda: len(programs_in(work)) >= 2)
        screen.type(CTRL_C)
        screen.expect("interrupted")
        screen.prompt()
        assert programs_in(work) == []
        screen.type("run rm -rf README.md report.md\n")  # inside the wall, so nobody is asked
        screen.expect("tokens]")
        screen.prompt()
        assert sorted(file.name for file in work.iterdir() if not file.name.startswith(".")) == ["README.md"]
        assert (work / "README.md").read_text() == "# A project of mine\n"
        screen.type(CTRL_D)
        screen.expect("bye")
        assert screen.end() == 0
        assert server.end() == 0


def test_a_call_is_approved_at_the_terminal_of_serve_and_by_the_key_that_it_shows(tmp_path: Path) -> None:
    arguments = ("serve", "--model", "scripted:demo", "--approve", "all", "--port", "0")
    with terminal(*arguments, folder=tmp_path, HOLDFAST_DRAIN_TIMEOUT_S="0.2") as serve:
        url = "http" + serve.expect(" (pid").rpartition("http")[2].removesuffix(" (pid")
        serve.expect("approval key for chat and the page")
        key = "hfa_" + serve.expect("\r\n").partition("hfa_")[2].strip()
        here = {"HOLDFAST_URL": url}
        run("send", "run echo one > one.txt", "-s", "a", folder=tmp_path, **here)
        serve.expect("session a of local asks: terminal")
        serve.expect("type: approve ")
        short = serve.expect(" ").strip()
        serve.type("approve 00000000\n")
        serve.expect("no open calls match 00000000")
        serve.type(f"approve {short}\n")
        serve.expect(f"approved: {short}")
        until(lambda: made(tmp_path, "one.txt"))
        with terminal("chat", "-s", "b", folder=tmp_path, HOLDFAST_URL=url) as chat:
            chat.prompt()
            chat.type("run echo two > two.txt\n")
            chat.prompt("y/n>")
            chat.type("y\n")
            chat.prompt("approval key (hidden)>")
            chat.type(f"{key}\n")
            chat.expect("[approved]")
            until(lambda: made(tmp_path, "two.txt"))
            chat.expect("tokens]")
            chat.type(CTRL_D)
            assert chat.end() == 0
        serve.type(CTRL_C)
        assert serve.end() == 0


def test_serve_without_a_terminal_and_without_an_approval_key_says_that_nobody_can_approve(tmp_path: Path) -> None:
    with served(tmp_path, "--model", "scripted:demo") as server:
        assert server.end() == 0
    assert "no way to approve calls" in server.said
    assert "holdfast keys create PRINCIPAL --approve" in server.said
    approval_key(tmp_path)
    with served(tmp_path, "--model", "scripted:demo") as server:
        assert server.end() == 0
    assert "no way to approve" not in server.said
