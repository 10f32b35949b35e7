"""Sessions with files stay with the nodes of the pool that has the files."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from holdfast.errors import StaleFence
from holdfast.protocol.stopping import Cause
from holdfast.storage.port import Claim, InterruptRequest, NotReady, Parked, RunCommit
from holdfast.storage.postgres import PostgresStore
from tests.storage.postgres.test_races import end_lease, message, run

AGENTS = {"demo": ""}


@asynccontextmanager
async def nodes(url, *pools):
    """One node for each of these pools; None declares no pool."""
    async with AsyncExitStack() as opened:
        stores = [PostgresStore(url, lease_s=30.0, workspace_pool=pool) for pool in pools]
        for n, store in enumerate(stores):
            await store.open(node_id=f"n{n}", at=1.0)
            opened.push_async_callback(store.close)
        yield stores


async def with_files(store, n=0, **more):
    """A session that used files on this node, in a run that has not ended yet."""
    claim = (await store.send(message(n, **more))).claim
    await store.use_workspace(claim.lease)
    return claim


async def ready_at(store, at=9.0):
    return [ready.session for ready in await store.cluster.ready(agents=AGENTS, at=at, limit=9)]


def ended(claim, **more):
    return RunCommit(lease=claim.lease, status="completed", at=5.0, **more)


def test_only_nodes_with_the_files_of_a_session_start_its_runs(postgres_url):
    async def main():
        async with nodes(postgres_url, "a", "a", "b", None) as (one, twin, other, plain):
            claim = await with_files(one)
            session = claim.lease.session
            await one.commit_run(ended(claim))
            for store in (other, plain):
                sent = await store.send(message(2 if store is other else 3))
                assert (sent.disposition, sent.claim) == ("queued", None)
                assert await ready_at(store) == []
                assert await store.claim(session, run_id="r9", at=6.0) == NotReady(waiting=1 if store is other else 2)
            assert await ready_at(twin) == await ready_at(one) == [session]
            taken = await twin.claim(session, run_id="r8", at=6.0)
            assert isinstance(taken, Claim)
            assert (taken.workspace_pool, [m.message_id for m in taken.messages]) == ("a", ["m2"])
            await twin.commit_run(ended(taken))
            assert (await one.send(message(7))).claim is None, "m3 waits before it"
            assert isinstance(await one.claim(session, run_id="r7", at=7.0), Claim)

    run(main)


def test_a_session_of_a_node_that_declares_no_pool_is_tied_to_none(postgres_url):
    async def main():
        async with nodes(postgres_url, None, "b") as (plain, other):
            claim = await with_files(plain)
            await plain.commit_run(ended(claim))
            assert (await other.send(message(2))).claim.workspace_pool is None

    run(main)


def test_the_first_pool_of_a_session_stays_its_pool(postgres_url):
    async def main():
        async with nodes(postgres_url, "a", "b") as (one, other):
            first = await with_files(one)
            cause = Cause(kind="user", reason="enough", at=4.0)
            await other.interrupt(InterruptRequest(principal="p", key="k", cause=cause, at=4.0))
            await one.park(first.lease, at=4.0)
            again = await other.claim(first.lease.session, run_id="r2", at=5.0)
            await other.use_workspace(again.lease)
            assert (await one.find_session("p", "k"))[0] == first.lease.session
            await other.commit_run(RunCommit(lease=again.lease, status="interrupted", at=6.0))
            assert (await other.send(message(3))).claim is None
            assert (await one.claim(first.lease.session, run_id="r4", at=7.0)).workspace_pool == "a"

    run(main)


def test_an_interrupted_run_is_ended_without_its_files_and_the_next_waits_for_them(postgres_url):
    async def main():
        async with nodes(postgres_url, "a", "b") as (one, other):
            claim = await with_files(one)
            session = claim.lease.session
            await one.send(message(1))
            assert await one.park(claim.lease, at=3.0, restarts=True) == Parked(ready=True)
            assert await ready_at(other) == []
            assert await other.claim(session, run_id="r9", at=4.0) == NotReady(waiting=1, busy=True)
            cause = Cause(kind="user", reason="enough", at=4.0)
            await other.interrupt(InterruptRequest(principal="p", key="k", cause=cause, at=4.0))
            assert await ready_at(other) == await ready_at(one) == [session]
            taken = await other.claim(session, run_id="r9", at=4.0)
            assert taken.interrupt.reason == "enough"
            commit = RunCommit(lease=taken.lease, status="interrupted", at=6.0, next_run_id="r10", served=AGENTS)
            committed = await other.commit_run(commit)
            assert (committed.claim, committed.waiting) == (None, 1)
            assert await ready_at(other) == []
            assert await ready_at(one) == [session]

    run(main)


def test_a_rescued_run_that_is_handed_over_keeps_its_mark_when_the_reply_was_lost(postgres_url):
    async def main():
        async with nodes(postgres_url, "a", "a", "b") as (gone, one, other):
            claim = await with_files(gone)
            await gone.close()
            (rescued,) = await other.rescue(at=5.0)
            assert (rescued.workspace_pool, rescued.attempt) == ("a", 2)
            for _ in range(2):
                assert await other.park(rescued.lease, at=5.0, handed_over=True) == Parked(ready=True)
            with pytest.raises(StaleFence):
                await other.append(rescued.lease, [])
            assert await ready_at(other) == []
            taken = await one.claim(claim.lease.session, run_id="r9", at=6.0)
            assert (taken.resumed, taken.handed_over, taken.attempt) == (True, True, 2)

    run(main)


def test_sessions_are_counted_whose_pool_no_live_node_declares(postgres_url):
    async def main():
        async with nodes(postgres_url, "a", "b", None) as (one, other, plain):
            for n in range(3):
                claim = await with_files(one, n, key=f"k{n}")
                await one.commit_run(ended(claim))
            await plain.send(message(5, key="k0"))
            await plain.send(message(6, key="k1"))
            await with_files(other, 7, key="of b")
            assert await plain.cluster.sessions_without_pool() == {}
            epoch = one.cluster.epoch
            end_lease(postgres_url, epoch)
            assert await plain.cluster.sessions_without_pool() == {"a": 2}
            assert await other.cluster.sessions_without_pool() == {"a": 2}
            await other.close()
            await plain.rescue(at=8.0)
            await plain.send(message(9, key="of b", policy="interrupt"))
            assert await plain.cluster.sessions_without_pool() == {"a": 2}, "the run of b was taken over here"

    run(main)


def test_a_run_without_its_lease_ties_no_session(postgres_url):
    async def main():
        async with nodes(postgres_url, "a") as (one,):
            claim = (await one.send(message(0))).claim
            await one.commit_run(ended(claim))
            with pytest.raises(StaleFence):
                await one.use_workspace(claim.lease)
            assert (await one.send(message(1))).claim.workspace_pool is None

    run(main)


def test_a_write_of_another_node_does_not_erase_the_pool(postgres_url):
    """The other node has read the row before the session is tied, and writes it afterwards."""

    async def main():
        async with nodes(postgres_url, "a", "b") as (one, other):
            claim = (await one.send(message(0))).claim
            loop = asyncio.get_running_loop()
            sharing = other.backend._connection._sharing
            lock = sharing.lock

            def lock_later(sessions):
                sharing.lock = lock
                asyncio.run_coroutine_threadsafe(tie(), loop).result(20)
                lock(sessions)

            async def tie():
                await one.use_workspace(claim.lease)

            sharing.lock = lock_later
            assert (await other.send(message(1))).disposition == "queued"
            await one.commit_run(ended(claim))
            assert await ready_at(other) == []
            assert await ready_at(one) == [claim.lease.session]

    run(main)


def test_a_nul_in_a_reason_hides_no_waiting_session(postgres_url):
    async def main():
        async with nodes(postgres_url, None, None) as (one, other):
            claim = (await one.send(message(0))).claim
            await one.park(claim.lease, at=3.0, restarts=True)
            waits = (await one.send(message(5, key="another", room=False))).session
            cause = Cause(kind="user", reason="a\0b\\0 \\u0000", at=4.0)
            await one.interrupt(InterruptRequest(principal="p", key="k", cause=cause, at=4.0))
            assert await ready_at(other) == [claim.lease.session, waits]
            assert (await other.claim(claim.lease.session, run_id="r9", at=5.0)).interrupt.reason == cause.reason

    run(main)


def test_a_run_whose_rescuer_lacks_its_agent_is_judged_by_any_node_that_has_it(postgres_url):
    async def main():
        async with nodes(postgres_url, "a", "a", "b", "b") as (gone, one, stranger, other):
            session = (await with_files(gone)).lease.session
            await gone.close()
            assert await stranger.rescue(at=5.0, served={"another": ""}) == ()
            assert await ready_at(other) == [session], "it may end the run, if that cannot resume"
            taken = await other.claim(session, run_id="r9", at=6.0)
            assert (taken.handed_over, taken.workspace_pool) == (True, "a")
            assert await other.park(taken.lease, at=6.0, handed_over=True) == Parked(ready=True)
            assert await ready_at(other) == [], "it is judged"
            assert (await one.claim(session, run_id="r10", at=7.0)).handed_over

    run(main)
