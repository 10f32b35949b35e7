"""Real processes: Ctrl-C at any moment, and terminals and pipes that cannot show every character."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import Exit
from tests.cli.processes import HOLDFAST, LIMIT_S, Served, clean_environment, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses sessions of its own."""
    with served(tmp_path_factory.mktemp("serve"), HOLDFAST_GRACE_S="0.3") as running:
        yield running
        assert running.end() == 0


INTERRUPTED = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)

from holdfast.cli import main
sys.argv.pop(0)
sys.meta_path.insert(0, CtrlC())
main()
"""
"""The entry point, with a Ctrl-C at the import of the module that the first argument names."""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("typer", "--help"),
        ("holdfast.cli.commands", "ps"),
        ("msgspec", "ps"),
        ("holdfast.cli.ps", "ps"),
        ("asyncio", "tail"),
        ("holdfast.client", "ps"),
        ("httpx2", "send x"),
        ("httpx2", "interrupt"),
        ("holdfast.storage", "doctor"),
        ("holdfast.host", "serve --port 0"),
        ("uvicorn", "serve --port 0"),
    ],
)
def test_ctrl_c_while_modules_load_shows_no_traceback(module: str, command: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, *command.split()],
        cwd=tmp_path,
        env=clean_environment(HOLDFAST_URL="http://127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode in (-signal.SIGINT, Exit.INTERRUPTED), found
    assert (found.stdout, found.stderr) == ("", ""), "nothing, as with any other program"


INTERRUPTED_IN = """
import os, signal, sys
from holdfast.cli import main

function, call = sys.argv.pop(1), int(sys.argv.pop(1))

def trace(frame, event, _):
    global call
    if frame.f_code.co_qualname == function:
        call -= 1
        if call == 0:
            os.kill(os.getpid(), signal.SIGINT)

sys.settrace(trace)
main()
"""
"""The entry point, with a Ctrl-C at a call of the function that the first argument names."""


@pytest.mark.parametrize(
    ("function", "call", "command"),
    [
        ("run_with_client", 1, "ps"),
        ("run", 1, "ps"),
        ("run_on_loop", 1, "ps"),
        ("Runner._lazy_init", 1, "ps"),
        ("Runner.run", 1, "ps"),
        ("run.<locals>.guarded", 1, "ps"),
        ("say_error", 1, "ps"),
        ("Runner.run", 2, "ps"),
        ("_end_tasks", 1, "ps"),
        ("Runner.close", 1, "ps"),
        ("_exit", 1, "ps"),
        ("_say_usage_error", 1, "ps --nonsense"),
    ],
)
def test_ctrl_c_before_and_after_the_work_has_the_exit_code_and_no_traceback(
    function: str, call: int, command: str, tmp_path: Path
) -> None:
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN, function, str(call), *command.split()],
        cwd=tmp_path,
        env=clean_environment(HOLDFAST_URL="http://127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert found.returncode == Exit.INTERRUPTED, found
    for noise in ("Traceback", "never awaited", "destroyed"):
        assert noise not in found.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict"])
def test_an_output_that_lacks_a_character_gets_a_substitute(server: Served, encoding: str, tmp_path: Path) -> None:
    session = f"party-{encoding}".replace(":", "-")

    def run(*arguments: str, stdin: str = "") -> str:
        found = subprocess.run(
            [*HOLDFAST, *arguments, "-s", session],
            input=stdin.encode(),
            cwd=tmp_path,
            env=clean_environment(HOLDFAST_URL=server.url, PYTHONIOENCODING=encoding),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (found.returncode, b"Traceback" in found.stderr) == (0, False), (arguments, found)
        return found.stdout.decode(encoding.partition(":")[0])

    assert run("send", "echo \N{PARTY POPPER} caf\u00e9", "--wait", "60")
    assert "message.accepted" in run("tail", "--no-follow")
    assert "echo ?" in run("export")
    assert run("tree")
    events = [json.loads(line) for line in run("tail", "--no-follow", "--json").splitlines()]
    assert "\N{PARTY POPPER}" in events[0]["content"], "JSON has it whole, escaped"
    run("export", "-o", "party.md")
    assert "\N{PARTY POPPER}" in (tmp_path / "party.md").read_text("utf-8"), "and so has a file"
    assert "All are done" in run("chat", stdin="parallel 3\n"), "with its multiplication signs, or substitutes"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["--help", "version", "completion bash --json"])
def test_help_without_room_is_told_in_words(command: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [*HOLDFAST, *command.split()],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert (found.returncode, "Traceback" in found.stderr) == (Exit.FAILED, False), found.stderr
    assert "incomplete output: No space left on device" in found.stderr


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("ask <&-", Exit.USAGE, "no message on stdin"),
        ("ask hi <&- >&-", Exit.UNREACHABLE, "does not answer"),
        ("ask hi 2>&-", Exit.UNREACHABLE, ""),
        ("version >&-", Exit.OK, ""),
    ],
)
def test_a_closed_standard_stream_is_as_an_empty_one(line: str, code: Exit, error: str, tmp_path: Path) -> None:
    found = subprocess.run(
        ["sh", "-c", f"{HOLDFAST[0]} {line}"],
        cwd=tmp_path,
        env=clean_environment(HOLDFAST_URL="http://127.0.0.1:9"),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (found.returncode, "Traceback" in found.stderr) == (code, False), found.stderr
    assert error in found.stderr
