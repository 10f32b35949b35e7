"""Implementation of `holdfast.protocol.session_api.ScheduleAPI` over HTTP."""

from __future__ import annotations

from holdfast.client.transport import Transport
from holdfast.client.wire import decode, segment
from holdfast.errors import InvalidKey
from holdfast.protocol.http import PauseBody
from holdfast.protocol.messages import Receipt
from holdfast.protocol.schedules import ScheduleView

__all__ = ["RemoteSchedule"]


class RemoteSchedule:
    """Handle to a schedule on a server.

    Returned by `RemoteSession.schedule`, `Client.schedule` and `Client.find_schedule`.
    """

    __slots__ = ("_path", "_transport", "schedule_id")

    def __init__(self, transport: Transport, schedule_id: str) -> None:
        self._transport = transport
        if not schedule_id:
            raise InvalidKey("'' is not a schedule id")
        self._path = f"/v1/schedules/{segment(schedule_id)}"
        self.schedule_id = schedule_id

    def __repr__(self) -> str:
        return f"<RemoteSchedule {self.schedule_id!r} at {self._transport.url}>"

    async def info(self) -> ScheduleView:
        """See `ScheduleAPI.info`."""
        return await self._transport.read(self._path, ScheduleView)

    async def pause(self) -> ScheduleView:
        """See `ScheduleAPI.pause`."""
        return await self._pause(True)

    async def resume(self) -> ScheduleView:
        """See `ScheduleAPI.resume`."""
        return await self._pause(False)

    async def _pause(self, paused: bool) -> ScheduleView:
        response = await self._transport.request("PATCH", self._path, body=PauseBody(paused=paused), repeatable=True)
        return decode(response, ScheduleView)

    async def run_now(self) -> Receipt:
        """See `ScheduleAPI.run_now`. Not retried after a lost response, because a retry could send a second message."""
        return decode(await self._transport.request("POST", f"{self._path}/run"), Receipt)

    async def delete(self) -> ScheduleView:
        """See `ScheduleAPI.delete`."""
        return decode(await self._transport.request("DELETE", self._path), ScheduleView)
