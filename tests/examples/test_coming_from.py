"""What the five reports were about, ported: each program shows that it holds, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "coming_from"
SHOWN = {
    "mofa.py": [
        "build, crawl, left node, right node, sensor, think, tick: gone",
        "survivors: [], abandoned: []",
        "message: interrupted",
        "branches: build, crawl, graph, parallel agents, runner, sensor, think, tick",
        "left in the session: 0",
    ],
    "hermes_tools.py": [
        "alice: heard: also run the tests",
        "alice's first run: interrupted, gone, survivors: []",
        "terminals at work: ['matrix:bob']\nbob's run: running",
        "bob's session: gone, survivors: []\nterminals at work: []",
    ],
    "cleveragents.py": [
        "80 results",
        "closed: gone; streams left: 0; every task accounted for: True\nleft in the session: 0",
    ],
    "hermes_gateway.py": [
        "started, then queued",
        "seen [picture: a boat] what is this?\nseen [picture: a boat] and this?",
        "/stop: gone; interrupted\nseen [picture: a boat] still there?",
        "/status: idle\nrefused: busy\nagents at once, at most: 1",
    ],
    "spoonos.py": [
        "question 0 (memory: 0 entries)\nthinking about question 1 (memory: 2 entries)",
        "state: idle\n3 readers, 1 text: 'thinking about a stream (memory: 8 entries)'",
        "memory: 150 notes, in order: True",
        "from outside: wait_expired; spoon is idle\nother: gone",
    ],
}


def test_every_report_has_its_program() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == SHOWN.keys()


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_a_ported_scenario_holds_and_leaves_no_process(name: str, tmp_path: Path) -> None:
    mark = str(tmp_path)
    argv = [sys.executable, "-W", "error", str(FOLDER / name)]
    environment = os.environ | {"COMING_FROM": mark}
    result = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert [text for text in SHOWN[name] if text not in result.stdout] == [], result.stdout
    _, left = psutil.wait_procs(left_of(mark), timeout=30)  # a reaper may end a moment after its host
    assert left == []


def test_a_process_that_is_left_would_be_seen(tmp_path: Path) -> None:
    mark = str(tmp_path)
    with subprocess.Popen(["sleep", "60"], env=os.environ | {"COMING_FROM": mark}) as left:
        try:
            assert [process.pid for process in left_of(mark)] == [left.pid]
        finally:
            left.kill()


def left_of(mark: str) -> list[psutil.Process]:
    """The processes that have the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("COMING_FROM") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
