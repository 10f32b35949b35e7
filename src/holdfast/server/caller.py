"""The caller of a request: its principal, and what its credential allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Caller", "Role"]

Role = Literal["user", "admin", "trusted"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller: the principal that owns the sessions, and what its key allows.

    Parameters:
        principal: owner of the sessions.
        role: role of the key.
        credential: the id of a key, ``jwt``, or ``local`` where no key is needed.
        owner: the principal that the credential belongs to, if it acts for another one.
        expires_at: expiry of the credential in seconds since the epoch; None: never.
        agents: agents that the caller may name; None: the server's default for the role.
    """

    principal: str
    role: Role
    credential: str = "local"
    owner: str | None = None
    expires_at: float | None = None
    agents: frozenset[str] | None = None
