"""``holdfast chat`` in a pipe: the answers and nothing else on stdout, and how it went in the exit code."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import Exit
from tests.cli.processes import HOLDFAST, LIMIT_S, Served, clean_environment, served, start_on_own_port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests of this module; each uses a session of its own."""
    with served(tmp_path_factory.mktemp("piped"), HOLDFAST_GRACE_S="0.3") as running:
        yield running


def test_earlier_entries_are_not_printed_again(server: Served) -> None:
    for answer in ("2 words.\n", "3 words.\n"):
        words = "a b c"[: 2 * int(answer[0]) - 1]
        found = server.run("chat", "-s", "twice", stdin=f"count {words}\n")
        assert (found.returncode, found.stdout) == (Exit.OK, answer)
        assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("lines", "exit_code", "note"),
    [
        ("count a\n", Exit.OK, "count_words"),
        ("fail\n", Exit.FAILED, "failed: RuntimeError"),
        ("fail\ncount a\n", Exit.FAILED, "failed: RuntimeError"),
        ("a\0b\n", Exit.REFUSED, "NUL"),
        ("/nonsense\n", Exit.REFUSED, "unknown command"),
        ("a\0b\nfail\n", Exit.FAILED, "failed: RuntimeError"),
        ("stream 100000\n/stop enough\n", Exit.INTERRUPTED, "interrupted"),
        ("exit\n", Exit.OK, "count_words"),
        ("", Exit.OK, ""),
    ],
)
def test_exit_code_is_that_of_the_worst_message(server: Served, lines: str, exit_code: Exit, note: str) -> None:
    found = server.run("chat", "-s", f"code{abs(hash(lines))}", stdin=lines)
    assert found.returncode == exit_code, found.stderr
    assert note in found.stderr
    assert "session" not in found.stdout


def test_json_has_the_same_exit_codes(server: Served) -> None:
    found = server.run("chat", "-s", "json", "--json", stdin="fail\n")
    assert found.returncode == Exit.FAILED
    assert json.loads(found.stdout.splitlines()[-1])["kind"] == "message.settled"


def test_an_encoding_without_the_characters_of_the_answer_is_no_failure(server: Served) -> None:
    found = server.run("chat", "-s", "ascii", stdin="parallel 3\n", PYTHONIOENCODING="ascii")
    assert (found.returncode, "All are done" in found.stdout) == (Exit.OK, True)


def test_a_reader_that_leaves_early_ends_the_chat_without_a_traceback(server: Served) -> None:
    process = subprocess.Popen(
        [*HOLDFAST, "chat", "-s", "early"],
        env=clean_environment(HOLDFAST_URL=server.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.close()
        process.stdin.write(b"stream 100000\n")
        process.stdin.close()
        notes = process.stderr.read()
        assert process.wait(LIMIT_S) == Exit.OK
    assert b"Traceback" not in notes
    server.run("stop", "-s", "early")


def test_lines_from_a_pipe_wait_for_a_server_that_is_started_again(tmp_path: Path) -> None:
    server = start_on_own_port(tmp_path)
    process = subprocess.Popen(
        [*HOLDFAST, "chat"],
        env=clean_environment(HOLDFAST_URL=server.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("count a\n")
    process.stdin.flush()
    assert process.stdout.readline() == "1 word.\n"
    server.end(signal.SIGKILL)
    process.stdin.write("count a b\ncount a b c\n")
    process.stdin.flush()
    with served(tmp_path, "--port", server.url.rpartition(":")[2]):
        out, notes = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (Exit.OK, "2 words.\n3 words.\n"), notes
