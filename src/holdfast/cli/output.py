"""Output of commands: JSON for programs, tables and lines for people, notes and errors on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from holdfast import logs
from holdfast.clock import system_clock
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.protocol.messages import TreeNode
    from holdfast.protocol.stopping import StopReceipt

__all__ = [
    "Table",
    "age",
    "counted",
    "ended",
    "fit",
    "note",
    "printable",
    "say",
    "say_error",
    "say_json",
    "say_receipt",
    "say_table",
    "say_tree",
    "visible",
]

Table = Iterable[Sequence[str]]


def printable(text: str) -> str:
    """Return text that cannot control a terminal: control characters become dots."""
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
    """Print one line of JSON on stdout."""
    print(msgspec.json.encode(value).decode(), flush=True)


def note(text: str) -> None:
    """Print a line on stderr."""
    print(fit(text, sys.stderr), file=sys.stderr, flush=True)


def say_error(error: HoldfastError, *, as_json: bool) -> None:
    """Print an error and its hint on stderr."""
    if as_json:
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        note(msgspec.json.encode({"error": body}).decode())
        return
    note(f"holdfast: {error.message}")
    if error.hint:
        note(f"  {error.hint}")


def say_table(titles: Sequence[str], rows: Table) -> None:
    """Print a table whose columns are as wide as their longest cell."""
    shown = [[_clean(cell) for cell in row] for row in rows]
    widths = [max(len(title), *(len(row[n]) for row in shown)) for n, title in enumerate(titles)] if shown else []
    if not shown:
        return
    for row in [[title.upper() for title in titles], *shown]:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def say_tree(node: TreeNode) -> None:
    """Print a task tree with one line per node."""
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    def label(node: TreeNode) -> Text:
        parts = [
            node.state,
            f"pid {node.pid}" if node.pid is not None else "",
            f"{node.age_s:.1f} s" if node.age_s else "",
        ]
        text = Text(f"{node.kind} ")
        text.append(_clean(node.name), style="bold")
        return text.append("  " + "  ".join(part for part in parts if part), style="dim")

    def grow(branch: Tree, node: TreeNode) -> None:
        for child in node.children:
            grow(branch.add(label(child)), child)

    root = Tree(label(node))
    grow(root, node)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(root)


def say_receipt(receipt: StopReceipt) -> None:
    """Print a stop's receipt in a few lines."""
    say(f"{receipt.outcome} after {receipt.elapsed_s * 1000:.0f} ms: {ended(receipt)}")
    if receipt.forced:
        say(f"forced: {', '.join(map(_clean, receipt.forced))}")
    for left in receipt.abandoned:
        say(f"abandoned: {left.kind} {_clean(left.name)}; its output no longer counts")
    if receipt.survivors:
        say(f"not proven dead: pid {', '.join(map(str, receipt.survivors))}")


def ended(receipt: StopReceipt) -> str:
    """Return a text with the numbers of tasks, threads and processes that a stop ended."""
    stopped = receipt.stopped
    counts = ((stopped.tasks, "task"), (stopped.threads, "thread"), (stopped.processes, "process"))
    return ", ".join(counted(count, name) for count, name in counts if count) or "nothing was running"


def counted(count: int, name: str) -> str:
    """Return a count with its noun: ``1 run``, ``2 processes``."""
    return f"{count} {name}{'' if count == 1 else 'es' if name.endswith('s') else 's'}"


def age(at: float) -> str:
    """Return in short form how long ago the time `at` was."""
    seconds = max(0.0, system_clock.now() - at)
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def clock_time(at: float) -> str:
    """Return a time of day in this machine's time zone."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def _clean(text: str) -> str:
    """Replace control characters, so that text from agents and users cannot control the terminal."""
    return "".join(character if character.isprintable() else "·" for character in text)
