"""Report R1 as a model: one process-global interrupt, its fix by thread ids, and sessions that run tools beside it."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Protocol

from holdfast.runtime.interrupt.interrupt import Interrupt, is_interrupted, use

__all__ = ["ByInterrupt", "ByThreadId", "Flags", "GlobalEvent", "OldCallersProxy", "run_code"]


class Flags(Protocol):
    """How sessions are interrupted and tools find out: the two reported forms, and the shipped one."""

    def begin(self, session: str) -> None:
        """The run of `session` starts on the calling thread."""
        ...

    def interrupt(self, session: str) -> bool:
        """Stop the run of `session`; True if it is said to have been told."""
        ...

    def clear(self, session: str) -> None:
        """The run of `session` is over."""
        ...

    def is_interrupted(self) -> bool:
        """What a tool asks."""
        ...

    def inside(self, session: str, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as the run of `session`, to be called on a thread."""
        ...

    def carried(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` as a tool of this run hands it to a helper thread or a pool."""
        ...


class GlobalEvent:
    """The first reported form: one event for the process."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def begin(self, session: str) -> None:
        """Nothing is kept per session."""

    def interrupt(self, session: str) -> bool:
        """Set the event."""
        self._event.set()
        return True

    def clear(self, session: str) -> None:
        """Clear the event."""
        self._event.clear()

    def is_interrupted(self) -> bool:
        """Look at the event."""
        return self._event.is_set()

    def inside(self, session: str, work: Callable[[], None]) -> Callable[[], None]:
        """Begin, then work."""
        return _begun(self, session, work)

    def carried(self, work: Callable[[], None]) -> Callable[[], None]:
        """Nothing is carried."""
        return work


class ByThreadId:
    """The fix that was shipped: a locked set of thread ids; a run notes its thread at its start, and clears it then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupted: set[int] = set()
        self._threads: dict[str, int] = {}

    def begin(self, session: str) -> None:
        """Note the thread, then clear what may be left of the one before."""
        ident = threading.get_ident()
        self._threads[session] = ident
        with self._lock:
            self._interrupted.discard(ident)

    def interrupt(self, session: str) -> bool:
        """Put the thread of the run into the set."""
        ident = self._threads.get(session)
        if ident is None:
            return False
        with self._lock:
            self._interrupted.add(ident)
        return True

    def clear(self, session: str) -> None:
        """Take it out again."""
        with self._lock:
            self._interrupted.discard(self._threads.get(session, 0))

    def is_interrupted(self) -> bool:
        """Whether the calling thread is in the set."""
        with self._lock:
            return threading.get_ident() in self._interrupted

    def inside(self, session: str, work: Callable[[], None]) -> Callable[[], None]:
        """Begin, then work."""
        return _begun(self, session, work)

    def carried(self, work: Callable[[], None]) -> Callable[[], None]:
        """Nothing is carried: a helper thread has an id of its own."""
        return work


class OldCallersProxy:
    """Keeps the old callers of the global event working: looks like an event, asks for the calling thread."""

    def __init__(self, flags: ByThreadId) -> None:
        self._flags = flags

    def is_set(self) -> bool:
        """Whether the calling thread is interrupted."""
        return self._flags.is_interrupted()

    def set(self) -> None:
        """Interrupt the calling thread, whoever that is."""
        with self._flags._lock:
            self._flags._interrupted.add(threading.get_ident())


class ByInterrupt:
    """The shipped form: each run has an `Interrupt` of its own, which is carried into what it starts."""

    def __init__(self) -> None:
        self._host = Interrupt(name="host")
        self._runs: dict[str, Interrupt] = {}

    def open(self, session: str) -> None:
        """A new run: its interrupt is there before its thread is."""
        self._runs[session] = self._host.child(name=session)

    def begin(self, session: str) -> None:
        """Nothing to note, nothing to clear."""

    def interrupt(self, session: str) -> bool:
        """Trigger the run's interrupt."""
        run = self._runs.get(session)
        return run is not None and run.trigger("stop")

    def clear(self, session: str) -> None:
        """The run is over; the next one gets an interrupt of its own."""
        self._runs.pop(session, None)

    def is_interrupted(self) -> bool:
        """Look at the current interrupt."""
        return is_interrupted()

    def inside(self, session: str, work: Callable[[], None]) -> Callable[[], None]:
        """Work with the run's interrupt as the current one."""
        self.open(session)
        run = self._runs[session]

        def begun() -> None:
            with use(run):
                work()

        return begun

    def carried(self, work: Callable[[], None]) -> Callable[[], None]:
        """Carry the context, as the runtime does for every thread that it starts."""
        context = contextvars.copy_context()
        return lambda: context.run(work)


def _begun(flags: Flags, session: str, work: Callable[[], None]) -> Callable[[], None]:
    def begun() -> None:
        flags.begin(session)
        work()

    return begun


def run_code(flags: Flags, steps: int, step: Callable[[int], None]) -> dict[str, object]:
    """The code execution tool: looks at the interrupt between its steps, and says how it ended."""
    for number in range(steps):
        if flags.is_interrupted():
            return {"status": "interrupted", "steps": number}
        step(number)
    return {"status": "success", "steps": steps}
