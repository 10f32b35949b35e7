"""The terminal of ``holdfast serve`` has one line for each run, and few lines for very many."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from holdfast.cli.run_lines import LINES_PER_S, RunLines, TerminalFormatter, run_text
from holdfast.host import RunReport
from holdfast.protocol.stopping import Cause
from holdfast.testing import run_virtual
from tests.cli.processes import HOLDFAST, LIMIT_S, Terminal, address_of, clean_environment, run, terminal


def report(status: str = "completed", **more: object) -> RunReport:
    fields: dict[str, object] = {
        "at": 0.0,
        "principal": "local",
        "session": "main",
        "run_id": "r_1",
        "agent": "demo",
        "status": status,
        "elapsed_s": 1.23,
        **more,
    }
    return RunReport(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (report(), "main  demo  completed in 1.2 s"),
        (report(principal="alice", session="work"), "alice/work  demo  completed in 1.2 s"),
        (
            report("failed", error="ValueError: no config", raised_at="hello.py, line 7"),
            "main  demo  FAILED in 1.2 s: ValueError: no config (hello.py, line 7)",
        ),
        (report("failed", error="UnknownAgent: x", elapsed_s=0.0), "main  demo  FAILED: UnknownAgent: x"),
        (
            report("interrupted", cause=Cause(kind="user", reason="changed\nmy mind")),
            "main  demo  interrupted in 1.2 s: user, changed my mind",
        ),
        (report("interrupted", cause=Cause(kind="shutdown")), "main  demo  interrupted in 1.2 s: shutdown"),
        (
            report("interrupted", cause=Cause(kind="user"), abandoned=("thread nap", "task agent")),
            "main  demo  interrupted in 1.2 s: user; could not end thread nap, task agent",
        ),
    ],
)
def test_a_run_is_one_line(given: RunReport, text: str) -> None:
    assert run_text(given) == text


def test_a_long_error_is_cut() -> None:
    assert len(run_text(report("failed", error="x" * 5000))) < 250


@pytest.fixture
def logged() -> Iterator[StringIO]:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TerminalFormatter(stream))
    logger = logging.getLogger("holdfast.runs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_very_many_runs_are_counted(logged: StringIO) -> None:
    async def scenario() -> None:
        lines = RunLines(asyncio.get_running_loop(), lambda text: None)
        for number in range(1200):
            lines.on_run(report("failed" if number % 400 == 0 else "completed"))
        await asyncio.sleep(1.5)
        lines.on_run(report(session="later"))
        lines.close()

    run_virtual(scenario())
    written = logged.getvalue().splitlines()
    assert len(written) == LINES_PER_S + 2
    assert written[LINES_PER_S].endswith("… and 1,180 more in the last second (2 failed)")
    assert "later  demo  completed" in written[-1]


def test_a_line_cannot_forge_another_and_hides_secrets(logged: StringIO) -> None:
    async def scenario() -> None:
        lines = RunLines(asyncio.get_running_loop(), lambda text: None)
        lines.on_run(report("failed", error="password=hunter2\n14:00:00  main  demo  completed\x1b[2J"))
        lines.close()

    run_virtual(scenario())
    (line,) = logged.getvalue().splitlines()
    assert "hunter2" not in line
    assert "\x1b" not in line


AGENTS = """import os, time

async def agent(run):
    raise ValueError("no config")

async def blocking(run):
    while not os.path.exists("told"): time.sleep(0.02)

async def quick(run):
    return "ok"

async def endless(run):
    import asyncio
    await asyncio.sleep(3600)
"""


def send(screen: Terminal, folder: Path, url: str, *arguments: str) -> None:
    done = run("send", "x", *arguments, folder=folder, HOLDFAST_URL=url)
    assert done.returncode in (0, 1), done


def test_the_terminal_of_a_server_tells_what_happens(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(AGENTS)
    names = ("hello.py", "hello:blocking", "hello:quick", "hello:endless")
    settings = {"HOLDFAST_LOOP_BLOCK_S": "0.2", "HOLDFAST_DRAIN_TIMEOUT_S": "0.3"}
    with terminal("serve", *names, "--port", "0", folder=tmp_path, **settings) as screen:
        url = address_of(screen)
        screen.expect("agents  agent (default), blocking, endless, quick")
        screen.expect("Press Ctrl-C to shut down")
        send(screen, tmp_path, url, "--wait", "60")
        screen.expect("agent 'agent' failed: ValueError: no config")
        screen.expect("main  agent  FAILED in ")
        screen.expect(" s: ValueError: no config (hello.py, line 4)")
        send(screen, tmp_path, url, "--wait", "60", "--agent", "quick", "-s", "other")
        screen.expect("other  quick  completed in ")
        argv = [*HOLDFAST, "send", "x", "--wait", "60", "--agent", "blocking", "-s", "slow"]
        sending = subprocess.Popen(argv, cwd=tmp_path, env=clean_environment(HOLDFAST_URL=url), stdout=subprocess.PIPE)
        screen.expect("did not respond for 0.2 s")
        screen.expect('hello.py, line 7, in blocking: while not os.path.exists("told"): time.sleep(0.02)')
        (tmp_path / "told").touch()
        screen.expect("the event loop responds again; it was blocked for at least ")
        sending.communicate(timeout=LIMIT_S)
        assert sending.returncode == 0
        send(screen, tmp_path, url, "--agent", "endless", "-s", "workshop")
        screen.type("\x03")
        screen.expect("Shutting down: waiting up to 0.3 s for 1 run (workshop). Press Ctrl-C again to quit now.")
        screen.expect("workshop  endless  interrupted in ")
        screen.expect(": shutdown")
        screen.expect("Stopped after ")
        screen.expect("1 run interrupted")
        assert screen.end() == 0


def test_a_drain_by_request_is_told_and_the_shutdown_says_that_nothing_ran(tmp_path: Path) -> None:
    with terminal("serve", "--port", "0", folder=tmp_path) as screen:
        url = address_of(screen)
        screen.expect("Press Ctrl-C to shut down")
        assert run("drain", folder=tmp_path, HOLDFAST_URL=url).returncode == 0
        screen.expect("Drained by request: no new work is accepted. Stop the server with Ctrl-C.")
        screen.type("\x03")
        screen.expect("Shutting down: nothing is running.")
        screen.expect("; nothing was running.")
        assert screen.end() == 0


def test_below_the_level_info_no_run_has_a_line(tmp_path: Path) -> None:
    with terminal("serve", "--port", "0", "--log-level", "warning", folder=tmp_path) as screen:
        url = address_of(screen)
        screen.expect("Press Ctrl-C to shut down")
        send(screen, tmp_path, url, "--wait", "60")
        screen.type("\x03")
        assert "completed in" not in screen.expect("Stopped after")
        assert screen.end() == 0


def test_a_sigterm_is_not_told_to_press_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(AGENTS)
    with terminal("serve", "hello:endless", "--port", "0", folder=tmp_path, HOLDFAST_DRAIN_TIMEOUT_S="0.1") as screen:
        url = address_of(screen)
        screen.expect("Press Ctrl-C to shut down")
        send(screen, tmp_path, url)
        os.kill(screen.pid, signal.SIGTERM)
        screen.expect("for 1 run (main). Send the signal again to quit now.")
        assert screen.end() == 0


# In a session of its own, the program is not hit by the terminal's Ctrl-C, so that only the shutdown can end it.
WATCHING = """import asyncio

async def agent(run):
    started = asyncio.get_running_loop().create_future()

    async def watch():
        program = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
        started.set_result(None)
        await program.wait()

    run.background(watch, name="watch prices")
    await started
    return "watching"
"""


def test_background_work_that_the_shutdown_ends_is_named(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(WATCHING)
    with terminal("serve", "hello", "--port", "0", folder=tmp_path, HOLDFAST_GRACE_S="0.5") as screen:
        url = address_of(screen)
        screen.expect("Press Ctrl-C to shut down")
        send(screen, tmp_path, url, "--wait", "60", "-s", "workshop")
        screen.type("\x03")
        screen.expect("Shutting down: ending background work of workshop.")
        screen.expect("Stopped after")
        screen.expect("  ended background work: process '")
        screen.expect("' of session workshop")
        assert screen.end() == 0


def test_a_server_that_refuses_to_start_is_not_called_drained(tmp_path: Path) -> None:
    refused = run("serve", "--host", "0.0.0.0", "--port", "0", folder=tmp_path)
    assert refused.returncode == 2
    assert "keys create" in refused.stderr
    assert "Drained" not in refused.stderr
