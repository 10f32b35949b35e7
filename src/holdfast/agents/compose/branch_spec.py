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
        """The display name of the branch."""
        return self.name or (self.agent if isinstance(self.agent, str) else self.agent.name)

    def task(self, run: Run, text: str, place: CallPath, *, inherits: bool = True, aloud: bool = False) -> ChildTask:
        """Return the task that runs this branch as a child of `run`.

        Parameters:
            text: default request; if the branch has its own `text`, the request is built from both.
            place: call path of the child.
            inherits: whether the child gets the session's history and the attachments of the run's messages.
            aloud: whether the run also emits the child's text as the text arrives.

        Raises:
            UnknownAgent: if the host has no agent with the branch's agent name.
            TypeError: if the branch's `text` function does not return text.
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
    """Return a branch, with options, for `parallel`, `sequence`, `route`, `supervised` or `periodic`.

    Parameters:
        agent: an agent, a function of a run, or the name of one of the host's agents.
        name: name of the branch in the log, the task tree and causes; None means the agent's name.
        deadline_s: seconds after the start of the branch at which the branch is interrupted; None sets no deadline.
        text: request for the branch; None means the default request. In a str, ``{text}`` is replaced by the default
            request. A function is called with the composite's run and the default request, returns the request, and
            must not block.
        restart: restart policy for `supervised`. ``transient`` restarts a branch that did not complete, ``permanent``
            restarts the branch whenever it has ended, and ``temporary`` never restarts it.

    Raises:
        ConfigurationError: if `agent` is not an agent, `deadline_s` is not above 0, or `restart` is unknown.
    """
    if deadline_s is not None and (not is_seconds(deadline_s) or deadline_s == 0):
        raise ConfigurationError(f"deadline_s of a branch is {deadline_s!r}; it must be a number of seconds above 0")
    if restart not in ("transient", "permanent", "temporary"):
        raise ConfigurationError(f"unknown restart {restart!r}", hint="choose transient, permanent or temporary")
    known = agent if isinstance(agent, str) else as_agent(agent)
    return BranchSpec(agent=known, name=name or "", deadline_s=deadline_s, text=text, restart=restart)


def branch_spec(thing: BranchLike) -> BranchSpec:
    """Return a branch unchanged, or make a branch from an agent. Raises `ConfigurationError` for any other object."""
    return thing if isinstance(thing, BranchSpec) else branch(thing)


def named(branches: Iterable[BranchLike]) -> tuple[BranchSpec, ...]:
    """Return the branches with distinct names: unnamed branches of the same agent get the agent's name and a number.

    Raises:
        ConfigurationError: if two branches were given the same name.
    """
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
    """Return a composite agent, which is replayable if all parts are replayable `Agent` objects, not names."""
    agents = [part.agent for part in parts]
    known = tuple(agent for agent in agents if isinstance(agent, Agent))
    return Agent(
        name=name,
        work=work,
        replayable=len(known) == len(agents) and all(agent.replayable for agent in known),
        description=description,
        parts=known,
    )
