"""Read a host's state: in part while the host is under load, and completely once the host is quiescent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from holdfast.clock import system_clock
from holdfast.errors import RateLimited, UnknownSession
from holdfast.proof.history import LogRead, SessionRead, SettlementRead, TranscriptRead
from holdfast.proof.limits import Limits
from holdfast.proof.storm.access import HostAccess
from holdfast.proof.storm.past_events import past_events
from holdfast.proof.storm.recorder import StormRecorder
from holdfast.proof.storm.session import StormSession

__all__ = ["SnapshotReader"]

_STANDSTILL_S = 20.0
_POLL_S = 0.05
_AT_ONCE = 16


class SnapshotReader:
    """Reads a host, and records the results in the storm's history."""

    def __init__(self, access: HostAccess, recorder: StormRecorder, limits: Limits) -> None:
        self._access = access
        self._recorder = recorder
        self._limits = limits

    async def read(self, session: StormSession, *, final: bool = False) -> int:
        """Read a session, its transcript and, if `final` is set, its runs; return the seq of the newest event.

        Raises `HoldfastError` if a read fails.
        """
        handle = self._access.session(session.principal, session.key)
        began_at = system_clock.monotonic()
        view = await handle.info()
        runs = await handle.runs() if final else []
        self._recorder.note(SessionRead, began_at=began_at, view=view, runs=tuple(runs), final=final)
        began_at = system_clock.monotonic()
        entries = await handle.transcript()
        self._recorder.note(
            TranscriptRead,
            began_at=began_at,
            principal=session.principal,
            session=session.key,
            entries=tuple(entries),
        )
        return view.seq

    async def settlement(self, session: StormSession, message_id: str) -> None:
        """Read a message's settlement, and record it. Raises `HoldfastError` if the read fails."""
        handle = self._access.session(session.principal, session.key)
        began_at = system_clock.monotonic()
        settlement = await handle.message(message_id)
        self._recorder.note(
            SettlementRead,
            began_at=began_at,
            principal=session.principal,
            session=session.key,
            settlement=settlement,
        )

    async def rest(self, sessions: Sequence[StormSession]) -> None:
        """Wait until every session is quiescent, or return early if one is stuck, which the final read then shows."""
        for session in sessions:
            seq, deadline = -1, 0.0
            while session.exists:
                view = await self._access.session(session.principal, session.key).info()
                if view.run_id is None and not view.waiting:
                    break
                if view.seq != seq:
                    seq, deadline = view.seq, system_clock.monotonic() + _STANDSTILL_S
                elif system_clock.monotonic() > deadline:
                    return
                await asyncio.sleep(_POLL_S)

    async def read_back(self, sessions: Sequence[StormSession]) -> None:
        """Read all sessions and their logs for the last time. Call this after `rest`."""
        for begin in range(0, len(sessions), _AT_ONCE):
            await asyncio.gather(
                *(self._patiently(self._read_back, session) for session in sessions[begin : begin + _AT_ONCE])
            )

    async def _patiently(self, read: Callable[[StormSession], Awaitable[None]], session: StormSession) -> None:
        """Read a session, again as soon as the server allows it if there were too many reads in a second."""
        while True:
            try:
                return await read(session)
            except RateLimited as limited:
                await asyncio.sleep(limited.retry_after_s or _POLL_S)

    async def read_logs(self, sessions: Sequence[StormSession]) -> None:
        """Read the logs of all sessions up to now, while the host is under load.

        Raises `HoldfastError` or `TimeoutError` if a read fails.
        """
        for begin in range(0, len(sessions), _AT_ONCE):
            await asyncio.gather(
                *(self._patiently(self._read_log_now, session) for session in sessions[begin : begin + _AT_ONCE])
            )

    async def _read_log_now(self, session: StormSession) -> None:
        if session.exists:
            view = await self._access.session(session.principal, session.key).info()
            await self._read_log(session, view.seq)

    async def _read_back(self, session: StormSession) -> None:
        try:
            newest = await self.read(session, final=True)
        except UnknownSession:
            return
        for reader in session.readers:
            reader.number = session.number or reader.number
            await reader.catch_up(newest, self._limits)
        await self._read_log(session, newest)
        for message in list(session.sent)[-10:]:
            if message.message_id is not None:
                await self.settlement(session, message.message_id)

    async def _read_log(self, session: StormSession, newest: int) -> None:
        handle = self._access.session(session.principal, session.key)
        view = await handle.info()
        async with asyncio.timeout(self._limits.answer_s):
            events = [event async for event in past_events(handle, newest)]
        self._recorder.note(
            LogRead, principal=session.principal, session=session.key, number=view.number, events=tuple(events)
        )
