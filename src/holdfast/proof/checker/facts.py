"""Index of a history: calls with their answers, logs with their runs, and stamps by run. Facts only, no judgement."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.proof.history import (
    AccessTried,
    BombThrown,
    Drained,
    DrainRequested,
    FailpointHit,
    HoldingRead,
    HostAbsent,
    HostExited,
    HostileAct,
    HostileActed,
    HostKilled,
    HostReady,
    HostStarted,
    LogRead,
    Lost,
    Opened,
    PeopleSettled,
    ProcessesListed,
    ProcessSeen,
    ReaderClosed,
    ReaderConnected,
    ReaderGap,
    ReaderReceived,
    Record,
    Refused,
    SendAcknowledged,
    SendAttempted,
    SessionRead,
    SessionsListed,
    SettlementRead,
    SharesCounted,
    Stamp,
    StatisticsRead,
    StopAnswered,
    StopRequested,
    StreamRevoked,
    TranscriptRead,
    WithdrawAnswered,
    WithdrawRequested,
    digest,
)
from holdfast.proof.limits import Limits
from holdfast.protocol.events import Event, MessageAccepted, MessageSettled, RunFinished, RunStarted, RunStopping
from holdfast.protocol.states import TERMINAL_MESSAGE_STATES
from holdfast.protocol.stopping import Cause, StopReceipt

__all__ = ["Attempt", "CallFacts", "ConnectionFacts", "Facts", "LogRun", "SessionLog", "Where", "root_cause", "run_of"]

Where = tuple[str, str]
"""Identifies a session by its principal and key."""

Request = SendAttempted | StopRequested | WithdrawRequested
Answer = SendAcknowledged | StopAnswered | WithdrawAnswered | Refused | Lost


def root_cause(cause: Cause | None) -> Cause | None:
    """Return the root of a cause's chain of parents; None if `cause` is None."""
    while cause is not None and cause.parent is not None:
        cause = cause.parent
    return cause


def run_of(event: Event) -> str | None:
    """Return the id of the root run to which an event belongs; None for events without a run, such as settlements."""
    if isinstance(event, MessageSettled):
        return None
    run_id: str | None = getattr(event, "run_id", None)
    return None if run_id is None else run_id.partition(".")[0]


@dataclass(slots=True)
class CallFacts:
    """A request, and its answer if there is one."""

    request: Request
    answer: Answer | None = None

    @property
    def where(self) -> Where:
        """The session that the request addressed."""
        return self.request.principal, self.request.session


@dataclass(slots=True)
class LogRun:
    """A run as recorded in the log: all its events in order, and its start, stop and end events separately."""

    run_id: str
    where: Where
    events: list[Event] = field(default_factory=list)
    started: list[RunStarted] = field(default_factory=list)
    stopping: list[RunStopping] = field(default_factory=list)
    finished: list[RunFinished] = field(default_factory=list)

    @property
    def receipt(self) -> StopReceipt | None:
        """The receipt in the run's terminal event, if any."""
        return self.finished[0].receipt if self.finished else None


class SessionLog:
    """An index of a session's log."""

    def __init__(self, read: LogRead) -> None:
        self.where: Where = (read.principal, read.session)
        self.number = read.number
        self.events = read.events
        self.by_seq: dict[int, Event] = {}
        self.runs: dict[str, LogRun] = {}
        self.accepted: dict[str, list[MessageAccepted]] = {}
        self.settled: dict[str, list[MessageSettled]] = {}
        self.taken: dict[str, list[str]] = {}
        for event in read.events:
            self.by_seq.setdefault(event.seq, event)
            if isinstance(event, MessageAccepted):
                self.accepted.setdefault(event.message_id, []).append(event)
                continue
            if isinstance(event, MessageSettled):
                self.settled.setdefault(event.message_id, []).append(event)
                continue
            run_id = run_of(event)
            if run_id is None:
                continue
            run = self.runs.get(run_id)
            if run is None:
                run = self.runs[run_id] = LogRun(run_id, self.where)
            run.events.append(event)
            if isinstance(event, RunStarted):
                run.started.append(event)
                for message_id in event.messages:
                    self.taken.setdefault(message_id, []).append(run_id)
            elif isinstance(event, RunStopping):
                run.stopping.append(event)
            elif isinstance(event, RunFinished):
                run.finished.append(event)

    def digest_of(self, seq: int) -> str | None:
        """Return the digest of the event with this seq; None if the log lacks the event."""
        event = self.by_seq.get(seq)
        return None if event is None else digest(event)


@dataclass(slots=True)
class ConnectionFacts:
    """One connection of a reader: where it started, what it received, and how it ended."""

    opened: ReaderConnected
    received: list[ReaderReceived | ReaderGap] = field(default_factory=list)
    closed: ReaderClosed | None = None


@dataclass(slots=True)
class Attempt:
    """The stamps of one attempt of one run, in chronological order."""

    run_id: str
    attempt: int
    where: Where
    stamps: list[Stamp]

    @property
    def start(self) -> Stamp | None:
        """The agent function's ``start`` stamp, if there is one."""
        return next((s for s in self.stamps if s.what == "start"), None)

    @property
    def finish(self) -> Stamp | None:
        """The agent function's ``finish`` stamp, if there is one."""
        return next((s for s in reversed(self.stamps) if s.what == "finish"), None)


class Facts:
    """An index of all records, for use by the rules. Raises `ValueError` if the history has no `Opened` record."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = sorted(records, key=lambda record: record.at)
        self.opened = next((r for r in self.records if isinstance(r, Opened)), None) or _no_opening()
        self.limits: Limits = self.opened.limits
        self.calls: dict[str, CallFacts] = {}
        self.logs: dict[Where, SessionLog] = {}
        self.connections: dict[tuple[str, int], ConnectionFacts] = {}
        self.stamps: list[Stamp] = []
        self.listings: list[ProcessesListed] = []
        self.settlements: list[SettlementRead] = []
        self.session_reads: list[SessionRead] = []
        self.transcripts: list[TranscriptRead] = []
        self.started: list[HostStarted] = []
        self.ready: list[HostReady] = []
        self.kills: list[HostKilled] = []
        self.exits: list[HostExited] = []
        self.absences: list[HostAbsent] = []
        self.hits: set[str] = set()
        self.drain_requests: list[DrainRequested] = []
        self.drains: list[Drained] = []
        self.accesses: list[AccessTried] = []
        self.lists: list[SessionsListed] = []
        self.shares: list[SharesCounted] = []
        self.statistics: list[StatisticsRead] = []
        self.people: list[PeopleSettled] = []
        self.unlogged_runs: set[str] = set()
        """Runs whose logs the history does not have on purpose."""
        self.hostile_acts: list[HostileAct] = []
        self.bombs: list[BombThrown] = []
        self.revoked: list[StreamRevoked] = []
        self.holdings: list[HoldingRead] = []
        for record in self.records:
            self._take(record)
        self.run_logs: dict[str, LogRun] = {}
        for log in self.logs.values():
            self.run_logs.update(log.runs)
        self.attempts = self._attempts()
        self.pid_of = {started.incarnation: started.pid for started in self.started}
        self.killed_at = {
            self.pid_of[kill.incarnation]: kill.at for kill in self.kills if kill.incarnation in self.pid_of
        }
        self.ended_at = dict(self.killed_at)
        for left in self.exits:
            if left.incarnation in self.pid_of:
                self.ended_at.setdefault(self.pid_of[left.incarnation], left.at)
        self.drained_at = {
            self.pid_of[r.incarnation]: r.at for r in self.drain_requests if r.incarnation in self.pid_of
        }
        self.absences_of: dict[int, list[HostAbsent]] = {}
        for absence in self.absences:
            if absence.incarnation in self.pid_of:
                self.absences_of.setdefault(self.pid_of[absence.incarnation], []).append(absence)
        self.lets_go_at = dict(self.drained_at)
        """Time at which each host began to drain or was cut off, by pid, whichever came first."""
        for pid, absences in self.absences_of.items():
            for absence in absences:
                if absence.why == "cut off":
                    self.lets_go_at[pid] = min(absence.began_at, self.lets_go_at.get(pid, absence.began_at))
        stalls = [at for absence in self.absences for at in (absence.began_at, absence.at)]
        self._breaks = sorted((*stalls, *(record.at for record in (*self.kills, *self.exits))))
        self._lifecycle = sorted(
            (
                *((record.at, True) for record in (*self.ready, *self.absences)),
                *((absence.began_at, False) for absence in self.absences),
                *((record.at, False) for record in (*self.kills, *self.exits, *self.drain_requests)),
            )
        )
        self._alive: dict[str, list[tuple[ProcessesListed, ProcessSeen]]] = {}
        for listing in self.listings:
            for seen in listing.alive:
                self._alive.setdefault(seen.run_id, []).append((listing, seen))
        self._listed_at = max((listing.began_at for listing in self.listings), default=float("-inf"))
        self.known_end = self._known_ends()
        self.stop_reasons = self._stop_reasons()
        self._receipts = self._all_receipts()

    def _take(self, record: Record) -> None:
        match record:
            case SendAttempted() | StopRequested() | WithdrawRequested():
                self.calls[record.token] = CallFacts(record)
            case SendAcknowledged() | StopAnswered() | WithdrawAnswered() | Refused() | Lost():
                call = self.calls.get(record.token)
                if call is not None and call.answer is None:
                    call.answer = record
            case LogRead():
                self.logs[record.principal, record.session] = SessionLog(record)
            case ReaderConnected():
                self.connections[record.reader, record.connection] = ConnectionFacts(record)
            case ReaderReceived() | ReaderGap():
                self.connections[record.reader, record.connection].received.append(record)
            case ReaderClosed():
                self.connections[record.reader, record.connection].closed = record
            case Stamp():
                self.stamps.append(record)
            case ProcessesListed():
                self.listings.append(record)
            case SettlementRead():
                self.settlements.append(record)
            case SessionRead():
                self.session_reads.append(record)
            case TranscriptRead():
                self.transcripts.append(record)
            case HostStarted():
                self.started.append(record)
            case HostReady():
                self.ready.append(record)
            case HostKilled():
                self.kills.append(record)
            case HostExited():
                self.exits.append(record)
            case HostAbsent():
                self.absences.append(record)
            case FailpointHit():
                self.hits.add(record.name)
            case DrainRequested():
                self.drain_requests.append(record)
            case Drained():
                self.drains.append(record)
            case AccessTried():
                self.accesses.append(record)
            case SessionsListed():
                self.lists.append(record)
            case SharesCounted():
                self.shares.append(record)
            case StatisticsRead():
                self.statistics.append(record)
            case PeopleSettled():
                self.people.append(record)
                self.unlogged_runs.update(record.runs)
            case HostileActed():
                self.hostile_acts.extend(record.acts)
            case BombThrown():
                self.bombs.append(record)
            case StreamRevoked():
                self.revoked.append(record)
            case HoldingRead():
                self.holdings.append(record)
            case Opened():
                pass

    def _attempts(self) -> dict[str, list[Attempt]]:
        grouped: dict[tuple[str, int], Attempt] = {}
        for stamp in self.stamps:
            key = stamp.run_id, stamp.attempt
            attempt = grouped.get(key)
            if attempt is None:
                where = stamp.principal, stamp.session
                attempt = grouped[key] = Attempt(stamp.run_id, stamp.attempt, where, [])
            attempt.stamps.append(stamp)
        by_run: dict[str, list[Attempt]] = {}
        for attempt in grouped.values():
            by_run.setdefault(attempt.run_id, []).append(attempt)
        for attempts in by_run.values():
            attempts.sort(key=lambda attempt: attempt.attempt)
        return by_run

    def _known_ends(self) -> dict[str, float]:
        """Return, for each ended run, the earliest time at which a client knew of the run's end."""
        known: dict[str, float] = {}

        def learn(run_id: str | None, at: float) -> None:
            if run_id is not None and at < known.get(run_id, float("inf")):
                known[run_id] = at

        for connection in self.connections.values():
            log = self.logs.get((connection.opened.principal, connection.opened.session))
            for received in connection.received:
                if log is not None and isinstance(received, ReaderReceived):
                    for seq, _ in received.frames:
                        event = log.by_seq.get(seq)
                        if isinstance(event, RunFinished):
                            learn(event.run_id, received.at)
        for read in self.settlements:
            if read.settlement.state in TERMINAL_MESSAGE_STATES:
                learn(read.settlement.run_id, read.at)
        for session in self.session_reads:
            for run in session.runs:
                if run.ended_at is not None:
                    learn(run.run_id, session.at)
        return known

    def _stop_reasons(self) -> dict[str, list[str]]:
        """Return, for each reason of a stop in the logs, the runs that were stopped for that reason."""
        runs: dict[str, list[str]] = {}
        for run in self.run_logs.values():
            for event in run.stopping:
                first = root_cause(event.cause)
                if first is not None and first.reason and run.run_id not in runs.setdefault(first.reason, []):
                    runs[first.reason].append(run.run_id)
        return runs

    def _all_receipts(self) -> dict[str, list[StopReceipt]]:
        """Return, for each run, the run's own receipt and the receipts of the stops that ended the run."""
        receipts: dict[str, list[StopReceipt]] = {}
        for run in self.run_logs.values():
            if run.receipt is not None:
                receipts.setdefault(run.run_id, []).append(run.receipt)
        for request, answer in self.stops():
            if isinstance(answer, StopAnswered):
                runs = {request.run_id, *self.stop_reasons.get(_reason(answer.receipt), ())}
                for run_id in runs - {None}:
                    receipts.setdefault(run_id or "", []).append(answer.receipt)
        return receipts

    def sends(self) -> Iterable[tuple[SendAttempted, Answer | None]]:
        """Yield all attempts to send with their answers, in chronological order."""
        for call in self.calls.values():
            if isinstance(call.request, SendAttempted):
                yield call.request, call.answer

    def stops(self) -> Iterable[tuple[StopRequested, Answer | None]]:
        """Yield all interrupts and stops with their answers, in chronological order."""
        for call in self.calls.values():
            if isinstance(call.request, StopRequested):
                yield call.request, call.answer

    def contents_of(self, run: LogRun) -> list[str]:
        """Return the contents of the messages that a run took."""
        accepted = self.logs[run.where].accepted
        return [
            accepted[message_id][0].content
            for started in run.started
            for message_id in started.messages
            if message_id in accepted
        ]

    def stale_until(self, host_pid: int, at: float) -> float:
        """Return until when a host may work on runs that it has lost; 0 if it may not do so at `at`.

        A host that is stopped may lose its runs to others. It notices soon after it continues.
        """
        fence_s = self.limits.fence_s
        return max(
            (
                absence.at + fence_s
                for absence in self.absences_of.get(host_pid, ())
                if absence.why == "stopped" and absence.began_at <= at <= absence.at + fence_s
            ),
            default=0.0,
        )

    def is_cut_off(self, host_pid: int, at: float) -> bool:
        """Return whether a host could not reach the store at `at`, so that it did not know what others wrote."""
        absences = self.absences_of.get(host_pid, ())
        return any(absence.why == "cut off" and absence.began_at <= at <= absence.at for absence in absences)

    def was_alive(self, host_pid: int, begin: float, end: float) -> bool:
        """Return whether a host was neither ended nor absent at any time between `begin` and `end`."""
        absences = self.absences_of.get(host_pid, ())
        return self.ended_at.get(host_pid, float("inf")) > end and not any(
            absence.began_at <= end and begin <= absence.at for absence in absences
        )

    def hosts_of(self, stop: StopRequested, until: float) -> frozenset[int]:
        """Return the pids of the hosts that had runs of a session between a stop's request and `until`."""
        where = (stop.principal, stop.session)
        return frozenset(
            attempt.stamps[0].host_pid
            for attempts in self.attempts.values()
            for attempt in attempts
            if attempt.where == where
            and attempt.stamps[0].at <= until
            and (attempt.finish is None or attempt.finish.at >= stop.at)
        )

    def others_at(self, incarnation: int, at: float) -> bool:
        """Whether hosts of other incarnations were ready at `at`."""
        return any(
            ready.incarnation != incarnation
            and ready.at <= at < self.ended_at.get(self.pid_of.get(ready.incarnation, 0), float("inf"))
            for ready in self.ready
        )

    def broke_between(self, begin: float, end: float) -> bool:
        """Whether a host was killed, exited, or began or ended an absence after `begin` and not later than `end`."""
        index = bisect_right(self._breaks, begin)
        return index < len(self._breaks) and self._breaks[index] <= end

    def lived_through(self, begin: float, end: float) -> bool:
        """Whether a host was ready at `begin`, and by `end` had not been killed, drained or stopped, or exited."""
        index = bisect_right(self._lifecycle, begin, key=lambda moment: moment[0])
        ready = index > 0 and self._lifecycle[index - 1][1]
        return ready and (index == len(self._lifecycle) or self._lifecycle[index][0] > end)

    def alive_after(self, run_id: str, at: float) -> Iterator[tuple[ProcessesListed, ProcessSeen]]:
        """Yield the run's processes in all process lists begun after `at`, each process with its list."""
        for listing, seen in self._alive.get(run_id, ()):
            if listing.began_at > at:
                yield listing, seen

    def listed_after(self, at: float) -> bool:
        """Whether any process list was begun after `at`."""
        return self._listed_at > at

    def named_survivors(self, run_id: str) -> tuple[int, frozenset[int]]:
        """Return the number of abandoned tasks and threads, and the surviving pids, in the run's receipts."""
        receipts = self._receipts.get(run_id, [])
        abandoned = max((len(receipt.abandoned) for receipt in receipts), default=0)
        return abandoned, frozenset(pid for receipt in receipts for pid in receipt.survivors)


def _reason(receipt: StopReceipt) -> str:
    first = root_cause(receipt.cause)
    return first.reason if first is not None else ""


def _no_opening() -> Opened:
    raise ValueError("the history has no 'opened' record: the file was truncated, or is not a history")
