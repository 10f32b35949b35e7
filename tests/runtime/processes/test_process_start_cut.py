"""A program whose start is cut by a stop is killed: nothing of it is alive after the receipt."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from holdfast.runtime import Scope, install
from holdfast.runtime.process_host import process_host

MARK = "CUT_START"


def marked(mark: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("abandon_after_s", [5.0, 0.0])
@pytest.mark.parametrize("hops", range(8))
def test_a_program_whose_start_is_cut_by_a_stop_does_not_live_on(hops: int, abandon_after_s: float) -> None:
    mark = f"{os.getpid()}-{hops}-{abandon_after_s:g}"

    async def main() -> None:
        restorer = install(asyncio.get_running_loop())
        process_host().start()
        try:
            scope = Scope("cut", detached=True, grace_s=0.0, abandon_after_s=abandon_after_s).open()

            async def start() -> None:
                async with Scope("inner"):
                    await scope.process(["/bin/sleep", "60"], env={MARK: mark})

            for _ in range(4):
                _ = scope.spawn(start(), name="start")
            for _ in range(hops):
                await asyncio.sleep(0)
            async with asyncio.timeout(20):
                receipt = await scope.stop("cut")
                if receipt.outcome == "gone":
                    assert marked(mark) == []
                while marked(mark):  # who starts it was given up, and kills it when its start is over
                    await asyncio.sleep(0.01)
        finally:
            restorer.restore()

    asyncio.run(main())
