"""``serve --reload`` starts the server again when a file changes, and ``serve --open`` opens its page."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from holdfast.cli.reload import changed_files, watched_files
from holdfast.proof.storm.server import free_port
from tests.cli.processes import HOLDFAST, LIMIT_S, Terminal, clean_environment, run, terminal

AGENT = "async def agent(run):\n    return {!r}\n"


def pid_of(screen: Terminal) -> int:
    found = re.search(r"\(pid (\d+)\)", screen.expect(")\r\n"))
    assert found is not None
    return int(found[1])


def change(file: Path, text: str) -> None:
    """Change a watched file at once: one that is written in place is empty for a moment, and that is a change too."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


def answer(folder: Path, port: int) -> str:
    return run("send", "x", "--wait", "60", folder=folder, HOLDFAST_URL=f"http://127.0.0.1:{port}").stdout


def test_changed_code_is_served_and_a_broken_file_is_waited_for(tmp_path: Path) -> None:
    file, port = tmp_path / "hello.py", free_port()
    file.write_text(AGENT.format("first"))
    with terminal("serve", "hello.py", "--reload", "--port", str(port), folder=tmp_path) as screen:
        screen.expect("watching 1 file for changes")
        first = pid_of(screen)
        screen.expect("Press Ctrl-C to shut down")
        assert answer(tmp_path, port) == "first\n"
        change(file, AGENT.format("the second"))
        restarted = screen.expect(")\r\n")
        line = rf"reloaded in \d+\.\d s: hello\.py changed; agent answers on http://127\.0\.0\.1:{port} \(pid (\d+)\)"
        found = re.fullmatch(line, restarted.strip().splitlines()[-1])
        assert found is not None, restarted
        assert int(found[1]) != first
        assert "Shutting down" not in restarted, "a stop that nothing waits for is no news"
        assert answer(tmp_path, port) == "the second\n"
        change(file, "1 / 0\n")
        screen.expect("hello.py, line 1: ZeroDivisionError")
        screen.expect("the server ended with exit code 2; waiting for a change")
        change(file, AGENT.format("mended again"))
        screen.expect("reloaded in ")
        screen.expect(")\r\n")
        assert answer(tmp_path, port) == "mended again\n"
        screen.type("\x03")
        screen.expect("Shutting down: nothing is running.")
        screen.expect("; nothing was running.")
        assert screen.end() == 0


def test_a_restart_says_whose_run_it_waits_for(tmp_path: Path) -> None:
    file, port = tmp_path / "slow.py", free_port()
    file.write_text("import asyncio\nasync def agent(run):\n    await asyncio.sleep(3600)\n")
    with terminal("serve", "slow.py", "--reload", "--port", str(port), folder=tmp_path) as screen:
        screen.expect("Press Ctrl-C to shut down")
        run("send", "x", folder=tmp_path, HOLDFAST_URL=f"http://127.0.0.1:{port}")
        change(file, AGENT.format("quick"))
        screen.expect("Shutting down: waiting up to 1 s for 1 run (main)")
        screen.expect("1 run interrupted")
        screen.expect("slow.py changed; agent answers on")
        screen.type("\x03")
        assert screen.end() == 0


def test_a_syntax_error_is_told_once_and_the_whole_banner_comes_with_the_first_start(tmp_path: Path) -> None:
    file = tmp_path / "hello.py"
    file.write_text("async def agent(run:\n    return 1\n")
    with terminal("serve", "hello.py", "--reload", "--port", "0", folder=tmp_path) as screen:
        told = screen.expect("waiting for a change")
        assert told.count("SyntaxError") == 1
        assert "hello.py, line 1: SyntaxError: '(' was never closed" in told
        change(file, AGENT.format("x"))
        assert "Holdfast " in screen.expect("Press Ctrl-C to shut down")
        screen.type("\x03")
        assert screen.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_reloader_on_a_terminal_ends_its_server_in_order(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "hello.py").write_text(AGENT.format("x"))
    with terminal("serve", "hello.py", "--reload", "--port", "0", folder=tmp_path) as screen:
        screen.expect("Press Ctrl-C to shut down")
        os.kill(screen.pid, number)
        screen.expect("Stopped after")
        assert screen.end() == 0


def test_a_port_in_use_names_the_reloader_and_not_its_child(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(AGENT.format("x"))
    port = free_port()
    with terminal("serve", "hello.py", "--reload", "--port", str(port), folder=tmp_path) as screen:
        child = pid_of(screen)
        refused = run("serve", "--port", str(port), folder=tmp_path)
        assert refused.returncode == 2
        assert f"pid {screen.pid} (" in refused.stderr
        assert "serve hello.py --reload" in refused.stderr
        assert f"pid {child} " not in refused.stderr
        screen.expect("Press Ctrl-C to shut down")
        screen.type("\x03")
        assert screen.end() == 0


def test_ctrl_c_ends_a_reloader_that_waits_for_a_change(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("1 / 0\n")
    with terminal("serve", "hello.py", "--reload", "--port", "0", folder=tmp_path) as screen:
        screen.expect("waiting for a change")
        screen.type("\x03")
        assert screen.end() == 2


def test_a_signal_to_a_reloader_without_a_terminal_ends_its_server_in_order(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(AGENT.format("x"))
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [*HOLDFAST, "serve", "hello.py", "--reload", "--port", "0", "--json"],
            cwd=tmp_path,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert '"event":"ready"' in process.stdout.readline()
            process.send_signal(number)
            out, error = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, error
        assert '"event":"stopped"' in out
        assert "Traceback" not in error


def test_ctrl_c_reaches_the_server_once_even_if_stdin_is_not_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import asyncio\nasync def agent(run):\n    await asyncio.sleep(3600)\n")
    port = free_port()
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*HOLDFAST, "serve", "slow.py", "--reload", "--port", str(port), "--drain-timeout", "600"],
        cwd=tmp_path,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),  # the terminal controls the new session
    ) as process:
        os.close(theirs)
        try:
            written = read_until(ours, "Press Ctrl-C to shut down")
            run("send", "x", folder=tmp_path, HOLDFAST_URL=f"http://127.0.0.1:{port}")
            os.write(ours, b"\x03")
            written += read_until(ours, "Shutting down: waiting up to 600 s")
            run("interrupt", folder=tmp_path, HOLDFAST_URL=f"http://127.0.0.1:{port}")
            written += read_until(ours, "Stopped after")
            assert process.wait(LIMIT_S) == 0
            assert "Quitting now" not in written
        finally:
            process.kill()
            os.close(ours)


def read_until(terminal: int, text: str) -> str:
    """Read what is written to a terminal until `text` came."""
    written = ""
    while text not in written:
        ready, _, _ = select.select([terminal], [], [], LIMIT_S)
        assert ready, written
        written += os.read(terminal, 4096).decode(errors="replace")
    return written


def test_files_of_environments_and_hidden_folders_are_not_watched(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", ".hidden/c.py", "env/d.py", "pkg/__pycache__/e.py", "notes.txt", "holdfast.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    os.symlink(tmp_path / "nowhere.py", tmp_path / "broken.py")
    before = watched_files(tmp_path)
    assert {os.path.relpath(path, tmp_path) for path in before} == {"a.py", "pkg/b.py", "holdfast.toml"}
    (tmp_path / "a.py").unlink()
    (tmp_path / "pkg" / "b.py").write_text("x = 12\n")
    (tmp_path / "f.py").write_text("")
    changed = changed_files(before, watched_files(tmp_path))
    assert [os.path.relpath(path, tmp_path) for path in changed] == ["a.py", "f.py", "pkg/b.py"]


def test_open_starts_the_browser_with_the_page(tmp_path: Path) -> None:
    script, opened = tmp_path / "browser", tmp_path / "opened"
    script.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}.part && mv {opened}.part {opened}\necho page $1\n')
    script.chmod(0o755)
    port = free_port()
    with terminal("serve", "--open", "--port", str(port), folder=tmp_path, BROWSER=f"{script} %s") as screen:
        screen.expect(f"page http://127.0.0.1:{port}/")
        screen.type("\x03")
        assert screen.end() == 0
    assert opened.read_text() == f"http://127.0.0.1:{port}/"


def test_open_without_a_browser_names_the_page(tmp_path: Path) -> None:
    nothing = {"BROWSER": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    with terminal("serve", "--open", "--port", "0", folder=tmp_path, **nothing) as screen:
        screen.expect("found no browser to open; open http://127.0.0.1:")
        screen.type("\x03")
        assert screen.end() == 0
