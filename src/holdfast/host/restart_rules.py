"""Whether a run whose host has ended may run again, or must end as interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import UnknownAgent
from holdfast.protocol.stopping import Cause, StopReceipt

if TYPE_CHECKING:
    from holdfast.host.agent_registry import AgentRegistry
    from holdfast.host.context import HostContext
    from holdfast.host.run_history import RunHistory

__all__ = ["RestartRules"]


class RestartRules:
    """The rules of one host. They only read and report.

    Parameters:
        agents: the agents of the host.
    """

    __slots__ = ("_agents", "_context")

    def __init__(self, context: HostContext, agents: AgentRegistry) -> None:
        self._context = context
        self._agents = agents

    def obstacle(self, history: RunHistory) -> str | None:
        """Return the reason why the run cannot resume; return None if the run can resume."""
        claim, journal = history.claim, history.journal()
        if claim.interrupt is not None:
            return "it was being interrupted"
        try:
            agent = self._agents.find(claim.agent)
        except UnknownAgent as error:
            return error.message
        if not agent.replayable:
            return "its agent is not declared replayable: @agent(replayable=True) or Agent(…, replayable=True)"
        if not history.was_started_by(agent):
            return "its agent " + (
                "no longer has a model" if agent.model is None else "has a model, but was a function"
            )
        if not journal.replayable:
            return (
                "a call that is not idempotent started and has no result: declare it with @tool(idempotent=True) or "
                "run.call(…, idempotent=True)"
            )
        limit = self._context.settings.restart_limit
        if journal.restarts_in_vain >= limit:
            self._context.report(
                "restart_loop",
                f"run {claim.lease.run_id} was given up after {limit} restarts; check what it does before each crash",
                session=claim.key,
                run_id=claim.lease.run_id,
            )
            return f"it was given up after {limit} restarts"
        return None

    def cause_of_end(self, history: RunHistory, obstacle: str) -> Cause:
        """Return the cause with which a run ends that cannot run again."""
        return history.claim.interrupt or Cause(
            kind="crash",
            reason=f"the host stopped during the run; {obstacle}",
            origin=self._context.node_id,
            at=self._context.now(),
        )

    def receipt_of_end(self, history: RunHistory, cause: Cause) -> StopReceipt | None:
        """Return the receipt of a run that another host had; None if only this host uses the store.

        No host saw what became of the run's tasks and programs, so the outcome is unknown.
        """
        if self._context.store.cluster is None:
            return None
        run_id = history.claim.lease.run_id
        return StopReceipt(
            scope=run_id,
            cause=cause,
            outcome="unknown",
            unattributed=("the run (the host that had it is gone)",),
            proof="lease",
        )
