"""The bombs of these tests end and stay few, also where Holdfast does nothing about them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.fence import PROCESSES, processes_of
from tests.system.attacks.hostile_host import BOMB, lives

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="processes are counted in /proc")

RAISED = """
import resource
from tests.runtime.fence import put_up_fence
put_up_fence()
before = resource.getrlimit(resource.RLIMIT_NPROC)
try:
    resource.setrlimit(resource.RLIMIT_NPROC, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
except (OSError, ValueError):
    print("refused", resource.getrlimit(resource.RLIMIT_NPROC) == before)
"""


def of_user(bomb: int, *, living_only: bool = False) -> int:
    return processes_of(50_000 + bomb % 10_000 if os.geteuid() == 0 else os.geteuid(), living_only)


def test_a_bomb_that_nobody_ends_stays_inside_its_fence_and_ends_by_itself(tmp_path: Path) -> None:
    trace = str(tmp_path / "lives")
    before = 0 if os.geteuid() == 0 else processes_of(os.geteuid())
    argv = [sys.executable, "-S", "-E", str(BOMB), "0.001", "8", "20", trace, "1.5"]
    most = 0
    with subprocess.Popen(argv) as bomb:
        end_at = time.monotonic() + 30
        living = before
        while most <= before or living > before:  # the dead wait for the machine's init, which may be busy
            bomb.poll()
            most = max(most, of_user(bomb.pid))
            living = of_user(bomb.pid, living_only=True)
            assert time.monotonic() < end_at, f"it ends by itself: {living} live, at most {most} did"
    assert lives(trace) > PROCESSES, "it went on at the fence"
    assert before + PROCESSES / 2 < most <= before + PROCESSES


def test_a_fence_is_not_taken_down_from_inside() -> None:
    root = Path(__file__).resolve().parents[3]
    said = subprocess.run(
        [sys.executable, "-c", RAISED],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    ).stdout
    assert said == "refused True\n"
