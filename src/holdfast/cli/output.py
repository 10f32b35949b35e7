"""Output of commands: JSON for programs, tables and lines for people, notes and errors on stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from holdfast import logs
from holdfast.cli.hints import command_hint
from holdfast.cli.style import style_for
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.protocol.messages import TreeNode

__all__ = [
    "Table",
    "age",
    "clean",
    "clock_time",
    "counted",
    "fit",
    "fit_columns",
    "note",
    "printable",
    "say",
    "say_error",
    "say_failure",
    "say_json",
    "say_table",
    "say_tree",
    "visible",
]

Table = Iterable[Sequence[str]]

_GAP = "  "
_LEAST_WIDTH = 4


def printable(text: str) -> str:
    """Replace control characters, except line breaks and tabs, with dots, so that text cannot control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def visible(text: str) -> str:
    """Return text with invisible characters escaped: line breaks, escapes, bidirectional controls."""
    return logs.visible("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def fit(text: str, stream: TextIO) -> str:
    """Return `text` in printable form if `stream` is a terminal, otherwise unchanged."""
    return printable(text) if stream.isatty() else text


def say(text: str = "") -> None:
    """Print a line on stdout."""
    print(fit(text, sys.stdout), flush=True)


def say_json(value: Any) -> None:
    """Print one line of JSON on stdout; escape its characters if the encoding of stdout lacks some."""
    line = msgspec.json.encode(value).decode()
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(json.loads(line))
    print(line, flush=True)


def note(text: str) -> None:
    """Print a line on stderr."""
    print(fit(text, sys.stderr), file=sys.stderr, flush=True)


def say_failure(text: str) -> None:
    """Print on stderr why a command did not succeed."""
    style = style_for(sys.stderr)
    print(f"{style.red}holdfast:{style.plain} {fit(text, sys.stderr)}", file=sys.stderr, flush=True)


def say_error(error: HoldfastError, *, as_json: bool, session: str | None = None) -> None:
    """Print an error and its hint on stderr; as text, with the hint in terms of commands.

    Parameters:
        error: the error.
        as_json: whether to print JSON, with the error's own hint.
        session: key of the session that the command is about; None if it is about no session.
    """
    if as_json:
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        note(msgspec.json.encode({"error": body}).decode())
        return
    say_failure(error.message)
    if hint := command_hint(error, session=session):
        note(f"  {hint}")


def say_table(titles: Sequence[str], rows: Table) -> None:
    """Print a table whose columns are as wide as their longest cell; on a terminal, cut the widest until it fits."""
    shown = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(title), *(len(row[n]) for row in shown)) for n, title in enumerate(titles)] if shown else []
    if not shown:
        return
    if sys.stdout.isatty():
        widths = _fitting(widths, shutil.get_terminal_size().columns)
    style = style_for(sys.stdout)
    lines = [
        _GAP.join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [[title.upper() for title in titles], *shown]
    ]
    print(f"{style.dim}{lines[0]}{style.plain}", *lines[1:], sep="\n", flush=True)


def _fitting(widths: Sequence[int], columns: int) -> list[int]:
    """Return the widths with which a row fits, the widest reduced first, but none below `_LEAST_WIDTH`."""
    room = columns - len(_GAP) * (len(widths) - 1)
    fitting = [min(width, max(room, _LEAST_WIDTH)) for width in widths]
    while sum(fitting) > room and max(fitting) > _LEAST_WIDTH:
        fitting[fitting.index(max(fitting))] -= 1
    return fitting


def fit_columns(text: str) -> str:
    """Return `text`, shortened to the width of the terminal if stdout is one."""
    return _cut(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "…"


def say_tree(node: TreeNode) -> None:
    """Print a task tree with one line per node."""
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    def label(node: TreeNode) -> Text:
        parts = [
            node.state,
            f"pid {node.pid}" if node.pid is not None else "",
            counted(node.processes, "process") if node.processes > 1 else "",
            f"{node.age_s:.1f} s" if node.age_s else "",
        ]
        text = Text("program " if node.kind == "process" else f"{node.kind} ")
        text.append(clean(node.name), style="bold")
        return text.append("  " + "  ".join(part for part in parts if part), style="dim")

    def grow(branch: Tree, node: TreeNode) -> None:
        for child in node.children:
            grow(branch.add(label(child)), child)

    root = Tree(label(node))
    grow(root, node)
    console = Console(
        width=None if sys.stdout.isatty() else 200, color_system="auto" if style_for(sys.stdout).bold else None
    )
    console.print(root)


def counted(count: int, name: str) -> str:
    """Return a count with its noun: ``1 run``, ``2 processes``."""
    return f"{count} {name}{'' if count == 1 else 'es' if name.endswith('s') else 's'}"


def age(at: float) -> str:
    """Return how long ago the time `at` was, in short form, such as ``5 min ago``."""
    seconds = max(0.0, system_clock.now() - at)
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def clock_time(at: float) -> str:
    """Return a time of day in this machine's time zone."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def clean(text: str) -> str:
    """Replace control characters, so that text from agents and users cannot control the terminal."""
    return "".join(character if character.isprintable() else "·" for character in text)
