"""Every example runs as it is, and prints what it is there to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.proof.storm.server import free_port
from tests.house.serving import server, serving_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "parallel.py": [
        "both: 'the library has two books on Lima\\n\\nthe archive has a map of Lima'",
        "quickest: 'the library has two",
        "patient: 'the library",
        "strict: BranchesFailed: 0 of 3 branches completed, 3 must: child broken failed: ConnectionError: no such",
        "interrupted as a result: library, stuck",
    ],
    "sequence.py": ["3: a draft with beginning, middle and end of a voyage, in three", "the answer came in 13 pieces"],
    "route.py": [
        "billing looks at: my invoice is wrong\nrepairs looks at: my lamp",
        "UnknownBranch: 'choose' answered 'sales'",
        "(its branches are: billing, repairs)",
    ],
    "supervised.py": [
        "the feed was read at try 3\n\nindexed at try 3",
        "TooManyRestarts: more than 2 restarts within 10 s: child hopeless failed: ValueError: no chance; ",
    ],
    "fan_out.py": ["10,000 squares, 50 sums, ['first', 'secon']", "outcome: gone, 501 tasks ended"],
    "scheduled.py": [
        "first tick: done: look for news",
        "by hand: done: weekly report",
        "after the restart: done: look for news",
        "news: paused, fired True, missed True",
        "weekly: active, fired True, missed False",
        "refused: invalid_schedule: '0 0 30 2 *'",
    ],
    "periodic.py": [
        "25.1 °C at reading 5",
        "'the siren is off'",
        "outcome: gone",
        "a tick ended early: the next tick came",
    ],
    "debate.py": ["Bob argues for coffee, having heard 2\ntea wins with 2 of 3 votes"],
    "echo.py": ["You said: hello", "4. assistant: You said: and again"],
    "streaming.py": ["1 2 3 4 5"],
    "sync_agent.py": ["['16 letters', '16 letters', '16 letters']"],
    "interrupt.py": ["outcome: gone", "first message: interrupted (changed my mind): working…", "stop: gone"],
    "replayable.py": ["ended with -9", "1 run resumed", "duplicate: completed: charged a teapot", "['a teapot']"],
    "process_tree.py": ["outcome: gone, survivors: []"],
    "client.py": ["message.accepted … "],
    "model_agent.py": ["tool.finished  190", "child.finished", "375 km in all.", "3 steps, 3 calls"],
    "approval.py": [
        "asked: pay {'to': 'Bob', 'amount': 2000}",
        "still open after the restart: pay to Bob",
        "the amount is too high",
        "pay: ok: paid 20 to Ann",
    ],
    "steering.py": [
        "steer: steering\nI heard: hotels in Oslo | only cheap ones",
        "first message: superseded",
        "['hotels in Lima']",
    ],
    "reactive_pipeline.py": [
        "21 is fine; 35 is hot; 19 is fine",
        "cellar: ValueError: the sensor is broken",
        "5 readings: 4 done, 1 failed",
        "left: 0 in flight, 0 streams",
    ],
    "history.py": ["answer 2 to 'where is this?' with ['map.png']", "2 of 4 entries", "1 attachment", "summary: They"],
    "own_tool.py": ["connected\noutput: 3", "error: start must be 5 or less", "note: ok: 1", "closed"],
    "langgraph_graph.py": [
        "(looking up a teapot)\nasked: a teapot costs 80. Order it?\nOrdered a teapot.",
        "You have ordered: a teapot\nYou have ordered: nothing",
    ],
    "mcp_tools.py": ["tools: ['clock_add_hours']", "['3']"],
}


_TRACEBACK = r"  \| |"
FAILURES = {
    "parallel.py": _TRACEBACK + "child 'broken' failed: ConnectionError: no such index",
    "reactive_pipeline.py": _TRACEBACK + "agent 'judge' failed: ValueError: the sensor is broken",
    "route.py": _TRACEBACK + "agent 'desk' failed: UnknownBranch: ",
    "supervised.py": _TRACEBACK + "(child|agent) '[a-z]+' failed: (ConnectionError|ValueError|TooManyRestarts): ",
}
"""What those log whose agents fail on purpose: the failure and its traceback, and nothing else."""
SERVERS = {"in_a_web_app.py"}
"""Those that serve until a signal comes: `tests/server/test_lifespan.py` runs it."""


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SHOWN.keys() | SERVERS


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_shows_what_it_promises(name: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    port = free_port()
    environment = serving_environment(port)
    if name == "client.py":
        with server(tmp_path, environment):
            result = run([*argv, f"http://127.0.0.1:{port}"], tmp_path, environment)
    else:
        result = run(argv, tmp_path, environment)
    said = [line for line in result.stderr.splitlines() if not re.match(FAILURES.get(name, "(?!)"), line)]
    assert (result.returncode, said) == (0, []), result.stdout
    assert bool(result.stderr) is (name in FAILURES)
    assert [text for text in SHOWN[name] if text not in result.stdout] == [], result.stdout


def run(argv: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
