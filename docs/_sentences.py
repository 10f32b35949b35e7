"""Draw sentences at random from all that a user of Holdfast reads, for a reviewer to judge.

python docs/_sentences.py --seed 1 --count 40

Sources: README.md, the pages in docs/, the help texts of the command line, error messages and hints, and docstrings of
public names. Code, generated pages, tables of symbols and sentences of fewer than five words are left out. Each
sentence is drawn with the same probability. The same seed draws the same sentences from the same texts.
"""

from __future__ import annotations

import argparse
import ast
import random  # noqa: TID251  # drawn with a seed of the caller
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("readme", "docs", "help", "errors", "docstrings")
SHORTEST = 5
GENERATED_FOLDERS = frozenset({"_build", "generated", "measured"})

NOT_PROSE = re.compile(
    r"^( *)(```|~~~|:::).*?^\1\2|<!-- table: begin -->.*?<!-- table: end -->|<!--.*?-->", re.DOTALL | re.MULTILINE
)
"""Code, directives, generated tables and comments of a page."""

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence, where it begins, and the source that it comes from."""

    source: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.text}"


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, list item, table cell or message, with the number of its first line."""

    line: int
    text: str


def read_pool(root: Path = ROOT) -> list[Sentence]:
    """Return all sentences of all sources, in a fixed order."""
    pages = sorted(path for path in (root / "docs").rglob("*.md") if not GENERATED_FOLDERS & set(path.parts))
    modules = sorted((root / "src" / "holdfast").rglob("*.py"))
    return [
        *sentences_of(root, root / "README.md", "readme"),
        *(sentence for page in pages for sentence in sentences_of(root, page, "docs")),
        *(sentence for module in modules for sentence in sentences_of_module(root, module)),
    ]


def sentences_of(root: Path, page: Path, source: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown page."""
    for block in blocks_of_markdown(page.read_text("utf-8")):
        yield from split(block, source, page.relative_to(root).as_posix())


def sentences_of_module(root: Path, path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a Python module: docstrings, help texts and errors."""
    tree = ast.parse(path.read_text("utf-8"))
    name = path.relative_to(root).as_posix()
    of_command_line = "cli" in path.parts
    for source, node in texts_of(tree, of_command_line=of_command_line):
        for block in [Block(node.lineno, text_of(node))] if source == "errors" else blocks_of_docstring(node):
            yield from split(block, source, name)


def texts_of(tree: ast.Module, *, of_command_line: bool) -> Iterator[tuple[str, ast.expr]]:
    """Yield the texts of a module with their sources. A docstring of a command is a help text."""
    for docstring, is_command in public_docstrings(tree):
        yield ("help" if of_command_line and is_command else "docstrings"), docstring
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            is_typer = of_command_line and (name_of(node.func) in {"Option", "Argument", "Typer", "command"})
            for keyword in node.keywords:
                if keyword.arg in {"help", "epilog"} and is_typer and is_text(keyword.value):
                    yield "help", keyword.value
                elif keyword.arg == "hint":
                    yield from (("errors", text) for text in outermost_texts(keyword.value))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (("errors", text) for argument in node.exc.args for text in outermost_texts(argument))
        elif isinstance(node, ast.Assign) and any(name_of(target) == "default_hint" for target in node.targets):
            yield from (("errors", text) for text in outermost_texts(node.value))


def public_docstrings(node: Definition, *, is_command: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the docstrings of a definition and of the public names in it, and whether each is a command's."""
    before: ast.stmt | None = None
    for statement in node.body:
        if isinstance(statement, ast.Expr) and is_text(statement.value):
            if statement is node.body[0]:
                yield statement.value, is_command
            elif isinstance(before, ast.Assign | ast.AnnAssign) and not is_private(before):
                yield statement.value, False
        elif is_public(statement) and isinstance(node, ast.Module | ast.ClassDef):
            yield from public_docstrings(statement, is_command=has_options(statement))
        before = statement


def is_public(statement: ast.stmt) -> TypeGuard[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return whether a statement defines a class or function with a public name."""
    return isinstance(
        statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) and not statement.name.startswith("_")


def is_private(assignment: ast.Assign | ast.AnnAssign) -> bool:
    """Return whether a value is assigned to private names only."""
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    return all(name_of(target).startswith("_") for target in targets)


def has_options(node: Definition) -> bool:
    """Return whether a definition is a command: a function that returns an exit code."""
    return isinstance(node, ast.FunctionDef) and node.returns is not None and "Exit" in ast.unparse(node.returns)


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name, or an empty text."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_text(node: ast.expr) -> bool:
    """Return whether an expression is a text, formatted or not."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def outermost_texts(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the texts in an expression, but none that is part of a formatted one."""
    if isinstance(node, ast.expr) and is_text(node):
        yield node
    else:
        for below in ast.iter_child_nodes(node):
            yield from outermost_texts(below)


def text_of(node: ast.expr) -> str:
    """Return a text; expressions in a formatted one are shown in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    return str(node.value) if isinstance(node, ast.Constant) else ""


def blocks_of_docstring(node: ast.expr) -> Iterator[Block]:
    """Yield the paragraphs and parameters of a docstring, without drawings and examples."""
    lines = text_of(node).expandtabs().splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    in_section = False
    kept = []
    for line in lines[:1] + [line[margin:] for line in lines[1:]]:
        text = line
        if re.fullmatch(r"(Parameters|Raises|Returns|Yields|Invariants):", line):
            in_section, text = True, ""
        elif line and not line.startswith(" "):
            in_section = False
        elif in_section:
            # An entry is "name: text", its further lines are indented once more.
            text = re.sub(r"^ {4}(?! )(\*{0,2}[\w`, ./]+: )?", "- ", line)
        elif line.startswith("    "):
            text = ""
        kept.append(text)
    yield from blocks_of_markdown("\n".join(kept), first=node.lineno)


def blocks_of_markdown(text: str, *, first: int = 1) -> Iterator[Block]:
    """Yield the paragraphs, list items and table cells of a text, without code, comments, directives and headings."""
    text = NOT_PROSE.sub(lambda found: "\n" * found[0].count("\n"), text)
    begin, paragraph = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], first):
        is_item = re.match(r"\s*([-*]|\d+\.) ", line)
        is_row = line.lstrip().startswith("|")
        if not line.strip() or is_item or is_row or line.startswith(("#", ">")):
            if paragraph:
                yield Block(begin, "\n".join(paragraph))
            paragraph = []
        if is_row:
            yield from (Block(number, cell) for cell in re.split(r"(?<!\\)\|", line))
        elif line.strip() and not line.startswith("#"):
            begin = begin if paragraph else number
            paragraph.append(line)


def split(block: Block, source: str, path: str) -> Iterator[Sentence]:
    """Yield the sentences of a block that have enough words."""
    start = 0
    for end in [*re.finditer(r"(?<!e\.g)(?<!i\.e)[.!?][\"')*_]*\s+(?=[\"'(*_\[`]*[A-Z`0-9])", block.text), None]:
        text = block.text[start : end.end() if end else None]
        line = block.line + block.text.count("\n", 0, start + len(text) - len(text.lstrip()))
        start = end.end() if end else start
        sentence = " ".join(re.sub(r"^\s*([-*]|\d+\.) ", "", text).split())
        if count_words(sentence) >= SHORTEST:
            yield Sentence(source, path, line, sentence)


def count_words(sentence: str) -> int:
    """Count the words, without code, targets of links and symbols."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|\{[^}]*\}", " ", sentence)
    return len(re.findall(r"\b[A-Za-z][A-Za-z'’-]*", prose))


def draw(pool: list[Sentence], *, seed: int, count: int) -> list[Sentence]:
    """Draw sentences with equal probability."""
    return random.Random(seed).sample(pool, min(count, len(pool)))


def main() -> None:
    """Print a draw, a sentence a line."""
    parser = argparse.ArgumentParser(
        description="Draw sentences at random from README, docs, help, errors, docstrings."
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    for sentence in draw(read_pool(), seed=options.seed, count=options.count):
        print(sentence)


if __name__ == "__main__":
    main()
