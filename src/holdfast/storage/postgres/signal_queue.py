"""The hints that wait to be sent to the other nodes, and those that were heard, whatever carries them.

- Hints that wait are merged. Hints of kind ``changed`` and ``created`` wait for up to `PACE_S`, so that a stream costs
  few of them.
- While the connection is lost, hints are dropped: the other nodes poll.
- A message is a kind and session numbers, in ASCII: ``changed 7 12``. Over NATS, a number may be followed by the seq of
  the session's newest event: ``changed 7:120 12``. In notifications, nodes of an older version would not understand it.
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from holdfast.clock import system_clock
from holdfast.storage.cluster import CommittedEvents, OnEvents, OnSignals, SignalKind

__all__ = ["PACE_S", "SignalQueue"]

PACE_S: Final = 0.01
_OFF: Final = "signals are off"
_KINDS: Final[tuple[SignalKind, ...]] = ("interrupt", "request", "ready", "created", "changed")
_URGENT: Final = ("interrupt", "request", "ready")
_TOGETHER: Final = 190
"""Maximum number of sessions in one message: a notification of PostgreSQL may have 8000 bytes, a number 19 digits."""
_LIMIT: Final = 10_000
"""Number of sessions that wait to be sent or to be passed on above which others are left to polls."""
_LARGEST: Final = 2**63 - 1
"""The largest number of a session."""

_Hints = dict[SignalKind, dict[int, int]]


class SignalQueue(abc.ABC):
    """The part of `holdfast.storage.cluster.Signals` that does not depend on what carries them.

    A subclass implements the thread that sends what `take` returns, and passes what it receives to `hear`.

    Parameters:
        sends_seqs: whether messages contain the seqs of the sessions' newest events.
    """

    def __init__(self, *, sends_seqs: bool = False) -> None:
        self._sends_seqs = sends_seqs
        self._lock = threading.Lock()
        self._waiting: _Hints = {}
        self._heard: _Hints = {}
        self._listener: tuple[asyncio.AbstractEventLoop, OnSignals] | None = None
        self._sent_at = 0.0
        self._thread: threading.Thread | None = None
        self.is_closing = False
        self.sent = 0
        self.received = 0
        self.problem: str | None = _OFF
        self.has_tried = False

    @abc.abstractmethod
    def run(self) -> None:
        """Exchange signals until `is_closing`, in a thread of its own."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Wake the thread, because something waits to be sent, or because it is to end. Thread-safe."""

    def before_hints(self) -> None:
        """Pass on the events that were received before the hints that are passed on next. Called on the loop."""

    def start_thread(self) -> None:
        """Start the thread."""
        self.is_closing = False
        self.has_tried = False
        self.problem = "not connected yet"
        self._thread = threading.Thread(target=self.run, name="holdfast-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what waits, and end the thread. It blocks until the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._lock:
            self.is_closing = True
        self.wake()
        thread.join()
        self.problem = _OFF

    def send(self, kind: SignalKind, sessions: Mapping[int, int]) -> None:
        """See `Signals.send`."""
        with self._lock:
            if self.problem is not None or self.is_closing:
                return
            was_urgent = self._is_urgent()
            is_first = not self._waiting
            waiting = self._waiting.setdefault(kind, {})
            if len(waiting) < _LIMIT:
                _merge(waiting, sessions)
            wakes = is_first or (self._is_urgent() and not was_urgent)
        if wakes:
            self.wake()

    def publish(self, commits: Iterable[CommittedEvents]) -> None:
        """See `Signals.publish`. Does nothing: hints only."""

    def follow(self, session: int) -> None:
        """See `Signals.follow`. Does nothing: hints only."""

    def listen(self, on_signals: OnSignals, on_events: OnEvents) -> None:
        """See `Signals.listen`."""
        self._listener = (asyncio.get_running_loop(), on_signals)

    def _is_urgent(self) -> bool:
        return any(kind in self._waiting for kind in _URGENT)

    # ── for the thread ───────────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> list[str]:
        """Take the messages that are to be sent now. Call `on_sent` when they are sent."""
        with self._lock:
            paced = self._sent_at + PACE_S > system_clock.monotonic()
            if paced and not self._is_urgent() and not self.is_closing:
                return []
            hints, self._waiting = self._waiting, {}
        seqs = self._sends_seqs
        return [text for kind in _KINDS if kind in hints for text in _messages(kind, hints[kind], seqs=seqs)]

    def on_sent(self, count: int) -> None:
        """Note that `count` messages were sent."""
        self.sent += count
        self._sent_at = system_clock.monotonic()

    def wait_s(self) -> float | None:
        """Return how long to wait until `take` has something; None until `wake` is called."""
        with self._lock:
            return max(0.0, self._sent_at + PACE_S - system_clock.monotonic()) if self._waiting else None

    def lost(self, problem: str) -> None:
        """Drop what waits, because the connection is lost for this reason."""
        with self._lock:
            self.problem = problem
            self.has_tried = True
            self._waiting.clear()

    def works(self) -> None:
        """Note that the connection is there."""
        self.problem = None
        self.has_tried = True

    def hear(self, message: str) -> None:
        """Note a message of another node; ignore those that this module did not write."""
        kind, _, numbers = message.partition(" ")
        for known in _KINDS:
            if kind == known:
                self.received += 1
                with suppress(ValueError):
                    sessions = {int(number): int(seq or 0) for number, _, seq in map(_parts, numbers.split()[:_LIMIT])}
                    with self._lock:
                        heard = self._heard.setdefault(known, {})
                        if len(heard) < _LIMIT and all(0 < session <= _LARGEST for session in sessions):
                            _merge(heard, sessions)

    def deliver(self) -> None:
        """Pass what was heard to the loop. What is heard before the loop takes it is merged."""
        listener = self._listener
        with self._lock:
            if not self._heard or listener is None:
                return
        loop, on_signals = listener
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._pass_on, on_signals)

    def _pass_on(self, on_signals: OnSignals) -> None:
        with self._lock:
            heard, self._heard = self._heard, {}
        try:
            self.before_hints()
        finally:
            if heard:
                on_signals(heard)


def _parts(number: str) -> tuple[str, str, str]:
    return number.partition(":")


def _merge(hints: dict[int, int], sessions: Mapping[int, int]) -> None:
    for session, seq in sessions.items():
        hints[session] = max(seq, hints.get(session, 0))


def _messages(kind: SignalKind, sessions: Mapping[int, int], *, seqs: bool) -> list[str]:
    numbers = [f"{session}:{seq}" if seqs and seq else str(session) for session, seq in sessions.items()]
    parts = range(0, max(1, len(numbers)), _TOGETHER)
    return [" ".join((kind, *numbers[start : start + _TOGETHER])) for start in parts]
