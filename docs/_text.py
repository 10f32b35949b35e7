"""Markdown building blocks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

import msgspec


def plain(docstring: str) -> str:
    """Return a docstring as Markdown: one kind of inline code, and nothing that MyST takes for syntax."""
    return re.sub(r"``([^`]*)``", r"`\1`", inspect.cleandoc(docstring))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def code(text: object) -> str:
    """Return inline code, or an empty text for an empty one."""
    return f"`{text}`" if text != "" else ""


def fields_of(struct: type[msgspec.Struct], *, but: Iterable[str] = ()) -> str:
    """Return the fields of a wire value, optional ones marked."""
    return ", ".join(
        code(field.name) + ("" if field.required else "?")
        for field in msgspec.structs.fields(struct)
        if field.name not in but
    )
