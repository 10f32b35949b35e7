"""The peer: ``langgraph dev`` with a no-op graph, at the best setting that was found, in an environment of its own.

The environment is made on demand from its own lock; where that fails, the reason is printed and its rows are left out.
It keeps everything in memory; Holdfast's figures beside it are durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.load import load, request

__all__ = ["PeerFigures", "PeerMissing", "measure"]

ROOT = Path(__file__).parent.parent
SETTINGS = (10, 50, 100)
"""Runs at the same time that are tried; the best one counts."""
START_S = 90.0

GRAPH = """\
from langgraph.graph import END, START, MessagesState, StateGraph

def noop(state):
    return {"messages": [{"role": "assistant", "content": "ok"}]}

graph = StateGraph(MessagesState).add_node("noop", noop).add_edge(START, "noop").add_edge("noop", END).compile()
"""


class PeerMissing(Exception):
    """The peer cannot be installed or started here; the text says why."""


class PeerFigures:
    """What was measured.

    Parameters:
        runs_per_s: no-op runs a second over `sessions` threads.
        first_event_s: from the request for a run to its first event, the median.
        setting: runs at the same time of the best setting.
        version: of langgraph-api.
    """

    def __init__(self, runs_per_s: float, first_event_s: float, setting: int, version: str) -> None:
        self.runs_per_s = runs_per_s
        self.first_event_s = first_event_s
        self.setting = setting
        self.version = version


def _environment() -> Path:
    """The peer's Python: an environment made from ``requirements/bench.txt``."""
    command = [sys.executable, str(ROOT / "requirements" / "install.py"), "bench", str(ROOT / ".venv-bench")]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise PeerMissing("its environment cannot be made from requirements/bench.txt; what pip said is above")
    return ROOT / ".venv-bench" / "bin" / "python"


@contextlib.contextmanager
def _server(python: Path, folder: str, at_a_time: int) -> Iterator[int]:
    """``langgraph dev`` on a free port."""
    (Path(folder) / "graph.py").write_text(GRAPH)
    (Path(folder) / "langgraph.json").write_text(
        json.dumps({"dependencies": ["."], "graphs": {"noop": "./graph.py:graph"}})
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "LANGSMITH_TRACING": "false",
        "LANGGRAPH_CLI_NO_ANALYTICS": "1",
        "LOG_LEVEL": "error",
    }
    command = [
        str(python.parent / "langgraph"),
        "dev",
        "--no-browser",
        "--no-reload",
        "--port",
        str(port),
        "--n-jobs-per-worker",
        str(at_a_time),
    ]
    with open(Path(folder) / "server.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_S
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = (Path(folder) / "server.log").read_text().strip().splitlines()[-3:]
                    raise PeerMissing(f"it did not start: {' / '.join(tail)}")
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ok", timeout=1):
                    break
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _post(port: int, path: str, body: object) -> dict[str, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        parsed: dict[str, str] = json.loads(answer.read())
        return parsed


def _version(python: Path) -> str:
    """Of langgraph-api."""
    program = "from importlib.metadata import version; print(version('langgraph-api'))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


RUN = {"assistant_id": "noop", "input": {"messages": [{"role": "user", "content": "x"}]}}


async def _first_event_s(port: int, count: int) -> float:
    """The median time from the request for a streamed run on a new thread to its first event."""
    taken = []
    for _ in range(count):
        thread = _post(port, "/threads", {})["thread_id"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.perf_counter()
        writer.write(request("POST", f"/threads/{thread}/runs/stream", json.dumps(RUN).encode()))
        await reader.readuntil(b"event: ")
        taken.append(time.perf_counter() - began)
        writer.close()
    return statistics.median(taken)


def measure(*, sessions: int, seconds: float) -> PeerFigures:
    """Measure the peer at each setting, and return the best figures.

    Raises:
        PeerMissing: it cannot be installed or started here.
    """
    python = _environment()
    best: PeerFigures | None = None
    body = json.dumps(RUN).encode()
    for at_a_time in SETTINGS:
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
            _server(python, folder, at_a_time) as port,
        ):
            threads = [_post(port, "/threads", {})["thread_id"] for _ in range(sessions)]
            payloads = [request("POST", f"/threads/{thread}/runs/wait", body) for thread in threads]
            asyncio.run(load(port, payloads, 1.0))
            rate, _ = asyncio.run(load(port, payloads, seconds))
            if best is None or rate > best.runs_per_s:
                first_s = asyncio.run(_first_event_s(port, 15))
                best = PeerFigures(rate, first_s, at_a_time, _version(python))
    assert best is not None
    return best


if __name__ == "__main__":
    figures = measure(sessions=50, seconds=5.0)
    print(
        f"langgraph dev {figures.version}: {figures.runs_per_s:.0f} runs/s with {figures.setting} at a time, "
        f"first event {figures.first_event_s * 1000:.0f} ms"
    )
