"""A signal that ends a forked child is not taken for one to its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest
import uvloop

from holdfast.runtime.adoption import install


def fork_sleeper() -> int:
    pid = os.fork()
    if pid == 0:
        try:
            time.sleep(20)
        finally:
            os._exit(1)
    return pid


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_signal_to_a_forked_child_ends_it_and_is_not_seen_by_its_parent(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, seen.append, "SIGTERM")
        loop.add_signal_handler(signal.SIGUSR1, seen.append, "SIGUSR1")
        try:
            with install(loop):
                for _ in range(20):
                    pid = await asyncio.to_thread(fork_sleeper)
                    os.kill(pid, signal.SIGTERM)
                    _, status = await asyncio.to_thread(os.waitpid, pid, 0)
                    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
            os.kill(os.getpid(), signal.SIGUSR1)
            while "SIGUSR1" not in seen:
                await asyncio.sleep(0.001)
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGUSR1)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(asyncio.wait_for(main(), 60))
    assert seen == ["SIGUSR1"]
