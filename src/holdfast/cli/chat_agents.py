"""The server of ``holdfast chat``: its agents, and the store that it uses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import InvalidRequest

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.protocol.messages import SessionView

__all__ = ["AgentNames", "fetch_agents", "missing_agent", "other_store"]

_DEMO = "demo"


class AgentNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the agents that the person may talk to, and of the one that new sessions get.

    ``store`` is the kind of the server's store, followed by its path if the person is an admin.
    """

    agents: list[str] = []
    default_agent: str = ""
    store: str = ""

    def require(self, name: str) -> None:
        """Raise `InvalidRequest` if the name is not that of an agent."""
        if name not in self.agents:
            raise InvalidRequest(f"unknown agent {name[:60]!r}", hint=f"choose {', '.join(self.agents)}")


async def fetch_agents(client: Client) -> AgentNames:
    """Return the names of the server's agents."""
    return await client.read("/v1/server", AgentNames)


def other_store(known: AgentNames) -> list[str]:
    """Return lines about a server that uses another store than the one in the current folder; none otherwise."""
    from holdfast.settings import load_settings

    here = load_settings({}).store
    kind, _, there = known.store.partition(" ")
    if not (there and here.startswith(f"{kind}:///")):
        return []
    here = os.path.realpath(here.removeprefix(f"{kind}:///"))
    if here == there or not os.path.exists(here):
        return []
    return [
        f"this server uses {there}, not the store of this folder",
        "if you meant the server of this folder: set HOLDFAST_PORT as it did, or pass --url",
    ]


def missing_agent(view: SessionView, known: AgentNames) -> list[str]:
    """Return lines about a session whose agent is not on the server; none if it is."""
    if view.agent in known.agents or not known.agents:
        return []
    if view.agent == _DEMO:
        return [f"the demo agent is gone; {known.default_agent!r} answers in this session now"]
    other = known.default_agent if known.default_agent in known.agents else known.agents[0]
    return [
        f"session {view.key} belongs to agent {view.agent!r}, which this server does not have",
        f"continue it with {other!r}: /agent {other}   or start another session: /new NAME",
    ]
