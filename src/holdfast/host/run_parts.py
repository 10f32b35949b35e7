"""The parts of a host that every run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.agents.limits import RunLimits
from holdfast.host.flush_beat import FlushBeat
from holdfast.host.restart_rules import RestartRules

if TYPE_CHECKING:
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.grants import Grants
    from holdfast.host.program_quotas import ProgramQuotas
    from holdfast.host.run_accounting import RunAccounting
    from holdfast.host.run_observer import RunObserver
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.slot_queue import SlotQueue
    from holdfast.host.thread_pools import ThreadPools
    from holdfast.storage.port import Claim

__all__ = ["RunParts"]


class RunParts:
    """The parts of a host that its runs use, and the `RunObserver` that its runs notify."""

    __slots__ = (
        "accounting",
        "agents",
        "beat",
        "context",
        "directory",
        "grants",
        "limits",
        "observer",
        "programs",
        "queue",
        "restart_rules",
        "served",
        "threads",
    )

    def __init__(
        self,
        context: HostContext,
        *,
        agents: AgentRegistry,
        directory: SessionDirectory,
        queue: SlotQueue,
        threads: ThreadPools,
        grants: Grants,
        programs: ProgramQuotas,
        accounting: RunAccounting,
        observer: RunObserver,
    ) -> None:
        self.context = context
        self.beat = FlushBeat(context)
        self.agents = agents
        self.directory = directory
        self.queue = queue
        self.threads = threads
        self.restart_rules = RestartRules(context, agents)
        self.served = None if context.store.cluster is None else agents.served
        """The agents whose runs this host may claim; None if only this host uses the store."""
        self.grants = grants
        self.programs = programs
        self.accounting = accounting
        self.observer = observer
        self.limits = RunLimits(
            call_timeout_s=context.settings.tool_timeout_s, step_timeout_s=context.settings.step_timeout_s
        )

    def is_elsewhere(self, claim: Claim) -> bool:
        """Return whether only other hosts have the files that the run needs."""
        cluster, pool = self.context.store.cluster, claim.workspace_pool
        return cluster is not None and pool is not None and pool != cluster.workspace_pool
