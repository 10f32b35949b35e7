"""Stops of many sessions at once, each with a program that plain `subprocess` started: against `run.process`, and how
long the loop stalls meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.rows import Row, growth_exponent, print_rows, ratio_row
from holdfast import Host, Run, Settings, agent
from holdfast.protocol.stopping import StopReceipt
from holdfast.runtime.process_host import process_host

__all__ = ["rows"]

SESSIONS = (25, 50, 100, 200)
ROUNDS = 5
TICK_S = 0.001
PROGRAM = ["env", "--ignore-signal=TERM", "sleep", "1000"]
AGENTS = ("foreign", "owned", "idle")

_started: list[subprocess.Popen[bytes]] = []


@agent
async def foreign(run: Run) -> None:
    """Start a program as any library does, and wait."""
    _started.append(subprocess.Popen(PROGRAM))
    await run.emit("on")
    await asyncio.sleep(1000)


@agent
async def owned(run: Run) -> None:
    """Start the same program by `run.process`, and wait."""
    await run.process(PROGRAM)
    await run.emit("on")
    await asyncio.sleep(1000)


@agent
async def idle(run: Run) -> None:
    """Wait, without a program."""
    await run.emit("on")
    await asyncio.sleep(1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One stop of many sessions.

    Parameters:
        elapsed_s: from the first interrupt to the last receipt.
        stall_s: the longest time in which the loop answered no timer.
        busy_s: the most CPU time that the loop's thread took between two answers: what of a stall is its own work.
        gone: how many receipts say that everything is gone.
    """

    elapsed_s: float
    stall_s: float
    busy_s: float
    gone: int


class LoopTimer:
    """A timer that comes again and again on the running loop, and notes how late it came at the worst, and the most
    CPU time that the loop's thread took in between."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.begin()
        self._arm()

    def begin(self) -> None:
        """Forget what was noted."""
        self.late_s = self.busy_s = 0.0

    def _arm(self) -> None:
        self._busy_before_s = time.thread_time()
        self._due = time.perf_counter() + TICK_S
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def _note(self) -> None:
        self.late_s = max(self.late_s, time.perf_counter() - self._due)
        self.busy_s = max(self.busy_s, time.thread_time() - self._busy_before_s)

    def _tick(self) -> None:
        self._note()
        self._arm()

    def close(self) -> None:
        """Come no more; the turn that is under way counts."""
        self._note()
        self._handle.cancel()


async def stop_at_once(host: Host, kind: str, count: int, round_number: int) -> Stop:
    """Start these sessions, wait until each has its program, and interrupt them in one turn of the loop."""
    sessions = [host.session(f"{kind}-{count}-{round_number}-{number}", agent=kind) for number in range(count)]
    for session in sessions:
        sent = await session.send("x")
        async for event in session.events(after=sent.cursor):
            if event.kind == "text.delta":
                break
    gc.collect()
    timer = LoopTimer()
    await asyncio.sleep(0.05)
    timer.begin()
    began = time.perf_counter()
    receipts: list[StopReceipt] = await asyncio.gather(*(session.interrupt("bench", grace_s=0) for session in sessions))
    elapsed_s = time.perf_counter() - began
    timer.close()
    while _started:
        _started.pop().wait()
    return Stop(
        elapsed_s=elapsed_s,
        stall_s=timer.late_s,
        busy_s=timer.busy_s,
        gone=sum(receipt.outcome == "gone" for receipt in receipts),
    )


@contextlib.asynccontextmanager
async def hosted() -> AsyncIterator[Host]:
    """A host that lets one principal have as many runs."""
    settings = Settings(drain_timeout_s=0.1, grace_s=0.2, principal_runs=max(SESSIONS))
    async with Host(foreign, agents=[owned, idle], store="memory://", settings=settings) as host:
        yield host


async def measured(sizes: Sequence[int], rounds: int) -> dict[tuple[str, int], list[Stop]]:
    """Stops of each kind of session, in turns, by kind and number of sessions."""
    found: dict[tuple[str, int], list[Stop]] = {}
    async with hosted() as host:
        for kind in AGENTS:
            await stop_at_once(host, kind, 1, -1)  # what is made once is there afterwards
        for count in sizes:
            for round_number in range(rounds):
                for kind in AGENTS if round_number % 2 else AGENTS[::-1]:
                    found.setdefault((kind, count), []).append(await stop_at_once(host, kind, count, round_number))
    return found


def _median_ms(stops: Sequence[Stop]) -> float:
    return statistics.median(stop.elapsed_s for stop in stops) * 1000


def _stall_note(stops: Sequence[Stop]) -> str:
    stalls = [stop.stall_s * 1000 for stop in stops]
    busy_ms = statistics.median(stop.busy_s for stop in stops) * 1000
    return f"{statistics.median(stalls):.0f} ms, best {min(stalls):.0f}, CPU {busy_ms:.0f}"


def rows(sizes: Sequence[int] = SESSIONS, rounds: int = ROUNDS) -> list[Row]:
    """All figures of this module; needs Linux."""
    process_host().start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measured(sizes, rounds))
    most = max(sizes)
    ratios = []
    for count in sizes:
        pairs = zip(found["foreign", count], found["owned", count], strict=True)
        ratio = statistics.median(ours.elapsed_s / theirs.elapsed_s for ours, theirs in pairs)
        note = (
            f"{_median_ms(found['foreign', count]):.0f} ms against {_median_ms(found['owned', count]):.0f} ms, "
            f"no grace, median of {rounds}"
        )
        name = f"stop of {count} sessions with a subprocess each / run.process"
        ratios.append(ratio_row(name, ratio, at_most=1.3, note=note))
    exponent = growth_exponent([(count, _median_ms(found["foreign", count])) for count in sizes])
    gone = sum(stop.gone for count in sizes for stop in found["foreign", count])
    all_stopped = rounds * sum(sizes)
    stall_ms = statistics.median(stop.stall_s for stop in found["foreign", most]) * 1000
    stalls = {kind: _stall_note(found[kind, most]) for kind in AGENTS}
    return [
        *ratios,
        Row(
            name=f"growth of that stop over {min(sizes)} to {most} sessions, exponent",
            value=exponent,
            unit="",
            target="<= 1.1",
            met=exponent <= 1.1,
            note="least squares on logarithms of the medians",
        ),
        Row(
            name="receipts of these stops that report gone",
            value=gone / all_stopped,
            unit="",
            target=">= 1",
            met=gone == all_stopped,
            note=f"{gone} of {all_stopped}",
        ),
        Row(
            name=f"longest stall of the loop in a stop of {most} with a subprocess each",
            value=stall_ms,
            unit="ms",
            target="<= 50",
            met=stall_ms <= 50,
            note=f"median of {rounds}: {stalls['foreign']} ms of its thread; "
            f"with run.process {stalls['owned']}; without programs {stalls['idle']}",
        ),
    ]


if __name__ == "__main__":
    print_rows(rows())
