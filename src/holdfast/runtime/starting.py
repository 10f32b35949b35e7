"""What a program is started with: its words, environment, directory and descriptors, checked and packed."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

from holdfast.runtime import procfs

__all__ = [
    "DEVNULL",
    "PIPE",
    "START_S",
    "STDOUT",
    "Argument",
    "Descriptors",
    "Specification",
    "Stream",
    "backlog_pauses",
    "host_marker",
    "pid_or_error",
    "specification",
]

PIPE: Final = subprocess.PIPE
STDOUT: Final = subprocess.STDOUT
DEVNULL: Final = subprocess.DEVNULL

Argument = str | bytes | os.PathLike[str] | os.PathLike[bytes]

Stream = int | IO[Any] | None
"""`PIPE`, `DEVNULL`, `STDOUT` (stderr only), a descriptor, an open file, or None for the default."""

Specification = tuple[list[bytes], dict[bytes, bytes], bytes]
"""Words, environment and directory."""

START_S = 30.0
"""How long a program may take to start."""


class Descriptors:
    """The descriptors of one start: what the program gets, and our ends of its pipes. Closes what nobody took."""

    def __init__(self, stdin: Stream, stdout: Stream, stderr: Stream) -> None:
        self.theirs: list[int] = []
        self._opened: list[int] = []
        self._ours: dict[str, int] = {}
        try:
            self._add("stdin", DEVNULL if stdin is None else stdin)
            self._add("stdout", 1 if stdout is None else stdout)
            if stderr == STDOUT:
                self.theirs.append(self.theirs[1])
            else:
                self._add("stderr", 2 if stderr is None else stderr)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, stream: int | IO[Any]) -> None:
        if stream == PIPE:
            read, write = os.pipe2(os.O_CLOEXEC)
            theirs, self._ours[name] = (read, write) if name == "stdin" else (write, read)
            self._opened.append(theirs)
        elif stream == DEVNULL:
            theirs = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            self._opened.append(theirs)
        elif isinstance(stream, int):
            if stream < 0:
                raise ValueError(f"{name} cannot be {stream}: give PIPE, DEVNULL, a descriptor or an open file")
            theirs = stream
        else:
            theirs = stream.fileno()
        self.theirs.append(theirs)

    def take(self, name: str) -> int | None:
        """Our end of the pipe for ``name``, which is the caller's to close now; None when there is no pipe."""
        return self._ours.pop(name, None)

    def close_theirs(self) -> None:
        """The program has its ends: close ours of them."""
        while self._opened:
            os.close(self._opened.pop())

    def close(self) -> None:
        """Close all that was not taken."""
        self.close_theirs()
        while self._ours:
            os.close(self._ours.popitem()[1])

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def specification(argv: Sequence[Argument], cwd: Argument | None, env: Mapping[str, str] | None) -> Specification:
    """Check and encode what a program is started with.

    Raises:
        ValueError: ``argv`` is a string or names no program, something holds a NUL byte, or a name in ``env`` a ``=``.
    """
    words = [] if isinstance(argv, str | bytes) else [os.fsencode(word) for word in argv]
    if not words or not words[0]:
        raise ValueError("argv must be a sequence of the program and its arguments, as in ['ls', '-l']")
    if env is None:
        environment = dict(os.environb)
    else:
        environment = {os.fsencode(key): os.fsencode(value) for key, value in env.items()}
    environment[procfs.HOST_MARKER] = host_marker()
    if any(b"\0" in word for word in (*words, *environment, *environment.values())):
        raise ValueError("neither arguments nor environment may hold a NUL byte")
    if any(b"=" in key for key in environment):
        raise ValueError("a name in the environment holds '='")
    if cwd is not None:
        directory = os.fsencode(os.path.abspath(cwd))
    else:
        directory = os.getcwdb()
    return words, environment, directory


def pid_or_error(started: int | tuple[str, int], argv: Sequence[Argument], cwd: Argument | None) -> int:
    """The pid that was reported.

    Raises:
        OSError: the report is a failure; the subclass tells which, as for ``subprocess``.
    """
    if isinstance(started, int):
        return started
    stage, number = started
    match stage:
        case "chdir":
            raise OSError(number, os.strerror(number), os.fspath(cwd) if cwd is not None else os.getcwd())
        case "exec":
            raise OSError(number, os.strerror(number), os.fspath(argv[0]))
        case "reaper":
            why = "its reaper ended first; was it killed, or has the zygote failed?"
            raise OSError(number, f"cannot start {os.fsdecode(argv[0])}: {why}")
        case _:
            raise OSError(number, f"cannot start {os.fsdecode(argv[0])} ({stage}): {os.strerror(number)}")


def backlog_pauses() -> Iterator[float]:
    """Pauses until the zygote has worked some requests off, seconds in all."""
    deadline = time.monotonic() + START_S
    pause_s = 0.0005
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(pause_s * 2, 0.02)
    raise TimeoutError(errno.ETIMEDOUT, "the zygote takes no more requests; is it stopped?")


_marker: tuple[int, bytes] = (0, b"")


def host_marker() -> bytes:
    """What programs of this process carry in their environment: its pid and start time."""
    global _marker
    pid = os.getpid()
    if _marker[0] != pid:
        _marker = (pid, b"%d.%d" % (pid, procfs.start_time(pid) or 0))
    return _marker[1]
