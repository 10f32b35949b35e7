"""``holdfast serve --reload``: run the server in a child process and start it again when a file changes.

The child belongs to the same process group, so that the terminal sends Ctrl-C to it directly. The parent forwards only
signals that the child did not get from a terminal, because a second signal would end it without a drain. It blocks its
signals and waits for them, because only then does Linux report the sender.

The parent stops the child with SIGHUP before it starts the next one: an idle child then ends without a word.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.cli.exit_codes import Exit
from holdfast.cli.output import counted, note
from holdfast.clock import system_clock
from holdfast.settings import CONFIG_FILE
from holdfast.user_code import nearest

__all__ = ["RESTART", "ReloadedBy", "changed_files", "serve_reloading", "watched_files"]

RESTART = signal.SIGHUP
"""The signal by which the parent stops a server that it starts again."""
_LOOK_EVERY_S = 0.5
_DRAIN_S = "1"
_MOST_FILES = 5000
_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
_WAITED_FOR = (*_SIGNALS, signal.SIGCHLD)
_FROM_KERNEL = 0x80
"""``si_code`` of a signal that the kernel sent, as it does for Ctrl-C at a terminal."""

Stamps = Mapping[str, tuple[int, int]]
"""Modification time and size of each watched file, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadedBy:
    """The reason for a start, passed from the parent to the server.

    Parameters:
        began_at: monotonic time at which the parent saw the change.
        change: the change, in words; empty if the server has not started before.
    """

    began_at: float
    change: str

    @classmethod
    def parse(cls, text: str) -> ReloadedBy:
        """Return the value of a command-line option."""
        began_at, _, change = text.partition(" ")
        return cls(began_at=float(began_at), change=change)

    def __str__(self) -> str:
        return f"{self.began_at} {self.change}"


def serve_reloading(arguments: Sequence[str]) -> int:
    """Run ``holdfast`` with `arguments` in a child process until a signal ends it, and return its exit code.

    When a file changes, the child is stopped and started again. If the child fails, the next change starts it again.
    """
    return _Reloader(arguments).run()


class _Reloader:
    """The parent of the server.

    Parameters:
        arguments: arguments of ``holdfast`` for the child.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        drain = () if any(text.startswith("--drain-timeout") for text in arguments) else ("--drain-timeout", _DRAIN_S)
        self._command = [sys.executable, sys.argv[0], *arguments, *drain]
        self._child: subprocess.Popen[bytes] | None = None
        self._ends = False
        self._unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, (*_WAITED_FOR, signal.SIGALRM))

    def run(self) -> int:
        """Run the server until a signal ends it, and return its exit code."""
        stamps = watched_files(Path())
        note(f"watching {counted(len(stamps), 'file')} for changes")
        change, began_at, has_served = "", system_clock.monotonic(), False
        while True:
            child = self._start(change if has_served else "", began_at)
            code, after = self._until_change_or_end(child, stamps)
            began_at = system_clock.monotonic()
            if self._ends or code in (Exit.OK, Exit.INTERRUPTED):
                return self._end(child)
            if code is None:
                child.send_signal(RESTART)
                self._end(child)
            else:
                note(f"the server ended with exit code {code}; waiting for a change")
                self._child = None
                after = self._next_change(stamps)
                began_at = system_clock.monotonic()
            if self._ends:
                return Exit.OK if code is None else code
            has_served = has_served or code != Exit.USAGE
            change, stamps = _described(stamps, after), after
            self._command = [argument for argument in self._command if argument != "--open"]

    def _start(self, change: str, began_at: float) -> subprocess.Popen[bytes]:
        reloaded = ReloadedBy(began_at=began_at, change=change)
        child = subprocess.Popen(
            [*self._command, "--reloaded", str(reloaded)],
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_SETMASK, self._unblocked),
        )
        self._take_signal(0)
        if self._ends:
            child.terminate()  # the signal may have come before there was a child
        self._child = child
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the child, and return its exit code."""
        while (code := child.poll()) is None:
            self._take_signal(_LOOK_EVERY_S)
        return code if code >= 0 else Exit.INTERRUPTED

    def _until_change_or_end(self, child: subprocess.Popen[bytes], stamps: Stamps) -> tuple[int | None, Stamps]:
        """Wait until the child ends, a file changes or a signal comes; return the exit code, if any, and new stamps."""
        while not self._ends:
            if (code := child.poll()) is not None:
                return code, stamps
            if (now := watched_files(Path())) != stamps:
                return None, now
            self._take_signal(_LOOK_EVERY_S)
        return None, stamps

    def _next_change(self, stamps: Stamps) -> Stamps:
        """Wait for a change, or for a signal, without a child; return the new stamps."""
        while not self._ends:
            if (now := watched_files(Path())) != stamps:
                return now
            self._take_signal(_LOOK_EVERY_S)
        return stamps

    def _take_signal(self, limit_s: float) -> None:
        """Wait for a signal, at most `limit_s`, and forward it, unless a terminal has sent it to the child as well."""
        number, is_from_terminal = _next_signal(limit_s)
        if number not in _SIGNALS:
            return
        self._ends = True
        if self._child is not None and not is_from_terminal:
            self._child.send_signal(number)


def _next_signal(limit_s: float) -> tuple[int, bool]:
    """Wait for a blocked signal; return its number, or 0, and whether a terminal has sent it to the whole group."""
    if sys.platform == "darwin":  # which neither limits the wait nor tells who sent a signal
        signal.setitimer(signal.ITIMER_REAL, limit_s or 0.001)
        number = signal.sigwait((*_WAITED_FOR, signal.SIGALRM))
        return number, number == signal.SIGINT and _in_foreground()
    found = signal.sigtimedwait(_WAITED_FOR, limit_s)
    if found is None:
        return 0, False
    return found.si_signo, found.si_signo == signal.SIGINT and found.si_code == _FROM_KERNEL


def _in_foreground() -> bool:
    """Return whether Ctrl-C at the controlling terminal reaches this process group, wherever stdin comes from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False  # it has none
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _described(before: Stamps, after: Stamps) -> str:
    names = changed_files(before, after)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{nearest(Path(names[0]))}{more} changed"


def changed_files(before: Stamps, after: Stamps) -> list[str]:
    """Return the files that were changed, added or removed, in order."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def watched_files(folder: Path) -> Stamps:
    """Return the stamps of the Python files below `folder` and of its settings file, at most 5,000.

    Hidden folders, virtual environments and ``__pycache__`` are left out.
    """
    stamps: dict[str, tuple[int, int]] = {}
    for path in _files(folder):
        try:
            status = os.stat(path)
        except OSError:
            continue  # it was removed, or is a broken link
        stamps[path] = (status.st_mtime_ns, status.st_size)
        if len(stamps) >= _MOST_FILES:
            break
    return stamps


def _files(folder: Path) -> Iterator[str]:
    yield str(folder / CONFIG_FILE)
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__pycache__", "node_modules"))
            and not os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))
        )
        yield from (os.path.join(parent, name) for name in sorted(files) if name.endswith(".py"))
