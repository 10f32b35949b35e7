"""Secrets at the terminal: read them without echo, and show them on the terminal only."""

from __future__ import annotations

import fcntl
import getpass
import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["exclusive_terminal", "hidden_typing", "read_secret", "show_on_terminal"]


@contextmanager
def exclusive_terminal(descriptor: int) -> Iterator[None]:
    """Prevent other programs of this user from opening the terminal; programs that have it open are not affected."""
    with suppress(OSError):
        fcntl.ioctl(descriptor, termios.TIOCEXCL)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.ioctl(descriptor, termios.TIOCNXCL)


@contextmanager
def hidden_typing(descriptor: int) -> Iterator[None]:
    """Turn off the terminal's echo, and prevent other programs of this user from opening the terminal."""
    before = termios.tcgetattr(descriptor)
    hidden = [*before]
    hidden[3] &= ~termios.ECHO
    with exclusive_terminal(descriptor):
        termios.tcsetattr(descriptor, termios.TCSADRAIN, hidden)
        try:
            yield
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_secret(prompt: str) -> str:
    """Read a line from the terminal on stdin without echo."""
    with exclusive_terminal(0):
        return getpass.getpass(prompt, stream=None).strip()


def show_on_terminal(text: str) -> bool:
    """Write a line to this process's controlling terminal; return False if the process has no such terminal."""
    try:
        descriptor = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return False
    with open(descriptor, "w", encoding="utf-8") as terminal:
        terminal.write(f"{text}\n")
    return True
