"""Host statistics: the counters, the counter behind each promise, and incidents for people to review."""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal

import msgspec

__all__ = ["COUNTS", "PROMISES", "DrainReport", "HostStatistics", "Incident", "Incidents", "PromiseCount", "Recovery"]

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
]

PROMISES: dict[str, tuple[str, str, str]] = {
    "P1": ("broadcast", "members that an interrupt ended", "members left out of a receipt that says gone"),
    "P2": ("isolation", "runs interrupted by a cause of their own", "runs interrupted by another run's cause"),
    "P3": ("stopped means stopped", "receipts", "processes that outlived their receipt"),
    "P4": ("one run per session", "claims", "claims that met a run of the same session in this host"),
    "P5": ("no message lost", "messages settled", "runs that settled other messages than they took"),
    "P6": ("valid transcript", "transcripts committed", "transcripts with a call that has not one result"),
    "P7": ("honest streams", "events given to readers", "events given out of order"),
    "P8": ("no leaks", "runs that ended with an empty scope", "runs that left members which no receipt names"),
    "P9": ("bounded", "refusals at a bound", "mailboxes over their bound"),
    "P10": ("atomic state", "state changes", "ends refused as an illegal change"),
    "P11": ("crash-safe", "runs rescued after a crash", "runs that lost their session while the host ran"),
    "P12": ("clean shutdown", "runs finished or parked by a drain", "orphans of a drain"),
    "P13": ("fair", "sessions admitted in turn", "not counted here: the storm judges it"),
    "P14": ("private", "refusals at a principal's own caps", "not counted here: the storm judges it"),
}
"""For each promise that this host can give: its name, what counts as kept, and what counts as broken."""


COUNTS: dict[str, str] = {
    "sends_<disposition>": "messages accepted, by what was decided",
    "runs_started": "runs started, resumed ones included",
    "runs_<status>": "runs ended, by their status",
    "interrupts_<cause>": "runs interrupted, by the kind of the cause",
    "stops_<outcome>": "receipts, by their outcome",
    "steered": "messages given to a run while it was on",
    "rolled_back": "runs taken back",
    "suspended": "questions asked of people",
    "resumed": "runs that got the last answer they waited for",
    "questions_expired": "questions that nobody answered in time",
    "abandoned": "tasks and threads that did not stop and were quarantined",
    "late_results": "outputs and results that came after the end of their run or call, and were refused",
    "gaps": "gaps shown to readers",
    "rows_pruned": "rows of the store that were dropped or changed by retention",
    "ticks_fired": "ticks of schedules whose message was accepted",
    "ticks_missed": "ticks of schedules that were left out by their miss policy",
    "ticks_refused": "ticks of schedules whose message was refused",
    "connections_<reason>": "connections that the server closed: `no_room`, `refused` beyond a share, or `too_slow`",
    "incidents_<kind>": "incidents, by their kind",
}
"""Everything that a host counts beside the promises; a name with ``<…>`` stands for one counter for each of those."""


class PromiseCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often a promise was kept and broken in this process."""

    name: str
    kept: int
    broken: int


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something a person should know.

    Parameters:
        at: seconds since the epoch.
        kind: its class.
        text: what happened and what to do.
        session, run_id: whose, where known.
        stack: where, for a blocked loop or an abandoned thread.
    """

    at: float
    kind: IncidentKind
    text: str
    session: str | None = None
    run_id: str | None = None
    stack: tuple[str, ...] = ()


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What a start found left by a crash: runs that go on, runs that were interrupted, messages that wait."""

    restarted: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()
    waiting: int = 0


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a drain did.

    Parameters:
        finished: runs that ended by themselves.
        parked: replayable runs that go on at the next start.
        interrupted: runs that were interrupted at the deadline.
        waiting: sessions with messages that stay in their mailboxes, as far as this host knows.
        orphans: what is left alive, named. Expected to be empty.
        elapsed_s: how long it took.
    """

    finished: int = 0
    parked: tuple[str, ...] = ()
    interrupted: tuple[str, ...] = ()
    waiting: int = 0
    orphans: tuple[str, ...] = ()
    elapsed_s: float = 0.0


class HostStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a host.

    Parameters:
        node_id, pid, started_at: which process.
        draining: whether it takes no new work.
        sessions_live: sessions in memory.
        running, in_line: runs that hold a place; sessions that wait for one.
        readers: open event streams.
        counts: everything that is counted, by name.
        promises: the counter behind each promise, by its number.
    """

    node_id: str
    pid: int
    started_at: float
    draining: bool
    sessions_live: int
    running: int
    in_line: int
    readers: int
    counts: dict[str, int]
    promises: dict[str, PromiseCount]


class Incidents:
    """The newest incidents and all counters of a host. `report` and `count` may be called from any thread.

    Parameters:
        limit: incidents that are kept.
    """

    def __init__(self, *, limit: int = 200) -> None:
        self.newest: deque[Incident] = deque(maxlen=limit)
        self.counts: Counter[str] = Counter({name: 0 for name in COUNTS if "<" not in name})
        self.kept: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()

    def report(self, incident: Incident) -> None:
        """Keep an incident."""
        self.newest.append(incident)
        self.counts[f"incidents_{incident.kind}"] += 1

    def promises(self) -> dict[str, PromiseCount]:
        """The counter behind each promise."""
        return {
            number: PromiseCount(name=name, kept=self.kept[number], broken=self.broken[number])
            for number, (name, _, _) in PROMISES.items()
        }
