"""Real ``holdfast`` processes: a server in a folder of its own, commands, and a chat on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyte
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli.keys import _opened
from holdfast.proof.storm.server import free_port
from holdfast.settings import load_settings

HOLDFAST = [str(Path(sys.executable).parent / "holdfast")]
LIMIT_S = 60.0
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[ -/]*[0-~])")
_UNFINISHED = re.compile(r"\x1b[^@-Z\\^-~]*\Z|\x1b\[[0-?]*[ -/]*\Z")


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without settings of Holdfast's, and `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "NO_COLOR": "1", **more}


@dataclass
class Served:
    """A running ``holdfast serve --json``."""

    process: subprocess.Popen[str]
    folder: Path
    ready: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""
    """What it wrote to stderr, once it has ended."""

    @property
    def url(self) -> str:
        """Where it answers."""
        return str(self.ready["url"])

    def run(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command against this server."""
        return run(*arguments, stdin=stdin, folder=self.folder, HOLDFAST_URL=self.url, **environment)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, self.said = self.process.communicate(timeout=LIMIT_S)
        self.lines += [json.loads(line) for line in out.splitlines()]
        return self.process.returncode


def run(
    *arguments: str, stdin: str = "", folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end: in this process, but for those that handle signals or a terminal."""
    if arguments and arguments[0] not in ("serve", "chat"):
        return _run_here(arguments, stdin, folder or Path(), environment)
    return subprocess.run(
        [*HOLDFAST, *arguments],
        input=stdin,
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def _run_here(
    arguments: tuple[str, ...], stdin: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """As in a process of its own, and a hundred times as quick."""
    cleared: dict[str, str | None] = {name: None for name in os.environ if name.startswith("HOLDFAST_")}
    with chdir(folder):
        result = CliRunner().invoke(app, list(arguments), input=stdin, env={**cleared, "NO_COLOR": "1", **environment})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(list(arguments), result.exit_code, result.stdout, result.stderr)


def start(folder: Path, *arguments: str, **environment: str) -> Served:
    """Start a server in `folder` on any port (or the one in `arguments`) and wait until it answers."""
    port = [] if "--port" in arguments else ["--port", "0"]
    process = subprocess.Popen(
        [*HOLDFAST, "serve", *arguments, *port, "--json"],
        cwd=folder,
        env=clean_environment(**{"HOLDFAST_DRAIN_TIMEOUT_S": "0.5", "HOLDFAST_GRACE_S": "1", **environment}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate(timeout=LIMIT_S))
    return Served(process, folder, json.loads(line))


def start_on_own_port(folder: Path, *arguments: str) -> Served:
    """Start a server on a port that nobody else is given when it is gone: it comes back there, or is looked for."""
    return start(folder, *arguments, "--port", str(free_port()))


def approval_key(folder: Path) -> str:
    """Make an approval key for the sessions of `local` in a folder whose server is not started yet."""

    async def make() -> str:
        async with _opened(load_settings().store) as (ring, _):
            return (await ring.create(principal="local", role="approver"))[1]

    with chdir(folder):
        return asyncio.run(make())


@contextmanager
def served(folder: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    """A server until the end of the block."""
    server = start(folder, *arguments, **environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate(timeout=LIMIT_S)


class Terminal:
    """A command on a terminal of its own, as a person has it, 40 lines high and ``COLUMNS`` wide, or 200."""

    def __init__(self, *arguments: str, folder: Path, **environment: str) -> None:
        self.raw = b""
        """All that the command has written."""
        self._written = ""
        self._rest = ""
        self._read = 0
        columns = int(environment.get("COLUMNS", "200"))
        self._screen = pyte.Screen(columns, 40)
        self._stream = pyte.ByteStream(self._screen)
        pid, self._fd = pty.fork()
        if pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            os.chdir(folder)
            state = {"TERM": "xterm", "XDG_STATE_HOME": str(folder / "state")}
            os.execve(HOLDFAST[0], [*HOLDFAST, *arguments], clean_environment(**{**state, **environment}))
        self.pid = pid

    def type(self, text: str) -> None:
        """Type something."""
        os.write(self._fd, text.encode())

    def expect(self, text: str) -> str:
        """Wait until `text` is written, after what was expected before; what came up to its end, without escapes.

        Text that a command changes in place is not written in one piece: wait for it with `until`.
        """
        deadline = time.monotonic() + LIMIT_S
        while (at := self._written.find(text, self._read)) < 0:
            self._more(deadline, f"{text!r} did not come; since then:\n{self._written[self._read :]}")
        found, self._read = self._written[self._read : at + len(text)], at + len(text)
        return found

    def until(self, is_shown: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the lines on the screen are as wanted, and return them."""
        deadline = time.monotonic() + LIMIT_S
        while not is_shown(lines := self.display()):
            self._more(deadline, "not shown; the screen has:\n" + "\n".join(lines))
        return lines

    def prompt(self, sign: str = ">") -> None:
        """Wait until the input line is empty after `sign`; what came before counts as expected."""
        self.until(lambda lines: bool(lines) and lines[self._screen.cursor.y :] == [sign])
        self._read = len(self._written)

    def display(self) -> list[str]:
        """The lines that the screen has now, down to the last one with text."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _more(self, deadline: float, why_not: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._fd], [], [], left)[0] or not self._take():
            raise AssertionError(why_not)

    def _take(self) -> bool:
        try:
            data = os.read(self._fd, 65_536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        text = self._rest + data.decode("utf-8", "replace")
        unfinished = _UNFINISHED.search(text)
        end = unfinished.start() if unfinished else len(text)
        self._written += _ESCAPES.sub("", text[:end])
        self._rest = text[end:]
        return bool(data)

    def end(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if select.select([self._fd], [], [], 0.05)[0] and not self._take():
                break
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """End it whatever it does."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()


def address_of(screen: Terminal) -> str:
    """The URL that a server on a terminal prints; a port that was free before its start may be taken at its start."""
    return screen.expect(" (pid").split()[-2]


def shows(text: str) -> Callable[[list[str]], bool]:
    """Whether a screen has a text."""
    return lambda lines: any(text in line for line in lines)


@contextmanager
def terminal(*arguments: str, folder: Path, **environment: str) -> Iterator[Terminal]:
    """A command on a terminal until the end of the block, which must have ended it."""
    screen = Terminal(*arguments, folder=folder, **environment)
    try:
        yield screen
    except BaseException:
        screen.kill()
        raise
