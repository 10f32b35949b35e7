"""A storm's access to a host: in the same process, or over HTTP as several principals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol

from holdfast.client import Client
from holdfast.host import Host
from holdfast.protocol.messages import SessionView
from holdfast.protocol.session_api import SessionAPI

__all__ = ["ClusterAccess", "EmbeddedAccess", "HostAccess", "Progress", "RemoteAccess"]

Progress = Callable[[str], None]
"""Callback for short messages about the progress of a storm."""


class HostAccess(Protocol):
    """Access to a host. ``up`` is set while the host should answer."""

    up: asyncio.Event
    principals: tuple[str, ...]

    def session(self, principal: str, key: str) -> SessionAPI:
        """Return the session with this key, as `principal` sees it."""
        ...

    def watching(self, principal: str, key: str, *, patient: bool) -> SessionAPI:
        """Return a session for a reader; if `patient` is set, a lost connection is restored automatically."""
        ...

    async def sessions(self, principal: str) -> list[SessionView]:
        """Return the sessions that the principal sees."""
        ...


class EmbeddedAccess:
    """Access to a host in this process. A restart of the host replaces ``host``."""

    def __init__(self, principals: tuple[str, ...]) -> None:
        self.up = asyncio.Event()
        self.principals = principals
        self.host: Host

    def session(self, principal: str, key: str) -> SessionAPI:
        """See `HostAccess`."""
        return self.host.session(key, principal=principal)

    def watching(self, principal: str, key: str, *, patient: bool) -> SessionAPI:
        """See `HostAccess`. Ignores `patient`, because an embedded host is read without a connection."""
        return self.session(principal, key)

    async def sessions(self, principal: str) -> list[SessionView]:
        """See `HostAccess`."""
        return await self.host.sessions(principal=principal, limit=1000)


class ClusterAccess:
    """Access to several servers that share a store. Each handle uses one of those that are up, chosen at random.

    While ``only`` is set, all handles use this server.

    Parameters:
        nodes: access to each server. Their attributes ``up`` tell which ones are up.
        chance: source of the choices.
    """

    def __init__(self, nodes: Sequence[RemoteAccess], chance: random.Random) -> None:
        self.up = asyncio.Event()
        self.nodes = nodes
        self.only: RemoteAccess | None = None
        self.principals = nodes[0].principals
        self._chance = chance

    def _node(self) -> RemoteAccess:
        if self.only is not None:
            return self.only
        return self._chance.choice([node for node in self.nodes if node.up.is_set()] or list(self.nodes))

    def session(self, principal: str, key: str) -> SessionAPI:
        """See `HostAccess`."""
        return self._node().session(principal, key)

    def watching(self, principal: str, key: str, *, patient: bool) -> SessionAPI:
        """See `HostAccess`."""
        return self._node().watching(principal, key, patient=patient)

    async def sessions(self, principal: str) -> list[SessionView]:
        """See `HostAccess`."""
        return await self._node().sessions(principal)


class RemoteAccess:
    """Access to a server. The clients do not retry requests, because a lost answer is part of the history.

    Parameters:
        url: base URL of the server.
        keys: API key of each principal; None if the server does not require a key.
        acting: whether each client sends the name of the principal for which it acts; needed if the key belongs to
            another user.
        up: event for the attribute ``up``, to share it with another access to the same server; None creates an event.
    """

    def __init__(
        self, url: str, keys: Mapping[str, str | None], *, acting: bool = False, up: asyncio.Event | None = None
    ) -> None:
        self.up = up or asyncio.Event()
        self.url = url
        self.principals = tuple(keys)
        self._keys = keys
        self._acting = acting
        self._clients: dict[str, Client] = {}
        self._patient: dict[str, Client] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> RemoteAccess:
        for principal, key in self._keys.items():
            user = principal if self._acting else None
            self._clients[principal] = await self._stack.enter_async_context(
                Client(self.url, key, user=user, retry_s=0.0, reconnect_s=0.0)
            )
            self._patient[principal] = await self._stack.enter_async_context(
                Client(self.url, key, user=user, retry_s=0.0, reconnect_s=300.0)
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def session(self, principal: str, key: str) -> SessionAPI:
        """See `HostAccess`."""
        return self._clients[principal].session(key)

    def client(self, principal: str) -> Client:
        """Return the principal's client."""
        return self._clients[principal]

    def watching(self, principal: str, key: str, *, patient: bool) -> SessionAPI:
        """See `HostAccess`."""
        return (self._patient if patient else self._clients)[principal].session(key)

    async def sessions(self, principal: str) -> list[SessionView]:
        """See `HostAccess`."""
        return await self._clients[principal].sessions(limit=1000)
