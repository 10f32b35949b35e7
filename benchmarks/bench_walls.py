"""What a wall costs a call, with namespaces kept for its session and without, and what idle walled sessions hold.

Run it: ``python -m benchmarks.bench_walls``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.bench_processes import percentile
from benchmarks.rows import Row, print_rows
from holdfast.runtime.process_host import process_host
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.zygote_link import zygotes
from holdfast.runtime.walls.kept_namespaces import KEPT_LIMIT
from holdfast.tools.sandbox.backends.linux import LinuxBackend
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.sandbox import Sandbox

__all__ = ["rows"]

ROUNDS = 150
BATCH = 5
IDLE_SESSIONS = 1_000
WARM_MS, COLD_MS = 5.0, 60.0
FDS_PER_KEPT = 4
"""Descriptors of the namespaces that are kept for a session: of users, files, the host name and the network."""

PROGRAM = ["/bin/true"]
TICKS = os.sysconf("SC_CLK_TCK")


class _Calls:
    """Calls of ``/bin/true``, and what they cost.

    Parameters:
        folder: the workspace of every session.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._host = process_host()
        self._backend = LinuxBackend()
        self._sandbox = Sandbox()
        self._sessions = 0
        self.plain()
        (self.zygote,) = zygotes

    def plain(self) -> None:
        """Call it without a wall."""
        self._host.run_blocking(PROGRAM, cwd=self._folder, env={"PATH": os.defpath})

    def warm(self) -> None:
        """Call it behind the wall of a session whose namespaces are kept."""
        self._walled("warm")

    def cold(self) -> None:
        """Call it behind the wall of a new session."""
        self._sessions += 1
        self._walled(f"cold{self._sessions}")

    def _walled(self, session: str) -> None:
        plan = plan_wall(self._sandbox, folder=self._folder, session=session)
        launch = self._backend.launch(plan, PROGRAM)
        ended = self._host.run_blocking(launch.argv, cwd=launch.directory, env=launch.environment, wall=launch.wall)
        if ended.returncode != 0:
            raise RuntimeError(f"the walled program ended with exit code {ended.returncode}")

    def settle(self) -> None:
        """Wait until the zygote has reaped its last child."""
        while procfs.children(self.zygote):
            time.sleep(0.002)

    def used(self) -> tuple[float, int]:
        """CPU time in seconds and page faults of this process and of everything that the zygote has reaped."""
        self.settle()
        fields = Path(f"/proc/{self.zygote}/stat").read_text("utf-8").rpartition(")")[2].split()
        faults = int(fields[7]) + int(fields[8])
        return time.process_time() + sum(map(int, fields[11:15])) / TICKS, faults

    def descriptors(self) -> int:
        """Descriptors of this process and of the zygote."""
        return len(os.listdir("/proc/self/fd")) + len(os.listdir(f"/proc/{self.zygote}/fd"))


def _measure(kinds: tuple[Callable[[], None], ...], calls: _Calls) -> list[tuple[float, float, float]]:
    """Return of each kind the median time in milliseconds, the CPU time in milliseconds and the page faults of a call.

    The kinds take turns.
    """
    times: list[list[float]] = [[] for _ in kinds]
    cpu_s, faults = [0.0] * len(kinds), [0] * len(kinds)
    for _ in range(ROUNDS // BATCH):
        for number, call in enumerate(kinds):
            call()  # of a session that other sessions have displaced, this one is cold
            before = calls.used()
            for _ in range(BATCH):
                began = time.perf_counter()
                call()
                times[number].append((time.perf_counter() - began) * 1e3)
            after = calls.used()
            cpu_s[number] += after[0] - before[0]
            faults[number] += after[1] - before[1]
    return [
        (percentile(taken, 0.5), cpu * 1e3 / len(taken), fault / len(taken))
        for taken, cpu, fault in zip(times, cpu_s, faults, strict=True)
    ]


def rows() -> list[Row]:
    """All figures; needs Linux with user namespaces."""
    with tempfile.TemporaryDirectory(prefix="holdfast-walls-") as folder:
        return _rows(_Calls(Path(folder)))


def _rows(calls: _Calls) -> list[Row]:
    before = calls.descriptors()
    plain, warm, cold = _measure((calls.plain, calls.warm, calls.cold), calls)
    for _ in range(IDLE_SESSIONS):
        calls.cold()
    calls.settle()
    left = calls.descriptors() - before
    processes = len(procfs.descendants(calls.zygote))
    most = KEPT_LIMIT * FDS_PER_KEPT
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    found = []
    for name, (taken, cpu, faults), limit in (("warm", warm, WARM_MS), ("cold", cold, COLD_MS)):
        found += [
            Row(
                name=f"{name} walled call of /bin/true above a plain one",
                value=taken - plain[0],
                unit="ms",
                target=f"<= {limit:g}",
                met=taken - plain[0] <= limit,
                note=f"p50 of {ROUNDS} in turns: {taken:.2f} ms, plain {plain[0]:.2f} ms; {load}; walled programs have "
                "idle priority, so they wait for everything else",
            ),
            Row(
                name="… CPU time of all processes above a plain one's",
                value=cpu - plain[1],
                unit="ms",
                note=f"{cpu:.1f} ms and {faults:.0f} page faults, plain {plain[1]:.1f} ms and {plain[2]:.0f}",
            ),
        ]
    return [
        *found,
        Row(
            name=f"processes of {IDLE_SESSIONS:,} idle walled sessions",
            value=processes,
            unit="",
            target="<= 0",
            met=processes == 0,
        ),
        Row(
            name=f"descriptors of {IDLE_SESSIONS:,} idle walled sessions",
            value=left,
            unit="",
            target=f"<= {most}",
            met=left <= most,
            note=f"namespaces are kept for the {KEPT_LIMIT} sessions used last",
        ),
    ]


if __name__ == "__main__":
    print_rows(rows())
