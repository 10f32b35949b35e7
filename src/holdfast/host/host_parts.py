"""Build the parts of a host from the bottom up. Each part gets the context and the parts below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.host.background import Background
from holdfast.host.cluster_watch import ClusterWatch
from holdfast.host.dispatcher import Dispatcher
from holdfast.host.drain import Drain
from holdfast.host.grants import Grants
from holdfast.host.lease_guard import LeaseGuard
from holdfast.host.log_follower import LogFollower
from holdfast.host.maintenance import Maintenance
from holdfast.host.message_sender import MessageSender
from holdfast.host.node_requests import NodeRequests
from holdfast.host.program_accounts import program_quotas
from holdfast.host.recovery import RunRecovery
from holdfast.host.remote_stops import RemoteStops
from holdfast.host.run_accounting import RunAccounting
from holdfast.host.run_launcher import RunLauncher
from holdfast.host.run_parts import RunParts
from holdfast.host.run_reports import RunReports
from holdfast.host.scheduler import Scheduler
from holdfast.host.session import SessionParts
from holdfast.host.session_directory import SessionDirectory
from holdfast.host.settlements import Settlements
from holdfast.host.slot_queue import SlotQueue
from holdfast.host.stop_coordinator import StopCoordinator
from holdfast.host.suspension import Suspension
from holdfast.host.thread_pools import ThreadPools
from holdfast.host.toolsets import Toolsets
from holdfast.host.tree import TaskTree

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable
    from typing import Any

    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.live_session import LiveRun, LiveSession
    from holdfast.protocol.stopping import Cause, StopReceipt
    from holdfast.storage.port import Claim, Committed

__all__ = ["HostParts"]


class HostParts:
    """The parts of one host. Implements `RunObserver` by forwarding each call to the part concerned."""

    __slots__ = (
        "accounting",
        "background",
        "cluster_watch",
        "directory",
        "dispatcher",
        "drain",
        "grants",
        "launcher",
        "lease_guard",
        "maintenance",
        "of_sessions",
        "programs",
        "queue",
        "recovery",
        "remote_stops",
        "reports",
        "scheduler",
        "settlements",
        "suspension",
        "threads",
        "toolsets",
        "tree",
    )

    def __init__(self, context: HostContext, agents: AgentRegistry) -> None:
        self.directory = SessionDirectory(context)
        self.settlements = Settlements()
        self.grants = Grants(context, self.directory)
        self.threads = ThreadPools(context.settings)
        self.programs = program_quotas(context)
        self.tree = TaskTree(context, self.directory)
        self.reports = RunReports(context)
        self.accounting = RunAccounting(context, self.directory, self.settlements, self.tree, self.reports)
        self.queue = SlotQueue(context, self)
        parts = RunParts(
            context,
            agents=agents,
            directory=self.directory,
            queue=self.queue,
            threads=self.threads,
            grants=self.grants,
            programs=self.programs,
            accounting=self.accounting,
            observer=self,
        )
        self.launcher = RunLauncher(parts)
        self.lease_guard = LeaseGuard(context, self.launcher)
        self.suspension = Suspension(parts, self.launcher)
        self.recovery = RunRecovery(parts, self.launcher)
        cluster = context.store.cluster
        follower: LogFollower | None = None
        node_requests: NodeRequests | None = None
        if cluster is not None:
            follower = LogFollower(context, self.directory, self.settlements, self.launcher, cluster)
            self.directory.on_behind = follower.on_behind
            self.launcher.on_restarted = follower.on_restarted
            node_requests = NodeRequests(context, self.directory, self.tree, cluster=cluster, follower=follower)
        self.remote_stops = RemoteStops(context, self.suspension, follower)
        self.maintenance = Maintenance(parts, self.launcher, self.suspension, self.recovery)
        self.dispatcher = Dispatcher(context, self.directory, self.queue, self.launcher, self.suspension, parts.served)
        sender = MessageSender(context, agents, self.queue, self.dispatcher)
        self.background = Background(context, self.threads, self.tree, sender, cluster)
        self.toolsets = Toolsets(context, agents, sender, self.programs)
        self.scheduler = Scheduler(context, agents, self.queue, self.dispatcher)
        self.drain = Drain(context, self.directory, self.queue, self.launcher, self.scheduler)
        self.cluster_watch: ClusterWatch | None = None
        if cluster is not None and follower is not None and node_requests is not None:
            self.cluster_watch = ClusterWatch(
                parts,
                self.launcher,
                self.suspension,
                self.recovery,
                self.scheduler,
                cluster=cluster,
                follower=follower,
                node_requests=node_requests,
            )
        self.of_sessions = SessionParts(
            context=context,
            agents=agents,
            directory=self.directory,
            settlements=self.settlements,
            accounting=self.accounting,
            launcher=self.launcher,
            suspension=self.suspension,
            sender=sender,
            stops=StopCoordinator(parts, self.launcher, self.remote_stops, node_requests),
            follower=follower,
            node_requests=node_requests,
            scheduler=self.scheduler,
            tree=self.tree,
            grants=self.grants,
        )

    # ── RunObserver ──────────────────────────────────────────────────────────────────────────────────────────────

    def on_slot(self, principal: str, session: int) -> None:
        """Claim the next run of a queued session that got a slot."""
        self.dispatcher.on_slot(principal, session)

    def on_started(self, run: LiveRun) -> None:
        """Note the run's start, and unload or stop the run if it started after a drain's deadline."""
        self.reports.started(run.run_id)
        self.drain.on_started(run)

    def on_quiescent(self, run: LiveRun) -> None:
        """Unload a quiescent run (it waits only for people) if possible; otherwise, stop it only during a drain."""
        self.drain.on_quiescent(run)

    def on_ended(self, run: LiveRun, claim: Claim, committed: Committed | None) -> None:
        """Remove from memory a run that has ended or was unloaded, and release or reuse its slot."""
        self.drain.on_ended(run)
        self.launcher.on_ended(run, claim, committed)
        self.reports.forget(run.run_id)

    def on_question(self, due_at: float) -> None:
        """Set the timer for a new question that expires at `due_at`."""
        self.maintenance.question_due(due_at)

    def stop_unloaded(self, session: int, principal: str, run_id: str, cause: Cause) -> asyncio.Task[StopReceipt]:
        """End a run that is not in memory. The store has already recorded its interrupt."""
        return self.remote_stops.stop(session, principal, run_id, cause, grace_s=None)

    def start_background(
        self, actor: LiveSession, work: Callable[[], Awaitable[Any]], *, name: str, claim: Claim
    ) -> None:
        """Start background work of a session, for the run of `claim`. Raises `Draining`, `LimitExceeded`."""
        self.background.start(actor, work, name=name, claim=claim)
