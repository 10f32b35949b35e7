"""The history of a storm: the observations of its clients, readers, agents and watchers, as records of fixed types.

Only `holdfast.proof.checker` judges a history. A history is self-contained, so a saved file can be judged again later.
Rules for the recorder:

- ``at`` is a time on the machine's monotonic clock, in seconds, which all processes of the machine share. The time of a
  request is taken *before* the request is sent, and the time of an answer *after* the answer has arrived, so a call's
  effect happened between the two.
- Each call has a unique token and exactly one answer: the kind of answer that belongs to the request, `Refused` or
  `Lost`. `Lost` means that the outcome is unknown: the call may or may not have had its effect.
- `LogRead`, and the last `SessionRead`, `TranscriptRead` and `SettlementRead` of a session, are recorded once the host
  is quiescent, so anything that is unfinished in these records remains unfinished.
- Message contents and stop reasons are unique within a history, so that each can be identified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.proof.limits import Limits
from holdfast.protocol.events import Event
from holdfast.protocol.messages import Disposition, Entry, MessageState, Policy, RunView, SessionView, Settlement
from holdfast.protocol.stopping import StopReceipt

__all__ = [
    "AccessTried",
    "BombThrown",
    "DrainRequested",
    "Drained",
    "FailpointHit",
    "HoldingRead",
    "HostAbsent",
    "HostExited",
    "HostKilled",
    "HostReady",
    "HostStarted",
    "HostileAct",
    "HostileActed",
    "LogRead",
    "Lost",
    "Opened",
    "PeopleSettled",
    "ProcessSeen",
    "ProcessesListed",
    "ReaderClosed",
    "ReaderConnected",
    "ReaderGap",
    "ReaderReceived",
    "Record",
    "Refused",
    "SendAcknowledged",
    "SendAttempted",
    "SessionRead",
    "SessionsListed",
    "SettlementRead",
    "Share",
    "SharesCounted",
    "Source",
    "Stamp",
    "StatisticsRead",
    "StopAnswered",
    "StopRequested",
    "StreamRevoked",
    "TranscriptRead",
    "WithdrawAnswered",
    "WithdrawRequested",
    "digest",
    "read_history",
    "write_history",
]

Source = Literal["clients", "stamps", "processes", "kills", "drain", "host", "principals", "places", "walls", "bombs"]
"""Sources of observations. ``clients``: the recorder's own calls and readers (always present); ``stamps``: the agents'
stamps; ``processes``: the process list; ``kills``: kills by the storm; ``drain``: a drain that the storm requested;
``host``: the host's statistics; ``principals``: sessions of more than one principal; ``places``: each principal's runs
while all run slots are in use; ``walls``: programs that try to leave their wall; ``bombs``: programs of a hostile
principal that use more than its quotas."""


class RecordBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="record"):
    """Base class of all records. ``at`` is a time on the monotonic clock, in seconds."""

    at: float


class Opened(RecordBase, frozen=True, kw_only=True, tag="opened"):
    """The first record: the kind of storm, the sources that the recorder can observe, and the storm's bounds.

    ``failpoints`` names the failpoints that must be hit. ``hostile`` names the hostile principal; it is empty if the
    storm has none. ``zero`` is the time of day at which the monotonic clock was 0, if known.
    """

    seed: int
    mode: Literal["embedded", "url", "kill", "cluster"]
    sees: tuple[Source, ...]
    limits: Limits = Limits()
    failpoints: tuple[str, ...] = ()
    hostile: str = ""
    zero: float = 0.0


class HostStarted(RecordBase, frozen=True, kw_only=True, tag="host.started"):
    """A host process was started; incarnations count from 1."""

    incarnation: int
    pid: int


class HostReady(RecordBase, frozen=True, kw_only=True, tag="host.ready"):
    """A new incarnation of the host answered for the first time."""

    incarnation: int


class HostKilled(RecordBase, frozen=True, kw_only=True, tag="host.killed"):
    """A host process was killed and has been reaped: none of its code runs after ``at``."""

    incarnation: int
    failpoint: str | None = None


class HostExited(RecordBase, frozen=True, kw_only=True, tag="host.exited"):
    """A host exited without being killed: after a drain, or because it could not start. ``code`` is the exit code."""

    incarnation: int
    code: int = 0


class HostAbsent(RecordBase, frozen=True, kw_only=True, tag="host.absent"):
    """A host was stopped by SIGSTOP, or cut off from its database, from ``began_at`` on, and no longer at ``at``."""

    incarnation: int
    began_at: float
    why: Literal["stopped", "cut off"] = "stopped"


class FailpointHit(RecordBase, frozen=True, kw_only=True, tag="failpoint.hit"):
    """An incarnation of the host reached the failpoint ``name``."""

    incarnation: int
    name: str


class SendAttempted(RecordBase, frozen=True, kw_only=True, tag="send.attempted"):
    """A message is about to be sent. If the message is sent again, that is another attempt with the same key.

    Parameters:
        token: unique name of this call.
        idempotency_key: key that all attempts to send the message share.
        content: content of the message, which is unique within the history.
        may_fail: whether the message's run may fail, for example because the content requests an error.
        replayable: whether the message goes to an agent whose runs are restarted after a crash.
    """

    token: str
    principal: str
    session: str
    idempotency_key: str
    content: str
    policy: Policy = "queue"
    may_fail: bool = False
    replayable: bool = False


class SendAcknowledged(RecordBase, frozen=True, kw_only=True, tag="send.acknowledged"):
    """A send was answered with a receipt. ``cursor`` is the seq that the receipt's cursor contains."""

    token: str
    message_id: str
    seq: int
    disposition: Disposition
    cursor: int
    run_id: str | None = None


class Refused(RecordBase, frozen=True, kw_only=True, tag="refused"):
    """A call was answered with an error; ``code`` is the error's code. A refused call had no effect."""

    token: str
    code: str


class Lost(RecordBase, frozen=True, kw_only=True, tag="lost"):
    """A call got no answer because the connection or the host failed. The call's effect is unknown."""

    token: str
    error: str = ""


class StopRequested(RecordBase, frozen=True, kw_only=True, tag="stop.requested"):
    """An interrupt (scope ``run``) or a stop (scope ``session``) is about to be requested. ``reason`` is unique."""

    token: str
    principal: str
    session: str
    scope: Literal["run", "session"]
    reason: str
    run_id: str | None = None


class StopAnswered(RecordBase, frozen=True, kw_only=True, tag="stop.answered"):
    """An interrupt or stop was answered with a receipt. ``withdrawn`` contains the ids of the withdrawn messages."""

    token: str
    receipt: StopReceipt
    withdrawn: tuple[str, ...] = ()


class WithdrawRequested(RecordBase, frozen=True, kw_only=True, tag="withdraw.requested"):
    """A message is about to be withdrawn."""

    token: str
    principal: str
    session: str
    message_id: str


class WithdrawAnswered(RecordBase, frozen=True, kw_only=True, tag="withdraw.answered"):
    """A withdrawal was answered with the message's state."""

    token: str
    state: MessageState


class SettlementRead(RecordBase, frozen=True, kw_only=True, tag="settlement.read"):
    """A message's settlement was read, between ``began_at`` and ``at``."""

    began_at: float
    principal: str
    session: str
    settlement: Settlement


class SessionRead(RecordBase, frozen=True, kw_only=True, tag="session.read"):
    """A session and its runs were read between ``began_at`` and ``at``. If ``final`` is set, the host was quiescent."""

    began_at: float
    view: SessionView
    runs: tuple[RunView, ...] = ()
    final: bool = False


class TranscriptRead(RecordBase, frozen=True, kw_only=True, tag="transcript.read"):
    """A session's whole transcript was read, between ``began_at`` and ``at``."""

    began_at: float
    principal: str
    session: str
    entries: tuple[Entry, ...]


class LogRead(RecordBase, frozen=True, kw_only=True, tag="log.read"):
    """A session's whole log was read from its beginning, after the host became quiescent."""

    principal: str
    session: str
    number: int
    events: tuple[Event, ...]


class ReaderConnected(RecordBase, frozen=True, kw_only=True, tag="reader.connected"):
    """A reader connected or reconnected, to read the events after seq ``after``; 0 means from the beginning.

    ``connection`` is the number of this connection among those of the reader. ``follow`` is the id of the followed
    message, if any.
    """

    reader: str
    connection: int
    principal: str
    session: str
    after: int = 0
    follow: str | None = None


class ReaderReceived(RecordBase, frozen=True, kw_only=True, tag="reader.received"):
    """A reader had received events by the time ``at``. ``frames`` lists their seqs and digests, in order of arrival."""

    reader: str
    connection: int
    frames: tuple[tuple[int, str], ...]


class ReaderGap(RecordBase, frozen=True, kw_only=True, tag="reader.gap"):
    """A reader received a gap frame for the events with ``after`` < seq ≤ ``until``, which the reader missed."""

    reader: str
    connection: int
    after: int
    until: int
    reason: Literal["pruned", "foreign_cursor", "slow_reader"]


class ReaderClosed(RecordBase, frozen=True, kw_only=True, tag="reader.closed"):
    """A connection of a reader ended.

    ``why`` is ``left`` (the reader closed the connection), ``lost`` (the connection broke), ``ended`` (the host ended
    the stream with a final frame), ``followed`` (the followed message was settled), ``caught_up`` (the reader received
    the newest event), or ``stalled`` (events were known to exist, but did not arrive within ``answer_s``).
    """

    reader: str
    connection: int
    why: Literal["left", "lost", "ended", "followed", "caught_up", "stalled"]


class Stamp(RecordBase, frozen=True, kw_only=True, tag="stamp"):
    """An observation that an agent's own code recorded.

    Parameters:
        what: kind of the observation. ``start``: the agent function starts; ``finish``: the very last action of the
            agent function; ``branch``: a branch starts; ``tick``: the branch is alive; ``told``: the branch saw its
            interrupt; ``end``: the branch has ended, for any reason; ``effect``: a call was executed; ``probe``: a
            walled program tried to leave its wall; ``program``: a walled program that only waits has ended, or a
            walled program was ended by its host.
        run_id, attempt, principal, session: the run for which the code was started, and the run's attempt, principal
            and session.
        branch: name of the branch within the run; ``main`` for the agent function.
        member: kind of the branch.
        pid: pid of the process that the stamp describes.
        host_pid: number of the host, which is the host's pid if the host is a separate process.
        cooperative: whether the branch watches its interrupt.
        cause: reason of the root cause, as the branch saw it; only for ``told``.
        seen_session: session that the ambient context named, if any; only for ``tick`` and ``told``.
        effect: name of the call, unique within the run; only for ``effect``.
        idempotent: whether the call was declared idempotent; only for ``effect``.
        reached: what the program reached outside its wall; only for ``probe``.
        ended: why the host ended the program; empty if it did not; only for ``program``.
    """

    what: Literal["start", "finish", "branch", "tick", "told", "end", "effect", "probe", "program"]
    principal: str
    session: str
    run_id: str
    attempt: int = 1
    branch: str = "main"
    member: Literal["task", "thread", "process", "child"] = "task"
    pid: int = 0
    host_pid: int = 0
    cooperative: bool = True
    cause: str | None = None
    seen_session: str | None = None
    effect: str | None = None
    idempotent: bool = False
    reached: tuple[str, ...] = ()
    ended: str = ""


class ProcessSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live process (not a zombie) whose environment contains the marker of a run."""

    pid: int
    principal: str
    session: str
    run_id: str
    host_pid: int


class ProcessesListed(RecordBase, frozen=True, kw_only=True, tag="processes.listed"):
    """All live processes with a marker of this storm, listed between ``began_at`` and ``at``."""

    began_at: float
    alive: tuple[ProcessSeen, ...] = ()


class DrainRequested(RecordBase, frozen=True, kw_only=True, tag="drain.requested"):
    """A drain of the host is about to be requested."""

    incarnation: int
    deadline_s: float


class Drained(RecordBase, frozen=True, kw_only=True, tag="drained"):
    """The report of a drain.

    Parameters:
        elapsed_s: duration in seconds, as the host reported it; for a storm's own server, at least the time from
            SIGTERM to the exit of the server's process.
        finished: number of runs that ended on their own.
        interrupted, parked: ids of the runs that the drain interrupted, and ids of the runs that it suspended.
        orphans: names of all work that still ran after the drain, including the pids of processes.
    """

    incarnation: int
    elapsed_s: float
    finished: int = 0
    interrupted: tuple[str, ...] = ()
    parked: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()


class AccessTried(RecordBase, frozen=True, kw_only=True, tag="access.tried"):
    """``principal`` tried ``verb`` on a session of ``owner``. ``answer`` is ``ok`` or the error's code."""

    principal: str
    owner: str
    session: str
    verb: str
    answer: str


class SessionsListed(RecordBase, frozen=True, kw_only=True, tag="sessions.listed"):
    """A principal listed its sessions. ``seen`` contains the (principal, key) pair of each listed session."""

    principal: str
    seen: tuple[tuple[str, str], ...]


class Share(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One consumer's share of a resource. ``backlogged`` is set if the consumer had demand throughout the count."""

    consumer: str
    got: int
    backlogged: bool = True
    longest_wait_s: float = 0.0


class SharesCounted(RecordBase, frozen=True, kw_only=True, tag="shares.counted"):
    """How often each consumer got the contested resource, out of ``given`` times in total."""

    resource: str
    given: int
    shares: tuple[Share, ...]


class StatisticsRead(RecordBase, frozen=True, kw_only=True, tag="statistics.read"):
    """Figures of a host, read before the load (``baseline``), during it (``busy``) or after it (``quiet``).

    ``tasks``, ``threads``, ``descriptors`` and ``processes`` are those of the host's process. ``in_tree`` is the
    number of runs, scopes, tasks, threads and processes that the host's task tree shows below its sessions.
    """

    incarnation: int
    moment: Literal["baseline", "busy", "quiet"]
    running: int = 0
    waiting: int = 0
    accepted: int = 0
    settled: int = 0
    in_tree: int = 0
    tasks: int = 0
    threads: int = 0
    descriptors: int = 0
    processes: int = 0
    running_of: tuple[tuple[str, int], ...] = ()


class PeopleSettled(RecordBase, frozen=True, kw_only=True, tag="people.settled"):
    """The results of the checks, at the end of the storm, of the load that the history does not record otherwise.

    This load consists of the human-in-the-loop sessions, the schedules, and the actions of an administrator.
    ``checked`` is the number of checks, ``wrong`` describes the problems found, and ``runs`` has the ids of its runs.
    """

    checked: int
    wrong: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


class HostileAct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts for one kind of action of the hostile principal: times done, times with an effect, and times refused."""

    name: str
    did: int = 0
    felt: int = 0
    refused: int = 0


class HostileActed(RecordBase, frozen=True, kw_only=True, tag="hostile.acted"):
    """All actions of the hostile principal in the storm."""

    acts: tuple[HostileAct, ...]


class BombThrown(RecordBase, frozen=True, kw_only=True, tag="bomb.thrown"):
    """A program of the hostile principal that uses ever more of one resource, until it is ended.

    ``at`` is the time at which a client had the result of the tool that ran the program.

    Parameters:
        name: kind of the bomb.
        run_id: the run whose tool ran the program.
        quota: how much the principal's programs may use.
        overshoot: how much more a program of this pace may use until its host reacts, as the host states it.
        peak: the most that the program used, by its own count.
        reported: whether the tool's result names the quota, or the output that it left out.
    """

    name: str
    run_id: str
    quota: int
    overshoot: int
    peak: int
    reported: bool


class StreamRevoked(RecordBase, frozen=True, kw_only=True, tag="stream.revoked"):
    """A stream was open when its key was revoked.

    ``late_s`` is the time in seconds from the server's answer to the revocation until the stream's last byte. ``ended``
    is set if the server closed the stream.
    """

    key_id: str
    late_s: float
    ended: bool


class HoldingRead(RecordBase, frozen=True, kw_only=True, tag="holding.read"):
    """Memory use and number of descriptors of the server's process; descriptors include connections.

    ``moment`` is ``before`` (before the hostile principal started), ``beside`` (while the principal was active) or
    ``after`` (once the principal had released everything). The readings ``before`` and ``after`` are taken once the
    server's memory use has stopped growing.
    """

    incarnation: int
    moment: Literal["before", "beside", "after"] = "beside"
    memory: int
    descriptors: int


Record = (
    Opened
    | HostStarted
    | HostReady
    | HostKilled
    | HostAbsent
    | HostExited
    | FailpointHit
    | SendAttempted
    | SendAcknowledged
    | Refused
    | Lost
    | StopRequested
    | StopAnswered
    | WithdrawRequested
    | WithdrawAnswered
    | SettlementRead
    | SessionRead
    | TranscriptRead
    | LogRead
    | ReaderConnected
    | ReaderReceived
    | ReaderGap
    | ReaderClosed
    | Stamp
    | ProcessesListed
    | DrainRequested
    | Drained
    | AccessTried
    | SessionsListed
    | SharesCounted
    | StatisticsRead
    | PeopleSettled
    | HostileActed
    | BombThrown
    | StreamRevoked
    | HoldingRead
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def digest(event: Event) -> str:
    """Return sixteen hexadecimal digits that identify an event, including its seq."""
    return hashlib.blake2b(_encoder.encode(event), digest_size=8).hexdigest()


def write_history(path: Path, records: Iterable[Record]) -> None:
    """Write records to a file as JSON lines. Raises `OSError` if the file cannot be written."""
    with path.open("wb") as file:
        for record in records:
            file.write(_encoder.encode(record) + b"\n")


def read_history(path: Path) -> Iterator[Record]:
    """Yield the records of a file. Raises `OSError`, or `msgspec.DecodeError` if a line is invalid."""
    with path.open("rb") as file:
        for line in file:
            yield _decoder.decode(line)
