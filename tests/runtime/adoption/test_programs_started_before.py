"""Programs that are older than the adoption of programs keep their starter, and younger ones their life."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from holdfast.runtime import Scope, install
from holdfast.runtime.adoption import adopted_programs
from holdfast.runtime.adoption import processes as adoption_processes
from holdfast.runtime.processes import procfs
from tests.runtime.processes_zoo import await_condition, living

AFTER = """
import asyncio, os, subprocess, sys, time
import holdfast
from holdfast.runtime.process_host import process_host

def deaf(run):
    while True:
        time.sleep(0.1)

async def main():
    async with holdfast.Host(deaf, store="memory://") as host:
        await host.session("one").send("go")
        await asyncio.sleep(0.2)
        assert (await host.session("one").interrupt(grace_s=0.1)).outcome == "quarantined"

asyncio.run(main())
print(process_host()._zygote.pid, flush=True)
way, argv = sys.argv[1], ["sleep", sys.argv[2]]
if way == "subprocess":
    subprocess.Popen(argv, stdin=-3, stdout=-3, stderr=-3)
elif way == "posix_spawn":
    os.posix_spawnp("sleep", argv, os.environ, file_actions=[(os.POSIX_SPAWN_CLOSE, 1)])
elif os.fork() == 0:
    os.close(1)
    os.execvp("sleep", argv)
os._exit(0)
"""


pytestmark = pytest.mark.skipif(not procfs.supported(), reason="foreign trees are adopted only on Linux")


def by_fork() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return pid


def by_posix_spawn() -> int:
    return os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], os.environ)


def by_subprocess() -> int:
    popen = subprocess.Popen(["sh", "-c", "exit 7"])
    popen.returncode = 0  # the test waits for it
    return popen.pid


@pytest.mark.parametrize("start", [by_fork, by_posix_spawn, by_subprocess])
@pytest.mark.parametrize("earlier", [False, True])
def test_the_exit_status_of_what_was_started_before_stays_its_starters(
    start: Callable[[], int], earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted_programs, "_UNKNOWN_ZOMBIE_S", -1.0)
    pids = []

    async def body() -> None:
        loop = asyncio.get_running_loop()
        if earlier:  # outside of any scope of an installation that is over
            with install(loop):
                pids.append(start())
        else:
            pids.append(start())
        await_condition(lambda: not procfs.living(pids), "it has ended")
        with install(loop):
            async with Scope("one"):
                assert subprocess.run(["true"], check=False).returncode == 0
            adoption = adoption_processes._adoption
            assert adoption is not None
            adoption.programs.bury(lambda tag: False)
            adoption.programs.bury(lambda tag: False)

    asyncio.run(body())
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 7


@pytest.mark.parametrize("way", ["subprocess", "posix_spawn", "fork"])
def test_what_is_started_after_the_hosts_end_does_not_end_with_its_abandoned_threads(way: str) -> None:
    word = f"60.{random.randrange(10_000_000, 99_999_999)}"
    said = subprocess.run([sys.executable, "-c", AFTER, way, word], check=True, timeout=60, stdout=-1).stdout
    try:
        await_condition(lambda: not procfs.living([int(said)]), "the zygote has cleaned up and ended")
        assert len(living(word)) == 1
    finally:
        for pid in living(word):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
