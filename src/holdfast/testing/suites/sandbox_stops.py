"""The part of the suite of walls about stops: nothing of a program is left, and the receipt proves it."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence

from holdfast.testing.suites.sandbox_bench import LIMIT_S, WallBench, assert_ok, open_bench, read_line
from holdfast.tools.sandbox.port import SandboxBackend

__all__ = ["STOP_CHECKS"]

_DAEMON = """\
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        with open("started", "w") as file:
            file.write("yes")
        while True:
            with open("beat", "a") as file:
                file.write("x")
            time.sleep(0.01)
    os._exit(0)
while not os.path.exists("started"):
    time.sleep(0.005)
print("ready", flush=True)
"""


async def _assert_silent(bench: WallBench) -> None:
    beat = bench.folder / "beat"
    before = beat.stat().st_size
    await asyncio.sleep(0.25)
    assert beat.stat().st_size == before, "a process of the program still writes"


async def strays_end_with_their_program(subject: Callable[[], SandboxBackend]) -> None:
    """A process that left its group and ignores signals ends with its program, and the receipt is ``gone``."""
    async with open_bench(subject) as bench:
        ended = await bench.python(_DAEMON)
        assert_ok(ended)
        assert ended.tree.outcome == "gone", ended.tree
        await _assert_silent(bench)


async def a_stop_ends_everything(subject: Callable[[], SandboxBackend]) -> None:
    """A kill ends the program with all its processes within seconds, and the receipt is ``gone``."""
    async with open_bench(subject) as bench:
        (bench.folder / "daemon.py").write_text(_DAEMON)
        process = await bench.start(f"{shlex.quote(sys.executable)} -I -S daemon.py; exec sleep 600")
        assert await read_line(process) == "ready"
        async with asyncio.timeout(LIMIT_S):
            result = await process.kill_tree(bound_s=20.0)
        assert result.outcome == "gone", result
        await _assert_silent(bench)


async def a_stop_lets_the_program_clean_up(subject: Callable[[], SandboxBackend]) -> None:
    """With a grace period, the program itself gets SIGTERM first and may finish its work."""
    async with open_bench(subject) as bench:
        process = await bench.start("trap 'echo bye > bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
        assert await read_line(process) == "ready"
        async with asyncio.timeout(LIMIT_S):
            result = await process.kill_tree(term_first_s=10.0, bound_s=20.0)
        assert result.outcome == "gone", result
        assert (bench.folder / "bye").exists(), "the program had no time to clean up"


async def concurrent_programs_do_not_meet(subject: Callable[[], SandboxBackend]) -> None:
    """Two programs of one session share the workspace, and neither ``/tmp`` nor processes."""
    async with open_bench(subject) as bench:
        process = await bench.start("echo mine > /tmp/holdfast-suite-mine; echo ready; exec sleep 600", session="one")
        try:
            assert await read_line(process) == "ready"
            ended = await bench.run(f"ls /tmp; kill -KILL {process.pid}; true", session="one")
            assert "holdfast-suite-mine" not in ended.stdout.split(), ended
            assert process.returncode is None, "a program ended another one"
        finally:
            async with asyncio.timeout(LIMIT_S):
                assert (await process.kill_tree(bound_s=20.0)).outcome == "gone"


STOP_CHECKS: Sequence[Callable[[Callable[[], SandboxBackend]], Awaitable[None]]] = (
    strays_end_with_their_program,
    a_stop_ends_everything,
    a_stop_lets_the_program_clean_up,
    concurrent_programs_do_not_meet,
)
