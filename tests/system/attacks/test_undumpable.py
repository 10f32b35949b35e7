"""No program of the same user reads the secrets of a server: not its environment or memory, nor its helpers'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.procfs import descriptor_count
from tests.cli import processes
from tests.cli.processes import LIMIT_S, served

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is Linux's")

SECRET = "sk-not-for-programs-of-tools"
PLANTED = {"ANTHROPIC_API_KEY": SECRET, "DATABASE_URL": SECRET, "MY_OWN": SECRET}

AGENT = """
import json, os

def look() -> dict:
    return {"pid": os.getpid(), "environment": dict(os.environ)}

async def agent(run):
    process = await run.process(["sleep", "60"])
    first = await run.call(look, on="process")
    second = await run.call(look, on="process")
    seen = {"worker": first["pid"], "again": second["pid"], "environment": first["environment"], "program": process.pid}
    with open("seen.part", "w") as file:
        json.dump(seen, file)
    os.rename("seen.part", "seen")
    await run.interrupt.wait()
"""

POWERLESS = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)
libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
if len(sys.argv) > 1:
    os.execv(sys.argv[1], sys.argv[1:])
"""
"""Root without its powers is a user like others: before this kernel's eyes it may look at its own processes only."""

PROBE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
for pid in map(int, sys.argv[1:]):
    got = []
    for name in ("environ", "mem", "maps", "auxv"):
        try:
            open(f"/proc/{pid}/{name}", "rb").close()
            got.append(name)
        except PermissionError:
            pass
    try:
        got.append(os.readlink(f"/proc/{pid}/fd/0"))
    except PermissionError:
        pass
    if libc.ptrace(16, pid, 0, 0) == 0:
        os.waitpid(pid, 0x40000000)
        libc.ptrace(17, pid, 0, 0)
        got.append("ptrace")
    print(pid, got)
"""


def probed(pids: list[int]) -> dict[int, str]:
    """What a program of the same user gets of each process."""
    done = subprocess.run(
        [sys.executable, "-c", POWERLESS, sys.executable, "-c", PROBE, *map(str, pids)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    lines = (line.split(" ", 1) for line in done.stdout.splitlines())
    return {int(pid): got for pid, got in lines}


@pytest.fixture(autouse=True)
def _powerless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers run as those do that are not root's."""
    monkeypatch.setattr(processes, "HOLDFAST", [sys.executable, "-c", POWERLESS, *processes.HOLDFAST])


@contextmanager
def working(folder: Path, **environment: str) -> Iterator[tuple[int, dict[str, Any], list[int]]]:
    """A server with a run that has a program and a worker: its pid, what the agent saw, and the pids of the helpers."""
    (folder / "closed_agent.py").write_text(AGENT)
    with served(folder, "closed_agent:agent", **PLANTED, **environment) as server:
        assert server.run("send", "go").returncode == 0
        deadline = time.monotonic() + LIMIT_S
        while not (folder / "seen").exists():
            assert time.monotonic() < deadline, "the agent has not got that far"
            time.sleep(0.02)
        seen = json.loads((folder / "seen").read_text())
        below = procfs.descendants(server.process.pid)
        helpers = [pid for pid in below if (procfs.read_text(f"/proc/{pid}/comm") or b"").startswith(b"holdfast-")]
        yield server.process.pid, seen, helpers


def test_server_zygote_reapers_and_workers_show_nothing_to_others(tmp_path: Path) -> None:
    with working(tmp_path) as (server, seen, helpers):
        assert len(helpers) >= 3, "a zygote, the reaper of the program and that of the worker"
        closed = [server, seen["worker"], *helpers]
        assert probed(closed) == dict.fromkeys(closed, "[]")
        (program,) = probed([seen["program"]]).values()
        assert "environ" in program, "programs are not closed: their scopes are found by what they carry"


def test_the_helpers_were_started_without_the_secrets_and_a_worker_is_kept(tmp_path: Path) -> None:
    with working(tmp_path, HOLDFAST_WORKER_VARIABLES="MY_*") as (_, seen, helpers):
        assert seen["environment"]["MY_OWN"] == SECRET and "PATH" in seen["environment"]
        assert not {"ANTHROPIC_API_KEY", "DATABASE_URL"} & seen["environment"].keys()
        assert seen["worker"] == seen["again"], "it was not thrown away for what could not be seen of it"
        if os.geteuid() == 0:
            for pid in helpers:
                assert SECRET.encode() not in (procfs.read_text(f"/proc/{pid}/environ") or b"")


def test_a_worker_has_no_variable_that_was_not_named(tmp_path: Path) -> None:
    with working(tmp_path) as (_, seen, _):
        assert SECRET not in seen["environment"].values()


def test_a_server_can_be_opened_to_debuggers_and_then_only_the_server(tmp_path: Path) -> None:
    with working(tmp_path, HOLDFAST_DEBUGGERS="true") as (server, _, helpers):
        found = probed([server, *helpers])
        assert "environ" in found.pop(server) and set(found.values()) == {"[]"}


def test_descriptors_of_a_closed_process_can_be_counted(tmp_path: Path) -> None:
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); sys.stdin.read()"
    argv = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert descriptor_count(process.pid) in ((3,) if os.geteuid() == 0 else (3, None))
        process.stdin.close()
    assert descriptor_count(process.pid) is None
