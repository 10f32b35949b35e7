"""The parts of a host that every run uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.agents.limits import RunLimits
from holdfast.host.flush_beat import FlushBeat

if TYPE_CHECKING:
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.run_accounting import RunAccounting
    from holdfast.host.run_observer import RunObserver
    from holdfast.host.session_directory import SessionDirectory
    from holdfast.host.slot_queue import SlotQueue
    from holdfast.host.thread_pools import ThreadPools

__all__ = ["RunParts"]


class RunParts:
    """The parts of a host that its runs use, and the `RunObserver` that its runs notify."""

    __slots__ = ("accounting", "agents", "beat", "context", "directory", "limits", "observer", "queue", "threads")

    def __init__(
        self,
        context: HostContext,
        *,
        agents: AgentRegistry,
        directory: SessionDirectory,
        queue: SlotQueue,
        threads: ThreadPools,
        accounting: RunAccounting,
        observer: RunObserver,
    ) -> None:
        self.context = context
        self.beat = FlushBeat(context)
        self.agents = agents
        self.directory = directory
        self.queue = queue
        self.threads = threads
        self.accounting = accounting
        self.observer = observer
        self.limits = RunLimits(
            call_timeout_s=context.settings.tool_timeout_s, step_timeout_s=context.settings.step_timeout_s
        )
