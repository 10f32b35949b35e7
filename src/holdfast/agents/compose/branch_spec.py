"""Branches of composite agents: each is an agent with a name, deadline, request and restart policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from holdfast.agents.agent import Agent, AgentLike, as_agent
from holdfast.agents.children import ChildTask
from holdfast.agents.output import require_text
from holdfast.errors import ConfigurationError
from holdfast.protocol.supervision import is_seconds

if TYPE_CHECKING:
    from holdfast.agents.journal import CallPath
    from holdfast.agents.run import Run

__all__ = ["BranchLike", "BranchSpec", "Restart", "branch", "branch_spec", "composite", "named"]

Restart = Literal["transient", "permanent", "temporary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSpec:
    """A branch of a composite agent; created by `branch`, which documents it."""

    agent: Agent | str
    name: str = ""
    deadline_s: float | None = None
    text: str | Callable[[Run, str], str] | None = None
    restart: Restart = "transient"

    @property
    def label(self) -> str:
        """The display name."""
        return self.name or (self.agent if isinstance(self.agent, str) else self.agent.name)

    def task(self, run: Run, text: str, place: CallPath, *, inherits: bool = True, aloud: bool = False) -> ChildTask:
        """Return the branch's task in this run.

        Parameters:
            text: the default request; a branch with its own `text` builds its request from it.
            inherits: whether the branch gets the session's history and the attachments of the run's messages.
            aloud: whether the run also emits the branch's text as it arrives.

        Raises:
            UnknownAgent: the host has no agent of that name.
            TypeError: the branch's `text` function did not return text.
        """
        agent = run.context.host.find_agent(self.agent) if isinstance(self.agent, str) else self.agent
        if isinstance(self.text, str):
            text = self.text.replace("{text}", text)
        elif self.text is not None:
            text = self.text(run, text)
            require_text(text, f"the text of branch {self.label!r}")
        return ChildTask(
            agent=agent,
            text=text,
            branch=place,
            name=self.label,
            deadline_s=self.deadline_s,
            attachments=tuple(a for message in run.messages for a in message.attachments) if inherits else (),
            inherits_history=inherits,
            streams_to_parent=aloud,
        )


BranchLike: TypeAlias = "BranchSpec | AgentLike | str"


def branch(
    agent: AgentLike | str,
    *,
    name: str | None = None,
    deadline_s: float | None = None,
    text: str | Callable[[Run, str], str] | None = None,
    restart: Restart = "transient",
) -> BranchSpec:
    """Return a branch of `parallel`, `sequence`, `route`, `supervised` or `periodic`, with its own options.

    Parameters:
        agent: an agent, a function of a run, or the name of one of the host's agents.
        name: the branch's name in the log, the task tree and causes; default: the agent's name.
        deadline_s: interrupt the branch this many seconds after its own start.
        text: the request. In a str, ``{text}`` stands for the default request; a function gets the composite's run and
            the default request, and must not block.
        restart: for `supervised`: restart the branch if it did not complete (``transient``), whenever it has ended
            (``permanent``), or never (``temporary``).

    Raises:
        ConfigurationError: not an agent, a deadline that is not above 0, or an unknown restart policy.
    """
    if deadline_s is not None and (not is_seconds(deadline_s) or deadline_s == 0):
        raise ConfigurationError(f"deadline_s of a branch is {deadline_s!r}; it must be a number of seconds above 0")
    if restart not in ("transient", "permanent", "temporary"):
        raise ConfigurationError(f"unknown restart {restart!r}", hint="choose transient, permanent or temporary")
    known = agent if isinstance(agent, str) else as_agent(agent)
    return BranchSpec(agent=known, name=name or "", deadline_s=deadline_s, text=text, restart=restart)


def branch_spec(thing: BranchLike) -> BranchSpec:
    """Return a branch unchanged, or make one from an agent. Raises `ConfigurationError` for anything else."""
    return thing if isinstance(thing, BranchSpec) else branch(thing)


def named(branches: Iterable[BranchLike]) -> tuple[BranchSpec, ...]:
    """Return the branches; those of the same agent are numbered. Raises `ConfigurationError` for a name given twice."""
    parts = [branch_spec(thing) for thing in branches]
    given = Counter(part.name for part in parts if part.name)
    if (twice := [name for name, count in given.items() if count > 1]) != []:
        raise ConfigurationError(f"two branches have the name {twice[0]!r}", hint="give one of them another name")
    same = Counter(part.label for part in parts)
    seen: Counter[str] = Counter()
    for index, part in enumerate(parts):
        if not part.name and same[part.label] > 1:
            seen[part.label] += 1
            parts[index] = replace(part, name=f"{part.label} {seen[part.label]}")
    return tuple(parts)


def composite(name: str, work: Callable[[Run], Any], parts: Iterable[BranchSpec], description: str) -> Agent:
    """Return the composite agent. It is replayable if all its parts are and none is given only by name."""
    agents = [part.agent for part in parts]
    known = tuple(agent for agent in agents if isinstance(agent, Agent))
    return Agent(
        name=name,
        work=work,
        replayable=len(known) == len(agents) and all(agent.replayable for agent in known),
        description=description,
        parts=known,
    )
