"""Duties of a host that shares its store: follow the other hosts, claim what they leave, take over when they end.

- Every `cluster_poll_s`, it looks at everything that other hosts may have changed. Signals only make it look earlier.
- It takes over the runs of a host as soon as that host's lease has ended.
- It carries out what other hosts ask for (`NodeRequests`), tells which sessions wait for a ``workspace_pool`` or an
  agent that no host has, and drops old requests.
- It compares the runs that it holds in the store with those in its memory: a claim whose reply was lost for good
  would otherwise hold its session as long as this host lives.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError
from holdfast.host.coalesced_tasks import CoalescedTasks
from holdfast.host.run_reports import agent_label
from holdfast.protocol.stopping import Cause
from holdfast.storage.cluster import WAITED_LONG_S
from holdfast.storage.port import Claim

if TYPE_CHECKING:
    from holdfast.host.log_follower import LogFollower
    from holdfast.host.node_requests import NodeRequests
    from holdfast.host.recovery import RunRecovery
    from holdfast.host.run_launcher import RunLauncher
    from holdfast.host.run_parts import RunParts
    from holdfast.host.scheduler import Scheduler
    from holdfast.host.suspension import Suspension
    from holdfast.storage.port import Cluster, Lease, SignalKind

__all__ = ["ClusterWatch"]

_log = logging.getLogger("holdfast.host")

READY_LIMIT: Final = 256
"""Maximum number of sessions that one look queues."""
_READY_DELAY_S: Final = 0.02
"""Delay after a signal: the host that queued the session claims it first, if it has room."""
_CREATED_DELAY_S: Final = 0.01
"""Delay after a signal of new sessions, so that many of them cost one read."""
_AFTER_LEASE_S: Final = 0.02
_RETRY_S: Final = 0.25
_SWEEP_S: Final = 600.0
"""Interval at which old requests and stops are dropped."""
_ALL: Final = 0
"""Key of the looks for ready and for created sessions, which are about no session in particular."""


class ClusterWatch:
    """Watches the other hosts of a store. Use it on the host's loop only.

    Parameters:
        cluster: the hosts that share the store.
        follower: follows the logs of sessions.
        node_requests: carries out what other hosts ask for.
    """

    def __init__(
        self,
        parts: RunParts,
        launcher: RunLauncher,
        suspension: Suspension,
        recovery: RunRecovery,
        scheduler: Scheduler,
        *,
        cluster: Cluster,
        follower: LogFollower,
        node_requests: NodeRequests,
    ) -> None:
        self._context = context = parts.context
        self._parts = parts
        self._launcher = launcher
        self._suspension = suspension
        self._recovery = recovery
        self._scheduler = scheduler
        self._cluster = cluster
        self._follower = follower
        self._node_requests = node_requests
        self._ready = CoalescedTasks(context, self._claim_ready, name="ready", delay_s=_READY_DELAY_S)
        self._finds = CoalescedTasks(context, self._find_created, name="created sessions", delay_s=_CREATED_DELAY_S)
        self._created: set[int] = set()
        self._lease_look: asyncio.Future[None] | None = None
        """Resolves when the leases are to be looked at before their time."""
        self._tasks: list[asyncio.Task[None]] = []
        self._unknown: set[Lease] = set()
        self._epoch = 0
        """The epoch under which this host has begun the background work that it has."""
        self._has_warned = False
        self._signals_problem: str | None = None
        self.awaiting_pool: Mapping[str, int] = {}
        """How many sessions wait for a host of each pool that no host declares now."""
        self._awaiting_agent: Mapping[tuple[str, str], int] = {}
        """How many runs have waited long for a host with their agent, by the agent's name and version."""

    def start(self) -> None:
        """Start to watch."""
        self._cluster.signals.listen(self._on_signals, self._follower.receive)
        self._epoch = self._cluster.epoch
        lease_s = self._context.store.health().lease_s
        self._tasks = [
            self._context.start_task(work, name)
            for work, name in (
                (self._repeat(self._poll, self._context.settings.cluster_poll_s), "poll the cluster"),
                (self._repeat(self._reconcile, lease_s), "compare runs"),
                (self._watch_leases(lease_s), "watch leases"),
                (self._repeat(self._look_for_missing_agents, WAITED_LONG_S), "look for agents"),
                (self._repeat(self._sweep, _SWEEP_S), "sweep"),
            )
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Report that a watch has ended by itself, which is a fault."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._context.store_failed(None, None, f"{task.get_name()} has ended; restart this host", error)

    def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()

    def _on_signals(self, hints: Mapping[SignalKind, Mapping[int, int]]) -> None:
        for kind in ("interrupt", "changed"):
            self._follower.wake(hints.get(kind, {}))
        if "request" in hints:
            self._node_requests.look()
        if "created" in hints and self._parts.directory.awaited:
            self._created.update(hints["created"])
            self._finds.request(_ALL)
        if "ready" in hints:
            self._ready.request(_ALL)
            look = self._lease_look
            if not hints["ready"] and look is not None and not look.done():  # a host has left
                look.set_result(None)

    async def _repeat(self, work: Callable[[], Coroutine[Any, Any, None]], every_s: float) -> None:
        """Call `work` at this interval, whether or not the store answers."""
        while True:
            await asyncio.sleep(every_s)
            await self._try(work())

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except HoldfastError as error:
            self._context.store_failed(None, None, "cluster", error)

    # ── polling ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def share_limits(self) -> None:
        """Divide the limits that hold for all hosts together by their number. Raises `StorageError`."""
        self._parts.queue.share(1 + len(await self._cluster.other_nodes()))

    async def _poll(self) -> None:
        """Look at everything that other hosts may have changed. Raises `StorageError`."""
        self._end_background_of_before()
        self._look_at_signals()
        self._node_requests.look()
        await self._follower.poll()
        self._parts.directory.awaited.look_again()
        await self._parts.grants.poll()
        await self.share_limits()
        await self._claim_ready(_ALL)
        await self._look_for_missing_pools()
        if not self._context.lifecycle.draining:
            self._scheduler.look()

    async def _find_created(self, _: int) -> None:
        """Wake the tasks of this host that wait for sessions which other hosts have created."""
        created, self._created = self._created, set()
        for principal, key in await self._cluster.keys_of(list(created)):
            self._parts.directory.awaited.made(principal, key)

    def _look_at_signals(self) -> None:
        """Report once if this host does not hear of others any more, except by polling."""
        signals = self._cluster.signals
        before, problem = self._signals_problem, signals.problem if signals.has_tried else None
        self._signals_problem = problem
        if problem is not None and before is None and self._context.settings.nats:
            poll_s = self._context.settings.cluster_poll_s
            text = f"{problem}; until this is mended, hosts notice changes of others only every {poll_s:g} s"
            _log.warning("%s", text)
            self._context.report("store", text)

    def _end_background_of_before(self) -> None:
        """Stop the background work of an epoch that was ended: for others it is gone, and its programs are dead."""
        if self._epoch == self._cluster.epoch:
            return
        self._epoch = self._cluster.epoch
        cause = Cause(
            kind="lease_lost",
            reason="the lease of the host was over",
            origin=self._context.node_id,
            at=self._context.now(),
        )
        for live in self._parts.directory.live.values():
            for scope, origin in list(live.background.items()):
                noted = origin.noted
                if noted is not None and noted.done() and (noted.exception() or noted.result() != self._epoch):
                    self._context.start_task(scope.stop(cause=cause), "stop background")

    async def _claim_ready(self, _: int) -> None:
        """Queue sessions that no host has claimed yet, if there is a free slot."""
        context, queue = self._context, self._parts.queue
        if context.lifecycle.draining or queue.admission.statistics().running >= context.settings.max_runs:
            return
        ready = await self._cluster.ready(agents=self._parts.agents.served, at=context.now(), limit=READY_LIMIT)
        for session in ready:
            queue.enqueue_when_due(session.session, session.principal, 0.0)

    async def _look_for_missing_pools(self) -> None:
        """Count the sessions whose files no host has, and report each such pool once for as long as it is missing."""
        before, self.awaiting_pool = self.awaiting_pool, await self._cluster.sessions_without_pool()
        for pool in self.awaiting_pool.keys() - before.keys():
            text = (
                f"sessions wait for a host with workspace_pool = {pool!r}, which no host has "
                f"({self.awaiting_pool[pool]:,} now); start one that has the files of that pool"
            )
            _log.warning("%s", text)
            self._context.report("workspace_pool", text)

    async def _look_for_missing_agents(self) -> None:
        """Report runs that no host has continued for long, once for each agent and version."""
        before = self._awaiting_agent
        waiting = await self._cluster.runs_without_agent(updated_before=self._context.now() - WAITED_LONG_S)
        self._awaiting_agent = waiting
        for name, version in waiting.keys() - before.keys():
            text = (
                f"runs wait for a host with {agent_label(name, version)} and a free slot "
                f"({waiting[name, version]:,} now); start one, or interrupt the runs"
            )
            _log.warning("%s", text)
            self._context.report("agent", text)

    # ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _watch_leases(self, lease_s: float) -> None:
        """Take over the runs of other hosts whenever one of their leases ends.

        A host that lives renews its lease before this look, so a look costs a read in each lease, not one in a second.
        """
        while True:
            wait_s = _RETRY_S
            look = self._lease_look = self._context.loop.create_future()
            with suppress(HoldfastError):  # the store does not answer
                left_s = await self._cluster.next_lease_end_s()
                if not math.isinf(left_s):
                    self._warn_of_workspaces()
                if left_s > 0:
                    wait_s = min(left_s + _AFTER_LEASE_S, lease_s / 2)
                elif not self._context.lifecycle.draining:
                    await self._try(self._recovery.take_over())
            await asyncio.wait((look,), timeout=wait_s)

    def _warn_of_workspaces(self) -> None:
        """Warn once that sessions move between hosts, but the files of their tools do not."""
        declares = self._cluster.workspace_pool is not None
        executes = any(agent.executes for agent in self._parts.agents.by_name.values())
        if executes and not (declares or self._has_warned):
            _log.warning(
                "other hosts use this store, and agents run programs: a session that moves to another host leaves its "
                "workspace behind; set workspace_pool, with one name for all hosts that share the folder of workspaces"
            )
        self._has_warned = True

    async def _sweep(self) -> None:
        await self._cluster.sweep()

    # ── runs that are in the store only ──────────────────────────────────────────────────────────────────────────

    async def _reconcile(self) -> None:
        """Start or end runs that this host holds without knowing it, and end those that it no longer holds.

        Two looks must agree on a run that is not known: its claim may be under way at the first one. A run that lived
        before the look, and still does, was given to another host if this one does not hold it in the store.
        """
        before = [run for run in self._launcher.live.values() if run.phase == "running"]
        held = set(await self._cluster.held())
        for run in before:
            if run.phase == "running" and run.lease not in held:
                run.supersede()
        unknown = {lease for lease in held if not self._is_known(lease)}
        again, self._unknown = unknown & self._unknown, unknown
        for lease in again:
            if not self._context.lifecycle.draining:
                await self._reclaim(lease)

    def _is_known(self, lease: Lease) -> bool:
        run_id, live = lease.run_id, self._parts.directory.live.get(lease.session)
        return (
            (live is not None and live.active is not None)
            or run_id in self._launcher.live
            or run_id in self._launcher.ending
            or run_id in self._recovery.pending
            or self._suspension.is_resuming(run_id)
        )

    async def _reclaim(self, lease: Lease) -> None:
        context = self._context
        claim = await context.store.claim(lease.session, run_id=lease.run_id, at=context.now())
        if not isinstance(claim, Claim) or self._is_known(claim.lease):
            return
        context.incidents.counts["runs_reclaimed"] += 1
        if claim.attempt > 1 and not claim.resumed:
            await self._recovery.recover([claim])
            return
        self._parts.queue.admission.occupy(claim.principal)
        if claim.resumed:
            self._suspension.resume(claim)
        else:
            self._launcher.start(claim, steering=True)
