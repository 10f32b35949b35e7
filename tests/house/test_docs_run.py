"""The code in the README and the docs is run, block by block, page by page.

Blocks of `python` are programs, blocks of `sh` are typed into a shell; both run in order, in a folder of the
page's own.
A comment in the line before a block says what is different about it:

    <!-- file: agent.py -->         the block is written to that file
    <!-- serve: agent:agent -->     what comes after talks to a server with this agent
    <!-- fails: 1 -->               the exit code is this one
    <!-- not run: why -->           it is only compiled (python), or not looked at (sh)

A page that mentions 127.0.0.1:8420 in a block that is run gets a server of its own, on a free port.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.proof.storm.server import free_port
from tests.house.serving import server, serving_environment

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "tutorial.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "docs" / "explanation").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
FENCE = re.compile(r"(?:^<!-- ?(.*?) ?-->\n)?^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOME = "127.0.0.1:8420"


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    word: str = ""
    value: str = ""


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    blocks = []
    for found in FENCE.finditer(text):
        word, _, value = (found[1] or "").partition(":")
        line = text.count("\n", 0, found.start(3)) + 1
        blocks.append(Block(found[2], found[3], line, word.strip(), value.strip()))
    return blocks


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
