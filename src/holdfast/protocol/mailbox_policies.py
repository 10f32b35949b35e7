"""Mailbox decisions: how a session handles an arriving message, and which messages the next run takes.

Stores call these functions inside the writing transaction, so nothing comes between the check and the action.

Messages that one run takes together share a ``batch`` (the seq of its first message). ``queue`` opens a batch for
each message. ``collect`` joins the newest batch if that is a waiting ``collect`` batch. ``interrupt`` and ``rollback``
set the session's ``take_all_waiting``: the next run takes everything that waits up to that seq. A ``steer`` message
waits as in ``queue`` until its target run takes it.
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
    """One row of the decision table.

    ``start``: claim in the same transaction. ``interrupt``: stop the run that holds the slot (for ``rollback``, also
    undo it). ``take_all_waiting``: the next run takes all waiting messages. ``append_to_batch``: join an adjacent
    waiting ``collect`` batch.
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
    """Return the session's occupancy for a message of `policy`.

    Parameters:
        run_id: the run that holds the slot.
        waiting: number of messages in the mailbox.
        room: whether the host may start a run for this principal now.
    """
    if run_id is not None:
        return "busy"
    if not room or (waiting and policy not in ("interrupt", "rollback")):
        return "waiting"
    return "idle"


def decide(state: Occupancy, policy: str) -> Decision:
    """Return the decision for a message.

    Raises:
        SessionBusy: the policy is ``reject``, and a run is active, messages wait or the host is full.
        UnknownPolicy: the policy is unknown.
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
    """Return when a ``collect`` batch is due: `quiet_s` after `at`, at most `max_wait_s` after the first message."""
    return min(at + quiet_s, first_at + max_wait_s)


class Waiting(NamedTuple):
    """A waiting message, with the fields that `select_batch` needs.

    ``due_at`` is 0 for a message that may be taken at once.
    """

    seq: int
    batch: int
    due_at: float


class Taken(NamedTuple):
    """The seqs that the next run takes, in order; if empty, the time at which something is due."""

    seqs: tuple[int, ...]
    not_before: float = 0.0


def select_batch(waiting: Sequence[Waiting], *, take_all_waiting: int, now: float) -> Taken:
    """Return the messages that the next run takes.

    Parameters:
        waiting: the waiting messages, in order of seq.
        take_all_waiting: take everything up to this seq, due or not.
        now: seconds since the epoch.
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
