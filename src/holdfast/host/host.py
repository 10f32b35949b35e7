"""The composition root: a host owns the store, the runs, their scopes and threads, and provides sessions."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

from holdfast import ids
from holdfast.agents.agent import Agent, AgentLike, as_agent
from holdfast.agents.run import RunLimits
from holdfast.clock import Clock, system_clock
from holdfast.errors import ConfigurationError, Draining, HoldfastError, LimitExceeded, StorageError, UnknownAgent
from holdfast.host.active import ActiveRun, nothing_to_stop
from holdfast.host.actor import SessionActor
from holdfast.host.awaited import AwaitedSessions
from holdfast.host.budgets import PAGE_BYTES, Budgets
from holdfast.host.dispatch import Dispatch
from holdfast.host.patience import patiently
from holdfast.host.readers import PAGE
from holdfast.host.recovery import recover
from holdfast.host.schedules import Schedule, Schedules
from holdfast.host.server_exit import ServerExit
from holdfast.host.session import Session
from holdfast.host.settlements import Settlements
from holdfast.host.statistics import DrainReport, HostStatistics, Incident, Incidents, Recovery
from holdfast.host.toolsets import Toolsets
from holdfast.host.tree import LeftBehind, scope_nodes
from holdfast.host.upkeep import Upkeep
from holdfast.host.watch import LoopWatch
from holdfast.logs import log_failure, one_line
from holdfast.protocol.events import Stored
from holdfast.protocol.messages import Entry, Message, SessionView, Settlement, TreeNode
from holdfast.protocol.schedules import ScheduleKeywords, ScheduleView
from holdfast.protocol.stopping import Cause, StopReceipt, join_receipts
from holdfast.runtime import Restorer, Scope, ThreadPool, current_scope, detached, install
from holdfast.runtime.adoption_processes import kill_everything
from holdfast.runtime.processes import process_host
from holdfast.settings import DEFAULT_STORE, Settings, default_store, stored_limit
from holdfast.storage import MemoryStore, open_store
from holdfast.storage.port import Claim, Committed, DueQuestion, Interrupt, Store
from holdfast.storage.port import Interrupted as InterruptDone
from holdfast.storage.port import Stopped as StopDone

__all__ = ["Host"]

T = TypeVar("T")

_log = logging.getLogger("holdfast.host")

RUN_EXCESS_BYTES = 4_000_000
"""Bytes that a principal's active runs may write above its quota together, so that accepted work can end."""

STORE_S = 5.0
"""Seconds that a drain waits for the store to commit runs, beyond the time of their stops."""

RECORDED: frozenset[str] = frozenset(("user", "stop", "message", "rollback", "shutdown", "lease_lost"))
"""Kinds of interrupt that are durable, or deliberately not, before the run's scope gets them."""


class Host:
    """Hosts agents in this process. Use it as ``async with Host(agent) as host``.

    Parameters:
        agent: the default agent.
        agents: further agents, by name or as a sequence; without `agent`, the first one is the default.
        store: a URL (``sqlite:///file``, ``memory://``) or a store that is not yet open.
        settings: all limits and timeouts; their `store` is used if none is given here.
        clock: source of wall-clock time.

    Call all methods on the loop that started it. A host starts once.

    Raises:
        ConfigurationError: no agent, or a duplicate agent name.
    """

    def __init__(
        self,
        agent: AgentLike | None = None,
        *,
        agents: Mapping[str, AgentLike] | Iterable[AgentLike] = (),
        store: str | Store | None = None,
        settings: Settings | None = None,
        clock: Clock = system_clock,
    ) -> None:
        self.settings = settings or Settings()
        self.clock = clock
        self.now = clock.now
        self.agents = _by_name(agent, agents)
        self.default_agent = next(iter(self.agents))
        chosen = self._store_of_settings() if store is None else store
        self.store: Store = open_store(chosen) if isinstance(chosen, str) else chosen
        self.stored_limit = stored_limit(self.settings, in_memory=isinstance(self.store, MemoryStore))
        """Bytes that a principal may have stored."""
        self.run_stored_limit = self.stored_limit + RUN_EXCESS_BYTES
        """Bytes that a principal may have stored, including the allowance for its active runs."""
        self.node_id = ids.node_id()
        self.run_limits = RunLimits(call_s=self.settings.tool_s, step_s=self.settings.step_s)
        self.incidents = Incidents()
        self.budgets = Budgets(self.settings, clock, self._tell_refused)
        self.settlements = Settlements()
        self.awaited = AwaitedSessions()
        self.actors: dict[int, SessionActor] = {}
        self.live: dict[str, ActiveRun] = {}
        self.readers = 0
        self.recovered = Recovery()
        self.draining = False
        self.started_at = 0.0
        self.loop: asyncio.AbstractEventLoop
        self.context: contextvars.Context
        self.scope: Scope
        self.dispatch = Dispatch(self)
        self.upkeep = Upkeep(self)
        self.timetable = Schedules(self)
        self._adoption: Restorer
        self._in_background: Counter[str] = Counter()
        self._pools: dict[str, ThreadPool] = {}
        self._left_behind = LeftBehind()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = False
        self._toolsets = Toolsets(self)
        self._ended = 0
        self._cut: dict[ActiveRun, asyncio.Future[StopReceipt]] = {}
        self._time_is_over = False
        self._drain: asyncio.Task[DrainReport] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._patience: asyncio.Timeout | None = None
        self._watch: LoopWatch | None = None
        self._server_exit: ServerExit | None = None
        self.on_streams_close: list[Callable[[], object]] = []
        """Called before the streams end, so that their servers can ask readers to reconnect."""
        self._streams_closed = False

    def _store_of_settings(self) -> str:
        """Return the URL of the configured store, or of one that an older version created in this folder."""
        if self.settings.store != DEFAULT_STORE:
            return self.settings.store
        found = default_store(environ={})
        if found != DEFAULT_STORE:
            _log.warning("the store is still at %s; move it with 'holdfast store move'", found)
        return found

    def session_id(self, number: int) -> str:
        """Return an id that distinguishes this session from all others of its store, even after a restart.

        A store without a file restarts its numbers with each host.
        """
        return f"{number}-{self.node_id}" if isinstance(self.store, MemoryStore) else str(number)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open the store, recover runs after a crash, and accept work.

        Raises:
            StoreLocked, StoreCorrupt, StoreReadOnly: see their hints.
            StorageError: recovery failed to read or write; nothing stays open.
            ConfigurationError: started before, or a toolset did not start.
        """
        if self._started:
            raise ConfigurationError("this host was started before", hint="a host starts only once; create a new one")
        self.loop = asyncio.get_running_loop()
        with detached():
            self.context = contextvars.copy_context()
        self.started_at = self.now()
        await self.store.open(node_id=self.node_id, at=self.started_at)
        self._started = True
        self._adoption = install(self.loop)
        workers = process_host().cells
        workers.variables = tuple(dict.fromkeys((*workers.variables, *self.settings.worker_variables)))
        self.scope = Scope(
            "host", detached=True, grace_s=self.settings.grace_s, kill_after_s=self.settings.kill_after_s
        ).open()
        try:
            if not getattr(self.loop, "virtual", False):
                self._server_exit = ServerExit(self.loop, self._server_exits)
            if self.settings.loop_block_s and not getattr(self.loop, "virtual", False):
                self._watch = LoopWatch(self.loop, limit_s=self.settings.loop_block_s, report=self._loop_blocked)
                self._watch.start()
            await self._toolsets.enter()
            self.recovered = await self.start_task(recover(self), "recovery")
            self.upkeep.start()
            self.timetable.start()
        except BaseException:
            self._drain = self.start_task(self._draining(0.0), "drain")
            await self.close()
            raise

    async def __aenter__(self) -> Host:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def drain(self, *, deadline_s: float | None = None) -> DrainReport:
        """Accept no new work, let runs finish until the deadline, then unload or interrupt the rest. Idempotent.

        Runs that wait for people are unloaded, or interrupted, at once.

        Parameters:
            deadline_s: default: the setting ``drain_s``.
        """
        if self._drain is None:
            seconds = self.settings.drain_s if deadline_s is None else deadline_s
            self._drain = self.start_task(self._draining(seconds), "drain")
        return await asyncio.shield(self._drain)

    async def close(self) -> None:
        """Drain, end all streams and waits, and close the store. A repeat waits for the first call.

        If the caller is cancelled, the drain ends at once; the cancellation is raised after the close.
        """
        if not self._started:
            return
        if self._closing is None:
            self._closing = self.start_task(self._close(), "close")
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as error:
                if self._closing.cancelled() or self._is_around_caller():
                    raise
                cancelled = error
                self._hasten()
        if cancelled is not None:
            raise cancelled
        self._closing.result()

    def _is_around_caller(self) -> bool:
        """Return whether a run of this host is the caller: it must not wait for its own end."""
        scope = current_scope()
        while scope is not None and scope is not self.scope:
            scope = scope.parent
        return scope is self.scope

    async def _close(self) -> None:
        try:
            await self.drain()
        finally:
            await self._toolsets.leave()
            self.close_streams()
            self.settlements.close()
            self.upkeep.close()
            if self._watch is not None:
                self._watch.close()
            if self._server_exit is not None:
                self._server_exit.close()
            await self.scope.stop("the host is closing", kind="shutdown")
            await kill_everything()
            self._adoption.restore()
            for pool in self._pools.values():
                pool.close()
            process_host().cells.close()
            await self.store.close()

    def _server_exits(self) -> None:
        """Handle the exit of the surrounding web server, which closes this host only after the streams have ended."""

        async def end() -> None:
            await self.drain()
            self.close_streams()

        self.start_task(end(), "end the streams")

    def close_streams(self) -> None:
        """End all event streams after their pending events; new ones end at the end of their log."""
        self._streams_closed = True
        for tell in self.on_streams_close:
            tell()
        for actor in self.actors.values():
            actor.log.close()
        self.awaited.close()

    async def _draining(self, deadline_s: float) -> DrainReport:
        began = self.loop.time()
        self.draining = True
        self.dispatch.close()
        self.timetable.close()
        at_first = self._ended
        for run in list(self.live.values()):
            if run.surroundings.resting:
                self._cut_short(run)
        await self._until_unused(deadline_s)
        finished = self._ended - at_first
        self._time_is_over = True
        for run in list(self.live.values()):
            self._cut_short(run)
        stops: list[asyncio.Future[StopReceipt]] = []
        for actor in list(self.actors.values()):
            for scope in list(actor.background):
                stops.append(self.start_task(scope.stop(cause=self._shutdown()), "stop background"))
        await self._until_unused(self.settings.grace_s + self.settings.kill_after_s + STORE_S)
        unwritten = tuple(f"run {run_id}: the store did not accept its end" for run_id in self.live)
        for run in list(self.live.values()):
            run.abandon()
        receipts = [await stop for stop in (*self._cut.values(), *stops)]  # each is bounded by its grace period
        orphans = (*(name for receipt in receipts for name in _left(receipt)), *unwritten)
        parked = tuple(run.run_id for run in self._cut if run.parked)
        ended_by_itself = [run for run in self._cut if run.status in ("completed", "failed")]  # it finished first
        interrupted = tuple(run.run_id for run in self._cut if not run.parked and run not in ended_by_itself)
        finished += len(ended_by_itself)
        self._cut.clear()
        self.incidents.kept["P12"] += finished + len(parked) + len(interrupted)
        self.incidents.broken["P12"] += len(orphans)
        return DrainReport(
            finished=finished,
            parked=parked,
            interrupted=interrupted,
            waiting=self.dispatch.admission.waiting,
            orphans=orphans,
            elapsed_s=self.loop.time() - began,
        )

    async def _until_unused(self, deadline_s: float) -> None:
        """Wait until every run has ended, including runs that a pending send or claim is about to start."""
        try:
            async with asyncio.timeout(deadline_s) as self._patience:
                await self.dispatch.unused()
        except TimeoutError:
            pass  # the drain continues with the remaining runs
        finally:
            self._patience = None

    def _hasten(self) -> None:
        """End the drain's deadline now: a caller that waits for the close was cancelled."""
        if not self._time_is_over and self._patience is not None:
            self._patience.reschedule(self.loop.time())

    def _shutdown(self) -> Cause:
        return Cause(kind="shutdown", reason="the host is shutting down", origin=self.node_id, at=self.now())

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def session(
        self,
        key: str,
        *,
        principal: str = "local",
        agent: str | None = None,
        agents: frozenset[str] | None = None,
    ) -> Session:
        """Return a handle to a principal's session; no I/O, the session need not exist yet.

        Parameters:
            key: 1 to 200 printable characters without a slash.
            principal: the session's owner.
            agent: the agent for messages that do not name one.
            agents: the agents that this caller may use; it sees no others. None: all of them.

        Raises:
            InvalidKey, UnknownAgent.
        """
        if agent is not None:
            self.find_agent(agent, among=agents)
        return Session(self, principal, key, agent, agents)

    async def sessions(self, *, principal: str | None = None, limit: int = 100) -> list[SessionView]:
        """Return the most recently changed sessions, of one principal or of all (None)."""
        return list(await self.store.sessions(principal=principal, limit=limit))

    async def open_questions(self, *, limit: int = 1000) -> list[DueQuestion]:
        """Return the open questions of all sessions, the earliest to expire first."""
        return list(await self.store.due_questions(before=math.inf, limit=limit))

    async def schedule(
        self,
        key: str,
        text: str,
        *,
        principal: str = "local",
        schedule_id: str | None = None,
        **spec: Unpack[ScheduleKeywords],
    ) -> Schedule:
        """Send a session a message on a schedule; same as `SessionLike.schedule` of the session `key`."""
        return await self.session(key, principal=principal).schedule(text, schedule_id=schedule_id, **spec)

    def find_schedule(self, schedule_id: str, *, principal: str = "local") -> Schedule:
        """Return a handle to a principal's schedule; no I/O, it need not exist. Raises `InvalidKey`."""
        return Schedule(self, principal, schedule_id)

    async def schedules(
        self, *, principal: str | None = None, session: str | None = None, limit: int = 100
    ) -> list[ScheduleView]:
        """Return schedules in order of creation: of all principals (None), of one, or of one session."""
        return list(await self.store.schedules(principal=principal, session=session, limit=limit))

    def find_agent(self, name: str, *, among: frozenset[str] | None = None) -> Agent:
        """Return the agent of that name, if in `among`. Raises `UnknownAgent`, which lists only agents in `among`."""
        agent = self.agents.get(name) if among is None or name in among else None
        if agent is None:
            there = ", ".join(sorted(self.agents if among is None else among & self.agents.keys())) or "none for you"
            raise UnknownAgent(
                f"unknown agent {name!r}",
                hint=f"available: {there}; name one with the message (agent=, --agent) to switch the session to it",
            )
        return agent

    def statistics(self) -> HostStatistics:
        """Return a snapshot of the host."""
        return HostStatistics(
            node_id=self.node_id,
            pid=os.getpid(),
            started_at=self.started_at,
            draining=self.draining,
            sessions_live=len(self.actors),
            running=len(self.live),
            in_line=self.dispatch.admission.waiting,
            readers=self.readers,
            counts=dict(self.incidents.counts),
            promises=self.incidents.promises(),
        )

    def tree(self, *, principal: str | None = None) -> TreeNode:
        """Return all live sessions and runs, and everything below them; of one principal, or of all (None).

        Abandoned tasks and threads stay until they have ended, in the state ``abandoned``.
        """
        shown = {
            actor.session: actor.key
            for actor in self.actors.values()
            if not actor.idle and principal in (None, actor.principal)
        }
        shown |= self._left_behind.sessions(principal)
        children = tuple(self.session_tree(session, key) for session, key in shown.items())
        state = "draining" if self.draining else "open"
        return TreeNode(kind="host", name=self.node_id, state=state, children=children)

    def session_tree(self, session: int, key: str) -> TreeNode:
        """Return the live tasks, threads and processes of one session."""
        now = self.loop.time()
        left = self._left_behind.nodes(session, now)
        actor = self.actors.get(session)
        if actor is None:
            return TreeNode(kind="session", name=key, state="idle", children=left)
        scopes = [actor.active.scope] if actor.active is not None else []
        nodes = (*scope_nodes([*scopes, *actor.background], now), *left)
        return TreeNode(kind="session", name=key, state="running" if scopes else "idle", children=nodes)

    # ── used by the parts of the host ────────────────────────────────────────────────────────────────────────────

    def actor(self, *, session: int, number: int, principal: str, key: str, seq: int) -> SessionActor:
        """Return the live session, loading it at `seq` if it is not in memory."""
        actor = self.actors.get(session)
        if actor is None:
            actor = SessionActor(session=session, number=number, principal=principal, key=key, seq=seq)
            self.actors[session] = actor
            self.upkeep.follow(actor)
            if self._streams_closed:
                actor.log.close()
        return actor

    def threads(self, principal: str) -> ThreadPool:
        """Return the principal's own thread pool, so that it cannot exhaust another's."""
        pool = self._pools.get(principal)
        if pool is None:
            pool = self._pools[principal] = ThreadPool(
                max_threads=self.settings.principal_threads,
                abandoned_limit=self.settings.principal_abandoned,
                name=f"holdfast-{principal}"[:40],
            )
        return pool

    def forget_threads(self) -> None:
        """Close the thread pools of principals with nothing in memory; abandoned threads stay counted."""
        if len(self._pools) > len(self.live):
            here = {actor.principal for actor in self.actors.values()}
            for principal in [name for name in self._pools if name not in here]:
                if not self._pools[principal].statistics().abandoned:
                    self._pools.pop(principal).close()

    def committed(
        self, claim: Claim, status: str, committed: Committed, steered: Sequence[str] = (), *, sure: bool = True
    ) -> None:
        """Publish the durable end of a run, and wake those who wait for it.

        Parameters:
            status: the committed status; a run that is rolled back ends ``interrupted``.
            steered: ids of the messages that it took after its claim.
            sure: whether `steered` is complete.
        """
        counts, kept, broken = self.incidents.counts, self.incidents.kept, self.incidents.broken
        settled = [settlement.message_id for settlement in committed.settled]
        if committed.settled and committed.settled[0].state == "superseded":
            counts["rolled_back"] += 1
            status = "interrupted"
        counts[f"runs_{status}"] += 1
        kept["P5"] += len(settled)
        expected = [message.message_id for message in claim.messages]
        expected += steered
        if settled != expected and (sure or settled[: len(expected)] != expected):
            broken["P5"] += 1
        if committed.waiting > self.settings.mailbox_limit:
            broken["P9"] += 1
        kept["P10"] += 1
        actor = self.actors.get(claim.lease.session)
        if actor is not None:
            actor.publish(committed.events)
        self.settlements.settle(committed.settled)

    def _tell_refused(self, text: str) -> None:
        self.incidents.kept["P14"] += 1
        self.incidents.report(Incident(at=self.now(), kind="budget", text=text))

    async def catch_up(self, actor: SessionActor) -> None:
        """Publish events that were written while the store's replies were lost. Raises `StorageError`."""

        def read() -> Awaitable[Sequence[Stored]]:
            return self.store.read_events(
                actor.session, after=actor.log.next_seq - 1, limit=PAGE, limit_bytes=PAGE_BYTES
            )

        while page := await patiently(self, "read", read):
            actor.publish(page)
            if actor.log.closed:
                break

    def run_started(self, run: ActiveRun) -> None:
        """Handle a started run: after a drain's deadline, unload or stop it at once."""
        if self._time_is_over:
            self._cut_short(run)

    def run_rests(self, run: ActiveRun) -> None:
        """Handle a run that waits only for people: unload it if possible. A drain does not wait for it otherwise."""
        if self.draining:
            self._cut_short(run)
        else:
            run.leave()

    def _cut_short(self, run: ActiveRun) -> None:
        """Unload or stop a run for shutdown."""
        if run in self._cut:
            return
        if run.leaving or (run.surroundings.resting and run.leave()):
            self._cut[run] = run.follow()
        else:
            run.park()
            self._cut[run] = run.stop(self._shutdown())

    def run_ended(self, run: ActiveRun) -> None:
        """Handle a run that is no longer live."""
        if run not in self._cut and not run.parked:
            self._ended += 1

    def run_triggered(self, run: ActiveRun, cause: Cause) -> None:
        """Record the interrupt of a run, unless it is already durable."""
        self.incidents.counts[f"interrupts_{cause.kind}"] += 1
        if cause.kind == "parent" and not self.scope.interrupt.triggered:
            self.incidents.broken["P2"] += 1
        else:
            self.incidents.kept["P2"] += 1
        if cause.kind in RECORDED and cause.origin != run.run_id:
            return
        actor = run.actor
        done = self.store.interrupt(
            Interrupt(principal=actor.principal, key=actor.key, cause=cause, at=self.now(), run_id=run.run_id)
        )
        done.add_done_callback(lambda done: self._recorded(actor, run, done), context=self.context)

    def _recorded(self, actor: SessionActor, run: ActiveRun, done: asyncio.Future[InterruptDone]) -> None:
        error = done.exception()
        if error is None:
            actor.publish(done.result().events)
        else:
            self.store_failed(actor.key, run.run_id, "interrupt", error)

    def receipt_made(self, run: ActiveRun, receipt: StopReceipt) -> None:
        """Count a stopped run, and report what is left."""
        incidents = self.incidents
        incidents.counts[f"stops_{receipt.outcome}"] += 1
        incidents.kept["P3"] += 1
        stopped = receipt.stopped
        incidents.kept["P1"] += stopped.tasks + stopped.threads + stopped.processes
        incidents.broken["P3"] += len(receipt.survivors)
        if receipt.outcome == "gone" and receipt.abandoned:
            incidents.broken["P1"] += 1
        self._left_behind.note(run.actor, run.scope)
        for left in receipt.abandoned:
            incidents.counts["abandoned"] += 1
            text = (
                f"{left.kind} {left.name!r} did not stop and is quarantined; give it timeouts, or run it in a process"
            )
            self._report("quarantined", text, run, left.stack)
        if receipt.survivors:
            pids = ", ".join(map(str, receipt.survivors))
            self._report("survivors", f"processes {pids} may still be running; check them with ps", run)

    def scope_closed(self, scope: Scope) -> None:
        """Check that nothing is left in the closed scope of a run."""
        if scope.members():
            self.incidents.broken["P8"] += 1
        else:
            self.incidents.kept["P8"] += 1

    def transcript_made(self, entries: Sequence[Entry]) -> None:
        """Check that each call among a run's new entries has exactly one result."""
        calls = [entry.call_id for entry in entries if entry.role == "tool_call"]
        results = {entry.call_id for entry in entries if entry.role == "tool_result"}
        valid = len(calls) == len(results) and results.issuperset(calls)
        (self.incidents.kept if valid else self.incidents.broken)["P6"] += 1

    def run_lost(self, run: ActiveRun, error: HoldfastError) -> None:
        """Report that another holder has the session."""
        self.incidents.broken["P11"] += 1
        self._report("lease_lost", error.message, run)

    def _report(self, kind: Any, text: str, run: ActiveRun, stack: tuple[str, ...] = ()) -> None:
        self.incidents.report(
            Incident(at=self.now(), kind=kind, text=text, session=run.actor.key, run_id=run.run_id, stack=stack)
        )

    def _loop_blocked(self, seconds: float, stack: tuple[str, ...]) -> None:
        """Report a blocked event loop. Runs on the watching thread."""
        text = (
            f"the event loop did not respond for {seconds:g} s, which delays everyone: something on it blocks. "
            "Make it async, or a sync function, which gets a thread"
        )
        self.incidents.report(Incident(at=self.now(), kind="loop_blocked", text=text, stack=stack))

    def store_failed(self, key: str | None, run_id: str | None, what: str, error: BaseException) -> None:
        """Report a failed write; it is retried if anything depends on it."""
        text = f"{what}: {one_line(error)}"
        self.incidents.report(Incident(at=self.now(), kind="store", text=text, session=key, run_id=run_id))

    def withdrawn(self, session: int, settled: Sequence[Settlement], events: Sequence[Stored]) -> None:
        """Handle withdrawn messages."""
        actor = self.actors.get(session)
        if actor is not None:
            actor.publish(events)
        self.incidents.kept["P5"] += len(settled)
        self.settlements.settle(settled)

    def stopping(
        self,
        principal: str,
        key: str,
        done: asyncio.Future[InterruptDone] | asyncio.Future[StopDone],
        cause: Cause,
        grace_s: float | None,
        *,
        background: bool,
    ) -> asyncio.Task[tuple[StopReceipt, tuple[Message, ...]]]:
        """Carry out an interrupt or stop that the store is recording. It continues even if the caller is cancelled.

        Parameters:
            background: whether to stop the session's background work too.
        """
        stops: list[asyncio.Future[StopReceipt]] = []
        acted: asyncio.Future[None] = self.loop.create_future()

        def decided(done: asyncio.Future[Any]) -> None:
            """Act in the callback, so that nothing comes between the record and the act."""
            try:
                act(done)
            finally:
                acted.set_result(None)

        def act(done: asyncio.Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, StorageError):  # even a full disk must not keep a run alive
                stops.extend(
                    self.start_task(run.scope.stop(cause=cause, grace_s=grace_s), "stop")
                    for run in self.live.values()
                    if run.actor.principal == principal and run.actor.key == key
                )
            if error is not None:
                return
            result = done.result()
            actor = self.actors.get(result.session)
            if actor is not None:
                actor.publish(result.events)
            run = self.live.get(result.run_id or "")
            if run is not None:
                stops.append(run.stop(cause, grace_s=grace_s))
            elif result.run_id is not None:
                stops.append(self.dispatch.parked.stop(result.session, principal, result.run_id, cause))
            if background and actor is not None:
                stops.extend(
                    self.start_task(scope.stop(cause=cause, grace_s=grace_s), "stop background")
                    for scope in list(actor.background)
                )

        done.add_done_callback(decided, context=self.context)

        async def carry_out() -> tuple[StopReceipt, tuple[Message, ...]]:
            withdrawn: tuple[Message, ...] = ()
            await acted  # not `done`: between its result and its callbacks, the stop has not happened yet
            try:
                result: InterruptDone | StopDone = done.result()
            except StorageError:
                if background or not stops:  # waiting messages were not withdrawn: the caller must retry
                    raise
            else:
                if isinstance(result, StopDone):
                    withdrawn = result.withdrawn
                    settled = [Settlement(message_id=m.message_id, state="withdrawn") for m in withdrawn]
                    self.withdrawn(result.session, settled, ())
            receipts = [await stop for stop in stops]
            return join_receipts(*(receipts or [nothing_to_stop(key, self.now())])), withdrawn

        return self.start_task(carry_out(), "stopping")

    def start_background(self, actor: SessionActor, work: Callable[[], Awaitable[Any]], *, name: str) -> None:
        """Start background work of a session that outlives its run; its result comes back as a message.

        Raises:
            Draining: the host is shutting down.
            LimitExceeded: the principal has too much background work.
        """
        if self.draining:
            raise Draining("this host is shutting down and starts no background work")
        limit = self.settings.principal_background
        if self._in_background[actor.principal] >= limit:
            self.incidents.kept["P9"] += 1
            raise LimitExceeded(
                f"{actor.principal!r} already has {limit} background tasks, which is the limit",
                hint="wait until some have ended, or stop their sessions",
            )
        scope = Scope(name, parent=self.scope, threads=self.threads(actor.principal), owner=actor.principal)

        def told(text: str) -> None:
            self.incidents.report(Incident(at=self.now(), kind="background", text=text, session=actor.key))

        async def report() -> None:
            try:
                outcome = await work()
                text = None if outcome is None else f"[{name}] {outcome}"
            except Exception as error:
                log_failure(
                    _log, f"background work {name!r} failed", error, principal=actor.principal, session=actor.key
                )
                told(f"{name}: {one_line(error)}")
                text = f"[{name}] failed: {one_line(error)}"
            if text is None or scope.interrupt.triggered:
                return  # stopped work reports nothing
            try:
                await self.session(actor.key, principal=actor.principal).send(text)
            except HoldfastError as error:
                told(f"the result of {name} could not be sent to its session: {one_line(error)}")

        def ended() -> None:
            self._left_behind.note(actor, scope)
            del actor.background[scope]
            self._in_background[actor.principal] -= 1

        def begin() -> None:
            scope.open()
            actor.background[scope] = None
            self._in_background[actor.principal] += 1
            _ = scope.spawn(report(), name=name)
            scope.close_when_done(ended)

        self.context.copy().run(begin)

    def start_task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task owned by the host: outside every run, and referenced until it is done."""
        task = self.loop.create_task(coroutine, name=f"holdfast {name}", context=self.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _by_name(agent: AgentLike | None, others: Mapping[str, AgentLike] | Iterable[AgentLike]) -> dict[str, Agent]:
    found: list[Agent] = [] if agent is None else [as_agent(agent)]
    if isinstance(others, Mapping):
        for name, thing in others.items():
            one = as_agent(thing)
            found.append(replace(one, name=name))
    else:
        found += [as_agent(thing) for thing in others]
    if not found:
        raise ConfigurationError("a host needs at least one agent", hint="use Host(agent) or Host(agents=[…])")
    by_name: dict[str, Agent] = {}
    for one in found:
        if one.name in by_name:
            raise ConfigurationError(f"two agents are named {one.name!r}", hint="give one of them another name=")
        by_name[one.name] = one
    return by_name


def _left(receipt: StopReceipt) -> list[str]:
    """Return the names of the survivors in a receipt."""
    threads = [f"{left.kind} {left.name} of {receipt.scope}" for left in receipt.abandoned]
    return threads + [f"process {pid} of {receipt.scope}" for pid in receipt.survivors]
