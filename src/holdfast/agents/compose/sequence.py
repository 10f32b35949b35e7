"""Agents in sequence: each gets the previous one's answer as its request."""

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
    """Return an agent that runs others one after another, and streams the last one's answer.

    The first gets the run's text, the session's history and the attachments; each later one gets only the previous
    one's answer. If one does not complete, the sequence ends with its error.

    Parameters:
        branches: agents, functions of a run, names of the host's agents, or results of `branch`.
        name: the agent's name.
        description: one-line description for people and models.

    Raises:
        ConfigurationError: no branches, or an invalid one.
    """
    parts = named(branches)
    if not parts:
        raise ConfigurationError("no branches given", hint="pass at least one agent")
    return composite(name, _Sequence(parts=parts), parts, description)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """The work of the agent."""

    parts: tuple[BranchSpec, ...]

    async def __call__(self, run: Run) -> None:
        context, text = run.context, run.text
        for number, part in enumerate(self.parts[:-1]):
            text = await delegate(context, part.task(run, text, CallPath(context.next_id()), inherits=number == 0))
        last = self.parts[-1].task(run, text, CallPath(context.next_id()), inherits=len(self.parts) == 1, aloud=True)
        await hand_over(run, last)
