"""Where a cgroup (v2) is delegated, the kernel keeps each principal's programs within their quotas at every moment.

    systemd-run --user --wait --pipe -p Delegate=yes -p WorkingDirectory=$PWD .venv/bin/python -m pytest \\
        tests/host/test_program_cgroups.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import CallPart, ScriptedModel
from holdfast.runtime import Process, Scope
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.cgroup_delegation import ProgramCgroups, take_cgroups
from holdfast.runtime.processes.tree import ReaperTree
from holdfast.settings import Settings
from holdfast.tools import Terminal
from holdfast.tools.sandbox.plan import plan_wall
from holdfast.tools.sandbox.sandbox import Sandbox
from tests.host import placed_programs
from tests.host.placed_programs import MIB, run, scope_of
from tests.tools.sandbox.walled import ALL_LAYERS, linux_backend, reason_against

CGROUPS = take_cgroups()
pytestmark = pytest.mark.skipif(isinstance(CGROUPS, str), reason=f"no cgroup is delegated: {CGROUPS}")

LIMIT = 48 * MIB
TASKS = 40
IDLE = "import time; time.sleep(120)"


class Place(placed_programs.Place):
    """Quotas that the kernel enforces, and what they reported."""

    def __init__(self, folder: Path, **limits: int) -> None:
        assert isinstance(CGROUPS, ProgramCgroups)
        super().__init__(folder, CGROUPS, **{"memory_bytes": LIMIT, "processes": TASKS, **limits})

    def cgroup(self, principal: str) -> Path:
        spec = self.quotas.cgroup_of(principal)
        assert spec is not None
        return Path(os.fsdecode(spec[0]))


def reaper_of(process: Process) -> int:
    assert isinstance(process.tree, ReaperTree)
    return process.tree.reaper


STEP = 4 * MIB
_STEPS = "for number in range(100):\n    {}\n    os.pwrite(count, b'%04d' % number, 0)\ntime.sleep(60)"
_COUNT = "import mmap, os, time\nkept = []\ncount = os.open('count', os.O_CREAT | os.O_WRONLY)\n"
MEMORY = {
    "of one process": _COUNT + _STEPS.format(f"kept.append(b'x' * {STEP})"),
    "of many processes": (
        _COUNT
        + "import socket\nours, theirs = socket.socketpair()\n"
        + _STEPS.format(
            "if os.fork() == 0:\n"
            f"        kept.append(b'x' * {STEP}); theirs.send(b'x'); time.sleep(60)\n"
            "    ours.recv(1)"
        )
    ),
    "of files that nothing maps": (
        _COUNT + "file = os.memfd_create('x')\n" + _STEPS.format(f"os.write(file, bytes({STEP}))")
    ),
    "that forks share": _COUNT + "kept = mmap.mmap(-1, 800 << 20)\n" + _STEPS.format(f"kept.write(b'x' * {STEP})"),
    "of pipes": (
        _COUNT
        + "import fcntl, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        + _STEPS.format(
            "for _ in range(64):\n"
            "        read, write = os.pipe(); kept.append((read, write))\n"
            "        os.write(write, bytes(1 << 16))"
        )
    ),
}


@pytest.mark.parametrize("what", MEMORY)
def test_memory_never_exceeds_the_quota_and_the_program_is_told(tmp_path: Path, what: str) -> None:
    async def body() -> None:
        place = Place(tmp_path, processes=200)
        async with scope_of(place) as scope:
            same, watched_same = await place.start(scope, IDLE)
            other, watched_other = await place.start(scope, IDLE, principal="bob")
            bomb, watched = await place.start(scope, MEMORY[what])
            result = await bomb.wait_gone()
            assert (result.outcome, bomb.returncode) == ("gone", -9)
            assert watched.ended_because == ("user alice's programs used 48 MiB of memory; the limit is 48 MiB"), (
                "the user is told why"
            )
            assert [(who, resource) for who, resource, _ in place.reports] == [("alice", "memory")]
            assert place.quotas.ended["memory"] == 1
            assert [one.returncode for one in (same, other)] == [None, None], "the kernel ends the largest program only"
            assert [one.ended_because for one in (watched_same, watched_other)] == ["", ""]
            assert 3 * STEP <= (int((tmp_path / "count").read_bytes()) + 1) * STEP <= LIMIT

    run(body)


FORKS = {
    "processes": (
        "import os, time\nborn = 0\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        born += 1; open('born', 'w').write(str(born))\n"
        "    except OSError: open('refused', 'w').write('x')"
    ),
    "threads": (
        "import _thread, time\nborn = 0\n"
        "while True:\n"
        "    try: _thread.start_new_thread(time.sleep, (60,)); born += 1; open('born', 'w').write(str(born))\n"
        "    except RuntimeError: open('refused', 'w').write('x')"
    ),
}


@pytest.mark.parametrize("kind", FORKS)
def test_a_principal_never_has_more_processes_than_its_quota_and_the_bomb_is_ended(tmp_path: Path, kind: str) -> None:
    async def body() -> None:
        place = Place(tmp_path)
        async with scope_of(place) as scope:
            same, _ = await place.start(scope, IDLE)
            argv = [sys.executable, "-I", "-S", "-c", FORKS[kind]]
            bomb = await scope.process(argv, cwd=tmp_path, cgroup=place.quotas.cgroup_of("alice"))
            while not (tmp_path / "refused").exists():
                await asyncio.sleep(0.02)
            assert int((tmp_path / "born").read_text()) == TASKS - 2, "the two programs' first processes"
            watched = place.quotas.watch("alice", bomb, folder=tmp_path)  # only now, so that nothing ends it before
            assert (await bomb.wait_gone()).outcome == "gone"
            assert watched.ended_because.endswith("had 40 processes and threads; the limit is 40")
            assert same.returncode is None

    run(body)


def test_usage_is_what_the_kernel_counts(tmp_path: Path) -> None:
    async def body() -> None:
        place = Place(tmp_path)
        hold = "import os, time\nkept = b'x' * (20 << 20)\nfor _ in range(4): os.fork() == 0 and time.sleep(60)\n"
        async with scope_of(place) as scope:
            await place.start(scope, hold + "open('ready', 'w'); time.sleep(60)")
            while not (tmp_path / "ready").exists() or "alice" not in place.quotas.usage()["memory"]:
                await asyncio.sleep(0.05)
            assert place.quotas.usage()["processes"] == {"alice": 5}
            assert 20 * MIB < place.quotas.usage()["memory"]["alice"] < LIMIT

    run(body)


def test_a_cgroup_is_removed_with_its_last_program(tmp_path: Path) -> None:
    async def body() -> None:
        place = Place(tmp_path)
        cgroup = place.cgroup("alice")
        async with scope_of(place) as scope:
            first, _ = await place.start(scope, IDLE)
            second, _ = await place.start(scope, IDLE)
            assert {path.name for path in cgroup.iterdir() if path.is_dir()} == {
                str(reaper_of(one)) for one in (first, second)
            }
            await first.kill_tree()
            assert [path.name for path in cgroup.iterdir() if path.is_dir()] == [str(reaper_of(second))]
            os.kill(reaper_of(second), signal.SIGKILL)
            assert (await second.wait_gone()).outcome == "gone"
            assert not cgroup.exists(), "also if the reaper did not live to remove it"
            with pytest.raises(FileNotFoundError):
                await scope.process(["/does/not/exist"], cgroup=place.quotas.cgroup_of("alice"))
            while cgroup.exists():  # it is removed, too, if the program did not start
                await asyncio.sleep(0.02)

    run(body)


def test_programs_that_start_while_others_end_all_get_their_cgroup(tmp_path: Path) -> None:
    async def body() -> None:
        place = Place(tmp_path)

        async def many(scope: Scope) -> None:
            for _ in range(25):
                process, _ = await place.start(scope, "", argv=["/bin/true"])
                assert await process.wait() == 0
                await process.wait_gone()

        async with scope_of(place) as scope, asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(many(scope))
        assert not place.cgroup("alice").exists()

    run(body)


LAYERS = [None, *ALL_LAYERS]


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_a_program_is_in_its_cgroup_from_its_first_moment_and_cannot_change_it(
    tmp_path: Path, layers: tuple[str, ...] | None
) -> None:
    if layers is not None and (reason := reason_against(layers)) is not None:
        pytest.skip(reason)

    async def body() -> None:
        place = Place(tmp_path)
        source = (
            "import glob, os, time\n"
            "open('seen', 'w').write(open('/proc/self/cgroup').read().split('0::')[1])\n"
            "for path in glob.glob('/sys/fs/cgroup/**/*.max', recursive=True):\n"
            "    try: open(path, 'w'); open('written', 'a').write(path)\n"
            "    except OSError: pass\n"
            "open('ready', 'w'); time.sleep(60)"
        )
        options: dict[str, Any] = {}
        if layers is not None:
            argv = [sys.executable, "-I", "-S", "-c", source]
            launch = linux_backend(layers).launch(plan_wall(Sandbox(), folder=tmp_path), argv)
            options = {"argv": launch.argv, "env": launch.environment, "cwd": launch.directory, "wall": launch.wall}
        async with scope_of(place) as scope:
            process, _ = await place.start(scope, source, **options)
            while not (tmp_path / "ready").exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
            leaf = place.cgroup("alice") / str(reaper_of(process))
            inside = {int(pid) for pid in (leaf / "cgroup.procs").read_text().split()}
            assert inside == set(procfs.descendants(reaper_of(process)))
            if layers is not None:
                assert not (tmp_path / "written").exists()
            if layers is not None and "namespaces" in layers:
                assert (tmp_path / "seen").read_text() == "/\n"

    run(body)


def test_a_command_of_an_agent_is_told_its_quota(tmp_path: Path) -> None:
    command = f"{sys.executable} -I -S -c 'x = []\nwhile True: x.append(b\"x\" * 1000000)'; echo survived"
    model = ScriptedModel([CallPart(name="terminal", arguments={"command": command}), "done"])
    agent = holdfast.Agent(name="greedy", model=model, tools=[Terminal(tmp_path / "work")])

    async def body() -> None:
        settings = Settings(principal_program_memory_bytes=LIMIT)
        async with holdfast.Host(agent, store="memory://", settings=settings) as host:
            session = host.session("alice")
            await session.ask("go")
            result = next(entry.content for entry in await session.transcript() if entry.role == "tool_result")
        assert "ended: user local's programs used 48 MiB of memory; the limit is 48 MiB" in result
        assert "survived" not in result

    run(body)


def test_others_hardly_notice_fork_bombs(tmp_path: Path) -> None:
    """P13: how late a timer of the server's loop is, in quiet and while bombs keep forking at their limit."""
    assert isinstance(CGROUPS, ProgramCgroups)
    if "cpu" not in CGROUPS.controllers:
        pytest.skip("the controller cpu is not delegated")

    async def lateness(seconds: float) -> float:
        found = []
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            await asyncio.sleep(0.002)
            found.append(time.monotonic() - now - 0.002)
        return sorted(found)[int(len(found) * 0.99)]

    async def body() -> None:
        place = Place(tmp_path, processes=200)
        spin = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
        async with scope_of(place) as scope:
            quiet = await lateness(3)
            for _ in range(2):  # not watched, so that nothing ends them
                argv = [sys.executable, "-I", "-S", "-c", spin]
                place.processes.append(await scope.process(argv, cgroup=place.quotas.cgroup_of("bomb")))
            await asyncio.sleep(1)
            noisy = await lateness(4)
        print(f"p99 of a timer: {quiet * 1000:.1f} ms in quiet, {noisy * 1000:.1f} ms during fork bombs")
        assert noisy <= max(3 * quiet, 0.02)

    run(body)


HOST = """
import asyncio, json, sys
from holdfast.runtime import Scope
from holdfast.runtime.processes.cgroup_delegation import take_cgroups

async def main():
    cgroups = take_cgroups()
    spec = cgroups.spec_of("alice", memory_bytes=1 << 28, processes=50)
    async with Scope("programs") as scope:
        process = await scope.process(["/bin/sleep", "600"], cgroup=spec)
        print(json.dumps([cgroups.folder, process.pid, process.tree.reaper]), flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


@contextlib.contextmanager
def host() -> Iterator[tuple[subprocess.Popen[bytes], Path, int, int]]:
    """Run a host with a program; give it, its folder of cgroups, and the pids of the program and its reaper."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        folder, pid, reaper = json.loads(process.stdout.readline())
        try:
            yield process, Path(folder), pid, reaper
        finally:
            process.kill()


def test_nothing_is_left_of_a_host_that_was_killed_once_the_next_one_has_started() -> None:
    with host() as (_, folder_of_living, _, _):
        with host() as (first, folder, pid, reaper):
            assert folder.is_dir() and f"holdfast-programs.{first.pid}." in folder.name
            started = procfs.start_time(reaper)
        while procfs.read_stat(pid) is not None or procfs.start_time(reaper) == started:
            time.sleep(0.02)
        with host():
            assert not folder.exists()
            assert folder_of_living.is_dir(), "that of a living host stays"


def test_where_clone3_is_filtered_a_child_enters_its_cgroup_before_it_does_anything(tmp_path: Path) -> None:
    assert isinstance(CGROUPS, ProgramCgroups)
    cgroup = Path(CGROUPS.folder) / "test"
    cgroup.mkdir()
    source = (
        "import os\nfrom holdfast.runtime.walls import kernel\n"
        "kernel._SAME_EVERYWHERE['clone3'] = 9999\n"
        f"fd = os.open({str(cgroup)!r}, os.O_RDONLY | os.O_DIRECTORY)\n"
        "if kernel.clone_child(fd) == 0:\n"
        "    print(open('/proc/self/cgroup').read(), flush=True); os._exit(0)\n"
        "os.wait()"
    )
    try:
        ended = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True)
    finally:
        cgroup.rmdir()
    assert ended.stdout.decode().strip().endswith(f"/{Path(CGROUPS.folder).name}/test")
