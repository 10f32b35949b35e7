"""A composite that runs one of several agents, chosen for each run by a function or by another agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.agents.agent import Agent
from holdfast.agents.children import delegate
from holdfast.agents.compose.answers import hand_over
from holdfast.agents.compose.branch_spec import BranchLike, BranchSpec, branch_spec, composite
from holdfast.agents.journal import CallPath
from holdfast.errors import ConfigurationError, UnknownBranch

if TYPE_CHECKING:
    from holdfast.agents.run import Run

__all__ = ["route"]

_SHOWN = 80


def route(
    choose: BranchLike,
    routes: Mapping[str, BranchLike],
    *,
    name: str = "route",
    otherwise: BranchLike | None = None,
    description: str = "",
) -> Agent:
    """Return an agent that delegates each run to one of several agents and streams the answer of the chosen agent.

    Both the chooser and the chosen agent get the run's request, the session's history and the attachments. The choice
    is logged, and is not repeated in a later attempt.

    Parameters:
        choose: function of a run, or agent, that answers with the name of a branch. Differences in case are ignored, as
            are white space, quotes and full stops around the name.
        routes: the branches by name.
        name: name of the composite agent.
        otherwise: branch to run if the chooser's answer is not a name in `routes`; None makes such a run fail.
        description: one-line description of the agent, for people and models.

    Raises:
        ConfigurationError: if no branches are given, a name is empty, or two names differ only in ways that are
            ignored. The agent's run raises `UnknownBranch` if the chooser's answer is not the name of a branch and
            `otherwise` is not given.
    """
    parts = {_plain(key): replace(branch_spec(thing), name=key) for key, thing in routes.items()}
    if not parts:
        raise ConfigurationError("no branches given", hint="pass at least one named agent in routes")
    if len(parts) < len(routes) or "" in parts:
        raise ConfigurationError(
            f"ambiguous or empty branch names: {', '.join(map(repr, routes))}",
            hint="pick names that differ in more than case, quotes and white space",
        )
    chooser = branch_spec(choose)
    chooser = chooser if chooser.name else replace(chooser, name="choose")
    rest = None if otherwise is None else branch_spec(otherwise)
    work = _Route(choose=chooser, parts=parts, otherwise=rest)
    return composite(name, work, [chooser, *parts.values(), *([rest] if rest else [])], description)


def _plain(name: str) -> str:
    return name.strip().strip("'\"`.").strip().casefold()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """The work of an agent that `route` made."""

    choose: BranchSpec
    parts: dict[str, BranchSpec] = field(hash=False)
    otherwise: BranchSpec | None

    async def __call__(self, run: Run) -> None:
        chosen = await delegate(run.context, self.choose.task(run, run.text, CallPath(run.context.next_id())))
        part = self.parts.get(_plain(chosen), self.otherwise)
        if part is None:
            shown = chosen if len(chosen) <= _SHOWN else f"{chosen[: _SHOWN - 1]}…"
            raise UnknownBranch(
                f"{self.choose.label!r} answered {shown!r}, but {run.agent.name!r} has no such branch",
                hint=f"its branches are: {', '.join(part.name for part in self.parts.values())}",
            )
        await hand_over(run, part.task(run, run.text, CallPath(run.context.next_id()), aloud=True))
