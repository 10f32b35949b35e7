"""What the log of a session tells, event by event, and the promises that it must keep whatever the schedule was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.protocol.events import (
    Event,
    MessageAccepted,
    MessageSettled,
    MessageSteered,
    RunFinished,
    RunRolledBack,
    RunStarted,
    RunStopping,
)
from holdfast.protocol.messages import Policy
from holdfast.protocol.stopping import Cause

__all__ = ["Story"]


class Story:
    """The log of one session, read from its start. `tell` raises `AssertionError` where a promise is broken.

    Parameters:
        interrupts: how often a person asked for an interrupt.
    """

    def __init__(self, *, interrupts: int) -> None:
        self._interrupts = interrupts
        self._on: str | None = None
        self._must_start: str | None = None
        self._must_stop: set[str] = set()
        self._must_be_taken_back: set[str] = set()
        self._stopping: dict[str, Cause] = {}
        self._rolled_back: set[str] = set()
        self._waiting: list[tuple[str, Policy]] = []
        self._finished: dict[str, str] = {}
        self.took: dict[str, list[str]] = {}
        """What each run took when it began."""
        self.steered: dict[str, list[str]] = {}
        """What each run took later."""
        self.settled: dict[str, str] = {}

    def tell(self, events: Iterable[Event]) -> Story:
        """Read the whole log."""
        for event in events:
            if self._must_start is not None:
                assert isinstance(event, RunStarted), "a message that meets an idle session starts no run"
                assert event.messages == (self._must_start,)
                self._must_start = None
            match event:
                case MessageAccepted():
                    self._accepted(event.message_id, event.policy)
                case RunStarted():
                    self._started(event.run_id, event.messages)
                case MessageSteered():
                    self._steer(event.run_id, event.message_id)
                case RunStopping(run_id=run_id):
                    assert run_id == self._on, "a run is stopped that is not on"
                    assert run_id not in self._stopping, "an interrupt is recorded twice"
                    self._stopping[run_id] = event.cause
                    if event.cause.kind == "user":
                        self._interrupts -= 1
                        assert self._interrupts >= 0, "one interrupt stopped two runs"
                case RunRolledBack(run_id=run_id):
                    assert run_id in self._must_be_taken_back, "a run is taken back, and nobody asked for that"
                    self._rolled_back.add(run_id)
                case RunFinished():
                    self._finish(event)
                case MessageSettled():
                    self._settle(event)
                case _:
                    pass
        assert self._on is None, "a run was left on"
        assert not self._waiting, "a message was left waiting"
        return self

    def _accepted(self, message_id: str, policy: Policy) -> None:
        self._waiting.append((message_id, policy))
        match policy:
            case "reject":
                assert self._on is None, "accepted, though a run is on"
                self._must_start = message_id
            case "interrupt" if self._on is not None:
                self._must_stop.add(self._on)
            case "rollback" if self._on is not None:
                self._must_stop.add(self._on)
                self._must_be_taken_back.add(self._on)
            case _:
                pass

    def _started(self, run_id: str, messages: Sequence[str]) -> None:
        assert self._on is None, "two runs of one session at a time"
        assert run_id not in self.took, "a run begins twice"
        taken = self._next()
        assert list(messages) == [message_id for message_id, _ in self._waiting[:taken]], "the next run takes others"
        del self._waiting[:taken]
        self._on = run_id
        self.took[run_id] = list(messages)
        self.steered[run_id] = []

    def _next(self) -> int:
        """How many of those that wait the next run takes."""
        policies = [policy for _, policy in self._waiting]
        assert policies, "a run begins without a message"
        for at in range(len(policies), 0, -1):  # all up to the last that sweeps
            if policies[at - 1] in ("interrupt", "rollback"):
                return at
        if policies[0] != "collect":
            return 1
        return next((at for at, policy in enumerate(policies) if policy != "collect"), len(policies))

    def _steer(self, run_id: str, message_id: str) -> None:
        assert run_id == self._on, "a run is steered that is not on"
        assert run_id not in self._stopping, "a run is steered that is being stopped"
        assert (message_id, "steer") in self._waiting, "what steers a run does not wait for it"
        self._waiting.remove((message_id, "steer"))
        self.steered[run_id].append(message_id)

    def _finish(self, event: RunFinished) -> None:
        run_id = event.run_id
        assert run_id == self._on, "a run freed a slot that was not its own"
        self._on = None
        self._finished[run_id] = event.status
        crashed = event.cause is not None and event.cause.kind == "crash"
        if event.status == "failed":
            assert run_id not in self._stopping, "a run that was stopped has failed"
        if event.status == "interrupted":
            assert run_id in self._stopping or crashed, "a run was interrupted, and nobody asked for that"
            if run_id in self._stopping:
                assert event.cause is not None
                assert event.cause.kind == self._stopping[run_id].kind, "the first cause does not win"
        if run_id in self._must_stop:
            assert run_id in self._stopping, "a newer message did not stop the run"
        if run_id in self._must_be_taken_back:
            assert run_id in self._rolled_back, "a newer message did not take the run back"
            assert event.status == "interrupted"

    def _settle(self, event: MessageSettled) -> None:
        assert event.message_id not in self.settled, "a message was settled twice"
        self.settled[event.message_id] = event.state
        run_id = event.run_id
        if run_id is None:
            assert event.state == "withdrawn"
            left = [(message_id, policy) for message_id, policy in self._waiting if message_id != event.message_id]
            assert len(left) == len(self._waiting) - 1, "withdrawn, and it did not wait"
            self._waiting = left
            return
        assert event.message_id in (*self.took[run_id], *self.steered[run_id]), "settled by a run that never took it"
        expected = "superseded" if run_id in self._rolled_back else self._finished[run_id]
        assert event.state == expected, "a message and its run ended differently"
