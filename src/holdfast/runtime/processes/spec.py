"""Specification of a program to start: arguments, environment, directory and descriptors, checked and packed."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final, TypedDict

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.program_cgroup import CgroupSpec
from holdfast.runtime.walls.spec import WallSpec

__all__ = [
    "DEVNULL",
    "MORE_FDS",
    "PIPE",
    "START_S",
    "STDOUT",
    "Argument",
    "Descriptors",
    "ProcessSpec",
    "StartOptions",
    "Stream",
    "backlog_pauses",
    "host_marker",
    "process_spec",
]

PIPE: Final = subprocess.PIPE
STDOUT: Final = subprocess.STDOUT
DEVNULL: Final = subprocess.DEVNULL

Argument = str | bytes | os.PathLike[str] | os.PathLike[bytes]

Stream = int | IO[Any] | None
"""`PIPE`, `DEVNULL`, `STDOUT` (stderr only), a descriptor, an open file, or None for the default."""

ProcessSpec = tuple[list[bytes], dict[bytes, bytes], bytes, dict[str, Any] | None, CgroupSpec | None, bool]
"""Arguments, environment, directory, the packed wall, the owner's cgroup, and whether it ends with the host's lease."""

MORE_FDS = 6
"""Maximum number of descriptors that a program gets in addition to its standard streams."""

START_S = 30.0
"""Maximum time in seconds for a program to start."""


class StartOptions(TypedDict, total=False):
    """Options of a program whose streams are given; see `ProcessHost.spawn`."""

    cwd: Argument | None
    env: Mapping[str, str] | None
    name: str | None
    wall: WallSpec | None
    pass_fds: Sequence[int]
    confirm: Callable[[], bool] | None


class Descriptors:
    """Descriptors that one program is started with, and this process's ends of the program's pipes.

    The end of the ``with`` block closes all descriptors that this object opened and that were not taken.
    """

    def __init__(self, stdin: Stream, stdout: Stream, stderr: Stream, more: Sequence[int] = ()) -> None:
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
            if len(more) > MORE_FDS:
                raise ValueError(f"{len(more)} descriptors to pass; at most {MORE_FDS} are supported")
            self.theirs.extend(more)
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
                raise ValueError(f"{name}={stream} is invalid; use PIPE, DEVNULL, a descriptor or an open file")
            theirs = stream
        else:
            theirs = stream.fileno()
        self.theirs.append(theirs)

    def take(self, name: str) -> int | None:
        """Return this process's end of the pipe ``name``, which the caller must close; None without a pipe."""
        return self._ours.pop(name, None)

    def close_theirs(self) -> None:
        """Close this process's copies of the program's ends of the pipes."""
        while self._opened:
            os.close(self._opened.pop())

    def close(self) -> None:
        """Close all descriptors that this object opened and that were not taken."""
        self.close_theirs()
        while self._ours:
            os.close(self._ours.popitem()[1])

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def process_spec(
    argv: Sequence[Argument],
    cwd: Argument | None,
    env: Mapping[str, str] | None,
    wall: WallSpec | None = None,
    cgroup: CgroupSpec | None = None,
    *,
    leased: bool = False,
) -> ProcessSpec:
    """Check and encode the parameters of a start.

    Raises:
        ValueError: ``argv`` is a string or empty, a value contains a NUL byte, or a name in ``env`` contains ``=``.
    """
    words = [] if isinstance(argv, str | bytes) else [os.fsencode(word) for word in argv]
    if not words or not words[0]:
        raise ValueError("argv must be a non-empty sequence of the program and its arguments, such as ['ls', '-l']")
    if env is None:
        environment = dict(os.environb)
    else:
        environment = {os.fsencode(key): os.fsencode(value) for key, value in env.items()}
    environment[procfs.HOST_MARKER] = host_marker()
    if any(b"\0" in word for word in (*words, *environment, *environment.values())):
        raise ValueError("an argument or environment variable contains a NUL byte; remove it")
    if any(b"=" in key for key in environment):
        raise ValueError("the name of an environment variable contains '='; choose another name")
    if cwd is not None:
        directory = os.fsencode(os.path.abspath(cwd))
    else:
        directory = os.getcwdb()
    return words, environment, directory, None if wall is None else wall.pack(), cgroup, leased


def backlog_pauses() -> Iterator[float]:
    """Yield the pauses, in seconds, between requests to a busy zygote. Raise TimeoutError after `START_S` seconds."""
    deadline = time.monotonic() + START_S
    pause_s = 0.0005
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(pause_s * 2, 0.02)
    raise TimeoutError(errno.ETIMEDOUT, "the zygote process accepts no requests; check whether a signal has stopped it")


_marker: tuple[int, bytes] = (0, b"")


def host_marker() -> bytes:
    """Return the marker that programs of this process carry in their environment: its pid and start time."""
    global _marker
    pid = os.getpid()
    if _marker[0] != pid:
        _marker = (pid, b"%d.%d" % (pid, procfs.start_time(pid) or 0))
    return _marker[1]
