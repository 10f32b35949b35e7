"""The drawer of sentences (`docs/_sentences.py`) reads every source, and draws the same from the same seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "_sentences.py"
SOURCES = ("readme", "docs", "help", "errors", "docstrings")

MODULE = '''"""Begin with the docstring of the module. It has a second sentence here."""

LIMIT = 3
"""Largest number of things in a room."""


class Room:
    """A room that has a few doors.

    Parameters:
        doors: number of doors that lead outside.

    Example:
        this is code and not a sentence
    """

    def _hidden(self):
        """Nobody outside of the module sees this."""


def leave(room):
    if not room:
        raise ValueError(f"the room {room!r} has no open door", hint="open a door of the room first")
'''
PAGE = """# A heading is not a sentence here

One paragraph with two lines
and a [link](target.md). Then a `code` word in a second one.

- An item of a list, with words.

| name | meaning of the name |
|---|---|
| `x` | what the letter stands for here |

```python
this is code and not a sentence
```
"""


@pytest.fixture(scope="module", autouse=True)
def find_the_program() -> None:
    sys.path.insert(0, str(PROGRAM.parent))


def test_every_source_is_in_the_pool() -> None:
    from _sentences import read_pool

    pool = read_pool(ROOT)
    assert {sentence.source for sentence in pool} == set(SOURCES)
    assert len(pool) > 5_000
    assert not [sentence for sentence in pool if "docs/generated" in sentence.path]


def test_each_sentence_stands_on_its_line() -> None:
    from _sentences import draw, read_pool

    for sentence in draw(read_pool(ROOT), seed=1, count=200):
        line = (ROOT / sentence.path).read_text("utf-8").splitlines()[sentence.line - 1]
        assert sentence.source == "errors" or sentence.text.split()[0] in line, sentence


def test_prose_of_a_module_is_read_and_its_code_is_not(tmp_path: Path) -> None:
    from _sentences import sentences_of_module

    path = tmp_path / "module.py"
    path.write_text(MODULE)
    found = [(one.source, one.line, one.text) for one in sentences_of_module(tmp_path, path)]
    assert sorted(found, key=lambda one: one[1:]) == [
        ("docstrings", 1, "Begin with the docstring of the module."),
        ("docstrings", 1, "It has a second sentence here."),
        ("docstrings", 4, "Largest number of things in a room."),
        ("docstrings", 8, "A room that has a few doors."),
        ("docstrings", 11, "number of doors that lead outside."),
        ("errors", 23, "open a door of the room first"),
        ("errors", 23, "the room {room} has no open door"),
    ]


def test_prose_of_a_page_is_read_and_its_code_is_not(tmp_path: Path) -> None:
    from _sentences import sentences_of

    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert [(one.line, one.text) for one in sentences_of(tmp_path, path, "docs")] == [
        (3, "One paragraph with two lines and a [link](target.md)."),
        (4, "Then a `code` word in a second one."),
        (6, "An item of a list, with words."),
        (10, "what the letter stands for here"),
    ]


def test_a_seed_draws_the_same_sentences_again() -> None:
    def drawn(seed: int) -> list[str]:
        command = [sys.executable, str(PROGRAM), "--seed", str(seed), "--count", "40"]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return result.stdout.splitlines()

    first = drawn(1)
    assert len(first) == 40
    assert drawn(1) == first
    assert drawn(2) != first
