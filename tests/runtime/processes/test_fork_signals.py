"""A forked child has none of its parent's signals, and is in none of its scopes."""

from __future__ import annotations

import asyncio
import contextvars
import os
import posix
import signal
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from holdfast.runtime.adoption.tasks import install
from holdfast.runtime.adoption.threads import starting_scope
from holdfast.runtime.interrupt.interrupt import current_interrupt
from holdfast.runtime.interrupt.shield import shielded_by
from holdfast.runtime.scope.scope import Scope


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


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("on", ["thread", "loop", "bare"])
def test_a_forked_child_is_in_no_scope_though_a_lock_of_it_was_held_at_the_fork(on: str) -> None:
    """A pool of processes that starts threads, say: its processes would wait for that lock for ever."""
    statuses: list[int] = []

    def fork(scope: Scope) -> None:
        with scope.core.gate:
            in_fork = threading.Thread(target=fork_in, args=(scope,), daemon=True) if on == "bare" else None
            if in_fork is not None:
                in_fork.start()
                in_fork.join(20)
            else:
                fork_in(scope)

    def fork_in(scope: Scope) -> None:
        pid = posix.fork()  # the one in os would wait here for the lock, to make the child a member
        if pid == 0:
            status = 1
            try:
                homeless = starting_scope() is None
                thread = threading.Thread(target=time.sleep, args=(0,), daemon=True)
                thread.start()
                thread.join(10)
                status = 0 if homeless else 2
            finally:
                os._exit(status)
        deadline = time.monotonic() + 25
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses.append(os.waitstatus_to_exitcode(status))
                return
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    async def main() -> None:
        with install(asyncio.get_running_loop()):
            async with asyncio.timeout(60), Scope("call") as scope:
                if on == "loop":
                    fork(scope)
                else:
                    await scope.spawn(fork, scope, on="thread")

    asyncio.run(main())
    assert statuses == [0]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_neither_the_interrupt_nor_a_shield_reaches_into_a_forked_child() -> None:
    """A loop of the child would never stop what its parent's shield holds, and stop with its parent's scope."""
    statuses: list[int] = []

    async def main() -> None:
        other = asyncio.create_task(asyncio.sleep(0))
        async with asyncio.timeout(30), Scope("call") as scope, scope.interrupt.shield(timeout_s=10):
            pid = posix.fork()
            if pid == 0:
                status = 1
                try:
                    shield = shielded_by(other, contextvars.copy_context())
                    status = 2 if current_interrupt() is not None else 3 if shield is not None else 0
                finally:
                    os._exit(status)
            _, ended = os.waitpid(pid, 0)
            statuses.append(os.waitstatus_to_exitcode(ended))

    asyncio.run(main())
    assert statuses == [0]
