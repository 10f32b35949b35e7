"""Host statistics: counters, the counts of kept and broken promises, and incidents for the operator."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Literal

import msgspec

__all__ = [
    "COUNTS",
    "PROMISES",
    "DrainReport",
    "HostStatistics",
    "Incident",
    "IncidentKind",
    "IncidentLog",
    "PromiseCount",
    "PromiseCounters",
    "Recovery",
]

IncidentKind = Literal[
    "loop_blocked",
    "quarantined",
    "survivors",
    "store",
    "lease_lost",
    "restart_loop",
    "background",
    "unanswered",
    "toolset",
    "schedule",
    "connections",
    "budget",
    "workspace_pool",
    "event_archive",
    "agent",
]

PROMISES: dict[str, tuple[str, str, str]] = {
    "P1": ("broadcast", "members that an interrupt ended", "members left out of a receipt that says gone"),
    "P2": ("isolation", "runs interrupted by a cause of their own", "runs interrupted by another run's cause"),
    "P3": ("stopped means stopped", "receipts", "processes that outlived their receipt"),
    "P4": ("one run per session", "claims", "claims that met a run of the same session in this host"),
    "P5": ("no message lost", "messages settled", "runs that settled messages other than those they took"),
    "P6": ("valid transcript", "transcripts committed", "transcripts with a call that lacks exactly one result"),
    "P7": ("honest streams", "events given to readers", "events given out of order"),
    "P8": ("no leaks", "runs that ended with an empty scope", "runs that left members missing from their receipt"),
    "P9": ("bounded", "refusals at a limit", "mailboxes over their limit"),
    "P10": ("atomic state", "state changes", "ends refused as an illegal change"),
    "P11": ("crash-safe", "runs rescued after a crash", "runs that lost their session while the host ran"),
    "P12": ("clean shutdown", "runs finished or suspended by a drain", "orphans of a drain"),
    "P13": ("fair", "sessions admitted in turn", "not counted here: the storm judges it"),
    "P14": ("private", "refusals at a principal's own limits", "not counted here: the storm judges it"),
    "P16": ("walled", "programs of tools started behind a wall", "not counted here: the storm judges it"),
}
"""Each promise that a host checks: its name, and the meaning of its `kept` and `broken` counters."""


COUNTS: dict[str, str] = {
    "sends_<disposition>": "messages accepted, by disposition",
    "runs_started": "runs started, resumed ones included",
    "runs_<status>": "runs ended, by status",
    "interrupts_<cause>": "runs interrupted, by kind of cause",
    "stops_<outcome>": "stop receipts, by outcome",
    "steered": "messages delivered to an active run",
    "rolled_back": "runs rolled back",
    "suspended": "questions asked of people",
    "resumed": "suspended runs that got their last answer",
    "questions_expired": "questions that expired without an answer",
    "abandoned": "tasks and threads that did not stop and were quarantined",
    "runs_lost": "runs that this host gave up because another host had taken over their sessions",
    "runs_taken_over": "runs of other hosts that were taken over after their leases had ended",
    "runs_reclaimed": "runs that were found in the store as this host's own, because the reply of a claim was lost",
    "claims_late": "claimed runs that did not start, because the reply came after the end of this host's lease",
    "stale_writes_refused": "writes that the store refused because the run had ended or belonged to another host",
    "late_results": "outputs and results that came after the end of their run or call, and were discarded",
    "gaps": "gaps reported to readers",
    "programs_ended_<resource>": "programs ended because their principal used too much, by resource",
    "events_archived": "events written to event_archive before they were deleted",
    "rows_pruned": "rows of the store that retention dropped or changed",
    "ticks_fired": "schedule ticks whose message was accepted",
    "ticks_missed": "schedule ticks dropped by the miss policy",
    "ticks_refused": "schedule ticks whose message was refused",
    "connections_<reason>": "connections that the server closed: `no_room`, `refused` beyond a share, or `too_slow`",
    "incidents_<kind>": "incidents, by kind",
}
"""All counters of a host except those of the promises; a name with ``<…>`` stands for one counter per value."""


class PromiseCount(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of how often a promise was kept and broken in this process."""

    name: str
    kept: int
    broken: int


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that the operator should know about.

    Parameters:
        at: time of the incident, in seconds since the epoch.
        kind: category of the incident.
        text: description of the incident, with advice.
        session: key of the session concerned; None if it is unknown.
        run_id: id of the run concerned; None if it is unknown.
        stack: stack of the blocked loop or of the abandoned task or thread; empty for other incidents.
    """

    at: float
    kind: IncidentKind
    text: str
    session: str | None = None
    run_id: str | None = None
    stack: tuple[str, ...] = ()


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the recovery at startup.

    Parameters:
        restarted: ids of the runs that were resumed.
        restarted_in: their sessions, in the same order, each after its owner unless that is ``local``.
        interrupted: ids of the runs that were interrupted.
        interrupted_in: their sessions, likewise.
        waiting: number of sessions that were queued because they have waiting messages.
        waiting_in: the first five of these sessions.
    """

    restarted: tuple[str, ...] = ()
    restarted_in: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()
    interrupted_in: tuple[str, ...] = ()
    waiting: int = 0
    waiting_in: tuple[str, ...] = ()


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a drain.

    Parameters:
        finished: number of runs that ended before the drain could stop or unload them.
        suspended: ids of the runs that were unloaded; each resumes at the next start, or once its questions are
            answered.
        interrupted: ids of the runs that were interrupted.
        waiting: number of sessions that still wait for a run slot; their messages stay in the mailboxes.
        orphans: descriptions of tasks, threads and processes that may still be alive, and of runs whose end the store
            did not accept; normally empty.
        ended_background: descriptions of background work that the drain ended, such as programs of idle sessions.
        elapsed_s: duration of the drain, in seconds.
    """

    finished: int = 0
    suspended: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()
    waiting: int = 0
    orphans: tuple[str, ...] = ()
    ended_background: tuple[str, ...] = ()
    elapsed_s: float = 0.0


class HostStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a host.

    Parameters:
        node_id: id of the host.
        pid: process id of the host.
        started_at: time at which the host started, in seconds since the epoch.
        draining: whether the host refuses new work.
        sessions_live: number of sessions in memory.
        running: number of active runs.
        awaiting_slot: number of sessions that wait for a slot.
        awaiting_pool: number of sessions that wait for a host of a ``workspace_pool`` that no host declares now.
        event_subscribers: number of open event streams.
        counts: all counters except those of the promises, by name.
        promises: the counters of each promise, by the promise's number, such as ``P1``.
    """

    node_id: str
    pid: int
    started_at: float
    draining: bool
    sessions_live: int
    running: int
    awaiting_slot: int
    awaiting_pool: int = 0
    event_subscribers: int
    counts: dict[str, int]
    promises: dict[str, PromiseCount]


class PromiseCounters:
    """Counters of kept and broken promises in this process. Callers add to `kept` and `broken` directly."""

    def __init__(self) -> None:
        # Incrementing a Counter takes three times as long, and each run makes a dozen increments.
        self.kept: defaultdict[str, int] = defaultdict(int)
        self.broken: Counter[str] = Counter()

    def snapshot(self) -> dict[str, PromiseCount]:
        """Return the current counts of each promise, by the promise's number."""
        return {
            number: PromiseCount(name=name, kept=self.kept[number], broken=self.broken[number])
            for number, (name, _, _) in PROMISES.items()
        }


class IncidentLog:
    """The newest incidents and all counters of a host. `report` is thread-safe.

    Parameters:
        limit: maximum number of incidents kept.
    """

    def __init__(self, *, limit: int = 200) -> None:
        self.newest: deque[Incident] = deque(maxlen=limit)
        self.counts: defaultdict[str, int] = defaultdict(int, {name: 0 for name in COUNTS if "<" not in name})
        self.promises = PromiseCounters()

    def report(self, incident: Incident) -> None:
        """Record and count an incident."""
        self.newest.append(incident)
        self.counts[f"incidents_{incident.kind}"] += 1
