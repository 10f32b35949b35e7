"""Schedules of a storm: some tick continuously; others are created, paused, resumed and deleted.

A storm's history does not record schedules, so `ScheduleLoad.settle` checks them. A ticking schedule's session gets
messages from this schedule only, so the session must have accepted exactly one message per tick.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from holdfast import ids
from holdfast.client import Client
from holdfast.errors import HoldfastError, NotFound
from holdfast.proof.storm.ack_audit import GONE, AckAudit
from holdfast.proof.storm.agent import REPLAYABLE
from holdfast.proof.storm.past_events import past_events
from holdfast.proof.storm.plan import Plan, encode_plan
from holdfast.proof.storm.quiescence import quiescent
from holdfast.protocol.events import MessageAccepted, RunStarted
from holdfast.protocol.messages import SessionView

__all__ = ["ScheduleLoad"]

_TICKING = 3
_EVERY_S = 1.0
_SEEN_S = 0.1


class ScheduleLoad:
    """The schedules of one principal. Use this class on one event loop only.

    Parameters:
        client: the principal's client.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._keys = [f"timed-{number}-{ids.schedule_id()[-6:]}" for number in range(_TICKING)]
        self._put: set[str] = set()
        self._changed = AckAudit("schedule")
        self.checked = 0
        self.runs: set[str] = set()
        """The ids of the runs that the ticks started, as far as `settle` found them."""

    async def tick(self) -> None:
        """Create all ticking schedules; schedules that already exist keep ticking."""
        for key in self._keys:
            await self._client.schedule(
                key, self._text(key), every_s=_EVERY_S, schedule_id=key, agent=REPLAYABLE, miss="burst"
            )
            self._put.add(key)

    async def change(self) -> None:
        """Create a schedule, pause it, resume it, and delete it."""
        name = ids.schedule_id()
        self._changed.ask(name, "active")
        schedule = await self._client.schedule("never", self._text(name), every_s=1e6, schedule_id=name)
        self._changed.answer(name, "active")
        for act, state in ((schedule.pause, "paused"), (schedule.resume, "active"), (schedule.delete, GONE)):
            self._changed.ask(name, state)
            await act()
            self._changed.answer(name, state)
            await asyncio.sleep(_SEEN_S)  # a kill now finds the schedule in an acknowledged state

    @staticmethod
    def _text(name: str) -> str:
        return encode_plan(Plan(name=name, pieces=("emit",), span_s=0.0))

    async def settle(self) -> list[str]:
        """Pause the ticking schedules, wait until their sessions are quiescent, and return the problems."""
        wrong = await self._unlike_answered()
        for key in self._put:
            self.checked += 1
            try:
                fired = (await self._client.find_schedule(key).pause()).fired
                problem = await quiescent(key, partial(self._look, key))
                if problem is not None:
                    wrong.append(problem)
                    continue
                accepted = await self._accepted(key)
            except HoldfastError as error:
                wrong.append(f"schedule {key}: {error.message}")
                continue
            if accepted != fired:
                wrong.append(f"schedule {key} has fired {fired} times, and its session has {accepted} messages")
        return wrong

    async def _unlike_answered(self) -> list[str]:
        """Return a description of each schedule whose state contradicts an acknowledgement."""
        states: dict[str, str] = {}
        for name in self._changed.names:
            self.checked += 1
            try:
                states[name] = (await self._client.find_schedule(name).info()).state
            except NotFound:
                continue
            except HoldfastError as error:
                states[name] = error.message
        return self._changed.wrong(states)

    async def _look(self, key: str) -> SessionView:
        try:
            return await self._client.session(key).info()
        except NotFound:  # it never fired
            return SessionView(key=key, principal="", number=0, agent="", state="idle", seq=0, waiting=0)

    async def _accepted(self, key: str) -> int:
        """Return how many messages the session has accepted; note its runs."""
        accepted = 0
        with suppress(NotFound):  # it never fired
            async for event in past_events(self._client.session(key)):
                accepted += isinstance(event, MessageAccepted)
                if isinstance(event, RunStarted):
                    self.runs.add(event.run_id)
        return accepted
