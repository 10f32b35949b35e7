"""Simulated people, who steer agents, answer questions, grant access, attach files, and undo runs.

A storm's history does not record the sessions of these people, because an undo removes transcript entries that may have
been read before. Instead, `People.settle` waits until the sessions are quiescent, and checks them.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from holdfast import ids
from holdfast.client import Client
from holdfast.errors import HoldfastError, NotFound
from holdfast.proof.storm.agent import REPLAYABLE
from holdfast.proof.storm.past_events import past_events
from holdfast.proof.storm.plan import Piece, Plan, encode_plan
from holdfast.proof.storm.quiescence import quiescent
from holdfast.protocol.events import RunStarted
from holdfast.protocol.messages import Policy, SessionView
from holdfast.protocol.session_api import SessionAPI

__all__ = ["People"]

_SETTLED = frozenset(("completed", "failed", "interrupted", "superseded", "withdrawn"))
_POLL_S = 0.05
_LISTEN_S = 0.3
_SESSIONS = 6


class People:
    """One simulated person with several sessions. Use this class on one event loop only.

    Parameters:
        client: the person's client.
        chance: source of all random choices.
    """

    def __init__(self, client: Client, chance: random.Random) -> None:
        self._client = client
        self._chance = chance
        self._keys = [f"person-{number}-{ids.message_id()[-6:]}" for number in range(_SESSIONS)]
        self._accepted: dict[tuple[str, str], str] = {}
        self._answered: set[str] = set()
        self._asked_again: set[str] = set()
        self._taken_back: list[tuple[str, str]] = []
        self._attached: dict[str, bytes] = {}
        self.checked = 0
        self.runs: set[str] = set()
        """The ids of the sessions' runs, as far as `settle` found them."""

    def _session(self) -> SessionAPI:
        return self._client.session(self._chance.choice(self._keys))

    async def _send(self, session: SessionAPI, *pieces: Piece, policy: Policy = "queue") -> None:
        name = ids.message_id()
        plan = Plan(name=name, pieces=pieces, span_s=_LISTEN_S)
        receipt = await session.send(encode_plan(plan), policy=policy, idempotency_key=name, agent=REPLAYABLE)
        self._accepted[session.key, receipt.message_id] = name

    async def steer(self) -> None:
        """Wait until a random session is quiescent; then start a run in that session and steer the run twice."""
        key = self._chance.choice(self._keys)
        await self._unrest(key)
        session = self._client.session(key)
        await self._send(session, "listen", "emit")
        for _ in range(2):
            await asyncio.sleep(_LISTEN_S / 4)
            await self._send(session, "emit", policy="steer")

    async def ask(self) -> None:
        """Send a message that makes the agent ask a question, and answer the session's open questions."""
        session = self._session()
        await self._send(session, "call", "ask", "emit")
        await asyncio.sleep(_POLL_S)
        await self._answer(session)

    async def _answer(self, session: SessionAPI) -> None:
        for question in await session.questions():
            if question.question_id in self._answered:
                self._asked_again.add(question.question_id)
            with suppress(NotFound):  # its run ended meanwhile
                if question.kind == "approval":
                    await session.approve(question, scope="session")
                else:
                    await session.answer(question.question_id, "as you like")
                self._answered.add(question.question_id)

    async def grant(self) -> None:
        """Send a message whose run asks for access, grant the access to the session, and revoke it."""
        session = self._session()
        await self._send(session, "access", "emit")
        await asyncio.sleep(_POLL_S)
        await self._answer(session)
        for grant in await session.grants():
            await self._client.revoke_grant(grant.grant_id)

    async def edit(self) -> None:
        """Send a message, and then undo the session's last run."""
        session = self._session()
        await self._send(session, "emit")
        await asyncio.sleep(_LISTEN_S)
        removed = await session.undo()
        self._taken_back += [(session.key, entry.run_id) for entry in removed if entry.run_id is not None]

    async def attach(self, size_bytes: int = 64) -> None:
        """Upload a file as an attachment to one of the sessions."""
        body = self._chance.randbytes(size_bytes)
        attachment = await self._session().attach(body, media_type="text/plain", name="note.txt")
        self._attached[attachment.digest] = body

    async def settle(self) -> list[str]:
        """Answer the open questions, wait until all sessions are quiescent, and return the problems."""
        wrong = [problem for problem in await asyncio.gather(*map(self._unrest, self._keys)) if problem is not None]
        for (key, message_id), name in self._accepted.items():
            self.checked += 1
            try:
                state = (await self._client.session(key).message(message_id)).state
            except HoldfastError as error:
                wrong.append(f"message {message_id} of session {key} was accepted, and now: {error.message}")
                continue
            if state not in _SETTLED:
                wrong.append(f"message {message_id} ({name}) of session {key} is {state} forever")
        self.checked += len(self._answered)
        wrong += [f"question {question_id} was answered, and is open again" for question_id in self._asked_again]
        await self._note_runs()
        return [*wrong, *await self._come_back(), *await self._lost_files()]

    async def _note_runs(self) -> None:
        for key in {key for key, _ in self._accepted}:
            with suppress(HoldfastError):  # `settle` reports a session that cannot be read
                async for event in past_events(self._client.session(key)):
                    if isinstance(event, RunStarted):
                        self.runs.add(event.run_id)

    async def _come_back(self) -> list[str]:
        """Return a description of each undone run whose entries are still in a transcript."""
        there: set[tuple[str, str | None]] = set()
        for key in {key for key, _ in self._taken_back}:
            try:
                there |= {(key, entry.run_id) for entry in await self._client.session(key).transcript()}
            except HoldfastError as error:
                return [f"the transcript of session {key} cannot be read: {error.message}"]
        self.checked += len(self._taken_back)
        return [f"run {run} was taken back, and stands in session {key}" for key, run in {*self._taken_back} & there]

    async def _lost_files(self) -> list[str]:
        """Return a description of each uploaded file that is missing or changed."""
        wrong = []
        for digest, body in self._attached.items():
            self.checked += 1
            try:
                _, stored = await self._session().attachment(digest)
            except HoldfastError as error:
                wrong.append(f"file {digest} was uploaded, and now: {error.message}")
                continue
            if stored != body:
                wrong.append(f"file {digest} is not what was uploaded")
        return wrong

    async def _unrest(self, key: str) -> str | None:
        """Answer a session's questions until the session is quiescent; if it gets stuck, describe the problem."""
        session = self._client.session(key)

        async def look() -> SessionView:
            self.checked += 1
            await self._answer(session)
            return await session.info()

        try:
            return await quiescent(key, look)
        except NotFound:  # nothing was ever sent to it
            return None
