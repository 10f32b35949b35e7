"""Programs end with the lease of their host, though the host itself does nothing."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.process_host import PIPE, Process, ProcessHost, process_host
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.program_lease import ProgramLease, read_lease
from holdfast.runtime.processes.tree import ReaperTree
from holdfast.runtime.scope.scope import Scope

HOSTILE = ["sh", "-c", "trap '' TERM; setsid sleep 1000 & echo $!; sleep 1000"]
LEASE_S = 0.3


@pytest.fixture
def programs() -> Iterator[ProcessHost]:
    host = ProcessHost()
    yield host
    for holder in ("host", "other"):  # its zygote would kill what later tests start in scopes of this process
        host.lease.release(holder)
    host.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def hostile(host: ProcessHost, *, leased: bool) -> tuple[Process, list[int]]:
    """A started program that ignores SIGTERM, and its processes."""
    process = await host.spawn(HOSTILE, stdout=PIPE, leased=leased)
    assert process.stdout is not None
    return process, [process.pid, int(await process.stdout.readline())]


def lease_ended(process: Process) -> bool:
    assert isinstance(process.tree, ReaperTree)
    return process.tree.lease_ended


# The shared number


def test_the_lease_is_the_first_of_its_holders_to_end() -> None:
    sooner: list[float] = []
    shared = ProgramLease(lambda: sooner.append(shared.ends_at))
    fd = shared.open()
    assert read_lease(fd) == math.inf
    shared.renew("a", 30.0)
    shared.renew("a", 40.0)
    shared.renew("b", 20.0)
    shared.renew("b", 50.0)
    assert (read_lease(fd), sooner) == (40.0, [30.0, 20.0])
    shared.release("a")
    shared.release("a")
    assert read_lease(fd) == 50.0
    shared.release("b")
    assert read_lease(fd) == math.inf
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"0", 0)
    shared.leave_to_parent()
    shared.renew("a", 60.0)
    assert read_lease(fd) == math.inf, "a forked child does not write its parent's lease"
    os.close(fd)


# Reapers


def test_leased_programs_are_killed_when_the_lease_ends_and_no_other_program_is(programs: ProcessHost) -> None:
    async def main() -> None:
        programs.lease.renew("host", time.monotonic() + LEASE_S)
        leased, ended = await hostile(programs, leased=True)
        helper, living = await hostile(programs, leased=False)
        await leased.tree.gone.wait()
        assert not procfs.living(ended)
        assert (leased.returncode, lease_ended(leased)) == (-9, True)
        assert leased.tree.gone.value is not None and leased.tree.gone.value.outcome == "gone"
        late, _ = await hostile(programs, leased=False)
        assert sorted(procfs.living(living)) == sorted(living)
        assert not lease_ended(helper)
        for process in (helper, late):
            await process.kill_tree()

    run(main)


def test_programs_end_with_a_lease_that_ends_sooner_than_it_did_at_their_start(programs: ProcessHost) -> None:
    async def main() -> None:
        first, ended = await hostile(programs, leased=True)
        programs.lease.renew("host", time.monotonic() + 1000)
        second, more = await hostile(programs, leased=True)
        programs.lease.renew("other", time.monotonic() + LEASE_S)
        for process in (first, second):
            await process.tree.gone.wait()
            assert lease_ended(process)
        assert not procfs.living(ended + more)

    run(main)


def test_programs_live_on_while_the_lease_is_renewed(programs: ProcessHost) -> None:
    async def main() -> None:
        ends_at = time.monotonic() + LEASE_S
        programs.lease.renew("host", ends_at)
        kept, living = await hostile(programs, leased=True)
        programs.lease.renew("host", ends_at + 1000)
        await asyncio.sleep(ends_at + LEASE_S - time.monotonic())
        assert sorted(procfs.living(living)) == sorted(living)
        programs.lease.release("host")
        await kept.kill_tree()
        assert not lease_ended(kept)

    run(main)


def test_no_program_starts_while_the_lease_is_over(programs: ProcessHost, tmp_path: Path) -> None:
    async def main() -> None:
        programs.lease.renew("host", 0.0)
        for _ in range(20):
            with pytest.raises(OSError, match="lease of this host has ended"):
                await programs.spawn(["touch", f"{tmp_path}/started"], leased=True)
        assert not list(tmp_path.iterdir())
        programs.lease.renew("host", time.monotonic() + 1000)
        process = await programs.spawn(["touch", f"{tmp_path}/started"], leased=True)
        assert await process.wait() == 0
        assert list(tmp_path.iterdir())

    run(main)


def test_a_stop_beside_the_end_of_the_lease_is_proven(programs: ProcessHost) -> None:
    async def main() -> None:
        children = "for n in $(seq 100); do sleep 1000 & done; echo; wait"
        for _ in range(5):
            programs.lease.renew("host", time.monotonic() + 1000)
            process = await programs.spawn(["sh", "-c", children], stdout=PIPE, leased=True)
            assert process.stdout is not None
            await process.stdout.readline()
            programs.lease.renew("host", 0.0)
            assert (await process.kill_tree(term_first_s=5.0)).outcome == "gone"

    run(main)


# What foreign code started in scopes


@pytest.fixture
def lease() -> Iterator[ProgramLease]:
    """The lease of this process, which ends with the test."""
    yield process_host().lease
    process_host().lease.release("host")


async def ended(process: asyncio.subprocess.Process) -> None:
    assert await process.wait() == -9


def test_programs_of_foreign_code_in_scopes_end_with_the_lease_and_those_outside_do_not(lease: ProgramLease) -> None:
    async def main() -> None:
        with install(asyncio.get_running_loop()):
            outside = await asyncio.create_subprocess_exec("sleep", "1000")
            async with Scope("call", parent=None):
                for _ in range(2):  # a lease that is renewed after its end can end again
                    inside = await asyncio.create_subprocess_exec("sleep", "1000")
                    lease.renew("host", time.monotonic() + LEASE_S)
                    await ended(inside)
                late = await asyncio.create_subprocess_exec("sleep", "1000")
                await ended(late)  # the lease is over
                assert procfs.living([outside.pid])
                lease.release("host")
                assert await (await asyncio.create_subprocess_exec("true")).wait() == 0
            outside.kill()
            await outside.wait()

    run(main)


_STARTING = f"""
import asyncio, contextlib, time
from holdfast.runtime.adoption.tag_inheritance import TagInheritance
from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.process_host import process_host
from holdfast.runtime.scope.scope import Scope

bequeath = TagInheritance.bequeath

@contextlib.contextmanager
def late(self, tag):
    with bequeath(self, tag):
        yield
        time.sleep(2 * {LEASE_S})  # the process has the tag of its program meanwhile

TagInheritance.bequeath = late

async def main():
    with install(asyncio.get_running_loop()):
        async with Scope("call", parent=None):
            process_host().lease.renew("host", time.monotonic() + {LEASE_S})
            print(await (await asyncio.create_subprocess_exec("sleep", "1000")).wait())

asyncio.run(main())
"""


def test_a_host_that_starts_a_program_while_its_lease_ends_is_not_killed() -> None:
    done = subprocess.run([sys.executable, "-c", _STARTING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "-9\n", "")


def test_a_killed_zygote_is_replaced_while_there_is_a_lease(lease: ProgramLease) -> None:
    async def main() -> None:
        with install(asyncio.get_running_loop()):
            async with Scope("call", parent=None):
                inside = await asyncio.create_subprocess_exec("sleep", "1000")
                lease.renew("host", time.monotonic() + 1000)
                (zygote,) = process_host().zygote_pids()
                os.kill(zygote, signal.SIGKILL)
                while process_host().zygote_pids() in (set(), {zygote}):
                    await asyncio.sleep(0.005)
                lease.renew("host", time.monotonic() + LEASE_S)
                await ended(inside)

    run(main)


def test_the_zygote_is_in_a_process_group_of_its_own(programs: ProcessHost) -> None:
    programs.start()
    (zygote,) = programs.zygote_pids()
    assert os.getpgid(zygote) == zygote != os.getpgrp()
