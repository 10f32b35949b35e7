"""Habits of phrasing that we edit out: each pattern has a ceiling, which may only go down."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PATTERNS = {
    "is no": r"\b(is|are|was|were) no(ne|body|thing)?\b",
    "say": r"\b(say|says|said|saying)\b",
    "somebody": r"\b(somebody|nobody|everybody|anybody)\b",
    "go on": r"\b(go|goes|went|going) on\b",
    "told": r"\btold\b",
    "whoever": r"\bwhoever\b",
    "so many": r"\bso (many|long|much)\b",
    "docstring 'What'": r"\AWhat\b",
}
EXAMPLES = {
    "is no": "There is no file.",
    "say": "The log says why.",
    "somebody": "Nobody reads it.",
    "go on": "The run goes on.",
    "told": "The caller is told.",
    "whoever": "For whoever asks.",
    "so many": "Wait so long.",
    "docstring 'What'": "What is stored.",
}
CEILINGS = {
    "is no": 25,
    "say": 10,
    "somebody": 4,
    "go on": 0,
    "told": 7,
    "whoever": 1,
    "so many": 0,
    "docstring 'What'": 0,
}


def comments_of(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def strings_of(tree: ast.Module) -> Iterator[str]:
    """Yield all texts, docstrings included. One without a blank is an identifier, and f-strings come without code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def docstrings_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def count(source: str) -> dict[str, int]:
    tree = ast.parse(source)
    docstrings = list(docstrings_of(tree))
    prose = [*comments_of(source), *strings_of(tree)]
    return {
        name: sum(
            len(re.findall(pattern, text, re.IGNORECASE))
            for text in (docstrings if pattern.startswith(r"\A") else prose)
        )
        for name, pattern in PATTERNS.items()
    }


@cache
def counts() -> dict[str, int]:
    of_modules = [count(path.read_text("utf-8")) for path in sorted(SOURCE.rglob("*.py"))]
    return {name: sum(one[name] for one in of_modules) for name in PATTERNS}


@pytest.mark.parametrize("name", PATTERNS)
def test_no_new_text_falls_back_into_the_habit(name: str) -> None:
    hint = "reword the text that you added: it has one of the phrases that are being edited out"
    assert counts()[name] <= CEILINGS[name], hint


def test_no_ceiling_is_above_the_count() -> None:
    assert counts() == CEILINGS, f"lower the ceilings: CEILINGS = {counts()}"


@pytest.mark.parametrize("name", PATTERNS)
def test_one_more_in_a_docstring_is_seen(name: str) -> None:
    assert count(f'"""{EXAMPLES[name]}"""')[name] == 1


def test_comments_and_messages_are_read_and_code_is_not() -> None:
    source = 'say = 1  # it says so\nraise ValueError(f"{say} told {told(say)}")\npieces = ("say", "told")\n'
    assert count(source) == {**dict.fromkeys(PATTERNS, 0), "say": 1, "told": 1}
