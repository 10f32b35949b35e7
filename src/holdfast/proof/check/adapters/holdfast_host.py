"""Holdfast: a host in this process, with its store in a SQLite file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.proof.check.kit import Setting

__all__ = ["HoldfastHost"]


class HoldfastHost:
    """A `Host` with one agent and default settings."""

    packages = ("holdfast-agents",)

    def __init__(self) -> None:
        self._host: Any = None
        self._sessions: dict[str, Any] = {}
        self._of: dict[str, Any] = {}

    async def start(self, setting: Setting) -> None:
        """See `Adapter.start`."""
        import holdfast

        os.environ.update(OPENAI_BASE_URL=setting.model_url, OPENAI_API_KEY="any")
        from holdfast.proof.check.kit import pound  # a process of its own has to find it by its name

        tools = [*map(holdfast.tool, setting.tools), holdfast.tool(isolation="process")(pound)]
        agent = holdfast.Agent(name="probe", model="openai-chat:fake", tools=tools)
        self._host = holdfast.Host(agent, store=f"sqlite:///{Path(setting.folder) / 'holdfast.db'}")
        await self._host.start()

    async def open(self, session: str, user: str) -> None:
        """See `Adapter.open`."""
        self._sessions[session] = self._host.session(session, principal=user)

    async def submit(self, session: str, text: str) -> str:
        """See `Adapter.submit`."""
        receipt = await self._sessions[session].send(text)
        self._of[receipt.message_id] = self._sessions[session]
        return str(receipt.message_id)

    async def result(self, work: str) -> str:
        """See `Adapter.result`."""
        session = self._of.pop(work)
        settlement = await session.wait(work)
        if settlement.state != "completed":
            raise RuntimeError(f"the message is {settlement.state}")
        return str(settlement.text)

    async def cancel(self, session: str) -> None:
        """See `Adapter.cancel`."""
        await self._sessions[session].interrupt("the probe cancels")

    async def transcript(self, session: str) -> list[list[str]]:
        """See `Adapter.transcript`."""
        from holdfast.errors import UnknownSession

        try:
            return [[entry.role, entry.content] for entry in await self._sessions[session].transcript()]
        except UnknownSession:  # a session comes into being with its first message
            return []

    async def force(self) -> str:
        """See `Adapter.force`."""
        return "tool(isolation='process')"

    async def live(self) -> list[str]:
        """See `Adapter.live`."""

        def below(node: Any) -> list[str]:
            own = [node.name] if node.kind not in ("host", "session", "activation") else []
            return own + [name for child in node.children for name in below(child)]

        return below(self._host.tree())

    async def inbox(self) -> str:
        """See `Adapter.inbox`."""
        return "a message is in the store before send returns"

    async def close(self) -> None:
        """See `Adapter.close`."""
        await self._host.close()
