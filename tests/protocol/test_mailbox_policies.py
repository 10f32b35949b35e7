"""Session decisions: every row, and a random walk against a naive model of a mailbox."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.errors import SessionBusy, UnknownPolicy
from holdfast.protocol.mailbox_policies import (
    DECISIONS,
    Occupancy,
    Waiting,
    collect_due_at,
    decide,
    occupancy,
    select_batch,
)
from holdfast.protocol.messages import Policy

POLICIES: tuple[Policy, ...] = get_args(Policy)
STATES: tuple[Occupancy, ...] = get_args(Occupancy)


def test_every_policy_has_a_row_in_every_state() -> None:
    assert set(DECISIONS) == {(state, policy) for state in STATES for policy in POLICIES}


@pytest.mark.parametrize("policy", ["", "Queue", "queue ", "nothing", "steer\0"])
def test_other_words_are_no_policy(policy: str) -> None:
    with pytest.raises(UnknownPolicy):
        decide("idle", policy)


def test_reject_is_refused_wherever_it_cannot_start_at_once() -> None:
    assert decide("idle", "reject").start
    for state in ("waiting", "busy"):
        with pytest.raises(SessionBusy):
            decide(state, "reject")


def test_a_rollback_sweeps_and_stops_only_what_runs() -> None:
    assert decide("busy", "rollback")[:4] == ("rolling_back", False, True, True)
    assert decide("idle", "rollback")[:4] == ("started", True, False, True)
    assert decide("waiting", "rollback")[:4] == ("queued", False, False, True)


def test_steering_stops_nothing_and_overtakes_nobody() -> None:
    assert decide("busy", "steer") == ("steering", False, False, False, False)
    assert decide("idle", "steer") == decide("idle", "queue")
    assert decide("waiting", "steer") == decide("waiting", "queue")


def test_an_interrupt_sweeps_and_stops_only_what_runs() -> None:
    assert decide("busy", "interrupt")[:4] == ("interrupting", False, True, True)
    assert decide("idle", "interrupt")[:4] == ("started", True, False, True)
    assert decide("waiting", "interrupt")[:4] == ("queued", False, False, True)


@pytest.mark.parametrize(
    ("run_id", "waiting", "room", "policy", "expected"),
    [
        (None, 0, True, "queue", "idle"),
        (None, 0, False, "queue", "waiting"),
        (None, 3, True, "queue", "waiting"),
        (None, 3, True, "interrupt", "idle"),
        (None, 3, False, "interrupt", "waiting"),
        (None, 3, True, "rollback", "idle"),
        (None, 3, True, "steer", "waiting"),
        ("r", 0, True, "reject", "busy"),
        ("r", 3, False, "interrupt", "busy"),
    ],
)
def test_occupancy(run_id: str | None, waiting: int, room: bool, policy: Policy, expected: str) -> None:
    assert occupancy(run_id=run_id, waiting=waiting, room=room, policy=policy) == expected


def test_a_collect_batch_is_due_after_the_quiet_but_no_later_than_its_longest_wait() -> None:
    assert collect_due_at(at=5.0, quiet_s=2.0, first_at=4.0, max_wait_s=10.0) == 7.0
    assert collect_due_at(at=13.5, quiet_s=2.0, first_at=4.0, max_wait_s=10.0) == 14.0


class Mailbox(RuleBasedStateMachine):
    """Arrivals, ends of runs and time, by the decisions; judged by what each policy promises."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.seq = 0
        self.running: tuple[int, ...] | None = None
        self.stopping = False
        self.waiting: list[tuple[Waiting, Policy, float]] = []
        self.sweep = 0
        self.taken: list[int] = []
        self.refused: set[int] = set()
        self.policy_of: dict[int, Policy] = {}
        self.steered: set[int] = set()

    @rule(policy=st.sampled_from(["queue", "collect", "interrupt", "reject", "steer", "rollback"]), room=st.booleans())
    def arrive(self, policy: Policy, room: bool) -> None:
        """A message comes."""
        self.seq += 1
        seq = self.seq
        run_id = None if self.running is None else "r"
        busy, first, sweeps = self.running is not None, not self.waiting, policy in ("interrupt", "rollback")
        state = occupancy(run_id=run_id, waiting=len(self.waiting), room=room, policy=policy)
        try:
            decision = decide(state, policy)
        except SessionBusy:
            assert policy == "reject"
            assert busy or not first or not room
            self.refused.add(seq)
            return
        assert policy != "reject" or (not busy and first and room), "what is to be rejected waits"
        assert decision.interrupt == (busy and sweeps), "a run is stopped that nobody wants stopped, or goes on"
        assert decision.take_all_waiting == sweeps
        assert decision.append_to_batch == (policy == "collect")
        assert decision.start == (not busy and room and (first or sweeps) and policy != "collect")
        self.policy_of[seq] = policy
        batch, first_at, due = seq, self.now, 0.0
        if decision.append_to_batch:
            if self.waiting and self.waiting[-1][1] == "collect":
                last = self.waiting[-1][0]
                batch = last.batch
                first_at = next(at for w, _, at in self.waiting if w.batch == batch)
            due = collect_due_at(at=self.now, quiet_s=2.0, first_at=first_at, max_wait_s=5.0)
        self.waiting.append((Waiting(seq, batch, due), policy, self.now))
        if decision.take_all_waiting:
            self.sweep = seq
        if decision.interrupt:
            assert self.running is not None
            self.stopping = True
        if decision.start:
            assert self.running is None
            assert room
            self.start()

    def due_at(self) -> float:
        """When what waits first may be taken: after a quiet of 2 s, or 5 s after the first that came close together."""
        if not self.waiting or self.waiting[0][1] != "collect" or self.waiting[0][0].seq <= self.sweep:
            return 0.0
        times = [at for _, _, at in itertools.takewhile(lambda item: item[1] == "collect", self.waiting)]
        return min(times[-1] + 2.0, times[0] + 5.0)

    def start(self) -> None:
        """Claim what is next, if anything is due."""
        taken = select_batch([w for w, _, _ in self.waiting], take_all_waiting=self.sweep, now=self.now)
        due_at = self.due_at()
        if not taken.seqs:
            assert not self.waiting or taken.not_before == due_at > self.now
            return
        assert due_at <= self.now, "taken before its time"
        assert list(taken.seqs) == [w.seq for w, _, _ in self.waiting[: len(taken.seqs)]], "not the oldest, or a hole"
        policies = [self.policy_of[seq] for seq in taken.seqs]
        if not {"interrupt", "rollback"} & set(policies) and taken.seqs[0] > self.sweep:
            assert len(taken.seqs) == 1 or set(policies) == {"collect"}, "joined what is not to be joined"
        if policies[0] == "collect" and taken.seqs[0] > self.sweep:
            rest = [p for _, p, _ in self.waiting[len(taken.seqs) : len(taken.seqs) + 1]]
            assert rest != ["collect"], "left an adjacent collect behind"
        self.running = taken.seqs
        self.taken.extend(taken.seqs)
        del self.waiting[: len(taken.seqs)]

    @precondition(lambda self: self.running is not None)
    @rule()
    def end(self) -> None:
        """The run ends, and the next begins."""
        was_stopped, self.running, self.stopping = self.stopping, None, False
        self.start()
        if was_stopped:
            assert self.running is not None
            assert not [w for w, _, _ in self.waiting if w.seq <= self.sweep], "an interrupt left something waiting"

    @precondition(lambda self: self.running is not None and not self.stopping)
    @rule()
    def steer(self) -> None:
        """The run takes what was sent to steer it."""
        steering = [w.seq for w, policy, _ in self.waiting if policy == "steer"]
        self.steered.update(steering)
        self.waiting = [item for item in self.waiting if item[0].seq not in steering]

    @precondition(lambda self: self.running is None)
    @rule()
    def claim(self) -> None:
        """The host asks for work."""
        self.start()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.now += seconds

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        """Each message is taken, waiting or refused; taken in the order in which it came."""
        assert self.taken == sorted(set(self.taken))
        assert not set(self.taken) & self.steered
        known = set(self.taken) | self.steered | {w.seq for w, _, _ in self.waiting} | self.refused
        assert known == set(range(1, self.seq + 1))


Mailbox.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestMailbox = Mailbox.TestCase
