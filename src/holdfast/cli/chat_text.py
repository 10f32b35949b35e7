"""Text of agents as lines of a terminal: wrapped between words by the cells they take, with Markdown and code styled.

Text arrives in pieces. Each line is final as soon as it is complete; the unfinished one is shown as it looks so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from holdfast.cli.output import printable

__all__ = ["LinePainter", "TextFlow", "fit_cells"]

_ROWS = 4
"""A line that needs more rows than these is shown in parts, so that its beginning does not have to wait for its end."""
_MAX_TABLE = 100
_MAX_CODE = 200
_MIN_COLUMNS = 20

_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,}) *([\w+#.-]*)[^`]*")
_HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*\s*")
_BULLET = re.compile(r"(\s*)[-*+] +(\S.*)")
_NUMBERED = re.compile(r"(\s*)(\d{1,9}[.)] +)(\S.*)")
_QUOTE = re.compile(r" {0,3}> ?(.*)")
_RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *")
_COLUMN = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")
_TABLE = re.compile(r"\s*\|.*")
_DELIMITERS = re.compile(r"\s*\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?")
_CELLS = re.compile(r"(?<!\\)\|")
_INLINE = re.compile(
    r"(?P<ticks>`+)(?P<code>[^`]+)(?P=ticks)(?!`)"
    r"|\*\*(?P<bold>[^\s*](?:[^*]*[^\s*])?)\*\*"
    r"|(?<![\w*])\*(?P<italic>[^\s*](?:[^*]*[^\s*])?)\*(?![\w*])"
    r"|\[(?P<label>[^\[\]]+)\]\((?P<url>[^()\s]+)\)"
)
_ASCII = str.maketrans({"•": "*", "│": "|", "─": "-", "┼": "+", "…": "~"})


class LinePainter:
    """Turns styled text into lines of a terminal.

    Parameters:
        columns: returns the width of the terminal.
        styled: whether lines contain styles.
        wide: whether the terminal can show characters that are not in ASCII, such as bullets.
    """

    def __init__(self, columns: Callable[[], int], *, styled: bool, wide: bool = True) -> None:
        self._columns = columns
        self._colors = ColorSystem.STANDARD if styled else None
        self._wide = wide
        self._console = Console(color_system=None, width=10_000, legacy_windows=False)

    @property
    def columns(self) -> int:
        """Cells that a line may take: all but the last, where some terminals wrap early."""
        return max(_MIN_COLUMNS, self._columns() - 1)

    def lines(self, text: Text, *, first: str = "", indent: str = "") -> list[str]:
        """Return the lines of a text: wrapped, the first one after `first`, all others after `indent`."""
        return [self.paint(line) for line in self.wrap(text, first=first, indent=indent)]

    def wrap(self, text: Text, *, first: str = "", indent: str = "", columns: int | None = None) -> list[Text]:
        """Return a text in lines that fit the terminal, or `columns`."""
        columns = self.columns if columns is None else columns
        if cell_len(first) > columns // 2:
            first = indent = ""
        rows = text.wrap(self._console, columns - cell_len(first), overflow="fold", tab_size=8)
        wrapped = []
        for number, row in enumerate(rows):
            row.rstrip()
            wrapped.append(Text(indent if number else first, style=text.style).append_text(row))
        return wrapped or [Text(first.rstrip())]

    def paint(self, line: Text) -> str:
        """Return a line with its styles as escape sequences."""
        shown = "".join(
            segment.style.render(segment.text, color_system=self._colors) if segment.style else segment.text
            for segment in line.render(self._console)
        )
        return shown if self._wide else shown.translate(_ASCII)


class TextFlow:
    """Text of one speaker as it streams: `add` and `end` return the lines that are final, `live` the unfinished ones.

    Parameters:
        painter: turns text into lines.
        markdown: whether to format Markdown and code; otherwise the text is only wrapped.
        style: style of all text, such as ``dim``.
    """

    def __init__(self, painter: LinePainter, *, markdown: bool = True, style: str = "") -> None:
        self._painter = painter
        self._markdown = markdown
        self._style = style
        self._open = ""
        self._shown = Text()  # the last row of an unfinished line whose earlier rows are final
        self._indent = ""
        self._blank = False
        self._fence = ""
        self._language = ""
        self._code: list[str] = []
        self._table: list[str] = []

    def add(self, text: str) -> list[str]:
        """Add a piece of text. Return the lines that are final now."""
        *lines, self._open = (self._open + printable(text.replace("\r", ""))).split("\n")
        final = [row for line in lines for row in self._final(line)]
        if not self._fence and not self._table and len(self._open) > _ROWS * self._painter.columns:
            final += self._begin_long_line()
        return final

    def end(self) -> list[str]:
        """Return the rest as final lines, and forget the text."""
        final = self._final(self._open) if self._open or self._shown else []
        final += self._end_table()
        self._open = self._fence = ""
        self._blank = False
        return final

    def live(self) -> list[str]:
        """Return what is not final yet, as it looks now."""
        rows = [row for line in self._table for row in self._rows(line)]
        return rows + (self._rows(self._open) if self._open or self._shown else [])

    def _final(self, line: str) -> list[str]:
        """Return the rows of a complete line, after those of a table that ends before it."""
        if self._fence:
            return self._code_line(line)
        if not self._shown and not line.strip():
            rows = self._end_table()
            self._blank = True
            return rows
        before = [""] if self._blank else []
        self._blank = False
        if self._markdown and not self._shown:
            if _TABLE.fullmatch(line) and len(self._table) < _MAX_TABLE:
                self._table.append(line)
                return before
            before += self._end_table()
            opened = _FENCE.fullmatch(line)
            if opened is not None:
                self._fence, self._language = opened[2], opened[3]
                self._code.clear()
                return [*before, self._painter.paint(Text(line.strip(), style="dim"))]
        rows = self._rows(line)
        self._shown, self._indent = Text(), ""
        return before + rows

    def _begin_long_line(self) -> list[str]:
        """Return the rows of an unfinished line but its last one, which is not full yet."""
        before = [""] if self._blank else []
        self._blank = False
        text, first, indent = self._formatted(self._open)
        *rows, last = self._painter.wrap(text, first=first, indent=indent)
        self._shown = last[len(indent) :] if last.plain.startswith(indent) else last
        if self._open.endswith(" "):
            self._shown.append(" ")
        self._indent = indent
        self._open = ""
        return before + [self._painter.paint(row) for row in rows]

    def _rows(self, line: str) -> list[str]:
        """Return a line that is neither code nor a complete table in rows."""
        if self._fence:
            return self._painter.lines(Text(line, style="dim"))
        text, first, indent = self._formatted(line)
        return self._painter.lines(text, first=first, indent=indent)

    def _formatted(self, line: str) -> tuple[Text, str, str]:
        """Return a line's text with its styles, the beginning of its first row, and that of its other rows."""
        style = self._style
        if self._shown:
            more = inline(line, style) if self._markdown else Text(line, style=style)
            return self._shown.copy().append_text(more), self._indent, self._indent
        if self._markdown:
            if found := _RULE.fullmatch(line):
                return Text("─" * min(40, self._painter.columns), style="dim"), "", ""
            if found := _HEADING.fullmatch(line):
                return inline(found[1], f"bold {style}".strip()), "", ""
            if found := _BULLET.fullmatch(line):
                return inline(found[2], style), f"{found[1]}• ", f"{found[1]}  "
            if found := _NUMBERED.fullmatch(line):
                return inline(found[3], style), f"{found[1]}{found[2]}", f"{found[1]}{' ' * len(found[2])}"
            if found := _QUOTE.fullmatch(line):
                return inline(found[1], "dim"), "│ ", "│ "
        body = line.lstrip(" ")
        first = line[: len(line) - len(body)]
        column = _COLUMN.match(line)  # of a list such as that of /help: its rows continue in their column
        if column is not None and cell_len(column[0]) <= self._painter.columns // 2:
            first, body = column[0], line[column.end() :]
        return inline(body, style) if self._markdown else Text(body, style=style), first, " " * cell_len(first)

    def _code_line(self, line: str) -> list[str]:
        """Return a line of a code block, highlighted in the context of the lines before."""
        closed = line.strip()
        if closed.startswith(self._fence) and not closed.strip(self._fence[0]):
            self._fence = ""
            return [self._painter.paint(Text(closed, style="dim"))]
        self._code.append(line)
        del self._code[:-_MAX_CODE]
        return self._painter.lines(highlighted("\n".join(self._code), self._language)[-1])

    def _end_table(self) -> list[str]:
        """Return the lines of the table that has just ended; lines that only look like one stay as they are."""
        rows, self._table = self._table, []
        if len(rows) < 2 or not _DELIMITERS.fullmatch(rows[1]):
            return [shown for row in rows for shown in self._rows(row)]
        return _table([_cells(row) for row in (rows[0], *rows[2:])], self._painter)


def inline(text: str, style: str) -> Text:
    """Return a text with code, bold, italic and links in styles instead of their marks."""
    shown = Text(style=style)
    at = 0
    for found in _INLINE.finditer(text):
        shown.append(text[at : found.start()])
        at = found.end()
        if found["code"]:
            shown.append(found["code"].strip(), "cyan")
        elif found["bold"]:
            shown.append_text(inline(found["bold"], "bold"))
        elif found["italic"]:
            shown.append_text(inline(found["italic"], "italic"))
        elif found["label"] == found["url"]:
            shown.append(found["url"], "underline")
        else:
            shown.append(found["label"], "underline").append(f" ({found['url']})", "dim")
    return shown.append(text[at:])


def highlighted(code: str, language: str) -> Sequence[Text]:
    """Return the lines of a program with the colours of its language."""
    if not language:
        return list(Text(code).split("\n", allow_blank=True))
    from rich.syntax import Syntax

    text = Syntax("", language, theme="ansi_dark", background_color="default").highlight(code)
    text.style = Style()
    text.rstrip()
    lines = text.split("\n", allow_blank=True)
    missing = code.count("\n") + 1 - len(lines)  # the highlighter leaves out blank lines at the end
    return [*lines, *(Text() for _ in range(missing))]


def fit_cells(text: str, cells: int) -> str:
    """Return `text`, shortened to a width; wide characters take two cells."""
    return text if cell_len(text) <= cells else f"{set_cell_size(text, max(0, cells - 1)).rstrip()}…"


def _cells(row: str) -> list[str]:
    inner = row.strip().removeprefix("|")
    inner = inner[:-1] if inner.endswith("|") and not inner.endswith("\\|") else inner
    return [cell.strip().replace("\\|", "|") for cell in _CELLS.split(inner)]


def _table(rows: list[list[str]], painter: LinePainter) -> list[str]:
    """Return a table in lines; columns that are too wide are wrapped."""
    count = len(rows[0])
    cells = [[inline(cell, "" if number else "bold") for cell in row[:count]] for number, row in enumerate(rows)]
    for row in cells:
        row += [Text() for _ in range(count - len(row))]
    widths = [min(painter.columns, max(row[n].cell_len for row in cells)) for n in range(count)]
    room = painter.columns - 3 * (count - 1)
    while sum(widths) > room and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for number, row in enumerate(cells):
        parts = [painter.wrap(cell, columns=width) for cell, width in zip(row, widths, strict=True)]
        for at in range(max(map(len, parts))):
            line = Text()
            for n, (part, width) in enumerate(zip(parts, widths, strict=True)):
                cell = part[at].copy() if at < len(part) else Text()
                cell.pad_right(width - cell.cell_len)
                line.append(" │ " if n else "", "dim").append_text(cell)
            line.rstrip()
            lines.append(painter.paint(line))
        if number == 0:
            lines.append(painter.paint(Text("─┼─".join("─" * width for width in widths), style="dim")))
    return lines
