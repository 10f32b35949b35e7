"""A small model of a host that keeps its promises: it writes the histories that the checker must accept.

The world moves one step at a time; each step writes what clients, readers, agents and watchers would have seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from holdfast.proof.history import (
    AccessTried,
    Drained,
    DrainRequested,
    FailpointHit,
    HostExited,
    HostKilled,
    HostReady,
    HostStarted,
    LogRead,
    Lost,
    Opened,
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
    Share,
    SharesCounted,
    Stamp,
    StatisticsRead,
    StopAnswered,
    StopRequested,
    TranscriptRead,
    WithdrawAnswered,
    WithdrawRequested,
    digest,
)
from holdfast.proof.limits import Limits
from holdfast.protocol.events import (
    Event,
    MessageAccepted,
    MessageSettled,
    RunFinished,
    RunRestarted,
    RunStarted,
    RunStopping,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from holdfast.protocol.messages import Entry, Policy, RunView, SessionView, Settlement
from holdfast.protocol.stopping import Abandoned, Cause, StopCounts, StopReceipt

Where = tuple[str, str]
LIMITS = Limits(answer_s=5, stop_s=10, ready_s=10, death_s=2, drain_slack_s=2, mailbox=5, attempts=3, principal_runs=4)


@dataclass
class ModelRun:
    run_id: str
    messages: list[str]
    replayable: bool
    attempt: int = 1
    stopping: Cause | None = None
    call: str | None = None
    branches: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    processes: dict[str, int] = field(default_factory=dict)
    said: str = ""


@dataclass
class ModelSession:
    where: Where
    number: int
    events: list[Event] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)
    replayable: dict[str, bool] = field(default_factory=dict)
    run: ModelRun | None = None
    entries: list[Entry] = field(default_factory=list)
    views: dict[str, RunView] = field(default_factory=dict)
    settled: dict[str, Settlement] = field(default_factory=dict)


@dataclass
class ModelReader:
    name: str
    where: Where
    connection: int = 0
    position: int = 0
    on: bool = False


class World:
    """One host at a time, any number of sessions and readers, one clock."""

    def __init__(self, *, failpoints: tuple[str, ...] = ("store.send.before",)) -> None:
        self.now = 100.0
        self.records: list[Record] = []
        self.sessions: dict[Where, ModelSession] = {}
        self.readers: dict[str, ModelReader] = {}
        self.incarnation = 0
        self.host_pid = 0
        self.count = 0
        self.keys: dict[tuple[Where, str], tuple[str, int]] = {}
        self.note(
            Opened,
            seed=1,
            mode="kill",
            sees=("clients", "stamps", "processes", "kills", "drain", "host", "principals", "places", "walls"),
            limits=LIMITS,
            failpoints=failpoints,
        )

    def note(self, kind: type, **fields: object) -> None:
        self.now += 0.01
        self.records.append(kind(at=self.now, **fields))

    def next(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def session(self, where: Where) -> ModelSession:
        if where not in self.sessions:
            self.sessions[where] = ModelSession(where, len(self.sessions) + 1)
        return self.sessions[where]

    def log(self, session: ModelSession, kind: type, **fields: object) -> Event:
        event: Event = kind(seq=len(session.events) + 1, at=self.now, **fields)
        session.events.append(event)
        return event

    # hosts -------------------------------------------------------------------------------------------------------

    def start_host(self) -> None:
        self.incarnation += 1
        self.host_pid = 1000 + self.incarnation
        self.note(HostStarted, incarnation=self.incarnation, pid=self.host_pid)
        for session in self.sessions.values():
            self._rescue(session)
        self.note(HostReady, incarnation=self.incarnation)
        self.note(StatisticsRead, incarnation=self.incarnation, moment="baseline", tasks=3, threads=4, descriptors=9)
        for session in self.sessions.values():
            self.claim(session.where)

    def _rescue(self, session: ModelSession) -> None:
        run = session.run
        if run is None:
            return
        if run.replayable and run.stopping is None and run.attempt < LIMITS.attempts:
            run.attempt += 1
            run.branches.clear()
            run.processes.clear()
            self.log(session, RunRestarted, run_id=run.run_id, attempt=run.attempt, discard_from=len(session.events))
            self.stamp(session, run, "start")
        else:
            self._commit(session, "interrupted", Cause(kind="crash", reason="the host ended"))

    def kill(self, failpoint: str | None = None) -> None:
        if failpoint is not None:
            self.note(FailpointHit, incarnation=self.incarnation, name=failpoint)
        self.note(HostKilled, incarnation=self.incarnation, failpoint=failpoint)
        for reader in self.readers.values():
            if reader.on:
                self.close(reader.name, "lost")
        self.now += LIMITS.death_s + 1
        self.note(ProcessesListed, began_at=self.now)
        self.start_host()

    def drain(self) -> None:
        self.note(DrainRequested, incarnation=self.incarnation, deadline_s=3.0)
        interrupted, parked = [], []
        for session in self.sessions.values():
            run = session.run
            if run is None:
                continue
            if run.replayable and run.stopping is None and run.attempt < LIMITS.attempts:
                parked.append(run.run_id)
                self._unwind(session, run)
                continue
            interrupted.append(run.run_id)
            self.stop_run(session, Cause(kind="shutdown", reason="the host drains"), claim=False)
        for reader in self.readers.values():
            if reader.on:
                self.advance(reader.name)
                self.close(reader.name, "ended")
        self.note(
            Drained,
            incarnation=self.incarnation,
            elapsed_s=0.1,
            interrupted=tuple(interrupted),
            parked=tuple(parked),
        )
        self.note(HostExited, incarnation=self.incarnation)
        self.now += LIMITS.death_s + 1
        self.note(ProcessesListed, began_at=self.now)
        self.start_host()

    # messages ----------------------------------------------------------------------------------------------------

    def send(
        self,
        where: Where,
        *,
        policy: Policy = "queue",
        outcome: str = "acknowledged",
        again: str | None = None,
        may_fail: bool = False,
        replayable: bool = False,
    ) -> str:
        """Send; `again` names the content of an earlier message. `outcome` may lose the answer, or the request too."""
        session = self.session(where)
        token = self.next("t")
        content = again or self.next(f"{where[0]}-{where[1]}-")
        fields = {"principal": where[0], "session": where[1], "content": content, "policy": policy}
        self.note(
            SendAttempted,
            token=token,
            idempotency_key=f"k-{content}",
            may_fail=may_fail,
            replayable=replayable,
            **fields,
        )
        if outcome == "request lost":
            self.note(Lost, token=token, error="reset")
            return content
        known = self.keys.get((where, content))
        if known is not None:
            message_id, seq = known
            self.note(
                SendAcknowledged, token=token, message_id=message_id, seq=seq, disposition="duplicate", cursor=seq - 1
            )
            return content
        if policy == "reject" and (session.run is not None or session.waiting):
            self.note(Refused, token=token, code="busy")
            return content
        if len(session.waiting) >= LIMITS.mailbox:
            self.note(Refused, token=token, code="mailbox_full")
            return content
        message_id = self.next("m")
        event = self.log(session, MessageAccepted, message_id=message_id, content=content, policy=policy)
        session.waiting.append(message_id)
        session.contents[message_id] = content
        session.replayable[message_id] = replayable
        self.keys[where, content] = (message_id, event.seq)
        disposition = "started" if session.run is None else "interrupting" if policy == "interrupt" else "queued"
        if outcome == "answer lost":
            self.note(Lost, token=token, error="reset")
        else:
            self.note(
                SendAcknowledged,
                token=token,
                message_id=message_id,
                seq=event.seq,
                disposition=disposition,
                cursor=event.seq - 1,
            )
        if session.run is None:
            self.claim(where)
        elif policy == "interrupt":
            self.stop_run(session, Cause(kind="message", message_id=message_id), take_all=True)
        return content

    def withdraw(self, where: Where) -> None:
        session = self.session(where)
        if not session.waiting:
            return
        message_id = session.waiting.pop()
        token = self.next("t")
        self.note(WithdrawRequested, token=token, principal=where[0], session=where[1], message_id=message_id)
        self._withdrawn(session, message_id)
        self.note(WithdrawAnswered, token=token, state="withdrawn")

    def _withdrawn(self, session: ModelSession, message_id: str) -> None:
        self.log(session, MessageSettled, message_id=message_id, state="withdrawn")
        session.settled[message_id] = Settlement(message_id=message_id, state="withdrawn")

    # runs --------------------------------------------------------------------------------------------------------

    def claim(self, where: Where, *, take_all: bool = False) -> None:
        session = self.session(where)
        if session.run is not None or not session.waiting:
            return
        taken = list(session.waiting) if take_all else session.waiting[:1]
        del session.waiting[: len(taken)]
        replayable = all(session.replayable[message_id] for message_id in taken)
        run = session.run = ModelRun(self.next("r"), taken, replayable)
        self.log(session, RunStarted, run_id=run.run_id, agent="storm", messages=tuple(taken))
        for message_id in taken:
            content = session.contents[message_id]
            run.entries.append(Entry(role="user", content=content, run_id=run.run_id, message_id=message_id))
        self.stamp(session, run, "start")

    def stamp(self, session: ModelSession, run: ModelRun, what: str, **fields: object) -> None:
        given: dict[str, object] = {"pid": self.host_pid, **fields}
        self.note(
            Stamp,
            what=what,
            principal=session.where[0],
            session=session.where[1],
            run_id=run.run_id,
            attempt=run.attempt,
            host_pid=self.host_pid,
            **given,
        )

    def branch(self, where: Where, member: str) -> None:
        """The run starts a task, thread, process or child."""
        session = self.session(where)
        run = session.run
        if run is None:
            return
        name = self.next(f"{member}-")
        pid = 5000 + self.count if member == "process" else self.host_pid
        run.branches[name] = member
        if member == "process":
            run.processes[name] = pid
        self.stamp(session, run, "branch", branch=name, member=member, pid=pid, cooperative=member != "process")

    def tick(self, where: Where) -> None:
        """Every branch of the run shows that it is alive; the run says something."""
        session = self.session(where)
        run = session.run
        if run is None:
            return
        home = "/".join(where)
        self.stamp(session, run, "tick", seen_session=home)
        self.stamp(session, run, "probe")
        for name, member in run.branches.items():
            pid = run.processes.get(name, self.host_pid)
            self.stamp(session, run, "tick", branch=name, member=member, pid=pid, cooperative=member != "process")
        run.said += "w"
        self.log(session, TextDelta, run_id=run.run_id, text="w")

    def call(self, where: Where, *, result: bool = True) -> None:
        """The run calls a tool, and gets the result unless it is ended before."""
        session = self.session(where)
        run = session.run
        if run is None or run.call is not None:
            return
        call_id, name = self.next("c"), self.next("count")
        self.log(session, ToolStarted, run_id=run.run_id, call_id=call_id, name=name, idempotent=run.replayable)
        run.entries.append(Entry(role="tool_call", content="{}", run_id=run.run_id, call_id=call_id, name=name))
        self.stamp(session, run, "effect", effect=name, idempotent=run.replayable)
        if result:
            self.log(session, ToolFinished, run_id=run.run_id, call_id=call_id, status="ok", result=1)
            run.entries.append(Entry(role="tool_result", content="1", run_id=run.run_id, call_id=call_id, name=name))
        else:
            run.call = call_id

    def _unwind(self, session: ModelSession, run: ModelRun) -> None:
        for name, member in run.branches.items():
            if member == "process":
                continue
            self.stamp(session, run, "end", branch=name, member=member)
        self.stamp(session, run, "finish")

    def finish(self, where: Where, status: str = "completed") -> None:
        session = self.session(where)
        run = session.run
        if run is None:
            return
        self._unwind(session, run)
        self._commit(session, status, None)
        self.claim(where)

    def _commit(
        self, session: ModelSession, status: str, cause: Cause | None, receipt: StopReceipt | None = None
    ) -> None:
        run = session.run
        assert run is not None
        if run.call is not None:
            self.log(session, ToolFinished, run_id=run.run_id, call_id=run.call, status="interrupted")
            run.entries.append(Entry(role="tool_result", content="stopped", run_id=run.run_id, call_id=run.call))
        if run.said:
            run.entries.append(
                Entry(role="assistant", content=run.said, run_id=run.run_id, partial=status != "completed")
            )
        for message_id in run.messages:
            self.log(session, MessageSettled, message_id=message_id, state=status, run_id=run.run_id)
            session.settled[message_id] = Settlement(
                message_id=message_id,
                state=status,  # type: ignore[arg-type]
                run_id=run.run_id,
                text=run.said,
                cause=cause,
            )
        self.log(
            session,
            RunFinished,
            run_id=run.run_id,
            status=status,
            text=run.said,
            cause=cause,
            receipt=receipt,
        )
        for entry in run.entries:
            session.entries.append(msgspec.structs.replace(entry, n=len(session.entries) + 1))
        session.views[run.run_id] = RunView(
            run_id=run.run_id,
            agent="storm",
            state=status,  # type: ignore[arg-type]
            attempt=run.attempt,
            messages=tuple(run.messages),
            ended_at=self.now,
        )
        session.run = None

    def stop_run(
        self,
        session: ModelSession,
        cause: Cause,
        *,
        take_all: bool = False,
        claim: bool = True,
        stuck: bool = False,
    ) -> StopReceipt:
        """Everything of the run is told and ends; with `stuck`, one thread is quarantined instead."""
        run = session.run
        assert run is not None
        run.stopping = cause
        self.log(session, RunStopping, run_id=run.run_id, cause=cause)
        abandoned: list[Abandoned] = []
        for name, member in run.branches.items():
            if member == "process":
                continue
            self.stamp(session, run, "told", branch=name, member=member, cause=cause.reason or None)
            if stuck and member == "thread" and not abandoned:
                abandoned.append(Abandoned(kind="thread", name=name))
                continue
            self.stamp(session, run, "end", branch=name, member=member)
        self.stamp(session, run, "told", cause=cause.reason or None)
        self.stamp(session, run, "finish")
        receipt = StopReceipt(
            scope=run.run_id,
            cause=cause,
            outcome="quarantined" if abandoned else "gone",
            stopped=StopCounts(tasks=1),
            abandoned=tuple(abandoned),
        )
        left = dict(run.branches)
        self._commit(session, "interrupted", cause, receipt)
        if abandoned:
            self.stamp(session, run, "tick", branch=abandoned[0].name, member=left[abandoned[0].name])
        if claim:
            self.claim(session.where, take_all=take_all)
        return receipt

    def interrupt(self, where: Where, *, scope: str = "run", stuck: bool = False) -> str:
        session = self.session(where)
        token, reason = self.next("t"), self.next("because-")
        self.note(
            StopRequested, token=token, principal=where[0], session=where[1], scope=scope, reason=reason, run_id=None
        )
        cause = Cause(kind="user" if scope == "run" else "stop", reason=reason)
        withdrawn: list[str] = []
        if scope == "session":
            withdrawn, session.waiting = session.waiting, []
            for message_id in withdrawn:
                self._withdrawn(session, message_id)
        if session.run is None:
            receipt = StopReceipt(scope="session", cause=cause)
        else:
            receipt = self.stop_run(session, cause, stuck=stuck)
        self.note(StopAnswered, token=token, receipt=receipt, withdrawn=tuple(withdrawn))
        self.note(ProcessesListed, began_at=self.now + 0.001, alive=self.alive())
        return reason

    def alive(self) -> tuple[ProcessSeen, ...]:
        seen = []
        for session in self.sessions.values():
            if session.run is not None:
                for pid in session.run.processes.values():
                    seen.append(
                        ProcessSeen(
                            pid=pid,
                            principal=session.where[0],
                            session=session.where[1],
                            run_id=session.run.run_id,
                            host_pid=self.host_pid,
                        )
                    )
        return tuple(seen)

    # readers -----------------------------------------------------------------------------------------------------

    def connect(self, name: str, where: Where) -> None:
        reader = self.readers.setdefault(name, ModelReader(name, where))
        if reader.on:
            self.advance(name)
            return
        reader.on = True
        reader.connection += 1
        self.note(
            ReaderConnected,
            reader=name,
            connection=reader.connection,
            principal=reader.where[0],
            session=reader.where[1],
            after=reader.position,
        )

    def advance(self, name: str, *, skip: int = 0) -> None:
        """The reader gets everything that is new; it is told that it missed the first `skip` events."""
        reader = self.readers[name]
        events = self.session(reader.where).events[reader.position :]
        if not events:
            return
        if skip:
            until = events[min(skip, len(events)) - 1].seq
            self.note(
                ReaderGap,
                reader=name,
                connection=reader.connection,
                after=reader.position,
                until=until,
                reason="slow_reader",
            )
            events = events[skip:]
            reader.position = until
        if events:
            frames = tuple((event.seq, digest(event)) for event in events)
            self.note(ReaderReceived, reader=name, connection=reader.connection, frames=frames)
            reader.position = events[-1].seq

    def close(self, name: str, why: str) -> None:
        reader = self.readers[name]
        reader.on = False
        self.note(ReaderClosed, reader=name, connection=reader.connection, why=why)

    # watchers ----------------------------------------------------------------------------------------------------

    def read(self, where: Where, *, final: bool = False) -> None:
        """A client reads the session, its transcript and its settlements."""
        session = self.session(where)
        self.now += 0.01
        began = self.now
        run = session.run
        view = SessionView(
            key=where[1],
            principal=where[0],
            number=session.number,
            agent="storm",
            state="idle" if run is None else "stopping" if run.stopping else "running",
            seq=len(session.events),
            waiting=len(session.waiting),
            run_id=run.run_id if run else None,
        )
        self.note(SessionRead, began_at=began, view=view, runs=tuple(session.views.values()), final=final)
        self.note(TranscriptRead, began_at=began, principal=where[0], session=where[1], entries=tuple(session.entries))
        for message_id in session.contents:
            settlement = session.settled.get(message_id) or Settlement(
                message_id=message_id, state="accepted" if message_id in session.waiting else "taken"
            )
            self.note(SettlementRead, began_at=began, principal=where[0], session=where[1], settlement=settlement)

    def watch(self) -> None:
        """Other people's tries, lists, shares and figures."""
        principals = sorted({where[0] for where in self.sessions})
        for where in list(self.sessions):
            for principal in principals:
                answer = "ok" if principal == where[0] else "unknown_session"
                for verb in ("info", "interrupt", "events"):
                    self.note(
                        AccessTried, principal=principal, owner=where[0], session=where[1], verb=verb, answer=answer
                    )
        for principal in principals:
            seen = tuple(where for where in self.sessions if where[0] == principal)
            self.note(SessionsListed, principal=principal, seen=seen)
        shares = tuple(Share(consumer=principal, got=10 + i) for i, principal in enumerate(principals))
        self.note(SharesCounted, resource="runs", given=sum(share.got for share in shares), shares=shares)
        running = [(p, sum(1 for s in self.sessions.values() if s.run and s.where[0] == p)) for p in principals]
        self.note(
            StatisticsRead,
            incarnation=self.incarnation,
            moment="busy",
            running=sum(n for _, n in running),
            running_of=tuple(running),
        )

    def settle(self) -> list[Record]:
        """Let everything come to rest, read it all back, and hand out the history."""
        for where, session in self.sessions.items():
            while session.run is not None or session.waiting:
                self.claim(where)
                self.finish(where)
        for name, reader in self.readers.items():
            self.connect(name, reader.where)
            self.advance(name)
            self.close(name, "caught_up")
        for where, session in self.sessions.items():
            self.read(where, final=True)
            self.note(
                LogRead, principal=where[0], session=where[1], number=session.number, events=tuple(session.events)
            )
        self.note(ProcessesListed, began_at=self.now)
        self.note(StatisticsRead, incarnation=self.incarnation, moment="quiet", tasks=3, threads=4, descriptors=9)
        self.watch()
        return self.records


def good_day() -> list[Record]:
    """A history with at least one observation of each promise."""
    world = World()
    a, b, c = ("ann", "a"), ("bob", "b"), ("ann", "c")
    world.start_host()
    world.connect("ra", a)
    world.connect("rb", b)
    world.send(a)
    world.send(b, replayable=True)
    world.send(c)
    for where in (a, b, c):
        for member in ("task", "thread", "process", "child"):
            world.branch(where, member)
        world.call(where)
        world.tick(where)
    world.advance("ra")
    world.read(a)
    world.send(a, policy="reject")
    world.send(a)
    world.send(a)
    world.withdraw(a)
    world.call(a, result=False)
    world.interrupt(a)
    world.watch()
    world.tick(b)
    world.advance("ra")
    world.close("ra", "left")
    world.branch(a, "thread")
    world.call(a)
    world.tick(a)
    world.interrupt(a, stuck=True)
    world.read(a)
    world.connect("ra", a)
    lost = world.send(a, outcome="answer lost")
    gone = world.send(b, outcome="request lost")
    world.kill("store.send.before")
    world.send(a, again=lost)
    world.send(b, again=gone)
    world.connect("ra", a)
    world.advance("ra", skip=2)
    world.send(a)
    world.tick(a)
    world.finish(a, "completed")
    world.send(a, may_fail=True)
    world.finish(a, "failed")
    world.send(a)
    world.call(a)
    world.tick(a)
    world.send(a)
    world.send(a, policy="interrupt")
    world.tick(a)
    world.send(c)
    world.branch(c, "process")
    world.drain()
    world.send(c)
    world.tick(c)
    world.interrupt(c, scope="session")
    world.send(c)
    return world.settle()
