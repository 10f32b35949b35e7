"""What people do to sessions: they steer, are asked and answer, attach files, and edit histories.

These sessions stand outside a storm's history: an edit changes what was read before. They are looked at here instead:
`settle` brings them to rest and says what is wrong with them.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from holdfast import ids
from holdfast.client import Client
from holdfast.errors import HoldfastError, NotFound
from holdfast.protocol.interface import SessionLike
from holdfast.protocol.messages import Policy, SessionView
from holdfast.testing.storm.agent import REPLAYABLE
from holdfast.testing.storm.plan import Piece, Plan, encode_plan
from holdfast.testing.storm.resting import standstill

__all__ = ["People"]

_SETTLED = frozenset(("completed", "failed", "interrupted", "superseded", "withdrawn"))
_POLL_S = 0.05
_LISTEN_S = 0.3
_SESSIONS = 6


class People:
    """One person with some sessions. Of one loop.

    Parameters:
        client: the person's.
        chance: of all choices.
    """

    def __init__(self, client: Client, chance: random.Random) -> None:
        self._client = client
        self._chance = chance
        self._keys = [f"person-{number}-{ids.message_id()[-6:]}" for number in range(_SESSIONS)]
        self._accepted: dict[tuple[str, str], str] = {}
        self.checked = 0

    def _session(self) -> SessionLike:
        return self._client.session(self._chance.choice(self._keys))

    async def _send(self, session: SessionLike, *pieces: Piece, policy: Policy = "queue") -> None:
        name = ids.message_id()
        plan = Plan(name=name, pieces=pieces, span_s=_LISTEN_S)
        receipt = await session.send(encode_plan(plan), policy=policy, idempotency_key=name, agent=REPLAYABLE)
        self._accepted[session.key, receipt.message_id] = name

    async def steer(self) -> None:
        """Talk to an agent that listens while it works. What waits in its session, or for an answer, comes first."""
        key = self._chance.choice(self._keys)
        await self._unrest(key)
        session = self._client.session(key)
        await self._send(session, "listen", "say")
        for _ in range(2):
            await asyncio.sleep(_LISTEN_S / 4)
            await self._send(session, "say", policy="steer")

    async def ask(self) -> None:
        """Let an agent ask, and answer what is open."""
        session = self._session()
        await self._send(session, "call", "ask", "say")
        await asyncio.sleep(_POLL_S)
        await self._answer(session)

    async def _answer(self, session: SessionLike) -> None:
        for question in await session.questions():
            with suppress(NotFound):  # its run ended meanwhile
                await session.answer(question.question_id, "as you like")

    async def edit(self) -> None:
        """Take back the last answer, or sum up what was said."""
        session = self._session()
        await self._send(session, "say")
        await asyncio.sleep(_LISTEN_S)
        await session.undo()

    async def attach(self) -> None:
        """Upload a file."""
        await self._session().attach(self._chance.randbytes(64), media_type="text/plain", name="note.txt")

    async def settle(self) -> list[str]:
        """Answer what is open, wait until all is at rest, and return what is not as it must be."""
        wrong = [problem for problem in await asyncio.gather(*map(self._unrest, self._keys)) if problem is not None]
        for (key, message_id), name in self._accepted.items():
            self.checked += 1
            try:
                state = (await self._client.session(key).message(message_id)).state
            except HoldfastError as error:
                wrong.append(f"message {message_id} of session {key} was accepted, and now: {error.message}")
                continue
            if state not in _SETTLED:
                wrong.append(f"message {message_id} ({name}) of session {key} is {state} for ever")
        return wrong

    async def _unrest(self, key: str) -> str | None:
        """Answer what a session asks until it is at rest; what is wrong if it does not come to rest."""
        session = self._client.session(key)

        async def look() -> SessionView:
            self.checked += 1
            await self._answer(session)
            return await session.info()

        try:
            return await standstill(key, look)
        except NotFound:  # nothing was ever sent to it
            return None
