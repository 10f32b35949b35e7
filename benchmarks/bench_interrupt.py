"""What an interrupt costs: checking it, and waking 1 to 100,000 waiters, against `asyncio.Event` in the same run."""

from __future__ import annotations

import asyncio
import functools
import gc
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Coroutine
from typing import Any

from benchmarks.rows import Row, print_rows, ratio_row
from holdfast.runtime import Interrupt, check_interrupt
from holdfast.runtime.interrupt.interrupt import use

__all__ = ["check_rows", "foreign_rows", "rows", "wake_rows"]

Wait = Callable[[], Coroutine[Any, Any, object]]
Fire = Callable[[], object]

WAKE_TARGETS = {1: 2.0, 1_000: 1.1, 10_000: 0.8, 100_000: 0.5}


def _empty() -> None: ...


def check_rows() -> list[Row]:
    """The check of the current interrupt against a call of an empty function."""
    ratios: list[float] = []
    costs: list[float] = []
    with use(Interrupt()):
        for _ in range(15):
            empty_s = min(timeit.repeat(_empty, number=100_000, repeat=3))
            check_s = min(timeit.repeat(check_interrupt, number=100_000, repeat=3))
            ratios.append(check_s / empty_s)
            costs.append(check_s / 100_000)
    note = f"{statistics.median(costs) * 1e9:.0f} ns, median of {len(ratios)}"
    return [
        ratio_row("check of the current interrupt / an empty call", statistics.median(ratios), at_most=2.5, note=note)
    ]


async def _watch_turns(turns: list[float]) -> None:
    """Note how long each turn of the loop takes."""
    last = time.perf_counter()
    while True:
        await asyncio.sleep(0)
        now = time.perf_counter()
        turns.append(now - last)
        last = now


async def _round(count: int, wait: Wait, fire: Fire) -> tuple[float, float]:
    """Seconds from `fire` until all `count` waiters have returned, and the longest turn of the loop meanwhile."""
    left = count
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def waiter() -> None:
        nonlocal left
        await wait()
        left -= 1
        if not left:
            done.set_result(time.perf_counter())

    tasks = [asyncio.ensure_future(waiter()) for _ in range(count)]
    turns: list[float] = []
    watch = asyncio.ensure_future(_watch_turns(turns)) if count >= 10_000 else None
    await asyncio.sleep(0)
    turns.clear()
    started = time.perf_counter()
    fire()
    ended = await done
    await asyncio.sleep(0)
    if watch is not None:
        watch.cancel()
    del tasks
    return ended - started, max(turns, default=0.0)


async def _alternating(count: int, rounds: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    event_rounds, our_rounds = [], []
    for _ in range(rounds):
        event = asyncio.Event()
        if count > 1:
            gc.collect()
        event_rounds.append(await _round(count, event.wait, event.set))
        interrupt = Interrupt()
        if count > 1:
            gc.collect()
        our_rounds.append(await _round(count, interrupt.wait, interrupt.trigger))
    return event_rounds, our_rounds


def wake_rows(targets: dict[int, float] | None = None) -> list[Row]:
    """Waking N waiters of one loop from a task of that loop, and the longest stall of the loop with the most of them.

    Parameters:
        targets: how many waiters, and the ratio to `asyncio.Event` that is promised for them.
    """
    targets = WAKE_TARGETS if targets is None else targets
    rows: list[Row] = []
    for count, target in targets.items():
        rounds = max(7, min(500, 200_000 // count))
        event_rounds, our_rounds = asyncio.run(_alternating(count, rounds))
        event_s, event_turn_s = (statistics.median(column) for column in zip(*event_rounds, strict=True))
        our_s, our_turn_s = (statistics.median(column) for column in zip(*our_rounds, strict=True))
        note = f"{our_s * 1e6:,.1f} us against {event_s * 1e6:,.1f} us, median of {rounds}"
        rows.append(ratio_row(f"waking {count:,} waiters / asyncio.Event", our_s / event_s, at_most=target, note=note))
        if count == max(targets) and event_turn_s:
            note = f"{our_turn_s * 1e3:.1f} ms against {event_turn_s * 1e3:.1f} ms, median of {rounds}"
            ratio = our_turn_s / event_turn_s
            rows.append(ratio_row(f"longest stall, {count:,} waiters / asyncio.Event", ratio, at_most=0.1, note=note))
    return rows


class _Caller:
    """A thread that calls what it is given, and notes how long the call took and when it began."""

    def __init__(self) -> None:
        self._call: Fire | None = None
        self._go, self._idle = threading.Semaphore(0), threading.Semaphore(0)
        self.began = self.took_s = 0.0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def call(self, call: Fire | None) -> None:
        """Call it soon; None ends the thread."""
        self._call = call
        self._go.release()

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            call = self._call
            if call is None:
                return
            # The loop gets the time to go to sleep in its selector, where a foreign call has to wake it.
            time.sleep(0.0002)
            self.began = time.perf_counter()
            call()
            self.took_s = time.perf_counter() - self.began
            self._idle.release()

    def settle(self) -> float:
        """Seconds that the last call took."""
        self._idle.acquire()
        return self.took_s

    def close(self) -> None:
        """End the thread."""
        self.call(None)
        self._thread.join()


async def _foreign(rounds: int) -> tuple[list[float], list[float]]:
    loop = asyncio.get_running_loop()
    caller = _Caller()
    bare, ours = [], []
    for _ in range(rounds):
        future: asyncio.Future[None] = loop.create_future()
        caller.call(functools.partial(loop.call_soon_threadsafe, future.set_result, None))
        await future
        bare.append(time.perf_counter() - caller.began)
        caller.settle()
        interrupt = Interrupt()
        caller.call(interrupt.trigger)
        await interrupt.wait()
        ours.append(time.perf_counter() - caller.began)
        caller.settle()
    caller.close()
    return bare, ours


def foreign_rows(rounds: int = 2_000) -> list[Row]:
    """From a trigger on a foreign thread until the one waiting task runs, against a bare `call_soon_threadsafe`."""
    bare, ours = (statistics.median(column) for column in asyncio.run(_foreign(rounds)))
    note = f"{ours * 1e6:.0f} us against {bare * 1e6:.0f} us, median of {rounds}"
    return [ratio_row("waking a task from a thread / call_soon_threadsafe", ours / bare, at_most=1.3, note=note)]


def rows() -> list[Row]:
    """All rows of this benchmark."""
    return [*check_rows(), *wake_rows(), *foreign_rows()]


if __name__ == "__main__":
    print_rows(rows())
