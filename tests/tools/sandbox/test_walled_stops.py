"""Stops of walled programs: everything inside is gone, whoever was killed or stopped from outside before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import ids
from holdfast.runtime.process_host import Process, ProcessHost
from holdfast.runtime.processes import procfs
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.runtime.processes_zoo import ROLES, await_condition, living, program
from tests.tools.sandbox.walled import ALL_LAYERS, linux_backend, reason_against

BOTH = ("namespaces", "landlock")


@pytest.fixture
def host() -> Iterator[ProcessHost]:
    host = ProcessHost()
    host.start()
    yield host
    host.close()


@pytest.fixture
def token() -> str:
    return f"walled-{ids.secret('')[:12]}"


def start(
    host: ProcessHost, folder: Path, argv: list[str], layers: tuple[str, ...] = BOTH, session: str = ""
) -> Process:
    if (reason := reason_against(layers)) is not None:
        pytest.skip(reason)
    launch = linux_backend(layers).launch(plan_wall(Sandbox(), folder=folder, session=session), argv)
    with open(os.devnull, "r+b") as nothing:
        return host.spawn_blocking(
            launch.argv,
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            env=launch.environment,
            cwd=launch.directory,
            wall=launch.wall,
        )


def reaper_of(process: Process) -> int:
    reaper: int = process.tree.reaper  # type: ignore[attr-defined]
    return reaper


def init_of(process: Process) -> int:
    (init,) = procfs.children(reaper_of(process))
    return init


@pytest.mark.parametrize("layers", ALL_LAYERS)
@pytest.mark.parametrize("role", ROLES)
def test_nothing_survives_a_stop(
    host: ProcessHost, tmp_path: Path, token: str, role: str, layers: tuple[str, ...]
) -> None:
    if role == "outlives-its-first-thread" and layers == ("landlock",):
        pytest.skip("it reads its own state in /proc, which Landlock alone does not allow")
    process = start(host, tmp_path, program(role, token), layers)
    await_condition(lambda: len(living(token)) >= ROLES[role], f"{role} has settled")
    result = process.kill_tree_blocking()
    assert (result.outcome, living(token)) == ("gone", []), result
    assert result.found >= ROLES[role]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_survives_when_the_init_is_killed_or_stopped(
    host: ProcessHost, tmp_path: Path, token: str, signum: signal.Signals
) -> None:
    process = start(host, tmp_path, program("new-session", token))
    await_condition(lambda: len(living(token)) == 2, "it has settled")
    os.kill(init_of(process), signum)
    if signum == signal.SIGKILL:
        assert process.wait_blocking(30) == -signal.SIGKILL
    result = process.kill_tree_blocking()
    assert (result.outcome, living(token)) == ("gone", []), result


def test_a_stopped_init_goes_on_and_reports_the_end_of_the_program(host: ProcessHost, tmp_path: Path) -> None:
    process = start(host, tmp_path, ["/bin/sh", "-c", "while ! test -e go; do sleep 0.01; done; exit 5"])
    os.kill(init_of(process), signal.SIGSTOP)
    (tmp_path / "go").touch()
    assert process.wait_blocking(30) == 5
    assert process.kill_tree_blocking().outcome == "gone"


@pytest.mark.parametrize("victim", ["reaper", "zygote", "both"])
def test_nothing_survives_when_the_processes_outside_of_the_wall_are_killed(
    host: ProcessHost, tmp_path: Path, token: str, victim: str
) -> None:
    process = start(host, tmp_path, program("double-fork", token), session="kept")
    await_condition(lambda: len(living(token)) >= 2, "it has settled")
    (zygote,) = host.zygote_pids()
    reaper = reaper_of(process)
    for pid in {"reaper": [reaper], "zygote": [zygote], "both": [zygote, reaper]}[victim]:
        os.kill(pid, signal.SIGKILL)
    process.kill_tree_blocking()
    await_condition(lambda: living(token) == [], "all are gone")


def test_nothing_survives_when_the_host_is_killed(tmp_path: Path, token: str) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from holdfast.runtime.process_host import process_host
        from tests.tools.sandbox.test_walled_stops import start
        start(process_host(), Path({str(tmp_path)!r}), {program("double-fork", token)!r}, session="kept")
        print("started", flush=True)
        sys.stdin.read()
    """
    if (reason := reason_against(BOTH)) is not None:
        pytest.skip(reason)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"started\n"
        await_condition(lambda: len(living(token)) >= 2, "it has settled")
        zygotes = procfs.children(killed.pid)
        killed.kill()
    await_condition(lambda: living(token) == [], "all are gone")
    await_condition(lambda: procfs.living(zygotes) == [], "the zygote has ended, and what it kept with it")


def test_idle_sessions_have_no_process_and_a_bounded_number_of_descriptors(host: ProcessHost, tmp_path: Path) -> None:
    (zygote,) = host.zygote_pids()
    host.run_blocking(["true"])  # so that the zygote is ready
    before = len(os.listdir(f"/proc/{zygote}/fd"))
    for number in range(20):
        process = start(host, tmp_path, ["true"], session=f"session {number}")
        assert process.wait_blocking(30) == 0
        assert process.kill_tree_blocking().outcome == "gone"
    await_condition(lambda: procfs.children(zygote) == [], "no process is left")
    kept = len(os.listdir(f"/proc/{zygote}/fd")) - before
    assert kept == 16 * 4
    for number in range(20):
        host.forget_walls(f"session {number}")
    await_condition(lambda: len(os.listdir(f"/proc/{zygote}/fd")) <= before, "nothing is kept")


def test_what_a_program_leaves_running_is_ended_and_counted(host: ProcessHost, tmp_path: Path, token: str) -> None:
    process = start(host, tmp_path, program("leaves-strays", token))
    assert process.wait_blocking(30) == 7
    result = process.kill_tree_blocking()
    assert (result.outcome, len(result.killed), living(token)) == ("gone", 2, []), result
