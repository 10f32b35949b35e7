"""A thread that a host had to abandon, and that goes on to start programs: ``hostile_thread.py <way> <hosts> <word>``.

``<hosts>`` says whether others follow ``after`` its own, or are open ``beside`` it. It prints as JSON how often the
thread started something after it had been refused once, what receipts of the other hosts said, and who is left.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import holdfast
from holdfast.agents.run import Run
from holdfast.errors import ScopeClosed
from holdfast.runtime.processes import procfs
from tests.runtime.processes_zoo import await_condition, living

_AT_MOST = 200
_HASTY = holdfast.Settings(abandon_after_s=0.3)
_word = sys.argv[3]
_kept: list[object] = []
_counts = {"started": 0, "refused": 0, "after": 0}
_over = threading.Event()


def by_popen() -> None:
    _kept.append(subprocess.Popen(["sleep", _word]))


def by_posix_spawn() -> None:
    os.posix_spawnp("sleep", ["sleep", _word], os.environ)


def by_fork() -> None:
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", _word])


def by_system() -> None:
    if os.system(f"sleep {_word} &") != 0:
        raise OSError("it was killed")


def by_multiprocessing(method: str) -> Callable[[], None]:
    def start() -> None:
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=os.execvp, args=("sleep", ["sleep", _word]))
        process.start()
        _kept.append(process)

    return start


def by_another_thread() -> None:
    errors: list[BaseException] = []

    def start() -> None:
        try:
            by_popen()
        except BaseException as error:
            errors.append(error)

    helper = threading.Thread(target=start)
    helper.start()
    helper.join()
    if errors:
        raise errors[0]


WAYS = {
    "popen": by_popen,
    "posix_spawn": by_posix_spawn,
    "fork": by_fork,
    "system": by_system,
    "multiprocessing-fork": by_multiprocessing("fork"),
    "multiprocessing-spawn": by_multiprocessing("spawn"),
    "thread": by_another_thread,
}


def hammer(run: Run) -> None:
    """Start programs, whatever is said; slowly, until it is refused, as each is a zombie of ours then."""
    while not _over.is_set() and _counts["started"] < _AT_MOST:
        try:
            time.sleep(0.0005 if _counts["refused"] else 0.01)
            WAYS[run.text]()
        except ScopeClosed:
            _counts["refused"] += 1
        except BaseException:  # it is interrupted
            continue
        else:
            _counts["started"] += 1
            _counts["after"] += _counts["refused"] > 0


async def until(condition: Callable[[], bool], what: str) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def refusals(count: int) -> None:
    """Wait until the thread was refused so often, or starts programs again."""
    before = _counts["refused"]
    await until(lambda: _counts["refused"] >= before + count or _counts["after"] > 0, "it is refused")


async def other(run: Run) -> None:
    """A program of another host, known by another word."""
    _kept.append(subprocess.Popen(["sleep", f"{_word}1"]))
    await run.interrupt.wait()


async def use(host: holdfast.Host, said: list[tuple[Any, ...]]) -> None:
    session = host.session("other")
    await session.send("go")
    await until(lambda: living(f"{_word}1") != [], "its program runs")
    receipt = await session.interrupt(grace_s=0.1)
    said.append((receipt.outcome, *receipt.survivors, *receipt.unattributed))


async def abandon(host: holdfast.Host) -> str:
    session = host.session("hostile")
    await session.send(sys.argv[1])
    await until(lambda: _counts["started"] >= 3, "it starts programs")
    receipt = await session.interrupt(grace_s=0.05)
    await refusals(1)
    return receipt.outcome


async def main() -> None:
    said: list[tuple[Any, ...]] = []
    if sys.argv[2] == "after":
        async with holdfast.Host(hammer, store="memory://", settings=_HASTY) as host:
            outcome = await abandon(host)
        for _ in range(4):
            await refusals(10)
            async with holdfast.Host(other, store="memory://") as host:
                await refusals(10)
                await use(host, said)
    else:
        async with holdfast.Host(other, store="memory://") as beside:
            async with holdfast.Host(hammer, store="memory://", settings=_HASTY) as host:
                outcome = await abandon(host)
                await use(beside, said)
            for _ in range(4):
                await refusals(10)
                await use(beside, said)
    await refusals(10)
    _over.set()
    await_condition(lambda: living(_word) == [] or _counts["after"] > 0, "what it started is gone")
    print(json.dumps({"outcome": outcome, "after": _counts["after"], "said": said, "left": len(living(_word))}))
    for pid in living(_word):  # only after a failure
        procfs.strike(pid, 9, lambda stat: True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
