"""Threads that race with a trigger, in all the orders that `frontrun` finds; each property is red on a faulty form."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import frontrun  # type: ignore[import-untyped]
import pytest

from holdfast.protocol.stopping import Cause
from holdfast.runtime.interrupt import interrupt as interrupt_module
from holdfast.runtime.interrupt.interrupt import Interrupt

pytestmark = pytest.mark.usefixtures("threads_explored")


@pytest.fixture
def threads_explored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `frontrun` work in an ordinary run of pytest, with gates that give way to its scheduler."""
    monkeypatch.setenv("FRONTRUN_ACTIVE", "1")
    monkeypatch.setattr(interrupt_module, "allocate_lock", Gate)


class Gate:
    """Does what the lock of a waiting thread does. `frontrun` takes a lock that its owner waits for for a deadlock."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(1)

    def acquire(self, timeout: float = -1) -> bool:
        assert timeout == -1
        return self._semaphore.acquire()

    def release(self) -> None:
        self._semaphore.release()


def explored(setup: Callable[[], Any], workers: Sequence[Callable[[Any], None]], sound: Callable[[Any], bool]) -> Any:
    # The systematic strategy does not see that `if latch` and `latch.setdefault` meet in one dict; the random one does
    # not need to.
    return frontrun.explore(setup, list(workers), sound, strategy="random", max_attempts=150, seed=1, detect_io=False)


class FaultyWait(Interrupt):
    """Looks at the latch, then enters and parks without looking again."""

    def wait_blocking(self, timeout_s: float | None = None) -> Cause | None:
        if not self._latch:
            gate = Gate()
            gate.acquire()
            self._gates[gate] = gate  # type: ignore[index,assignment]
            gate.acquire()
        return self.cause


class FaultyFirst(Interrupt):
    """Checks whether it is first, and later acts on it."""

    def trigger(self, reason: str = "", **_: Any) -> bool:
        if self._latch:
            return False
        self._latch["cause"] = (Cause(kind="user", reason=reason),)
        return True


class FaultyChild(Interrupt):
    """A child that looks at its parent first and hangs itself on it afterwards."""

    def follow(self, parent: Interrupt) -> None:
        triggered = parent.triggered
        self._parents = (parent,)
        parent._children.add(weakref.ref(self))
        if triggered:
            self.trigger()


class Waiting:
    """One thread waits, another triggers."""

    kind = Interrupt

    def __init__(self) -> None:
        self.interrupt = self.kind()
        self.answer: Cause | None = None

    def wait(self) -> None:
        self.answer = self.interrupt.wait_blocking()

    def trigger(self) -> None:
        self.interrupt.trigger("now")

    def woken(self) -> bool:
        return self.answer is not None and not self.interrupt._gates


class FaultyWaiting(Waiting):
    kind = FaultyWait


def test_no_wake_up_is_lost_between_check_and_park() -> None:
    workers = [Waiting.wait, Waiting.trigger]
    assert not explored(FaultyWaiting, workers, Waiting.woken).property_holds
    result = explored(Waiting, workers, Waiting.woken)
    assert result.property_holds, result.explanation


class Racing:
    """Two threads trigger."""

    kind = Interrupt

    def __init__(self) -> None:
        self.interrupt = self.kind()
        self.first: list[str] = []

    def left(self) -> None:
        if self.interrupt.trigger("left"):
            self.first.append("left")

    def right(self) -> None:
        if self.interrupt.trigger("right"):
            self.first.append("right")

    def one_won(self) -> bool:
        cause = self.interrupt.cause
        return cause is not None and self.first == [cause.reason]


class FaultyRacing(Racing):
    kind = FaultyFirst


def test_exactly_one_trigger_is_first_and_its_cause_stays() -> None:
    workers = [Racing.left, Racing.right]
    assert not explored(FaultyRacing, workers, Racing.one_won).property_holds
    result = explored(Racing, workers, Racing.one_won)
    assert result.property_holds, result.explanation


class Bearing:
    """A child is made while its parent is triggered."""

    kind = Interrupt

    def __init__(self) -> None:
        self.parent = Interrupt()
        self.child: Interrupt | None = None

    def bear(self) -> None:
        self.child = self.kind(parent=self.parent)

    def trigger(self) -> None:
        self.parent.trigger("now")

    def told(self) -> bool:
        return self.child is not None and self.child.triggered


class FaultyBearing(Bearing):
    kind = FaultyChild


def test_a_child_that_is_made_during_the_trigger_is_triggered() -> None:
    workers = [Bearing.bear, Bearing.trigger]
    assert not explored(FaultyBearing, workers, Bearing.told).property_holds
    result = explored(Bearing, workers, Bearing.told)
    assert result.property_holds, result.explanation


class Joining:
    """A link is made to two sources that are both triggered meanwhile."""

    def __init__(self) -> None:
        self.sources = [Interrupt(name="left"), Interrupt(name="right")]
        self.link: Interrupt | None = None

    def join(self) -> None:
        self.link = self.sources[0].linked(self.sources[1])

    def trigger(self) -> None:
        self.sources[1].trigger("now")

    def told(self) -> bool:
        return self.link is not None and self.link.triggered and not self.sources[0].triggered


def test_a_link_that_is_made_during_the_trigger_is_triggered() -> None:
    result = explored(Joining, [Joining.join, Joining.trigger], Joining.told)
    assert result.property_holds, result.explanation


class Watching:
    """A descriptor is asked for while the interrupt is triggered."""

    def __init__(self) -> None:
        self.interrupt = Interrupt()
        self.gates: list[int] = []

    def watch(self) -> None:
        self.gates.append(self.interrupt.fileno())

    def trigger(self) -> None:
        self.interrupt.trigger("now")

    def readable(self) -> bool:
        gate = self.interrupt._gates["file"]
        open_writers = getattr(gate, "_writers")  # noqa: B009
        self.interrupt.close_fd()
        return not open_writers and len(set(self.gates)) == 1


def test_a_descriptor_that_is_opened_during_the_trigger_is_readable_and_the_only_one() -> None:
    result = explored(Watching, [Watching.watch, Watching.watch, Watching.trigger], Watching.readable)
    assert result.property_holds, result.explanation
