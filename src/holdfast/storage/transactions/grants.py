"""Transactions on grants: record what a person granted with an answer, and revoke it.

Invariants

- A grant is recorded in the transaction that records the answer, so neither is durable without the other.
- A grant of a session holds for the session's number, not its key, and is dropped when the session is deleted: a later
  session with the same key has no access from it.
- A principal has at most `GRANTS_LIMIT` grants.
"""

from __future__ import annotations

from typing import Final

from holdfast.errors import InvalidRequest, LimitExceeded, UnknownGrant
from holdfast.protocol.messages import Answer, Grant, Question
from holdfast.storage.backend import Tables
from holdfast.storage.rows import SessionRow

__all__ = ["GRANTS_LIMIT", "add_grant", "check_grant", "revoke_grant"]

GRANTS_LIMIT: Final = 256
"""Maximum number of grants of a principal, those of its sessions included."""


def check_grant(tables: Tables, row: SessionRow, question: Question, given: Answer) -> None:
    """Check that an answer may grant access for its scope.

    Raises:
        InvalidRequest: if the answer grants access for more than the call, but approves no access.
        LimitExceeded: if the principal has too many grants.
    """
    if given.scope == "call":
        return
    if given.decision != "approved" or not question.access:
        raise InvalidRequest(
            f"question {given.question_id!r} asks for no access that could hold for the {given.scope}",
            hint="answer it for this call only",
        )
    if not given.grant_id:
        raise InvalidRequest("the answer has no grant_id, so its grant could not be revoked")
    if tables.grants.count(row.principal) >= GRANTS_LIMIT:
        raise LimitExceeded(
            f"{row.principal} already has {GRANTS_LIMIT} grants",
            hint="revoke some with 'holdfast grants revoke' or DELETE /v1/grants/{grant_id}",
        )


def add_grant(tables: Tables, row: SessionRow, question: Question, given: Answer) -> None:
    """Record what an answer grants for more than the call. The answer was checked by `check_grant`."""
    if given.scope == "call":
        return
    grant = Grant(
        grant_id=given.grant_id,
        principal=row.principal,
        scope=given.scope,
        session=row.key,
        access=question.access,
        at=given.at,
        by=given.by,
        on_behalf_of=given.on_behalf_of,
        via=given.via,
        approval_key=given.approval_key,
        question_id=given.question_id,
        call_hash=given.call_hash,
        tool=question.tool or "",
    )
    tables.grants.add(row.session if given.scope == "session" else 0, grant)


def revoke_grant(tables: Tables, principal: str, grant_id: str) -> Grant:
    """See `Store.revoke_grant`."""
    grant = tables.grants.find(principal, grant_id)
    if grant is None:
        raise UnknownGrant(f"no such grant: {grant_id[:80]!r}")
    tables.grants.drop(grant)
    return grant
