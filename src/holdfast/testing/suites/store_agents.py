"""Checks of the conformance suite for sessions whose agent or files a host does not have, and for handed-over runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from holdfast.errors import SessionAgentMissing, StaleFence, UnknownAgent
from holdfast.storage.port import Claim, Parked, SendResult
from holdfast.testing.suites.store_driver import Check, Driver, MakeStore, opened, refused

__all__ = ["AGENT_CHECKS"]

_CHECKS: list[Check] = []
_SERVED: Final = frozenset({"demo", "other"})


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


async def _idle_session_of(on: Driver, agent: str) -> int:
    """Create a session of the agent, without an active run."""
    claim = await on.start(agent=agent)
    await on.commit(claim)
    return claim.lease.session


async def _send(on: Driver, content: str = "next", **more: Any) -> SendResult:
    return await on.send(content, at=30.0, served=_SERVED, **more)


@_check
async def a_run_that_is_parked_at_work_has_a_further_attempt(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        for at in (35.0, 36.0):  # repeated: the same answer
            assert await on.store.park(claim.lease, at=at, restarts=True) == Parked(ready=True)
        again = await on.store.claim(claim.lease.session, run_id="r_new", at=37.0)
        assert isinstance(again, Claim)
        assert (again.lease.run_id, again.attempt, again.resumed) == (claim.lease.run_id, 2, True)


@_check
async def a_run_that_its_rescuer_hands_over_is_marked_so(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        for key, handed_over in (("one", True), ("two", False)):
            claim = await on.start(key=key)
            for at in (35.0, 36.0):  # repeated: the same answer
                parked = await on.store.park(claim.lease, at=at, handed_over=handed_over)
                assert parked == Parked(ready=True)
            again = await on.store.claim(claim.lease.session, run_id=f"r_{key}", at=37.0)
            assert isinstance(again, Claim)
            assert (again.handed_over, again.attempt) == (handed_over, 1)


@_check
async def only_the_run_that_holds_a_session_may_tie_it_to_files(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start()
        before = await on.log(claim.lease.session)
        assert (await on.store.use_workspace(claim.lease)).events == ()
        assert await on.log(claim.lease.session) == before
        await on.commit(claim)
        await refused(on.store.use_workspace(claim.lease), StaleFence)
        assert (await _send(on)).disposition == "started", "this node has the files, or declares no pool"


@_check
async def a_session_without_its_agent_is_refused_and_stays_as_it_was(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        session = await _idle_session_of(on, "gone")
        before = await on.log(session)
        refusal = await refused(_send(on, idempotency_key="i"), SessionAgentMissing)
        assert "'gone'" in refusal.message
        assert "demo, other" in refusal.hint
        allowed = frozenset({"gone", "other"})
        hidden = await refused(_send(on, agents=allowed), SessionAgentMissing)
        assert "demo" not in hidden.hint, "a sender learns only of agents that it may use"
        assert await on.log(session) == before
        found = await on.store.find_session("p", "k")
        assert found is not None
        assert (found[1].agent, found[1].waiting, found[1].run_id) == ("gone", 0, None)
        assert (await _send(on, agent="other", idempotency_key="i")).disposition == "started", "the key is still free"


@_check
async def a_duplicate_for_a_missing_agent_is_still_a_duplicate(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        claim = await on.start(agent="gone", idempotency_key="i", message_id="m1")
        await on.commit(claim)
        again = await _send(on, "hello", idempotency_key="i")
        assert (again.disposition, again.message_id) == ("duplicate", "m1")


@_check
async def the_default_agent_takes_over_the_sessions_of_the_agents_named(make_store: MakeStore) -> None:
    async with opened(make_store) as on:
        await _idle_session_of(on, "gone")
        allowed = frozenset({"other"})
        await refused(_send(on, takes_over=frozenset({"gone"}), agents=allowed), UnknownAgent)
        await refused(_send(on, takes_over=frozenset({"another"})), SessionAgentMissing)
        sent = await _send(on, takes_over=frozenset({"gone"}))
        assert sent.claim is not None
        assert sent.claim.agent == "demo"
        found = await on.store.find_session("p", "k")
        assert found is not None
        assert found[1].agent == "demo"


AGENT_CHECKS: Sequence[Check] = tuple(_CHECKS)
