"""What a shape is made of: agents, and what is said of each as a branch of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from holdfast.agents.agent import Agent, AgentLike, as_agent
from holdfast.agents.call import check_said
from holdfast.agents.children import ChildTask
from holdfast.errors import ConfigurationError
from holdfast.protocol.branches import is_seconds

if TYPE_CHECKING:
    from holdfast.agents.journal import Branch
    from holdfast.agents.run import Run

__all__ = ["BranchLike", "Part", "Restart", "branch", "named", "part_of", "shape"]

Restart = Literal["transient", "permanent", "temporary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A branch of a shape, made by `branch`; see there."""

    agent: Agent | str
    name: str = ""
    deadline_s: float | None = None
    text: str | Callable[[Run, str], str] | None = None
    restart: Restart = "transient"

    @property
    def label(self) -> str:
        """What it is called."""
        return self.name or (self.agent if isinstance(self.agent, str) else self.agent.name)

    def task(self, run: Run, text: str, place: Branch, *, inherits: bool = True, aloud: bool = False) -> ChildTask:
        """What the branch is asked in this run.

        Parameters:
            text: what it is asked unless it has a text of its own.
            inherits: it sees what the run sees: the session's history, and the attachments of its messages.
            aloud: what it says is said by the run too.

        Raises:
            UnknownAgent: the host has no agent of that name.
            TypeError: its text function gave no text.
        """
        agent = run._surroundings.find_agent(self.agent) if isinstance(self.agent, str) else self.agent
        if isinstance(self.text, str):
            text = self.text.replace("{text}", text)
        elif self.text is not None:
            text = self.text(run, text)
            check_said(text, f"the text of branch {self.label!r}")
        return ChildTask(
            agent=agent,
            text=text,
            branch=place,
            name=self.label,
            deadline_s=self.deadline_s,
            attachments=tuple(a for message in run.messages for a in message.attachments) if inherits else (),
            inherits=inherits,
            aloud=aloud,
        )


BranchLike: TypeAlias = "Part | AgentLike | str"


def branch(
    agent: AgentLike | str,
    *,
    name: str | None = None,
    deadline_s: float | None = None,
    text: str | Callable[[Run, str], str] | None = None,
    restart: Restart = "transient",
) -> Part:
    """Say something of an agent as a branch of `parallel`, `sequence`, `route` or `supervised`.

    Parameters:
        agent: an agent, a function of a run, or the name of an agent that the host has.
        name: what the branch is called in the log, the tree and in causes; default: the agent's name.
        deadline_s: it is interrupted after so many seconds, counted from its own beginning.
        text: what it is asked. In a str, ``{text}`` stands for what it would be asked otherwise; a function gets the
            shape's run and that text, and must not block.
        restart: for `supervised`: ``transient``: again when it did not complete; ``permanent``: again whenever it has
            ended; ``temporary``: never.

    Raises:
        ConfigurationError: no agent, or a deadline that is not above 0.
    """
    if deadline_s is not None and (not is_seconds(deadline_s) or deadline_s == 0):
        raise ConfigurationError(f"the deadline of a branch is {deadline_s!r}; it is a number of seconds above 0")
    if restart not in ("transient", "permanent", "temporary"):
        raise ConfigurationError(f"restart={restart!r} is not known", hint="use transient, permanent or temporary")
    known = agent if isinstance(agent, str) else as_agent(agent)
    return Part(agent=known, name=name or "", deadline_s=deadline_s, text=text, restart=restart)


def part_of(thing: BranchLike) -> Part:
    """The branch that `thing` is. Raises `ConfigurationError` for what cannot be one."""
    return thing if isinstance(thing, Part) else branch(thing)


def named(branches: Iterable[BranchLike]) -> tuple[Part, ...]:
    """The branches, those of the same agent numbered. Raises `ConfigurationError` where two were given one name."""
    parts = [part_of(thing) for thing in branches]
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


def shape(name: str, work: Callable[[Run], Any], parts: Iterable[Part], description: str) -> Agent:
    """The agent that a shape is. It may be replayed when all its parts may, and none is known by its name only."""
    agents = [part.agent for part in parts]
    known = tuple(agent for agent in agents if isinstance(agent, Agent))
    return Agent(
        name=name,
        work=work,
        replayable=len(known) == len(agents) and all(agent.replayable for agent in known),
        description=description,
        parts=known,
    )
