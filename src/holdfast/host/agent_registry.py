"""The agents of a host, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from holdfast.agents.agent import Agent, AgentLike, as_agent
from holdfast.errors import ConfigurationError, UnknownAgent
from holdfast.storage.values import Served

__all__ = ["AgentRegistry"]


DEMO = "demo"
"""Name of the built-in demo agent. Its sessions go to the default agent of a host that does not serve the demo."""


class AgentRegistry:
    """The agents of a host; the default agent is the first.

    ``names`` are the names of the agents, ``served`` are their versions by name, and ``takes_over`` are the names of
    agents that this host does not have and whose sessions its default agent takes over.

    Parameters:
        agent: the default agent; if None, the first of `others` is the default.
        others: further agents, as a mapping from name to agent or as an iterable of agents.

    Raises:
        ConfigurationError: if no agent is given, or if two agents have the same name.
    """

    __slots__ = ("by_name", "default", "names", "served", "takes_over")

    def __init__(self, agent: AgentLike | None, others: Mapping[str, AgentLike] | Iterable[AgentLike] = ()) -> None:
        self.by_name = _by_name(agent, others)
        self.default = next(iter(self.by_name))
        self.names = frozenset(self.by_name)
        self.served: Served = {name: agent.version if agent.replayable else "" for name, agent in self.by_name.items()}
        self.takes_over = frozenset({DEMO}) - self.names

    def find(self, name: str, *, among: frozenset[str] | None = None) -> Agent:
        """Return the agent called `name`. Raises `UnknownAgent` if the agent does not exist or is not in `among`.

        Without `among`, all agents are allowed. The error lists only allowed agents.
        """
        agent = self.by_name.get(name) if among is None or name in among else None
        if agent is None:
            visible = sorted(self.by_name if among is None else among & self.by_name.keys())
            raise UnknownAgent(
                f"unknown agent {name!r}",
                hint=f"available: {', '.join(visible) or 'none for you'}; "
                "name one with the message (agent=, --agent) to switch the session to it",
            )
        return agent


def _by_name(agent: AgentLike | None, others: Mapping[str, AgentLike] | Iterable[AgentLike]) -> dict[str, Agent]:
    found: list[Agent] = [] if agent is None else [as_agent(agent)]
    if isinstance(others, Mapping):
        found += [replace(as_agent(other), name=name) for name, other in others.items()]
    else:
        found += [as_agent(other) for other in others]
    if not found:
        raise ConfigurationError("a host needs at least one agent", hint="use Host(agent) or Host(agents=[…])")
    by_name: dict[str, Agent] = {}
    for one in found:
        if one.name in by_name:
            raise ConfigurationError(
                f"two agents are named {one.name!r}",
                hint="give one of them another name (for a function: def NAME), or serve them one at a time",
            )
        by_name[one.name] = one
    return by_name
