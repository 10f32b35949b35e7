"""The code in the docs is run, block by block, page by page. (For README and tutorial see ``test_reader.py``.)

Blocks of `python` are programs, blocks of `sh` are typed into a shell; both run in order, in a folder of the
page's own.
A comment in the line before a block says what is different about it:

    <!-- file: agent.py -->         the block is written to that file, which the paragraph before it names
    <!-- serve: agent:agent -->     the block is `holdfast serve agent:agent`: what comes after talks to that server
    <!-- fails: 1 -->               the exit code is this one
    <!-- not run: why -->           it is only compiled (python), or not looked at (sh)

A page that mentions 127.0.0.1:8420 in a block that is run gets a server of its own, on a free port: the demo server,
which its box "Before you start" asks for, unless it serves something else first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.proof.storm.server import free_port
from tests.house.serving import server, serving_environment

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PAGES = [
    ROOT / "docs" / "index.md",
    *GUIDES,
    *sorted((ROOT / "docs" / "explanation").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
FENCE = re.compile(r"(?:^<!-- ?([^\n]*?) ?-->\n)?^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOME = "127.0.0.1:8420"


@dataclass(frozen=True)
class Block:
    """A block of code; `before` is the paragraph before it."""

    language: str
    text: str
    line: int
    word: str = ""
    value: str = ""
    before: str = ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    blocks = []
    for found in FENCE.finditer(text):
        word, _, value = (found[1] or "").partition(":")
        line = text.count("\n", 0, found.start(3)) + 1
        before = text[: found.start()].rstrip().rpartition("\n\n")[2]
        blocks.append(Block(found[2], found[3], line, word.strip(), value.strip(), before))
    return blocks


def hidden(blocks: Iterable[Block]) -> list[int]:
    """Return the lines of blocks that need something that only their comments say: a file's name, or a command."""
    return [
        block.line
        for block in blocks
        if (block.word == "file" and f"`{block.value}`" not in block.before)
        or (block.word == "serve" and block.text.strip() != f"holdfast serve {block.value}".strip())
    ]


def is_run(block: Block) -> bool:
    return block.word != "not run"


def unlogged(said: str) -> list[str]:
    """What was written to stderr besides the log of agents that fail on purpose."""
    lines = said.splitlines()
    marked = [line.startswith("  | ") for line in [*lines, ""]]
    return [line for at, line in enumerate(lines) if not marked[at] and not marked[at + 1]]


def run(block: Block, folder: Path, environment: dict[str, str], page: str) -> None:
    if block.word == "file":
        target = folder / block.value
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(block.text)
        return
    argv = [sys.executable, "-W", "error", "-"] if block.language == "python" else ["sh", "-eu", "-s"]
    text = block.text.replace(HOME, f"127.0.0.1:{environment['HOLDFAST_PORT']}").replace(".venv/bin/", "")
    result = subprocess.run(
        argv, input=text, capture_output=True, text=True, cwd=folder, env=environment, timeout=60, check=False
    )
    wanted = int(block.value) if block.word == "fails" else 0
    assert result.returncode == wanted, (
        f"{page}, line {block.line}: exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    )
    if block.language == "python" and not wanted:
        assert unlogged(result.stderr) == [], f"{page}, line {block.line}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists() and blocks_of(page)], ids=lambda p: p.stem)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    environment = serving_environment(free_port(), PYTHONPATH=str(tmp_path))
    blocks = blocks_of(page)
    for block in blocks:
        if block.language == "python":
            compile(block.text, f"{page.name}:{block.line}", "exec", flags=0x2000)  # top-level await allowed
    with ExitStack() as stack:
        running = False
        for block in filter(is_run, blocks):
            needs_one = block.word != "file" and (HOME in block.text or "holdfast " in block.text)
            if block.word == "serve" or (needs_one and not running):
                stack.close()
                stack.enter_context(server(tmp_path, environment, block.value if block.word == "serve" else ""))
                running = True
            if block.word != "serve":
                run(block, tmp_path, environment, page.name)


def test_a_block_that_is_not_run_says_why() -> None:
    silent = [
        (page.name, block.line)
        for page in PAGES
        if page.exists()
        for block in blocks_of(page)
        if block.word not in ("", "file", "serve", "fails", "not run") or (block.word and not block.value)
    ]
    assert silent == []


def test_a_reader_sees_the_name_of_each_file_and_the_command_of_each_server() -> None:
    pages = [ROOT / "docs" / "index.md", *GUIDES]
    assert {page.name: lines for page in pages if (lines := hidden(blocks_of(page)))} == {}


def test_a_name_or_a_command_that_stands_only_in_a_comment_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    file, serve, send = (
        "<!-- file: a.py -->\n```python\n1\n```\n",
        "<!-- serve: a:b -->\n```sh\n{}\n```\n",
        "holdfast ps",
    )
    page.write_text(f"Save this as `a.py`:\n\n{file}\nServe it:\n\n{serve.format('holdfast serve a:b')}")
    assert hidden(blocks_of(page)) == []
    page.write_text(f"`a.py` is a file.\n\nAn agent:\n\n{file}\n{serve.format(send)}")
    assert hidden(blocks_of(page)) == [7, 12]


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)
def test_a_guide_begins_with_what_must_run_and_ends_with_how_to_check_it(page: Path) -> None:
    text = page.read_text("utf-8")
    box = text.find("\n:::{admonition} Before you start\n")
    first = min((at for mark in ("\n```", "\n## ") if (at := text.find(mark)) > 0), default=len(text))
    assert 0 < box < first, "the box stands after the introduction"
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[-1] == "Check that it worked"
