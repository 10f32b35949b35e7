"""Checks of the conformance suite for sessions whose agent or files a host does not have, and for handed-over runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from holdfast.errors import SessionAgentMissing, StaleFence, UnknownAgent
from holdfast.storage.port import Claim, NotReady, Parked, SendResult
from holdfast.testing.suites.store_driver import Check, Driver, MakeStore, opened, refused

__all__ = ["AGENT_CHECKS"]

_CHECKS: list[Check] = []
_SERVED: Final = {"demo": "", "other": ""}


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
async def a_run_continues_only_with_the_version_of_its_agent(make_store: MakeStore) -> None:
    old, new, none = {"demo": "1", "other": ""}, {"demo": "2", "other": ""}, {"demo": "", "other": ""}
    async with opened(make_store) as on:
        for began, may_continue in ((old, [old]), (new, [new]), (none, [old, new, none])):
            claim = await on.start(key=f"{began['demo']}.", served=began)
            session = claim.lease.session
            for served in (old, new, none):
                await on.store.park(claim.lease, at=35.0, restarts=True)
                again = await on.store.claim(session, run_id="r_new", at=36.0, served=served)
                assert isinstance(again, Claim) is (served in may_continue)
                if not isinstance(again, Claim):
                    again = await on.store.claim(session, run_id="r_new", at=36.0, served=began)
                    assert isinstance(again, Claim), "a refused claim changes nothing"
                claim = again
            await on.store.park(claim.lease, at=37.0, restarts=True)
            await on.interrupt(key=f"{began['demo']}.")
            for served in (none, new):  # the second claim is a repetition
                ended = await on.store.claim(session, run_id="r_end", at=38.0, served=served)
                assert isinstance(ended, Claim), "any host with the agent may end an interrupted run"
                assert ended.interrupt is not None
                claim = ended
            await on.commit(claim, "interrupted")
            fresh = await on.start(key=f"{began['demo']}.", served=new, at=50.0)
            await on.store.park(fresh.lease, at=51.0, restarts=True)
            refused_one = await on.store.claim(session, run_id="r_x", at=52.0, served=old)
            assert isinstance(refused_one, NotReady), "a new run has the version of the host that starts it"


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
