"""Agents in sequence: the answer of each agent is the request of the next agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.agents.agent import Agent
from holdfast.agents.children import delegate
from holdfast.agents.compose.answers import hand_over
from holdfast.agents.compose.branch_spec import BranchLike, BranchSpec, composite, named
from holdfast.agents.journal import CallPath
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.agents.run import Run

__all__ = ["sequence"]


def sequence(*branches: BranchLike, name: str = "sequence", description: str = "") -> Agent:
    """Return an agent that runs several agents one after another and streams the answer of the last agent.

    The first agent gets the run's text, the session's history and the attachments. Each later agent gets only the
    previous agent's answer. If an agent does not complete, the sequence ends with the error of that agent.

    Parameters:
        branches: agents, functions that take a `Run`, names of the host's agents, or results of `branch`.
        name: name of the composite agent.
        description: one-line description of the agent, for people and models.

    Raises:
        ConfigurationError: if no branches are given, or a branch is invalid.
    """
    parts = named(branches)
    if not parts:
        raise ConfigurationError("no branches given", hint="pass at least one agent")
    return composite(name, _Sequence(parts=parts), parts, description)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """The work of an agent that `sequence` made."""

    parts: tuple[BranchSpec, ...]

    async def __call__(self, run: Run) -> None:
        context, text = run.context, run.text
        for number, part in enumerate(self.parts[:-1]):
            text = await delegate(context, part.task(run, text, CallPath(context.next_id()), inherits=number == 0))
        last = self.parts[-1].task(run, text, CallPath(context.next_id()), inherits=len(self.parts) == 1, aloud=True)
        await hand_over(run, last)
