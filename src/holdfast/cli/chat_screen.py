"""Where ``holdfast chat`` shows what it prints: lines that stay, and live lines that the next ones replace."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["USUAL_SIGN", "PlainScreen", "Screen", "can_edit_lines"]

USUAL_SIGN = "> "
"""Stands before the input unless a question is open."""

_FALLBACK = (80, 24)


class Screen(Protocol):
    """A terminal with one place for input. Only the screen writes to it, and what is typed is never torn."""

    @property
    def columns(self) -> int:
        """Width of the terminal."""
        ...

    def write(self, lines: Iterable[str]) -> None:
        """Print lines that stay. They may contain styles, and no other control characters."""
        ...

    def show_live(self, lines: Sequence[str]) -> None:
        """Show unfinished lines in place of the live lines before. A screen that cannot rewrite lines ignores them."""
        ...

    def ask(self, sign: str) -> None:
        """Ask for input after `sign`."""
        ...

    def heard(self, lines: Iterable[str]) -> None:
        """Keep what was typed, in these lines, above the input."""
        ...

    def clear(self) -> None:
        """Clear the terminal."""
        ...


class PlainScreen:
    """A terminal that edits and echoes its lines itself, for terminals without cursor control."""

    def __init__(self) -> None:
        self._sign = ""

    @property
    def columns(self) -> int:
        """Width of the terminal."""
        return shutil.get_terminal_size(_FALLBACK).columns

    def write(self, lines: Iterable[str]) -> None:
        """Print lines; an open request for input is repeated after them."""
        text = "".join(f"{line}\n" for line in lines)
        if text:
            sys.stdout.write(f"\n{text}{self._sign}" if self._sign else text)
            sys.stdout.flush()

    def show_live(self, lines: Sequence[str]) -> None:
        """Do nothing: what is printed here stays."""

    def ask(self, sign: str) -> None:
        """Print the sign, unless it is the last thing printed."""
        if sign != self._sign:
            sys.stdout.write(f"\n{sign}" if self._sign else sign)
            sys.stdout.flush()
            self._sign = sign

    def heard(self, lines: Iterable[str]) -> None:
        """Note that the line of the sign is complete; the terminal has shown it."""
        self._sign = ""

    def clear(self) -> None:
        """Do nothing: this terminal cannot be cleared."""


def can_edit_lines() -> bool:
    """Return whether a person is at a terminal whose cursor can be moved."""
    both = sys.stdin.isatty() and sys.stdout.isatty()
    return both and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")
