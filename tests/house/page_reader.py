"""A reader with two terminals, who does what a page says, in order, and knows nothing else.

The reader goes by what is visible: the terminal that was named last, the commands in blocks of `sh`, the file that a
block is to be saved as, and these phrases: "type `text`", "wait for `text`", "press Ctrl-C" (or Ctrl-D).
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
LINES = 40
PROMPT = re.compile(r"\[(\d+)\] reader\$ $")
MORE = "reader> "
SERVES = re.compile(r"^Press Ctrl-C to .*\n", re.MULTILINE)
CHATS = re.compile(r"^> $")
KEYS = {"C": "\x03", "D": "\x04"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PHRASE = re.compile(
    r"(?P<file>[Ss]ave (?:this|it) as `(?P<name>[^`]+)`)"
    r"|[Tt]ype `(?P<line>[^`]+)`"
    r"|[Ww]ait for `(?P<text>[^`]+)`"
    r"|[Pp]ress Ctrl-(?P<key>[CD])(?: in terminal (?P<where>[12]))?"
    r"|terminal (?P<terminal>[12])"
    r"|(?P<comment><!--.*?-->)"
)
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][0-9A-B]|[=>78])")


@dataclass(frozen=True)
class Step:
    """One thing that a reader does: save a file, run a block, type a line, wait for a text, or press a key."""

    kind: str
    text: str
    line: int
    terminal: int = 1
    file: str = ""


def steps_of(page: Path) -> list[Step]:
    """Return what a reader does who follows the page."""
    text = page.read_text("utf-8")
    steps: list[Step] = []
    terminal, file, at = 1, "", 0
    for fence in [*FENCE.finditer(text), None]:
        for found in PHRASE.finditer(text, at, fence.start() if fence else len(text)):
            line = text.count("\n", 0, found.start()) + 1
            match found.lastgroup, found.groupdict():
                case _, {"name": str(name)}:
                    file = name
                case _, {"line": str(typed)}:
                    steps.append(Step("type", typed, line, terminal))
                case _, {"text": str(wanted)}:
                    steps.append(Step("wait", wanted, line, terminal))
                case _, {"key": str(key), "where": where}:
                    terminal = int(where or terminal)
                    steps.append(Step("press", key, line, terminal))
                case _, {"terminal": str(number)}:
                    terminal = int(number)
                case _, {"comment": str(comment)}:
                    assert comment == f"<!-- file: {file} -->", f"{page.name}, line {line}: a reader sees no {comment}"
        if fence is None:
            return steps
        line = text.count("\n", 0, fence.start()) + 1
        if fence[1] == "sh":
            steps.append(Step("run", fence[2], line, terminal))
        else:
            assert file, f"{page.name}, line {line}: a block of {fence[1]} that is to be saved under no name"
            steps.append(Step("save", fence[2], line, file=file))
            file = ""
        at = fence.end()
    raise AssertionError


class Shell:
    """A shell on a terminal.

    Parameters:
        folder: the shell's folder.
        environment: its environment.
        columns: width of the terminal.
    """

    def __init__(self, folder: Path, environment: dict[str, str], *, columns: int) -> None:
        self.text = ""
        self.raw = b""
        self._since = self._seen = 0
        self._screen = pyte.Screen(columns, LINES)
        self._stream = pyte.ByteStream(self._screen)
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe(argv[0], argv, {**environment, "PS1": r"[$?] reader$ ", "PS2": MORE, "TERM": "xterm"})
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))

    def run(self, line: str) -> tuple[str, int | None]:
        """Type a command, once the shell waits for one; what it shows until a reader takes it to be ready.

        With the exit code, if it has ended.
        """
        while not self.has_prompt():
            self._read_more("the shell's prompt")
        self._type(f"{line}\n")
        self.await_readiness()
        ended = PROMPT.search(self.text, self._since)
        return self.text[self._since :], int(ended[1]) if ended else None

    def tell(self, line: str) -> None:
        """Type a line into the chat that runs in this shell, once it waits for one."""
        self.await_readiness()
        self._type(f"{line}\r")

    def _type(self, text: str) -> None:
        self._since = self._seen = len(self.text)
        os.write(self._terminal, text.encode())

    def press(self, key: str) -> None:
        """Press Ctrl and a key, whatever is going on."""
        self._since = len(self.text)
        os.write(self._terminal, KEYS[key].encode())

    def expect(self, wanted: str) -> None:
        """Wait until a text comes after what was expected before."""
        while (at := self.text.find(wanted, self._seen)) < 0:
            self._read_more(wanted)
        self._seen = at + len(wanted)

    def await_readiness(self) -> None:
        """Wait until the shell, or a chat in it, waits for a line, or a server that it runs answers."""
        while not self.is_ready():
            self._read_more("a prompt")

    def is_ready(self) -> bool:
        """Whether a reader would take the terminal to be ready for something else."""
        cursor = self._screen.cursor
        line = self._screen.display[cursor.y][: cursor.x]
        return bool(
            self.has_prompt()
            or (CHATS.search(line) and len(self.text) > self._since)
            or SERVES.search(self.text, self._since)
        )

    def has_prompt(self) -> bool:
        """Whether the shell waits for a command, or for the rest of one."""
        return self.text.endswith(MORE, self._since) or PROMPT.search(self.text, self._since) is not None

    def close(self) -> None:
        """End what runs in the shell, and the shell."""
        with suppress(OSError):
            os.write(self._terminal, b"\x03\x03")
        os.close(self._terminal)  # a hangup for whatever is left
        deadline = time.monotonic() + LIMIT_S
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.01)

    def _read_more(self, wanted: str) -> None:
        if not select.select([self._terminal], [], [], LIMIT_S)[0]:
            raise AssertionError(f"{wanted!r} did not come; the terminal shows:\n{self.text[-4000:]}")
        data = os.read(self._terminal, 65_536)
        self.raw += data
        self._stream.feed(data)
        self.text = ESCAPES.sub("", self.raw.decode("utf-8", "replace")).replace("\r", "")


@dataclass(frozen=True)
class Done:
    """What a block showed in its terminal."""

    step: Step
    shown: str


class Reader:
    """Somebody with two terminals in a folder."""

    def __init__(self, folder: Path, terminals: dict[int, Shell]) -> None:
        self.folder = folder
        self.terminals = terminals

    def follow(self, page: Path) -> list[Done]:
        """Do what a page says; return what its blocks showed. A command that fails fails the test."""
        steps = steps_of(page)
        done: list[Done] = []
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            shell = self.terminals[step.terminal]
            where = f"{page.name}, line {step.line}"
            match step.kind:
                case "save":
                    (self.folder / step.file).write_text(step.text)
                case "run":
                    done.append(Done(step, self._run(shell, step, where)))
                case "type":
                    shell.tell(step.text)
                case "wait":
                    shell.expect(step.text)
                case "press":
                    shell.press(step.text)
                    if after is None or after.kind != "wait":
                        shell.await_readiness()
        return done

    def _run(self, shell: Shell, step: Step, where: str) -> str:
        shown = ""
        for line in step.text.splitlines():
            output, code = shell.run(line)
            shown += output
            assert code in (0, None), f"{where}: exit code {code} of {line!r}:\n{output}"
        return shown


def clone(folder: Path) -> Path:
    """Make what a reader has who cloned the repository and has run `make` once; return its folder."""
    copy = folder / "holdfast"
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    for name in ("requirements", "examples"):
        shutil.copytree(ROOT / name, copy / name)
    environment = copy / ".venv"
    environment.mkdir()
    for path in Path(sys.prefix).iterdir():
        if not path.name.startswith(".stamp-"):
            (environment / path.name).symlink_to(path)
    program = "import sys; sys.path.insert(0, 'requirements'); import install; print(install.stamp_of('serve'), end='')"
    stamp = subprocess.run([sys.executable, "-c", program], cwd=copy, capture_output=True, text=True, check=True).stdout
    (environment / ".stamp-serve").write_text(stamp)
    return copy


@contextmanager
def reader(folder: Path, port: int, *, columns: int = 120) -> Iterator[Reader]:
    """Somebody with a clone and two terminals, in which the default port is another one."""
    copy = clone(folder)
    here = str(Path(sys.executable).parent)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOLDFAST_", "MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHON"))
        and name not in ("ARGS", "ENV", "SPREAD", "TESTS")  # variables that make passes on from its command line
    }
    environment |= {
        "PATH": os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part != here),
        "PYTHON": sys.executable,
        "HOLDFAST_PORT": str(port),
        "HOLDFAST_URL": f"http://127.0.0.1:{port}",
    }
    with ExitStack() as stack:
        terminals = {}
        for number in (1, 2):
            terminals[number] = Shell(copy, environment, columns=columns)
            stack.callback(terminals[number].close)
        yield Reader(copy, terminals)
