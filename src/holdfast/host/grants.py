"""The grants of a host's principals: list them, revoke them, and notify running calls that they were revoked.

Invariants
- The store decides which grants hold. This module keeps none of them.
- A revocation is durable before running calls are notified, and every call that watches on this host is notified: at
  once by this host's revocations, at the next poll by those of other hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import InvalidRequest
from holdfast.protocol.messages import Grant, check_text

if TYPE_CHECKING:
    from holdfast.host.context import HostContext
    from holdfast.host.session_directory import SessionDirectory

__all__ = ["Grants"]

OnRevoked = Callable[[str], None]
"""A callback that is called with the id of a revoked grant."""


class Grants:
    """Lists and revokes grants. Use it on the host's loop only."""

    __slots__ = ("_context", "_directory", "_read", "_watching")

    def __init__(self, context: HostContext, directory: SessionDirectory) -> None:
        self._context = context
        self._directory = directory
        self._watching: dict[str, dict[object, OnRevoked]] = {}
        self._read: dict[str, set[str]] = {}
        """Ids of the grants that calls have read while they watch, by principal. Only for a store with other hosts."""

    async def of_principal(self, principal: str) -> list[Grant]:
        """Return all grants of a principal, those of its sessions included, oldest first."""
        return list(await self._context.store.grants(principal))

    async def of_session(self, principal: str, key: str) -> list[Grant]:
        """Return the grants that hold in a session. Raises `UnknownSession`, `SessionDeleted`."""
        number, _ = await self._directory.find(principal, key)
        return list(await self._context.store.grants(principal, session=number))

    async def for_call(self, principal: str, session: int) -> Sequence[Grant]:
        """Return the grants that hold in the session with that number, for a call that watches."""
        found = await self._context.store.grants(principal, session=session)
        if self._context.store.cluster is not None and principal in self._watching:
            self._read.setdefault(principal, set()).update(grant.grant_id for grant in found)
        return found

    async def poll(self) -> None:
        """Notify the calls that watch of grants that other hosts have revoked. Raises `StorageError`."""
        for principal in list(self._read):
            read = frozenset(self._read.get(principal, ()))  # before the read: what is granted meanwhile is not missing
            held = {grant.grant_id for grant in await self._context.store.grants(principal)}
            for grant_id in read - held:
                self._read.get(principal, set()).discard(grant_id)
                self._tell(principal, grant_id)

    def _tell(self, principal: str, grant_id: str) -> None:
        for on_revoked in tuple(self._watching.get(principal, {}).values()):
            on_revoked(grant_id)

    async def revoke(self, principal: str, grant_id: str) -> Grant:
        """Revoke a grant of a principal, and end the calls that use it. Raises `UnknownGrant`."""
        if not isinstance(grant_id, str):
            raise InvalidRequest("the id of a grant must be text (str)")
        check_text(grant_id)
        done = self._context.store.revoke_grant(principal, grant_id)

        def tell(done: asyncio.Future[Grant]) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            self._tell(principal, grant_id)

        done.add_done_callback(tell, context=self._context.variables)
        return await asyncio.shield(done)

    def watch(self, principal: str, on_revoked: OnRevoked) -> Callable[[], None]:
        """Call `on_revoked` for each grant of the principal that is revoked from now on; return a function to stop."""
        mark = object()
        self._watching.setdefault(principal, {})[mark] = on_revoked

        def stop() -> None:
            watching = self._watching.get(principal, {})
            watching.pop(mark, None)
            if not watching:
                self._watching.pop(principal, None)
                self._read.pop(principal, None)

        return stop
