"""Agents one after another: each is asked what the one before answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.agents.agent import Agent
from holdfast.agents.compose.answers import hand_over
from holdfast.agents.compose.parts import BranchLike, Part, named, shape
from holdfast.agents.journal import Branch
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.agents.run import Run

__all__ = ["sequence"]


def sequence(*branches: BranchLike, name: str = "sequence", description: str = "") -> Agent:
    """An agent that asks others one after another; its answer is the last one's, said as it comes.

    The first sees what the run sees: its text, the session's history, the attachments. Each later one is asked what the
    one before answered, and sees nothing else. The first that does not complete ends it, with its error.

    Parameters:
        branches: agents, functions of a run, names of agents that the host has, or what `branch` makes of them.
        name: what it is called.
        description: one line for people and models.

    Raises:
        ConfigurationError: no branches.
    """
    parts = named(branches)
    if not parts:
        raise ConfigurationError("no branches given", hint="give it at least one agent")
    return shape(name, _Sequence(parts=parts), parts, description)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """The work of the agent."""

    parts: tuple[Part, ...]

    async def __call__(self, run: Run) -> None:
        text = run.text
        for number, part in enumerate(self.parts[:-1]):
            text = await run._delegate(part.task(run, text, Branch(run._next_id()), inherits=number == 0))
        last = self.parts[-1].task(run, text, Branch(run._next_id()), inherits=len(self.parts) == 1, aloud=True)
        await hand_over(run, last)
