"""Client for the sessions and schedules of a Holdfast server."""

from __future__ import annotations

from typing import Unpack

from holdfast.client.schedules import RemoteSchedule
from holdfast.client.session import RemoteSession
from holdfast.client.transport import Transport
from holdfast.client.wire import decode, segment
from holdfast.protocol.http import GrantList, ScheduleList, SessionList
from holdfast.protocol.messages import Grant, SessionView, TreeNode
from holdfast.protocol.schedules import ScheduleKeywords, ScheduleView

__all__ = ["Client"]


class Client(Transport):
    """Client for a Holdfast server. Its sessions and schedules have the same interface as those of a `Host`.

    The parameters are those of `Transport`. Open the client with ``async with``, and use it from one event loop only.
    """

    def session(self, key: str) -> RemoteSession:
        """Return a handle to the session `key` of the client's principal, without sending a request.

        Raises `InvalidKey` if `key` is empty or cannot be encoded as UTF-8.
        """
        return RemoteSession(self, key)

    async def sessions(self, *, limit: int = 100, everybody: bool = False) -> list[SessionView]:
        """Return the principal's sessions, most recently changed first.

        Parameters:
            limit: maximum number of sessions to return.
            everybody: whether to include the sessions of all principals; requires an admin key.
        """
        return (await self.session_page(limit=limit, everybody=everybody)).sessions

    async def session_page(
        self, *, limit: int = 100, everybody: bool = False, before: str | None = None
    ) -> SessionList:
        """Return one page of sessions, as `sessions` does, with the position of the next page.

        Parameters not listed here are those of `sessions`.

        Parameters:
            before: ``next`` of the previous page; None returns the first page.
        """
        query = {"limit": str(limit), "all": str(everybody).lower()}
        if before is not None:
            query["before"] = before
        return await self.read("/v1/sessions", SessionList, query=query)

    async def schedule(
        self,
        key: str,
        text: str,
        *,
        schedule_id: str | None = None,
        **spec: Unpack[ScheduleKeywords],
    ) -> RemoteSchedule:
        """Create a schedule that sends messages to the session `key`. See `SessionAPI.schedule`."""
        return await self.session(key).schedule(text, schedule_id=schedule_id, **spec)

    def find_schedule(self, schedule_id: str) -> RemoteSchedule:
        """Return a handle to a schedule of the client's principal, without sending a request.

        Raises `InvalidKey` if `schedule_id` is empty or cannot be encoded as UTF-8.
        """
        return RemoteSchedule(self, schedule_id)

    async def schedules(
        self, *, session: str | None = None, limit: int = 100, everybody: bool = False
    ) -> list[ScheduleView]:
        """Return the principal's schedules in order of creation.

        Parameters:
            session: return only schedules of the session with this key; None returns the schedules of all sessions.
            limit: maximum number of schedules to return.
            everybody: whether to include the schedules of all principals; requires an admin key.
        """
        query = {"limit": str(limit), "all": str(everybody).lower()}
        if session is not None:
            query["session"] = session
        return (await self.read("/v1/schedules", ScheduleList, query=query)).schedules

    async def grants(self, *, session: str | None = None) -> list[Grant]:
        """Return the principal's grants, oldest first.

        Parameters:
            session: return only grants that hold in the session with this key; None returns all grants.
        """
        query = {} if session is None else {"session": session}
        return (await self.read("/v1/grants", GrantList, query=query)).grants

    async def revoke_grant(self, grant_id: str) -> Grant:
        """Revoke a grant, and end the programs that run with its access. Raises `UnknownGrant`."""
        return decode(await self.request("DELETE", f"/v1/grants/{segment(grant_id)}"), Grant)

    async def tree(self, *, everybody: bool = False) -> TreeNode:
        """Return the tree of the principal's live tasks, threads and processes.

        Parameters:
            everybody: whether to include the work of all principals; requires an admin key.
        """
        return await self.read("/v1/tree", TreeNode, query={"all": str(everybody).lower()})
