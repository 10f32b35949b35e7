"""The composition root. A host owns the store, the runs and the runs' scopes and threads, and provides sessions."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import os
from pathlib import Path
from traceback import format_list
from typing import TYPE_CHECKING, TypeVar, Unpack

from holdfast import ids
from holdfast.clock import Clock, system_clock
from holdfast.errors import ConfigurationError
from holdfast.host.agent_registry import AgentRegistry
from holdfast.host.context import HostContext
from holdfast.host.garbage_collection import ThresholdClaim
from holdfast.host.host_parts import HostParts
from holdfast.host.loop_watchdog import LoopWatchdog
from holdfast.host.program_accounts import program_usage
from holdfast.host.scheduler import Schedule
from holdfast.host.server_exit import ServerExit
from holdfast.host.session import Session
from holdfast.host.statistics import DrainReport, HostStatistics, Recovery
from holdfast.logs import redact
from holdfast.runtime import Restorer, Scope, current_scope, detached, install
from holdfast.runtime.adoption.processes import kill_everything
from holdfast.runtime.process_host import process_host
from holdfast.settings import DEFAULT_STORE, Settings, default_store
from holdfast.storage import open_store
from holdfast.tools.sandbox.proxy.link import network_proxy
from holdfast.user_code import nearest, user_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from traceback import StackSummary
    from types import TracebackType
    from typing import Any

    from holdfast.agents.agent import Agent, AgentLike
    from holdfast.host.admission import Admission
    from holdfast.host.budgets import BudgetUsage
    from holdfast.host.live_session import LiveSession
    from holdfast.host.run_execution import RunExecution
    from holdfast.host.run_reports import RunListener
    from holdfast.protocol.messages import Grant, SessionView, TreeNode
    from holdfast.protocol.schedules import ScheduleKeywords, ScheduleView
    from holdfast.storage.port import DueQuestion, Store

__all__ = ["Host"]

T = TypeVar("T")

_log = logging.getLogger("holdfast.host")

_STACK_DEPTH = 12
_FRAMES_LOGGED = 3


class Host:
    """Hosts agents in this process. Use it as ``async with Host(agent) as host``.

    Parameters:
        agent: the default agent; if None, the first of `agents` is the default.
        agents: further agents, as a mapping from name to agent or as an iterable of agents.
        store: a store URL (``sqlite:///file``, ``memory://``) or a store that is not yet open; None uses the store
            that `settings` configures.
        settings: all limits and timeouts; None uses the default settings.
        clock: the source of wall-clock time.

    Call all methods on the loop that started the host. A host can be started only once.

    While hosts are active, Python's cyclic garbage collector runs less often, unless the program has set thresholds of
    its own: call `gc.set_threshold` before or after the start to choose them.

    Raises:
        ConfigurationError: if no agent is given, or if two agents have the same name.
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
        registry = AgentRegistry(agent, agents)
        settings = settings or Settings()
        chosen = _configured_store(settings) if store is None else store
        opened = chosen if not isinstance(chosen, str) else _opened(chosen, settings)
        self.context = context = HostContext.of(settings, clock, opened, ids.node_id())
        self.settings = settings
        self.clock = clock
        self.now = clock.now
        self.store = context.store
        self.stored_limit = context.stored_limit
        self.node_id = context.node_id
        self.incidents = context.incidents
        self.budgets = context.budgets
        self.agents = registry.by_name
        self.default_agent = registry.default
        self.parts = parts = HostParts(context, registry)
        self.directory = parts.directory
        self.settlements = parts.settlements
        self.maintenance = parts.maintenance
        self.scheduler = parts.scheduler
        self.queue = parts.queue
        self.recovered = Recovery()
        self.started_at = 0.0
        self.on_streams_close: list[Callable[[], object]] = []
        """Callbacks that are called before the event streams end, so that a server can ask its clients to reconnect."""
        self._started = False
        self._adoption: Restorer
        self._thresholds: ThresholdClaim
        self._draining: asyncio.Task[DrainReport] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._watchdog: LoopWatchdog | None = None
        self._server_exit: ServerExit | None = None

    # ── state ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that started the host."""
        return self.context.loop

    @property
    def scope(self) -> Scope:
        """The parent scope of all runs."""
        return self.context.scope

    @property
    def draining(self) -> bool:
        """Whether the host refuses new work."""
        return self.context.lifecycle.draining

    @property
    def live(self) -> dict[str, RunExecution]:
        """The runs in memory, by id."""
        return self.parts.launcher.live

    @property
    def actors(self) -> dict[int, LiveSession]:
        """The sessions in memory, by row id in the store."""
        return self.directory.live

    @property
    def readers(self) -> int:
        """Number of open event streams."""
        return self.directory.readers

    @property
    def admission(self) -> Admission:
        """The run slots."""
        return self.queue.admission

    def budget_usage(self, principal: str | None = None) -> dict[str, BudgetUsage]:
        """Return a snapshot of each budget by name, for `principal`; None covers the whole host."""
        return self.budgets.usage(principal) | program_usage(self.parts.programs, principal)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Open the store, recover the runs of an earlier process, and start accepting work.

        Raises:
            StoreLocked, StoreCorrupt, StoreReadOnly: if the store cannot be used; the error's hint names the remedy.
            StorageError: if recovery fails to read or write the store; the host is then closed again.
            ConfigurationError: if the host was started before, if a toolset fails to start, or if ``event_archive`` is
                not a folder that can be written.
        """
        if self._started:
            raise ConfigurationError("this host was started before", hint="a host starts only once; create a new one")
        context, settings = self.context, self.settings
        loop = asyncio.get_running_loop()
        with detached():
            variables = contextvars.copy_context()
        self.started_at = self.now()
        await self.store.open(node_id=self.node_id, at=self.started_at)
        self._started = True
        self._adoption = install(loop)
        self._thresholds = ThresholdClaim()
        workers = process_host().workers
        workers.variables = tuple(dict.fromkeys((*workers.variables, *settings.worker_variables)))
        proxy = network_proxy()
        proxy.principal_connections = settings.principal_program_connections
        proxy.principal_bytes = settings.principal_program_traffic_bytes
        scope = Scope("host", detached=True, grace_s=settings.grace_s, abandon_after_s=settings.abandon_after_s).open()
        context.bind(loop=loop, variables=variables, scope=scope)
        try:
            if not getattr(loop, "virtual", False):
                self._server_exit = ServerExit(loop, self._on_server_exit)
                if settings.loop_block_s:
                    self._watchdog = LoopWatchdog(
                        loop, limit_s=settings.loop_block_s, report=self._on_loop_blocked, recovered=self._on_loop_freed
                    )
                    self._watchdog.start()
            self.parts.lease_guard.start()
            self.maintenance.open()
            await self.parts.toolsets.enter()
            if self.parts.cluster_watch is not None:
                await self.parts.cluster_watch.share_limits()
            self.recovered = await context.start_task(self.parts.recovery.run(), "recovery")
            self.maintenance.start()
            self.scheduler.start()
            if self.parts.cluster_watch is not None:
                self.parts.cluster_watch.start()
        except BaseException:
            self._draining = context.start_task(self.parts.drain.run(0.0), "drain")
            await self.close()
            raise

    async def __aenter__(self) -> Host:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def watch_runs(self, listener: RunListener) -> Callable[[], None]:
        """Report each run that ends, and the drain, to `listener`. Return a function that removes the listener."""
        return self.parts.reports.add(listener)

    async def drain(self, *, deadline_s: float | None = None) -> DrainReport:
        """Accept no new work, let runs finish until the deadline, then unload or interrupt the rest. Idempotent.

        A run that waits only for people is unloaded at once, or interrupted if it cannot be unloaded.

        Parameters:
            deadline_s: time that runs have to finish, in seconds; None uses the setting ``drain_timeout_s``.
        """
        if self._draining is None:
            seconds = self.settings.drain_timeout_s if deadline_s is None else deadline_s
            self._draining = self.context.start_task(self._drain(seconds), "drain")
        return await asyncio.shield(self._draining)

    async def _drain(self, deadline_s: float) -> DrainReport:
        report = await self.parts.drain.run(deadline_s)
        self.parts.reports.drained(report)
        return report

    async def close(self) -> None:
        """Drain the host, end all event streams and waits, and close the store. Later calls wait for the first call.

        If the caller is cancelled, the drain's deadline expires at once. `CancelledError` is raised once the host is
        closed.
        """
        if not self._started:
            return
        if self._closing is None:
            self._closing = self.context.start_task(self._close(), "close")
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError as error:
                if self._closing.cancelled() or self._is_around_caller():
                    raise
                cancelled = error
                self.parts.drain.hasten()
        if cancelled is not None:
            raise cancelled
        self._closing.result()

    def _is_around_caller(self) -> bool:
        """Return whether the caller runs within this host's scope. Such a caller must not wait for its own end."""
        scope = current_scope()
        while scope is not None and scope is not self.scope:
            scope = scope.parent
        return scope is self.scope

    async def _close(self) -> None:
        try:
            await self.drain()
        finally:
            await self.parts.toolsets.leave()
            self.close_streams()
            self.settlements.close()
            self.maintenance.close()
            self.parts.lease_guard.close()
            if self.parts.cluster_watch is not None:
                self.parts.cluster_watch.close()
            if self._watchdog is not None:
                self._watchdog.close()
            if self._server_exit is not None:
                self._server_exit.close()
            await self.scope.stop("the host is closing", kind="shutdown")
            await kill_everything()
            self.parts.programs.close()
            self._adoption.restore()
            self._thresholds.release()
            self.parts.threads.close()
            process_host().close_idle()
            try:
                await self.store.close()
            finally:
                self.parts.lease_guard.release_programs()

    def start_task(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that belongs to the host, not to a run. The host references the task until it is done."""
        return self.context.start_task(coroutine, name)

    def close_streams(self) -> None:
        """End every event stream after its pending events. A stream that is opened later ends at the end of its log."""
        for on_close in self.on_streams_close:
            on_close()
        self.directory.close_streams()

    def _on_server_exit(self) -> None:
        """Drain the host and end its streams and waits, because the exiting web server waits for them first."""

        async def end() -> None:
            await self.drain()
            self.close_streams()
            self.settlements.close()

        self.context.start_task(end(), "end the streams")

    def _on_loop_blocked(self, seconds: float, stack: StackSummary) -> None:
        """Report a blocked event loop. Called on the watchdog's thread."""
        text = (
            f"the event loop did not respond for {seconds:g} s, which delays everyone: something on it blocks. "
            "Make it async, or a sync function, which gets a thread"
        )
        lines = tuple(line.rstrip() for line in format_list(stack[-_STACK_DEPTH:]))
        self.context.report("loop_blocked", text, stack=lines)
        frames = (user_frames(stack) or stack)[-_FRAMES_LOGGED:]
        where = "".join(f"\n{nearest(Path(f.filename))}, line {f.lineno}, in {f.name}: {f.line}" for f in frames)
        _log.warning("%s%s", text, redact(where))

    def _on_loop_freed(self, seconds: float) -> None:
        """Log how long the event loop was blocked. Called on the watchdog's thread."""
        _log.warning("the event loop responds again; it was blocked for at least %.1f s", seconds)

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def session(
        self,
        key: str,
        *,
        principal: str = "local",
        agent: str | None = None,
        agents: frozenset[str] | None = None,
    ) -> Session:
        """Return a handle to a principal's session. This does no I/O, and the session need not exist yet.

        Parameters:
            key: the session's key, 1 to 200 printable characters without a slash.
            principal: the session's owner.
            agent: the agent for messages that do not name an agent; None uses the session's agent.
            agents: the agents that this caller may use; None allows all agents. Any other agent raises `UnknownAgent`.

        Raises:
            InvalidKey: if `key` is invalid.
            UnknownAgent: if the host does not have `agent`, or if the caller may not use that agent.
        """
        if agent is not None:
            self.find_agent(agent, among=agents)
        return Session(self.parts.of_sessions, principal, key, agent, agents)

    async def sessions(
        self, *, principal: str | None = None, limit: int = 100, before: tuple[float, int] | None = None
    ) -> list[SessionView]:
        """Return the most recently changed sessions of `principal`; None includes all principals.

        `before`: see `holdfast.storage.port.Store.sessions`.
        """
        return list(await self.store.sessions(principal=principal, limit=limit, before=before))

    async def open_questions(self, *, limit: int = 1000) -> list[DueQuestion]:
        """Return the open questions of all sessions, in order of expiry."""
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
        """Create or replace a schedule that sends messages to the session `key`; see `SessionAPI.schedule`."""
        return await self.session(key, principal=principal).schedule(text, schedule_id=schedule_id, **spec)

    def find_schedule(self, schedule_id: str, *, principal: str = "local") -> Schedule:
        """Return a handle to a principal's schedule. This does no I/O, and the schedule need not exist.

        Raises `InvalidKey` if `schedule_id` is invalid.
        """
        return Schedule(self.scheduler, principal, schedule_id)

    async def schedules(
        self, *, principal: str | None = None, session: str | None = None, limit: int = 100
    ) -> list[ScheduleView]:
        """Return schedules in order of creation, limited to `principal` and to the session key `session` if given."""
        return list(await self.store.schedules(principal=principal, session=session, limit=limit))

    async def grants(self, *, principal: str = "local") -> list[Grant]:
        """Return all grants of a principal, those of its sessions included, oldest first."""
        return await self.parts.grants.of_principal(principal)

    async def revoke_grant(self, grant_id: str, *, principal: str = "local") -> Grant:
        """Revoke a grant of a principal, and end the programs that run with its access. Raises `UnknownGrant`."""
        return await self.parts.grants.revoke(principal, grant_id)

    def find_agent(self, name: str, *, among: frozenset[str] | None = None) -> Agent:
        """Return the agent called `name`. Raises `UnknownAgent` if the agent does not exist or is not in `among`.

        Without `among`, all agents are allowed. The error lists only allowed agents.
        """
        return self.parts.of_sessions.agents.find(name, among=among)

    def statistics(self) -> HostStatistics:
        """Return a snapshot of the host's state and counters."""
        return HostStatistics(
            node_id=self.node_id,
            pid=os.getpid(),
            started_at=self.started_at,
            draining=self.draining,
            sessions_live=len(self.directory.live),
            running=len(self.parts.launcher.live),
            awaiting_slot=self.admission.waiting,
            awaiting_pool=self.awaiting_pool,
            event_subscribers=self.readers,
            counts=self._counts(),
            promises=self.incidents.promises.snapshot(),
        )

    @property
    def awaiting_pool(self) -> int:
        """Number of sessions that wait for a host of a ``workspace_pool`` that no host declares, as last polled."""
        return sum(self.missing_pools.values())

    @property
    def missing_pools(self) -> Mapping[str, int]:
        """Number of sessions that wait for each ``workspace_pool`` that no host declares, as last polled."""
        watch = self.parts.cluster_watch
        return {} if watch is None else watch.awaiting_pool

    def _counts(self) -> dict[str, int]:
        counts = dict(self.incidents.counts)
        if refused := self.store.backend.counters.stale_writes_refused:
            counts["stale_writes_refused"] = refused
        return counts

    def tree(self, *, principal: str | None = None) -> TreeNode:
        """Return the tree of live sessions with their runs, tasks, threads and processes.

        Without a `principal`, the sessions of all principals are included. Abandoned tasks and threads stay in the
        tree, in the state ``abandoned``, until they end.
        """
        return self.parts.tree.of_host(principal)


def _opened(url: str, settings: Settings) -> Store:
    return open_store(
        url,
        lease_s=settings.lease_s,
        direct=settings.store_direct,
        workspace_pool=settings.workspace_pool or None,
        nats=settings.nats,
    )


def _configured_store(settings: Settings) -> str:
    """Return the URL of the configured store, or of a store that an older version created in the current folder."""
    if settings.store != DEFAULT_STORE:
        return settings.store
    found = default_store(environ={})
    if found != DEFAULT_STORE:
        _log.warning("the store is still at %s; move it with 'holdfast store move'", found)
    return found
