"""The sessions and schedules of a server, over one `Transport`."""

from __future__ import annotations

from typing import Unpack

from holdfast.client.schedules import RemoteSchedule
from holdfast.client.session import RemoteSession
from holdfast.client.transport import Transport
from holdfast.protocol.http import ScheduleList, SessionList
from holdfast.protocol.messages import SessionView, TreeNode
from holdfast.protocol.schedules import ScheduleKeywords, ScheduleView

__all__ = ["Client"]


class Client(Transport):
    """A server's sessions, with the same interface as those of a `Host`; the parameters are those of `Transport`.

    Open it with ``async with``; use it from one loop only.
    """

    def session(self, key: str) -> RemoteSession:
        """Return a session of the key's principal. No I/O. Raises `InvalidKey` for a key that a URL cannot carry."""
        return RemoteSession(self, key)

    async def sessions(self, *, limit: int = 100, everybody: bool = False) -> list[SessionView]:
        """Return sessions, most recently changed first.

        Parameters:
            limit: maximum number of sessions.
            everybody: include all principals; requires an admin key.
        """
        query = {"limit": str(limit), "all": str(everybody).lower()}
        return (await self.read("/v1/sessions", SessionList, query=query)).sessions

    async def schedule(
        self,
        key: str,
        text: str,
        *,
        schedule_id: str | None = None,
        **spec: Unpack[ScheduleKeywords],
    ) -> RemoteSchedule:
        """Send messages to the session `key` on a schedule; see `SessionAPI.schedule`."""
        return await self.session(key).schedule(text, schedule_id=schedule_id, **spec)

    def find_schedule(self, schedule_id: str) -> RemoteSchedule:
        """Return a schedule of the key's principal. No I/O. Raises `InvalidKey` for an id that a URL cannot carry."""
        return RemoteSchedule(self, schedule_id)

    async def schedules(
        self, *, session: str | None = None, limit: int = 100, everybody: bool = False
    ) -> list[ScheduleView]:
        """Return schedules in order of creation.

        Parameters:
            session: only schedules of this session.
            limit: maximum number of schedules.
            everybody: include all principals; requires an admin key.
        """
        query = {"limit": str(limit), "all": str(everybody).lower()}
        if session is not None:
            query["session"] = session
        return (await self.read("/v1/schedules", ScheduleList, query=query)).schedules

    async def tree(self, *, everybody: bool = False) -> TreeNode:
        """Return the tree of live tasks, threads and processes.

        Parameters:
            everybody: include all principals; requires an admin key.
        """
        return await self.read("/v1/tree", TreeNode, query={"all": str(everybody).lower()})
