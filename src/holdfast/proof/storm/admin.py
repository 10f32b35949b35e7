"""Actions of an administrator on a server: creating and revoking keys, and deleting sessions.

A storm's history does not record these actions, because a deleted session cannot be read back. `settle` checks that
every acknowledged change is still in effect.
"""

from __future__ import annotations

import msgspec

from holdfast import ids
from holdfast.client import Client
from holdfast.errors import HoldfastError, NotFound, SessionDeleted
from holdfast.proof.storm.ack_audit import GONE, AckAudit

__all__ = ["AdminLoad"]


class _Key(msgspec.Struct):
    key_id: str
    revoked_at: float | None


class _Made(msgspec.Struct):
    key: _Key


class _Keys(msgspec.Struct):
    keys: list[_Key]


class AdminLoad:
    """The actions of one administrator. Use this class on one event loop only.

    Parameters:
        client: the administrator's client.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._keys = AckAudit("key")
        self._sessions = AckAudit("session")
        self.checked = 0

    async def make_a_key(self) -> None:
        """Create a key, and revoke it."""
        body = {"principal": "visitor", "role": "user", "label": "made by a storm"}
        answer = await self._client.request("POST", "/v1/keys", body=body)
        key_id = msgspec.json.decode(answer.content, type=_Made).key.key_id
        self._keys.answer(key_id, "valid")
        self._keys.ask(key_id, "revoked")
        await self._client.request("DELETE", f"/v1/keys/{key_id}")
        self._keys.answer(key_id, "revoked")

    async def delete_a_session(self) -> None:
        """Create a session, and delete it."""
        session = self._client.session(ids.message_id())
        self._sessions.ask(session.key, "there")
        await session.send("{}", agent=None)
        self._sessions.answer(session.key, "there")
        self._sessions.ask(session.key, GONE)
        await session.delete()
        self._sessions.answer(session.key, GONE)

    async def settle(self) -> list[str]:
        """Return a description of each key and session whose state contradicts an acknowledgement."""
        try:
            keys = (await self._client.read("/v1/keys", _Keys)).keys
            there = [key for key in self._sessions.names if await self._is_there(key)]
        except HoldfastError as error:
            return [f"keys and sessions cannot be looked at: {error.message}"]
        self.checked += len(self._keys.names) + len(self._sessions.names)
        states = {key.key_id: "valid" if key.revoked_at is None else "revoked" for key in keys}
        return [*self._keys.wrong(states), *self._sessions.wrong(dict.fromkeys(there, "there"))]

    async def _is_there(self, key: str) -> bool:
        try:
            await self._client.session(key).info()
        except (NotFound, SessionDeleted):
            return False
        return True
