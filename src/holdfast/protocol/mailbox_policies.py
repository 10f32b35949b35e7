"""Mailbox decisions: how a session handles an arriving message, and which messages the next run takes.

Stores call these functions inside the writing transaction, so no other write can come between a check and its action.

A run normally takes one batch of messages. The messages of a batch have the same ``batch``, which is the seq of the
first of these messages. A ``queue`` message opens its own batch. A ``collect`` message joins the newest batch if that
batch consists of waiting ``collect`` messages. An ``interrupt`` or ``rollback`` message makes the next run take all
messages that wait up to and including this message. A ``steer`` message waits like a ``queue`` message until its target
run takes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, cast

from holdfast.errors import SessionBusy, UnknownPolicy
from holdfast.protocol.messages import Disposition, Policy

__all__ = [
    "DECISIONS",
    "Decision",
    "Occupancy",
    "Taken",
    "Waiting",
    "collect_due_at",
    "decide",
    "occupancy",
    "select_batch",
]

Occupancy = Literal["idle", "waiting", "busy"]
"""``idle``: the next run may start now. ``waiting``: no run is active, but earlier messages wait or the host is full.
``busy``: a run holds the slot."""


class Decision(NamedTuple):
    """One entry of the decision table.

    Parameters:
        disposition: disposition of the message, for its receipt.
        start: whether a run is claimed for the message in the same transaction.
        interrupt: whether the run that holds the slot is stopped (and, for ``rollback``, undone).
        take_all_waiting: whether the next run takes all waiting messages.
        append_to_batch: whether the message joins the newest batch, if that batch consists of waiting ``collect``
            messages.
    """

    disposition: Disposition
    start: bool = False
    interrupt: bool = False
    take_all_waiting: bool = False
    append_to_batch: bool = False


Refusal = Literal["busy"]

DECISIONS: Mapping[tuple[Occupancy, Policy], Decision | Refusal] = {
    ("idle", "queue"): Decision("started", start=True),
    ("idle", "collect"): Decision("collecting", append_to_batch=True),
    ("idle", "interrupt"): Decision("started", start=True, take_all_waiting=True),
    ("idle", "reject"): Decision("started", start=True),
    ("idle", "steer"): Decision("started", start=True),
    ("idle", "rollback"): Decision("started", start=True, take_all_waiting=True),
    ("waiting", "queue"): Decision("queued"),
    ("waiting", "collect"): Decision("collecting", append_to_batch=True),
    ("waiting", "interrupt"): Decision("queued", take_all_waiting=True),
    ("waiting", "reject"): "busy",
    ("waiting", "steer"): Decision("queued"),
    ("waiting", "rollback"): Decision("queued", take_all_waiting=True),
    ("busy", "queue"): Decision("queued"),
    ("busy", "collect"): Decision("collecting", append_to_batch=True),
    ("busy", "interrupt"): Decision("interrupting", interrupt=True, take_all_waiting=True),
    ("busy", "reject"): "busy",
    ("busy", "steer"): Decision("steering"),
    ("busy", "rollback"): Decision("rolling_back", interrupt=True, take_all_waiting=True),
}


def occupancy(*, run_id: str | None, waiting: int, room: bool, policy: Policy) -> Occupancy:
    """Return the occupancy of a session when a message arrives.

    Parameters:
        run_id: id of the run that holds the session's slot; None if the slot is free.
        waiting: number of messages in the mailbox.
        room: whether the host may start a run for this principal now.
        policy: policy of the message. For ``interrupt`` and ``rollback``, a session with waiting messages still counts
            as idle.
    """
    if run_id is not None:
        return "busy"
    if not room or (waiting and policy not in ("interrupt", "rollback")):
        return "waiting"
    return "idle"


def decide(state: Occupancy, policy: str) -> Decision:
    """Return the decision for a message with this policy.

    Raises:
        SessionBusy: if the policy is ``reject`` and no run can start now, because a run is active, messages wait or
            the host is full.
        UnknownPolicy: if the policy is unknown.
    """
    row = DECISIONS.get((state, cast(Policy, policy)))
    match row:
        case Decision():
            return row
        case "busy":
            raise SessionBusy(
                "a run is already active" if state == "busy" else "messages are waiting, or the host is full"
            )
        case _:
            raise UnknownPolicy(f"unknown policy {policy!r}")


def collect_due_at(*, at: float, quiet_s: float, first_at: float, max_wait_s: float) -> float:
    """Return the time at which a ``collect`` batch is due.

    Parameters:
        at: time of the newest message.
        quiet_s: time after the newest message at which the batch is due, in seconds.
        first_at: time of the first message of the batch.
        max_wait_s: time after the first message at which the batch is due at the latest, in seconds.
    """
    return min(at + quiet_s, first_at + max_wait_s)


class Waiting(NamedTuple):
    """A waiting message, with the fields that `select_batch` needs.

    ``due_at`` is 0 for a message that may be taken at once.
    """

    seq: int
    batch: int
    due_at: float


class Taken(NamedTuple):
    """The seqs of the messages that the next run takes, in order.

    If no message may be taken yet, ``not_before`` is the time at which the first batch is due.
    """

    seqs: tuple[int, ...]
    not_before: float = 0.0


def select_batch(waiting: Sequence[Waiting], *, take_all_waiting: int, now: float) -> Taken:
    """Return the messages that the next run takes.

    Parameters:
        waiting: waiting messages, in order of seq.
        take_all_waiting: seq up to which all messages are taken, even if they are not due. If the first message has a
            higher seq (as is always the case with 0), only the first batch is taken, once the batch is due.
        now: current time, in seconds since the epoch.
    """
    if not waiting:
        return Taken(())
    head = waiting[0]
    if head.seq <= take_all_waiting:
        return Taken(tuple(w.seq for w in waiting if w.seq <= take_all_waiting))
    batch = [w for w in waiting if w.batch == head.batch]
    due_at = batch[-1].due_at
    if due_at > now:
        return Taken((), due_at)
    return Taken(tuple(w.seq for w in batch))
