"""Signals between nodes: they name sessions and nothing else, come after the commit, and outlive a lost connection."""

import asyncio
from typing import Any

import msgspec
import psycopg

from holdfast.protocol.stopping import Cause
from holdfast.storage.port import InterruptRequest, RunCommit
from tests.storage.postgres.test_races import message, nodes, run


class Heard:
    """The signals that a node hears, by kind; every read of the store then sees what they tell about."""

    def __init__(self, store: Any) -> None:
        self.kinds: dict[str, list[int]] = {}
        self._more = asyncio.get_running_loop().create_future()
        store.cluster.signals.listen(self._hear, lambda _: None)

    def _hear(self, hints: Any) -> None:
        for kind, sessions in hints.items():
            self.kinds.setdefault(kind, []).extend(sessions)
        self._more.set_result(None)
        self._more = asyncio.get_running_loop().create_future()

    async def until(self, kind: str) -> list[int]:
        """Return the sessions of the first signals of this kind since the last call."""
        async with asyncio.timeout(20):
            while kind not in self.kinds:
                await self._more
        return self.kinds.pop(kind)


async def connected(stores: Any) -> None:
    async with asyncio.timeout(20):
        while any(store.cluster.signals.problem is not None for store in stores):
            await asyncio.sleep(0.005)


def test_each_kind_of_change_is_signalled_once_it_can_be_read(postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(postgres_url, 2) as (one, two):
            await connected((one, two))
            heard, own = Heard(two), Heard(one)
            claim = (await one.send(message(0))).claim
            session = claim.lease.session
            assert await heard.until("changed") == [session]
            assert await two.cluster.last_seqs([session, 99]) == {session: 2}
            cause = Cause(kind="user", reason="enough", at=4.0)
            await two.interrupt(InterruptRequest(principal="p", key="k", cause=cause, at=4.0))
            assert await own.until("interrupt") == [session]
            assert "ready" not in heard.kinds
            await one.send(message(1))
            heard.kinds.clear()
            await one.commit_run(RunCommit(lease=claim.lease, status="completed", at=9.0))
            assert await heard.until("ready") == [session]
            agents = {"demo": ""}
            assert [ready.session for ready in await two.cluster.ready(agents=agents, at=9.0, limit=9)] == [session]
            assert await two.cluster.ready(agents={"other": ""}, at=9.0, limit=9) == ()

    run(main)


def test_nonsense_is_ignored_and_a_lost_connection_comes_back(postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(postgres_url, 2) as (one, two):
            await connected((one, two))
            heard = Heard(two)
            with psycopg.connect(postgres_url, autocommit=True) as other:
                for payload in ("", "nonsense", "changed x y", "changed -", "changed 7 7"):
                    other.execute("SELECT pg_notify('holdfast', %s)", (payload,))
                assert await heard.until("changed") == [7]
                other.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND application_name = 'holdfast' "
                    "AND (query = 'LISTEN holdfast' OR query LIKE '%pg_notify%')"
                )
                while heard.kinds.get("changed") is None:
                    other.execute("SELECT pg_notify('holdfast', 'changed 8')")
                    await asyncio.sleep(0.02)
            assert set(await heard.until("changed")) == {8}
            claim = (await one.send(message(0))).claim
            assert claim is not None

    run(main)


def test_a_node_that_leaves_tells_the_others(postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(postgres_url, 2) as (leaving, staying):
            await connected((leaving, staying))
            heard = Heard(staying)
            claim = (await leaving.send(message(0))).claim
            assert await staying.cluster.next_lease_end_s() > 1
            assert await staying.cluster.other_nodes() == ("n0",)
            await leaving.close()
            assert await heard.until("ready") == []
            assert await staying.cluster.next_lease_end_s() <= 0
            assert await staying.cluster.other_nodes() == ()
            (mine,) = await staying.rescue(at=5.0)
            assert mine.lease.run_id == claim.lease.run_id

    run(main)


def test_runs_of_agents_that_the_rescuer_does_not_have_are_parked_for_others(postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(postgres_url, 3) as (ended, stranger, friend):
            claim = (await ended.send(message(0))).claim
            await ended.close()
            assert await stranger.rescue(at=5.0, served={"other": ""}) == ()
            agents = {"demo": ""}
            (ready,) = await friend.cluster.ready(agents=agents, at=5.0, limit=9)
            refused = await stranger.claim(ready.session, run_id="r8", at=6.0, served={"other": ""})
            assert refused.busy
            taken = await friend.claim(ready.session, run_id="r9", at=6.0, served=agents)
            assert taken.resumed
            assert taken.handed_over
            assert (taken.lease.run_id, taken.attempt) == (claim.lease.run_id, 2)
            assert await friend.cluster.held() == (taken.lease,)
            assert await stranger.cluster.held() == ()

    run(main)


def test_parked_runs_of_agents_that_a_node_does_not_have_hide_no_waiting_session(postgres_url: str) -> None:
    async def main() -> None:
        async with nodes(postgres_url, 3) as (ended, stranger, friend):
            for n in range(3):
                await ended.send(message(n, key=f"parked{n}"))
            await ended.close()
            assert await stranger.rescue(at=5.0, served={"second": ""}) == ()
            waits = msgspec.structs.replace(message(9, key="waits", room=False), agent="second")
            session = (await friend.send(waits)).session
            ready = await stranger.cluster.ready(agents={"second": ""}, at=6.0, limit=1)
            assert [one.session for one in ready] == [session]

    run(main)
