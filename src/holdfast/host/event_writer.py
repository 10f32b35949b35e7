"""One run's writes to the log: batching, back-pressure and retries.

Invariants
- All output of the run goes to the log through one buffer, in order, with at most one append in flight. The commit
  writes the events that are still buffered.
- A failed append is retried unchanged until the store accepts it; later writes wait until then.
- Once the writer no longer accepts events, new output is dropped, and `EventWriter.written` raises an error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from holdfast.errors import HoldfastError, QuotaExceeded, RunClosed, StaleFence
from holdfast.host.flush_beat import FLUSH_TICKS
from holdfast.host.store_retry import RETRY_S, retry_delay_s
from holdfast.protocol.events import Event, encode_event
from holdfast.storage.port import Append

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.host.context import HostContext
    from holdfast.host.flush_beat import BeatTurn, FlushBeat
    from holdfast.host.live_session import LiveSession
    from holdfast.storage.port import Appended, Lease

__all__ = ["EventWriter"]

FIRST_FLUSH_S = 0.0005
"""Delay of a run's first flush, before `FLUSH_TICKS` loop iterations. The output of a short run is therefore written
with the run's commit, even if iterations are slow."""
SILENT_S = 0.1
"""If a run has not flushed for this many seconds, its next event is flushed after `FIRST_FLUSH_S`, not on the beat,
unless the host is busy."""
BEHIND_AT = 1024
"""Number of buffered events at which the run starts to wait for the log."""
BEHIND_BYTES = 262_144
"""Number of bytes of buffered events at which the run starts to wait for the log."""
BATCH_LIMIT = 4096


class EventWriter:
    """Implements `holdfast.agents.ports.Recorder` for one run. Use it on the host's loop, except where noted.

    Parameters:
        on_append: callback, called after each append with the append's error, or with None if the append succeeded.
            The callback should then flush the events that were buffered during the append.
    """

    __slots__ = (
        "_batch",
        "_beat",
        "_buffered_bytes",
        "_context",
        "_failure",
        "_last_flush",
        "_lease",
        "_mode",
        "_nth",
        "_on_append",
        "_session",
        "_stored",
        "_taken",
        "_timer",
        "_waiting",
        "buffer",
        "in_flight",
        "tries",
    )

    def __init__(
        self,
        context: HostContext,
        beat: FlushBeat,
        session: LiveSession,
        lease: Lease,
        on_append: Callable[[BaseException | None], object],
    ) -> None:
        self._context = context
        self._beat = beat
        self._session = session
        self._lease = lease
        self._on_append = on_append
        self._mode: Literal["open", "flushing", "sealed", "closed"] = "open"
        self._failure: HoldfastError | None = None
        self.buffer: list[tuple[str, bytes]] = []
        """Encoded events that have not been passed to the store yet."""
        self._buffered_bytes = 0
        self._batch: list[tuple[str, bytes]] = []  # passed to the store, not yet confirmed
        self._nth = 0
        self.in_flight = False
        """Whether an append is in progress."""
        self._timer: asyncio.Handle | BeatTurn | None = None
        self._last_flush = 0.0
        self._taken = 0
        self._stored = 0
        self._waiting: list[asyncio.Future[None]] = []
        self.tries = 0
        """Number of failed attempts at the run's current write, whether an append, the commit or the release."""

    # ── for the run ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def behind(self) -> bool:
        """Whether the log lags behind the run's output. Thread-safe."""
        return len(self.buffer) >= BEHIND_AT or self._buffered_bytes >= BEHIND_BYTES

    def write(self, event: Event) -> None:
        """Buffer an event of the run."""
        if self._mode != "open":
            return
        encoded = encode_event(event)
        self.buffer.append(encoded)
        self._buffered_bytes += len(encoded[1])
        self._taken += 1
        if self._timer is None and not self.in_flight:
            self._timer = self._flush_later()

    async def written(self) -> None:
        """Wait until all events written so far are stored.

        Raises `RunClosed` if the writer stops accepting events first, or the error that was passed to `discard`.
        """
        goal = self._taken
        while self._stored < goal:
            if self._failure is not None:
                raise self._failure
            if self._mode != "open":
                raise RunClosed(f"run {self._lease.run_id} has ended")
            self._hurry()
            await self._changed()

    async def room(self) -> None:
        """Wait while the log lags behind the run's output."""
        while self.behind and self._mode == "open":
            self._hurry()
            await self._changed()

    def late(self) -> None:
        """Count a result that arrived too late and is discarded. Thread-safe."""
        self._context.incidents.counts["late_results"] += 1

    # ── for the owner ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def has_batch(self) -> bool:
        """Whether a batch is unconfirmed, so that it must be flushed again before any other write."""
        return bool(self._batch)

    @property
    def exhausted(self) -> bool:
        """Whether the current write has failed so often that callers should stop waiting for it."""
        return self.tries >= len(RETRY_S)

    def stop_accepting(self) -> None:
        """Drop new events from now on. Events that are already buffered are still flushed."""
        if self._mode == "open":
            self._mode = "flushing"

    def seal(self) -> None:
        """Leave the buffered events to the commit. From now on, `flush` only retries an unconfirmed batch."""
        if self._mode != "closed":
            self._mode = "sealed"
        self.cancel_timer()

    def discard(self, failure: HoldfastError) -> None:
        """Drop all events that are not stored yet, and make `written` raise `failure`."""
        self._failure = failure
        self.stop_accepting()
        self._batch = []
        self.buffer.clear()
        self._buffered_bytes = 0

    def close(self) -> None:
        """Stop writing, and wake all waiters."""
        self._mode = "closed"
        self.cancel_timer()
        self._on_append = _ignore  # it refers back to this
        self.wake()

    def wake(self) -> None:
        """Wake the callers that wait in `written` or `room`, so that they check their conditions again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def flush(self) -> None:
        """Append the unconfirmed batch again, or else the next batch, unless an append is in flight."""
        self.cancel_timer()
        if self.in_flight or self._mode == "closed":
            return
        if not self._batch:
            if not self.buffer or self._mode == "sealed":
                return
            self._batch = self.buffer[:BATCH_LIMIT]
            del self.buffer[:BATCH_LIMIT]
            self._buffered_bytes = sum([len(body) for _, body in self.buffer]) if self.buffer else 0
            self._nth += 1
        self._last_flush = self._context.loop.time()
        self.in_flight = True
        self._beat.append(Append(self._lease, self._batch, self._nth), self._appended)

    def flush_rest(self) -> None:
        """Flush the events buffered during an append, at once if the log lags behind, otherwise on the next beat."""
        if self.buffer and self._timer is None:
            if self.behind:
                self.flush()
            else:
                self._timer = self._flush_later()

    def retry(self, again: Callable[[], object], error: BaseException, what: str) -> None:
        """Report a failed write of the run and call `again` after a delay."""
        context = self._context
        context.store_failed(self._session.key, self._lease.run_id, what, error)
        delay_s = retry_delay_s(self.tries)
        self.tries += 1
        self._timer = context.loop.call_later(delay_s, again, context=context.variables)

    def cancel_timer(self) -> None:
        """Cancel the next flush or retry."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ── appends ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _flush_later(self) -> asyncio.Handle | BeatTurn:
        """Schedule a flush: soon if the run was silent for `SILENT_S` and the host is not busy, else on the beat."""
        context, beat = self._context, self._beat
        if context.loop.time() - self._last_flush >= SILENT_S and not beat.is_busy():
            beat.count()
            return context.loop.call_later(FIRST_FLUSH_S, self._flush_in, FLUSH_TICKS, context=context.variables)
        return beat.join(self.flush, last_flush=self._last_flush)

    def _flush_in(self, ticks: int) -> None:
        if ticks:
            context = self._context
            self._timer = context.loop.call_soon(self._flush_in, ticks - 1, context=context.variables)
        elif not self.in_flight:
            self.flush()

    def _hurry(self) -> None:
        """Flush at once because a caller waits for the log, unless the store is failing."""
        if not self.in_flight and not self.tries:
            self.flush()

    async def _changed(self) -> None:
        future: asyncio.Future[None] = self._context.loop.create_future()
        self._waiting.append(future)
        await future

    def _appended(self, result: Appended | BaseException) -> None:
        self.in_flight = False
        if self._mode == "closed":
            return
        error = result if isinstance(result, BaseException) else None
        if not isinstance(result, BaseException):
            self.tries = 0
            self._stored += len(self._batch)
            self._batch = []
            self._session.publish(result.events)
            self.wake()
        elif isinstance(result, (StaleFence, QuotaExceeded)):
            self.wake()
        else:
            # It may be stored anyway: the retry has the same number, so it has no second effect.
            self.retry(self.flush, result, "append")
        self._on_append(error)


def _ignore(error: BaseException | None) -> None:
    """Do nothing. Replaces the `on_append` callback once the writer is closed."""
