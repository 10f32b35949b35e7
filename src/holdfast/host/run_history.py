"""The stored history of a run whose original task has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from holdfast.agents.journal import Journal
from holdfast.errors import StoreCorrupt
from holdfast.host.store_retry import retry
from holdfast.protocol.events import (
    ChildStarted,
    Event,
    RunSuspended,
    StepFinished,
    TextDelta,
    ToolStarted,
    decode_event,
)
from holdfast.protocol.transcript import RunTranscript

if TYPE_CHECKING:
    from holdfast.agents.agent import Agent
    from holdfast.host.context import HostContext
    from holdfast.storage.port import Claim

__all__ = ["RunHistory", "read_run_history"]


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The stored history of a run so far.

    Parameters:
        claim: the claim under which the run resumes.
        events: the run's stored events, in order.
    """

    claim: Claim
    events: Sequence[Event] = ()

    def journal(self) -> Journal:
        """Return the journal for the run's next attempt."""
        return Journal(self.events)

    def transcript(self) -> RunTranscript:
        """Return the run's transcript so far."""
        transcript = RunTranscript(self.claim.lease.run_id, self.claim.messages)
        for event in self.events:
            transcript.feed(event)
        return transcript

    def was_started_by(self, agent: Agent) -> bool:
        """Return whether an agent like `agent`, which either has a model or is a function, may have started the run.

        A run of an agent with a model resumes from its recorded steps; a run of a function resumes from its recorded
        calls.
        """
        run_id = self.claim.lease.run_id
        in_steps = any(isinstance(e, StepFinished) and e.run_id == run_id for e in self.events)
        if agent.model is None:
            return not in_steps
        return in_steps or not any(isinstance(e, (ToolStarted, ChildStarted, RunSuspended)) for e in self.events)

    @property
    def repeats_output(self) -> bool:
        """Whether the run's next attempt repeats output that readers may have seen."""
        run_id = self.claim.lease.run_id
        start = self.journal().discard_from or self.claim.started_seq
        return any(isinstance(e, TextDelta) and e.run_id == run_id and e.seq >= start for e in self.events)


async def read_run_history(context: HostContext, claim: Claim) -> RunHistory:
    """Read a run's history from the log.

    Raises:
        StorageError: if the store keeps failing.
        StoreCorrupt: if the log cannot be decoded.
    """
    lease = claim.lease
    stored = await retry(context, "read", lambda: context.store.run_events(lease.session, lease.run_id))
    try:
        return RunHistory(claim, [decode_event(event) for event in stored])
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(f"the log of run {lease.run_id} is unreadable: {error}") from error
