"""Takeovers: the runs that a host had when it was killed or stopped, and how long until others had them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from holdfast.proof.checker.facts import Facts, LogRun
from holdfast.proof.history import SendAcknowledged
from holdfast.protocol.events import RunFinished, RunRestarted

__all__ = ["ClusterFigures", "Takeover", "cluster_figures", "takeovers"]


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a host had when it was killed, stopped or cut off from its database.

    Parameters:
        run_id: the run.
        host_pid: pid of the host that had the run.
        cause: what happened to this host.
        took_s: time until another host had recorded the restart or the end of the run, in seconds.
    """

    run_id: str
    host_pid: int
    cause: str
    took_s: float


class ClusterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Closing figures of a storm over several hosts.

    Parameters:
        accepted: number of accepted messages.
        lost: acknowledged messages that are not in their logs or were never settled.
        doubled: messages that were accepted, taken or settled twice, and calls that are not idempotent and ran twice.
        takeovers: number of runs that were taken over.
        longest_takeover_s: the longest time that one of them took, in seconds.
    """

    accepted: int
    lost: int
    doubled: int
    takeovers: int
    longest_takeover_s: float


def takeovers(facts: Facts) -> Iterator[Takeover]:
    """Yield all takeovers; none if the history does not tell the time of day.

    A run counts if its log shows it active when its host was killed, or stopped for at least as long as others need to
    take it over; and, if the host continued, if another one had taken the run over by then.
    """
    zero = facts.opened.zero
    if not zero:
        return
    ends = [(pid, at, float("inf"), "killed") for pid, at in facts.killed_at.items()]
    ends += [
        (pid, absence.began_at, absence.at, absence.why)
        for pid, absences in facts.absences_of.items()
        for absence in absences
    ]
    for pid, at, until, cause in ends:
        for run in facts.run_logs.values():
            after = _taken_over_at(facts, run, pid, zero + at, zero + until)
            if after is not None:
                yield Takeover(run_id=run.run_id, host_pid=pid, cause=cause, took_s=after - zero - at)


def _taken_over_at(facts: Facts, run: LogRun, pid: int, gone: float, back: float) -> float | None:
    """Return the time of day at which a run was restarted or ended that the host `pid` had when it was gone."""
    mine = [attempt.attempt for attempt in facts.attempts.get(run.run_id, ()) if attempt.stamps[0].host_pid == pid]
    if not mine or not run.started or run.started[0].at >= gone:
        return None
    for event in run.events:
        if isinstance(event, RunRestarted):
            if event.at < gone:
                if event.attempt > mine[-1]:
                    return None  # another host had it by then
            else:
                return event.at if event.at < back and event.attempt == mine[-1] + 1 else None
        elif isinstance(event, RunFinished):
            return event.at if gone <= event.at < back else None
    return None


def cluster_figures(facts: Facts) -> ClusterFigures:
    """Return the closing figures of a complete history."""
    taken = [takeover.took_s for takeover in takeovers(facts)]
    accepted = lost = doubled = 0
    for attempt, answer in facts.sends():
        if isinstance(answer, SendAcknowledged) and answer.disposition != "duplicate":
            accepted += 1
            log = facts.logs.get((attempt.principal, attempt.session))
            lost += log is None or answer.message_id not in log.accepted or answer.message_id not in log.settled
    for log in facts.logs.values():
        for events in (log.accepted, log.taken, log.settled):
            doubled += sum(len(found) > 1 for found in events.values())
        contents = [events[0].content for events in log.accepted.values()]
        doubled += len(contents) - len(set(contents))
    once = [stamp.effect for stamp in facts.stamps if stamp.what == "effect" and not stamp.idempotent]
    return ClusterFigures(
        accepted=accepted,
        lost=lost,
        doubled=doubled + len(once) - len(set(once)),
        takeovers=len(taken),
        longest_takeover_s=round(max(taken, default=0.0), 2),
    )
