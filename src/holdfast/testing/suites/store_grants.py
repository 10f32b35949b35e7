"""Checks of the conformance suite for grants: access that a person gave to a session or a principal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.errors import AlreadyAnswered, CallMismatch, InvalidRequest, LimitExceeded, UnknownGrant
from holdfast.protocol.call_hash import hash_call
from holdfast.protocol.messages import Access, Answer, Grant, GrantScope, Question
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Claim
from holdfast.storage.transactions.grants import GRANTS_LIMIT
from holdfast.testing.suites.store_driver import Check, Driver, MakeStore, opened, refused

__all__ = ["GRANT_CHECKS"]

_CHECKS: list[Check] = []
_ACCESS = Access(write=("/w/report.md",), hosts=("api.example.org:443",))


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def _question(question_id: str, *, access: Access = _ACCESS) -> Question:
    return Question(
        question_id=question_id,
        kind="approval",
        tool="terminal",
        arguments={"command": "x"},
        asked_at=30.0,
        access=access,
    )


def _approval(question: Question, scope: GrantScope, **fields: Any) -> Answer:
    given = Answer(
        question_id=question.question_id,
        decision="approved",
        by="ann",
        at=40.0,
        via="k_1",
        call_hash=hash_call(question),
        scope=scope,
        grant_id="" if scope == "call" else f"g_{question.question_id}",
    )
    return msgspec.structs.replace(given, **fields)


async def _granted(on: Driver, question_id: str, scope: GrantScope, *, key: str = "k", **more: Any) -> Claim:
    """Start a run in the session `key` and grant it access with `scope`; return the run's claim."""
    claim = await on.start(key=key, **more)
    question = _question(question_id)
    await on.store.suspend(claim.lease, question)
    await on.store.answer(more.get("principal", "p"), key, _approval(question, scope))
    return claim


async def _ids(on: Driver, principal: str = "p", session: int | None = None) -> list[str]:
    return [grant.grant_id for grant in await on.store.grants(principal, session=session)]


@_check
async def a_grant_holds_within_its_scope_and_survives_a_restart(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        one = await _granted(on, "a1", "session", key="one")
        two = await _granted(on, "a2", "principal", key="two")
        await _granted(on, "a3", "call", key="three")
        await _granted(on, "a4", "principal", key="one", principal="other")
        assert await _ids(on, session=one.lease.session) == ["g_a1", "g_a2"]
        assert await _ids(on, session=two.lease.session) == ["g_a2"]
    async with opened(make_store, at=50.0) as on:
        assert await _ids(on) == ["g_a1", "g_a2"]
        assert await _ids(on, session=two.lease.session) == ["g_a2"]
        assert await _ids(on, "other", one.lease.session) == ["g_a4"], "sessions of others share no grant"
        [grant, _] = await on.store.grants("p")
        assert grant == Grant(
            grant_id="g_a1",
            principal="p",
            scope="session",
            session="one",
            access=_ACCESS,
            at=40.0,
            by="ann",
            via="k_1",
            question_id="a1",
            call_hash=hash_call(_question("a1")),
            tool="terminal",
        )


@_check
async def a_revoked_grant_is_gone_and_only_its_principal_revokes_it(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await _granted(on, "a1", "session")
        before = await on.store.stored_bytes("p")
        await refused(on.store.revoke_grant("other", "g_a1"), UnknownGrant)
        assert (await on.store.revoke_grant("p", "g_a1")).grant_id == "g_a1"
        assert await _ids(on, session=claim.lease.session) == []
        assert await on.store.stored_bytes("p") < before, "its bytes do not count any more"
        await refused(on.store.revoke_grant("p", "g_a1"), UnknownGrant)


@_check
async def a_grant_of_a_session_ends_with_the_session_not_with_its_key(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await _granted(on, "a1", "session")
        await on.commit(claim)
        claim = await _granted(on, "a2", "principal")
        await on.commit(claim)
        await on.store.delete_session("p", "k", at=60.0, cause=Cause(kind="stop"))
        assert await _ids(on) == ["g_a2"]
        await on.store.prune(events_before=70.0, tombstones_before=70.0, idempotency_before=70.0)
        again = await on.start(at=80.0)
        assert again.lease.session != claim.lease.session
        assert await _ids(on, session=again.lease.session) == ["g_a2"]


@_check
async def an_answer_grants_nothing_that_was_not_asked(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        plain, wide = _question("a1", access=Access()), _question("a2")
        await on.store.suspend(claim.lease, plain)
        await on.store.suspend(claim.lease, wide)
        await refused(on.store.answer("p", "k", _approval(plain, "session")), InvalidRequest)
        await refused(on.store.answer("p", "k", _approval(wide, "session", decision="denied")), InvalidRequest)
        await refused(on.store.answer("p", "k", _approval(wide, "session", grant_id="")), InvalidRequest)
        wider = msgspec.structs.replace(wide, access=Access(write=("/w",)))
        await refused(on.store.answer("p", "k", _approval(wider, "session")), CallMismatch)
        assert len(await on.store.questions(claim.lease.session)) == 2, "both are still open"
        assert await _ids(on) == []


@_check
async def a_repeated_answer_grants_once_and_another_scope_is_another_answer(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await _granted(on, "a1", "session")
        question = _question("a1")
        again = await on.store.answer("p", "k", _approval(question, "session", grant_id="g_other"))
        assert again.answer.grant_id == "g_a1"
        assert await _ids(on) == ["g_a1"]
        await refused(on.store.answer("p", "k", _approval(question, "principal")), AlreadyAnswered)
        await on.store.revoke_grant("p", "g_a1")
        await on.store.answer("p", "k", _approval(question, "session"))
        assert await _ids(on) == [], "repeating the answer does not bring a revoked grant back"
        await on.commit(claim)


@_check
async def a_principal_has_a_bounded_number_of_grants(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        for number in range(GRANTS_LIMIT):
            question = _question(f"a{number}")
            await on.store.suspend(claim.lease, question)
            await on.store.answer("p", "k", _approval(question, "session"))
        last = _question("last")
        await on.store.suspend(claim.lease, last)
        await refused(on.store.answer("p", "k", _approval(last, "principal")), LimitExceeded)
        await on.store.answer("p", "k", _approval(last, "call"))
        assert len(await _ids(on)) == GRANTS_LIMIT


GRANT_CHECKS: Sequence[Check] = tuple(_CHECKS)
"""Every check of this module, in order."""
