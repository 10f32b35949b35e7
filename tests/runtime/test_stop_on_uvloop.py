"""Stops on uvloop, whose handles of times that are over know less than asyncio's."""

from __future__ import annotations

import asyncio
import sys

import pytest

from holdfast.runtime import Scope

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
        first = asyncio.ensure_future(scope.stop("first", grace_s=0.0, kill_after_s=0.0))
        second = asyncio.ensure_future(scope.stop("second", grace_s=0.0, kill_after_s=0.0))
        async with asyncio.timeout(10):
            receipts = await asyncio.gather(first, second)
        assert {receipt.cause.reason for receipt in receipts} == {"first"}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
