"""Start a program for a tool in the current scope, with a single stream for standard output and standard error.

Invariants
- The program and its descendants belong to the scope in which the tool's code runs; reapers track them.
- Every descriptor that is created here is closed at once if the start fails, and otherwise by `Program.close`.
- No code here waits for the end of a pipe, so a remaining process that keeps a pipe open causes no delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import struct
import tempfile
import termios
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Literal

from holdfast.errors import ToolFailed
from holdfast.runtime import Process, Scope, current_scope
from holdfast.runtime.process_host import STDOUT, TreeResult
from holdfast.tools.files.entries import printable
from holdfast.tools.programs.output import Capture

if TYPE_CHECKING:
    from holdfast.agents.program_usage import WatchedProgram
    from holdfast.tools.sandbox.port import Launch
    from holdfast.tools.sandbox.proxy.link import NetworkAccess

__all__ = ["TERM_TYPE", "Program", "command_line", "ending", "input_file", "shown", "typed"]

TERM_TYPE = "xterm"
"""Value of ``TERM`` for programs on a terminal."""

_LINGER_S = 0.2
"""Time in seconds for remaining processes to end by themselves, such as the other programs of a shell pipeline."""
_ROWS_AND_COLUMNS = (40, 120)
_SHOWN_CHARACTERS = 120


def command_line(command: str | Sequence[str]) -> list[str]:
    """Return the program and arguments for a shell command or a list of words.

    Raises:
        ToolFailed: if the command is empty or contains text that cannot be passed to a program.
    """
    words = [_shell(), "-c", command] if isinstance(command, str) else list(command)
    if not words or not words[0] or (isinstance(command, str) and not command.strip()):
        raise ToolFailed("the command is empty; give a shell command, or a list of the program and its arguments")
    for word in words:
        if "\0" in word:
            raise ToolFailed("the command contains a NUL character; write such data to a file and pass its name")
        try:
            os.fsencode(word)
        except UnicodeEncodeError:
            raise ToolFailed("the command contains lone surrogates, which cannot be encoded") from None
    return words


def _shell() -> str:
    return next((path for path in ("/bin/bash", "/usr/bin/bash") if os.access(path, os.X_OK)), "/bin/sh")


def shown(command: str | Sequence[str]) -> str:
    """Return a command on one line of bounded length, for display."""
    line = printable(" ".join((command if isinstance(command, str) else " ".join(command)).split()))
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"


def ending(returncode: int) -> str:
    """Return a description of an exit code, with the signal's name if a signal ended the program or its shell."""
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)}"
    if returncode > 128 and returncode - 128 in signal.valid_signals():
        return f"exit code {returncode}, {_signal_name(returncode - 128)}"
    return f"exit code {returncode}"


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def typed(text: str, *, end: bool) -> bytes:
    """Return the bytes to write to a terminal to enter `text` and, with `end`, to end the input.

    After a partial line, the end-of-file character is written twice, because the first one only submits the line.
    """
    data = text.encode("utf-8", "replace")
    return data + (b"\x04" if not data or data.endswith(b"\n") else b"\x04\x04") if end else data


def input_file(text: str) -> IO[bytes]:
    """Return an unnamed temporary file that contains a program's input, so that reading never blocks."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


class Program:
    """A program that `start` has started for a tool. Use the object only on the loop that started the program.

    Attributes:
        process: process of the program.
        pty: whether the program is attached to a terminal.
        network_note: after `end`, the network's refusals, for the model; empty without refusals.
    """

    def __init__(
        self,
        process: Process,
        watched: WatchedProgram | None,
        scope: Scope,
        capture: Capture,
        entry: int | None,
        *,
        pty: bool,
        network: NetworkAccess | None,
    ) -> None:
        self.process = process
        self._watched = watched
        self.pty = pty
        self.network_note = ""
        self._network = network
        self._scope = scope
        self._capture = capture
        self._entry = entry

    @classmethod
    async def start(
        cls,
        launch: Launch,
        *,
        command: str | Sequence[str],
        feed: Callable[[bytes], object],
        stdin: IO[bytes] | Literal["none", "open"] = "none",
        pty: bool = False,
        name: str | None = None,
    ) -> Program:
        """Start a program in the current scope.

        Parameters:
            launch: how to start the program, as returned by `holdfast.tools.walled.prepare_launch_of`; its descriptors
                are closed, and so is its network when the program ends.
            command: what the launch starts, for display.
            feed: called with each chunk of the program's standard output and standard error.
            stdin: a file as the standard input, ``"none"`` for no input, or ``"open"`` for a pipe that `write` uses.
            pty: whether to attach a terminal, which `write` then uses; `stdin` is ignored in this case. The program's
                environment should name the terminal's type, ``TERM_TYPE``.
            name: display name; None uses the command.

        Raises:
            ToolFailed: if the program fails to start.
            ScopeClosed: if the current scope is stopping.
        """
        scope = current_scope()
        assert scope is not None, "tools run in a scope"
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            for fd in launch.pass_fds:
                theirs.callback(os.close, fd)
            if launch.network is not None:
                ours.callback(launch.network.close)
            read, write = os.openpty() if pty else os.pipe()
            theirs.callback(os.close, write)
            capture = Capture(read, feed)
            ours.callback(capture.close)
            given: int | IO[bytes] | None = None if isinstance(stdin, str) else stdin
            entry: int | None = None
            if pty:
                fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", *_ROWS_AND_COLUMNS, 0, 0))
                given, entry = write, os.dup(read)
            elif stdin == "open":
                given, entry = os.pipe()
                theirs.callback(os.close, given)
                os.set_blocking(entry, False)
            if entry is not None:
                ours.callback(os.close, entry)
            try:
                process = await scope.process(
                    launch.argv,
                    stdin=given,
                    stdout=write,
                    stderr=STDOUT,
                    cwd=launch.directory,
                    env=launch.environment,
                    name=name or shown(command),
                    wall=launch.wall,
                    pass_fds=launch.pass_fds,
                    confirm=launch.confirm,
                    cgroup=None if launch.account is None else launch.account.cgroup,
                )
            except (OSError, ValueError) as error:
                raise _not_started(error, command, launch.directory) from error
            ours.pop_all()
        watched = None if launch.account is None else launch.account.watch(process)
        return cls(process, watched, scope, capture, entry, pty=pty, network=launch.network)

    @property
    def ended_because(self) -> str:
        """Why the host ended the program: its principal used too much. Empty if the host did not end it."""
        return "" if self._watched is None else self._watched.ended_because

    async def wait(self) -> int:
        """Wait until the program ends, then briefly for its remaining processes, and return the exit code."""
        returncode = await self.process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self.process.wait_gone()
        return returncode

    async def end(self, *, term_first_s: float = 0.0) -> TreeResult:
        """Kill the rest of the program's process tree, read the remaining output, and close.

        Parameters:
            term_first_s: grace period between SIGTERM and SIGKILL, in seconds; 0 kills at once.
        """
        try:
            result = await self.process.kill_tree(term_first_s=term_first_s)
            if self._network is not None:
                self.network_note = (await self._network.usage()).describe()
            return result
        finally:
            self.close()

    async def leave(self) -> None:
        """Clean up after a cancelled wait: wait until the process tree is gone, then close.

        If the scope is stopping, the scope has already sent SIGTERM to the tree and kills the tree at the scope's
        deadline. Otherwise, this method kills the tree.
        """
        try:
            if self._scope.interrupt.triggered:
                await self.process.wait_gone()
            else:
                await self.process.kill_tree()
        finally:
            self.close()

    async def write(self, data: bytes, *, timeout_s: float) -> int:
        """Write to the program's input and return how many bytes the program accepted within `timeout_s` seconds.

        Raises:
            ToolFailed: if the program was started without input, or if either side has closed the input.
        """
        if self._entry is None:
            raise ToolFailed("the program's input is closed")
        fd = os.dup(self._entry)  # a copy, so that a concurrent write or close does not interfere
        rest = memoryview(data)
        try:
            async with asyncio.timeout(timeout_s):
                while rest:
                    try:
                        rest = rest[os.write(fd, rest) :]
                    except BlockingIOError:
                        await _writable(fd)
        except TimeoutError:
            pass
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            raise ToolFailed("the program has closed its input") from error
        finally:
            os.close(fd)
        return len(data) - len(rest)

    def close_input(self) -> None:
        """Close the program's input. To end a terminal's input, write ``typed(text, end=True)`` instead."""
        if self._entry is not None:
            os.close(self._entry)
            self._entry = None

    def close(self) -> None:
        """Read the available output, and close all descriptors and the network. Idempotent."""
        if self._network is not None:
            self._network.close()
        self._capture.drain()
        self.close_input()


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_writer(fd, wake)
    try:
        await future
    finally:
        loop.remove_writer(fd)


def _not_started(error: OSError | ValueError, command: str | Sequence[str], folder: str) -> ToolFailed:
    name = shown(command)
    match error:
        case FileNotFoundError() | NotADirectoryError() if not os.path.isdir(folder):
            return ToolFailed("the working folder no longer exists")
        case FileNotFoundError() | NotADirectoryError():
            return ToolFailed(f"program {command[0]!r} not found; check that it is installed and spelled correctly")
        case PermissionError():
            return ToolFailed(f"{name}: permission denied")
        case OSError(errno=errno.E2BIG):
            return ToolFailed("the command is too long; pass large data through stdin or a file")
        case OSError(errno=errno.ENOEXEC):
            return ToolFailed(f"{name}: not an executable; name its interpreter, as in ['python3', 'script.py']")
        case _:
            return ToolFailed(f"{name} failed to start: {error}")
