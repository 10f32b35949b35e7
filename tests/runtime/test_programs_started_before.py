"""Programs that are older than the adoption of programs keep their starter."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable

import pytest

from holdfast.runtime import Scope, adoption_processes, install, procfs
from tests.runtime.processes_zoo import await_condition

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
    monkeypatch.setattr(adoption_processes, "_UNKNOWN_ZOMBIE_S", -1.0)
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
            adoption.bury(lambda tag: False)
            adoption.bury(lambda tag: False)

    asyncio.run(body())
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 7
