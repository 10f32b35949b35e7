"""Stops on uvloop, whose handles of times that are over know less than asyncio's."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest

from holdfast.runtime import Scope, install
from holdfast.runtime.adoption.adopted_programs import AdoptedPrograms
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.foreign_process import Owner

uvloop = pytest.importorskip("uvloop") if sys.platform == "linux" else pytest.skip("no uvloop", allow_module_level=True)


def test_a_stop_that_is_tightened_when_its_time_is_over_ends() -> None:
    async def stubborn() -> None:
        end = asyncio.get_running_loop().time() + 0.05
        while asyncio.get_running_loop().time() < end:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        scope = Scope("stopped", detached=True).open()
        scope.spawn(stubborn(), name="stubborn")
        await asyncio.sleep(0)
        first = asyncio.ensure_future(scope.stop("first", grace_s=0.0, abandon_after_s=0.0))
        second = asyncio.ensure_future(scope.stop("second", grace_s=0.0, abandon_after_s=0.0))
        async with asyncio.timeout(10):
            receipts = await asyncio.gather(first, second)
        assert {receipt.cause.reason for receipt in receipts} == {"first"}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("grace_s", [0.0, 2.0])
def test_nothing_lives_on_of_a_program_whose_start_was_cut(grace_s: float, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with install(loop):
            scope = Scope("cut", detached=True, grace_s=grace_s, abandon_after_s=20.0).open()

            def cut() -> None:
                """The loop is held up until the program has strays; before anybody was told its pid."""
                deadline = time.monotonic() + 20
                while not pids.exists() or len(pids.read_text().split()) < 2:
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
                scope.interrupt.trigger("enough")

            async def start() -> None:
                loop.call_soon(cut)
                strays = f"sleep 1000 & echo $! >>{pids}; setsid sleep 1000 & echo $! >>{pids}; wait"
                await asyncio.create_subprocess_exec("sh", "-c", strays)
                raise AssertionError("the start was not cut")

            scope.spawn(start())
            async with asyncio.timeout(60):
                while not scope.interrupt.triggered:  # a stop before would ask the program to end before it has strays
                    await asyncio.sleep(0)
                receipt = await scope.stop("enough", grace_s=grace_s)
            left = [pid for pid in map(int, pids.read_text().split()) if is_alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert left == [], receipt

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_a_loop_closes_though_a_program_was_left_open() -> None:
    """Where the warning of that is an error, as in these tests, uvloop waits for the program in C, for ever if its exit
    status was taken already: no alarm ends such a test. So this warning is none there."""

    async def main() -> int:
        return (await asyncio.create_subprocess_exec("sleep", "60")).pid

    with warnings.catch_warnings(record=True):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            pid = runner.run(main())
        assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("found_before", [False, True], ids=["", "found as a stray before"])
@pytest.mark.parametrize("grace_s", [0.0, 2.0])
def test_the_loop_keeps_nothing_of_a_program_whose_start_was_cut(
    grace_s: float, found_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the program itself, and for ever if somebody else did."""
    plain = AdoptedPrograms.enter_unnamed

    def enter_unnamed(programs: AdoptedPrograms, owner: Owner, name: str, tag: int) -> None:
        family = programs.family_of(owner, tag)
        programs.enter_strays(family)  # as the reading thread does when another program ends in this moment
        plain(programs, owner, name, tag)

    if found_before:
        monkeypatch.setattr(AdoptedPrograms, "enter_unnamed", enter_unnamed)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with install(loop):
            before = transports()
            for _ in range(4):
                scope = Scope("cut", detached=True, grace_s=grace_s, abandon_after_s=20.0).open()

                async def start(scope: Scope) -> None:
                    loop.call_soon(scope.interrupt.trigger, "enough")
                    await asyncio.create_subprocess_exec("sh", "-c", "trap '' TERM; sleep 1000")
                    raise AssertionError("the start was not cut")

                scope.spawn(start(scope))
                async with asyncio.timeout(30):
                    while not scope.interrupt.triggered:
                        await asyncio.sleep(0)
                await scope.stop("enough", grace_s=grace_s)
            async with asyncio.timeout(30):
                while left := transports() - before:
                    await asyncio.sleep(0.01)
            assert left == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def transports() -> int:
    """How many programs the loops of this process hold."""
    gc.collect()
    return sum(type(one).__name__ == "UVProcessTransport" for one in gc.get_objects())


def is_alive(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and not stat.dead
