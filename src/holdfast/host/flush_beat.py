"""The beat on which the runs of a host flush their output, so that one commit stores the output of many runs.

Invariants
- All flushes of a beat share one timer and one write to the store. A beat without flushes has no timer.
- The results of a write are passed on in the order of its appends, before any later write's.
- A flush that raises is reported as an incident. The other flushes of the beat still happen.
- The flushes of a beat happen a few loop iterations after its time. A short run whose output came just before the beat
  ends meanwhile and cancels its turn, so its output is written with its commit, not by an append of its own.
- The beat only delays output. What a run commits, and what a caller waits for, does not wait for the beat.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from holdfast.errors import HoldfastError
    from holdfast.host.context import HostContext
    from holdfast.storage.port import Append, Appended

__all__ = ["FLUSH_EVERY_S", "FLUSH_TICKS", "BeatTurn", "FlushBeat"]

FLUSH_EVERY_S = 0.02
"""Approximate interval between the flushes of a run with steady output, and the interval of the beat in a busy host."""
BEAT_S = 0.005
"""Interval of the beat if few runs have output."""
LONG_BEAT_S = 2 * FLUSH_EVERY_S
"""Interval of the beat if very many runs have output, so that several pieces of a run's output share an append."""
FLUSH_TICKS = 4
"""Number of loop iterations before a flush, so that the output of a short run is written with the run's commit."""
COARSE_S = 0.001
"""Resolution of a coarse loop clock. A run that flushed on a beat does not flush on it again."""
BUSY_AT = 16
"""Number of flushes within `LONG_BEAT_S` at which a host is busy: a commit for each of them would cost more than the
output itself."""
VERY_BUSY_AT = 64
"""Number of flushes within `LONG_BEAT_S` at which the beat is long."""


class BeatTurn:
    """One flush of one run on a beat; created by `FlushBeat.join`."""

    __slots__ = ("_flush",)

    def __init__(self, flush: Callable[[], object]) -> None:
        self._flush: Callable[[], object] | None = flush

    def cancel(self) -> None:
        """Cancel the flush. Idempotent."""
        self._flush = None

    def run(self) -> None:
        """Flush, unless this turn was cancelled."""
        if self._flush is not None:
            self._flush()


_Append = tuple["Append", "Callable[[Appended | BaseException], object]"]


class FlushBeat:
    """The beats of one host. Use it on the host's loop only."""

    __slots__ = ("_beats", "_collected", "_context", "_joined", "_joined_before", "_window")

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._beats: dict[float, list[BeatTurn]] = {}
        self._collected: list[_Append] | None = None  # the appends of the flushes of this beat
        self._window = 0
        self._joined = 0
        self._joined_before = 0

    def is_busy(self) -> bool:
        """Whether many runs have output, so that each of them flushes on the beat only."""
        return self._count(self._context.loop.time(), 0) > BEAT_S

    def count(self) -> None:
        """Count a flush that does not happen on a beat."""
        self._count(self._context.loop.time(), 1)

    def join(self, flush: Callable[[], object], *, last_flush: float) -> BeatTurn:
        """Call `flush` on the next suitable beat, and return a handle that can cancel the call.

        Parameters:
            last_flush: time of the run's last flush, by the loop's clock. The next one is about `FLUSH_EVERY_S` later.
        """
        loop = self._context.loop
        now = loop.time()
        every_s = self._count(now, 1)
        due = max(now, last_flush + max(FLUSH_EVERY_S - every_s, 0.0) + COARSE_S)
        at = math.ceil(due / every_s) * every_s
        turns = self._beats.get(at)
        if turns is None:
            turns = self._beats[at] = []
            loop.call_at(at, self._beat, at, context=self._context.variables)
        turn = BeatTurn(flush)
        turns.append(turn)
        return turn

    def append(self, request: Append, done: Callable[[Appended | BaseException], object]) -> None:
        """Write events of a run: with the other flushes of the beat, if a flush calls this, otherwise at once.

        Parameters:
            done: callback, called with the result or the error of the append.
        """
        if self._collected is None:
            self._write([(request, done)])
        else:
            self._collected.append((request, done))

    def _beat(self, at: float) -> None:
        self._flush_in(FLUSH_TICKS, self._beats.pop(at))

    def _flush_in(self, ticks: int, turns: list[BeatTurn]) -> None:
        if ticks:
            self._context.loop.call_soon(self._flush_in, ticks - 1, turns, context=self._context.variables)
            return
        self._collected = []
        for turn in turns:
            try:
                turn.run()
            except Exception as error:
                self._context.store_failed(None, None, "flush", error)
        collected, self._collected = self._collected, None
        if collected:
            self._write(collected)

    def _write(self, appends: Sequence[_Append]) -> None:
        context = self._context
        written = context.store.append_all([request for request, _ in appends], stored_limit=context.run_stored_limit)
        written.add_done_callback(partial(self._written, appends), context=context.variables)

    def _written(self, appends: Sequence[_Append], written: asyncio.Future[list[Appended | HoldfastError]]) -> None:
        error = written.exception()
        results = written.result() if error is None else [error] * len(appends)
        for (_, done), result in zip(appends, results, strict=True):
            try:
                done(result)
            except Exception as failure:
                self._context.store_failed(None, None, "append", failure)

    def _count(self, now: float, flushes: int) -> float:
        """Count flushes, and return the interval of the beat."""
        window = int(now / LONG_BEAT_S)
        if window != self._window:
            self._joined_before = self._joined if window == self._window + 1 else 0
            self._window, self._joined = window, 0
        self._joined += flushes
        most = max(self._joined, self._joined_before)
        if most < BUSY_AT:
            return BEAT_S
        return FLUSH_EVERY_S if most < VERY_BUSY_AT else LONG_BEAT_S
