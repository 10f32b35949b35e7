"""The caller of a request, with its principal and the permissions of its credential."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Caller", "Role"]

Role = Literal["user", "admin", "trusted"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    Parameters:
        principal: principal for which the request acts, and whose sessions it can access.
        role: role of the credential.
        credential: id of the API key, ``jwt`` for a signed token, or ``local`` if the server has no keys.
        owner: principal to which the credential belongs, if the caller acts for another principal; otherwise None.
        expires_at: expiry time of the credential in seconds since the epoch; None if the credential does not expire.
        agents: names of the agents that the caller may use; if None, the server's default for the role applies.
    """

    principal: str
    role: Role
    credential: str = "local"
    owner: str | None = None
    expires_at: float | None = None
    agents: frozenset[str] | None = None
