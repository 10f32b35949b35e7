"""Stores with one fault each in the access that people grant."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from holdfast.errors import AlreadyAnswered, LimitExceeded
from holdfast.protocol.messages import Answer, Grant
from holdfast.protocol.stopping import Cause
from holdfast.storage import MemoryStore
from holdfast.storage.port import Answered, Stopped
from tests.testing.suites.store_faults import answered, changed, found_by


@found_by("a_grant_holds_within_its_scope_and_survives_a_restart")
class GrantsToEverySession(MemoryStore):
    async def grants(self, principal: str, *, session: int | None = None) -> Sequence[Grant]:
        return await super().grants(principal)


@found_by("a_revoked_grant_is_gone_and_only_its_principal_revokes_it")
class RevokesNothing(MemoryStore):
    def revoke_grant(self, principal: str, grant_id: str) -> asyncio.Future[Grant]:
        grant = self.backend.tables.grants.find(principal, grant_id)
        return super().revoke_grant(principal, grant_id) if grant is None else answered(grant)


@found_by("a_grant_of_a_session_ends_with_the_session_not_with_its_key")
class KeepsGrantsOfTheDeleted(MemoryStore):
    def delete_session(self, principal: str, key: str, *, at: float, cause: Cause) -> asyncio.Future[Stopped]:
        row = self.backend.tables.find(principal, key)
        table = self.backend.tables.grants
        kept = [] if row is None else [one for one in table.of(principal, row.session) if one.scope == "session"]
        done = super().delete_session(principal, key, at=at, cause=cause)
        for grant in kept:
            assert row is not None
            table.add(row.session, grant)
        return done


@found_by("an_answer_grants_nothing_that_was_not_asked")
class GrantsNothingInSilence(MemoryStore):
    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        if answer.decision != "approved":
            answer = changed(answer, scope="call", grant_id="")
        return super().answer(principal, key, answer)


@found_by("a_repeated_answer_grants_once_and_another_scope_is_another_answer")
class TakesAnotherScopeForTheSame(MemoryStore):
    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        done = super().answer(principal, key, answer)
        if not isinstance(done.exception(), AlreadyAnswered):
            return done
        scope = "session" if answer.scope == "principal" else "principal"
        return super().answer(principal, key, changed(answer, scope=scope))


@found_by("a_principal_has_a_bounded_number_of_grants")
class GrantsForTheCallInstead(MemoryStore):
    def answer(self, principal: str, key: str, answer: Answer) -> asyncio.Future[Answered]:
        done = super().answer(principal, key, answer)
        if not isinstance(done.exception(), LimitExceeded):
            return done
        return super().answer(principal, key, changed(answer, scope="call", grant_id=""))
